"""`hyperparams` -> RunnerConfig, with every fault at once: of the fields, of the names in them, and between them."""

from collections.abc import Mapping
from typing import Any

import msgspec

from gen_worker.contract.document_schema import convert_document
from gen_worker.contract.documents import shorten_faults
from gen_worker.errors import SpecError
from gen_worker.pytorch.config import (
    ColumnsSpec,
    LossSpec,
    MetricSpec,
    OptimizerSpec,
    RunnerConfig,
    SchedulerSpec,
)

_Document = msgspec.defstruct(
    "_Document", [("hyperparams", RunnerConfig)], kw_only=True, forbid_unknown_fields=True
)


def read_runner_config(
    hyperparams: object, *, source: str, sample_every: int = 0, more_faults: list[str] | None = None
) -> RunnerConfig:
    """The config, or one SpecError with all faults (`more_faults` come first). Imports torch, and the author's modules."""
    faults = list(more_faults or [])
    config: RunnerConfig | None = None
    try:
        config = convert_document({"hyperparams": hyperparams}, _Document, source=source).hyperparams  # type: ignore[attr-defined]
    except SpecError as error:
        faults += error.faults
    sections = _sound_sections(hyperparams)
    faults += _section_faults(sections)
    faults += _joint_faults(sections, sample_every=sample_every)
    if faults or config is None:
        raise SpecError(source, shorten_faults(faults))
    return config


def _sound_sections(hyperparams: object) -> dict[str, Any]:
    """Each section that is right in itself, so that a fault in one does not hide those in another."""
    if not isinstance(hyperparams, Mapping):
        return {}
    found: dict[str, Any] = {}
    for field in msgspec.structs.fields(RunnerConfig):
        if field.name not in hyperparams:
            continue
        alone = msgspec.defstruct("_Section", [(field.name, field.type)], kw_only=True)
        try:
            record = convert_document({field.name: hyperparams[field.name]}, alone, source="hyperparams")
        except SpecError:
            continue
        found[field.name] = getattr(record, field.name)
    return found


def _section_faults(sections: Mapping[str, Any]) -> list[str]:
    from gen_worker.pytorch.data.columns import column_rule_faults
    from gen_worker.pytorch.model.build import model_faults
    from gen_worker.pytorch.model.losses import loss_faults
    from gen_worker.pytorch.model.metrics import metric_faults
    from gen_worker.pytorch.model.optimizers import optimizer_faults, scheduler_faults

    faults: list[str] = []
    match sections.get("model"):
        case None:
            pass
        case model:
            faults += model_faults(model)
    match sections.get("columns"):
        case ColumnsSpec() as columns:
            faults += column_rule_faults(columns)
    match sections.get("loss"):
        case LossSpec() as loss:
            faults += loss_faults(loss)
        case str() as name:
            faults += loss_faults(LossSpec(name=name))
    match sections.get("optimizer"):
        case OptimizerSpec() as optimizer:
            faults += optimizer_faults(optimizer, sections.get("learning_rate", 1e-3))
        case str() as name:
            faults += optimizer_faults(OptimizerSpec(name=name))
    match sections.get("scheduler"):
        case SchedulerSpec() as scheduler:
            faults += scheduler_faults(scheduler)
        case str() as name:
            faults += scheduler_faults(SchedulerSpec(name=name))
    metrics: Mapping[str, str | MetricSpec] = sections.get("metrics", {})
    return faults + metric_faults(
        {
            name: spec if isinstance(spec, MetricSpec) else MetricSpec(type=spec)
            for name, spec in metrics.items()
        }
    )


def _joint_faults(sections: Mapping[str, Any], *, sample_every: int) -> list[str]:
    """Faults between sections."""
    from gen_worker.pytorch.model.losses import NEXT_TOKEN

    loss, columns = sections.get("loss"), sections.get("columns")
    name = loss.name if isinstance(loss, LossSpec) else loss
    faults = []
    if isinstance(columns, ColumnsSpec) and name == NEXT_TOKEN:
        if len(columns.inputs) != 1:
            faults.append(
                f"hyperparams.columns.inputs: found {len(columns.inputs)}, expected one: next_token reads the tokens, and"
                " what follows each of them, from the same column"
            )
        if columns.target is not None:
            faults.append(
                "hyperparams.columns.target: next_token makes its targets from the input: leave it out"
            )
    elif isinstance(columns, ColumnsSpec) and name is not None and columns.target is None:
        faults.append("hyperparams.columns.target: missing, expected the column that the loss compares with")
    if sections.get("sample") is not None and name not in (None, NEXT_TOKEN):
        faults.append("hyperparams.sample: only a model that is trained with next_token can be sampled from")
    if sample_every and sections.get("sample") is None:
        faults.append(
            f"sample_every: found {sample_every}, but the runner has nothing to sample: give `hyperparams.sample`"
        )
    return faults
