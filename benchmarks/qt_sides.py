"""Our window and its bridge: events on their way to a slot, a flood of records, and the start of the program."""

import atexit
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ["QT_QPA_PLATFORM"] = "offscreen"

import psutil
from PySide6.QtCore import QEventLoop, QObject, QSettings, QTimer, Slot
from PySide6.QtWidgets import QApplication

import trn
from daemon_session import DEADLINE_S, Daemon
from harness import HERE, Prepare, Round, Sample, serve
from trn.core.home import Home, socket_address
from trn.proto.records import Run
from trn.qt import GarbageTimer, RunEvents, TrainerQBridgeThread, WatchRequest
from trn.qt.window import TrainerWindow

BEAT_MS = 5
MB = 1e6


class Served:
    """A home with its daemon, whose launcher is warm, and a blocking client."""

    def __init__(self, root: Path) -> None:
        self.daemon = Daemon(root)
        atexit.register(self.daemon.close)
        self.daemon.wait_announced()
        self.client = trn.Client(root, patience_s=0)
        atexit.register(self.client.close)
        self.client.wait(self.submit("daemon_trainers:Trivial", mock_batches=[1]), DEADLINE_S)

    def submit(self, trainer: str, **fields: Any) -> str:
        return self.client.submit(self.daemon.job(trainer, **fields), base_dir=HERE).run.run_id


class Latencies(QObject):
    """Of each metric event: from its own time to this slot."""

    def __init__(self, application: QApplication) -> None:
        super().__init__()
        self.late_ms: list[float] = []
        self._application = application

    @Slot(object)
    def take_events(self, events: RunEvents) -> None:
        now_ms = time.time() * 1000
        for event in events.events:
            if event["event"] in ("metric", "metrics"):
                self.late_ms.append(now_ms - event["timestamp_ms"])
            if event["event"] in ("completed", "failed"):
                self._application.quit()


def event_latency(options: Mapping[str, Any]) -> Round:
    served = Served(Path(options["home"]))
    application = QApplication([])

    def watch() -> Sample:
        bridge = TrainerQBridgeThread(
            served.daemon.home.root, WatchRequest(is_live_only=True, with_events=True)
        )
        latencies = Latencies(application)
        bridge.eventsReceived.connect(latencies.take_events)
        bridge.start()
        fields = {"dataset": {"generated": True}, "max_steps": options["num_events"], "metric_every": 1}
        run_id = served.submit("daemon_trainers:Clocked", hyperparams={"step_ms": 17}, **fields)
        application.exec()
        bridge.stop()
        served.client.wait(
            run_id, DEADLINE_S
        )  # else the next bridge finds it live, and reads all of its events
        late_ms = sorted(latencies.late_ms)
        if len(late_ms) != options["num_events"]:
            raise RuntimeError(f"{len(late_ms)} of {options['num_events']} events came")
        return {"ms": statistics.median(late_ms), "p99_ms": late_ms[int(len(late_ms) * 0.99)]}

    return watch


class Heart(QObject):
    """Beats in the window's thread, and notes how late each beat was."""

    def __init__(self) -> None:
        super().__init__()
        self.late_ms: list[float] = []
        self.cpu_ms: list[float] = []  # of this thread, between two beats
        self._last, self._last_cpu = time.perf_counter(), time.thread_time()
        self._timer = QTimer(self)
        self._timer.setInterval(BEAT_MS)
        self._timer.timeout.connect(self._beat)
        self._timer.start()

    @Slot()
    def _beat(self) -> None:
        now, cpu = time.perf_counter(), time.thread_time()
        self.late_ms.append(max(1e3 * (now - self._last) - BEAT_MS, 0.0))
        self.cpu_ms.append(1e3 * (cpu - self._last_cpu))
        self._last, self._last_cpu = now, cpu

    def restart(self) -> None:
        self.late_ms.clear()
        self.cpu_ms.clear()
        self._last, self._last_cpu = time.perf_counter(), time.thread_time()

    def sample(self) -> dict[str, float]:
        late_ms = sorted(self.late_ms)
        return {
            "max_block_ms": late_ms[-1],
            "p999_block_ms": late_ms[int(len(late_ms) * 0.999)],
            "max_cpu_ms": max(self.cpu_ms),
        }


class Counter(QObject):
    """Records that the bridge read: their changes are numbered."""

    def __init__(self) -> None:
        super().__init__()
        self.change = 0

    @Slot(object)
    def take_run(self, run: Run) -> None:
        self.change = max(self.change, run.change)


def spin(seconds: float) -> None:
    """In Qt's own loop; to quit the application would end the bridge."""
    loop = QEventLoop()
    QTimer.singleShot(round(seconds * 1000), loop.quit)
    loop.exec()


def flood(options: Mapping[str, Any]) -> Round:
    home = Home(Path(options["home"]))
    home.make()
    command = [sys.executable, str(HERE / "qt_record_server.py"), socket_address(home.socket)]
    server = subprocess.Popen(
        [*command, str(options["rate"]), str(options["num_runs"])], stdout=subprocess.PIPE, text=True
    )
    atexit.register(server.kill)
    assert server.stdout is not None
    if not server.stdout.readline():
        raise RuntimeError("the server of records did not start")
    application = QApplication([])
    garbage = GarbageTimer(application)
    window = TrainerWindow(home, QSettings(str(home.window), QSettings.Format.IniFormat))
    counter, heart, process = Counter(), Heart(), psutil.Process()
    window.bridge.runUpdated.connect(counter.take_run)
    window.show()

    def follow() -> Sample:
        # Not `start`: that would start a daemon beside the stand-in.
        window.calls.start()
        window.bridge.start()
        spin(3)  # the first records of all runs, and what is imported late
        heart.restart()
        first, began, cpu = counter.change, time.monotonic(), _cpu_s(process)
        spin(options["seconds"] / 6)
        before = process.memory_info().rss
        spin(options["seconds"] * 5 / 6)
        took_s = time.monotonic() - began
        sample = {
            **heart.sample(),
            "records_per_s": (counter.change - first) / took_s,
            "growth_mb": (process.memory_info().rss - before) / MB,
            "cpu_percent": 100 * (_cpu_s(process) - cpu) / took_s,
        }
        stopping = time.perf_counter()
        window.bridge.stop()
        sample["stop_ms"] = 1e3 * (time.perf_counter() - stopping)
        window.close()
        garbage.stop()
        return sample

    return follow


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def empty_loop(options: Mapping[str, Any]) -> Round:
    """The same timer in a process that does nothing else."""
    application = QApplication([])
    heart = Heart()
    heart.setParent(application)

    def wait() -> Sample:
        heart.restart()
        spin(options["seconds"])
        return heart.sample()

    return wait


def shown(options: Mapping[str, Any]) -> Round:
    served = Served(Path(options["home"]))

    def start() -> Sample:
        command = [sys.executable, str(HERE / "qt_shown_script.py"), str(served.daemon.home.root)]
        done = subprocess.run(
            [*command, repr(time.time())], capture_output=True, text=True, timeout=DEADLINE_S, check=True
        )
        sample: Sample = json.loads(done.stdout)
        return sample

    start()  # warms the cache
    return start


SIDES: dict[str, Prepare] = {
    "event_latency": event_latency,
    "flood": flood,
    "empty_loop": empty_loop,
    "shown": shown,
}

if __name__ == "__main__":
    serve(SIDES)
