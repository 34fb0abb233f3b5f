"""Assembles the daemon: all its parts are built here.

The daemon keeps no state that could be lost. Runs are in the registry, events in the runs' files, exit statuses with the
launcher. So it may be killed at any moment, and the next one continues.
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Protocol

import msgspec

from gen_worker.contract.files.open_files import raise_open_files
from gen_worker.contract.subprocess_contract import find_cache_dir
from trn.core.bus_url import read_bus_url
from trn.core.errors import UnavailableError
from trn.core.home import Home, socket_address
from trn.core.runs import LOCAL_POOL
from trn.core.settings import Settings
from trn.core.version import SOURCES
from trn.daemon.api.broadcaster import RunEventBroadcaster
from trn.daemon.api.run_streams import RunStreams
from trn.daemon.api.secret_values import SecretValues
from trn.daemon.api.server import add_ports, build_server
from trn.daemon.api.service import TrainerService
from trn.daemon.api.tcp_guard import TcpGuard
from trn.daemon.dispatch.dispatcher import TrainerDispatcher
from trn.daemon.dispatch.readiness import DoctorReadiness
from trn.daemon.ingest.ingest import Ingest
from trn.daemon.intake.import_checks import ImportChecks
from trn.daemon.intake.intake import Intake
from trn.daemon.intake.resumption import Resumption
from trn.daemon.intake.run_judge import RunJudge
from trn.daemon.machine.devices import Devices
from trn.daemon.machine.doctor_reports import DoctorReports
from trn.daemon.machine.unknown_workers import UnknownWorkers
from trn.daemon.outlets.bus_commands import BusCommands
from trn.daemon.outlets.bus_publisher import BusPublisher
from trn.daemon.outlets.event_bus import open_bus
from trn.daemon.outlets.log_outlet import LogOutlet
from trn.daemon.outlets.outbox import Outbox
from trn.daemon.outlets.threaded_part import ThreadedPart
from trn.daemon.serving.inference_job import InferenceJobs
from trn.daemon.serving.model_choice import ModelChoice
from trn.daemon.serving.promotions import Promotions
from trn.daemon.serving.successors import Successors
from trn.daemon.upkeep.gateway_keeper import GatewayKeeper
from trn.daemon.upkeep.maintenance import InstalledCode, Maintenance
from trn.daemon.upkeep.removal import BUS, LOGS, Removal
from trn.daemon.upkeep.singleton import DaemonInfo, Singleton
from trn.daemon.upkeep.startup_checks import check_start
from trn.executors.base import Site
from trn.executors.pools import load_pools
from trn.registry.metrics import MetricStore
from trn.registry.sqlite import RunRegistry
from trn.registry.writer import committed

logger = logging.getLogger("trn.daemon")

MAX_OPEN_FILES = 65_536  # more would only slow down programs that close every number there could be
NUM_THREADS = 32  # for files, processes, devices; each call may hang
STOP_GRACE_S = 2.0  # for calls in progress


class Part(Protocol):
    """Runs until the daemon stops."""

    async def run(self) -> None: ...


class TrainerDaemon:
    """The daemon of one home. `serve` returns after `stop`; workers continue."""

    def __init__(self, home: Home, settings: Settings) -> None:
        self._home = home
        self._settings = settings
        self._code = InstalledCode()
        self._stop = asyncio.Event()

    def stop(self, reason: str) -> None:
        """End `serve`. From the loop's thread."""
        if not self._stop.is_set():
            logger.info("stopping: %s; workers continue", reason)
        self._stop.set()

    async def serve(self) -> None:
        """Run until `stop`, SIGTERM or SIGINT. TrnError if it cannot start."""
        for note in check_start(self._home, self._settings):
            logger.info("%s", note)
        singleton = Singleton(self._home)
        singleton.acquire()
        try:
            async with contextlib.AsyncExitStack() as stack:
                await self._serve(stack, singleton)
        finally:
            singleton.release()

    async def _serve(self, stack: contextlib.AsyncExitStack, singleton: Singleton) -> None:
        home, settings, loop = self._home, self._settings, asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="blocking"))
        open_files_before, max_open_files = raise_open_files(MAX_OPEN_FILES)
        pools = load_pools(
            settings.pools,
            Site(
                pool=LOCAL_POOL,
                home=home,
                start_timeout_s=settings.start_timeout_s,
                worker_open_files=open_files_before,
            ),
        )
        url = read_bus_url(settings.event_bus) if settings.event_bus else None
        bus = None if url is None else open_bus(url, reader=f"{socket.gethostname()}:{home.root}")
        registry = RunRegistry(home.registry)
        registry.writer.settle_in(loop.call_soon_threadsafe)
        stack.callback(registry.close)
        metrics = MetricStore(home.metrics)
        stack.callback(metrics.close)
        removal = Removal(
            registry=registry,
            metrics=metrics,
            home=home,
            cache_dir=find_cache_dir(os.environ),
            consumers=[LOGS, *([BUS] if url is not None else [])],
        )
        await removal.complete()
        devices = Devices(settings.inventory, environ=os.environ)
        await committed(registry.set_slots([device.device_id for device in devices.inventory.devices]))
        stack.push_async_callback(pools.aclose)
        await pools.start()
        broadcaster = RunEventBroadcaster(registry)
        ingest = Ingest(registry=registry, metrics=metrics, broadcaster=broadcaster, files=pools, home=home)
        stack.enter_context(_doorbell(home, loop, ingest.ring))
        # Declared devices are trusted: the doctor does not look for them.
        detected = [device.kind for device in devices.inventory.devices if not device.is_declared]
        doctor = DoctorReports(home=home, expected=Counter(detected), environ=os.environ)
        secrets = SecretValues(os.environ)
        unknown = UnknownWorkers(registry=registry, pools=pools, home=home)
        await unknown.look()
        removal.worker_in = unknown.worker_in
        dispatcher = TrainerDispatcher(
            registry=registry,
            pools=pools,
            ingest=ingest,
            devices=devices,
            home=home,
            settings=settings,
            environ=os.environ,
            readiness=DoctorReadiness(doctor),
            doctor=doctor,
            secrets=secrets,
            unknown=unknown,
        )
        doctor.on_news.append(lambda _report: dispatcher.wake())
        info = DaemonInfo(
            pid=os.getpid(),
            version=version("trn"),
            addresses=(),
            started_ms=time.time_ns() // 1_000_000,
            event_bus="" if url is None else url.shown,
            source_dir=str(SOURCES[0]),
            source_stamp=self._code.stamp,
            http=settings.http.address,
        )
        imports = ImportChecks(pools, home)
        imports.prepare()
        choice = ModelChoice(registry=registry, home=home)
        intake = Intake(
            registry=registry,
            judge=RunJudge(
                registry=registry,
                dispatcher=dispatcher,
                imports=imports,
                devices=devices,
                home=home,
                settings=settings,
            ),
            resumption=Resumption(
                registry, home, secrets=secrets, max_config_bytes=settings.max_config_bytes
            ),
            inference=InferenceJobs(choice, max_config_bytes=settings.max_config_bytes),
            dispatcher=dispatcher,
            secrets=secrets,
            home=home,
        )
        promotions = Promotions(registry=registry, choice=choice, pools=pools, home=home)
        ingest.on_server_event = lambda _run_id: promotions.look()
        successors = Successors(
            registry=registry, choice=choice, promotions=promotions, intake=intake, home=home
        )
        service = TrainerService(
            registry=registry,
            metrics=metrics,
            intake=intake,
            promotions=promotions,
            streams=RunStreams(registry=registry, broadcaster=broadcaster, files=pools, home=home),
            dispatcher=dispatcher,
            launcher=pools.of(LOCAL_POOL),
            removal=removal,
            devices=devices,
            home=home,
            info=info,
        )
        service.tokens.prepare()
        outlets: list[ThreadedPart] = [
            LogOutlet(registry=registry, files=pools, home=home, settings=settings)
        ]
        listeners: list[Part] = []
        if url is not None and bus is not None:
            outbox = Outbox(registry, pools, BUS)
            outlets.append(BusPublisher(outbox=outbox, bus=bus, shown=url.shown))
            commands = bus.commands()
            if commands is not None:
                cancels = registry.bus_cancels()
                stack.callback(cancels.close)
                listeners.append(
                    BusCommands(stream=commands, calls=service, cancels=cancels, shown=url.shown)
                )

        def wake() -> None:
            broadcaster.run_changed()
            for outlet in outlets:
                outlet.wake()

        registry.writer.on_commit = wake
        keepers = (
            [GatewayKeeper(home, settings.http.address, environ=os.environ)] if settings.http.address else []
        )
        listeners += keepers
        maintenance = Maintenance(
            home=home,
            settings=settings,
            files={"registry.db": registry, "metrics.db": metrics},
            snapshots_in_use=registry.snapshots,
            is_busy=lambda: registry.has_unfinished() or service.is_in_use(),
            leave=self.stop,
        )
        service.unknown_held = lambda: unknown.held
        service.warnings = lambda: [
            *self._code.warnings,
            *devices.warnings,
            *maintenance.warnings,
            *pools.warnings,
            *unknown.warnings,
            *(warning for outlet in outlets for warning in outlet.warnings),
            *(warning for keeper in keepers for warning in keeper.warnings),
        ]
        guard: TcpGuard | None = None
        server = await build_server(
            service,
            max_open_files=max_open_files,
            admitted=lambda peer: None if guard is None else guard.admit(peer),
        )
        addresses = add_ports(server, settings, home)
        info = msgspec.structs.replace(info, addresses=tuple(addresses))
        service.info = info
        for address in addresses[1:]:  # the first is the socket
            guard = TcpGuard(int(address.rpartition(":")[2]))
            listeners.append(guard)
        await server.start()
        stack.push_async_callback(server.stop, STOP_GRACE_S)
        with contextlib.ExitStack() as hearing:
            hearing.enter_context(_signals(loop, self.stop))
            gc.freeze()  # what is loaded by now stays: the collector has not to look through it again
            singleton.announce(info)  # outside the group: what goes wrong here is a start that failed
            logger.info("trn %s serves %s at %s", info.version, home.root, ", ".join(info.addresses))
            async with asyncio.TaskGroup() as tasks:
                parts: list[Part] = [
                    ingest,
                    broadcaster,
                    dispatcher,
                    doctor,
                    maintenance,
                    promotions,
                    successors,
                    *outlets,
                    *listeners,
                ]
                running = [tasks.create_task(part.run()) for part in parts]
                await self._stop.wait()
                hearing.close()  # a second signal ends it at once
                service.streams.end_all()
                await server.stop(STOP_GRACE_S)
                for task in running:
                    task.cancel()


@contextlib.contextmanager
def _signals(loop: asyncio.AbstractEventLoop, stop: Callable[[str], None]) -> Iterator[None]:
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, f"received {number.name}")
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def _doorbell(home: Home, loop: asyncio.AbstractEventLoop, ring: Callable[[str], None]) -> Iterator[None]:
    """A socket on which workers say that their events file has grown. The message only triggers a read."""
    home.doorbell.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bell:
        try:
            bell.bind(socket_address(home.doorbell))
        except OSError as fault:
            raise UnavailableError(f"{home.doorbell} cannot be bound: {fault.strerror or fault}") from fault
        home.doorbell.chmod(0o600)
        bell.setblocking(False)

        def hear() -> None:
            heard: set[str] = set()
            with contextlib.suppress(BlockingIOError):
                for _ in range(256):
                    heard.add(bell.recv(512).decode(errors="replace"))
            for run_id in heard:
                ring(run_id)

        loop.add_reader(bell, hear)
        try:
            yield
        finally:
            loop.remove_reader(bell)
