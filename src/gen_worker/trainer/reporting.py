"""Events v1 of a run, in order. Methods that a step calls only encode and queue a line; `EventLog` writes the file.

Only the first terminal event is written. Lines have a maximum length: a text that is cut is in the process's log in full.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from gen_worker.errors import FAULT_BY_CAUSE, Category, read_cause
from gen_worker.trainer.attempt.failure import describe_failure
from gen_worker.trainer.contracts import StopSignal
from gen_worker.trainer.events.event_lines import EventLine, split_values
from gen_worker.trainer.events.event_log import DiscardedEvents, EventLog

logger = logging.getLogger("gen_worker.events")

SCHEMA_VERSION = "trainer_event.v1"
MAX_ECHOED = 20  # values in a log line


class TrainingReporter:
    """Writes the events of one attempt. Any thread may call any method."""

    def __init__(
        self,
        events_path: Path | str,
        *,
        run_id: str,
        log: EventLog | DiscardedEvents | None = None,
        redact: Callable[[str], str] = str,
        echo_every_s: float | None = None,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        stop: StopSignal | None = None,
    ) -> None:
        """`stop` is what `is_canceled` reads."""
        self._log = log or EventLog(Path(events_path), run_id=run_id)
        self.run_id = run_id
        self.attempt = self._log.attempt
        self._identity = {"nonce": self._log.nonce} if self._log.nonce else {}
        self.stop = stop
        self._redact = redact
        self._echo_every_s = echo_every_s
        self._echo_at: dict[str, float] = {}
        self._clock_ms = clock_ms
        self._terminal_lock = threading.Lock()
        self._terminal: str | None = None
        self._cut: list[EventLine] = []  # lines that were too long, until they are logged
        if self._log.damaged_bytes:
            self.log(f"dropped {self._log.damaged_bytes} bytes after the last whole event", level="warning")

    @property
    def events_path(self) -> Path:
        return self._log.path

    @property
    def reached_step(self) -> int:
        """The last step that an event of the run had when this attempt began."""
        return self._log.reached_step

    @property
    def terminal_event(self) -> str | None:
        """`completed` or `failed` once one was written."""
        return self._terminal

    def is_canceled(self) -> bool:
        return self.stop is not None and self.stop.reason is not None

    @property
    def cancel_reason(self) -> str | None:
        return None if self.stop is None else self.stop.reason

    def started(self, *, run_id: str | None = None, **fields: Any) -> None:
        if run_id not in (None, self.run_id):
            raise ValueError(f"this reporter is of run {self.run_id!r}, not of run {run_id!r}")
        self._log.append_synced(self._line("started", fields))
        self._log_what_was_cut()

    def heartbeat(self, step: int, epoch: int = 0) -> None:
        with self._terminal_lock:  # nothing follows the terminal event
            if self._terminal is None:
                self._log.append(self._line("heartbeat", {"step": step, "epoch": epoch}), may_drop=True)

    def metric(self, name: str, value: float, step: int) -> None:
        self.metrics(step, {name: value})

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Queue one `metric` event, or `metrics` where there are several values. Never blocks on the disk."""
        if self._echo_every_s is not None:
            self._echo(step, values, "metrics")
        shown: Mapping[str, float | str] = values
        if not all(map(math.isfinite, values.values())):
            shown = {name: _json_number(value) for name, value in values.items()}
        log = self._log
        for part in split_values(shown):
            if len(part) == 1:
                ((name, value),) = part.items()
                encode = self._line("metric", {"name": name, "value": value, "step": step})
            else:
                encode = self._line("metrics", {"step": step, "values": part})
            if log.append(encode, may_drop=True) is not None and log.num_dropped and not log.is_behind:
                self._report_dropped()
        if self._cut:
            self._log_what_was_cut()

    def _echo(self, step: int, values: Mapping[str, float], kind: str) -> None:
        """At a terminal: log the metrics now and then."""
        now = time.monotonic()
        if now >= self._echo_at.get(kind, 0.0):
            self._echo_at[kind] = now + (self._echo_every_s or 0.0)
            shown = [f"{name} {value:.6g}" for name, value in islice(values.items(), MAX_ECHOED)]
            if len(values) > MAX_ECHOED:
                shown.append(f"and {len(values) - MAX_ECHOED} more")
            logger.info("step %d  %s", step, "  ".join(shown))

    def validation(self, step: int, values: Mapping[str, float], *, rows: int | None, **fields: Any) -> None:
        if self._echo_every_s is not None:
            self._echo(step, values, "validation")
        shown = {name: _json_number(value) for name, value in values.items()}
        for part in split_values(shown):
            self._log.append(self._line("validation", {"step": step, "rows": rows, "values": part, **fields}))
        self._log_what_was_cut()

    def checkpoint(
        self, path: Path | str, step: int, then: Callable[[], None] | None = None, **fields: Any
    ) -> None:
        """Queue a `checkpoint` event. Once it is synced, `then` is called on the writer's thread."""
        self._log.append_synced(self._line("checkpoint", {"path": str(path), "step": step, **fields}), then)

    def sample(self, path: Path | str, step: int, **fields: Any) -> None:
        self._log.append(self._line("sample", {"path": str(path), "step": step, **fields}))

    def video(self, path: Path | str, step: int, **fields: Any) -> None:
        self._log.append(self._line("video", {"path": str(path), "step": step, **fields}))

    def artifact(self, path: Path | str, step: int, *, kind: str, size_bytes: int) -> None:
        """A file of the author's own."""
        fields = {"path": str(path), "step": step, "kind": kind, "size_bytes": size_bytes}
        self._log.append(self._line("artifact", fields))

    def event(
        self,
        event: str,
        fields: Mapping[str, Any],
        *,
        is_synced: bool = True,
        then: Callable[[], None] | None = None,
    ) -> None:
        """An event of another mode than training. Where it is synced, `then` is called after that, on the writer's thread."""
        if is_synced:
            self._log.append_synced(self._line(event, fields), then)
        else:
            self._log.append(self._line(event, fields), may_drop=True)
        self._log_what_was_cut()

    def log(
        self, message: str, *, level: Literal["info", "warning", "error"] = "info", **fields: Any
    ) -> None:
        """A message for people: an event and a log line. After the terminal event only the log line."""
        with self._terminal_lock:
            if self._terminal is None:
                self._append_log(message, level, fields)
        self._cut.clear()  # the log line below is complete
        logger.log(logging.getLevelNamesMapping()[level.upper()], "%s", self._redact(message))

    def _append_log(self, message: str, level: str, fields: Mapping[str, Any]) -> None:
        self._log.append(self._line("log", {"level": level, "message": self._redact(message), **fields}))

    def completed(self, step: int, final_checkpoint: Path | str | None = None, **fields: Any) -> bool:
        """The terminal event of a completed run; False where there is one already."""
        path = None if final_checkpoint is None else str(final_checkpoint)
        return self._finish("completed", {"step": step, "final_checkpoint": path, **fields})

    def failed(
        self,
        *,
        step: int,
        error: str,
        category: Category | str = Category.TRAIN_STEP,
        cause: str = "",
        fault: str = "",
        values: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> bool:
        """The terminal event of every other attempt; False where there is one already.

        `cause` is an id or a signal's name; without one the category is the cause.
        """
        cause_id, known = read_cause(cause, str(category))
        shown: dict[str, Any] = {
            "step": step,
            "category": str(category),
            "error": self._redact(error),
            "cause": cause_id,
        }
        if fault := fault or FAULT_BY_CAUSE.get(cause_id, ""):
            shown["fault"] = fault
        if known := {**known, **(values or {})}:
            shown["values"] = known
        return self._finish("failed", {**shown, **fields})

    def ended_by(
        self,
        cause: BaseException,
        *,
        phase: Category,
        step: int,
        attempted_step: int,  # noqa: ARG002  (an event has the last committed step)
    ) -> None:
        """`failed`, with category and text of this exception."""
        category, error = describe_failure(cause, phase=phase)
        self.failed(step=step, error=error, category=category)

    def _finish(self, event: str, fields: dict[str, Any]) -> bool:
        with self._terminal_lock:
            if self._terminal is not None:
                return False
            self._report_dropped()
            self._terminal = event
            try:
                self._log.append_last(self._line(event, fields))
            finally:
                self._log_what_was_cut()
            return True

    def _log_what_was_cut(self) -> None:
        """Not while the line is queued: a log handler of the author's may report something itself."""
        while self._cut:
            line = self._cut.pop()
            for name, value in line.whole.items():
                logger.warning("the %r event was too long; its %s in full: %s", line.event, name, value)

    def _report_dropped(self) -> None:
        count = self._log.take_num_dropped()
        if count:
            message = f"{count} metric events were not written: the disk was slower than the loop"
            self._append_log(message, "warning", {"num_dropped": count})

    def _line(self, event: str, fields: Mapping[str, Any]) -> Callable[..., bytes]:
        head = {
            "schema_version": SCHEMA_VERSION,
            "event": event,
            "seq": 0,
            "run_id": self.run_id,
            "attempt": self.attempt,
            "timestamp_ms": self._clock_ms(),
            **self._identity,
        }
        return EventLine(head, fields, self._cut.append).encode

    def flush(self) -> None:
        """Write everything queued; OSError where the disk fails."""
        self._log.flush()

    def close(self) -> None:
        """Write everything and release the file. No event can follow."""
        self._log.close()


def _json_number(value: float) -> float | str:
    """NaN and infinities as strings: JSON has no numbers for them."""
    if math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
