"""Protocols of the loop's reporter, artifact writer and uploader.

The Plain ones are those of the original library: a fake in a test needs ten lines and no base class. The Loop ones have
more methods, for saves in the background. Our classes satisfy both; `plain_parts` adapts the first to the second.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from gen_worker.errors import Category
from gen_worker.trainer.artifacts import CheckpointContent, SavedCheckpoint
from gen_worker.trainer.contracts import StepContext, StopSignal, TrainerPlugin


class PlainReporter(Protocol):
    """It may also have a `cancel_reason`."""

    def started(self, *, run_id: str) -> object: ...
    def metric(self, *, name: str, value: float, step: int) -> object: ...
    def checkpoint(self, *, path: str, step: int) -> object: ...
    def sample(self, *, path: str, step: int) -> object: ...
    def completed(self, *, step: int, final_checkpoint: str | None) -> object: ...
    def failed(self, *, step: int, error: str) -> object: ...
    def is_canceled(self) -> bool: ...


class PlainArtifactWriter(Protocol):
    """Each call returns when its files are written. It calls the author's own hooks itself."""

    def write_checkpoint(
        self,
        *,
        step: int,
        state_payload: dict[str, Any],
        trainer: TrainerPlugin,
        state: Any,
        ctx: StepContext,
    ) -> Path | str: ...
    def write_samples(self, *, step: int, state: Any, ctx: StepContext) -> Sequence[Path | str]: ...
    def finalize(
        self, *, state_payload: dict[str, Any], trainer: TrainerPlugin, state: Any, ctx: StepContext
    ) -> Path | str | None: ...


class PlainUploader(Protocol):
    """Gets metrics, checkpoints and samples of a cadence; the final checkpoint is in `completed`."""

    def upload_metrics(self, *, metrics: Mapping[str, float], step: int) -> object: ...
    def upload_checkpoint(self, *, local_path: str, step: int) -> object: ...
    def upload_sample(self, *, local_path: str, step: int) -> object: ...


class LoopReporter(Protocol):
    stop: StopSignal | None  # what `is_canceled` reads

    def started(self, *, run_id: str, **fields: Any) -> None: ...
    def metrics(self, step: int, values: Mapping[str, float]) -> None: ...
    def validation(
        self, step: int, values: Mapping[str, float], *, rows: int | None, **fields: Any
    ) -> None: ...
    def checkpoint(
        self, path: Path | str, step: int, then: Callable[[], None] | None = None, **fields: Any
    ) -> None:
        """`then` is called once the event is durable."""

    def sample(self, path: Path | str, step: int, **fields: Any) -> None: ...
    def video(self, path: Path | str, step: int, **fields: Any) -> None: ...
    def log(
        self, message: str, *, level: Literal["info", "warning", "error"] = "info", **fields: Any
    ) -> None: ...
    def completed(self, step: int, final_checkpoint: Path | str | None = None, **fields: Any) -> bool: ...
    def ended_by(self, cause: BaseException, *, phase: Category, step: int, attempted_step: int) -> None:
        """The terminal event after an exception in `attempted_step`; `step` was committed."""

    def flush(self) -> None: ...


class LoopArtifactWriter(Protocol):
    @property
    def is_saving(self) -> bool: ...

    def begin_checkpoint(
        self, content: CheckpointContent, *, trainer: TrainerPlugin, state: Any, ctx: StepContext
    ) -> None: ...
    def poll(self) -> list[SavedCheckpoint]: ...
    def wait(self) -> list[SavedCheckpoint]: ...
    def has_sample(self, step: int) -> bool: ...
    def write_samples(self, *, step: int, state: Any, ctx: StepContext) -> Sequence[Path | str]: ...


class LoopUploader(Protocol):
    """No call waits for the network."""

    def upload_metrics(self, *, metrics: Mapping[str, float], step: int) -> object: ...
    def upload_checkpoint_files(
        self,
        *,
        local_path: Path | str,
        meta_path: Path | str | None,
        step: int,
        final: bool = False,
        digest: str | None = None,
        author_files: Sequence[str] = (),
    ) -> None: ...
    def upload_sample(self, *, local_path: Path | str, step: int) -> object: ...
