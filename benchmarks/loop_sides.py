"""The sides of the loop benchmark, each in an interpreter of its own: what drives the same two hooks, or the same model.

A round is bare, framework, bare; what is reported is the framework's time per step against the mean of the two bare
ones beside it. `ClockedBatches` takes the clock when the first and the last batch are asked for, so that whatever a
framework does at its start and end (building loaders, our final checkpoint) is not counted on any side.
"""

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import loop_peers
from harness import Prepare, Round, Sample, scratch_dir, serve
from loop_work import (
    METRIC_EVERY,
    ClockedBatches,
    Drive,
    NullTrainer,
    SmallModel,
    SmallModelTrainer,
    bare_null,
)


def compare(bare: Drive, drive: Drive, batch: Any, *, bare_steps: int, steps: int) -> Sample:
    def step_us(driver: Drive, num_steps: int) -> float:
        batches = ClockedBatches(batch, num_steps)
        driver(batches)
        return batches.step_us

    before = step_us(bare, bare_steps)
    driven = step_us(drive, steps)
    after = step_us(bare, bare_steps)
    bare_us = (before + after) / 2
    return {
        "above_us": driven - bare_us,
        "ratio": driven / bare_us,
        "step_us": driven,
        "bare_us": bare_us,
    }


def make_side(kind: str, make_null: Callable[[], Drive], make_model: Callable[[Any], Drive]) -> Prepare:
    """`kind` in the options' words: the null step, or the small torch model."""

    def prepare(options: Mapping[str, Any]) -> Round:
        bare_steps, steps = options["bare_steps"], options["steps"]
        if options["work"] == "null":
            batch: Any = object()
            bare, drive = bare_null, make_null()
        else:
            model = SmallModel()
            batch, bare, drive = model.batch, model.run_bare, make_model(model)
        compare(bare, drive, batch, bare_steps=max(bare_steps // 20, 50), steps=max(steps // 20, 50))  # warm
        return lambda: compare(bare, drive, batch, bare_steps=bare_steps, steps=steps)

    prepare.__name__ = kind
    return prepare


# --- ours ----------------------------------------------------------------------------------------------------------


def drive_ours(trainer: Any) -> Drive:
    """Everything that is on in a real run: events to a file every 10 steps, heartbeat, cancel file, signals, the
    checkpoint writer's process, the final checkpoint."""
    from gen_worker.trainer import (
        ArtifactWriter,
        StepContext,
        TrainingJobSpec,
        TrainingReporter,
        run_training_loop,
    )
    from gen_worker.trainer.artifacts import CheckpointContent
    from gen_worker.trainer.job_lifecycle import JobLifecycle

    def drive(batches: ClockedBatches) -> None:
        folder = Path(tempfile.mkdtemp(dir=scratch_dir(), prefix="loop-"))
        job = TrainingJobSpec(run_id="bench", metric_every=METRIC_EVERY, checkpoint_every=0)
        ctx = StepContext(job=job)
        reporter = TrainingReporter(folder / "events.jsonl", run_id=job.run_id)
        artifacts = ArtifactWriter(folder / "checkpoints", folder / "samples", run_id=job.run_id)
        lifecycle = JobLifecycle(
            reporter=reporter,
            stop=ctx.is_canceled,
            progress=ctx.progress,
            heartbeat_s=job.heartbeat_s,
            grace_s=job.grace_s,
            cancel_file=folder / "cancel",
        )
        try:
            with lifecycle:
                artifacts.start()
                # The writer's own start is no step's cost: it is up once it has saved something.
                artifacts.save_checkpoint(
                    CheckpointContent(
                        step=0, epoch=0, final=False, state={}, loop={}, cursor=None, rng={}, identity={}
                    )
                )
                artifacts.wait()
                step = run_training_loop(
                    job=job,
                    ctx=ctx,
                    trainer=trainer,
                    batches=batches,
                    reporter=reporter,
                    artifact_writer=artifacts,
                )
            assert step == len(batches), f"the loop ended at step {step} of {len(batches)}"
        finally:
            artifacts.close()
            reporter.close()
            events = (folder / "events.jsonl").read_bytes().count(b'"event":"metric')
            shutil.rmtree(folder)
        assert events == len(batches) // METRIC_EVERY, f"{events} metric events for {len(batches)} steps"

    return drive


# --- hand-written --------------------------------------------------------------------------------------------------


def drive_hand(trainer: Any) -> Drive:
    """The least that does our job in sight: hooks, a cancel flag, a JSON line flushed every 10 steps."""

    class Flag:
        reason: str | None = None

    def drive(batches: ClockedBatches) -> None:
        stop, state, ctx, step = Flag(), None, None, 0
        prepare_batch, train_step = trainer.prepare_batch, trainer.train_step
        with tempfile.TemporaryFile("w", dir=scratch_dir()) as events:
            for raw_batch in batches:
                if stop.reason is not None:
                    break
                result = train_step(prepare_batch(raw_batch, state, ctx), state, ctx)
                step += 1
                if step % METRIC_EVERY == 0:
                    loss = float(result.metrics["loss"])
                    line = {"event": "metric", "timestamp_ms": time.time_ns() // 1_000_000, "step": step}
                    events.write(json.dumps({**line, "name": "train/loss", "value": loss}) + "\n")
                    events.flush()

    return drive


def drive_hooks(trainer: Any) -> Drive:
    """Limit: the same two hooks and their results, and no duty at all."""

    def drive(batches: ClockedBatches) -> None:
        state, ctx = None, None
        prepare_batch, train_step = trainer.prepare_batch, trainer.train_step
        for raw_batch in batches:
            result = train_step(prepare_batch(raw_batch, state, ctx), state, ctx)  # noqa: F841  (kept for a step)

    return drive


def _no_model_side(_: Any) -> Drive:
    raise ValueError("this side has no small-model form")


SIDES: dict[str, Prepare] = {
    "ours": make_side("ours", lambda: drive_ours(NullTrainer()), lambda m: drive_ours(SmallModelTrainer(m))),
    "hand": make_side("hand", lambda: drive_hand(NullTrainer()), lambda m: drive_hand(SmallModelTrainer(m))),
    "hooks": make_side(
        "hooks", lambda: drive_hooks(NullTrainer()), lambda m: drive_hooks(SmallModelTrainer(m))
    ),
    "ignite": make_side(
        "ignite",
        lambda: loop_peers.drive_ignite(loop_peers.null_step(), handler=False),
        lambda m: loop_peers.drive_ignite(m.step, handler=False),
    ),
    "ignite_handler": make_side(
        "ignite_handler",
        lambda: loop_peers.drive_ignite(loop_peers.null_step(), handler=True),
        lambda m: loop_peers.drive_ignite(m.step, handler=True),
    ),
    "fabric": make_side("fabric", loop_peers.null_fabric, _no_model_side),
    "accelerate": make_side("accelerate", loop_peers.null_accelerate, _no_model_side),
    "lightning": make_side("lightning", loop_peers.null_lightning, loop_peers.model_lightning),
    "transformers": make_side("transformers", loop_peers.null_transformers, _no_model_side),
}

if __name__ == "__main__":
    serve(SIDES)
