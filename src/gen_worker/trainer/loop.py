"""The loop: drives a trainer class from one step to the last. It receives its parts and does no I/O of its own.

Each step: cancel check, `prepare_batch`, `train_step`, step committed; only then has the data cursor moved. After
it, what is due, in this order: metrics, checkpoint, sample. At the end the final checkpoint. When anything ends
the loop early, a checkpoint of the last committed step is saved if the state is sound, and the root cause goes on.

The next step at which anything is due is known beforehand, so between two such steps there is nothing but the
cancel check and the author's two calls (`_advance`).
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gen_worker.errors import (
    Category,
    CheckpointError,
    InputError,
    TrainingCanceled,
    TrainingTimeout,
    TrainStepError,
)
from gen_worker.trainer.artifacts import ArtifactWriter, CheckpointContent, SavedCheckpoint
from gen_worker.trainer.batch_source import BatchSource, IterableSource
from gen_worker.trainer.contracts import (
    Progress,
    SampleRequest,
    StepContext,
    StepControlHints,
    StepResult,
    StopSignal,
    TrainerPlugin,
    TrainingJobSpec,
)
from gen_worker.trainer.failure import describe_failure
from gen_worker.trainer.job_lifecycle import raise_stop
from gen_worker.trainer.model_runtime import capture_rng, restore_rng
from gen_worker.trainer.reporting import TrainingReporter
from gen_worker.trainer.repro import to_float_scalar
from gen_worker.trainer.uploader import ArtifactUploader

logger = logging.getLogger("gen_worker.loop")

METRIC_NAMES = {
    "loss": "train/loss",
    "train_loss": "train/loss",
    "lr": "train/lr",
    "learning_rate": "train/lr",
    "train_lr": "train/lr",
}
BACKOFF_SLICE_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a run begins or goes on. `is_sample_due`: the checkpoint was saved before its step's sample was made."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    is_sample_due: bool = False


@dataclass(slots=True, kw_only=True)
class TrainingLoop:
    """One attempt's way through its steps. `progress` and `stop` are shared with the lifecycle's watcher."""

    job: TrainingJobSpec
    ctx: StepContext
    trainer: TrainerPlugin
    state: Any
    source: BatchSource
    reporter: TrainingReporter
    artifacts: ArtifactWriter
    progress: Progress
    stop: StopSignal
    uploader: ArtifactUploader | None = None
    start: Start = Start()
    num_epochs: int | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)

    final_checkpoint: Path | None = field(default=None, init=False)
    _is_sound: bool = field(default=True, init=False)
    _last: StepResult = field(default_factory=StepResult, init=False)
    _saved_step: int = field(default=-1, init=False)
    _metric: tuple[str, float, str] | None = field(default=None, init=False)

    def run(self) -> int:
        """Train to the end and save; returns the step reached. Raises the root cause of an early end."""
        self.progress.step = self.start.step
        self.progress.epoch = self.start.epoch
        self._saved_step = self.start.step
        try:
            if self.start.is_sample_due and not self.artifacts.has_sample(self.start.step):
                self._sample(self.start.step)
            self._train()
            self._save(final=True)
            self._take_saved(self.artifacts.wait)
        except BaseException as cause:
            self._rescue(cause)
            raise
        return self.progress.step

    def _train(self) -> None:
        step = self.start.step
        end = self.end_step()
        if end is not None and step >= end:
            return  # stopped between its last step and its final checkpoint
        batches = self.source.batches(epoch=self.start.epoch, batch=self.start.batch)
        try:
            while end is None or step < end:
                reached = self._advance(step, self._next_due(step, end), batches.__next__)
                if reached == step:
                    break
                step = reached
                self._after(step)
        finally:
            close = getattr(batches, "close", None)
            if close is not None:
                close()
        if step == self.start.step:
            raise InputError(
                f"the data gave no batch at epoch {self.start.epoch}, batch {self.start.batch}: there is nothing to train on"
            )

    def _advance(self, step: int, until: int, next_batch: Any) -> int:
        """The hot path: steps up to `until`, where something is due. No clock, no allocation, no call of ours."""
        state, ctx, stop, progress = self.state, self.ctx, self.stop, self.progress
        prepare_batch, train_step = self.trainer.prepare_batch, self.trainer.train_step
        result = self._last
        while step < until:
            if stop.reason is not None:
                raise_stop(stop)
            try:
                raw_batch = next_batch()
            except StopIteration:
                break
            try:
                result = train_step(prepare_batch(raw_batch, state, ctx), state, ctx)
                step += 1
                progress.step = step
            except BaseException:
                self._is_sound = False
                raise
            try:
                control = result.control
            except AttributeError:
                self._is_sound = False
                raise TrainStepError(
                    f"train_step returned {type(result).__name__}, expected StepResult:"
                    " return StepResult(metrics={'loss': loss})"
                ) from None
            if control is not None:
                self._obey(control)
        self._last = result
        return step

    def _obey(self, control: StepControlHints) -> None:
        wake_at = time.monotonic() + control.backoff_seconds
        while self.stop.reason is None and (left_s := wake_at - time.monotonic()) > 0:
            time.sleep(min(left_s, BACKOFF_SLICE_S))

    def end_step(self) -> int | None:
        """The step at which the run is done; None where only the end of the data can tell."""
        ends = [] if self.job.max_steps is None else [self.job.max_steps]
        per_epoch = self.source.batches_per_epoch
        if self.num_epochs is not None and per_epoch is not None:
            left = (self.num_epochs - self.start.epoch) * per_epoch - self.start.batch
            ends.append(self.start.step + max(left, 0))
        return min(ends, default=None)

    def _next_due(self, step: int, end: int | None) -> int:
        if self.artifacts.is_saving:
            return step + 1  # a failed save reaches the loop at the next step
        job = self.job
        due = [
            (step // every + 1) * every
            for every in (job.metric_every, job.checkpoint_every, job.sample_every)
            if every
        ]
        if end is not None:
            due.append(end)
        per_epoch = self.source.batches_per_epoch
        if per_epoch is not None:
            _, batch = self._position(step)
            due.append(step + per_epoch - batch)
        return min(due, default=step + 1024)

    def _position(self, step: int) -> tuple[int, int]:
        """(epoch, batch) of the cursor once `step` is committed: what was consumed, never what was prefetched."""
        epoch, batch = self.start.epoch, self.start.batch + step - self.start.step
        per_epoch = self.source.batches_per_epoch
        if per_epoch is None:
            return epoch, batch
        return epoch + batch // per_epoch, batch % per_epoch

    def _after(self, step: int) -> None:
        """What is due once `step` is committed, in the published order."""
        job = self.job
        if self.artifacts.is_saving:
            self._take_saved(self.artifacts.poll)
        if _is_due(job.metric_every, step):
            self._emit_metrics(step)
        self.progress.epoch, _ = self._position(step)
        if _is_due(job.checkpoint_every, step):
            self._save(final=False)
        if _is_due(job.sample_every, step):
            self._sample(step)

    def _emit_metrics(self, step: int) -> None:
        result = self._last
        if result.control is not None and result.control.skip_cadence_emit:
            return
        if not isinstance(result.metrics, Mapping):
            raise TrainStepError(
                f"StepResult.metrics is {type(result.metrics).__name__}, expected a dict: StepResult(metrics={{'loss': loss}})"
            )
        values: dict[str, float] = {}
        for name, value in result.metrics.items():
            try:
                values[METRIC_NAMES.get(name, name)] = (
                    value if type(value) is float else to_float_scalar(value)
                )
            except (TypeError, ValueError) as fault:
                raise TrainStepError(f"metric {name!r} of train_step is not a number: {fault}") from fault
        groups = getattr(self.ctx.optimizer, "param_groups", None)
        if groups and "train/lr" not in values:
            values["train/lr"] = float(groups[0]["lr"])
        if not values:
            return
        if "train/loss" in values:
            self._metric = ("train/loss", values["train/loss"], "min")
        self.reporter.metrics(step, values)
        if self.uploader is not None:
            self.uploader.metrics(step, values, time.time_ns() // 1_000_000)

    def _save(self, *, final: bool) -> None:
        step = self.progress.step
        epoch, batch = self._position(step)
        with contextlib.suppress(OSError):  # a full disk is the save's to report
            self.reporter.flush()  # what a resume will not repeat is in the file before the checkpoint is
        sound, self._is_sound = self._is_sound, False
        rng = capture_rng()
        payload = self.trainer.state_dict(self.state)
        if not isinstance(payload, Mapping):
            raise TrainStepError(f"state_dict returned {type(payload).__name__}, expected a dict")
        author_files, author_payload = self._author_files(step, final=final)
        restore_rng(rng)  # a save that only an interrupted run makes must not move the training stream
        self._is_sound = sound
        content = CheckpointContent(
            step=step,
            epoch=epoch,
            final=final,
            state=payload,
            loop={"version": 1, "is_sample_due": not final and _is_due(self.job.sample_every, step)},
            cursor=self.source.state(epoch=epoch, batch=batch),
            rng=rng,
            identity=self.identity,
            metric=self._metric,
            author_files=author_files,
            author_payload=author_payload,
        )
        try:
            self.artifacts.save_checkpoint(content)
        except CheckpointError as fault:
            raise TrainStepError(f"the checkpoint of step {step} could not be saved: {fault}") from fault
        self._saved_step = step

    def _author_files(self, step: int, *, final: bool) -> tuple[Path | None, Mapping[str, Any] | None]:
        hook = getattr(self.trainer, "save_checkpoint", None)
        if hook is None:
            return None, None
        folder = self.artifacts.author_dir(step, final)
        payload = hook(state=self.state, step=step, output_dir=str(folder), final=final, ctx=self.ctx)
        if payload is not None and not isinstance(payload, Mapping):
            raise TrainStepError(
                f"save_checkpoint returned {type(payload).__name__}, expected a dict or None"
            )
        return folder, payload

    def _take_saved(self, ask: Callable[[], list[SavedCheckpoint]]) -> None:
        """Report what `ask` (poll or wait) says was saved; its failure is one of training, not of an input."""
        try:
            saved = ask()
        except CheckpointError as fault:
            raise TrainStepError(str(fault)) from fault
        for checkpoint in saved:
            if checkpoint.final:
                self.final_checkpoint = checkpoint.path
            self.reporter.checkpoint(
                checkpoint.path,
                checkpoint.step,
                then=self._upload(checkpoint),
                final=checkpoint.final,
                verified=checkpoint.verified,
                size_bytes=checkpoint.size_bytes,
                duration_s=round(checkpoint.duration_s, 3),
            )
            if not checkpoint.verified:
                self.reporter.log(
                    f"the checkpoint of step {checkpoint.step} holds non-finite weights: it is kept, but a resume will"
                    " pass it over",
                    level="warning",
                )

    def _upload(self, checkpoint: SavedCheckpoint) -> Any:
        uploader = self.uploader
        if uploader is None:
            return None
        return lambda: uploader.checkpoint(
            checkpoint.path,
            checkpoint.meta_path,
            checkpoint.step,
            checkpoint.final,
            checkpoint.files[0].hash,
            author_files=[entry.name for entry in checkpoint.files[1:]],
        )

    def _sample(self, step: int) -> None:
        hook = getattr(self.trainer, "sample", None)
        if hook is None:
            return
        request = SampleRequest(prompts=tuple(self.job.sample_prompts), seed=self.job.sample_seed)
        folder = self.artifacts.sample_dir(step)
        rng = capture_rng()  # sampling must not move the training stream
        sound, self._is_sound = (
            self._is_sound,
            False,
        )  # a hook may swap weights in, fail, and leave them there
        try:
            hook(state=self.state, step=step, request=request, output_dir=str(folder), ctx=self.ctx)
        finally:
            restore_rng(rng)
        self._is_sound = sound
        for sample in self.artifacts.write_sample(step, folder):
            self.reporter.sample(sample.path, step, size_bytes=sample.size_bytes)
            if self.uploader is not None:
                self.uploader.sample(sample.path, step)

    def _rescue(self, cause: BaseException) -> None:
        """Save the last committed step if the state is sound; never let a second fault hide the first."""
        try:
            if self._is_sound and self.progress.step > self._saved_step:
                self._save(final=False)
            self._take_saved(self.artifacts.wait)
            if isinstance(cause, TrainingCanceled | TrainingTimeout) and self._saved_step > 0:
                cause.add_note(f"saved at step {self._saved_step}: run the job again to go on from there")
        except Exception as second:  # the cause is on its way up and must arrive
            logger.exception("no checkpoint could be saved on the way out")
            cause.add_note(f"and no checkpoint could be saved on the way out: {second}")


def _is_due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def prepare_state(
    trainer: TrainerPlugin,
    ctx: StepContext,
    *,
    payload: Mapping[str, Any] | None = None,
    checkpoint_dir: Path | str | None = None,
    author_payload: Mapping[str, Any] | None = None,
) -> Any:
    """`setup`, `configure`, and where there is something to resume from, `load_state_dict` and `load_checkpoint`."""
    trainer.setup(ctx)
    state = trainer.configure(ctx)
    _bind_optimizer(ctx, state)
    if payload is not None:
        trainer.load_state_dict(state, dict(payload), ctx)
    hook = getattr(trainer, "load_checkpoint", None)
    if hook is not None and checkpoint_dir is not None:  # where its `save_checkpoint` left something
        hook(state=state, checkpoint_dir=str(checkpoint_dir), payload=dict(author_payload or {}), ctx=ctx)
    return state


def _bind_optimizer(ctx: StepContext, state: Any) -> None:
    """Let `ctx.optimizer` and `ctx.scheduler` be what `configure` made, where it names them so."""
    for name in ("optimizer", "scheduler"):
        if getattr(ctx, name) is None:
            found = state.get(name) if isinstance(state, Mapping) else getattr(state, name, None)
            object.__setattr__(ctx, name, found)


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
        progress=ctx.progress,
        stop=ctx.is_canceled,
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
