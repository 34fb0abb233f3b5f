"""What the HTTP API answers: frozen records under the names of the daemon's own, numbers as JSON can say them."""

import math
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from trn.core.number_words import as_word
from trn.core.runs import AttemptRecord, LineagePart, RunRecord
from trn.gateway.reading.forecast import Forecast
from trn.proto.records import Attempt, Run
from trn.registry.metrics import Series

# Numbers that JSON does not have are words: docs/decisions/0005.
Number = float | Literal["nan", "inf", "-inf"]
RunId = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]


class HttpRun(Run, frozen=True, kw_only=True):
    """A run. `config` is null where it was not asked for."""

    trainer: str = ""  # the class that its job names
    metrics: dict[str, Number] = msgspec.field(default_factory=dict)  # type: ignore[assignment]


class RunPage(msgspec.Struct, frozen=True, kw_only=True):
    """The newest run first. `change`: open the stream after it, and nothing is missed."""

    runs: list[HttpRun]
    next_page_token: str = ""
    change: int = 0


class RunDetails(msgspec.Struct, frozen=True, kw_only=True):
    """A run with its config and what is around it."""

    run: HttpRun
    attempts: list[Attempt]
    folder: str
    family: list[str]  # runs of the same name, the oldest first
    parents: list[str]  # the line of descent, the oldest first
    children: list[str]
    forecast: Forecast | None
    forecast_reason: str  # why there is none


class HttpSeries(msgspec.Struct, frozen=True, kw_only=True):
    """Points of one metric by step. Where thinned out, `mins` and `maxs` are of what each point stands for."""

    name: str
    steps: list[int]
    values: list[Number]
    mins: list[Number]
    maxs: list[Number]
    timestamps_ms: list[int]
    num_points: int


class MetricsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    series: list[HttpSeries]
    lineage: list[LineagePart] = []  # with ancestors: whose points these are, the oldest first


class RunSeries(msgspec.Struct, frozen=True, kw_only=True):
    series: list[HttpSeries]


class OverlayAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """By run."""

    runs: dict[str, RunSeries]


def show_run(run: RunRecord | Run, trainer: str, *, with_config: bool = False) -> HttpRun:
    """Of the registry's record, or of the client's."""
    values = {
        name: getattr(run, name)
        for name in Run.__struct_fields__
        if name not in ("state", "config", "metrics")
    }
    return HttpRun(
        **values,
        state=str(run.state),
        config=dict(run.config or {}) if with_config else None,
        trainer=trainer,
        metrics=_finite_values(run.metrics),
    )


def show_attempt(attempt: AttemptRecord) -> Attempt:
    return Attempt(**{name: getattr(attempt, name) for name in Attempt.__struct_fields__})


def show_series(series: Series) -> HttpSeries:
    return HttpSeries(
        name=series.name,
        steps=series.steps,
        values=_finite(series.values),
        mins=_finite(series.lows),
        maxs=_finite(series.highs),
        timestamps_ms=series.timestamps_ms,
        num_points=series.num_points,
    )


def _finite(values: list[float]) -> list[Number]:
    if all(map(math.isfinite, values)):
        return values  # type: ignore[return-value]
    return [as_word(value) for value in values]  # type: ignore[misc]


def _finite_values(values: Mapping[str, float]) -> dict[str, Number]:
    return {name: as_word(value) for name, value in values.items()}  # type: ignore[misc]
