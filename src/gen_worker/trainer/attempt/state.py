"""The state of a run besides the model: step, epoch, metrics, best value. Checkpoints hold it.

Weights, optimizer and schedule are in what the author's `state_dict` returns; `optimizer_state` and `scheduler_state`
read them live. Callbacks keep their own state.
"""

import html
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from gen_worker.contract.screen_repr import Verbatim, screen_repr
from gen_worker.errors import CheckpointError
from gen_worker.trainer.contracts import Progress, StepContext

STATE_VERSION = 1
HISTORY_LENGTH = 1000
MAX_HTML_ROWS = 20

Mode = Literal["min", "max"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MetricsRecord:
    """What `train`, `validate` and `test` return: the newest value of each metric, with step and duration."""

    kind: Literal["train", "validation", "test"]
    step: int
    epoch: int
    metrics: Mapping[str, float]
    rows: int | None = None  # evaluated, or trained on; None where unknown
    duration_s: float = 0.0
    checkpoint: Path | None = None
    stop_reason: str | None = None  # of the callback that stopped training before its last step

    def __getitem__(self, name: str) -> float:
        return self.metrics[name]

    def to_saved(self) -> dict[str, Any]:
        """Of a validation or a test: plain values for a checkpoint."""
        names = ("kind", "step", "epoch", "rows", "duration_s")
        return {**{name: getattr(self, name) for name in names}, "metrics": dict(self.metrics)}

    def __repr__(self) -> str:
        shown = {field.name: getattr(self, field.name) for field in fields(self)}
        return screen_repr(self, {name: value for name, value in shown.items() if value is not None})

    def _repr_html_(self) -> str:
        """What a notebook shows: the metrics as a table."""
        rows = [
            f"<tr><td>{html.escape(name)}</td><td>{value:.6g}</td></tr>"
            for name, value in self.metrics.items()
        ]
        left = len(rows) - MAX_HTML_ROWS
        if left > 0:
            rows = [*rows[:MAX_HTML_ROWS], f"<tr><td colspan=2>and {left} more</td></tr>"]
        why = "" if self.stop_reason is None else f", stopped: {html.escape(self.stop_reason)}"
        head = f"{self.kind}: step {self.step}, epoch {self.epoch}{why}"
        return f"<table><caption>{head}</caption>{''.join(rows)}</table>"


@dataclass(frozen=True, slots=True, kw_only=True)
class BestMetric:
    """The best value so far of the metric that decides which checkpoints to keep."""

    name: str
    value: float
    step: int
    mode: Mode = "min"


@dataclass(slots=True, kw_only=True, repr=False)
class TrainerState:
    """`step` and `epoch` are live; the rest changes only when metrics, validation or a checkpoint are due."""

    progress: Progress = field(default_factory=Progress)
    train_loss: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=HISTORY_LENGTH))
    validation_loss: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=HISTORY_LENGTH))
    metrics: dict[str, float] = field(default_factory=dict)  # the newest value of each
    measured_at: dict[str, int] = field(default_factory=dict)  # the step of each
    best: BestMetric | None = None
    checkpoint: dict[str, Any] | None = None  # path, step, verified of the newest one that is durable
    stop_reason: str | None = None

    _ctx: StepContext | None = None
    _rows_at: Callable[[int], int | None] = lambda _step: None
    _callbacks: Callable[[], Mapping[str, Mapping[str, Any]]] = dict

    def __repr__(self) -> str:
        shown = {
            "step": self.step,
            "epoch": self.epoch,
            "samples_seen": self.samples_seen,
            "train_loss": _history(self.train_loss),
            "validation_loss": _history(self.validation_loss),
            "metrics": self.metrics,
            "best": None if self.best is None else Verbatim(self.best),
            "checkpoint": None if self.checkpoint is None else self.checkpoint.get("path"),
            "stop_reason": self.stop_reason,
        }
        return screen_repr(self, {name: value for name, value in shown.items() if value is not None})

    @property
    def step(self) -> int:
        """Steps committed so far."""
        return self.progress.step

    @property
    def epoch(self) -> int:
        """Passes over the data completed so far."""
        return self.progress.epoch

    @property
    def samples_seen(self) -> int | None:
        """Rows trained on, over all processes, from the data cursor. None where batches have no rows."""
        return self._rows_at(self.step)

    @property
    def early_stopping(self) -> Mapping[str, Any] | None:
        """Best value, patience used and so on, where the run stops early."""
        return self._callbacks().get("EarlyStopping")

    def optimizer_state(self) -> dict[str, Any] | None:
        """The optimizer's own state as it is now."""
        return _state_of(self._ctx and self._ctx.optimizer)

    def scheduler_state(self) -> dict[str, Any] | None:
        """The learning-rate schedule's own state as it is now."""
        return _state_of(self._ctx and self._ctx.scheduler)

    def attach(
        self,
        ctx: StepContext,
        *,
        rows_at: Callable[[int], int | None],
        callbacks: Callable[[], Mapping[str, Mapping[str, Any]]],
    ) -> None:
        """Connect the record to the loop."""
        self.progress, self._ctx, self._rows_at, self._callbacks = ctx.progress, ctx, rows_at, callbacks

    def note(self, values: Mapping[str, float]) -> None:
        """Record metrics of this step, under their reported names."""
        step = self.progress.step
        self.metrics.update(values)
        self.measured_at.update(dict.fromkeys(values, step))
        if "train/loss" in values:
            self.train_loss.append((step, values["train/loss"]))
        if "val/loss" in values:
            self.validation_loss.append((step, values["val/loss"]))

    def note_best(self, name: str, value: float, mode: Mode) -> bool:
        """True, and kept, where `value` is better than all before it."""
        best = self.best
        comparable = best is not None and (best.name, best.mode) == (name, mode)
        if best is not None and comparable and not is_better(value, best.value, mode):
            return False
        if math.isnan(value):
            return False
        self.best = BestMetric(name=name, value=value, step=self.step, mode=mode)
        return True

    def to_saved(self) -> dict[str, Any]:
        """Plain values for a checkpoint, without step and epoch."""
        best = self.best
        return {
            "version": STATE_VERSION,
            "train_loss": [list(point) for point in self.train_loss],
            "validation_loss": [list(point) for point in self.validation_loss],
            "metrics": dict(self.metrics),
            "measured_at": dict(self.measured_at),
            "best": None
            if best is None
            else {"name": best.name, "value": best.value, "step": best.step, "mode": best.mode},
            "checkpoint": None if self.checkpoint is None else dict(self.checkpoint),
            "stop_reason": self.stop_reason,
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """From what `to_saved` returned."""
        if saved.get("version") != STATE_VERSION:
            raise CheckpointError(
                f"the trainer state has version {saved.get('version')!r}, this release reads {STATE_VERSION}:"
                " resume with the release that wrote it"
            )
        for history, name in ((self.train_loss, "train_loss"), (self.validation_loss, "validation_loss")):
            history.clear()
            history.extend((int(step), float(value)) for step, value in saved[name])
        self.metrics = dict(saved["metrics"])
        self.measured_at = dict(saved.get("measured_at", {}))  # older releases did not keep it
        self.best = None if saved["best"] is None else BestMetric(**saved["best"])
        self.checkpoint = saved["checkpoint"]
        self.stop_reason = saved["stop_reason"]


def is_better(value: float, than: float, mode: Mode, min_delta: float = 0.0) -> bool:
    """False for NaN; anything is better than NaN."""
    if math.isnan(value):
        return False
    if math.isnan(than):
        return True
    return value > than + min_delta if mode == "max" else value < than - min_delta


def _history(values: deque[tuple[int, float]]) -> Verbatim | None:
    if not values:
        return None
    step, newest = values[-1]
    return Verbatim(f"<{len(values)} values, {newest:.6g} at step {step}>")


def _state_of(part: Any) -> dict[str, Any] | None:
    state_dict = getattr(part, "state_dict", None)
    return None if state_dict is None else state_dict()
