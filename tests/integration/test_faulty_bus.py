"""The checker of the bus finds what is wrong: an event that is missing, late, changed or of nobody's file."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_checker import Report
from faulty_bus import COMMANDS, EVENTS, REPLIES, RUNS, FaultyBus
from redis_server import needs_redis

from trn.core.home import Home
from trn.registry.base import NewRun
from trn.registry.sqlite import RunRegistry

pytestmark = needs_redis


@pytest.fixture
def bus() -> Iterator[FaultyBus]:
    bus = FaultyBus()
    yield bus
    bus.end()


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """Of one run, cancelled, with three events."""
    home = Home(tmp_path)
    home.make()
    registry = RunRegistry(home.registry)
    registry.submit(NewRun(run_id="r", digest="d", config={})).result()
    registry.want_cancel("r", "by request").result()
    registry.close()
    path = home.run("r").events
    path.parent.mkdir(parents=True)
    path.write_text("".join(f"{line(seq)}\n" for seq in (1, 2, 3)))
    return home


def line(seq: int) -> str:
    return json.dumps({"event": "log", "seq": seq})


def find(
    bus: FaultyBus, home: Home, *seqs: int, states: tuple[str, ...] = ("PENDING", "CANCELLED")
) -> list[str]:
    assert bus.server is not None
    for seq in seqs:
        fields = {"run_id": "r", "seq": str(abs(seq)), "event": "log", "data": line(seq)}
        bus.server.client.xadd(EVENTS, fields)  # type: ignore[arg-type]
    for state in states:
        bus.server.client.xadd(RUNS, {"run_id": "r", "state": state, "change": "1", "data": "{}"})
    report = Report()
    bus.check(home, report)
    return report.faults


@pytest.mark.parametrize("seqs", [(1, 2, 3), (1, 2, 1, 2, 3), (1, 2, 3, 3)])
def test_what_comes_again_is_as_promised(bus: FaultyBus, home: Home, seqs: tuple[int, ...]) -> None:
    assert find(bus, home, *seqs) == []


@pytest.mark.parametrize(
    ("seqs", "words"),
    [
        ((1, 2), "2 events of r, its file has 3"),
        ((1, 3, 2), "event 3 of r comes after 1"),
        ((1, 2, 3, -2), "came twice, and not the same"),
        ((), "0 events of r"),
    ],
)
def test_an_event_that_is_missing_late_or_changed_is_found(
    bus: FaultyBus, home: Home, seqs: tuple[int, ...], words: str
) -> None:
    assert words in "\n".join(find(bus, home, *seqs))


@pytest.mark.parametrize("states", [("PENDING",), (), ("CANCELLED", "PENDING", "CANCELLED")])
def test_a_state_that_was_not_told_or_not_final_is_found(
    bus: FaultyBus, home: Home, states: tuple[str, ...]
) -> None:
    [fault] = find(bus, home, 1, 2, 3, states=states)
    assert "bus: r" in fault


@pytest.mark.parametrize("replies", [(), ("r", "r.2"), ("nobody",)])
def test_a_command_without_the_one_answer_is_found(
    bus: FaultyBus, home: Home, replies: tuple[str, ...]
) -> None:
    assert bus.server is not None
    bus.requests["q"] = "submit"
    for run_id in replies:
        bus.server.client.xadd(REPLIES, {"request_id": "q", "ok": "1", "run_id": run_id})
    [fault] = find(bus, home, 1, 2, 3)
    assert "bus: submit q" in fault
    bus.server.client.xadd(COMMANDS, {"command": "cancel"})
    assert "1 commands are still there" in "\n".join(find(bus, home))
