"""`TrainerConfig`: the settings of a `Trainer` used from Python, with the names of the job's fields."""

from typing import Annotated, Any, Literal

import msgspec

from gen_worker.contract.document_schema import convert_document
from gen_worker.contract.job.spec import (
    JOB_DEFAULTS,
    Cadence,
    CheckpointsSpec,
    Count,
    DatasetSpec,
    EarlyStoppingSpec,
    HeldOutSpec,
    Precision,
    RunId,
    TrainingJobSpec,
)
from gen_worker.contract.screen_repr import struct_repr
from gen_worker.errors import Fault, SpecError

Positive = Annotated[float, msgspec.Meta(gt=0)]


class _Named(msgspec.StructMeta):
    """Misspelt arguments are faults like others: msgspec names the first one alone, and no nearest name."""

    def __call__(self, *args: Any, **given: Any) -> Any:
        if given.keys() <= set(self.__struct_fields__):
            return super().__call__(*args, **given)
        plain = {name: _plain(value) for name, value in given.items()}
        try:
            return convert_document(plain, _schema(), source=self.__name__)
        except SpecError as error:
            faults = [_with_hint(fault) for fault in error.faults]
        raise SpecError(self.__name__, faults)


def _with_hint(fault: str) -> str:
    is_own = isinstance(fault, Fault) and fault.kind == "unknown-field" and not fault.hint
    return f"{fault}: settings of your own belong into `hyperparams`" if is_own else fault


class TrainerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, metaclass=_Named):
    """How to train. A cadence of 0 is off; steps are optimizer steps. SpecError lists every fault.

    `learning_rate`, `gradient_accumulation` and `gradient_clip_norm` reach the trainer class in `ctx.job.hyperparams`.
    """

    epochs: Count | None = None
    max_steps: Count | None = None
    batch_size: Count = DatasetSpec().batch_size
    shuffle: bool = DatasetSpec().shuffle
    drop_last: bool = DatasetSpec().drop_last
    learning_rate: Positive | None = None
    gradient_accumulation: Count | None = None
    gradient_clip_norm: Positive | None = None
    precision: Precision = JOB_DEFAULTS.precision
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = JOB_DEFAULTS.seed
    deterministic: bool = JOB_DEFAULTS.deterministic
    strict: bool = JOB_DEFAULTS.strict
    metric_every: Cadence = JOB_DEFAULTS.metric_every
    validate_every: Cadence | Literal["epoch"] = "epoch"
    checkpoint_every: Cadence = JOB_DEFAULTS.checkpoint_every
    sample_every: Cadence = JOB_DEFAULTS.sample_every
    early_stopping: EarlyStoppingSpec | None = None
    checkpoints: CheckpointsSpec = JOB_DEFAULTS.checkpoints
    fast_dev_run: Cadence = JOB_DEFAULTS.fast_dev_run
    overfit_batches: Cadence = JOB_DEFAULTS.overfit_batches
    resume_from_latest: bool = JOB_DEFAULTS.resume_from_latest
    hyperparams: dict[str, Any] = {}

    def __post_init__(self) -> None:
        faults = []
        if self.epochs is None and self.max_steps is None and not self.fast_dev_run:
            faults.append("epochs: neither it nor `max_steps` is given, expected one of them")
        given = self.hyperparams if isinstance(self.hyperparams, dict) else {}
        doubled = [name for name in _HYPERPARAMS if getattr(self, name) is not None and name in given]
        faults += [
            f"hyperparams.{name}: given together with `{name}`, expected one of the two" for name in doubled
        ]
        plain = {name: _plain(value) for name, value in msgspec.structs.asdict(self).items()}
        found: Any = convert_document(plain, _schema(), source="TrainerConfig", more_faults=faults)
        for name in ("early_stopping", "checkpoints"):  # plain dicts become the records they describe
            msgspec.structs.force_setattr(self, name, getattr(found, name))

    def __repr__(self) -> str:
        return struct_repr(self)

    @classmethod
    def from_document(cls, data: object, *, source: str = "TrainerConfig") -> "TrainerConfig":
        """From plain data. For a misspelt field, the error names the nearest one."""
        return cls(**msgspec.structs.asdict(convert_document(data, _schema(), source=source)))

    def to_job(
        self,
        run_id: RunId,
        *,
        train: list[str] | None = None,
        validation: list[str] | None = None,
        test: list[str] | None = None,
        has_validation: bool = False,
    ) -> TrainingJobSpec:
        """These settings as a job on parquet files. Data in memory is not part of a job."""
        own = {name: value for name in _HYPERPARAMS if (value := getattr(self, name)) is not None}
        is_validated = has_validation or validation is not None
        return TrainingJobSpec(
            run_id=run_id,
            epochs=self.epochs,
            max_steps=self.max_steps,
            metric_every=self.metric_every,
            checkpoint_every=self.checkpoint_every,
            sample_every=self.sample_every,
            validate_every=self.validate_every if is_validated else 0,
            early_stopping=self.early_stopping,
            fast_dev_run=self.fast_dev_run,
            overfit_batches=self.overfit_batches,
            hyperparams={**self.hyperparams, **own},
            seed=self.seed,
            precision=self.precision,
            deterministic=self.deterministic,
            strict=self.strict,
            dataset=None
            if train is None
            else self._dataset(train, shuffle=self.shuffle, drop_last=self.drop_last),
            validation=None if validation is None else HeldOutSpec(dataset=self._dataset(validation)),
            test=None if test is None else HeldOutSpec(dataset=self._dataset(test)),
            checkpoints=self.checkpoints,
            resume_from_latest=self.resume_from_latest,
        )

    def _dataset(self, paths: list[str], *, shuffle: bool = False, drop_last: bool = False) -> DatasetSpec:
        return DatasetSpec(
            parquet_paths=paths, batch_size=self.batch_size, shuffle=shuffle, drop_last=drop_last
        )


def _plain(value: Any) -> Any:
    """Records as dicts; everything else unchanged, so that the schema judges it."""
    if not isinstance(value, msgspec.Struct):
        return value
    return {name: _plain(item) for name, item in msgspec.structs.asdict(value).items()}


_HYPERPARAMS = ("learning_rate", "gradient_accumulation", "gradient_clip_norm")


def _schema() -> type[msgspec.Struct]:
    """The same fields without `__post_init__`."""
    fields = [
        (field.name, field.type, field.default)
        for field in msgspec.structs.fields(TrainerConfig)
        if field.default is not msgspec.NODEFAULT
    ]
    fields += [
        (field.name, field.type, msgspec.field(default_factory=field.default_factory))
        for field in msgspec.structs.fields(TrainerConfig)
        if field.default is msgspec.NODEFAULT
    ]
    return msgspec.defstruct("TrainerConfig", fields, frozen=True, kw_only=True, forbid_unknown_fields=True)


def debug_settings(job: TrainingJobSpec) -> TrainingJobSpec:
    """The job with `fast_dev_run` applied: a few steps, all reported, one validation, one checkpoint."""
    steps = job.fast_dev_run
    if not steps:
        return job
    validate_every = steps if job.validation is not None or job.validate_every else 0
    return msgspec.structs.replace(
        job,
        max_steps=min(steps, job.max_steps or steps),
        metric_every=1,
        checkpoint_every=0,
        validate_every=validate_every,
        sample_every=steps if job.sample_every else 0,
    )
