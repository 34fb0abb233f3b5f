"""Metric points: of one run, or of several over each other."""

from typing import Annotated

import msgspec
from starlette.responses import Response

from trn.core.errors import InvalidRequestError
from trn.core.runs import LineagePart
from trn.gateway.answers import Encoded, json_answer
from trn.gateway.endpoints import Call, endpoint
from trn.gateway.parts import Parts
from trn.gateway.records import MetricsAnswer, OverlayAnswer, RunId, RunSeries, show_discarded, show_series
from trn.registry.metrics import MetricReader, Series, line_of_descent
from trn.registry.reader import RegistryReader

MAX_ANSWER = 500_000  # points
MAX_RUNS = 100
MAX_NAMES = 200

Step = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
MetricName = Annotated[str, msgspec.Meta(min_length=1, max_length=300)]


class MetricsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    run_id: RunId
    name: Annotated[list[MetricName], msgspec.Meta(max_length=MAX_NAMES)] = []  # none: all
    from_step: Step | None = None  # both steps are included
    to_step: Step | None = None
    max_points: Annotated[int, msgspec.Meta(ge=0, le=MAX_ANSWER)] = 1000  # of each metric; 0: all
    with_discarded: bool = False  # also what later attempts took back
    with_ancestors: bool = False  # the whole line of descent as one curve


class OverlayQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    run: Annotated[list[RunId], msgspec.Meta(min_length=1, max_length=MAX_RUNS)]
    name: Annotated[list[MetricName], msgspec.Meta(max_length=MAX_NAMES)] = []
    from_step: Step | None = None
    to_step: Step | None = None
    max_points: Annotated[int, msgspec.Meta(ge=0, le=MAX_ANSWER)] = 400


@endpoint("GET", "/runs/{run_id}/metrics", MetricsAnswer)
async def get_metrics(parts: Parts, call: Call[MetricsQuery]) -> Response:
    """Metric points of a run, thinned out to `max_points` of each metric."""
    asked = call.asked

    def read(registry: RegistryReader, metrics: MetricReader | None) -> Encoded:
        run = registry.get(asked.run_id)
        lineage = registry.lineage(run) if asked.with_ancestors else []
        stretches = line_of_descent(
            lineage or [LineagePart(run_id=run.run_id)], asked.from_step, asked.to_step
        )
        if metrics is None:
            return Encoded.of(MetricsAnswer(series=[], lineage=lineage))
        found = metrics.query_line(stretches, asked.name, asked.max_points, MAX_ANSWER)
        left = MAX_ANSWER - sum(len(series.steps) for series in found)
        discarded = (
            metrics.discarded(stretches, asked.name, asked.max_points, left) if asked.with_discarded else []
        )
        return Encoded.of(
            MetricsAnswer(
                series=[show_series(series) for series in found],
                discarded=[show_discarded(part) for part in discarded],
                lineage=lineage,
            )
        )

    return json_answer(await parts.stores.read_both(read), call.accept_encoding)


@endpoint("GET", "/metrics", OverlayAnswer)
async def overlay_metrics(parts: Parts, call: Call[OverlayQuery]) -> Response:
    """The same metrics of up to 100 runs."""
    asked = call.asked

    def read(registry: RegistryReader, metrics: MetricReader | None) -> Encoded:
        unknown = registry.unknown_ids(asked.run)
        if unknown:
            raise InvalidRequestError(f"there is no run {', '.join(unknown)}")
        found: dict[str, list[Series]] = {run_id: [] for run_id in asked.run}
        if metrics is not None:
            found = metrics.query_runs(
                asked.run, asked.name, asked.from_step, asked.to_step, asked.max_points, MAX_ANSWER
            )
        runs = {
            run_id: RunSeries(series=[show_series(each) for each in those]) for run_id, those in found.items()
        }
        return Encoded.of(OverlayAnswer(runs=runs))

    return json_answer(await parts.stores.read_both(read), call.accept_encoding)


ENDPOINTS = [get_metrics, overlay_metrics]
