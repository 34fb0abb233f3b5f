"""From a version to a model that answers: code, state from the verified checkpoint, evaluation mode, probe rows."""

import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from gen_worker.contract.checkpoints.choice import CheckpointInfo, read_named
from gen_worker.contract.job.model_version import ModelVersion
from gen_worker.contract.job.rules import parse_job_spec
from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.contract.subprocess_contract import find_cache_dir
from gen_worker.errors import CheckpointError, ModelLoadError, PluginError
from gen_worker.frozen_imports import COPY, frozen_variables, import_frozen_code
from gen_worker.inference.messages import ColumnType
from gen_worker.inference.model.inputs import InputColumns, RecordedData, find_inputs
from gen_worker.inference.model.number_types import OTHER_VALUES
from gen_worker.inference.model.orders import ModelOptions
from gen_worker.inference.model.predictor import Predictor
from gen_worker.inference.model.probe import Probe
from gen_worker.inference.model.process import join_before_fork
from gen_worker.trainer.api import load_jobs_plugin
from gen_worker.trainer.checkpoints.files.state_tree import decode
from gen_worker.trainer.checkpoints.store import Checkpoint, CheckpointStore
from gen_worker.trainer.contracts import Progress, StepContext, TrainerPlugin
from gen_worker.trainer.model_runtime import prepare_model_runtime
from gen_worker.trainer.restore.state_restorer import StateRestorer
from gen_worker.trainer.steps.evaluation import modules_of

logger = logging.getLogger("gen_worker.inference")

LARGE_BYTES = 8 << 20  # from here on a thread is worth its start
HOW_TO_PREDICT = (
    "add `predict(self, rows, state, ctx)`, which returns one value a row and name (docs/authoring.md)"
)


@dataclass(slots=True, kw_only=True)
class LoadedModel:
    """Of one process, and of those that are forked from it."""

    predictor: Predictor
    inputs: tuple[ColumnType, ...]  # empty: any
    schema: pa.Schema | None  # of the batches that `predict` gets; None: as the request has it
    probe: Probe | None
    load_ms: float
    outputs: tuple[ColumnType, ...] = ()
    probe_ms: dict[int, float] = field(default_factory=dict)

    def is_settled(self, options: ModelOptions) -> bool:
        """Whether `settle` starts no thread."""
        return options.num_threads == 1

    def settle(self, options: ModelOptions) -> None:
        """In the process that will answer: its threads, and the probe where that has to wait for them."""
        set_threads(options.num_threads)
        if not self.probe_ms:
            self.run_probe(options)

    def run_probe(self, options: ModelOptions) -> None:
        """Every shape is called: the first call of a shape is slow. ModelLoadError where the model does not answer."""
        if self.probe is not None and options.probe:
            self.outputs, self.probe_ms = self.probe.run(self.predictor, options.max_batch_rows)
        if self.schema is None or not all(map(_is_packed, (*self.inputs, *self.outputs))):
            pa.array([None])  # imports pandas where it is installed: now, not with the first request


def load_model(version: ModelVersion, options: ModelOptions) -> LoadedModel:
    """In a process of its own: it takes over the import path, the working folder and the environment. Blocks.

    WorkerError says why it cannot be loaded; else the author's exception.
    """
    started_s = time.perf_counter()
    job = enter(version)
    set_threads(1)  # more would start threads, and this process may have to be forked
    checkpoint = CheckpointReading(version)
    trainer = load_jobs_plugin(version.trainer, job_dir=Path(version.base_dir or Path.cwd()))
    require_predict(trainer, version.trainer)
    leave_out_compiler()
    data = RecordedData.of(checkpoint.identity, job, Path(version.base_dir or Path.cwd()))
    runtime = prepare_model_runtime(
        device=options.device, precision=job.precision, seed=job.seed, deterministic=job.deterministic
    )
    progress = Progress()
    progress.step, progress.epoch = checkpoint.info.step, checkpoint.info.epoch
    ctx = StepContext(
        job=job,
        model_handles=_find_handles(job, Path(version.base_dir or Path.cwd())),
        dataset=data,
        device=runtime.device,
        dtype=runtime.dtype,
        progress=progress,
    )
    state = StateRestorer(trainer=trainer, ctx=ctx).make_to_evaluate(checkpoint.take)
    state = make_servable(trainer, state, ctx)
    set_threads(1)  # the author's module may have set another number
    predictor = Predictor(trainer, state, ctx)
    inputs = find_inputs(trainer, predictor, data, options.max_batch_rows)
    model = LoadedModel(
        predictor=predictor,
        inputs=inputs.types,
        schema=inputs.schema,
        probe=_probe_of(inputs),
        load_ms=0.0,
    )
    if options.num_threads == 1:
        model.run_probe(options)
    model.load_ms = (time.perf_counter() - started_s) * 1000
    return model


def enter(version: ModelVersion) -> TrainingJobSpec:
    """The run's own code, folder and environment, as its worker had them."""
    job = parse_job_spec(version.config, source=f"the job of run {version.run_id}")
    for name, value in job.env.items():
        os.environ.setdefault(name, value)
    if version.code_dir:
        left = {os.environ.get(COPY, ""), version.code_dir}  # the server's own code is not the version's
        given = [
            path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", *left)
        ]
        os.environ["PYTHONPATH"] = os.pathsep.join([version.code_dir, *given])
        os.environ["PYTHONSAFEPATH"] = "1"
        sys.path[:] = [version.code_dir, *(path for path in sys.path if path not in left)]
        os.environ |= frozen_variables(version.frozen_from, version.code_dir)
        if version.frozen_from:
            import_frozen_code()
    if version.base_dir:
        try:
            os.chdir(version.base_dir)
        except OSError as fault:
            logger.warning("the folder of run %s cannot be entered: %s", version.run_id, fault)
    return job


def require_predict(trainer: TrainerPlugin, ref: str) -> None:
    if getattr(trainer, "predict", None) is None:
        raise PluginError(f"{ref} has no `predict`, which serving and predicting need: {HOW_TO_PREDICT}")


class CheckpointReading:
    """The verified checkpoint of a version: the bytes that are loaded are those that were hashed, and the hash is the version's.

    A large one is read and hashed by a thread, while the author's code is imported and makes a fresh state.
    """

    def __init__(self, version: ModelVersion, *, is_begun: bool = True) -> None:
        """CheckpointError where its meta cannot be read, or is another one. `is_begun`: else `take` reads all of it."""
        path = Path(version.checkpoint)
        named = read_named(path)
        if isinstance(named, dict):
            raise CheckpointError(f"{path} is a plain state, expected the .meta.json of a checkpoint")
        found = named.meta.data.hash
        if version.weights_hash and found != version.weights_hash:
            raise CheckpointError(
                f"{path} has the hash {found}, expected {version.weights_hash}: it was replaced since"
            )
        self.info: CheckpointInfo = named
        identity = decode(msgspec.json.decode(named.meta.identity), [], where=f"identity in {path.name}")
        self.identity: dict[str, Any] = identity if isinstance(identity, dict) else {}
        self._loaded: Checkpoint | None = None
        self._fault: BaseException | None = None
        self._thread: threading.Thread | None = None
        if is_begun and named.size_bytes >= LARGE_BYTES:
            self._thread = threading.Thread(target=self._load, name="checkpoint-reader", daemon=True)
            self._thread.start()

    def take(self) -> Checkpoint:
        """Blocks until it is read; nothing of it is kept here. CheckpointError where it is damaged."""
        if self._thread is None:
            self._load()
        else:
            join_before_fork(self._thread)
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            assert self._fault is not None, "it is taken once"
            raise self._fault
        return loaded

    def _load(self) -> None:
        try:
            self._loaded = CheckpointStore(self.info.meta_path.parent).load_found(self.info)
        except BaseException as fault:
            self._fault = fault


def make_servable(trainer: TrainerPlugin, state: Any, ctx: StepContext) -> Any:
    """What `predict` gets: after `serving_state`, in evaluation mode."""
    hook = getattr(trainer, "serving_state", None)
    if hook is not None:
        found = hook(state, ctx)
        if found is None:
            raise ModelLoadError("serving_state returned None, expected the state that `predict` gets")
        state = found
        for name in ("optimizer", "scheduler"):  # the context kept them in memory
            object.__setattr__(ctx, name, None)
    torch = sys.modules.get("torch")
    if torch is not None:
        for module in modules_of(torch, (trainer, state)):
            module.eval()
    return state


def leave_out_compiler() -> None:
    """Let optimizers be made and loaded without `torch._dynamo`, which the first one imports: a second, and 70 MB.

    They have it to stay out of a compiled training step, and nothing steps here. Another torch may keep this elsewhere:
    then it is imported.
    """
    torch = sys.modules.get("torch")
    if torch is None or "torch._dynamo" in sys.modules:
        return
    for method in vars(torch.optim.Optimizer).values():
        function = getattr(method, "__wrapped__", None)
        if function is not None:
            function.__dict__.setdefault("__dynamo_disable", function)


def set_threads(num_threads: int) -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)


def _find_handles(job: TrainingJobSpec, base_dir: Path) -> Mapping[str, Any]:
    """As `find_model_handles` of training; weights to start from may be gone, the checkpoint replaces them."""
    handles: dict[str, Any] = {}
    if job.inputs.base_model_ref is not None:
        from gen_worker.trainer.inputs import materialize_inputs
        from gen_worker.trainer.transfer.input_cache import InputCache

        handles["base_model"] = materialize_inputs(
            base_model_ref=job.inputs.base_model_ref,
            dataset_parquet_refs=(),
            resume_checkpoint_ref=None,
            cache=InputCache(find_cache_dir(os.environ) / "inputs"),
            base_dir=base_dir,
        ).base_model_path
    if job.weights is not None:
        path = base_dir / job.weights
        if path.exists():
            handles["weights"] = path
        else:
            logger.warning("weights: %s does not exist any more; the checkpoint replaces them", path)
    return handles


def _is_packed(column: ColumnType) -> bool:
    """Whether its values are always numbers of one shape, which need no `pa.array`."""
    return column.dtype not in OTHER_VALUES and None not in column.dims and not column.is_nullable


def _probe_of(inputs: InputColumns) -> Probe | None:
    return None if inputs.rows is None else Probe(rows=inputs.rows, are_made_up=inputs.are_made_up)
