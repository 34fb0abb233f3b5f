"""What the dispatcher and its supervisors work with, as far as they know it, and the limits of an attempt."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from trn.core.home import Home
from trn.core.runs import RunRecord
from trn.core.settings import Settings
from trn.daemon.api.secret_values import SecretValues
from trn.daemon.ingest.event_file import Terminal
from trn.daemon.machine.devices import Inventory
from trn.daemon.machine.environment_report import EnvironmentReports
from trn.daemon.machine.unknown_workers import UnknownWorkers
from trn.executors.pools import Pools
from trn.registry.base import Registry

logger = logging.getLogger("trn.daemon.dispatch.supervisor")


class EventIngest(Protocol):
    """What a supervisor asks of the ingest."""

    def follow(self, run_id: str, number: int) -> None: ...
    async def drain(self, run_id: str) -> None: ...
    def last_growth(self, run_id: str) -> float: ...
    async def terminal(self, run_id: str, number: int) -> Terminal | None: ...
    async def unfollow(self, run_id: str) -> None: ...


class DeviceView(Protocol):
    """What dispatcher and supervisors ask of the devices."""

    @property
    def inventory(self) -> Inventory: ...
    def worker_env(self, device_ids: tuple[str, ...]) -> Mapping[str, str]: ...
    async def foreign_processes(self, device_id: str, own_pids: set[int]) -> list[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What all supervisors share."""

    registry: Registry
    pools: Pools
    ingest: EventIngest
    devices: DeviceView
    home: Home
    settings: Settings
    reports: EnvironmentReports
    doorbell: str
    python: str
    launcher_python: str
    secrets: SecretValues
    unknown: UnknownWorkers
    clock: Callable[[], float] = time.monotonic  # the one that the ingest uses
    now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000


class Limits(msgspec.Struct, frozen=True):
    """The fields of a job that say how long is too long."""

    grace_s: float = 60.0
    heartbeat_s: float = 5.0
    time_limit_s: float | None = None


def read_limits(run: RunRecord) -> Limits:
    try:
        return msgspec.convert(run.config, Limits)
    except msgspec.ValidationError as fault:  # never submitted so; its worker will say more
        logger.warning("run %s: its limits are not valid: %s", run.run_id, fault)
        return Limits()
