"""`run_training_loop`: the loop as a function, for callers with their own parts."""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.errors import Category
from gen_worker.trainer.author.author_state import fill_state
from gen_worker.trainer.contracts import StepContext, TrainerPlugin
from gen_worker.trainer.loop import TrainingLoop
from gen_worker.trainer.restore.state_restorer import StateRestorer
from gen_worker.trainer.steps.batch_source import IterableSource
from gen_worker.trainer.steps.loop_parts import LoopParts
from gen_worker.trainer.steps.parts import (
    LoopArtifactWriter,
    LoopReporter,
    LoopUploader,
    PlainArtifactWriter,
    PlainReporter,
    PlainUploader,
)
from gen_worker.trainer.steps.plain_parts import ReporterStop, loop_reporter, loop_uploader, loop_writer
from gen_worker.trainer.steps.schedule import Start

logger = logging.getLogger("gen_worker.loop")


def run_training_loop(
    *,
    job: TrainingJobSpec,
    ctx: StepContext,
    trainer: TrainerPlugin,
    batches: Iterable[Any],
    reporter: PlainReporter | LoopReporter,
    artifact_writer: PlainArtifactWriter | LoopArtifactWriter,
    uploader: PlainUploader | LoopUploader | None = None,
    start_step: int = 0,
    resume_state_payload: Mapping[str, Any] | None = None,
    resume_checkpoint_path: Path | str | None = None,
) -> int:
    """Train in this process. Returns the terminal step.

    `batches` start at the right position. Reporter, artifact writer and uploader need only the methods of the original
    library, see `parts`. Writes `started` and one terminal event; the root cause of a failure is re-raised after it.
    """
    adapted = loop_reporter(reporter)
    if adapted is not reporter or adapted.stop not in (None, ctx.is_canceled):
        stop = ReporterStop(ctx.is_canceled, reporter)  # type: ignore[arg-type]  # every reporter has `is_canceled`
        object.__setattr__(ctx, "_stop", stop)
    restorer = StateRestorer(trainer=trainer, ctx=ctx)
    parts = LoopParts(
        job=job,
        ctx=ctx,
        trainer=trainer,
        source=IterableSource(batches),
        reporter=adapted,
        artifacts=loop_writer(artifact_writer),
        uploader=loop_uploader(uploader),
        restorer=restorer,
    )
    loop = TrainingLoop(parts=parts, start=Start(step=start_step))
    adapted.started(run_id=job.run_id, step=start_step, trainer=type(trainer).__qualname__)
    phase = Category.MODEL_LOAD
    try:
        loop.state = restorer.configure()
        fill_state(
            trainer,
            loop.state,
            ctx,
            payload=resume_state_payload,
            checkpoint_dir=_folder_of(resume_checkpoint_path),
            author_payload=resume_state_payload,
        )
        phase = Category.TRAIN_STEP
        step = loop.run()
    except BaseException as cause:
        try:
            adapted.ended_by(
                cause, phase=phase, step=ctx.step, attempted_step=max(loop.attempted_step, ctx.step)
            )
        except Exception:  # the caller must see `cause`
            logger.exception("the terminal event could not be written")
        raise
    adapted.completed(step=step, final_checkpoint=loop.final_checkpoint)
    return step


def _folder_of(checkpoint: Path | str | None) -> Path | None:
    path = None if checkpoint is None else Path(checkpoint)
    return path.parent if path is not None and path.is_file() else path
