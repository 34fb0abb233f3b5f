"""Runs as the registry has them, also while no daemon runs."""

import time
from collections.abc import Sequence
from typing import Annotated

import msgspec
from starlette.responses import Response

from trn.core.errors import NotFoundError
from trn.core.runs import SERVER, RunRecord, RunState
from trn.core.serving.records import ServedModel
from trn.gateway.answers import json_answer
from trn.gateway.endpoints import Call, endpoint
from trn.gateway.parts import Parts
from trn.gateway.reading.forecast import MAX_PAST, forecast
from trn.gateway.records import HttpRun, RunDetails, RunId, RunPage, show_attempt, show_run
from trn.proto.page_tokens import make_page_token, read_page_token
from trn.proto.records import Run
from trn.registry.metrics import MetricReader
from trn.registry.reader import RegistryReader

GROUP = "group"  # a job's group is kept as this tag
CACHED = "private, no-cache"


class RunsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100
    page_token: Annotated[str, msgspec.Meta(max_length=300)] = ""  # of the page before
    state: list[RunState] = []
    name: Annotated[str, msgspec.Meta(max_length=300)] = ""  # part of the run's name
    tag: list[Annotated[str, msgspec.Meta(pattern=":")]] = []  # key:value; a run has all of them
    group: Annotated[str, msgspec.Meta(max_length=300)] = ""
    with_config: bool = False


class RunPath(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    run_id: RunId


@endpoint("GET", "/runs", RunPage)
async def list_runs(parts: Parts, call: Call[RunsQuery]) -> Response:
    """The runs, newest first. Answers with an ETag: unchanged runs cost 304 and no body."""
    asked = call.asked
    version = (await parts.stores.last_change(), parts.exactness.version())
    headers = {"etag": parts.stores.tag(*version), "cache-control": CACHED}
    if call.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    before = read_page_token(asked.page_token)

    def make(reader: RegistryReader, metrics: MetricReader | None) -> RunPage:
        change = reader.last_change()  # first: a run that changes meanwhile comes again by the stream
        found = _read_page(reader, asked, before)
        is_more = len(found) == asked.limit
        return RunPage(
            runs=show_runs(parts, reader, metrics, found, with_config=asked.with_config),
            next_page_token=make_page_token(found[-1].submitted_ms, found[-1].run_id) if is_more else "",
            change=change,
        )

    answer = await parts.stores.cached(("runs", msgspec.json.encode(asked)), version, make)
    return json_answer(answer, call.accept_encoding, headers=headers)


@endpoint("GET", "/runs/{run_id}", RunDetails)
async def get_run(parts: Parts, call: Call[RunPath]) -> Response:
    """One run with its config, its attempts and its relatives."""
    details = await parts.stores.read_both(
        lambda reader, metrics: _read_details(parts, reader, metrics, call.asked.run_id)
    )
    return json_answer(details, call.accept_encoding)


def _read_page(reader: RegistryReader, asked: RunsQuery, before: tuple[int, str] | None) -> list[RunRecord]:
    tags = dict(tag.split(":", 1) for tag in asked.tag)
    if asked.group:
        tags[GROUP] = asked.group
    return reader.page(
        states=asked.state,
        name=asked.name,
        tags=tags,
        before=before,
        limit=asked.limit,
        with_config=asked.with_config,
    )


def show_runs(
    parts: Parts,
    reader: RegistryReader,
    metrics: MetricReader | None,
    runs: Sequence[RunRecord],
    *,
    with_config: bool = False,
) -> list[HttpRun]:
    trainers = reader.trainers([run.run_id for run in runs])
    shown = []
    for run in runs:
        trainer = trainers.get(run.run_id, "")
        exactness = parts.exactness.read(run, trainer, metrics)
        served = find_served(reader, run)
        shown.append(show_run(run, trainer, exactness, with_config=with_config, served=served))
    return shown


def find_served(reader: RegistryReader, run: RunRecord | Run) -> ServedModel | None:
    """What a server's name answers with; None where it has none, or another server has it by now."""
    if run.kind != SERVER:
        return None
    try:
        return reader.served_by(run.run_id)
    except NotFoundError:
        return None


def _read_details(
    parts: Parts, reader: RegistryReader, metrics: MetricReader | None, run_id: str
) -> RunDetails:
    run = reader.get(run_id)
    shown = show_runs(parts, reader, metrics, [run], with_config=True)[0]
    attempts = reader.attempts(run_id)
    past = [] if run.state.is_terminal else reader.past_speeds(shown.trainer, MAX_PAST)
    outlook = forecast(run, attempts, past, time.time_ns() // 1_000_000, shown.trainer)
    served = find_served(reader, run)
    return RunDetails(
        run=shown,
        attempts=[show_attempt(attempt) for attempt in attempts],
        folder=str(parts.home.run(run_id).root),
        family=reader.members(run.family),
        parents=[part.run_id for part in reader.lineage(run)[:-1]],
        children=[child for child, _ in reader.children([run_id])],
        exactness=shown.exactness,
        forecast=outlook.forecast,
        forecast_reason=outlook.reason,
        served=served,
        promotions=[] if served is None else reader.promotions(served.name),
    )


ENDPOINTS = [list_runs, get_run]
