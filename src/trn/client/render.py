"""A run at a terminal: a bar that says how far it is, and what happened in lines above it.

`RunView` is what is known of the run, pure; `Screen` draws it, ten times a second at most, whatever comes.
"""

import contextlib
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from trn.proto.records import Run

REDRAW_S = 0.2
RATE_OVER_MS, POINT_EVERY_MS = 30_000, 200
MAX_WAITING_LINES = 400  # between two redraws; the log has them all
SHORT_LINE = 2000
BAR_WIDTH, NARROW = 24, 60
WAITING = ("PENDING", "DISPATCHING")

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d (\d\d:\d\d:\d\d),\d{3} ([A-Z]+) ([\w.]+): (.*)")
_STYLES = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "red"}
_STATE_STYLES = {"COMPLETED": "green", "FAILED": "red", "CANCELLED": "yellow", "RUNNING": "cyan"}
_SAID_BY_US = re.compile(r"(completed|failed|cancelled) at step ")


class _Event(msgspec.Struct):
    """As much of an event as is shown. Fields are loose: a `log` event may have any."""

    event: str = ""
    attempt: Any = 0
    timestamp_ms: Any = 0
    step: Any = None
    epoch: Any = None
    end_step: Any = None
    max_steps: Any = None
    name: Any = None
    value: Any = None
    values: Any = None
    rows: Any = None
    path: Any = None
    error: Any = None
    category: Any = None


_DECODER = msgspec.json.Decoder(_Event)


def clean(text: str) -> str:
    """Text without what could move the cursor or recolour the terminal. The last of what a line overwrote itself with."""
    text = _ESCAPES.sub("", text[:SHORT_LINE]).rstrip("\r")
    return _CONTROLS.sub("", text.rpartition("\r")[2].expandtabs(8))


def show_number(value: object) -> str:
    """Four digits that tell; numbers that are none ("nan") are words."""
    if not isinstance(value, int | float):
        return clean(str(value))
    size = abs(value)
    if size >= 1e9 or 0 < size < 1e-4:
        return f"{value:.3e}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


def show_duration(seconds: float) -> str:
    """`0:07`, `12:30`, `3:05:00`, `2 d 3 h`."""
    whole = max(0, round(seconds))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours}:{minutes % 60:02}:{whole % 60:02}"
    return f"{minutes}:{whole % 60:02}"


class RunView:
    """What is known of a run, from its record and its events."""

    def __init__(self, run: "Run") -> None:
        self.run = run
        self.step = run.step
        self.end_step = run.end_step
        self.epoch: int | None = None
        self.loss: object = run.metrics.get("train/loss")
        self.samples_per_s: float | None = None
        self.saved_step: int | None = None
        self.error = ""
        self._attempt = 0
        self._points: deque[tuple[int, int]] = deque()  # (when in ms, step)
        self._last = (0, 0)

    def take_events(self, lines: bytes) -> list[Text]:
        """What of these events belongs above the bar."""
        shown: list[Text] = []
        for line in lines.splitlines():
            with contextlib.suppress(msgspec.MsgspecError):
                event = _DECODER.decode(line)
                if text := self._take(event):
                    shown.append(text)
        return shown

    def take_run(self, run: "Run") -> None:
        self.run = run
        self.end_step = run.end_step or self.end_step
        if run.is_terminal:
            self.step = run.step

    def _take(self, event: _Event) -> Text | None:
        if event.event == "started":
            return self._begin(event)
        if isinstance(event.step, int) and event.event != "checkpoint":
            self._move(event.step, event.timestamp_ms)
        if isinstance(event.epoch, int):
            self.epoch = event.epoch
        match event.event:
            case "metric":
                self._take_values({event.name: event.value})
            case "metrics" if isinstance(event.values, dict):
                self._take_values(event.values)
            case "log" if isinstance(event.end_step, int):
                self.end_step = event.end_step
            case "validation" if isinstance(event.values, dict):
                return self._validation(event)
            case "checkpoint":
                self.saved_step = event.step
            case "failed":
                self.error = clean(str(event.error or ""))
            case "sample" | "video":
                return Text(f"step {event.step}  {event.event} {clean(str(event.path))}", style="dim")
            case _:
                pass
        return None

    def _begin(self, event: _Event) -> Text | None:
        self._points.clear()
        self.error = ""
        if isinstance(event.max_steps, int):
            self.end_step = event.max_steps
        again, self._attempt = self._attempt > 0, event.attempt
        return Text(f"attempt {event.attempt} begins", style="yellow") if again else None

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
        facts = "  ".join(f"{clean(str(name))} {show_number(value)}" for name, value in event.values.items())
        rows = f"  ({event.rows:,} rows)" if isinstance(event.rows, int) else ""
        return Text.assemble(
            (f"step {event.step}", "bold"), "  validation  ", (facts, "green"), (rows, "dim")
        )

    @property
    def steps_per_s(self) -> float | None:
        if not self._points:
            return None
        (first_ms, first), (last_ms, last) = self._points[0], self._last
        if last_ms <= first_ms or last <= first:
            return None
        return (last - first) * 1000 / (last_ms - first_ms)

    @property
    def left_s(self) -> float | None:
        rate = self.steps_per_s
        if rate is None or self.end_step is None or self.run.is_terminal:
            return None
        return max(0.0, (self.end_step - self.step) / rate)

    def facts(self) -> list[str]:
        """What stands beside the bar, the most telling first: a narrow terminal drops the last."""
        facts = [f"{self.step:,}/{self.end_step:,}" if self.end_step else f"step {self.step:,}"]
        if self.loss is not None:
            facts.append(f"loss {show_number(self.loss)}")
        if self.left_s is not None:
            facts.append(f"{show_duration(self.left_s)} left")
        if self.epoch is not None:
            facts.append(f"epoch {self.epoch}")
        if self.samples_per_s is not None:
            facts.append(f"{show_number(self.samples_per_s)} samples/s")
        elif self.steps_per_s is not None:
            facts.append(f"{show_number(self.steps_per_s)} steps/s")
        if self.saved_step is not None:
            facts.append(f"saved {self.saved_step:,}")
        return facts

    def title(self) -> Text:
        run = self.run
        state = "cancelling" if run.is_cancel_wanted and not run.is_terminal else run.state.lower()
        text = Text(no_wrap=True, overflow="ellipsis")
        text.append(run.run_id, style="bold")
        text.append(f"  {state}", style=_STATE_STYLES.get(run.state, "yellow"))
        if run.devices:
            text.append(f" on {', '.join(run.devices)}")
        elif run.state == "RUNNING":
            text.append(" on cpu")
        if run.attempt > 1:
            text.append(f"  attempt {run.attempt}", style="yellow")
        if run.state in WAITING and run.reason:
            text.append(f"  {clean(run.reason)}", style="dim")
        return text

    def draw(self, width: int) -> Group:
        """A line, and the bar once it has begun; never wider than the terminal."""
        if self.run.state in WAITING and not self.step:
            return Group(self.title())
        bar_width = BAR_WIDTH if width >= NARROW else 10
        facts = self.facts()
        while len(facts) > 1 and bar_width + 2 + len("  ".join(facts)) > width - 1:
            facts.pop()
        row = Table.grid(padding=(0, 2))
        bar = ProgressBar(
            total=self.end_step or None,
            completed=min(self.step, self.end_step or self.step),
            width=bar_width,
            pulse=self.end_step is None and not self.run.is_terminal and self.run.state == "RUNNING",
            animation_time=0 if self.run.is_terminal else None,
        )
        row.add_row(bar, Text("  ".join(facts), no_wrap=True, overflow="ellipsis"))
        return Group(self.title(), row)


def show_log_line(line: str) -> Text | None:
    """A line of a worker's log; None for what the bar says already."""
    text = clean(line)
    found = _LOG_LINE.fullmatch(text)
    if found is None:
        return Text(text)
    clock, level, logger, message = found.groups()
    if logger.startswith("gen_worker") and _SAID_BY_US.match(message):
        return None
    shown = Text(f"{clock} ", style="dim")
    shown.append(message, style=_STYLES.get(level, "default"))
    return shown


class LogLines:
    """Bytes of a log -> whole lines."""

    def __init__(self, *, is_begun_in_the_middle: bool = False) -> None:
        self._rest = b""
        self._is_half = is_begun_in_the_middle

    def take(self, data: bytes) -> list[str]:
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > SHORT_LINE * 4:  # one that does not end is shown in parts
            whole.append(self._rest)
            self._rest = b""
        if self._is_half and whole:
            self._is_half = False
            del whole[0]
        return [line.decode(errors="replace") for line in whole]

    def rest(self) -> list[str]:
        rest, self._rest = self._rest, b""
        return [rest.decode(errors="replace")] if rest else []


class Screen:
    """Draws a RunView at a terminal. `redraw` may be called at any rate by one thread; it draws when it is time."""

    def __init__(
        self, view: RunView, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.view = view
        self.console = console or Console(highlight=False)
        self._live: Live | None = None
        self._waiting: deque[Text] = deque()
        self._num_dropped = 0
        self._is_new = True
        self._clock = clock
        self._drawn_s = -1.0

    def start(self) -> None:
        if self._live is None:
            self._live = Live(
                self.view.draw(self.console.width),
                console=self.console,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
                transient=True,
            )
            self._live.start(refresh=True)

    def pause(self) -> None:
        """Take the bar away, so that others may write; lines wait."""
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def add(self, lines: Sequence[Text]) -> None:
        for line in lines:
            if len(self._waiting) >= MAX_WAITING_LINES:
                self._waiting.popleft()
                self._num_dropped += 1
            self._waiting.append(line)
        self._is_new = True

    def changed(self) -> None:
        self._is_new = True

    def redraw(self) -> None:
        """Draw if something is new, and `REDRAW_S` are over since the last time; once a second in any case."""
        if self._live is None:
            return
        since_s = self._clock() - self._drawn_s
        if since_s < (REDRAW_S * 0.9 if self._is_new else 1.0):
            return
        self._is_new = False
        self._flush()
        self._live.update(self.view.draw(self.console.width), refresh=True)
        self._drawn_s = self._clock()

    def _flush(self) -> None:
        if self._num_dropped:
            count, self._num_dropped = self._num_dropped, 0
            self._waiting.appendleft(Text(f"… {count:,} lines more, see trn logs", style="dim"))
        if self._waiting:
            lines = Text("\n").join(self._waiting)
            self._waiting.clear()
            self.console.print(lines, soft_wrap=True)

    def finish(self, took_s: float) -> None:
        """The last lines: what came, how it ended, and what can be done now."""
        self.pause()
        self._flush()
        self.console.print(conclude(self.view, took_s), soft_wrap=True)


def conclude(view: RunView, took_s: float) -> Text:
    """How a run ended, in words."""
    run = view.run
    text = Text(run.run_id, style="bold")
    text.append(f"  {run.state.lower()}", style=_STATE_STYLES.get(run.state, "yellow"))
    where = f" at step {run.step:,}" + (f" of {run.end_step:,}" if run.end_step else "")
    text.append(f"{where}, after {show_duration(took_s)}")
    if view.loss is not None:
        text.append(f", loss {show_number(view.loss)}")
    if run.state == "COMPLETED":
        return text
    reason = clean(run.reason.replace("\n", "; "))
    if reason:
        text.append(f"\n  {reason}")
    if run.state == "FAILED":
        text.append(f"\n  trn logs {run.run_id}", style="dim")
    if view.saved_step is not None:
        text.append(f"\n  trn resume {run.run_id}    goes on from step {view.saved_step:,}", style="dim")
    return text
