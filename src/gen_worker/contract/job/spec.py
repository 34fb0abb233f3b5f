"""The job, v1: every field of the document. How a document becomes this record, with all its faults, is in `rules`."""

from typing import Annotated, Any, Literal

import msgspec

from gen_worker.contract.job.model_version import ModelVersion
from gen_worker.contract.job.run_ids import RUN_ID
from gen_worker.contract.screen_repr import struct_repr

API_VERSION = "v1"

Count = Annotated[int, msgspec.Meta(ge=1)]
Cadence = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Name = Annotated[str, msgspec.Meta(min_length=1)]
RunId = Annotated[
    str,
    msgspec.Meta(
        pattern=f"^{RUN_ID.pattern}",
        description="1 to 128 letters, digits, '.', '_' or '-', the first a letter or digit",
    ),
]
PluginRef = Annotated[
    str, msgspec.Meta(pattern=r"^[A-Za-z_][\w.]*(:[A-Za-z_][\w.]*)?\Z", description="module:symbol")
]
Precision = Literal["fp32", "bf16", "fp16"]
WorkerMode = Literal["trainer", "inference"]


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


class ArtifactsSpec(Record, frozen=True, kw_only=True):
    """Which samples and videos are kept, by their steps."""

    keep_last: Cadence = 0
    keep_best: Cadence = 0


class ResourcesSpec(Record, frozen=True, kw_only=True):
    devices: list[Name] | Name | None = None  # one name is a list of one, from the first moment on
    gpus: Cadence | None = None
    cpus: Count | None = None
    memory_mb: Count | None = None
    processes: Count = 1
    nodes: Count = 1
    pool: Name = "local"

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


class GateSpec(Record, frozen=True, kw_only=True):
    """What a checkpoint has to pass before it is served. Its hash and its answers to probe rows are always checked."""

    metric: Name | None = None  # of the checkpoints; None: it is not compared
    mode: Literal["min", "max"] = "min"
    tolerance: Annotated[float, msgspec.Meta(ge=0)] = (
        0.0  # by so much it may be worse than the one that is served
    )
    max_latency_ms: Seconds | None = None  # of one full batch of probe rows


class FeedbackSpec(Record, frozen=True, kw_only=True):
    """Rows with their labels come back as parquet; each rule that is given submits the next run."""

    columns: list[
        Name
    ] = []  # of the training data that feedback carries: labels; empty: all that requests lack
    rows: Count | None = None  # so many new rows
    max_age_s: Seconds | None = None  # so long after the oldest new row
    metric: Name | None = None  # an error of the answers, compared with the feedback: see `above`
    above: float | None = None
    keep_mb: Count = 4096  # of answered requests that wait for feedback
    newest_rows: Count | None = None  # of feedback that a run trains on, in whole files; None: all
    train: dict[str, Any] = {}  # laid over the config of the run that trained the served checkpoint


class ServingSpec(Record, frozen=True, kw_only=True):
    """A model server: `mode: inference`."""

    checkpoint: Name | None = None  # its .meta.json
    version: ModelVersion | None = None  # instead of a checkpoint alone; the daemon fills it in
    address: Name = "127.0.0.1:0"  # HOST:PORT, or unix:PATH
    replicas: Count = 1
    max_batch_rows: Count = 32
    max_delay_ms: Annotated[float, msgspec.Meta(ge=0)] = 0.0  # how long a free worker waits for more rows
    max_queue_rows: Count = 4096
    max_body_bytes: Count = 64 << 20
    deadline_ms: Count | None = None  # for requests that bring none
    request_log: Annotated[float, msgspec.Meta(ge=0, le=1)] = (
        0.0  # the share of requests that is kept as parquet
    )
    gate: GateSpec = GateSpec()
    follow: Name | None = None  # a run whose new best checkpoints are promoted
    feedback: FeedbackSpec | None = None


class PredictionSpec(Record, frozen=True, kw_only=True):
    """Predictions for parquet files: `mode: inference`, without a server."""

    checkpoint: Name | None = None
    version: ModelVersion | None = None
    parquet_paths: list[Name]
    out: Name  # a folder
    batch_rows: Count = 32
    columns: list[Name] = []  # of the input that are copied into the output


class TrainingJobSpec(Record, frozen=True, kw_only=True):
    """The job, v1: what was asked for. A cadence of 0 is off; steps are optimizer steps."""

    trainer_api_version: Literal["v1"] = "v1"
    run_id: RunId
    name: str | None = None
    trainer: PluginRef | None = None
    owner: str | None = None
    release_ref: str | None = None
    mode: WorkerMode = "trainer"

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
    artifacts: ArtifactsSpec = ArtifactsSpec()
    sample_prompts: list[str | dict[str, Any]] = []
    sample_seed: int | None = None

    serving: ServingSpec | None = None
    prediction: PredictionSpec | None = None

    resources: ResourcesSpec = ResourcesSpec()
    retry: RetrySpec = RetrySpec()
    time_limit_s: Seconds | None = None
    grace_s: Seconds = 60.0
    heartbeat_s: Seconds = 5.0
    env: dict[Name, str] = {}
    tags: dict[str, str] = {}
    group: Name | None = None
    profiles: dict[str, dict[str, Any]] = {}


JOB_DEFAULTS = TrainingJobSpec(run_id="defaults")
