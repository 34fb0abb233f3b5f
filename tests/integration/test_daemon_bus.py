"""The daemon's bus, with real daemons, workers and a real Redis: all of them are killed, and nothing is missing."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from daemon_process import DEADLINE_S, DaemonProcess, end_everything
from redis_server import RedisServer, needs_redis

import trn
from trn.core.home import Home

pytestmark = needs_redis

TRAINERS = Path(__file__).parent / "trainers"
SETTINGS = 'event_bus = "{url}"\n[inventory]\ncpus = 4\ndevices = []\n'


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    home = tmp_path / "home"
    yield home
    end_everything(home)


def start(home: Path, server: RedisServer, failpoints: str = "") -> DaemonProcess:
    return DaemonProcess(home, settings=SETTINGS.format(url=server.url), failpoints=failpoints, is_bare=True)


def job(folder: Path, num_steps: int = 3, **more: Any) -> dict[str, Any]:
    return {
        "trainer": "witnessed:Witnessed",
        "mock_batches": [1] * num_steps,
        "metric_every": 1,
        "hyperparams": {"witness": str(folder), "step_ms": 4},
        **more,
    }


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ask(server: RedisServer, **fields: str) -> dict[str, str]:
    """Send a command, and wait for its reply."""
    sent = server.client.xadd("trn:commands", fields)  # type: ignore[arg-type]
    request_id = fields.get("request_id") or sent.decode()
    return wait_reply(server, request_id, fields.get("reply_to", "trn:replies"))


def wait_reply(server: RedisServer, request_id: str, stream: str = "trn:replies") -> dict[str, str]:
    def replies() -> list[dict[str, str]]:
        return [reply for reply in server.entries(stream) if reply["request_id"] == request_id]

    wait_until(lambda: bool(replies()))
    return replies()[0]


def test_no_event_is_missing_though_redis_and_daemons_are_killed(
    tmp_path: Path, home: Path, server: RedisServer
) -> None:
    daemon = start(home, server)
    daemon.wait_ready()
    run_ids = []
    with trn.Client(home) as client:
        for number in range(4):
            config = job(tmp_path, 250, name=f"run-{number}")
            run_ids.append(client.submit(config, base_dir=TRAINERS).run.run_id)

        def num_told() -> int:
            return sum(map(len, server.told_events().values()))

        for number in range(3):
            wait_until(lambda: num_told() >= 100 * (number + 1))  # noqa: B023
            if number != 1:
                server.kill()
            if number != 0:
                daemon.kill()
                daemon = start(home, server, "bus.published=kill@3" if number == 1 else "")
                daemon.wait_ready()
            if number != 1:
                server.start()
            if number == 1:  # a daemon that dies after Redis took something, and before it could note that
                wait_until(lambda: not daemon.is_running())  # noqa: B023
                daemon = start(home, server)
                daemon.wait_ready()
        for run_id in run_ids:
            assert client.wait(run_id, timeout_s=DEADLINE_S).state == "COMPLETED"
    files = {run_id: Home(home).run(run_id).events.read_text().splitlines() for run_id in run_ids}
    wait_until(lambda: server.told_events() == files)
    for run_id in run_ids:
        states = [entry["state"] for entry in server.entries("trn:runs") if entry["run_id"] == run_id]
        assert states[-1] == "COMPLETED"
    assert daemon.stop() == 0


def test_what_happened_while_redis_was_away_is_told_by_the_next_daemon(
    tmp_path: Path, home: Path, server: RedisServer
) -> None:
    server.kill()
    daemon = start(home, server)
    daemon.wait_ready()
    with trn.Client(home) as client:
        run = client.submit(job(tmp_path), base_dir=TRAINERS).run
        assert client.wait(run.run_id, timeout_s=DEADLINE_S).state == "COMPLETED"
        wait_until(lambda: "events of 1 run" in "".join(client.health().warnings))
        [warning] = client.health().warnings
        assert f"the event bus {server.url} has not been available" in warning
    assert daemon.stop() == 0
    server.start()
    start(home, server).wait_ready()
    lines = Home(home).run(run.run_id).events.read_text().splitlines()
    wait_until(lambda: server.told_events() == {run.run_id: lines})


def test_a_program_submits_by_the_command_stream_and_gets_the_id_back(
    tmp_path: Path, home: Path, server: RedisServer
) -> None:
    config = json.dumps(job(tmp_path))
    # Sent before there is any daemon.
    early = server.client.xadd(
        "trn:commands", {"command": "submit", "config": config, "base_dir": str(TRAINERS)}
    )
    daemon = start(home, server)
    daemon.wait_ready()
    submit = {"command": "submit", "config": config, "base_dir": str(TRAINERS)}
    with trn.Client(home) as client:
        reply = wait_reply(server, early.decode())
        assert (reply["ok"], reply["existed"]) == ("1", "0")
        run_id = reply["run_id"]
        again = ask(server, **submit, request_id="mine", reply_to="answers")
        assert again == {"request_id": "mine", "ok": "1", "run_id": run_id, "existed": "1"}
        another = ask(server, **submit, another="1", priority="5")
        assert (another["ok"], another["existed"]) == ("1", "0")
        assert another["run_id"] != run_id
        assert client.get(another["run_id"]).priority == 5
        for name in (run_id, another["run_id"]):
            assert client.wait(name, timeout_s=DEADLINE_S).state == "COMPLETED"
        long = ask(
            server, command="submit", config=json.dumps(job(tmp_path, 100_000)), base_dir=str(TRAINERS)
        )
        assert ask(server, command="cancel", run_id=long["run_id"])["ok"] == "1"
        assert client.wait(long["run_id"], timeout_s=DEADLINE_S).state == "CANCELLED"
        infeasible = {**job(tmp_path), "resources": {"gpus": 64}}
        for fields, code, words in (
            ({"command": "submit", "config": "{"}, "invalid-argument", "not valid"),
            ({"command": "submit", "config": '{"trainer": 1}'}, "invalid-argument", "trainer"),
            ({"command": "submit", "config": json.dumps(infeasible)}, "failed-precondition", "never run it"),
            ({"command": "dance"}, "invalid-argument", "'dance'"),
            ({"command": "cancel", "run_id": "nobody"}, "not-found", "no run 'nobody'"),
            ({"command": "cancel", "run_id": "../../x"}, "invalid-argument", "is no run id"),
        ):
            refused = ask(server, **fields)
            assert (refused["ok"], refused["code"]) == ("0", code), refused
            assert words in refused["error"]
        assert len(list(client.list())) == 3
    wait_until(lambda: server.client.xlen("trn:commands") == 0)


@pytest.mark.parametrize("another", ["0", "1"])
def test_a_daemon_that_dies_before_it_replies_has_submitted_one_run(
    tmp_path: Path, home: Path, server: RedisServer, another: str
) -> None:
    daemon = start(home, server, "bus.obeyed=kill")
    daemon.wait_ready()
    fields = {"command": "submit", "config": json.dumps(job(tmp_path)), "base_dir": str(TRAINERS)}
    request = server.client.xadd("trn:commands", {**fields, "another": another})  # type: ignore[dict-item]
    wait_until(lambda: not daemon.is_running())
    assert server.entries("trn:replies") == []
    start(home, server).wait_ready()
    reply = wait_reply(server, request.decode())
    with trn.Client(home) as client:
        assert [run.run_id for run in client.list()] == [reply["run_id"]]
    assert reply["ok"] == "1"


@pytest.mark.parametrize("failpoint", ["bus.meant", "bus.obeyed"])
def test_a_cancel_that_is_read_again_ends_no_run_that_came_later(
    tmp_path: Path, home: Path, server: RedisServer, failpoint: str
) -> None:
    daemon = start(home, server, f"{failpoint}=kill")
    daemon.wait_ready()
    with trn.Client(home) as client:
        first = client.submit(job(tmp_path, 100_000, run_id="family"), base_dir=TRAINERS).run.run_id
    request = server.client.xadd("trn:commands", {"command": "cancel", "run_id": "family"})
    wait_until(lambda: not daemon.is_running())
    server.kill()  # what was not answered waits until it is back
    start(home, server).wait_ready()
    with trn.Client(home) as client:
        later = client.submit(job(tmp_path, 100_001, run_id="family"), base_dir=TRAINERS).run.run_id
        assert later != first
        wait_until(lambda: client.get(later).state == "RUNNING")
        server.start()
        assert wait_reply(server, request.decode())["run_id"] == first
        assert client.wait(first, timeout_s=DEADLINE_S, is_exact=True).state == "CANCELLED"
        assert not client.get(later).is_cancel_wanted
        client.cancel(later)


def test_a_command_of_many_megabytes_is_refused(tmp_path: Path, home: Path, server: RedisServer) -> None:
    daemon = start(home, server)
    daemon.wait_ready()
    config = json.dumps({**job(tmp_path), "hyperparams": {"witness": str(tmp_path), "x": "y" * (5 << 20)}})
    refused = ask(server, command="submit", config=config, base_dir=str(TRAINERS))
    assert (refused["ok"], refused["code"]) == ("0", "invalid-argument")
    assert "at most" in refused["error"]


def test_a_daemon_with_a_bus_that_nobody_knows_is_refused_and_shows_no_password(home: Path) -> None:
    daemon = DaemonProcess(home, settings='event_bus = "kafka://me:secret@host"\n')
    assert daemon.process.wait(DEADLINE_S) == 1
    said = daemon.log.read_text()
    assert "'kafka'" in said
    assert "redis, rediss, unix" in said
    assert "secret" not in said


def test_a_password_is_used_and_never_shown(home: Path, server: RedisServer) -> None:
    server.client.config_set("requirepass", "s3cret")
    daemon = DaemonProcess(
        home, settings=f'event_bus = "unix://:wrong-s3cret@{server.socket}"\n', is_bare=True
    )
    info = daemon.wait_ready()
    with trn.Client(home) as client:
        wait_until(lambda: bool(client.health().warnings))
        shown = [*client.health().warnings, str(info)]
    assert daemon.stop() == 0
    daemon = DaemonProcess(home, settings=f'event_bus = "unix://:s3cret@{server.socket}"\n', is_bare=True)
    daemon.wait_ready()
    with redis.Redis(unix_socket_path=str(server.socket), password="s3cret") as client:
        wait_until(lambda: bool(client.exists("trn:commands")))
    shown += [path.read_text(errors="replace") for path in (daemon.log, Home(home).daemon_log)]
    assert daemon.stop() == 0
    assert [text for text in shown if "s3cret" in text] == []
    assert any("invalid" in text for text in shown)


def test_the_redis_client_is_not_loaded_without_a_bus() -> None:
    code = "import sys, trn.daemon.app; sys.exit('redis' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=DEADLINE_S).returncode == 0
