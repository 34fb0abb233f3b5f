"""Adapters for reporters, writers and uploaders that have only the original library's methods."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from gen_worker.errors import Category
from gen_worker.trainer.artifacts import CheckpointContent, SavedCheckpoint
from gen_worker.trainer.contracts import StepContext, StopSignal, TrainerPlugin
from gen_worker.trainer.steps.parts import (
    LoopArtifactWriter,
    LoopReporter,
    LoopUploader,
    PlainArtifactWriter,
    PlainReporter,
    PlainUploader,
)

logger = logging.getLogger("gen_worker.loop")


def loop_reporter(given: LoopReporter | PlainReporter) -> LoopReporter:
    return (
        cast("LoopReporter", given) if _has_all(given, LoopReporter) else _ReporterAdapter(cast("Any", given))
    )


def loop_writer(given: LoopArtifactWriter | PlainArtifactWriter) -> LoopArtifactWriter:
    has_all = _has_all(given, LoopArtifactWriter)
    return cast("LoopArtifactWriter", given) if has_all else _WriterAdapter(cast("Any", given))


def loop_uploader(given: LoopUploader | PlainUploader | None) -> LoopUploader | None:
    if given is None or _has_all(given, LoopUploader):
        return cast("LoopUploader | None", given)
    return _UploaderAdapter(cast("Any", given))


def _has_all(given: object, protocol: type) -> bool:
    """By the class: an instance attribute of a fake may have the same name, and a mock has every name."""
    names = [
        name for name in vars(protocol) if not name.startswith("_") and callable(getattr(protocol, name))
    ]
    return all(callable(getattr(type(given), name, None)) for name in names)


class ReporterStop(StopSignal):
    """The context's stop signal, and the reporter's `is_canceled`."""

    __slots__ = ("_own", "_reporter")

    def __init__(self, own: StopSignal, reporter: PlainReporter) -> None:
        self._own = own
        self._reporter = reporter

    @property
    def reason(self) -> str | None:  # type: ignore[override]
        own = self._own
        if own.reason is None and self._reporter.is_canceled():
            own.request(str(getattr(self._reporter, "cancel_reason", None) or "canceled"))
        return own.reason

    @property
    def category(self) -> Literal["cancelled", "timeout"]:  # type: ignore[override]
        return self._own.category

    def request(self, reason: str, category: Literal["cancelled", "timeout"] = "cancelled") -> None:
        self._own.request(reason, category)


class _ReporterAdapter:
    """One `metric` per value. What the original library has no event for is only logged."""

    stop: StopSignal | None = None

    def __init__(self, given: PlainReporter) -> None:
        self._given = given

    def started(self, *, run_id: str, **_: Any) -> None:
        self._given.started(run_id=run_id)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._given.metric(name=name, value=value, step=step)

    def validation(self, step: int, values: Mapping[str, float], **_: Any) -> None:
        self.metrics(step, values)

    def checkpoint(
        self,
        path: Path | str,
        step: int,
        then: Callable[[], None] | None = None,
        *,
        final: bool = False,
        **_: Any,
    ) -> None:
        if not final:  # it is in `completed`
            self._given.checkpoint(path=str(path), step=step)
        if then is not None:
            then()

    def sample(self, path: Path | str, step: int, **_: Any) -> None:
        self._given.sample(path=str(path), step=step)

    video = sample

    def log(self, message: str, *, level: Literal["info", "warning", "error"] = "info", **_: Any) -> None:
        logger.log(logging.getLevelNamesMapping()[level.upper()], "%s", message)

    def completed(self, step: int, final_checkpoint: Path | str | None = None, **_: Any) -> bool:
        path = None if final_checkpoint is None else str(final_checkpoint)
        self._given.completed(step=step, final_checkpoint=path)
        return True

    def ended_by(
        self,
        cause: BaseException,
        *,
        phase: Category,  # noqa: ARG002
        step: int,  # noqa: ARG002
        attempted_step: int,
    ) -> None:
        self._given.failed(step=attempted_step, error=str(cause) or type(cause).__name__)

    def flush(self) -> None: ...


class _WriterAdapter:
    """A save is complete when the call returns."""

    is_saving = False

    def __init__(self, given: PlainArtifactWriter) -> None:
        self._given = given
        self._saved: list[SavedCheckpoint] = []

    def begin_checkpoint(
        self, content: CheckpointContent, *, trainer: TrainerPlugin, state: Any, ctx: StepContext
    ) -> None:
        payload = cast("dict[str, Any]", content.state)
        path: Path | str | None
        if content.final:
            path = self._given.finalize(state_payload=payload, trainer=trainer, state=state, ctx=ctx)
        else:
            path = self._given.write_checkpoint(
                step=content.step, state_payload=payload, trainer=trainer, state=state, ctx=ctx
            )
        if path is not None:
            self._saved.append(_saved(path, content))

    def poll(self) -> list[SavedCheckpoint]:
        saved, self._saved = self._saved, []
        return saved

    wait = poll

    def has_sample(self, step: int) -> bool:  # noqa: ARG002
        return False

    def write_samples(self, *, step: int, state: Any, ctx: StepContext) -> Sequence[Path | str]:
        return self._given.write_samples(step=step, state=state, ctx=ctx) or ()  # a fake may return nothing


def _saved(path: Path | str, content: CheckpointContent) -> SavedCheckpoint:
    return SavedCheckpoint(
        path=cast("Path", path),  # unchanged: it may be a URL
        meta_path=None,
        step=content.step,
        final=content.final,
        verified=True,
        reason="",
        size_bytes=None,
        duration_s=0.0,
        blocked_s=0.0,
        removed=[],
        files=(),
    )


class _UploaderAdapter:
    def __init__(self, given: PlainUploader) -> None:
        self._given = given

    def upload_metrics(self, *, metrics: Mapping[str, float], step: int) -> None:
        self._given.upload_metrics(metrics=dict(metrics), step=step)

    def upload_checkpoint_files(
        self, *, local_path: Path | str, step: int, final: bool = False, **_: Any
    ) -> None:
        if not final:
            self._given.upload_checkpoint(local_path=str(local_path), step=step)

    def upload_sample(self, *, local_path: Path | str, step: int) -> None:
        self._given.upload_sample(local_path=str(local_path), step=step)
