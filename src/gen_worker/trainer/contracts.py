"""What passes between the loop and a trainer class, and the hooks of that class. Imports no sibling, torch or pyarrow."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.contract.screen_repr import screen_repr


class StepControlHints(msgspec.Struct, frozen=True, kw_only=True):
    """What a step asks of the loop: emit no metrics now; pause before the next step."""

    skip_cadence_emit: bool = False
    backoff_seconds: float | None = 0.0


class StepResult(msgspec.Struct, gc=False):
    """What `train_step` returns. Metric values may be tensors: they are read only when they are emitted."""

    metrics: Mapping[str, Any] = {}
    debug: Mapping[str, Any] | None = None
    control: StepControlHints | None = None


class SampleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the `sample` hook is asked for."""

    prompts: Sequence[Any] = ()  # texts and objects, as the job has them
    seed: int | None = None


class StopSignal:
    """The flag that the loop reads each step; set by signals and the watcher thread. The first reason stays."""

    __slots__ = ("category", "reason")

    def __init__(self) -> None:
        self.reason: str | None = None
        self.category: Literal["cancelled", "timeout"] = "cancelled"

    def request(self, reason: str, category: Literal["cancelled", "timeout"] = "cancelled") -> None:
        if self.reason is None:
            self.category = category
            self.reason = reason

    def __bool__(self) -> bool:
        return self.reason is not None

    # Both `ctx.is_canceled` and `ctx.is_canceled()` are in use.
    __call__ = __bool__


class Progress:
    """Written by the loop alone."""

    __slots__ = ("epoch", "step")

    def __init__(self) -> None:
        self.step = 0
        self.epoch = 0


class RunArtifacts:
    """Reports files that the author's code writes: `ctx.artifacts`. This one, of a context without a run or of another
    process than the main one, has no folder and reports nothing.
    """

    folder: Path | None = None  # of the run; a file must be inside it
    videos_dir: Path | None = None  # of this attempt
    num_reported: int = 0

    def file(
        self, path: Path | str, *, kind: Literal["file", "sample"] = "file", step: int | None = None
    ) -> None:
        """A whole file, as an `artifact` event; `step` is the present one unless given."""

    def video(self, path: Path | str, *, poster: Path | str | None = None, step: int | None = None) -> None:
        """A whole video, as a `video` event; `poster` is the picture to show before it plays."""

    def warn(self, message: str) -> None:
        """Write a warning to the run's log."""

    def keep(self, step: int, *, metric: tuple[str, float, str] | None = None, saved_step: int = -1) -> None:
        """For the runtime: apply retention after `step`. `saved_step` is being saved."""


class StepContext:
    """Read-only for the trainer class. The runtime advances `step` and `epoch`."""

    __slots__ = (
        "_progress",
        "_stop",
        "artifacts",
        "dataset",
        "device",
        "dtype",
        "job",
        "model_handles",
        "optimizer",
        "rank",
        "scheduler",
        "seed",
        "total_steps",
        "world_size",
    )

    job: TrainingJobSpec
    model_handles: Mapping[str, Any]
    dataset: Any
    optimizer: Any
    scheduler: Any
    device: Any
    dtype: Any
    rank: int
    world_size: int
    seed: int
    artifacts: RunArtifacts
    total_steps: int | None  # of the whole run as planned; None where unknown
    _stop: StopSignal
    _progress: Progress

    def __init__(
        self,
        *,
        job: TrainingJobSpec,
        model_handles: Mapping[str, Any] | None = None,
        dataset: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        device: Any = "cpu",
        dtype: Any = None,
        stop: StopSignal | None = None,
        progress: Progress | None = None,
        rank: int = 0,
        world_size: int = 1,
        seed: int | None = None,
        total_steps: int | None = None,
        artifacts: RunArtifacts | None = None,
    ) -> None:
        set_ = object.__setattr__
        set_(self, "job", job)
        set_(self, "model_handles", dict(model_handles or {}))
        set_(self, "dataset", dataset)
        set_(self, "optimizer", optimizer)
        set_(self, "scheduler", scheduler)
        set_(self, "device", device)
        set_(self, "dtype", dtype)
        set_(self, "rank", rank)
        set_(self, "world_size", world_size)
        set_(self, "seed", job.seed if seed is None else seed)
        set_(self, "total_steps", job.max_steps if total_steps is None else total_steps)
        set_(self, "artifacts", RunArtifacts() if artifacts is None else artifacts)
        set_(self, "_stop", StopSignal() if stop is None else stop)
        set_(self, "_progress", Progress() if progress is None else progress)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"the step context is read-only: {name!r} cannot be set. Keep your own values in the state that configure() returns"
        )

    def __repr__(self) -> str:
        names = ("step", "epoch", "device", "dtype", "rank", "world_size", "optimizer", "scheduler", "job")
        return screen_repr(self, {name: getattr(self, name) for name in names})

    @property
    def progress(self) -> Progress:
        """For the runtime: `step` and `epoch`."""
        return self._progress

    @property
    def step(self) -> int:
        """Steps committed so far."""
        return self._progress.step

    @property
    def epoch(self) -> int:
        """Passes over the data completed so far, from 0."""
        return self._progress.epoch

    @property
    def is_canceled(self) -> StopSignal:
        """True (as a value or a call) once a stop is requested; long hooks may check it and return early."""
        return self._stop


@runtime_checkable
class TrainerPlugin(Protocol):
    """A trainer class: six required hooks, called positionally."""

    def setup(self, ctx: StepContext, /) -> None: ...
    def configure(self, ctx: StepContext, /) -> Any: ...
    def prepare_batch(self, raw_batch: Any, state: Any, ctx: StepContext, /) -> Any: ...
    def train_step(self, prepared_batch: Any, state: Any, ctx: StepContext, /) -> StepResult: ...
    def state_dict(self, state: Any, /) -> dict[str, Any]: ...
    def load_state_dict(self, state: Any, payload: dict[str, Any], ctx: StepContext, /) -> None: ...


REQUIRED_HOOKS = ("setup", "configure", "prepare_batch", "train_step", "state_dict", "load_state_dict")
OPTIONAL_HOOKS = (
    "check_job",
    "save_checkpoint",
    "load_checkpoint",
    "validate_step",
    "test_step",
    "begin_evaluation",
    "end_evaluation",
    "sample",
    "apply_hyperparams",
    "predict",
    "predict_stream",
    "serving_state",
)
