"""The fields of `hyperparams` in a job of the runner. Records only; imports no torch.

Names of torch, torchmetrics and the author's classes are checked in `sections`. `docs/runner-reference.md` is generated
from these records.
"""

from typing import Annotated, Any, Literal, TypeVar

import msgspec

from gen_worker.contract.job.spec import Cadence, Count, Name

Positive = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Probability = Annotated[float, msgspec.Meta(ge=0, le=1)]
Pair = Annotated[list[Count], msgspec.Meta(min_length=2, max_length=2)]
DtypeName = Literal[
    "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"
]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all records below `hyperparams`."""


S = TypeVar("S", bound=Section)


def as_spec(value: str | S, kind: type[S], field: str = "name") -> S:
    """A text is short for a record with only this field."""
    return kind(**{field: value}) if isinstance(value, str) else value


class ModelSpec(Section, frozen=True, kw_only=True):
    type: Name
    args: dict[str, Any] = {}


class MlpArgs(Section, frozen=True, kw_only=True):
    """`model.args` of `mlp`."""

    out_features: Count
    in_features: Count | None = None
    hidden: list[Count] = msgspec.field(default_factory=lambda: [128])
    activation: Literal["relu", "gelu", "silu", "tanh"] = "relu"
    dropout: Share = 0.0


class CnnArgs(Section, frozen=True, kw_only=True):
    """`model.args` of `cnn`."""

    out_features: Count
    input_shape: Annotated[list[Count], msgspec.Meta(min_length=3, max_length=3)] | None = None
    channels: Annotated[list[Count], msgspec.Meta(min_length=1)] = msgspec.field(
        default_factory=lambda: [16, 32]
    )
    kernel_size: Count = 3
    norm: Literal["batch", "group", "none"] = "batch"
    hidden: list[Count] = msgspec.field(default_factory=lambda: [64])
    dropout: Share = 0.0


class TransformerLmArgs(Section, frozen=True, kw_only=True):
    """`model.args` of `transformer_lm`."""

    vocab_size: Count
    context_length: Count | None = None
    num_layers: Count = 2
    num_heads: Count = 4
    width: Count = 128
    mlp_ratio: Count = 4
    dropout: Share = 0.0
    tie_weights: bool = True


class NormalizeSpec(Section, frozen=True, kw_only=True):
    mean: float | list[float]
    std: Positive | list[Positive]


class ImageSpec(Section, frozen=True, kw_only=True):
    size: Pair
    mode: Literal["L", "RGB"] = "RGB"
    threads: Count = 1


class AugmentSpec(Section, frozen=True, kw_only=True):
    """Random changes of pictures while training, in this order. 0 is off."""

    crop_padding: Cadence = 0
    horizontal_flip: Probability = 0.0
    brightness: Share = 0.0
    contrast: Share = 0.0
    erase: Probability = 0.0


class ColumnSpec(Section, frozen=True, kw_only=True):
    column: Name | None = None
    dtype: DtypeName | None = None
    shape: list[Count] | None = None
    scale: float | None = None
    normalize: NormalizeSpec | None = None
    image: ImageSpec | None = None
    augment: AugmentSpec | None = None
    one_hot: Count | None = None
    sequence_length: Annotated[int, msgspec.Meta(ge=2)] | None = None
    pad_id: int = 0


class ColumnsSpec(Section, frozen=True, kw_only=True):
    inputs: Annotated[dict[Name, Name | ColumnSpec], msgspec.Meta(min_length=1)]
    target: Name | ColumnSpec | None = None


class LossSpec(Section, frozen=True, kw_only=True):
    name: Name
    args: dict[str, Any] = {}


class MetricSpec(Section, frozen=True, kw_only=True):
    type: Name
    args: dict[str, Any] = {}


class OptimizerSpec(Section, frozen=True, kw_only=True):
    name: Name = "AdamW"
    args: dict[str, Any] = {}
    no_weight_decay: list[Name] | Literal["auto"] = []


class SchedulerSpec(Section, frozen=True, kw_only=True):
    name: Name
    args: dict[str, Any] = {}
    every: Literal["step", "epoch"] = "step"
    schedulers: list["SchedulerSpec"] = []


class EmaSpec(Section, frozen=True, kw_only=True):
    decay: Share = 0.999
    every: Count = 1


class CompileSpec(Section, frozen=True, kw_only=True):
    mode: CompileMode = "default"
    backend: Name = "inductor"
    dynamic: bool | None = False
    fullgraph: bool = False


class SampleSpec(Section, frozen=True, kw_only=True):
    num_tokens: Count = 100
    temperature: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    top_k: Count | None = None
    tokenizer: Name = "bytes"


class RunnerConfig(Section, frozen=True, kw_only=True):
    """What `hyperparams` holds in a job of the runner."""

    model: ModelSpec
    columns: ColumnsSpec
    loss: Name | LossSpec
    metrics: dict[Name, Name | MetricSpec] = {}

    optimizer: Name | OptimizerSpec = OptimizerSpec()
    learning_rate: Positive = 1e-3
    scheduler: Name | SchedulerSpec | None = None
    gradient_accumulation: Count = 1
    gradient_clip_norm: Positive | None = None
    gradient_clip_value: Positive | None = None
    ema: EmaSpec | None = None
    freeze: list[Name] = []

    weights_strict: bool = True
    weights_from: Literal["model", "ema"] = "model"
    strategy: Literal["ddp", "fsdp"] = "ddp"
    compile: bool | CompileMode | CompileSpec = False
    channels_last: bool = False
    threads: Count | None = None
    sample: SampleSpec | None = None

    @property
    def loss_spec(self) -> LossSpec:
        return as_spec(self.loss, LossSpec)

    @property
    def optimizer_spec(self) -> OptimizerSpec:
        return as_spec(self.optimizer, OptimizerSpec)

    @property
    def scheduler_spec(self) -> SchedulerSpec | None:
        return None if self.scheduler is None else as_spec(self.scheduler, SchedulerSpec)

    @property
    def metric_specs(self) -> dict[str, MetricSpec]:
        return {name: as_spec(spec, MetricSpec, "type") for name, spec in self.metrics.items()}

    @property
    def compile_spec(self) -> CompileSpec | None:
        match self.compile:
            case False:
                return None
            case True:
                return CompileSpec()
            case CompileSpec() as spec:
                return spec
            case mode:
                return CompileSpec(mode=mode)


SHIPPED_MODELS: dict[str, type[MlpArgs | CnnArgs | TransformerLmArgs]] = {
    "mlp": MlpArgs,
    "cnn": CnnArgs,
    "transformer_lm": TransformerLmArgs,
}


def with_column(spec: str | ColumnSpec, name: str) -> ColumnSpec:
    """The spec with `column` set. A text is the column; the default is `name`."""
    spec = as_spec(spec, ColumnSpec, "column")
    return spec if spec.column is not None else msgspec.structs.replace(spec, column=name)
