"""What differs between runs, and where they part."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from starlette.responses import Response

from trn.client.comparison import Comparison, Divergence, agree, compare, read_facts
from trn.core.errors import InvalidRequestError
from trn.core.home import Home
from trn.core.number_words import as_word
from trn.core.runs import RunRecord
from trn.gateway.answers import Encoded, json_answer
from trn.gateway.endpoints import Call, endpoint
from trn.gateway.parts import Parts
from trn.gateway.records import Number, RunId
from trn.registry.metrics import MetricReader
from trn.registry.reader import RegistryReader

MAX_COMPARED = 100
MAX_POINTS = 20_000_000  # of all pairs, a few seconds; the curves of runs beyond it are not compared

Differences = dict[str, list[Any]]


class CompareQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    run: Annotated[list[RunId], msgspec.Meta(min_length=2, max_length=MAX_COMPARED)]


class HttpDivergence(msgspec.Struct, frozen=True, kw_only=True):
    """The first step at which a metric of two runs differs, and what differs between the two."""

    runs: tuple[str, str]
    metric: str
    step: int
    values: tuple[Number, Number]
    num_equal: int
    differing: dict[str, list[str]]  # config, code, packages, data -> names


class ComparisonAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Only what differs; values in the order of the runs, null where a run does not have it."""

    runs: tuple[str, ...]
    config: Differences
    code: Differences
    packages: Differences
    data: Differences
    metrics: dict[str, list[Number | None]]  # all of them: the last value
    divergences: list[HttpDivergence]  # of each run and the first
    num_common: list[int]  # steps at which the first and each other run have a metric in common
    unknown: dict[str, list[str]]  # part -> runs for which it is unknown


@endpoint("GET", "/compare", ComparisonAnswer)
async def compare_runs(parts: Parts, call: Call[CompareQuery]) -> Response:
    """What differs between 2 to 100 runs: config, code, packages, data, metrics; the first step where they part."""
    wanted = call.asked.run
    if len(set(wanted)) != len(wanted):
        raise InvalidRequestError("a run is given twice")

    def read(registry: RegistryReader, metrics: MetricReader | None) -> Encoded:
        found, too_long = _compare(parts.home, [registry.get(run_id) for run_id in wanted], metrics)
        return Encoded.of(_show(found, too_long))

    return json_answer(await parts.stores.read_both(read), call.accept_encoding)


def _compare(home: Home, runs: list[RunRecord], metrics: MetricReader | None) -> tuple[Comparison, list[str]]:
    """(what differs, runs whose curves are too long to be walked here)."""
    facts = [read_facts(home, run, metrics) for run in runs]
    agreements, too_long, left = [], [], MAX_POINTS
    for run in runs[1:]:
        num_points = min(run.step, runs[0].step) * max(len(run.metrics), 1)  # at most: a point for each step
        is_walked = num_points <= left
        left -= num_points if is_walked else 0
        too_long += [] if is_walked else [run.run_id]
        agreements.append(agree(metrics if is_walked else None, runs[0], run))
    return compare(facts, agreements), too_long


def _show(found: Comparison, too_long: list[str]) -> ComparisonAnswer:
    metrics: dict[str, list[Any]] = {
        name: [None if value is None else as_word(value) for value in values]
        for name, values in found.metrics.items()
    }
    return ComparisonAnswer(
        runs=found.runs,
        config=found.config,
        code=found.code,
        packages=found.packages,
        data=found.data,
        metrics=metrics,
        divergences=[_explain(each, found) for each in found.divergences],
        num_common=found.num_common,
        unknown={**found.unknown, **({"metrics": too_long} if too_long else {})},
    )


def _explain(each: Divergence, found: Comparison) -> HttpDivergence:
    places = [found.runs.index(run_id) for run_id in each.runs]
    parts: dict[str, Mapping[str, list[Any]]] = {
        "config": found.config,
        "code": found.code,
        "packages": found.packages,
        "data": found.data,
    }
    values: tuple[Any, Any] = (as_word(each.values[0]), as_word(each.values[1]))
    return HttpDivergence(
        runs=each.runs,
        metric=each.metric,
        step=each.step,
        values=values,
        num_equal=each.num_equal,
        differing={
            part: [name for name, items in names.items() if items[places[0]] != items[places[1]]]
            for part, names in parts.items()
        },
    )


ENDPOINTS = [compare_runs]
