"""The machine: what it has, who holds it now, held it before and waits for it; and the processes of trn on it."""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from starlette.responses import Response

from trn.core.causes import CPU, GPU, MEMORY, Cause
from trn.core.errors import InvalidRequestError
from trn.core.runs import AttemptRecord, Needs, RunRecord, RunState
from trn.gateway.answers import json_answer
from trn.gateway.daemon_link import GatewayHealth
from trn.gateway.endpoints import Call, Nothing, endpoint
from trn.gateway.parts import Parts
from trn.proto.records import Machine
from trn.registry.reader import RegistryReader

MAX_BARS, MAX_WAITING = 2000, 200
DAY_MS = 86_400_000
CPU_LANE = "cpu"  # of attempts that hold no device

Time = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


class LanesQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    from_ms: Time | None = None  # default: a day before `to_ms`
    to_ms: Time | None = None  # default: now


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt: from when to when it held the lane. `to_ms` is null while it lives."""

    run_id: str
    attempt: int
    from_ms: int
    to_ms: int | None
    step: int
    cause: Cause
    reason: str


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    lane: str  # a device's id, or `cpu` for attempts without one
    bars: list[Bar]


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """A run that waits: for what, and who holds that."""

    run_id: str
    name: str
    priority: int
    submitted_ms: int
    not_before_ms: int
    needs: Needs
    cause: Cause
    reason: str
    holders: list[str]


class Disk(msgspec.Struct, frozen=True, kw_only=True):
    """The file system that holds the home."""

    total_bytes: int
    free_bytes: int


class LanesAnswer(msgspec.Struct, frozen=True, kw_only=True):
    from_ms: int
    to_ms: int
    lanes: list[Lane]
    queue: list[Waiting]  # in the order in which they would start
    is_cut: bool  # there are more attempts than were sent: ask for less time
    disk: Disk


@endpoint("GET", "/devices", Machine)
async def list_devices(parts: Parts, call: Call[Nothing]) -> Response:
    """Devices, CPUs and memory, and who holds them. Needs a daemon."""
    return json_answer(await parts.daemon.calls.devices(), call.accept_encoding)


@endpoint("GET", "/machine/lanes", LanesAnswer)
async def list_lanes(parts: Parts, call: Call[LanesQuery]) -> Response:
    """Which attempt held which device, over time, and what waits."""
    to_ms = call.asked.to_ms or time.time_ns() // 1_000_000
    from_ms = to_ms - DAY_MS if call.asked.from_ms is None else call.asked.from_ms
    if from_ms > to_ms:
        raise InvalidRequestError(f"from_ms is {from_ms}, after to_ms, {to_ms}")
    return json_answer(
        await parts.stores.read(lambda reader: _read_lanes(reader, from_ms, to_ms, parts.home.root)),
        call.accept_encoding,
    )


@endpoint("GET", "/health", GatewayHealth)
async def get_health(parts: Parts, call: Call[Nothing]) -> Response:
    """The daemon and the gateway. Also answers while no daemon runs."""
    return json_answer(await parts.daemon.health(), call.accept_encoding)


def _read_lanes(reader: RegistryReader, from_ms: int, to_ms: int, home: Path) -> LanesAnswer:
    attempts = reader.attempts_between(from_ms, to_ms, MAX_BARS)
    lanes: dict[str, list[Bar]] = {slot["device_id"]: [] for slot in reader.slots()}
    lanes[CPU_LANE] = []
    for attempt in attempts:
        for lane in attempt.devices or (CPU_LANE,):
            lanes.setdefault(lane, []).append(_bar(attempt))
    pending = reader.page(states=[RunState.PENDING], limit=MAX_WAITING)
    pending.sort(key=lambda run: (-run.priority, run.submitted_ms, run.run_id))
    return LanesAnswer(
        from_ms=from_ms,
        to_ms=to_ms,
        lanes=[Lane(lane=name, bars=bars) for name, bars in lanes.items()],
        queue=_waiting(reader, pending),
        is_cut=len(attempts) == MAX_BARS,
        disk=_read_disk(home),
    )


def _read_disk(home: Path) -> Disk:
    usage = shutil.disk_usage(home)
    return Disk(total_bytes=usage.total, free_bytes=usage.free)


def _bar(attempt: AttemptRecord) -> Bar:
    return Bar(
        run_id=attempt.run_id,
        attempt=attempt.number,
        from_ms=attempt.launched_ms,
        to_ms=attempt.ended_ms,
        step=attempt.step,
        cause=attempt.cause,
        reason=attempt.reason,
    )


def _waiting(reader: RegistryReader, pending: Sequence[RunRecord]) -> list[Waiting]:
    slots = [(slot["run_id"], slot["device_id"]) for slot in reader.slots() if slot["run_id"]]
    holdings = reader.holdings()
    found = []
    for run in pending:
        wanted = set(run.cause.waits_for)
        holders = [run_id for run_id, device_id in slots if GPU in wanted or device_id in wanted]
        holders += [
            row["run_id"] for row in holdings if CPU in wanted or (MEMORY in wanted and row["memory_mb"])
        ]
        found.append(
            Waiting(
                run_id=run.run_id,
                name=run.name,
                priority=run.priority,
                submitted_ms=run.submitted_ms,
                not_before_ms=run.not_before_ms,
                needs=run.needs,
                cause=run.cause,
                reason=run.reason,
                holders=list(dict.fromkeys(holders)),
            )
        )
    return found


ENDPOINTS = [list_devices, list_lanes, get_health]
