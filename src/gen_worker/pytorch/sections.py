"""`hyperparams` -> RunnerConfig, with all faults at once: of fields, of names in them, and between sections."""

from collections.abc import Callable, Mapping
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
    as_spec,
)

_Document = msgspec.defstruct(
    "_Document", [("hyperparams", RunnerConfig)], kw_only=True, forbid_unknown_fields=True
)


def read_runner_config(hyperparams: object, *, source: str, sample_every: int = 0) -> RunnerConfig:
    """The config, or one SpecError with all faults. Imports torch and the author's modules."""
    faults: list[str] = []
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
    """The sections without faults of their own, so that a fault in one does not hide those in another."""
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

    rate = sections.get("learning_rate", 1e-3)
    checks: dict[str, Callable[[Any], list[str]]] = {
        "model": model_faults,
        "columns": column_rule_faults,
        "loss": lambda loss: loss_faults(as_spec(loss, LossSpec)),
        "optimizer": lambda optimizer: optimizer_faults(as_spec(optimizer, OptimizerSpec), rate),
        "scheduler": lambda scheduler: scheduler_faults(as_spec(scheduler, SchedulerSpec)),
        "metrics": lambda specs: metric_faults(
            {name: as_spec(spec, MetricSpec, "type") for name, spec in specs.items()}
        ),
    }
    found = {name: sections[name] for name in checks if sections.get(name) is not None}
    return [fault for name, section in found.items() for fault in checks[name](section)]


def _joint_faults(sections: Mapping[str, Any], *, sample_every: int) -> list[str]:
    """Faults between sections."""
    from gen_worker.pytorch.model.losses import NEXT_TOKEN

    loss: Any = sections.get("loss")
    columns: ColumnsSpec | None = sections.get("columns")
    name = loss and as_spec(loss, LossSpec).name
    faults = []
    if columns is not None and name == NEXT_TOKEN:
        if len(columns.inputs) != 1:
            faults.append(
                f"hyperparams.columns.inputs: found {len(columns.inputs)}, expected one: next_token reads inputs and"
                " targets from one column"
            )
        if columns.target is not None:
            faults.append(
                "hyperparams.columns.target: next_token makes its targets from the input: remove it"
            )
    elif columns is not None and name is not None and columns.target is None:
        faults.append("hyperparams.columns.target: missing, expected the target column of the loss")
    if sections.get("sample") is not None and name not in (None, NEXT_TOKEN):
        faults.append("hyperparams.sample: sampling needs a model that is trained with next_token")
    if sample_every and sections.get("sample") is None:
        faults.append(f"sample_every: found {sample_every}, but `hyperparams.sample` is missing: add it")
    return faults
