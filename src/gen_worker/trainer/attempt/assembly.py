"""Builds the parts of an attempt. Every error that can be found before step 1 is raised here."""

import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.contract.lease import RunLease
from gen_worker.errors import Category, InputError, StartupError
from gen_worker.trainer.api import load_jobs_plugin, require_sound_job
from gen_worker.trainer.artifacts import ArtifactWriter
from gen_worker.trainer.attempt.data_sources import (
    attach_own_data,
    find_model_handles,
    open_held_out_data,
    open_training_data,
)
from gen_worker.trainer.attempt.runtime_env import WorkerEnvironment
from gen_worker.trainer.attempt.session import fetch_inputs
from gen_worker.trainer.attempt.upload_session import upload_again
from gen_worker.trainer.author.code_identity import OutsideCodeWatch
from gen_worker.trainer.author.identity import describe_identity
from gen_worker.trainer.authz import TrainerAuthContext
from gen_worker.trainer.callbacks.base import Callback
from gen_worker.trainer.callbacks.callback_list import CallbackList, load_callbacks
from gen_worker.trainer.checkpoints.store import Checkpoint, CheckpointStore
from gen_worker.trainer.contracts import Progress, RunArtifacts, StepContext, StopSignal, TrainerPlugin
from gen_worker.trainer.inputs import MaterializedInputs
from gen_worker.trainer.job_lifecycle import JobLifecycle, raise_stop
from gen_worker.trainer.loop import TrainingLoop
from gen_worker.trainer.model_runtime import prepare_model_runtime
from gen_worker.trainer.processes.empty_shares import EmptyShareWatch, empty_share_warnings, find_empty_shares
from gen_worker.trainer.processes.group import OneProcess, Processes
from gen_worker.trainer.recording.run_artifacts import ReportedArtifacts
from gen_worker.trainer.reporting import TrainingReporter
from gen_worker.trainer.restore.resume import choose_resume_point, start_of
from gen_worker.trainer.restore.state_restorer import StateRestorer
from gen_worker.trainer.steps.batch_source import BatchSource, FirstBatches, knows_its_epochs
from gen_worker.trainer.steps.evaluation import Evaluator, Kind
from gen_worker.trainer.steps.held_out import compare_held_out
from gen_worker.trainer.steps.loop_parts import LoopParts
from gen_worker.trainer.steps.schedule import Schedule, say_end
from gen_worker.trainer.uploader import ArtifactUploader

logger = logging.getLogger("gen_worker.runtime")


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectedParts:
    """Parts that a caller in this process passes as objects, instead of naming them in the job."""

    trainer: TrainerPlugin | None = None
    train: BatchSource | None = None
    validation: BatchSource | None = None
    test: BatchSource | None = None
    callbacks: tuple[Callback, ...] = ()


@dataclass(slots=True, kw_only=True)
class Assembly:
    """The parts that exist when an attempt starts; `build` makes the rest. `stack` closes what it opens.

    `phase` is the category of an exception that the author's code raises now.
    """

    environment: WorkerEnvironment
    job: TrainingJobSpec
    injected: InjectedParts = field(default_factory=InjectedParts)
    auth: TrainerAuthContext | None = None
    reporter: TrainingReporter
    uploader: ArtifactUploader | None = None
    lease: RunLease | None = None  # in the main process of an attempt
    stop: StopSignal = field(default_factory=StopSignal)
    progress: Progress = field(default_factory=Progress)
    stack: ExitStack
    lifecycle: JobLifecycle | None = None
    phase: Category = field(default=Category.STARTUP, init=False)
    processes: Processes = field(default_factory=OneProcess, init=False)

    def build(self) -> TrainingLoop:
        """A loop that is ready to run, or is finished already (`is_finished`)."""
        job, reporter = self.job, self.reporter
        self._enter(Category.STARTUP)
        os.environ.update({**job.env, **self.environment.extra_env})
        trainer = self._load_trainer()
        callbacks = CallbackList([*load_callbacks(job), *self.injected.callbacks])
        device = self._meet_others()

        self._enter(Category.INPUT)
        inputs = self._fetch_inputs()
        source = self._open_data(inputs)
        checkpoint = self._choose_checkpoint(inputs)
        start = start_of(checkpoint, source, self.processes)
        for level, note in getattr(source, "notes", ()):
            reporter.log(note, level=level)
        identity = describe_identity(job, trainer, source)
        artifacts = None if self.lease is None else self._open_artifacts(self.lease, trainer)

        self._enter(Category.MODEL_LOAD)
        num_epochs = 1 if job.mock_batches is not None else job.epochs
        planned = Schedule(job=job, source=source, origin=start, num_epochs=num_epochs).planned_steps()
        ctx = self._make_context(source, inputs, device, total_steps=planned)
        is_library = self.environment.is_library
        restorer = StateRestorer(trainer=trainer, ctx=ctx, identity=identity, is_library=is_library)
        parts = LoopParts(
            job=job,
            ctx=ctx,
            trainer=trainer,
            source=source,
            reporter=reporter,
            artifacts=artifacts,
            uploader=self.uploader,
            callbacks=callbacks,
            validation=self.make_evaluator("validation", trainer, ctx) if job.validate_every else None,
            test=self.make_evaluator("test", trainer, ctx),
            restorer=restorer,
            processes=self.processes,
            folder=self.environment.checkpoints_dir.parent,
            resume_hint=self.environment.resume_hint(job.run_id),
            load_checkpoint=self._newest_regular,
        )
        loop = TrainingLoop(parts=parts, start=start, num_epochs=num_epochs)
        self.progress.step, self.progress.epoch = start.step, start.epoch
        if checkpoint is None:
            callbacks.reset()
        else:
            self._restore_loop(loop, checkpoint)
            if is_finished(loop):
                self._report_finished(loop, checkpoint)
                return loop
            for level, note in compare_held_out(loop.parts.evaluators, checkpoint.identity):
                reporter.log(note, level=level)
        loop.state = restorer.make(checkpoint)
        if artifacts is not None:
            artifacts.infinite_parts = restorer.infinite_parts
        self.processes.has_loaded = checkpoint is not None
        self._look_for_empty_shares(loop)
        for level, note in restorer.notes:
            reporter.log(note, level=level)
        if self.processes.rank == 0:
            self._watch_outside_code(identity, loop.parts.folder, checkpoint)
        if checkpoint is not None:
            is_own = checkpoint.meta is not None and checkpoint.meta.run_id == job.run_id
            # Where the run continues another one. It may have passed over a damaged checkpoint.
            fields: dict[str, Any] = {} if is_own else {"start_step": start.step}
            reporter.log(
                f"resumed at step {start.step}, epoch {start.epoch}, batch {start.batch} from {checkpoint.path.name}",
                step=start.step,
                **fields,
            )
            if checkpoint.meta is not None and not checkpoint.meta.digest:
                reporter.log(
                    f"the meta file of {checkpoint.path.name} has no digest: an older release saved it. The tensor bytes"
                    " were verified, the values in the meta file were not",
                    level="warning",
                )
        end = loop.end_step()
        reporter.log(
            f"training from step {start.step} to {say_end(job, start.step, end)}",
            step=start.step,
            end_step=end,
            epoch=start.epoch,
            batch=start.batch,
            epochs=loop.num_epochs,
            steps_per_epoch=source.batches_per_epoch,
            rows_per_step=source.rows_before(epoch=0, batch=1),
        )
        return loop

    def _look_for_empty_shares(self, loop: TrainingLoop) -> None:
        if find_empty_shares(loop.parts.source, self.processes.world_size) is not None:
            loop.step_hooks = EmptyShareWatch(loop.parts.trainer, self.processes, self.reporter)
        for warning in empty_share_warnings(loop) if self.processes.rank == 0 else ():
            self.reporter.log(warning, level="warning")

    def _watch_outside_code(
        self, identity: dict[str, Any], folder: Path, checkpoint: Checkpoint | None
    ) -> None:
        """Now, and whenever a hook imports something later."""
        saved = None if checkpoint is None else checkpoint.identity
        watch = OutsideCodeWatch(identity, folder, saved=saved)

        def look() -> None:
            for warning in watch.look():
                self.reporter.log(warning, level="warning")

        look()
        if self.lifecycle is not None:
            self.lifecycle.on_look.append(look)

    def build_evaluation(self, kind: Kind) -> tuple[Evaluator, Any]:
        """For an evaluation without training: an evaluator, and the state of the newest checkpoint."""
        trainer = self._load_trainer()
        device = self._meet_others()
        inputs = self._fetch_inputs()
        checkpoint = self._choose_checkpoint(inputs)
        ctx = self._make_context(None, inputs, device)
        evaluator = self.make_evaluator(kind, trainer, ctx)
        if evaluator is None:
            raise InputError(f"there is no {kind} data: give {kind}_data, or `{kind}.dataset` in the job")
        if checkpoint is not None:
            self.progress.step, self.progress.epoch = checkpoint.step, checkpoint.epoch
        return evaluator, StateRestorer(trainer=trainer, ctx=ctx).make_to_evaluate(lambda: checkpoint)

    def make_evaluator(self, kind: Kind, trainer: TrainerPlugin, ctx: StepContext) -> Evaluator | None:
        """None where the job has no such data."""
        source = self.injected.validation if kind == "validation" else self.injected.test
        if source is None:
            wanted = self.job.validation if kind == "validation" else self.job.test
            if wanted is None:
                return None
            rank, world_size = self.processes.rank, self.processes.world_size
            source = open_held_out_data(
                self.environment, self.job, wanted.dataset, rank=rank, world_size=world_size, stop=self.stop
            )
            self.stack.callback(source.close)
        attach_own_data(source, kind, self.processes, self.reporter, self.stop, self.stack)
        if source.batches_per_epoch == 0:
            raise InputError(f"the {kind} data has no batches")
        evaluator = Evaluator(
            kind=kind,
            source=source,
            trainer=trainer,
            ctx=ctx,
            processes=self.processes,
            max_batches=self.job.fast_dev_run or None,
        )
        self.stack.callback(evaluator.close)
        return evaluator

    def _enter(self, phase: Category) -> None:
        """Begin a phase, unless a stop was requested: imports and downloads can take minutes."""
        if self.stop.reason is not None:
            raise_stop(self.stop)
        self.phase = phase

    def _load_trainer(self) -> TrainerPlugin:
        ref = self.environment.plugin or self.job.trainer
        trainer = self.injected.trainer
        if trainer is None:
            trainer = load_jobs_plugin(ref, job_dir=self.environment.job_dir)
        require_sound_job(trainer, self.job)
        if self.job.sample_every and not hasattr(trainer, "sample"):
            name = ref or type(trainer).__qualname__
            self.reporter.log(
                f"sample_every is {self.job.sample_every}, but {name} has no `sample` hook", level="warning"
            )
        return trainer

    def _meet_others(self) -> str | None:
        """The device of this process. With several processes, waits until all have started."""
        devices = self.job.resources.device_names
        process = self.environment.process
        if process is None:
            return devices[0] if devices else None
        from gen_worker.trainer.processes.distributed import TorchProcesses, device_of_process

        device = device_of_process(devices, process.local_rank)
        processes = TorchProcesses.open(
            device=device, rank=process.rank, world_size=process.world_size, stop=self.stop
        )
        self.processes = processes
        self.stack.callback(processes.close)
        if self.lifecycle is not None:
            self.lifecycle.on_look.append(lambda: processes.watch(self.stop, self.progress))
        return device

    def _fetch_inputs(self) -> MaterializedInputs:
        """The main process first; the others then read its cache."""
        if self.processes.rank > 0:
            self.processes.from_main(None)
        inputs = fetch_inputs(
            self.environment, self.job.inputs, auth=self.auth, reporter=self.reporter, stop=self.stop
        )
        if self.processes.rank == 0:
            self.processes.from_main(None)
        return inputs

    def _open_data(self, inputs: MaterializedInputs) -> BatchSource:
        source = self.injected.train
        if source is None:
            rank, world_size = self.processes.rank, self.processes.world_size
            source = open_training_data(
                self.environment, self.job, inputs, rank=rank, world_size=world_size, stop=self.stop
            )
            self.stack.callback(source.close)
        attach_own_data(source, "training", self.processes, self.reporter, self.stop, self.stack)
        if source.batches_per_epoch == 0:
            raise InputError("the training data has no batches")
        if self.job.validate_every == "epoch" and not knows_its_epochs(source):
            raise InputError(
                'validate_every is "epoch", but the length of an epoch is unknown for this data: set a number of steps'
            )
        num_batches = self.job.overfit_batches
        return FirstBatches(source, num_batches) if num_batches else source

    def _choose_checkpoint(self, inputs: MaterializedInputs) -> Checkpoint | None:
        """The main process chooses; the others load the same checkpoint."""
        chosen: Checkpoint | None = None
        if self.processes.rank == 0:
            given = inputs.resume_checkpoint_path
            if self.job.resume_checkpoint_path is not None:
                given = self.environment.job_dir / self.job.resume_checkpoint_path
            resume = choose_resume_point(
                self.job, self.environment.checkpoints_dir, given, nonce=self.environment.nonce
            )
            for item in resume.passed_over:
                self.reporter.log(f"passed over {item.path.name}: {item.reason}", level="warning")
            chosen = resume.checkpoint
        return self._load_as_main(chosen)

    def _load_as_main(self, chosen: Checkpoint | None) -> Checkpoint | None:
        path = self.processes.from_main(None if chosen is None else str(chosen.path))
        if self.processes.rank == 0 or path is None:
            return chosen
        return CheckpointStore(self.environment.checkpoints_dir).load(Path(path))

    def _newest_regular(self) -> Checkpoint | None:
        """The newest checkpoint of the cadence. One that only an interrupted run has would make the two runs differ."""
        chosen, every = None, self.job.checkpoint_every or 1
        store = CheckpointStore(self.environment.checkpoints_dir)
        if self.processes.rank == 0:
            chosen = store.choose(
                is_candidate=lambda info: info.step % every == 0,
                of_run=self.job.run_id,
                nonce=self.environment.nonce,
            ).taken
        return self._load_as_main(chosen)

    def _open_artifacts(self, lease: RunLease, trainer: TrainerPlugin) -> ArtifactWriter:
        wanted = self.job.checkpoints
        folders = self.environment.checkpoints_dir, self.environment.samples_dir
        try:
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as fault:
            raise StartupError(f"the folder {folder} cannot be created: {fault.strerror}") from fault
        artifacts = ArtifactWriter(
            self.environment.checkpoints_dir,
            self.environment.samples_dir,
            run_id=self.job.run_id,
            attempt=self.reporter.attempt,
            nonce=self.environment.nonce,
            format=wanted.format,
            keep_last=wanted.keep_last,
            keep_best=wanted.keep_best,
            inherit_fds=(lease.fd,),
            trainer=trainer,
            tell=lambda text: self.reporter.log(text, level="warning"),
            # Nothing saves before the end: no cadence, and no callback that could.
            is_writer_in_process=not (
                self.job.checkpoint_every or self.job.callbacks or self.injected.callbacks
            ),
        )
        self.stack.callback(artifacts.close)
        artifacts.start()
        return artifacts

    def _make_context(
        self,
        source: BatchSource | None,
        inputs: MaterializedInputs,
        device: str | None,
        total_steps: int | None = None,
    ) -> StepContext:
        job = self.job
        runtime = prepare_model_runtime(
            device=device, precision=job.precision, seed=job.seed, deterministic=job.deterministic
        )
        self.stack.callback(runtime.close)
        return StepContext(
            job=job,
            model_handles=find_model_handles(self.environment, job, inputs),
            dataset=source,
            device=runtime.device,
            dtype=runtime.dtype,
            stop=self.stop,
            progress=self.progress,
            rank=self.processes.rank,
            world_size=self.processes.world_size,
            total_steps=total_steps,
            artifacts=self._open_reports(),
        )

    def _open_reports(self) -> RunArtifacts:
        """For the author's own files and videos: of the main process of an attempt."""
        if self.lease is None:
            return RunArtifacts()
        checkpoints_dir = self.environment.checkpoints_dir
        return ReportedArtifacts(
            folder=checkpoints_dir.parent,
            checkpoints_dir=checkpoints_dir,
            samples_dir=self.environment.samples_dir,
            reporter=self.reporter,
            uploader=self.uploader,
            progress=self.progress,
            retention=self.job.artifacts,
        )

    def _restore_loop(self, loop: TrainingLoop, checkpoint: Checkpoint) -> None:
        """Restore loop, trainer state and callbacks; older checkpoints have none of it."""
        kept: Mapping[str, Any] = checkpoint.loop
        if "trainer_state" in kept:
            loop.parts.trainer_state.restore(kept["trainer_state"])
        loop.parts.callbacks.reset()
        gone = loop.parts.callbacks.load_state_dict(kept.get("callbacks") or {})
        if gone:
            self.reporter.log(
                f"the checkpoint has state of callbacks that are not in the job: {', '.join(gone)}"
            )
        if checkpoint.identity.get("config_digest") != loop.parts.restorer.identity["config_digest"]:
            # The job that stopped early was another one, with other metrics perhaps.
            if loop.parts.trainer_state.stop_reason is not None:
                loop.parts.callbacks.reset_patience()
            loop.parts.trainer_state.stop_reason = loop.parts.trainer_state.best = None
        if checkpoint.final and checkpoint.path.parent == self.environment.checkpoints_dir:
            loop.final_checkpoint = checkpoint.path

    def _report_finished(self, loop: TrainingLoop, checkpoint: Checkpoint) -> None:
        step, reason = loop.start.step, loop.parts.trainer_state.stop_reason
        why = f" ({reason})" if reason else ""
        self.reporter.log(
            f"the run is finished at step {step}{why}: nothing to do. Raise max_steps or epochs to train further"
        )
        if self.uploader is not None:  # its upload may be what failed
            upload_again(self.uploader, checkpoint, self.reporter)


def is_finished(loop: TrainingLoop) -> bool:
    """True where the run resumes from a final checkpoint at its end."""
    end = loop.end_step()
    is_at_end = end is not None and loop.start.step >= end
    return loop.final_checkpoint is not None and (
        is_at_end or loop.parts.trainer_state.stop_reason is not None
    )
