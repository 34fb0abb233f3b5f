"""The checker of the fault harness finds what it is there to find: each promise, broken by hand, is a fault."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_checker import LOSS, History, Report, check

from gen_worker.contract.process_identity import read_process
from trn.core.causes import Cause
from trn.core.home import Home
from trn.core.runs import RunState
from trn.registry.base import Ending, NewRun
from trn.registry.metrics import MetricStore
from trn.registry.sqlite import RunRegistry

NUM_STEPS = 3
CONFIG = {"name": "submit-0", "mock_batches": list(range(NUM_STEPS)), "hyperparams": {}}


class World:
    """What one sound run leaves behind, and a bystander."""

    def __init__(self, folder: Path) -> None:
        self.home = Home(folder / "home")
        self.home.make()
        self.witness = folder / "witness"
        self.witness.mkdir()
        self.events = self.home.run("r").events
        self.events.parent.mkdir(parents=True)
        self.lines = [_line(seq, event) for seq, event in enumerate(_story(), start=1)]
        self.events.write_bytes(b"".join(self.lines))
        self.bystander = subprocess.Popen(["sleep", "600"], start_new_session=True)
        state = read_process(self.bystander.pid)
        assert state is not None
        self.history = History()
        self.history.ask(CONFIG)
        self.history.acknowledged["submit-0"] = "r"
        self.history.events["r"] = [line.rstrip() for line in self.lines]
        self.history.bystanders[self.bystander.pid] = state.start_ticks

    def record(
        self, *, state: RunState = RunState.COMPLETED, reason: str = "done", is_ended: bool = True
    ) -> None:
        with contextlib.closing(RunRegistry(self.home.registry)) as registry:
            registry.set_slots(["cuda:0"]).result()
            registry.submit(NewRun(run_id="r", name="submit-0", digest="d", config={})).result()
            registry.claim("r", ["cuda:0"]).result()
            registry.launched("r", 1, worker="b/1/1", pid=1).result()
            place = {"offset": len(b"".join(self.lines)), "last_seq": len(self.lines)}
            registry.follow("r", 1, **place, step=NUM_STEPS, heartbeat_ms=1, metrics={}).result()
            if is_ended:
                registry.end("r", 1, Ending(state=state, cause=Cause(values={"text": reason}))).result()
            if state is RunState.PENDING:
                registry.claim("r", ["cuda:0"]).result()
        with contextlib.closing(MetricStore(self.home.metrics)) as metrics:
            points = [(step + 1, 1, LOSS, step, _loss(step), 1) for step in range(1, NUM_STEPS + 1)]
            metrics.add("r", **place, points=points).result()

    def check(self) -> Report:
        return check(self.home, self.history, self.witness)


def _loss(step: int) -> float:
    return step * (step - 1) / 2


def _story() -> list[dict[str, Any]]:
    steps = range(1, NUM_STEPS + 1)
    metrics = [{"event": "metric", "name": LOSS, "value": _loss(step), "step": step} for step in steps]
    return [{"event": "started"}, *metrics, {"event": "completed", "step": NUM_STEPS}]


def _line(seq: int, event: dict[str, Any]) -> bytes:
    return json.dumps({"seq": seq, "attempt": 1, **event}).encode() + b"\n"


@pytest.fixture
def world(tmp_path: Path) -> Any:
    world = World(tmp_path)
    yield world
    world.bystander.kill()
    world.bystander.wait()


def _lose_an_event(world: World) -> None:
    world.events.write_bytes(b"".join(world.lines[:2] + world.lines[3:]))


def _double_an_event(world: World) -> None:
    world.events.write_bytes(b"".join(world.lines[:2] + world.lines[1:]))


def _write_on_after_the_end(world: World) -> None:
    with world.events.open("ab") as file:
        file.write(_line(len(world.lines) + 1, {"event": "completed", "step": NUM_STEPS}))


def _leave_out_a_point(world: World) -> None:
    with contextlib.closing(MetricStore(world.home.metrics)) as metrics:
        points = [(len(world.lines) + 1, 2, LOSS, 1, 0.0, 1)]  # another attempt takes back what came after
        metrics.add("r", offset=1 << 20, last_seq=len(world.lines) + 1, points=points).result()


def _train_something_else(world: World) -> None:
    world.lines[2] = _line(3, {"event": "metric", "name": LOSS, "value": 7.0, "step": 2})
    world.events.write_bytes(b"".join(world.lines))


def _submit_twice(world: World) -> None:
    with contextlib.closing(RunRegistry(world.home.registry)) as registry:
        registry.submit(NewRun(run_id="r2", name="submit-0", digest="d2", config={})).result()
        registry.want_cancel("r2", "no more").result()


@pytest.mark.parametrize(
    ("breach", "words"),
    [
        (lambda world: world.history.acknowledged.update({"submit-0": "gone"}), "there is no such run"),
        (_submit_twice, "2 runs for one submit"),
        (lambda world: world.history.asked.clear(), "nobody asked for it"),
        (lambda world: (world.witness / "violations").write_text("r: held by another"), "held by another"),
        (lambda world: world.history.saw("r", "FAILED", 0), "COMPLETED became FAILED"),
        (lambda world: world.history.saw("r", "RUNNING", 1 << 20), "COMPLETED became RUNNING"),
        (_lose_an_event, "its file has a gap"),
        (_double_an_event, "its file has a gap"),
        (_write_on_after_the_end, "two terminal events"),
        (_leave_out_a_point, "its metric points are not those of its events"),
        (_train_something_else, "losses that are not what it was to train"),
        (lambda world: world.history.events["r"].pop(1), "a watcher saw 4 events"),
        (lambda world: world.history.doomed.add("submit-0"), "was made to fail"),
        (lambda world: world.history.asked.update({"submit-0": 4}), "without a metric of steps [4]"),
        (lambda world: world.bystander.terminate() or world.bystander.wait(), "was ended"),
        (lambda world: os.waitid(os.P_PID, _stop(world), os.WSTOPPED), "was stopped"),
    ],
)
def test_a_broken_promise_is_found(world: World, breach: Callable[[World], object], words: str) -> None:
    world.record()
    report = world.check()
    assert report.faults == [], str(report)
    breach(world)
    faults = world.check().faults
    assert any(words in fault for fault in faults), faults


def _stop(world: World) -> int:
    world.bystander.send_signal(signal.SIGSTOP)
    return world.bystander.pid


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        ({"state": RunState.CANCELLED}, "CANCELLED, and nobody asked for it"),
        ({"state": RunState.FAILED, "reason": "it could not start"}, "FAILED, and had no cause to"),
        ({"state": RunState.PENDING}, "tried again after 1 attempts without progress"),
        ({"is_ended": False}, "slot cuda:0 is still held by r"),
        ({"is_ended": False}, "attempts [1] never ended"),
        ({"is_ended": False}, "r is RUNNING"),
    ],
)
def test_a_run_that_ended_as_it_may_not_is_found(world: World, ending: dict[str, Any], words: str) -> None:
    world.record(**ending)
    faults = world.check().faults
    assert any(words in fault for fault in faults), faults
