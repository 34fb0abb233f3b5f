"""`run_training_loop`: the loop as a function, for callers who bring their own parts."""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gen_worker.errors import Category
from gen_worker.trainer.artifacts import ArtifactWriter
from gen_worker.trainer.author_state import prepare_state
from gen_worker.trainer.batch_source import IterableSource
from gen_worker.trainer.contracts import StepContext, TrainerPlugin, TrainingJobSpec
from gen_worker.trainer.failure import describe_failure
from gen_worker.trainer.loop import TrainingLoop
from gen_worker.trainer.reporting import TrainingReporter
from gen_worker.trainer.schedule import Start
from gen_worker.trainer.uploader import ArtifactUploader

logger = logging.getLogger("gen_worker.loop")


def run_training_loop(
    *,
    job: TrainingJobSpec,
    ctx: StepContext,
    trainer: TrainerPlugin,
    batches: Iterable[Any],
    reporter: TrainingReporter,
    artifact_writer: ArtifactWriter,
    uploader: ArtifactUploader | None = None,
    start_step: int = 0,
    resume_state_payload: Mapping[str, Any] | None = None,
    resume_checkpoint_path: Path | str | None = None,
) -> int:
    """Drive a trainer class in this process, as a library. Returns the terminal step.

    The caller hands in batches that are already at the right position. Writes `started` and the one terminal
    event; the root cause of a failure is re-raised after it.
    """
    loop = TrainingLoop(
        job=job,
        ctx=ctx,
        trainer=trainer,
        state=None,
        source=IterableSource(batches),
        reporter=reporter,
        artifacts=artifact_writer,
        folder=artifact_writer.checkpoints_dir.parent,
        uploader=uploader,
        start=Start(step=start_step),
    )
    reporter.started(step=start_step, trainer=type(trainer).__qualname__)
    phase = Category.MODEL_LOAD
    try:
        loop.state = prepare_state(
            trainer, ctx, payload=resume_state_payload, checkpoint_dir=resume_checkpoint_path
        )
        phase = Category.TRAIN_STEP
        step = loop.run()
    except BaseException as cause:
        category, error = describe_failure(cause, phase=phase)
        try:
            reporter.failed(ctx.step, category, error)
        except Exception:  # the cause is the thing to tell
            logger.exception("the terminal event could not be written")
        raise
    reporter.completed(step, loop.final_checkpoint)
    return step
