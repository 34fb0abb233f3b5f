"""The bridge thread between a real daemon and Qt: what it must bring, what it must survive, and how it must end."""

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("PySide6.QtWidgets", reason="Qt cannot be imported", exc_type=ImportError)

from daemon_process import DEADLINE_S, DaemonProcess, end_everything
from PySide6.QtCore import QThread
from qt_receiver import Receiver

import trn
from trn.core.errors import InvalidRequestError
from trn.core.home import Home
from trn.qt import TrainerQBridgeThread, WatchRequest
from trn.qt.loop_thread import STOP_TIMEOUT_MS

if TYPE_CHECKING:
    from PySide6.QtWidgets import QApplication
    from pytestqt.qtbot import QtBot

    Watch = Callable[..., tuple[TrainerQBridgeThread, Receiver]]

DEADLINE_MS = DEADLINE_S * 1000
TRAINERS = Path(__file__).parent / "trainers"
ROOT = Path(__file__).parents[2]
SETTINGS = """
min_free_bytes = 1000000
sweep_s = 0.2
listen = { address = "127.0.0.1:0", is_insecure = true }
[inventory]
cpus = 8
devices = []
"""


class World:
    """A home with a daemon, which tests kill and start again."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.start_daemon()

    def start_daemon(self) -> None:
        self.daemon = DaemonProcess(self.root, settings=SETTINGS, is_bare=True)
        self.address = self.daemon.wait_ready().addresses[-1]

    def submit(self, run_id: str, num_steps: int, **hyperparams: Any) -> str:
        """Its token."""
        job = {
            "run_id": run_id,
            "trainer": "shown:Shown",
            "mock_batches": list(range(num_steps)),
            "metric_every": 1,
            "hyperparams": hyperparams,
            "resources": {"devices": ["cpu"]},
        }
        with trn.Client(self.root) as client:
            return client.submit(job, base_dir=TRAINERS, code_dir=TRAINERS).run_token

    def events(self, run_id: str) -> list[dict[str, Any]]:
        """Of its file: what a bridge must have brought."""
        return [json.loads(line) for line in Home(self.root).run(run_id).events.read_text().splitlines()]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("qt") / "home"
    try:
        yield World(root)
    finally:
        end_everything(root)


@pytest.fixture
def watch(world: World, qapp: object) -> Iterator["Watch"]:
    """Start a bridge and what receives its signals. At the end each of them must stop in time."""
    bridges = []

    def start(
        where: Path | str | None = None, *, is_started: bool = True, **options: Any
    ) -> tuple[TrainerQBridgeThread, Receiver]:
        connection = {
            name: options.pop(name) for name in ("token", "ca_certificate", "is_insecure") if name in options
        }
        bridge = TrainerQBridgeThread(where or world.root, WatchRequest(**options), **connection)
        bridges.append(bridge)
        receiver = Receiver(bridge)
        if is_started:
            bridge.start()
        return bridge, receiver

    yield start
    for bridge in bridges:
        end(bridge)


def end(bridge: TrainerQBridgeThread) -> None:
    """`stop` waits for a second, which is 50 times what it takes; a loaded machine may take its time."""
    assert bridge.stop() or bridge.wait(DEADLINE_MS)
    assert not bridge.isRunning()


def test_records_and_events_arrive_frozen_in_the_thread_of_the_slots(
    world: World, watch: "Watch", qtbot: "QtBot"
) -> None:
    _, receiver = watch(with_events=True)
    world.submit("arrives", 50)
    qtbot.waitUntil(lambda: receiver.state("arrives") == "COMPLETED", timeout=DEADLINE_MS)
    qtbot.waitUntil(
        lambda: len(receiver.seqs("arrives")) == len(world.events("arrives")), timeout=DEADLINE_MS
    )
    assert receiver.events["arrives"] == world.events("arrives")
    assert receiver.connections == ["connecting", "connected"]
    assert receiver.threads == {QThread.currentThread()}
    run = receiver.newest("arrives")
    assert run is not None
    with pytest.raises(AttributeError):
        run.step = 0  # type: ignore[misc]


def test_a_daemon_killed_and_started_again_costs_time_only(
    world: World, watch: "Watch", qtbot: "QtBot", tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    gate.write_text("20")
    _, receiver = watch(
        run_ids=("outlives",) if world.submit("outlives", 60, gate=str(gate)) else (), with_events=True
    )
    qtbot.waitUntil(lambda: len(receiver.seqs("outlives")) >= 20, timeout=DEADLINE_MS)
    world.daemon.kill()
    gate.write_text("60")  # the worker continues meanwhile
    qtbot.waitUntil(lambda: "disconnected" in receiver.connections, timeout=DEADLINE_MS)
    world.start_daemon()
    qtbot.waitUntil(lambda: receiver.state("outlives") == "COMPLETED", timeout=DEADLINE_MS)
    qtbot.waitUntil(
        lambda: len(receiver.seqs("outlives")) == len(world.events("outlives")), timeout=DEADLINE_MS
    )
    assert receiver.seqs("outlives") == list(range(1, len(world.events("outlives")) + 1))
    assert receiver.connections == ["connecting", "connected", "disconnected", "connected"]
    assert {run.run_id for run in receiver.runs} == {"outlives"}


def test_a_busy_window_gets_the_newest_record_and_every_event(
    world: World, watch: "Watch", qtbot: "QtBot"
) -> None:
    """While no slot can run, records replace each other and events wait."""
    world.submit("busy", 40)
    with trn.Client(world.root) as client:
        client.wait("busy", DEADLINE_S)
        _, receiver = watch(run_ids=("busy",), with_events=True)
        qtbot.waitUntil(lambda: len(receiver.seqs("busy")) == len(world.events("busy")), timeout=DEADLINE_MS)
        num_before = len(receiver.runs)
        for number in range(100):  # this thread, whose slots they are, is in here meanwhile
            client.update("busy", notes=f"note {number}")
        qtbot.waitUntil(lambda: receiver.runs[-1].notes == "note 99", timeout=DEADLINE_MS)
    # One batch may have been on its way, and the last note may have missed the next one.
    assert len(receiver.runs) - num_before <= 3


def test_only_the_runs_that_were_asked_for_come(world: World, watch: "Watch", qtbot: "QtBot") -> None:
    for run_id in ("wanted", "unwanted"):
        world.submit(run_id, 3)
        with trn.Client(world.root) as client:
            client.wait(run_id, DEADLINE_S)
    _, receiver = watch(run_ids=("wanted",))
    _, live = watch(is_live_only=True)
    qtbot.waitUntil(lambda: receiver.state("wanted") == "COMPLETED", timeout=DEADLINE_MS)
    qtbot.waitUntil(lambda: "connected" in live.connections, timeout=DEADLINE_MS)
    world.submit("later", 3)
    qtbot.waitUntil(lambda: live.state("later") == "COMPLETED", timeout=DEADLINE_MS)
    assert {run.run_id for run in receiver.runs} == {"wanted"}
    assert {run.run_id for run in live.runs} == {"later"}


def test_it_continues_after_a_stop_where_it_was(world: World, watch: "Watch", qtbot: "QtBot") -> None:
    world.submit("paused", 30)
    bridge, receiver = watch(run_ids=("paused",), with_events=True)
    qtbot.waitUntil(lambda: len(receiver.seqs("paused")) >= 5, timeout=DEADLINE_MS)
    end(bridge)
    with trn.Client(world.root) as client:
        client.wait("paused", DEADLINE_S)
    bridge.start()
    qtbot.waitUntil(lambda: len(receiver.seqs("paused")) == len(world.events("paused")), timeout=DEADLINE_MS)
    assert receiver.seqs("paused") == list(range(1, len(world.events("paused")) + 1))


def test_a_runs_own_token_is_enough_at_an_address(world: World, watch: "Watch", qtbot: "QtBot") -> None:
    token = world.submit("granted", 5)
    _, receiver = watch(world.address, token=token, is_insecure=True, run_ids=("granted",), with_events=True)
    qtbot.waitUntil(lambda: receiver.state("granted") == "COMPLETED", timeout=DEADLINE_MS)
    bridge, refused = watch(world.address, token=token, is_insecure=True)
    qtbot.waitUntil(bridge.isFinished, timeout=DEADLINE_MS)
    qtbot.waitUntil(lambda: refused.connections == ["connecting", "refused"], timeout=DEADLINE_MS)
    assert "run's token" in bridge.reason


def test_a_run_that_is_not_there_is_refused_with_the_reason(watch: "Watch", qtbot: "QtBot") -> None:
    bridge, receiver = watch(run_ids=("nothing-of-this-name",))
    qtbot.waitUntil(lambda: receiver.connections == ["connecting", "refused"], timeout=DEADLINE_MS)
    qtbot.waitUntil(bridge.isFinished, timeout=DEADLINE_MS)
    assert "nothing-of-this-name" in bridge.reason


def test_options_of_an_address_are_refused_with_a_home(world: World) -> None:
    with pytest.raises(InvalidRequestError, match="for an address"):
        TrainerQBridgeThread(world.root, token="secret")


def test_the_example_of_the_docs_shows_runs_in_a_window_of_its_own(
    world: World, qtbot: "QtBot", tmp_path: Path
) -> None:
    file = ROOT / "examples" / "qt_window" / "own_window.py"
    assert file.read_text() in (ROOT / "docs" / "window.md").read_text()
    window = runpy.run_path(str(file))["RunBars"](str(world.root))
    qtbot.addWidget(window)
    window.show()
    qtbot.waitUntil(lambda: window.windowTitle() == "My runs (connected)", timeout=DEADLINE_MS)
    world.submit("shown", 30)
    qtbot.waitUntil(lambda: "shown" in window.bars, timeout=DEADLINE_MS)
    qtbot.waitUntil(lambda: window.bars["shown"].text() == "COMPLETED 100%", timeout=DEADLINE_MS)
    window.close()
    assert not window.bridge.isRunning()


def test_ctrl_c_ends_the_example_of_the_docs(world: World) -> None:
    command = [sys.executable, str(ROOT / "examples" / "qt_window" / "own_window.py"), str(world.root)]
    environ = {**os.environ, "QT_QPA_PLATFORM": "offscreen"}
    with trn.Client(world.root) as client:
        before = client.health().num_watchers
        process = subprocess.Popen(command, env=environ)
        try:
            deadline = time.monotonic() + DEADLINE_S
            while client.health().num_watchers <= before:
                assert time.monotonic() < deadline
                assert process.poll() is None
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            process.wait(DEADLINE_S)
        finally:
            process.kill()
            process.wait(DEADLINE_S)


def test_calls_of_qt_keep_the_reference_counts(qapp: "QApplication") -> None:
    """PySide6 6.12.0 on Python 3.11 takes a reference from None with each call: some thousand calls end the process."""
    before = sys.getrefcount(None)
    for _ in range(1000):
        qapp.processEvents()
    assert sys.getrefcount(None) > before - 500


# --- the end -------------------------------------------------------------------------------------------------------


def test_it_stops_at_once_while_it_connects(watch: "Watch", qtbot: "QtBot", tmp_path: Path) -> None:
    """To nothing, and to what takes the connection and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        for bridge, receiver in (watch(tmp_path / "empty"), watch(address, token="t", is_insecure=True)):
            qtbot.waitUntil(lambda receiver=receiver: bool(receiver.connections), timeout=DEADLINE_MS)
            end(bridge)
            qtbot.waitUntil(
                lambda receiver=receiver: receiver.connections[-1] == "stopped", timeout=DEADLINE_MS
            )


def test_it_stops_at_once_during_a_flood(world: World, watch: "Watch", qtbot: "QtBot") -> None:
    world.submit("flood", 100_000)
    flooding = threading.Event()

    def change_notes() -> None:
        with trn.Client(world.root) as client:
            while not flooding.is_set():
                client.update("flood", notes=str(time.monotonic()))

    others = [threading.Thread(target=change_notes) for _ in range(4)]
    for other in others:
        other.start()
    try:
        bridge, receiver = watch(run_ids=("flood",), with_events=True)
        qtbot.waitUntil(lambda: len(receiver.seqs("flood")) > 100, timeout=DEADLINE_MS)
        end(bridge)
    finally:
        flooding.set()
        for other in others:
            other.join()
        with trn.Client(world.root) as client:
            client.cancel("flood")


def test_it_stops_before_it_has_begun_and_twice(watch: "Watch") -> None:
    bridge, _ = watch(is_started=False)
    assert bridge.stop()
    bridge.start()
    end(bridge)
    assert bridge.stop()
    assert STOP_TIMEOUT_MS == 1000


ENDINGS = {
    "without a reference": "bridge = None; gc.collect(); spin(); app.quit()",
    "without a stop": "spin()",
    "without a spin": "",
    "with the application": "QTimer.singleShot(0, app.quit); app.exec(); print(bridge.isFinished(), file=out)",
    "with an error": "spin(); raise SystemExit(0)",
}


@pytest.mark.parametrize("how", ENDINGS)
def test_no_thread_is_destroyed_while_it_runs(world: World, tmp_path: Path, how: str) -> None:
    """Qt would abort the process and say so."""
    program = f"""
import gc, sys, time
from PySide6.QtCore import QCoreApplication, QTimer
from trn.qt import TrainerQBridgeThread
out = sys.stdout
app = QCoreApplication([])
bridge = TrainerQBridgeThread({str(world.root)!r})
def spin():
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        app.processEvents()
bridge.start()
{ENDINGS[how]}
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == ("True\n" if how == "with the application" else "")


def test_without_pyside_the_error_says_what_to_install() -> None:
    program = """
import sys
sys.modules["PySide6"] = None  # as if it were not installed
import trn.qt
try:
    trn.qt.TrainerQBridgeThread
except ImportError as fault:
    print(fault)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install 'trn[qt]'" in done.stdout
