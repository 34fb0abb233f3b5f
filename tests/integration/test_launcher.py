"""Claims about the launcher itself: what it answers, what it survives, what its children are, when it leaves."""

import contextlib
import json
import os
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launched_run import LaunchedRun, is_running, living, runs, stop_launchers, wait_until

from gen_worker.contract.process_identity import ProcessIdentity
from gen_worker.launcher.attempt_records import read_exit, read_record
from gen_worker.launcher.messages import LauncherInfo, code_stamp
from trn.core.home import Home, socket_address
from trn.executors.base import Worker
from trn.executors.local.launcher_link import start_launcher
from trn.executors.local.worker_process import worker_of


class Client:
    """Speaks lines with a launcher, as any program could."""

    def __init__(self, home: Home, info: LauncherInfo) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(120)
        self._socket.connect(socket_address(home.launcher / info.socket))
        self._lines = self._socket.makefile("rb")

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def receive(self) -> dict[str, Any]:
        line = self._lines.readline()
        assert line, "the launcher hung up"
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, **request: Any) -> dict[str, Any]:
        """The reply to it; what is pushed meanwhile is passed over."""
        self.send(json.dumps(request).encode() + b"\n")
        while (reply := self.receive()).get("id") != request["id"]:
            assert reply["type"] == "ended"
        return reply

    def wait_ended(self, run_id: str) -> dict[str, Any]:
        while (message := self.receive()).get("run_id") != run_id:
            pass
        return message

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


@contextlib.contextmanager
def launcher_in(root: Path, **options: Any) -> Iterator[tuple[Home, LauncherInfo]]:
    home = Home(root)
    home.make()
    start_launcher(home.launcher, **{"idle_exit_s": 600.0, "is_bare": True, **options})
    (info,) = living(home)
    try:
        yield home, info
    finally:
        stop_launchers(home)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Home, LauncherInfo]]:
    with launcher_in(tmp_path_factory.mktemp("home")) as found:
        yield found


@pytest.fixture
def client(shared: tuple[Home, LauncherInfo]) -> Iterator[Client]:
    home, info = shared
    found = Client(home, info)
    yield found
    found.close()


def launch(client: Client, run: LaunchedRun, **changes: Any) -> dict[str, Any]:
    return client.ask(type="launch", id=1, plan=msgspec.to_builtins(run.plan(**changes)))


def test_it_says_who_it_is_and_only_its_owner_may_ask(
    shared: tuple[Home, LauncherInfo], client: Client
) -> None:
    home, info = shared
    assert stat.S_IMODE((home.launcher / info.socket).stat().st_mode) == 0o600
    assert info.stamp == code_stamp()
    welcome = client.ask(type="hello", id=5)
    assert (welcome["type"], welcome["pid"], welcome["is_retired"]) == ("welcome", info.pid, False)
    assert os.getsid(info.pid) == info.pid, "it shares a session, and a Ctrl-C would reach it"
    for number in (signal.SIGINT, signal.SIGHUP):
        os.kill(info.pid, number)
    assert client.ask(type="hello", id=6)["pid"] == info.pid


@settings(max_examples=60)
@given(data=st.lists(st.one_of(st.binary(max_size=200), st.text(max_size=50).map(str.encode)), max_size=5))
def test_garbage_is_answered_and_never_kills_it(shared: tuple[Home, LauncherInfo], data: list[bytes]) -> None:
    home, info = shared
    client = Client(home, info)
    try:
        client.send(b"\n".join(data) + b"\n")
        client.send(b'{"type": "hello", "id": 77}\n')
        while (reply := client.receive()).get("id") != 77:
            assert reply["type"] == "refused"
        assert reply["pid"] == info.pid
    finally:
        client.close()


@pytest.mark.parametrize(
    "request_",
    [
        {"type": "fly", "id": 3},
        {"type": "launch", "id": 3},
        {"type": "launch", "id": 3, "plan": {"run_id": "r"}},
        {"type": "close", "id": 3, "plan": None, "category": 1, "error": []},
    ],
)
def test_a_request_it_does_not_know_is_refused_by_its_id(client: Client, request_: dict[str, Any]) -> None:
    reply = client.ask(**request_)
    assert (reply["type"], reply["id"]) == ("refused", 3)
    assert reply["message"]


def test_a_line_without_end_and_a_client_that_never_reads_cost_only_their_connection(
    shared: tuple[Home, LauncherInfo], client: Client
) -> None:
    home, info = shared
    endless = Client(home, info)
    with contextlib.suppress(OSError):
        for _ in range(80):
            endless.send(b"x" * (1 << 16))
    deaf = Client(home, info)
    deaf._socket.settimeout(5)
    with contextlib.suppress(OSError):
        for _ in range(2000):  # the replies to these are more than it keeps for anyone
            deaf.send(b'{"type": "hello", "id": 1}\n' * 100)
    assert client.ask(type="hello", id=9)["pid"] == info.pid
    endless.close()
    deaf.close()


def test_the_exit_file_is_there_when_the_end_is_told(
    shared: tuple[Home, LauncherInfo], client: Client
) -> None:
    run = LaunchedRun(shared[0], "told")
    launched = launch(client, run)
    assert launched["type"] == "launched", launched
    ended = client.wait_ended("told")
    assert ended["pid"] == launched["pid"]
    found = read_exit(run.folder.attempts / "1.exit.json", "")
    assert found is not None, run.log()
    assert (found.exit_code, ended["exit"]["exit_code"]) == (0, 0), run.log()
    assert [event["event"] for event in run.events()][-1] == "completed"
    assert not (client.ask(type="list", id=2))["workers"]


def test_a_repeated_launch_is_the_same_process_also_after_its_end(
    shared: tuple[Home, LauncherInfo], client: Client
) -> None:
    run = LaunchedRun(shared[0], "again")
    plan = msgspec.to_builtins(run.plan())
    for id_ in (1, 2, 3):  # before the first is answered
        client.send(json.dumps({"type": "launch", "id": id_, "plan": plan}).encode() + b"\n")
    replies = [message for message in (client.receive() for _ in range(3)) if message["type"] == "launched"]
    client_2 = Client(*shared)
    wait_until((run.folder.attempts / "1.exit.json").exists, "its exit")
    replies.append(launch(client_2, run))
    client_2.close()
    assert len({reply["pid"] for reply in replies}) == 1
    assert len(run.events("started")) == 1


def test_an_attempt_that_was_given_up_never_starts(shared: tuple[Home, LauncherInfo], client: Client) -> None:
    run = LaunchedRun(shared[0], "given-up")
    (run.folder.attempts / "1.json").write_text('{"abandoned": true}')
    reply = launch(client, run)
    assert reply["type"] == "refused"
    assert "given up" in reply["message"]
    assert not run.folder.events.exists()


@pytest.mark.parametrize("change", ["log", "folder", "program"])
def test_what_cannot_start_is_refused_in_words_and_can_never_start_later(
    shared: tuple[Home, LauncherInfo], client: Client, change: str, tmp_path: Path
) -> None:
    run = LaunchedRun(shared[0], f"cannot-{change}")
    nowhere = str(tmp_path / "nowhere" / "x")
    changes: dict[str, Any] = {
        "log": {"log_path": nowhere},
        "folder": {"cwd": nowhere},
        "program": {"argv": (nowhere,), "is_warm": False},
    }[change]
    reply = launch(client, run, **changes)
    assert reply["type"] == "refused"
    assert nowhere in reply["message"]
    record = read_record(run.folder.attempts / "1.json", "")
    assert record is not None
    assert record.abandoned
    assert launch(client, run)["type"] == "refused"
    assert not run.folder.events.exists()
    assert not (run.folder.attempts / "1.exit.json").exists()


def test_a_program_that_cannot_be_run_is_an_ended_attempt_in_words(
    shared: tuple[Home, LauncherInfo], client: Client
) -> None:
    run = LaunchedRun(shared[0], "no-program")
    program = run.folder.root / "python"
    program.write_text("#!/nowhere/python\n")
    program.chmod(0o700)
    reply = launch(client, run, argv=(str(program),), is_warm=False)
    assert reply["type"] == "refused"
    wait_until((run.folder.attempts / "1.exit.json").exists, "its exit")
    found = read_exit(run.folder.attempts / "1.exit.json", "")
    assert found is not None
    assert found.exit_code == 127
    assert "No such file" in found.detail


def test_a_retired_launcher_starts_nobody_and_leaves_after_its_last_worker(tmp_path: Path) -> None:
    with launcher_in(tmp_path / "home") as (home, info):
        client = Client(home, info)
        run = LaunchedRun(home, "last", hyperparams={"at_step": 2, "do": "wait for the stop"})
        identity = _identity(launch(client, run))
        wait_until(lambda: run.events("log"), "its training")
        assert client.ask(type="retire", id=2) == {"type": "retired", "id": 2, "num_workers": 1}
        late = launch(client, LaunchedRun(home, "late"))
        assert (late["type"], late["is_retired"]) == ("refused", True)
        assert is_running(identity)
        assert runs(info)
        os.kill(identity.pid, signal.SIGTERM)
        assert client.wait_ended("last")["exit"]["exit_code"] == 75
        wait_until(lambda: not runs(info), "its leave")
        assert not list(home.launcher.glob("*.sock"))
        assert not list(home.launcher.glob("*.json"))
        client.close()


def test_a_stopped_launcher_harms_no_worker(tmp_path: Path) -> None:
    with launcher_in(tmp_path / "home") as (home, info):
        client = Client(home, info)
        run = LaunchedRun(home, "goes-on", hyperparams={"at_step": 2, "do": "wait for the stop"})
        identity = _identity(launch(client, run))
        client.close()
        wait_until(lambda: run.events("log"), "its training")
        os.kill(info.pid, signal.SIGTERM)
        os.kill(identity.pid, signal.SIGTERM)
        wait_until(lambda: not runs(info), "its leave")
        found = read_exit(run.folder.attempts / "1.exit.json", "")
        assert found is not None
        assert found.exit_code == 75
        assert run.events()[-1]["category"] == "cancelled"


def test_it_leaves_when_nobody_needs_it(tmp_path: Path) -> None:
    with launcher_in(tmp_path / "home", idle_exit_s=2.0) as (_, info):
        wait_until(lambda: not runs(info), "its leave")


def test_it_leaves_when_its_home_is_gone(tmp_path: Path) -> None:
    with launcher_in(tmp_path / "home") as (home, info):
        home.launcher.rename(tmp_path / "elsewhere")
        wait_until(lambda: not runs(info), "its leave")


def test_a_folder_that_is_deeper_than_a_socket_may_be_is_no_hindrance(tmp_path: Path) -> None:
    with launcher_in(tmp_path / ("deep" * 30)) as (home, info):
        assert len(str(home.launcher / info.socket)) > 108
        assert runs(info)


WITNESS = """
import json, os, random, sys
from pathlib import Path

import numpy as np

told = {
    "cmdline": Path("/proc/self/cmdline").read_text().split(chr(0)),
    "is_torch_there": "torch" in sys.modules and "torch._dynamo" in sys.modules,
    "links": [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if Path(f"/proc/self/fd/{fd}").exists()],
    "random": [random.random(), float(np.random.random())],
    "session": os.getsid(0),
    "pid": os.getpid(),
    "path": sys.path,
    "cwd": os.getcwd(),
    "safe": os.environ.get("PYTHONSAFEPATH"),
    "main": sys.modules["__main__"].__spec__.name,
    "argv": sys.argv,
    "num_threads": sys.modules["torch"].get_num_threads() if "torch" in sys.modules else None,
}
Path(os.environ["WITNESS"]).write_text(json.dumps(told))
"""


def test_a_warm_worker_is_a_fork_with_torch_there_and_nothing_of_the_launchers(tmp_path: Path) -> None:
    code, here = tmp_path / "code", tmp_path / "here"
    for folder in (code, here):
        folder.mkdir()
    (code / "witness.py").write_text(WITNESS + "from counting import Counting\n")
    (here / "witness.py").write_text("raise RuntimeError('this is not the code that was submitted')\n")
    (code / "counting.py").write_text((Path(__file__).parent / "trainers" / "counting.py").read_text())
    with launcher_in(tmp_path / "home", is_bare=False) as (home, info):
        client = Client(home, info)
        told = []
        for name in ("one", "two"):
            run = LaunchedRun(home, name, trainer="witness:Counting")
            env = {"WITNESS": str(tmp_path / f"{name}.json"), "OMP_NUM_THREADS": "1"}
            launched = launch(client, run, code=code, cwd=str(here), env=env)
            assert launched["type"] == "launched", launched
            assert client.wait_ended(name)["exit"]["exit_code"] == 0, run.log()
            told.append(json.loads((tmp_path / f"{name}.json").read_text()))
            assert told[-1]["pid"] == launched["pid"]
        tasks = [path.read_text().strip() for path in Path(f"/proc/{info.pid}/task").glob("*/comm")]
        sockets = {
            str(path.readlink()) for path in Path(f"/proc/{info.pid}/fd").iterdir() if path.name not in "012"
        }
        client.close()
    first = told[0]
    assert "gen_worker.launcher" in first["cmdline"], "it was exec'ed"
    assert first["is_torch_there"]
    assert first["session"] == first["pid"]
    assert not sockets & set(first["links"])
    assert first["random"][0] != told[1]["random"][0]
    assert first["random"][1] != told[1]["random"][1]
    assert first["path"][0] == str(code)
    assert str(here) not in first["path"]
    assert first["cwd"] == str(here)
    assert first["main"] == "gen_worker.entrypoint"
    assert first["argv"][0].endswith("entrypoint.py")
    assert first["num_threads"] == 1
    # jemalloc (in pyarrow) has a thread of its own and knows of forks; OpenBLAS ended its own before the last fork;
    # nothing else may run beside the one that forks.
    assert [name for name in tasks if name != "jemalloc_bg_thd"] == tasks[:1]


def test_it_has_nothing_of_the_worker_that_may_have_started_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its workers are taken for that one's, and end with it."""
    workers = {
        *("GEN_WORKER_PROCESS", "TRAINER_ATTEMPT", "TRAINER_BASE_DIR", "WORKER_MODE", "RANK", "LOCAL_RANK"),
        *("WORLD_SIZE", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "GEN_WORKER_OUTCOME_DIR"),
        "GEN_WORKER_PARENT",
    }
    for name in workers:
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("OF_THE_MACHINE", "kept")
    with launcher_in(tmp_path / "home") as (_, info):
        seen = Path(f"/proc/{info.pid}/environ").read_bytes().decode().split("\0")
    assert "OF_THE_MACHINE=kept" in seen
    assert not workers & {line.partition("=")[0] for line in seen}


def _identity(launched: dict[str, Any]) -> Worker:
    assert launched["type"] == "launched", launched
    identity = ProcessIdentity(
        boot_id=launched["boot_id"], pid=launched["pid"], start_ticks=launched["start_ticks"]
    )
    return worker_of(identity)
