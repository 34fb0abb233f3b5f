"""What authors, the runtime and job documents agree on. Imports no sibling, no torch, no pyarrow.

The records here are the job as parsed, the context and results that pass between the loop and a trainer
class, and the shape of that class. How a document becomes a record, with all its faults at once, is in
`job_spec`; how `module:symbol` becomes a trainer class is in `api`.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

import msgspec

from gen_worker.screen_repr import screen_repr, struct_repr

API_VERSION = "v1"
MAX_EVENT_BYTES = 1 << 20  # of a line of an event file, with its newline: who writes and who reads keep to it

Count = Annotated[int, msgspec.Meta(ge=1)]
Cadence = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Name = Annotated[str, msgspec.Meta(min_length=1)]
RunId = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z",
        description="1 to 128 letters, digits, '.', '_' or '-', the first a letter or digit",
    ),
]
PluginRef = Annotated[
    str, msgspec.Meta(pattern=r"^[A-Za-z_][\w.]*(:[A-Za-z_][\w.]*)?\Z", description="module:symbol")
]
Precision = Literal["fp32", "bf16", "fp16"]


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all parts of a job document."""

    def __repr__(self) -> str:
        return struct_repr(self)


class DatasetSpec(Record, frozen=True, kw_only=True):
    parquet_paths: list[Name] = []
    batch_size: Count = 32
    readahead: Count = 2
    columns: list[Name] | None = None
    shuffle: bool = False
    drop_last: bool = False
    decode_cache: bool = False
    generated: bool = False
    source: PluginRef | None = None
    args: dict[str, Any] = {}


class HeldOutSpec(Record, frozen=True, kw_only=True):
    """`validation` and `test`: a dataset of their own."""

    dataset: DatasetSpec


class EarlyStoppingSpec(Record, frozen=True, kw_only=True):
    metric: Name = "val/loss"
    mode: Literal["min", "max"] = "min"
    patience: Count = 3
    min_delta: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class InputsSpec(Record, frozen=True, kw_only=True):
    base_model_ref: Name | None = None
    dataset_parquet_refs: list[Name] = []
    resume_checkpoint_ref: Name | None = None


class UploadsSpec(Record, frozen=True, kw_only=True):
    """Where artifacts go besides the run's folder: HTTP endpoints or object-store prefixes."""

    metrics_url: Name | None = None
    checkpoint_url: Name | None = None
    sample_url: Name | None = None
    terminal_url: Name | None = None


class CheckpointsSpec(Record, frozen=True, kw_only=True):
    keep_last: Cadence = 3
    keep_best: Cadence = 1
    format: Literal["pt", "safetensors"] = "pt"


class ResourcesSpec(Record, frozen=True, kw_only=True):
    devices: list[Name] | Name | None = None  # one name is a list of one, from the first moment on
    gpus: Cadence | None = None
    cpus: Count | None = None
    memory_mb: Count | None = None
    processes: Count = 1
    nodes: Count = 1

    def __post_init__(self) -> None:
        if isinstance(self.devices, str):
            msgspec.structs.force_setattr(self, "devices", [self.devices])

    @property
    def device_names(self) -> list[str] | None:
        """`devices`, as everybody reads it."""
        return self.devices  # type: ignore[return-value]


class RetrySpec(Record, frozen=True, kw_only=True):
    """Retry, by progress: an attempt that saved a later step than any before it uses up nothing."""

    max_attempts: Cadence = 3
    backoff_s: Annotated[float, msgspec.Meta(ge=0)] = 10.0
    on_error: bool = False


class TrainingJobSpec(Record, frozen=True, kw_only=True):
    """The job, v1: what was asked for. A cadence of 0 is off; steps are optimizer steps."""

    trainer_api_version: Literal["v1"] = "v1"
    run_id: RunId
    name: str | None = None
    trainer: PluginRef | None = None
    owner: str | None = None
    release_ref: str | None = None

    max_steps: Count | None = None
    epochs: Count | None = None
    metric_every: Cadence = 10
    checkpoint_every: Cadence = 500
    sample_every: Cadence = 0
    validate_every: Cadence | Literal["epoch"] = 0
    early_stopping: EarlyStoppingSpec | None = None
    fast_dev_run: Cadence = 0
    overfit_batches: Cadence = 0

    hyperparams: dict[str, Any] = {}
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    precision: Precision = "fp32"
    deterministic: bool = False
    strict: bool = False
    callbacks: list[PluginRef] = []

    dataset: DatasetSpec | None = None
    mock_batches: list[Any] | None = None
    validation: HeldOutSpec | None = None
    test: HeldOutSpec | None = None
    inputs: InputsSpec = InputsSpec()
    uploads: UploadsSpec = UploadsSpec()

    resume_from_latest: bool = True
    resume_checkpoint_path: Name | None = None
    resume_non_finite: bool = False
    resume_older: bool = False
    weights: Name | None = None
    checkpoints: CheckpointsSpec = CheckpointsSpec()
    sample_prompts: list[str | dict[str, Any]] = []
    sample_seed: int | None = None

    resources: ResourcesSpec = ResourcesSpec()
    retry: RetrySpec = RetrySpec()
    time_limit_s: Seconds | None = None
    grace_s: Seconds = 60.0
    heartbeat_s: Seconds = 5.0
    env: dict[Name, str] = {}
    tags: dict[str, str] = {}
    group: Name | None = None
    profiles: dict[str, dict[str, Any]] = {}


class StepControlHints(msgspec.Struct, frozen=True, kw_only=True):
    """What a step asks of the loop: emit no metrics this time; pause before the next step."""

    skip_cadence_emit: bool = False
    backoff_seconds: float | None = 0.0


class StepResult(msgspec.Struct, gc=False):
    """What `train_step` returns. Metric values may be tensors: they are read only when a cadence emits them."""

    metrics: Mapping[str, Any] = {}
    debug: Mapping[str, Any] | None = None
    control: StepControlHints | None = None


class SampleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the `sample` hook is asked for."""

    prompts: Sequence[Any] = ()  # texts and objects, as the job has them
    seed: int | None = None


class StopSignal:
    """The one flag that the loop looks at each step; set by signals, the watcher thread or a test.

    Reading it is an attribute load: no lock, no system call. The first reason given stays.
    """

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

    # `ctx.is_canceled` reads as a value, `ctx.is_canceled()` as a question; both are asked.
    __call__ = __bool__


class Progress:
    """How far the run is. The loop writes it, everyone else reads it."""

    __slots__ = ("epoch", "step")

    def __init__(self) -> None:
        self.step = 0
        self.epoch = 0


class StepContext:
    """What a trainer class may read. The runtime alone advances `step` and `epoch`."""

    __slots__ = (
        "_progress",
        "_stop",
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
    total_steps: int | None  # of the whole run as planned; None where only the end of the data can tell
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
        set_(self, "_stop", StopSignal() if stop is None else stop)
        set_(self, "_progress", Progress() if progress is None else progress)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"the step context is read-only: {name!r} cannot be set; keep what you need in the state that configure() returns"
        )

    def __repr__(self) -> str:
        names = ("step", "epoch", "device", "dtype", "rank", "world_size", "optimizer", "scheduler", "job")
        return screen_repr(self, {name: getattr(self, name) for name in names})

    @property
    def progress(self) -> Progress:
        """The runtime's own handle on `step` and `epoch`."""
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
        """True (as a value or as a call) once the run was asked to stop; long hooks may look at it and return early."""
        return self._stop


@runtime_checkable
class TrainerPlugin(Protocol):
    """A trainer class: the six hooks an author writes, called positionally."""

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
)
