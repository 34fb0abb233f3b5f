"""Claims about those who have no business here: they hurt neither workers nor callers, whatever they open."""

import asyncio
import contextlib
import errno
import resource
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from daemon_process import DEADLINE_S, DaemonProcess, end_everything, worker_record

import trn
from trn.core.runs import RunState
from trn.daemon.api.tcp_guard import TcpGuard, max_connections, read_peer

TRAINERS = Path(__file__).parent / "trainers"
MAX_OPEN_FILES = 1024  # as shells give it
SETTINGS = """
heartbeat_timeout_s = 30
sweep_s = 0.2
min_free_bytes = 1000000
[listen]
address = "127.0.0.1:0"
is_insecure = true
[inventory]
cpus = 4
devices = []
"""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    daemon = DaemonProcess(tmp_path / "home", settings=SETTINGS, max_open_files=MAX_OPEN_FILES, is_bare=True)
    daemon.wait_ready()
    yield daemon
    end_everything(daemon.home.root)


def job(tmp_path: Path, name: str, **options: Any) -> dict[str, Any]:
    return {
        "name": name,
        "run_id": name,
        "trainer": "witnessed:Witnessed",
        "mock_batches": list(range(1, 3)),
        "metric_every": 1,
        "resources": {"devices": ["cpu"]},
        "hyperparams": {"witness": str(tmp_path), **options},
    }


def wait_until(is_so: Callable[[], object], what: str, *, within_s: float = DEADLINE_S) -> None:
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.02)


@contextlib.contextmanager
def idle_connections(port: int, count: int) -> Iterator[None]:
    """As many as can be had; whoever is refused is content."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * count)), hard))
    found: list[socket.socket] = []
    try:
        for _ in range(count):
            one = socket.socket()
            one.setblocking(False)
            assert one.connect_ex(("127.0.0.1", port)) in (0, errno.EINPROGRESS)
            found.append(one)
        yield
    finally:
        for one in found:
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def num_tcp(pid: int, port: int) -> int:
    connections = psutil.Process(pid).net_connections("tcp")
    return sum(1 for one in connections if one.laddr.port == port and one.status != psutil.CONN_LISTEN)


def test_a_flood_of_idle_connections_hurts_no_worker_no_submit_and_no_caller_with_a_token(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    info = daemon.wait_ready()
    port = int(info.addresses[1].rpartition(":")[2])
    token = daemon.home.token.read_text().strip()
    limits = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    assert limits == (MAX_OPEN_FILES, MAX_OPEN_FILES)
    with trn.Client(daemon.home.root) as client:
        submission = client.submit(job(tmp_path, "long", step_ms=1_000_000), base_dir=TRAINERS)
        run_id = submission.run.run_id
        wait_until(lambda: client.get(run_id).state == RunState.RUNNING, "the run")
        before = worker_record(daemon, run_id)
        remote = {"address": f"127.0.0.1:{port}", "token": token, "is_insecure": True}
        most = max_connections(MAX_OPEN_FILES)
        with contextlib.ExitStack() as stack:
            early = stack.enter_context(trn.Client(**remote))  # type: ignore[arg-type]
            assert early.get(run_id).state == RunState.RUNNING
            stack.enter_context(idle_connections(port, 1500))
            # Long before gRPC itself would give up on them, after a minute.
            wait_until(lambda: num_tcp(daemon.pid, port) > 100, "the flood", within_s=30)
            wait_until(lambda: num_tcp(daemon.pid, port) <= most, "the limit of gRPC", within_s=30)
            with trn.Client(daemon.home.root) as local:
                during = local.submit(job(tmp_path, "during"), base_dir=TRAINERS).run.run_id
                assert local.wait(during).state == RunState.COMPLETED
            with trn.Client(**remote) as late:  # type: ignore[arg-type]
                assert late.get(run_id).state == RunState.RUNNING
            assert early.get(run_id).state == RunState.RUNNING
            # The strangers are gone, though none of them has let go.
            wait_until(lambda: num_tcp(daemon.pid, port) <= 2, "the end of our patience")
            assert early.get(run_id).state == RunState.RUNNING
        run = client.get(run_id)
        assert (run.state, run.attempt) == (RunState.RUNNING, 1)
        assert psutil.pid_exists(before.pid)
        client.cancel(run_id, "enough")


def test_the_daemon_raises_its_limit_of_open_files_and_its_workers_do_not_notice(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip("the system allows no more")
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        daemon = DaemonProcess(tmp_path / "home", settings=SETTINGS, is_bare=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        daemon.wait_ready()
        assert resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)[0] >= 4096
        with trn.Client(daemon.home.root) as client:
            run_id = client.submit(job(tmp_path, "one", step_ms=1_000_000), base_dir=TRAINERS).run.run_id
            wait_until(lambda: client.get(run_id).state == RunState.RUNNING, "the run")
            record = worker_record(daemon, run_id)
            assert resource.prlimit(record.pid, resource.RLIMIT_NOFILE)[0] == 1024
    finally:
        end_everything(daemon.home.root)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ipv4:127.0.0.1:45678", ("127.0.0.1", 45678)),
        ("ipv6:%5B::1%5D:5", ("::1", 5)),
        ("ipv6:[fe80::1%25eth0]:5", ("fe80::1", 5)),
        ("ipv6:%5B::ffff:10.0.0.1%5D:5", ("10.0.0.1", 5)),
        ("unix:", None),
        ("unix:/tmp/a:5", None),
    ],
)
def test_a_peer_is_read_as_grpc_writes_it(text: str, expected: tuple[str, int] | None) -> None:
    assert read_peer(text) == expected


def test_the_oldest_stranger_goes_first_and_whoever_showed_a_token_stays() -> None:
    now = 0.0
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        guard = TcpGuard(port, authenticate_s=10, max_strangers=2, clock=lambda: now)
        pairs = []

        def connect() -> tuple[socket.socket, socket.socket]:
            mine = socket.create_connection(("127.0.0.1", port))
            pairs.append((mine, server.accept()[0]))
            mine.setblocking(False)
            return pairs[-1]

        def is_shut(pair: tuple[socket.socket, socket.socket]) -> bool:
            try:
                return pair[0].recv(1) == b""
            except BlockingIOError:
                return False

        caller = connect()
        guard.admit(f"ipv4:127.0.0.1:{caller[0].getsockname()[1]}")
        asyncio.run(guard.look())
        strangers = []
        for _ in range(3):
            now += 1
            strangers.append(connect())
            asyncio.run(guard.look())
        assert [is_shut(pair) for pair in strangers] == [True, False, False]
        now += 9
        asyncio.run(guard.look())
        assert [is_shut(pair) for pair in strangers] == [True, True, False]
        now += 100
        asyncio.run(guard.look())
        assert [is_shut(pair) for pair in strangers] == [True, True, True]
        assert not is_shut(caller)
        assert guard.num_shut == 3
        for one in (one for pair in pairs for one in pair):
            one.close()
