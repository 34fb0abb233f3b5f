"""What a version must pass before it answers. Pure: figures in, a refusal or nothing out."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from gen_worker.contract.checkpoints.choice import CheckpointInfo
from gen_worker.contract.job.spec import GateSpec
from gen_worker.inference.messages import ColumnType, Ready


class RefusedError(Exception):
    """A version is not served. `cause` is an id, the words are for people."""

    def __init__(self, cause: str, words: str) -> None:
        super().__init__(words)
        self.cause = cause
        self.words = words


class _LoopState(msgspec.Struct):
    """Of a checkpoint's loop state, what the gate reads."""

    class _TrainerState(msgspec.Struct):
        metrics: dict[str, Any] = {}

    trainer_state: _TrainerState = msgspec.field(default_factory=_TrainerState)


def recorded_metric(info: CheckpointInfo, name: str) -> float | None:
    """The newest value of that metric when the checkpoint was saved; None where there is no finite one."""
    meta = info.meta
    value: Any = None
    if meta.metric is not None and meta.metric.name == name:
        value = meta.metric.value
    else:
        value = _recorded(info).get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def _recorded(info: CheckpointInfo) -> dict[str, Any]:
    try:
        return msgspec.json.decode(info.meta.loop, type=_LoopState).trainer_state.metrics
    except msgspec.MsgspecError:
        return {}


def require_metric(
    gate: GateSpec, new: CheckpointInfo, live: CheckpointInfo | None, figures: dict[str, Any]
) -> None:
    """RefusedError where the metric is worse than that of the served checkpoint by more than the tolerance.

    `live` is None where the served checkpoint cannot be read any more. Where it has no such metric, any value is better.
    """
    if gate.metric is None:
        return
    value = recorded_metric(new, gate.metric)
    before = None if live is None else recorded_metric(live, gate.metric)
    figures["metric"] = {"name": gate.metric, "value": value, "live": before, "tolerance": gate.tolerance}
    if value is None:
        there = ", ".join(name for name in sorted(_recorded(new)) if recorded_metric(new, name) is not None)
        raise RefusedError(
            "metric",
            f"its checkpoint has no finite {gate.metric}, which the gate compares; it has {there or 'no metric'}",
        )
    if before is None:
        return
    worse_by = value - before if gate.mode == "min" else before - value
    if worse_by > gate.tolerance:
        allowed = f" by more than {gate.tolerance:g}" if gate.tolerance else ""
        raise RefusedError(
            "metric", f"{gate.metric} is {value:.6g}, worse than {before:.6g} of the served version{allowed}"
        )


def require_latency(gate: GateSpec, ready: Ready, figures: dict[str, Any]) -> None:
    """RefusedError where a full batch of probe rows took too long."""
    shape = max(ready.probe_ms, default=None)
    if shape is not None:
        figures["probe_ms"] = round(ready.probe_ms[shape], 3)
    if gate.max_latency_ms is None:
        return
    figures["max_latency_ms"] = gate.max_latency_ms
    if shape is None:
        raise RefusedError("latency", "the time of a full batch of probe rows is not known")
    if ready.probe_ms[shape] > gate.max_latency_ms:
        raise RefusedError(
            "latency",
            f"a full batch of {shape} probe rows took {ready.probe_ms[shape]:.3g} ms, at most"
            f" {gate.max_latency_ms:g} ms are allowed",
        )


def require_columns(new: Ready, live: Ready) -> None:
    """RefusedError where a request that the served version answers would be refused, or would miss a part of its answer."""
    faults = []
    for column, found in _mismatches(live.outputs, new.outputs):
        lacks = "lack" if found is None else f"have {_type_of(found)} as"
        faults.append(
            f"its answers {lacks} {column.name}, which is {_type_of(column)} in those of the served version"
        )
    for column, found in _mismatches(new.inputs, live.inputs):
        there = "does not" if found is None else f"takes {_type_of(found)}"
        faults.append(f"it needs a column {column.name} ({_type_of(column)}), the served version {there}")
    if faults:
        raise RefusedError("columns", "; ".join(faults))


def _mismatches(
    wanted: Sequence[ColumnType], there: Sequence[ColumnType]
) -> Iterator[tuple[ColumnType, ColumnType | None]]:
    by_name = {column.name: column for column in there}
    for column in wanted:
        found = by_name.get(column.name)
        if found is None or not _is_alike(column, found):
            yield column, found


def _is_alike(one: ColumnType, other: ColumnType) -> bool:
    if "any" in (one.dtype, other.dtype):
        return True
    sizes_agree = len(one.dims) == len(other.dims) and all(
        None in pair or pair[0] == pair[1] for pair in zip(one.dims, other.dims, strict=True)
    )
    return one.dtype == other.dtype and sizes_agree


def _type_of(column: ColumnType) -> str:
    return column.dtype + "".join(f"[{'any' if size is None else size}]" for size in column.dims)


def require_errors(name: str, new: float, live: float, rows: int, figures: dict[str, Any]) -> None:
    """RefusedError where the error on the newest feedback is larger than that of the served version on the same rows."""
    figures["feedback"] = {"metric": name, "value": new, "live": live, "rows": rows}
    if not new <= live and not math.isnan(live):
        raise RefusedError(
            "feedback",
            f"{name} on the newest {rows} rows of feedback is {new:.6g}, that of the served version is {live:.6g}",
        )
