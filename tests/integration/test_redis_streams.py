"""Redis Streams, on a real server: whatever happens to it, every event is there in the end, in order, and bounded."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis_server import RedisServer, needs_redis

from trn.core.bus_url import read_bus_url
from trn.core.errors import InvalidRequestError
from trn.core.home import Home
from trn.core.runs import LOCAL_POOL
from trn.daemon.outlets.bus_publisher import BusPublisher
from trn.daemon.outlets.event_bus import BusUnavailableError, EventMessage
from trn.daemon.outlets.outbox import Outbox
from trn.daemon.outlets.redis_streams import RedisBus, RedisCommands
from trn.executors.local.files import LocalFiles
from trn.executors.pools import Pools
from trn.registry.base import NewRun
from trn.registry.sqlite import RunRegistry

pytestmark = needs_redis

# So many microseconds for each key, and a look at who asks after so many bytes.
SLOW_LOADING = ("--key-load-delay", "30000", "--loading-process-events-interval-bytes", "1024")


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


class World:
    """A registry with runs whose events are written here, and a publisher to a real server."""

    def __init__(self, root: Path, url: str) -> None:
        self.home = Home(root)
        self.home.make()
        self.registry = RunRegistry(self.home.registry)
        self.bus = RedisBus(read_bus_url(url), reader="me")
        outbox = Outbox(self.registry, Pools({LOCAL_POOL: LocalFiles(self.home)}), "bus")
        self.publisher = BusPublisher(outbox=outbox, bus=self.bus, shown=url)

    def close(self) -> None:
        self.bus.close()
        self.registry.close()

    def write(self, run_id: str, num_events: int) -> None:
        path = self.home.run(run_id).events
        if not path.exists():
            self.registry.submit(NewRun(run_id=run_id, digest=run_id, config={})).result()
            self.registry.claim(run_id, []).result()
            path.parent.mkdir(parents=True)
        first = 1 + (path.read_bytes().count(b"\n") if path.exists() else 0)
        head = {"event": "metric", "run_id": run_id, "attempt": 1, "timestamp_ms": 1, "text": 'ü "x" \n'}
        with path.open("ab") as file:
            for seq in range(first, first + num_events):
                file.write(json.dumps({**head, "seq": seq}).encode() + b"\n")
        place = {"offset": path.stat().st_size, "last_seq": first + num_events - 1}
        self.registry.follow(run_id, 1, **place, step=0, heartbeat_ms=0, metrics={}).result()

    def files(self) -> dict[str, list[str]]:
        """Each run's events as they are in its file."""
        runs = self.home.root / "runs"
        return {
            path.name: self.home.run(path.name).events.read_text().splitlines() for path in runs.iterdir()
        }


@pytest.fixture
def world(tmp_path: Path, server: RedisServer) -> Iterator[World]:
    world = World(tmp_path, server.url)
    yield world
    world.close()


def test_entries_have_the_fields_that_the_docs_name(world: World, server: RedisServer) -> None:
    world.write("r", 2)
    world.publisher.publish_changes()
    first, second = server.entries("trn:events")
    line = world.files()["r"][0]
    assert first == {"run_id": "r", "seq": "1", "event": "metric", "data": line}
    assert second["seq"] == "2"
    [state] = server.entries("trn:runs")
    assert (state["run_id"], state["state"]) == ("r", "DISPATCHING")
    assert int(state["change"]) == json.loads(state["data"])["change"] == world.registry.last_change()


def test_a_server_that_is_killed_and_loads_for_long_misses_nothing(world: World, server: RedisServer) -> None:
    server.fill(num_keys=100)
    for _ in range(2):
        world.write("a", 40)
        world.write("b", 5)
        world.publisher.publish_changes()
        server.kill()
        world.write("a", 10)
        with pytest.raises(BusUnavailableError):
            world.publisher.publish_changes()
        server.start(*SLOW_LOADING, is_loaded=False)
        with pytest.raises(BusUnavailableError, match="loading"):
            world.publisher.publish_changes()
        server.kill()
        server.start()
        world.publisher.publish_changes()
        assert server.told_events() == world.files()


@pytest.mark.parametrize(
    ("break_it", "mend_it", "words"),
    [
        (("CONFIG SET", "maxmemory", "1mb"), ("CONFIG SET", "maxmemory", "0"), "maxmemory"),
        (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE"), "read only"),
        (("SET", "trn:events", "text"), ("DEL", "trn:events"), "wrong kind"),
    ],
    ids=["out of memory", "a replica", "not a stream"],
)
def test_a_server_that_takes_nothing_misses_nothing(
    world: World, server: RedisServer, break_it: tuple[str, ...], mend_it: tuple[str, ...], words: str
) -> None:
    world.write("a", 20)
    server.client.execute_command(*break_it)
    for _ in range(2):
        with pytest.raises(BusUnavailableError, match=words):
            world.publisher.publish_changes()
        world.write("b", 3)
    server.client.execute_command(*mend_it)
    world.publisher.publish_changes()
    assert server.told_events() == world.files()


def test_nothing_of_a_batch_is_there_where_some_of_it_was_refused(
    server: RedisServer, tmp_path: Path
) -> None:
    bus = RedisBus(read_bus_url(server.url), reader="me")
    bus.publish([EventMessage("r", 1, "log", b"{}")])
    server.client.config_set("maxmemory", int(server.client.info("memory")["used_memory"]) + 200_000)
    with pytest.raises(BusUnavailableError, match="maxmemory"):
        bus.publish([EventMessage("r", seq, "log", b"x" * 1000) for seq in range(2, 2000)])
    assert server.client.xlen("trn:events") == 1
    bus.close()


def test_an_answer_that_is_lost_means_a_repeat_and_never_a_gap(
    world: World, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.write("r", 5)
    world.bus.publish(())
    connection = world.bus._connection
    read = connection.read_response

    def lose(*args: Any, **options: Any) -> Any:
        answer = read(*args, **options)
        if isinstance(answer, list):  # EXEC has done it
            raise redis.ConnectionError("the answer is lost")
        return answer

    monkeypatch.setattr(connection, "read_response", lose)
    with pytest.raises(BusUnavailableError, match="lost"):
        world.publisher.publish_changes()
    world.publisher.publish_changes()
    assert server.told_events() == world.files()
    assert [entry["seq"] for entry in server.entries("trn:events")] == ["1", "2", "3", "4", "5"] * 2


def test_streams_are_bounded_and_have_the_prefix_that_was_asked_for(
    server: RedisServer, tmp_path: Path
) -> None:
    world = World(tmp_path, f"{server.url}?prefix=mine&maxlen=300")
    for _ in range(10):
        world.write("r", 200)
        world.publisher.publish_changes()
    # About: Redis drops whole blocks, of 100 entries by default.
    assert 300 <= server.client.xlen("mine:events") <= 400
    assert server.entries("mine:events")[-1]["seq"] == "2000"
    assert not server.client.exists("trn:events")
    world.close()


def commands_of(server: RedisServer, reader: str = "me", options: str = "") -> RedisCommands:
    commands = RedisBus(read_bus_url(server.url + options), reader=reader).commands()
    assert isinstance(commands, RedisCommands)
    return commands


def test_a_command_is_read_until_it_is_answered_and_then_gone(server: RedisServer) -> None:
    for number in range(3):
        server.client.xadd("trn:commands", {"command": "submit", "config": str(number)})
    first = commands_of(server)
    read = first.read(1.0)
    if len(read) < 3:  # nothing was read before; then what is new comes
        read = first.read(1.0)
    assert [command.fields["config"] for command in read] == ["0", "1", "2"]
    first.answer(read[0], "", {"ok": "1"})
    again = commands_of(server)  # of the daemon that comes after one that was killed
    assert again.read(1.0) == read[1:]
    again.answer(read[1], "elsewhere", {"ok": "1"})
    again.answer(read[2], "trn:events", {"ok": "1"})  # no place for a reply
    assert again.read(0.01) == again.read(0.01) == []
    assert server.entries("trn:replies") == [{"ok": "1"}] * 2
    assert server.entries("elsewhere") == [{"ok": "1"}]
    assert server.client.xlen("trn:commands") == 0
    assert not server.client.exists("trn:events")


def test_a_command_belongs_to_the_daemon_that_read_it(server: RedisServer) -> None:
    one, other = commands_of(server, "one"), commands_of(server, "other")
    server.client.xadd("trn:commands", {"command": "submit"})
    assert one.read(0.01) == []
    [command] = one.read(1.0)
    assert other.read(0.01) == other.read(0.01) == []
    one.answer(command, "", {})
    assert not server.client.exists("trn:replies")


def test_commands_outlive_the_server_and_a_stream_that_was_deleted(server: RedisServer) -> None:
    commands = commands_of(server)
    server.client.xadd("trn:commands", {"command": "submit", "config": "1"})
    assert commands.read(0.01) == []
    [command] = commands.read(1.0)
    server.kill()
    with pytest.raises(BusUnavailableError):
        commands.answer(command, "", {"ok": "1"})
    server.start()
    assert commands.read(0.01) == [command]
    server.client.delete("trn:commands")
    with pytest.raises(BusUnavailableError, match="NOGROUP"):
        commands.read(0.01)
    server.client.xadd("trn:commands", {"command": "submit", "config": "2"})
    assert commands.read(0.01) == []
    assert [command.fields["config"] for command in commands.read(1.0)] == ["2"]


def test_odd_commands_are_read_as_such(server: RedisServer) -> None:
    commands = commands_of(server)
    server.client.xadd("trn:commands", {"command": "submit", "config": b"\xff", "request_id": "mine"})
    server.client.set("taken", "text")
    assert commands.read(0.01) == []
    [command] = commands.read(1.0)
    assert (command.fields["command"], command.fields["request_id"]) == ("(not UTF-8 text)", "mine")
    with pytest.raises(InvalidRequestError, match="taken"):
        commands.answer(command, "taken", {"ok": "0"})
    assert server.client.xlen("trn:commands") == 0


def test_replies_are_bounded_and_commands_can_be_switched_off(server: RedisServer) -> None:
    commands = commands_of(server, options="?maxlen=100")
    assert commands.read(0.01) == []
    for _ in range(40):
        for number in range(8):
            server.client.xadd("trn:commands", {"command": "submit", "config": str(number)})
        for command in commands.read(1.0):
            commands.answer(command, "", {"ok": "1"})
    assert 100 <= server.client.xlen("trn:replies") <= 200
    assert RedisBus(read_bus_url(f"{server.url}?commands=off"), reader="me").commands() is None
