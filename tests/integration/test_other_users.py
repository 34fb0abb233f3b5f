"""Claims about a second user of the machine, with a Python of its own: it reaches nothing of ours. Needs root to be one."""

import json
import os
import pwd
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon_process import DEADLINE_S, DaemonProcess, end_everything

import trn
from trn.client.gateway_start import ensure_gateway
from trn.core.errors import UnavailableError
from trn.core.home import Home
from trn.core.runs import RunState

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

TRAINERS = Path(__file__).parent / "trainers"
OTHER = "nobody"
SETTINGS = """
min_free_bytes = 1000000
sweep_s = 0.2
[inventory]
cpus = 4
devices = []
"""
# What it could do, each by the name of what it would have got; prints what it did get.
ATTACK = """
import json, os, socket, sys
root, pids = sys.argv[1], json.loads(sys.argv[2])
got = []

def attempt(name, do):
    try:
        do()
    except OSError:
        return
    got.append(name)

def connect(path, kind=socket.SOCK_STREAM):
    with socket.socket(socket.AF_UNIX, kind) as one:
        one.connect(path)

def ring(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
        one.sendto(b"one", path)

places = [root, *(f"/proc/{pid}/cwd" for pid in pids), *(f"/proc/{pid}/root{root}" for pid in pids)]
for place in places:
    attempt(f"list {place}", lambda: os.listdir(place))
    for name in ("registry.db", "token", "settings.toml", "daemon.json", "daemon.log", "runs/one/job.json", "gateway.json", "gateway.log"):
        attempt(f"read {place}/{name}", lambda: open(f"{place}/{name}").close())
    attempt(f"write {place}", lambda: open(f"{place}/planted", "w").close())
    attempt(f"call {place}", lambda: connect(f"{place}/daemon.sock"))
    attempt(f"ring {place}", lambda: ring(f"{place}/doorbell.sock"))
    for launcher in json.loads(sys.argv[3]):
        attempt(f"launch {place}", lambda: connect(f"{place}/launcher/{launcher}"))
        attempt(f"launch at {place}", lambda: connect(f"{place}/{launcher}"))
for pid in pids:
    attempt(f"environ of {pid}", lambda: open(f"/proc/{pid}/environ").read())
    attempt(f"memory of {pid}", lambda: open(f"/proc/{pid}/mem", "rb").close())
    attempt(f"descriptors of {pid}", lambda: os.listdir(f"/proc/{pid}/fd"))
    attempt(f"signal to {pid}", lambda: os.kill(pid, 0))
for line in open("/proc/net/unix").read().splitlines()[1:]:
    name = line.split()[-1]
    if name.startswith("@") and "trn" in name:
        attempt(f"abstract socket {name}", lambda: connect("\\0" + name[1:]))
import urllib.error, urllib.request
for path in ("/api/v1/runs", "/api/v1/runs/one", "/api/v1/login-tokens", "/api/v1/stream", "/api/v1/runs/one/log"):
    attempt(f"ask {path}", lambda: urllib.request.urlopen(sys.argv[4] + path, timeout=60))
print(json.dumps(got))
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A place that everyone may enter, as /home is: pytest's own is closed to others."""
    with tempfile.TemporaryDirectory(prefix="trn-users-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def as_other(*command: str) -> str:
    user = pwd.getpwnam(OTHER)
    done = subprocess.run(
        command,
        user=user.pw_uid,
        group=user.pw_gid,
        extra_groups=[],
        cwd="/",
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def find_python() -> str:
    """One that the other user may run."""
    for python in (sys.executable, "/usr/bin/python3"):
        try:
            as_other(python, "-c", "")
        except (OSError, AssertionError):
            continue
        return python
    pytest.skip("there is no Python that another user may run")


def test_another_user_reaches_neither_socket_nor_doorbell_nor_launcher_nor_worker(folder: Path) -> None:
    python = find_python()
    daemon = DaemonProcess(folder / "home", settings=SETTINGS, is_bare=True)
    job: dict[str, Any] = {
        "run_id": "one",
        "trainer": "witnessed:Witnessed",
        "mock_batches": [1, 2],
        "resources": {"devices": ["cpu"]},
        "hyperparams": {"witness": str(folder), "step_ms": 600_000},
        "env": {"PASSWORD": "secret"},
    }
    try:
        daemon.wait_ready()
        with trn.Client(daemon.home.root) as client:
            client.submit(job, base_dir=TRAINERS)
            deadline = time.monotonic() + DEADLINE_S
            while client.get("one").state != RunState.RUNNING:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            launchers = [json.loads(path.read_text()) for path in daemon.home.launcher.glob("*.json")]
            record = json.loads((daemon.home.run("one").attempts / "1.json").read_text())
            pids = [daemon.pid, record["pid"], *(info["pid"] for info in launchers)]
            sockets = [info["socket"] for info in launchers]
            assert sockets
            gateway, _ = ensure_gateway(daemon.home)
            pids.append(gateway.pid)
            said = as_other(
                python,
                "-c",
                ATTACK,
                str(daemon.home.root),
                json.dumps(pids),
                json.dumps(sockets),
                gateway.url,
            )
            assert json.loads(said) == []
            assert client.get("one").state == RunState.RUNNING
    finally:
        end_everything(daemon.home.root)


@pytest.mark.parametrize(
    "what", ["", "runs", "launcher", "models", "snapshots", "registry.db", "settings.toml"]
)
def test_a_home_that_another_user_could_steer_is_refused_by_root_too(folder: Path, what: str) -> None:
    home = Home(folder / "home")
    home.make()
    home.registry.touch()
    home.settings.touch()
    for code in (home.models, home.snapshots):  # workers run what is there
        code.mkdir()
    os.chown(home.root / what, pwd.getpwnam(OTHER).pw_uid, -1)
    with pytest.raises(UnavailableError, match=f"belongs to user {OTHER}.*chown"):
        home.make()
    done = subprocess.run(
        [sys.executable, "-m", "trn.daemon", "--home", str(home.root), "serve"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert f"belongs to user {OTHER}" in done.stderr
    assert "Traceback" not in done.stderr
