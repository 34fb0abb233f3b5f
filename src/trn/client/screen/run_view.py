"""What is known of a followed run, and how that looks at a terminal: a title, a bar, and lines about what happened."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trn.client.screen.cells import wrap
from trn.client.screen.figures import show_duration, show_number, show_rate
from trn.client.screen.worker_log import Line
from trn.core.cause_words import say_outlook, say_what
from trn.core.runs import SERVER
from trn.core.terminal_text import clean, without_copies

if TYPE_CHECKING:
    from trn.proto.records import Run

RATE_OVER_MS, POINT_EVERY_MS = 30_000, 200
BAR_WIDTH, NARROW = 24, 60
WAITING = ("PENDING", "DISPATCHING")
MAX_REASON_LINES = 12  # of an error: `trn why` and the log have all
STATE_STYLES = {"COMPLETED": "green", "FAILED": "red", "CANCELLED": "yellow", "RUNNING": "cyan"}


class _Event(msgspec.Struct):
    """As much of an event as is shown. Fields are loose: a `log` event may have any."""

    event: str = ""
    attempt: Any = 0
    timestamp_ms: Any = 0
    step: Any = None
    epoch: Any = None
    batch: Any = None
    epochs: Any = None
    steps_per_epoch: Any = None
    rows_per_step: Any = None
    end_step: Any = None
    max_steps: Any = None
    name: Any = None
    value: Any = None
    values: Any = None
    rows: Any = None
    path: Any = None
    error: Any = None
    category: Any = None
    # Of a model server.
    url: Any = None
    bearer_file: Any = None
    version: Any = None
    action: Any = None
    number: Any = None
    percent: Any = None
    by: Any = None
    words: Any = None
    reason: Any = None


_DECODER = msgspec.json.Decoder(_Event)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where in the data a step is, as the worker said when it began or was rolled back; counted from 0."""

    step: int
    epoch: int
    batch: int

    def epoch_of(self, step: int, steps_per_epoch: int) -> int:
        """The epoch that this step belongs to, counted from 1."""
        batch = self.batch + step - self.step
        return max(1, self.epoch - (-batch // steps_per_epoch))


class RunView:
    """What is known of a run, from its record and its events."""

    def __init__(self, run: "Run", clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000) -> None:
        self.run = run
        self.step = run.step
        self.end_step = run.end_step
        self.loss: object = run.metrics.get("train/loss")
        self.samples_per_s: float | None = None
        self.saved_step: int | None = None
        self.absence = ""  # why there is no news, where no daemon answers
        self._clock_ms = clock_ms
        self._attempt = 0
        self._num_told = 0  # attempts whose end was told
        self._error = ""
        self._heard_epoch: int | None = None
        self._place: _Place | None = None
        self._epochs: int | None = None
        self._steps_per_epoch: int | None = None
        self._rows_per_step: int | None = None
        self._points: deque[tuple[int, int]] = deque()  # (when in ms, step)
        self._last = (0, 0)
        self._serves = ""  # which model answers
        self._figures: Mapping[Any, Any] = {}  # of its requests

    def take_events(self, lines: bytes) -> list[Line]:
        """What of these events belongs above the bar."""
        shown: list[Line] = []
        for line in lines.splitlines():
            with contextlib.suppress(msgspec.MsgspecError):
                event = _DECODER.decode(line)
                at_ms = event.timestamp_ms if isinstance(event.timestamp_ms, int) else 0
                shown += [Line(text=text, at_ms=at_ms, is_event=True) for text in self._take(event)]
        return shown

    def take_run(self, run: "Run") -> list[Line]:
        """What of this change belongs above the bar."""
        self.run = run
        self.end_step = run.end_step or self.end_step
        if run.is_terminal:
            self.step = run.step
        if run.state != "PENDING" or not run.cause.is_retry or run.attempt <= self._num_told:
            return []
        self._points.clear()
        self._num_told = run.attempt
        told = Text(_ended(run.attempt, run.reason), style="yellow")
        return [Line(text=told, at_ms=run.updated_ms, is_event=True)]

    def _take(self, event: _Event) -> list[Text]:
        if event.event == "started":
            return self._begin(event)
        if event.event == "log":
            self._take_place(event)
        if isinstance(event.step, int) and event.event != "checkpoint":
            self._move(event.step, event.timestamp_ms)
        match event.event:
            case "metric":
                self._take_values({event.name: event.value})
            case "metrics" if isinstance(event.values, dict):
                self._take_values(event.values)
            case "heartbeat" if isinstance(event.epoch, int):
                self._heard_epoch = event.epoch + 1
            case "validation" if isinstance(event.values, dict):
                return [self._validation(event)]
            case "checkpoint":
                self.saved_step = event.step
            case "failed":
                self._error = clean(str(event.error or "").replace("\n", "; "))
            case "ready" | "promoted" | "promotion_refused" | "feedback_due" if self.run.kind == SERVER:
                return [Text(line, style=style) for line, style in self._server_news(event)]
            case "request_stats" if isinstance(event.values, dict):
                self._figures = event.values
            case "sample" | "video":
                return [Text(f"step {event.step}  {event.event} {clean(str(event.path))}", style="dim")]
            case _:
                pass
        return []

    def _server_news(self, event: _Event) -> list[tuple[str, str]]:
        """Lines and their style."""
        version = clean(_label(event.version))
        match event.event:
            case "ready":
                self._serves = version
                secret = (
                    f"; requests need the secret in {clean(str(event.bearer_file))}"
                    if event.bearer_file
                    else ""
                )
                return [(f"{version} answers at {clean(str(event.url))}{secret}", "green")]
            case "promoted":
                self._serves = version
                who = f" by {clean(str(event.by))}" if event.by else ""
                what = (
                    f"{version} answers"
                    if event.action in ("promote", "rollback")
                    else f"{event.action}: {version} answers"
                )
                return [(f"promotion {event.number}{who}: {what}", "green")]
            case "promotion_refused":
                return [(f"promotion {event.number} refused: {version}: {clean(str(event.words))}", "yellow")]
            case _:
                return [(f"feedback: {event.rows} new rows; the next run is submitted", "cyan")]

    def _begin(self, event: _Event) -> list[Text]:
        self._points.clear()
        self._place = None
        if isinstance(event.max_steps, int):
            self.end_step = event.max_steps
        before, self._attempt = self._attempt, event.attempt
        error, self._error = self._error, ""
        if before == 0:
            return []
        told = []
        if error and isinstance(before, int) and before > self._num_told:
            self._num_told = before
            told.append(Text(_ended(before, error), style="yellow"))
        return [*told, Text(f"attempt {event.attempt} begins", style="yellow")]

    def _take_place(self, event: _Event) -> None:
        if isinstance(event.end_step, int):
            self.end_step = event.end_step
        if all(isinstance(value, int) for value in (event.step, event.epoch, event.batch)):
            self._place = _Place(step=event.step, epoch=event.epoch, batch=event.batch)
            self._points.clear()  # a rollback is no speed
        if isinstance(event.steps_per_epoch, int) and event.steps_per_epoch > 0:
            self._steps_per_epoch = event.steps_per_epoch
            self._epochs = event.epochs if isinstance(event.epochs, int) else None
        if isinstance(event.rows_per_step, int):
            self._rows_per_step = event.rows_per_step

    def _move(self, step: int, when_ms: object) -> None:
        self.step = step
        if not isinstance(when_ms, int) or when_ms <= 0:
            return
        points, self._last = self._points, (when_ms, step)
        if not points or when_ms - points[-1][0] >= POINT_EVERY_MS:
            points.append(self._last)
        while len(points) > 1 and when_ms - points[0][0] > RATE_OVER_MS:
            points.popleft()

    def _take_values(self, values: dict[Any, Any]) -> None:
        loss = values.get("train/loss")
        if loss is not None:
            self.loss = loss
        rate = values.get("throughput/samples_per_s")
        if isinstance(rate, int | float):
            self.samples_per_s = float(rate)

    def _validation(self, event: _Event) -> Text:
        facts = _name_values(event.values)
        rows = f"  ({event.rows:,} rows)" if isinstance(event.rows, int) else ""
        return Text.assemble(
            (f"step {event.step}", "bold"), "  validation  ", (facts, "green"), (rows, "dim")
        )

    @property
    def epoch(self) -> int | None:
        """Which epoch the newest step belongs to, counted from 1. What a heartbeat said is old by then."""
        if self._place is not None and self._steps_per_epoch is not None:
            return self._place.epoch_of(self.step, self._steps_per_epoch)
        return self._heard_epoch if self._place is None else None

    @property
    def steps_per_s(self) -> float | None:
        """None where it does not move, or where that is unknown."""
        if not self._points or self.run.state in WAITING or self.run.is_terminal or self.absence:
            return None
        (first_ms, first), (last_ms, last) = self._points[0], self._last
        if last_ms <= first_ms or last <= first:
            return None
        return (last - first) * 1000 / (last_ms - first_ms)

    def facts(self) -> list[str]:
        """What stands beside the bar, the most telling first: a narrow terminal drops the last."""
        if self.run.kind == SERVER:
            return self._server_facts()
        facts = [f"{self.step:,}/{self.end_step:,}" if self.end_step else f"step {self.step:,}"]
        rate = self.steps_per_s
        if self.loss is not None:
            facts.append(f"loss {_value(self.loss)}")
        if rate is not None and self.end_step is not None:
            facts.append(f"{show_duration((self.end_step - self.step) / rate)} left")
        if self.epoch is not None and self._epochs != 1:
            facts.append(f"epoch {self.epoch:,}" + (f"/{self._epochs:,}" if self._epochs else ""))
        if rate is not None and self.samples_per_s is not None:
            facts.append(f"{show_rate(self.samples_per_s)} samples/s")
        elif rate is not None and self._rows_per_step is not None:
            facts.append(f"{show_rate(rate * self._rows_per_step)} samples/s")
        elif rate is not None:
            facts.append(f"{show_rate(rate)} steps/s")
        if self.saved_step is not None:
            facts.append(f"saved {self.saved_step:,}")
        return facts

    def _server_facts(self) -> list[str]:
        def figure(name: str) -> float | None:
            value = self._figures.get(f"serve/{name}")
            return float(value) if isinstance(value, int | float) else None

        rate, facts = figure("requests_per_s"), [self._serves] if self._serves else []
        if rate is None:
            return facts or ["starting"]
        facts.append(f"{show_rate(rate)} requests/s")
        for name in ("p50", "p99"):
            if rate and (value := figure(f"{name}_ms")) is not None:
                facts.append(f"{name} {show_number(value)} ms")
        if errors := figure("errors_per_s"):
            facts.append(f"{show_rate(errors)} errors/s")
        if refused := figure("refused_per_s"):
            facts.append(f"{show_rate(refused)} refused/s")
        return facts

    def title(self) -> Text:
        run = self.run
        state = "cancelling" if run.is_cancel_wanted and not run.is_terminal else run.state.lower()
        text = Text(no_wrap=True, overflow="ellipsis")
        text.append(run.run_id, style="bold")
        text.append(f"  {state}", style=STATE_STYLES.get(run.state, "yellow"))
        if run.devices:
            text.append(f" on {', '.join(run.devices)}")
        elif not run.needs.is_local:
            text.append(f" in {run.needs.pool}")
        elif run.state == "RUNNING":
            text.append(" on cpu")
        if run.attempt > 1 and run.state not in WAITING:
            text.append(f"  attempt {run.attempt}", style="yellow")
        if run.state in WAITING and run.reason:
            text.append(f"  {self._waits_for()}", style="dim")
        return text

    def _waits_for(self) -> str:
        """Why it waits; why the attempt before ended stands in a line above."""
        cause = self.run.cause
        if not cause.is_retry:
            return clean(self.run.reason)
        left_s = (cause.next_attempt_ms - self._clock_ms()) / 1000
        return (
            f"attempt {self.run.attempt + 1} in {show_duration(left_s)}" if left_s > 0 else say_outlook(cause)
        )

    def draw(self, width: int) -> Group:
        """A line, and the bar once it has begun; never wider than the terminal."""
        parts: list[RenderableType] = [self.title()]
        if self.run.state not in WAITING or self.step:
            parts.append(self._bar(width))
        if self.absence:
            parts.append(Text(self.absence, style="yellow", no_wrap=True, overflow="ellipsis"))
        return Group(*parts)

    def _bar(self, width: int) -> Table:
        bar_width = BAR_WIDTH if width >= NARROW else 10
        facts = self.facts()
        if self.run.kind == SERVER:
            bar_width = 0  # it has no end
        while len(facts) > 1 and bar_width + 2 + len("  ".join(facts)) > width - 1:
            facts.pop()
        row = Table.grid(padding=(0, 2))
        if not bar_width:
            row.add_row(Text("  ".join(facts), no_wrap=True, overflow="ellipsis"))
            return row
        bar = ProgressBar(
            total=self.end_step or None,
            completed=min(self.step, self.end_step or self.step),
            width=bar_width,
            pulse=self.end_step is None and self.run.state == "RUNNING" and not self.absence,
            animation_time=0 if self.run.is_terminal else None,
        )
        row.add_row(bar, Text("  ".join(facts), no_wrap=True, overflow="ellipsis"))
        return row


def _ended(attempt: object, words: str) -> str:
    return f"attempt {attempt} ended: {clean(without_copies(words))}"


def _label(version: object) -> str:
    """`mnist@300`, of what an event says of a model version."""
    found = version if isinstance(version, Mapping) else {}
    return f"{found.get('run_id')}@{found.get('step')}" if found else ""


def _value(value: object) -> str:
    """Numbers that are none ("nan") are words."""
    return show_number(value) if isinstance(value, int | float) else clean(str(value))


def _name_values(values: Mapping[str, object]) -> str:
    return "  ".join(f"{clean(str(name))} {_value(value)}" for name, value in values.items())


def conclude(view: RunView, took_s: float, width: int = 80) -> Text:
    """How a run ended, in words. Its reason is wrapped between words."""
    run = view.run
    text = Text()
    text.append(run.run_id, style="bold")
    text.append(f"  {run.state.lower()}", style=STATE_STYLES.get(run.state, "yellow"))
    where = f" at step {run.step:,}" + (f" of {run.end_step:,}" if run.end_step else "")
    if run.kind == SERVER:
        where = ""
    text.append(f"{where}, after {show_duration(took_s)}")
    if view.loss is not None:
        text.append(f", loss {_value(view.loss)}")
    if run.state == "COMPLETED":
        if run.stop_reason:
            text.append(f"\n  stopped early: {clean(run.stop_reason)}")
        tested = {name: value for name, value in sorted(run.metrics.items()) if name.startswith("test/")}
        if tested:
            text.append(f"\n  test  {_name_values(tested)}", style="green")
        return text
    is_known = run.cause.id or run.cause.values
    reasons = [say_what(run.cause), say_outlook(run.cause)] if is_known else [run.reason]
    parts = [part for reason in filter(None, reasons) for part in reason.splitlines()]
    if len(parts) > MAX_REASON_LINES:
        parts = [*parts[:MAX_REASON_LINES], "…"]
    for part in parts:
        lines = wrap(clean(part), width - 2, indent=2 + len(part) - len(part.lstrip()))
        text.append("".join(f"\n  {line}" for line in lines))
    if run.state == "FAILED":
        text.append(f"\n  trn logs {run.run_id}", style="dim")
    if view.saved_step is not None:
        text.append(f"\n  trn resume {run.run_id}    continues from step {view.saved_step:,}", style="dim")
    return text
