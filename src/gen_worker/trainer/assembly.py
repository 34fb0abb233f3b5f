"""How the parts of an attempt are made and put together. Only `runtime` calls this.

Everything that can be wrong is found here, before step 1: the trainer class, inputs, data, the resume point, the
model's state. `phase` tells, at each moment, which category a fault of the author's code belongs to.
"""

import logging
import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from gen_worker.errors import Category, InputError, PluginError, StartupError
from gen_worker.trainer.api import load_trainer_plugin
from gen_worker.trainer.artifacts import ArtifactWriter
from gen_worker.trainer.authz import TrainerAuthContext
from gen_worker.trainer.batch_source import BatchSource, ListSource
from gen_worker.trainer.checkpoints.store import Checkpoint
from gen_worker.trainer.contracts import (
    DatasetSpec,
    Progress,
    StepContext,
    StopSignal,
    TrainerPlugin,
    TrainingJobSpec,
)
from gen_worker.trainer.identity import changes_since, describe_identity
from gen_worker.trainer.inputs import MaterializedInputs, materialize_inputs
from gen_worker.trainer.job_lifecycle import raise_stop
from gen_worker.trainer.lease import RunLease
from gen_worker.trainer.loop import Start, TrainingLoop, prepare_state
from gen_worker.trainer.model_runtime import prepare_model_runtime, restore_rng
from gen_worker.trainer.reporting import TrainingReporter
from gen_worker.trainer.resume import choose_resume_point
from gen_worker.trainer.runtime_env import WorkerEnvironment
from gen_worker.trainer.transfer.input_cache import InputCache
from gen_worker.trainer.upload_session import transfer_options
from gen_worker.trainer.uploader import ArtifactUploader

logger = logging.getLogger("gen_worker.runtime")


@dataclass(slots=True, kw_only=True)
class Assembly:
    """The parts that exist when an attempt begins; `build` makes the rest. What it opens, `stack` closes."""

    environment: WorkerEnvironment
    job: TrainingJobSpec
    plugin: str | None
    auth: TrainerAuthContext | None
    reporter: TrainingReporter
    uploader: ArtifactUploader | None
    lease: RunLease
    stop: StopSignal
    progress: Progress
    stack: ExitStack
    phase: Category = field(default=Category.STARTUP, init=False)

    def build(self) -> TrainingLoop:
        """A loop that is ready to run, or finished already (`is_finished`)."""
        job, reporter = self.job, self.reporter
        self._enter(Category.STARTUP)
        os.environ.update({**job.env, **self.environment.extra_env})
        trainer = _load_plugin(self.plugin, job_dir=self.environment.job_spec_path.parent)
        if job.sample_every and not hasattr(trainer, "sample"):
            reporter.log(
                f"sample_every is {job.sample_every}, but {self.plugin} has no `sample` hook", level="warning"
            )

        self._enter(Category.INPUT)
        inputs = self._fetch_inputs()
        source = _open_source(self.environment, job, inputs)
        self.stack.callback(source.close)
        checkpoint = self._choose_checkpoint(inputs)
        start = _start_of(checkpoint, source)
        identity = describe_identity(job, trainer, source)
        artifacts = self._open_artifacts()

        self._enter(Category.MODEL_LOAD)
        loop = TrainingLoop(
            job=job,
            ctx=self._make_context(source, inputs),
            trainer=trainer,
            state=None,
            source=source,
            reporter=reporter,
            artifacts=artifacts,
            progress=self.progress,
            stop=self.stop,
            uploader=self.uploader,
            start=start,
            num_epochs=1 if job.mock_batches is not None else job.epochs,
            identity=identity,
        )
        self.progress.step, self.progress.epoch = start.step, start.epoch
        if (
            checkpoint is not None
            and checkpoint.final
            and checkpoint.path.parent == self.environment.checkpoints_dir
        ):
            loop.final_checkpoint = checkpoint.path
        if is_finished(loop):
            message = (
                f"the run is finished at step {start.step}: nothing to do; raise max_steps or epochs to go on"
            )
            reporter.log(message)
            if (
                self.uploader is not None and checkpoint is not None
            ):  # an attempt may have failed on just this
                meta_path = checkpoint.path.with_name(f"{checkpoint.path.stem}.meta.json")
                files = () if checkpoint.meta is None else checkpoint.meta.files[1:]
                self.uploader.checkpoint(
                    checkpoint.path,
                    meta_path,
                    checkpoint.step,
                    checkpoint.final,
                    author_files=[entry.name for entry in files],
                )
            return loop
        loop.state = self._restore(trainer, loop.ctx, checkpoint)
        if checkpoint is not None:
            for change in changes_since(checkpoint.identity, identity):
                reporter.log(f"since the checkpoint {change}", level="warning")
            reporter.log(
                f"resumed at step {start.step}, epoch {start.epoch}, batch {start.batch} from {checkpoint.path.name}",
                step=start.step,
            )
        end = loop.end_step()
        reporter.log(
            f"training from step {start.step} to {'the end of the data' if end is None else end}",
            step=start.step,
            end_step=end,
        )
        return loop

    def _enter(self, phase: Category) -> None:
        """Begin a phase, unless the run was asked to stop meanwhile: imports and downloads can take minutes."""
        if self.stop.reason is not None:
            raise_stop(self.stop)
        self.phase = phase

    def _fetch_inputs(self) -> MaterializedInputs:
        wanted = self.job.inputs
        return materialize_inputs(
            base_model_ref=wanted.base_model_ref,
            dataset_parquet_refs=wanted.dataset_parquet_refs,
            resume_checkpoint_ref=wanted.resume_checkpoint_ref,
            cache=InputCache(self.environment.cache_dir / "inputs"),
            auth=self.auth,
            base_dir=self.environment.job_spec_path.parent,
            on_progress=_DownloadProgress(self.reporter, self.stop),
            options=transfer_options(self.environment),
        )

    def _choose_checkpoint(self, inputs: MaterializedInputs) -> Checkpoint | None:
        given = inputs.resume_checkpoint_path
        if self.job.resume_checkpoint_path is not None:
            given = self.environment.job_spec_path.parent / self.job.resume_checkpoint_path
        resume = choose_resume_point(self.job, self.environment.checkpoints_dir, given)
        for item in resume.passed_over:
            self.reporter.log(f"passed over {item.path.name}: {item.reason}", level="warning")
        return resume.checkpoint

    def _open_artifacts(self) -> ArtifactWriter:
        wanted = self.job.checkpoints
        folders = self.environment.checkpoints_dir, self.environment.samples_dir
        try:
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as fault:
            raise StartupError(f"the folder {folder} cannot be made: {fault.strerror}") from fault
        artifacts = ArtifactWriter(
            self.environment.checkpoints_dir,
            self.environment.samples_dir,
            run_id=self.job.run_id,
            attempt=self.reporter.attempt,
            format=wanted.format,
            keep_last=wanted.keep_last,
            keep_best=wanted.keep_best,
            inherit_fds=(self.lease.fd,),
        )
        self.stack.callback(artifacts.close)
        artifacts.start()
        return artifacts

    def _make_context(self, source: BatchSource, inputs: MaterializedInputs) -> StepContext:
        job = self.job
        runtime = prepare_model_runtime(
            device=job.resources.devices[0] if job.resources.devices else None,
            precision=job.precision,
            seed=job.seed,
            deterministic=job.deterministic,
        )
        self.stack.callback(runtime.close)
        return StepContext(
            job=job,
            model_handles=_model_handles(self.environment, job, inputs),
            dataset=source,
            device=runtime.device,
            dtype=runtime.dtype,
            stop=self.stop,
            progress=self.progress,
        )

    def _restore(self, trainer: TrainerPlugin, ctx: StepContext, checkpoint: Checkpoint | None) -> Any:
        if checkpoint is None:
            return prepare_state(trainer, ctx)
        state = prepare_state(
            trainer,
            ctx,
            payload=checkpoint.state,
            checkpoint_dir=_author_dir(checkpoint),
            author_payload=checkpoint.author_payload,
        )
        if checkpoint.rng:
            restore_rng(checkpoint.rng)  # last, so that nothing in the author's hooks can move it
        return state


def _author_dir(checkpoint: Checkpoint) -> Path | None:
    """Where `load_checkpoint` looks: the author's files; the checkpoint's folder where there was only a payload."""
    if checkpoint.author_files is None and checkpoint.author_payload is not None:
        return checkpoint.path.parent
    return checkpoint.author_files


def is_finished(loop: TrainingLoop) -> bool:
    """True where it would resume from a final checkpoint that is at the end already."""
    end = loop.end_step()
    return loop.final_checkpoint is not None and end is not None and loop.start.step >= end


class _DownloadProgress:
    """Turns bytes received into a `log` event for every tenth of a file; ends the download on a stop request."""

    def __init__(self, reporter: TrainingReporter, stop: StopSignal) -> None:
        self._reporter = reporter
        self._stop = stop
        self._told: dict[str, int] = {}

    def __call__(self, name: str, received_bytes: int, total_bytes: int | None) -> None:
        if self._stop:
            raise_stop(self._stop)
        tenth = 10 * received_bytes // total_bytes if total_bytes else received_bytes >> 28
        if tenth > self._told.get(name, 0):
            self._told[name] = tenth
            self._reporter.log(
                f"fetching {name}: {received_bytes} of {total_bytes or 'an unknown number of'} bytes",
                received_bytes=received_bytes,
                total_bytes=total_bytes,
            )


def _load_plugin(ref: str | None, *, job_dir: Path) -> TrainerPlugin:
    if ref is None:
        raise PluginError(
            "no trainer class is named: set `trainer` in the job or TRAINER_PLUGIN to module:symbol"
        )
    try:
        return load_trainer_plugin(ref)
    except PluginError as fault:
        name = ref.partition(":")[0].partition(".")[0]
        if "is not found" in str(fault) and (job_dir / f"{name}.py").exists():
            fault.add_note(f"{name}.py is in {job_dir}: start the worker there, or set PYTHONPATH={job_dir}")
        raise


def _open_source(
    environment: WorkerEnvironment, job: TrainingJobSpec, inputs: MaterializedInputs
) -> BatchSource:
    if job.mock_batches is not None:
        if not job.mock_batches:
            raise InputError("mock_batches is empty: there is nothing to train on")
        return ListSource(job.mock_batches)
    from gen_worker.trainer.arrow_feed import ArrowFeed

    dataset = job.dataset or DatasetSpec()  # a job may name its data by ref alone
    options: dict[str, Any] = {
        "batch_size": dataset.batch_size,
        "columns": dataset.columns,
        "shuffle": dataset.shuffle,
        "drop_last": dataset.drop_last,
        "seed": job.seed,
        "readahead": dataset.readahead,
    }
    if environment.arrow_ipc_path is not None:
        return ArrowFeed.open_ipc(environment.arrow_ipc_path, **options)
    base = environment.job_spec_path.parent
    paths = [str(path) for path in inputs.parquet_paths] or [
        str(base / path) for path in dataset.parquet_paths
    ]
    cache_dir = environment.cache_dir / "decoded" if dataset.decode_cache else None
    return ArrowFeed.open(paths, cache_dir=cache_dir, **options)


def _start_of(checkpoint: Checkpoint | None, source: BatchSource) -> Start:
    if checkpoint is None:
        return Start()
    if checkpoint.cursor is None:
        return Start(step=checkpoint.step, epoch=checkpoint.epoch)
    manifest = checkpoint.identity.get("dataset_manifest")
    epoch, batch = source.position(
        checkpoint.cursor, manifest=None if manifest is None else msgspec.json.encode(manifest)
    )
    is_sample_due = bool(checkpoint.loop.get("is_sample_due", False))
    return Start(step=checkpoint.step, epoch=epoch, batch=batch, is_sample_due=is_sample_due)


def _model_handles(
    environment: WorkerEnvironment, job: TrainingJobSpec, inputs: MaterializedInputs
) -> dict[str, Any]:
    handles: dict[str, Any] = {}
    if inputs.base_model_path is not None:
        handles["base_model"] = inputs.base_model_path
    if job.weights is not None:
        handles["weights"] = environment.job_spec_path.parent / job.weights
        if not handles["weights"].exists():
            raise InputError(f"weights: {handles['weights']} does not exist")
    return handles
