"""The bus's side of the daemon, on a bus in memory: nothing lost while it is away, no secret shown, commands once."""

import asyncio
import json
import logging
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_outbox import begin, end, write

from trn.core.bus_url import read_bus_url
from trn.core.errors import InfeasibleError, InvalidRequestError, UnavailableError
from trn.core.home import Home
from trn.core.runs import LOCAL_POOL
from trn.daemon.intake.submission import Submission
from trn.daemon.outlets import bus_publisher
from trn.daemon.outlets.bus_commands import BusCommands
from trn.daemon.outlets.bus_publisher import BusPublisher
from trn.daemon.outlets.event_bus import (
    BusCommand,
    BusUnavailableError,
    EventMessage,
    MemoryBus,
    Message,
    RunMessage,
    open_bus,
)
from trn.daemon.outlets.outbox import Outbox
from trn.executors.local.files import LocalFiles
from trn.executors.pools import Pools
from trn.registry.sqlite import RunRegistry

DEADLINE_S = 30


class World:
    """A registry, a bus in memory, and a publisher between them."""

    def __init__(self, root: Path) -> None:
        self.home = Home(root)
        self.home.make()
        self.registry = RunRegistry(self.home.registry)
        self.bus = MemoryBus()
        self.publisher = self.make_publisher()

    def make_publisher(self) -> BusPublisher:
        self.outbox = Outbox(self.registry, Pools({LOCAL_POOL: LocalFiles(self.home)}), "bus")
        # Time stands still: the first publication is committed, and others where a test says so.
        return BusPublisher(outbox=self.outbox, bus=self.bus, shown="memory://here", clock=lambda: 100.0)

    def write(self, run_id: str, seqs: range, **fields: str) -> None:
        write(self.registry, self.home, run_id, seqs, **fields)

    def seqs(self, run_id: str) -> list[int]:
        return [m.seq for m in self.bus.messages if isinstance(m, EventMessage) and m.run_id == run_id]

    def states(self, run_id: str) -> list[str]:
        return [m.state for m in self.bus.messages if isinstance(m, RunMessage) and m.run_id == run_id]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.registry.close()


def wait_until(is_so: Callable[[], bool]) -> None:
    moment = threading.Event()
    for _ in range(DEADLINE_S * 100):
        if is_so():
            return
        moment.wait(0.01)
    raise AssertionError("it did not come about")


def test_events_are_published_as_they_are_in_the_file_and_then_the_state(world: World) -> None:
    begin(world.registry, "r")
    world.write("r", range(1, 4))
    end(world.registry, "r")
    world.publisher.publish_changes()
    *events, state = world.bus.messages
    lines = world.home.run("r").events.read_bytes().splitlines()
    assert events == [EventMessage("r", seq, "log", line) for seq, line in enumerate(lines, 1)]
    assert isinstance(state, RunMessage)
    assert (state.state, json.loads(state.data)["run_id"]) == ("COMPLETED", "r")
    assert "config" not in json.loads(state.data)


def test_a_state_is_published_when_it_changes_and_not_with_every_event(world: World) -> None:
    begin(world.registry, "r")
    for seq in range(1, 6):
        world.write("r", range(seq, seq + 1))
        world.publisher.publish_changes()
    end(world.registry, "r")
    world.publisher.publish_changes()
    assert world.seqs("r") == [1, 2, 3, 4, 5]
    assert world.states("r") == ["DISPATCHING", "COMPLETED"]


def test_what_a_bus_did_not_take_is_published_when_it_is_back(world: World) -> None:
    begin(world.registry, "r")
    world.write("r", range(1, 3))
    world.bus.fault = "gone"
    with pytest.raises(BusUnavailableError, match="gone"):
        world.publisher.publish_changes()
    world.write("r", range(3, 5))
    end(world.registry, "r")
    world.bus.fault = ""
    world.publisher.publish_changes()
    assert world.seqs("r") == [1, 2, 3, 4]
    assert world.states("r") == ["COMPLETED"]


def test_a_bus_that_fails_in_the_middle_gets_the_rest_in_order(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus_publisher, "MAX_BYTES", 1)
    num_published = 0

    def publish(messages: list[Message]) -> None:
        nonlocal num_published
        num_published += 1
        if num_published % 3 == 0:
            world.bus.messages += messages  # it has them, and its answer is lost
        if num_published % 3:
            MemoryBus.publish(world.bus, messages)
        else:
            raise BusUnavailableError("the answer is lost")

    monkeypatch.setattr(world.bus, "publish", publish)
    for run_id in ("a", "b"):
        begin(world.registry, run_id)
        world.write(run_id, range(1, 101), text="x" * 20_000)
    for _ in range(20):
        try:
            world.publisher.publish_changes()
            break
        except BusUnavailableError:
            continue
    else:
        raise AssertionError("it never came to an end")
    for run_id in ("a", "b"):
        last = 0
        for seq in world.seqs(run_id):
            assert seq <= last + 1
            last = max(last, seq)
        assert last == 100
    assert num_published >= 6


def test_the_next_daemon_goes_on_where_the_last_one_committed(world: World) -> None:
    begin(world.registry, "r")
    world.write("r", range(1, 4))
    world.publisher.publish_changes()
    world.write("r", range(4, 6))
    world.publisher.publish_changes()  # and then it is killed, before it commits
    world.outbox.close()
    world.make_publisher().publish_changes()
    assert world.seqs("r") == [1, 2, 3, 4, 5, 4, 5]


def test_a_busy_publisher_commits_a_few_times_a_second_and_not_each_time(world: World) -> None:
    now = 100.0
    world.publisher = BusPublisher(
        outbox=world.outbox, bus=world.bus, shown="memory://here", clock=lambda: now
    )
    begin(world.registry, "r")
    committed = 0
    for seq in range(1, 51):
        world.write("r", range(seq, seq + 1))
        before = world.registry.writer.num_commits
        world.publisher.publish_changes()
        world.registry.set_slots([]).result()
        committed += world.registry.writer.num_commits - before - 1
        now += 0.02
    assert committed <= 6
    assert world.seqs("r") == list(range(1, 51))


def test_a_bus_that_is_away_is_told_of_once_and_stops_nobody(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus_publisher, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(bus_publisher, "MAX_PAUSE_S", 0.002)
    world.bus.fault = "refused"
    caplog.set_level(logging.INFO, "trn.bus")

    async def main() -> None:
        world.registry.writer.on_commit = world.publisher.wake
        task = asyncio.create_task(world.publisher.run())
        begin(world.registry, "r")
        await asyncio.to_thread(world.write, "r", range(1, 4))
        await asyncio.to_thread(
            wait_until, lambda: "not published yet: 3 events of 1 run" in "".join(world.publisher.warnings)
        )
        world.bus.fault = ""
        await asyncio.to_thread(wait_until, lambda: world.seqs("r") == [1, 2, 3])
        await asyncio.to_thread(wait_until, lambda: world.publisher.warnings == [])
        await asyncio.to_thread(world.write, "r", range(4, 6))
        await asyncio.to_thread(wait_until, lambda: world.seqs("r") == [1, 2, 3, 4, 5])
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(main())
    told = [record.getMessage() for record in caplog.records]
    assert [text for text in told if "is not available: refused" in text] == told[:1]
    assert "is available again" in told[1]
    assert "not published yet: 3 events of 1 run" in told[1]
    assert len(told) == 2


def test_a_graceful_stop_publishes_the_last_and_commits_it(world: World) -> None:
    async def main() -> None:
        task = asyncio.create_task(world.publisher.run())
        begin(world.registry, "r")
        await asyncio.to_thread(world.write, "r", range(1, 4))  # and nobody wakes it
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(main())
    assert world.seqs("r") == [1, 2, 3]
    world.registry.set_slots([]).result()
    assert world.make_publisher()._outbox.changed_runs() == []


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://localhost:6379/0", "redis://localhost:6379/0"),
        ("redis://me:secret@host:6379/1?maxlen=5", "redis://host:6379/1?maxlen=5"),
        ("rediss://:s%2Fcret@[::1]:6379?password=secret&prefix=x", "rediss://[::1]:6379?prefix=x"),
        ("unix:///tmp/redis.sock?db=3&commands=off", "unix:///tmp/redis.sock?commands=off"),
        ("unix://me:secret@/tmp/redis.sock", "unix:///tmp/redis.sock"),
    ],
)
def test_a_url_is_shown_without_what_may_be_secret(url: str, shown: str) -> None:
    read = read_bus_url(url)
    assert read.shown == shown
    assert "secret" not in repr(read)


@pytest.mark.parametrize(
    "url",
    [
        *("", "redis", "redis:", "redis://", "://secret", "redis://:sec/ret@host:6379", "redis://:a:secret"),
        *("redis://u:12#34@host", "redis://u:12?34@host"),
    ],
)
def test_what_is_no_url_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(InvalidRequestError, match="is no URL") as refused:
        read_bus_url(url)
    assert "secret" not in str(refused.value)
    assert "ret@" not in str(refused.value)


def test_an_unknown_scheme_is_refused_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in = EntryPoint("memory", "trn.daemon.outlets.event_bus:BUSES", "trn.event_buses")
    monkeypatch.setattr("trn.daemon.outlets.event_bus.entry_points", lambda group: [plug_in])
    with pytest.raises(
        InvalidRequestError, match=r"'kafka'.*known schemes: redis, rediss, unix, memory"
    ) as refused:
        open_bus(read_bus_url("kafka://:secret@host"), reader="me")
    assert "secret" not in str(refused.value)


def test_a_plug_in_is_found_by_its_scheme_and_gets_the_url(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "a_plug_in.py").write_text(
        "from trn.daemon.outlets.event_bus import MemoryBus\n"
        "def open_it(url):\n"
        "    if 'wrong' in url: raise ValueError(url)\n"
        "    bus = MemoryBus(); bus.url = url; return bus\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    plug_in = EntryPoint("memory", "a_plug_in:open_it", "trn.event_buses")
    monkeypatch.setattr("trn.daemon.outlets.event_bus.entry_points", lambda group: [plug_in])
    bus: Any = open_bus(read_bus_url("memory://:secret@here"), reader="me")
    assert bus.url == "memory://:secret@here"
    with pytest.raises(UnavailableError, match="a_plug_in:open_it failed with ValueError") as refused:
        open_bus(read_bus_url("memory://:secret@wrong"), reader="me")
    assert "secret" not in str(refused.value)


def test_without_the_client_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(UnavailableError, match=r"pip install 'trn\[redis\]'"):
        open_bus(read_bus_url("redis://:secret@host"), reader="me")


@pytest.mark.parametrize("option", ["maxlen=0", "maxlen=many", "commands=perhaps"])
def test_an_option_that_means_nothing_is_refused(option: str) -> None:
    with pytest.raises(InvalidRequestError, match="expected"):
        open_bus(read_bus_url(f"redis://host?{option}"), reader="me")


class FakeCalls:
    """Of the service: remembers what it was asked."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.num_found = 0
        self.asked: list[Any] = []

    async def submit_run(self, submission: Submission) -> Any:
        self.asked.append(submission)
        if b"too much" in submission.config_json:
            raise InfeasibleError("this machine could never run it", ["resources.gpus: asks for 9"])
        if b"broken" in submission.config_json:
            raise RuntimeError("a secret of ours")
        if b"no descriptor" in submission.config_json:
            raise sqlite3.OperationalError("unable to open database file")
        return SimpleNamespace(run=SimpleNamespace(run_id="run-1"), existed=len(self.asked) > 1)

    async def cancel_run(self, run_id: str, *, reason: str = "", is_exact: bool = False) -> Any:
        self.asked.append(SimpleNamespace(run_id=run_id, reason=reason, is_exact=is_exact))
        return SimpleNamespace(run=SimpleNamespace(run_id=run_id), was_live=True)

    def find(self, run_id: str, *, is_exact: bool = False) -> Any:
        """The newest of its family: another one each time."""
        self.num_found += 1
        return SimpleNamespace(run_id=f"{run_id}.{self.num_found}")


class MemoryOfCancels:
    """As the registry's, without a registry."""

    def __init__(self) -> None:
        self.meant: dict[tuple[str, str], str] = {}

    def recall(self, command_id: str, asked: str) -> str:
        return self.meant.get((command_id, asked), "")

    def remember(self, command_id: str, asked: str, run_id: str) -> "Future[None]":
        self.meant[command_id, asked] = run_id
        done: Future[None] = Future()
        done.set_result(None)
        return done


def execute(calls: FakeCalls, **fields: str) -> dict[str, str]:
    commands = BusCommands(stream=MemoryBus(), calls=calls, cancels=MemoryOfCancels(), shown="memory://here")
    return asyncio.run(commands.execute(BusCommand("7-1", fields)))


def test_a_submit_is_the_call_of_the_api() -> None:
    calls = FakeCalls()
    more = {"base_dir": "/code", "code_identity": "c", "interpreter": "/bin/python", "priority": "-3"}
    reply = execute(calls, command="submit", config='{"a": 1.50}', request_id="mine", **more)
    assert reply == {"request_id": "mine", "ok": "1", "run_id": "run-1", "existed": "0"}
    [asked] = calls.asked
    assert asked == Submission(
        config_json=b'{"a": 1.50}',
        base_dir="/code",
        code_identity="c",
        interpreter="/bin/python",
        priority=-3,
        submission_id="bus-7-1",
    )
    assert calls.num_calls == 1


@pytest.mark.parametrize("config", ["{}", ' {"a": 1.50, "a": 2}', '{"run_id": "mine"}', "[1]", "no json"])
def test_a_run_is_known_by_its_command_so_that_it_is_made_once(config: str) -> None:
    calls = FakeCalls()
    for _ in range(2):
        execute(calls, command="submit", config=config, another="1")
    asked = [(asked.config_json, asked.force_new, asked.submission_id) for asked in calls.asked]
    assert asked == [(config.encode(), True, "bus-7-1")] * 2


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({}, "invalid-argument", "unknown command ''; expected cancel or submit"),
        ({"command": "stop"}, "invalid-argument", "unknown command 'stop'"),
        ({"command": "submit", "prioritty": "1"}, "invalid-argument", "unknown field of submit: prioritty"),
        ({"command": "submit", "priority": "high"}, "invalid-argument", "priority is 'high'"),
        ({"command": "submit", "another": "yes"}, "invalid-argument", "another is 'yes'"),
        ({"command": "submit", "config": "x" * (5 << 20)}, "invalid-argument", "at most 4194304"),
        ({"command": "submit", "config": "too much"}, "failed-precondition", "asks for 9"),
        ({"command": "submit", "config": "broken"}, "internal", "the daemon failed in bus command submit"),
        ({"command": "submit", "config": "no descriptor"}, "unavailable", "cannot answer now"),
    ],
)
def test_what_cannot_be_obeyed_gets_an_error_in_reply(fields: dict[str, str], code: str, words: str) -> None:
    reply = execute(FakeCalls(), **fields)
    assert (reply["request_id"], reply["ok"], reply["code"]) == ("7-1", "0", code)
    assert words in reply["error"]
    assert "a secret of ours" not in reply["error"]


class LosingBus(MemoryBus):
    """Loses the first answer."""

    num_lost = 0

    def answer(self, command: BusCommand, reply_to: str, reply: Mapping[str, str]) -> None:
        if not self.num_lost:
            self.num_lost = 1
            raise BusUnavailableError("gone")
        super().answer(command, reply_to, reply)


def test_a_command_whose_answer_was_lost_is_obeyed_again_and_then_forgotten() -> None:
    bus, calls = LosingBus(), FakeCalls()

    async def main() -> None:
        commands = BusCommands(stream=bus, calls=calls, cancels=MemoryOfCancels(), shown="memory://here")
        task = asyncio.create_task(commands.run())
        bus.ask(BusCommand("1-1", {"command": "cancel", "run_id": "r", "reply_to": "there"}))
        assert await asyncio.to_thread(bus.wait_answered, DEADLINE_S)
        bus.ask(BusCommand("1-2", {}))  # deleted before anyone read it
        assert await asyncio.to_thread(bus.wait_answered, DEADLINE_S)
        task.cancel()
        bus.close()
        await asyncio.wait([task])

    asyncio.run(main())
    assert bus.replies[0] == ("there", {"request_id": "1-1", "ok": "1", "run_id": "r.1", "was_live": "1"})
    # The run that the name meant when the command was first read, though it means another one by now.
    assert calls.asked == [SimpleNamespace(run_id="r.1", reason="", is_exact=True)] * 2
    assert calls.num_found == 1
