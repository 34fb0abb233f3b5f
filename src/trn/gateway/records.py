"""What the HTTP API answers: frozen records under the names of the daemon's own, numbers as JSON can say them."""

import math
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from trn.core.number_words import as_word
from trn.core.runs import AttemptRecord, LineagePart, RunRecord
from trn.core.serving.records import Promotion, ServedModel
from trn.gateway.reading.exactness import UNKNOWN, Exactness
from trn.gateway.reading.forecast import Forecast
from trn.proto.records import Attempt, Run
from trn.registry.metrics import Discarded, Series

# Numbers that JSON does not have are words: docs/decisions/0005.
Number = float | Literal["nan", "inf", "-inf"]
RunId = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]


class HttpRun(Run, frozen=True, kw_only=True):
    """A run. `config` is null where it was not asked for."""

    trainer: str = ""  # the class that its job names
    exactness: Exactness = UNKNOWN
    serves: str = ""  # of a server: the model that it answers with, as RUN@STEP
    url: str = ""  # where
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
    exactness: Exactness
    forecast: Forecast | None
    forecast_reason: str  # why there is none
    served: ServedModel | None = None  # of a server that has a name: what that answers with
    promotions: list[Promotion] = []  # of that name, the newest first


class HttpSeries(msgspec.Struct, frozen=True, kw_only=True):
    """Points of one metric by step. With a width above 1 each stands for its bucket, and is the last point of it."""

    name: str
    steps: list[int]
    values: list[Number]
    mins: list[Number]
    maxs: list[Number]
    counts: list[int]
    timestamps_ms: list[int]
    num_points: int  # that there are in the range
    width: int  # of a bucket, in steps; 1: these are the points themselves


class DiscardedSeries(msgspec.Struct, frozen=True, kw_only=True):
    """Points that one attempt reported and a later one took back: it continued from an earlier step."""

    run_id: str
    name: str
    attempt: int
    steps: list[int]
    values: list[Number]
    timestamps_ms: list[int]
    num_points: int


class MetricsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    series: list[HttpSeries]
    discarded: list[DiscardedSeries] = []
    lineage: list[LineagePart] = []  # with ancestors: whose points these are, the oldest first


class RunSeries(msgspec.Struct, frozen=True, kw_only=True):
    series: list[HttpSeries]


class OverlayAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """By run."""

    runs: dict[str, RunSeries]


def show_run(
    run: RunRecord | Run,
    trainer: str,
    exactness: Exactness = UNKNOWN,
    *,
    with_config: bool = False,
    served: ServedModel | None = None,
) -> HttpRun:
    """Of the registry's record, or of the client's."""
    live = None if served is None else served.live
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
        exactness=exactness,
        serves="" if live is None else live.label,
        url="" if served is None else served.url,
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
        counts=series.counts,
        timestamps_ms=series.timestamps_ms,
        num_points=series.num_points,
        width=series.width,
    )


def show_discarded(found: Discarded) -> DiscardedSeries:
    return DiscardedSeries(
        run_id=found.run_id,
        name=found.name,
        attempt=found.attempt,
        steps=found.steps,
        values=_finite(found.values),
        timestamps_ms=found.timestamps_ms,
        num_points=found.num_points,
    )


def _finite(values: list[float]) -> list[Number]:
    if all(map(math.isfinite, values)):
        return values  # type: ignore[return-value]
    return [as_word(value) for value in values]  # type: ignore[misc]


def _finite_values(values: Mapping[str, float]) -> dict[str, Number]:
    return {name: as_word(value) for name, value in values.items()}  # type: ignore[misc]
