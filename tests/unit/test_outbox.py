"""The outbox: whoever is to be told is told at least once and in order; an older registry gets one, and loses nothing."""

import json
import sqlite3
import uuid
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trn.core.causes import Cause
from trn.core.home import Home
from trn.core.runs import LOCAL_POOL, RunRecord, RunState
from trn.daemon.outlets.outbox import Backlog, Outbox, Place
from trn.executors.local.files import LocalFiles
from trn.executors.pools import Pools
from trn.registry.base import Ending, NewRun
from trn.registry.connection import check_integrity
from trn.registry.sqlite import PLACE_EVERY_BYTES, RunRegistry


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path)
    home.make()
    return home


@pytest.fixture
def registry(home: Home) -> Iterator[RunRegistry]:
    registry = RunRegistry(home.registry)
    yield registry
    registry.close()


@pytest.fixture
def outbox(registry: RunRegistry, home: Home) -> Iterator[Outbox]:
    outbox = Outbox(registry, Pools({LOCAL_POOL: LocalFiles(home)}), "bus")
    yield outbox
    outbox.close()


def line(seq: int, **fields: Any) -> bytes:
    head = {"event": "log", "seq": seq, "run_id": "r", "attempt": 1, "timestamp_ms": seq}
    return json.dumps({**head, **fields}).encode() + b"\n"


def begin(registry: RunRegistry, run_id: str) -> None:
    registry.submit(NewRun(run_id=run_id, digest=run_id, config={})).result()
    registry.claim(run_id, []).result()


def write(registry: RunRegistry, home: Home, run_id: str, seqs: range, **fields: Any) -> RunRecord:
    """Append events to the run's file, and take them in."""
    path = home.run(run_id).events
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(b"".join(line(seq, **fields) for seq in seqs))
    return take_in(registry, home, run_id, seqs[-1])


def take_in(registry: RunRegistry, home: Home, run_id: str, last_seq: int) -> RunRecord:
    offset = home.run(run_id).events.stat().st_size
    place = {"offset": offset, "last_seq": last_seq, "step": 0, "heartbeat_ms": 0}
    return registry.follow(run_id, 1, metrics={}, **place).result()


def end(registry: RunRegistry, run_id: str) -> None:
    registry.end(run_id, 1, Ending(state=RunState.COMPLETED, cause=Cause(id="completed"))).result()


def seqs_told(outbox: Outbox, run: RunRecord, place: Place | None = None) -> list[int]:
    batches = outbox.batches(run, outbox.place(run.run_id) if place is None else place)
    return [json.loads(part)["seq"] for batch, _ in batches for part in batch.lines.splitlines()]


def tell_all(outbox: Outbox) -> dict[str, list[int]]:
    """Tell of everything, and confirm it."""
    told: dict[str, list[int]] = {}
    while news := outbox.changed_runs():
        places = {}
        for run in news:
            place = outbox.place(run.run_id)
            for batch, end_offset in outbox.batches(run, place):
                seqs = [json.loads(part)["seq"] for part in batch.lines.splitlines()]
                told.setdefault(run.run_id, []).extend(seqs)
                place = Place(batch.last_seq, end_offset)
            places[run.run_id] = place
        outbox.advance(places, news[-1].change)
        outbox.commit().result()
    return told


def test_what_was_taken_in_is_told_and_what_was_confirmed_is_not_told_again(
    registry: RunRegistry, home: Home, outbox: Outbox
) -> None:
    begin(registry, "r")
    write(registry, home, "r", range(1, 4))
    with home.run("r").events.open("ab") as file:
        file.write(line(4))  # which the registry does not know yet
    assert outbox.backlog() == Backlog(num_runs=1, num_events=3)
    assert tell_all(outbox) == {"r": [1, 2, 3]}
    assert outbox.backlog() == Backlog(num_runs=0, num_events=0)
    take_in(registry, home, "r", 4)
    assert tell_all(outbox) == {"r": [4]}
    assert outbox.changed_runs() == []


def test_what_was_not_confirmed_is_told_again_by_the_next_daemon(
    registry: RunRegistry, home: Home, outbox: Outbox
) -> None:
    begin(registry, "r")
    write(registry, home, "r", range(1, 4))
    assert tell_all(outbox) == {"r": [1, 2, 3]}
    run = write(registry, home, "r", range(4, 6))
    assert seqs_told(outbox, run) == [4, 5]  # and then this daemon dies
    outbox.close()
    after = Outbox(registry, Pools({LOCAL_POOL: LocalFiles(home)}), "bus")
    assert tell_all(after) == {"r": [4, 5]}
    after.close()


def test_consumers_do_not_know_of_each_other(registry: RunRegistry, home: Home, outbox: Outbox) -> None:
    other = Outbox(registry, Pools({LOCAL_POOL: LocalFiles(home)}), "log")
    begin(registry, "r")
    write(registry, home, "r", range(1, 3))
    assert tell_all(outbox) == {"r": [1, 2]}
    assert tell_all(other) == {"r": [1, 2]}
    other.close()


def test_a_new_consumer_is_told_of_live_runs_from_their_first_event_and_of_ended_ones_nothing(
    registry: RunRegistry, home: Home
) -> None:
    for run_id in ("ended", "live"):
        begin(registry, run_id)
        write(registry, home, run_id, range(1, 4))
    end(registry, "ended")
    outbox = Outbox(registry, Pools({LOCAL_POOL: LocalFiles(home)}), "new")
    assert outbox.changed_runs() == []
    write(registry, home, "live", range(4, 5))
    end(registry, "live")
    assert tell_all(outbox) == {"live": [1, 2, 3, 4]}
    outbox.close()


def test_news_come_in_the_order_of_the_changes_page_by_page(
    registry: RunRegistry, home: Home, outbox: Outbox
) -> None:
    for number in range(7):
        begin(registry, f"r{number}")
    registry.want_cancel("r0", "because").result()
    seen = []
    while news := outbox.changed_runs(limit=3):
        assert [run.change for run in news] == sorted(run.change for run in news)
        seen += [run.run_id for run in news]
        outbox.advance({}, news[-1].change)
        outbox.commit().result()
    assert seen == ["r1", "r2", "r3", "r4", "r5", "r6", "r0"]


def test_a_damaged_line_is_passed_over_and_repeats_nothing(
    registry: RunRegistry, home: Home, outbox: Outbox
) -> None:
    begin(registry, "r")
    write(registry, home, "r", range(1, 4))
    assert tell_all(outbox) == {"r": [1, 2, 3]}
    with home.run("r").events.open("ab") as file:
        file.write(b"no event\n" + line(5))
    take_in(registry, home, "r", 5)
    assert tell_all(outbox) == {"r": [5]}


@pytest.mark.parametrize("is_noticed_late", [False, True])
def test_events_after_a_loss_are_told_though_their_numbers_were_used_before(
    registry: RunRegistry, home: Home, outbox: Outbox, is_noticed_late: bool
) -> None:
    begin(registry, "r")
    kept = write(registry, home, "r", range(1, 3), text="x" * PLACE_EVERY_BYTES)
    write(registry, home, "r", range(3, 6))
    assert tell_all(outbox) == {"r": [1, 2, 3, 4, 5]}
    with home.run("r").events.open("r+b") as file:
        file.truncate(kept.event_offset)  # a power cut
    registry.rewind("r", kept.event_offset).result()
    again = range(3, 30 if is_noticed_late else 4)
    run = write(registry, home, "r", again, attempt=2, text="other")
    run = msgspec.structs.replace(run, event_offset=home.run("r").events.stat().st_size)
    assert seqs_told(outbox, run) == list(again)


def test_a_file_that_is_gone_stops_nothing(registry: RunRegistry, home: Home, outbox: Outbox) -> None:
    for run_id in ("gone", "there"):
        begin(registry, run_id)
        write(registry, home, run_id, range(1, 3))
    home.run("gone").events.unlink()
    assert tell_all(outbox) == {"there": [1, 2]}


@pytest.fixture(scope="module")
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    home = Home(tmp_path_factory.mktemp("home"))
    home.make()
    return home


@pytest.fixture(scope="module")
def shared_registry(shared_home: Home) -> Iterator[RunRegistry]:
    registry = RunRegistry(shared_home.registry)
    yield registry
    registry.close()


@given(parts=st.lists(st.tuples(st.integers(1, 5), st.booleans(), st.booleans()), max_size=12))
def test_in_order_and_without_gaps_whatever_is_repeated(
    shared_home: Home, shared_registry: RunRegistry, parts: list[tuple[int, bool, bool]]
) -> None:
    home, registry = shared_home, shared_registry
    outbox = Outbox(registry, Pools({LOCAL_POOL: LocalFiles(home)}), "bus")
    run_id = f"r{uuid.uuid4().hex}"  # of this example
    begin(registry, run_id)
    last, seen = 0, 0
    for num_events, is_confirmed, is_restarted in parts:
        run = write(registry, home, run_id, range(last + 1, last + 1 + num_events))
        last += num_events
        place = outbox.place(run_id)
        for batch, end_offset in outbox.batches(run, place):
            assert batch.first_seq <= seen + 1
            seen = max(seen, batch.last_seq)
            place = Place(batch.last_seq, end_offset)
        assert seen == last
        if is_confirmed:
            outbox.advance({run_id: place}, run.change)
            outbox.commit().result()
        if is_restarted:
            outbox.close()
            outbox = Outbox(registry, Pools({LOCAL_POOL: LocalFiles(home)}), "bus")
    outbox.close()


def test_a_registry_of_the_first_schema_is_migrated_with_all_its_runs(home: Home) -> None:
    script = files("trn.registry.migrations").joinpath("0001_start.sql").read_text(encoding="utf-8")
    with sqlite3.connect(home.registry) as old:
        old.executescript(f"{script}; PRAGMA user_version = 1;")
        for number in range(3):
            values = {
                "run_id": f"r{number}",
                "digest": f"d{number}",
                "state": "COMPLETED",
                "reason": "it ended",
            }
            more = {"config": '{"seed": 1}', "needs": "{}", "tags": '{"a": "b"}', "change": number + 1}
            texts = dict.fromkeys(("name", "parent_run_id", "snapshot", "base_dir", "interpreter"), "")
            numbers = {"priority": 2, "submitted_ms": 5, "updated_ms": 6, "max_attempts": 1}
            row = {**values, **more, **texts, **numbers}
            marks = ", ".join(f":{name}" for name in row)
            old.execute(f"INSERT INTO runs ({', '.join(row)}) VALUES ({marks})", row)
        old.execute("INSERT INTO attempts (run_id, number, launched_ms) VALUES ('r1', 1, 7)")
    old.close()
    registry = RunRegistry(home.registry)
    runs = registry.page(with_config=True)
    assert {run.run_id for run in runs} == {"r0", "r1", "r2"}
    assert {(run.state, run.priority, run.config["seed"], run.tags["a"]) for run in runs} == {
        (RunState.COMPLETED, 2, 1, "b")
    }
    assert [attempt.launched_ms for attempt in registry.attempts("r1")] == [7]
    assert [run.change for run in registry.changed(0)] == [1, 2, 3]
    begin(registry, "new")
    outbox = Outbox(registry, Pools({LOCAL_POOL: LocalFiles(home)}), "bus")
    write(registry, home, "new", range(1, 3))
    assert tell_all(outbox) == {"new": [1, 2]}
    outbox.close()
    registry.close()
    assert check_integrity(home.registry) == []
