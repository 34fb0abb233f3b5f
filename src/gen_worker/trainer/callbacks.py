"""Callbacks: what may look on and ask for something, at published moments, in one total order.

    on_train_begin
    ├── on_epoch_begin                     before the first batch of an epoch
    │   ├── on_batch_begin                 the batch is there, `prepare_batch` comes next
    │   ├── on_batch_end                   the step is committed
    │   ├── on_metrics                     the step's metrics were emitted
    │   ├── on_validation_begin
    │   ├── on_validation_end              then on_metrics with the val/ values
    │   └── on_epoch_end                   before the checkpoint of the same step, so that it is saved with it
    ├── on_checkpoint                      a checkpoint is durable and was read back
    └── on_train_end | on_exception        exactly one of the two, last

Within one moment callbacks are called in the order in which they were given. `docs/callbacks.md` tells the rest.
"""

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gen_worker.errors import TrainStepError, WorkerError
from gen_worker.trainer.contracts import (
    EarlyStoppingSpec,
    StepContext,
    StepResult,
    TrainerPlugin,
    TrainingJobSpec,
)
from gen_worker.trainer.state import MetricsRecord, Mode, TrainerState, is_better

if TYPE_CHECKING:
    from gen_worker.trainer.artifacts import SavedCheckpoint

logger = logging.getLogger("gen_worker.callbacks")

HOOKS = (
    "on_train_begin",
    "on_epoch_begin",
    "on_batch_begin",
    "on_batch_end",
    "on_metrics",
    "on_validation_begin",
    "on_validation_end",
    "on_epoch_end",
    "on_checkpoint",
    "on_train_end",
    "on_exception",
)


@dataclass(slots=True, kw_only=True)
class RunHandle:
    """What a callback may read, and what it may ask for. The same object during a whole attempt."""

    job: TrainingJobSpec
    ctx: StepContext
    trainer: TrainerPlugin
    state: TrainerState
    model_state: Any  # what the author's `configure` returned
    folder: Path  # of the run's artifacts; loggers write below it
    end_step: int | None = None
    steps_per_epoch: int | None = None

    # What the loop lends; a callback uses the methods below.
    emit: Callable[[Mapping[str, float]], None] = lambda _values: None
    tell: Callable[[str, str], None] = lambda _message, _level: None
    any_of_all: Callable[[bool], bool] = bool
    is_checkpoint_due: bool = False
    rollback: tuple[Mapping[str, Any] | None, int] | None = None

    @property
    def is_main(self) -> bool:
        """True in the one process that writes. What goes to a file, a screen or a server belongs there."""
        return self.ctx.rank == 0

    def report(self, values: Mapping[str, float]) -> None:
        """Emit metrics of the current step, as an event and to the other callbacks. Any process may call it."""
        self.emit(values)

    def log(self, message: str, level: Literal["info", "warning", "error"] = "info") -> None:
        """A sentence for people: a `log` event and a line of the worker's log."""
        if self.is_main:
            self.tell(message, level)

    def stop(self, reason: str) -> None:
        """End training after this step as if it were the last: final checkpoint, `completed` with the reason.

        With several processes every one of them must ask for it at the same step.
        """
        if self.state.stop_reason is None:
            self.state.stop_reason = reason

    def save_checkpoint(self) -> None:
        """Save a checkpoint at the end of this step, whatever the cadence says."""
        self.is_checkpoint_due = True

    def roll_back(self, payload: Mapping[str, Any] | None = None, *, step: int = 0) -> None:
        """After this batch, go back to `payload`, what the author's `state_dict` returned at `step`, or without one
        to the newest checkpoint, and go on with the next batch: what was trained on since is skipped for good.

        Every process must ask for it at the same step.
        """
        self.rollback = (payload, step)

    def any_process(self, flag: bool) -> bool:
        """True in every process if any of them says True. A collective call: all must make it at the same step."""
        return self.any_of_all(flag)


class Callback:
    """Override what you need: a hook that is not overridden is never called.

    Public attributes that changed since training began are saved with every checkpoint and restored on resume; a
    name with a leading underscore is yours alone. Override `state_dict` and `load_state_dict` for another choice.
    """

    def on_train_begin(self, run: RunHandle) -> None:
        """The state is ready, restored if the run resumes (`run.state.step` is then above 0)."""

    def on_epoch_begin(self, run: RunHandle) -> None:
        """Not called again where a run resumes in the middle of an epoch."""

    def on_batch_begin(self, run: RunHandle, batch: Any) -> None:
        """`batch` is the raw batch. Overriding this costs a call per step."""

    def on_batch_end(self, run: RunHandle, batch: Any, result: StepResult) -> None:
        """The step is committed. Reading a tensor in `result` waits for the device."""

    def on_metrics(self, run: RunHandle, values: Mapping[str, float]) -> None:
        """`values` were emitted for `run.state.step`, under their reported names."""

    def on_validation_begin(self, run: RunHandle) -> None: ...

    def on_validation_end(self, run: RunHandle, record: MetricsRecord) -> None: ...

    def on_epoch_end(self, run: RunHandle) -> None: ...

    def on_checkpoint(self, run: RunHandle, checkpoint: "SavedCheckpoint") -> None:
        """Called in the main process only; `checkpoint.step` may be some steps back."""

    def on_train_end(self, run: RunHandle) -> None:
        """Training reached its end; the final checkpoint is durable."""

    def on_exception(self, run: RunHandle, error: BaseException) -> None:
        """Training ends with `error`, which may be a stop request."""

    def state_dict(self) -> dict[str, Any] | None:
        """What a checkpoint keeps of this callback: None, for what the class's docstring says."""
        return None

    def load_state_dict(self, payload: Mapping[str, Any]) -> None:
        """Put back what a checkpoint kept. Settings given to the constructor stay as they were given."""
        for name, value in payload.items():
            setattr(self, name, value)


class EarlyStopping(Callback):
    """Ends training when a metric has not improved for `patience` of its reports in a row."""

    def __init__(
        self, metric: str = "val/loss", mode: Mode = "min", patience: int = 3, min_delta: float = 0.0
    ) -> None:
        self.metric = metric
        self.mode: Mode = mode
        self.patience = patience
        self.min_delta = min_delta
        self.best: float | None = None
        self.best_step = 0
        self.num_without_improvement = 0

    @classmethod
    def from_spec(cls, spec: EarlyStoppingSpec) -> "EarlyStopping":
        return cls(metric=spec.metric, mode=spec.mode, patience=spec.patience, min_delta=spec.min_delta)

    def on_metrics(self, run: RunHandle, values: Mapping[str, float]) -> None:
        if self.metric not in values:
            return
        value = values[self.metric]
        if self.best is None or is_better(value, self.best, self.mode, self.min_delta):
            self.best, self.best_step, self.num_without_improvement = value, run.state.step, 0
            return
        self.num_without_improvement += 1
        if self.num_without_improvement >= self.patience:
            run.stop(
                f"{self.metric} did not improve on {self.best:.6g} (step {self.best_step}) in"
                f" {self.num_without_improvement} reports"
            )

    def on_validation_end(self, run: RunHandle, record: MetricsRecord) -> None:  # noqa: ARG002
        if self.metric.startswith("val/") and self.metric not in record.metrics:
            raise TrainStepError(
                f"validation gave no {self.metric!r}, which early stopping watches; it gave"
                f" {', '.join(record.metrics) or 'nothing'}: name one of these as early_stopping.metric"
            )


Hook = Callable[..., None]


class CallbackList:
    """Calls each hook of those callbacks that override it, in order; names the one that raises."""

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        self._callbacks = tuple(callbacks)
        self._names = _unique_names(self._callbacks)
        self._settings = [_plain_attributes(callback) for callback in self._callbacks]
        self._skipped: set[str] = set()
        self.hooks: dict[str, tuple[tuple[str, Hook], ...]] = {
            hook: tuple(
                (name, getattr(callback, hook))
                for name, callback in zip(self._names, self._callbacks, strict=True)
                if _overrides(callback, hook)
            )
            for hook in HOOKS
        }

    def __iter__(self) -> Any:
        return iter(self._callbacks)

    @property
    def has_batch_hooks(self) -> bool:
        return bool(self.hooks["on_batch_begin"] or self.hooks["on_batch_end"])

    def call(self, hook: str, *args: Any) -> None:
        for name, function in self.hooks[hook]:
            try:
                function(*args)
            except WorkerError:
                raise  # it says itself what is wrong
            except Exception as error:
                raise _named(error, name, hook) from error

    def function(self, hook: str) -> Hook:
        """`call` of one hook as a function without detours, for every batch."""
        bound = self.hooks[hook]
        if not bound:
            return lambda *_: None
        if len(bound) > 1:
            return partial(self.call, hook)
        ((name, function),) = bound

        def call_one(*args: Any) -> None:
            try:
                function(*args)
            except WorkerError:
                raise
            except Exception as error:
                raise _named(error, name, hook) from error

        return call_one

    def call_all(self, hook: str, *args: Any) -> list[BaseException]:
        """For the last call of all: one that raises keeps none of the others from theirs."""
        faults: list[BaseException] = []
        for name, function in self.hooks[hook]:
            try:
                function(*args)
            except Exception as error:
                logger.exception("the callback %s.%s raised", name, hook)
                error.add_note(f"in the callback {name}.{hook}")
                faults.append(error)
        return faults

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """By name; only of callbacks that have something to keep."""
        saved: dict[str, dict[str, Any]] = {}
        for name, callback, settings in zip(self._names, self._callbacks, self._settings, strict=True):
            own = callback.state_dict()
            state = self._changed(name, callback, settings) if own is None else dict(own)
            if state:
                saved[name] = state
        return saved

    def load_state_dict(self, saved: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Restore each by its name; returns the names that are saved and not here any more."""
        for name, callback in zip(self._names, self._callbacks, strict=True):
            if name in saved:
                callback.load_state_dict(saved[name])
        return [name for name in saved if name not in self._names]

    def _changed(self, name: str, callback: Callback, settings: Mapping[str, Any]) -> dict[str, Any]:
        changed = {}
        for attribute, value in vars(callback).items():
            if attribute.startswith("_") or callable(value):
                continue
            if attribute in settings and _is_same(settings[attribute], value):
                continue
            if _is_plain(value):
                changed[attribute] = value
            elif f"{name}.{attribute}" not in self._skipped:
                self._skipped.add(f"{name}.{attribute}")
                logger.warning(
                    "%s.%s is a %s, which a checkpoint cannot hold: it will not be restored on resume (begin its name"
                    " with an underscore to say that this is meant)",
                    name,
                    attribute,
                    type(value).__name__,
                )
        return changed


def _named(error: Exception, name: str, hook: str) -> TrainStepError:
    return TrainStepError(f"the callback {name}.{hook} raised {type(error).__name__}: {error}")


def _overrides(callback: Callback, hook: str) -> bool:
    own = getattr(callback, hook, None)
    return own is not None and getattr(own, "__func__", own) is not getattr(Callback, hook)


def _unique_names(callbacks: Sequence[Callback]) -> list[str]:
    names: list[str] = []
    for callback in callbacks:
        name = type(callback).__name__
        number = sum(taken.partition("#")[0] == name for taken in names) + 1
        names.append(name if number == 1 else f"{name}#{number}")
    return names


def _plain_attributes(callback: Callback) -> dict[str, Any]:
    return {
        name: copy.deepcopy(value)
        for name, value in vars(callback).items()
        if not name.startswith("_") and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    """What a checkpoint can hold: plain values, arrays and tensors, and collections of these."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return True
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if type(value) in (list, tuple):
        return all(_is_plain(item) for item in value)
    return type(value).__name__ in ("Tensor", "ndarray")


def _is_same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    try:
        return bool(one == other)
    except (
        ValueError,
        RuntimeError,
    ):  # arrays and tensors of several values: cheaper to save than to compare
        return False
