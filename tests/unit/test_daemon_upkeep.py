"""One daemon for a home, what it refuses to start with, and what it does now and then."""

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from gen_worker.contract.installed_packages import source_stamp
from trn.client.daemon_start import RunningDaemon
from trn.core.errors import (
    AlreadyRunningError,
    NotFoundError,
    SettingsError,
    UnavailableError,
)
from trn.core.home import MAX_SOCKET_PATH, Home, socket_address
from trn.core.settings import Settings, read_settings
from trn.core.snapshot_manifest import FileEntry, Manifest
from trn.core.snapshots import SnapshotStore
from trn.core.version import CHANGED, SOURCES, VERSION
from trn.daemon.upkeep.maintenance import InstalledCode, Maintenance
from trn.daemon.upkeep.singleton import DaemonInfo, Singleton, read_daemon_info
from trn.daemon.upkeep.startup_checks import check_start
from trn.registry.base import NewRun
from trn.registry.reader import RegistryReader
from trn.registry.sqlite import RunRegistry

GOOD = {"grpcio": "1.85.1", "protobuf": "7.36.2"}


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    home.make()
    return home


def test_a_daemon_says_that_trn_was_upgraded_under_it(tmp_path: Path) -> None:
    package = tmp_path / "trn"
    package.mkdir()
    (package / "one.py").write_text("a = 1\n")
    now = [0.0]
    sources = InstalledCode([package], clock=lambda: now[0])
    now[0] += 10
    assert sources.warnings == []
    (package / "two.py").write_text("b = 1\n")
    assert sources.warnings == [], "it was looked at a moment ago"
    now[0] += 10
    assert sources.warnings == [CHANGED]
    (package / "two.py").unlink()
    now[0] += 10
    assert sources.warnings == [CHANGED], "what it has imported meanwhile may be of either"


def test_a_daemon_whose_files_are_being_replaced_says_so(tmp_path: Path) -> None:
    package = tmp_path / "trn"
    package.mkdir()
    now = [0.0]
    sources = InstalledCode([package], clock=lambda: now[0])
    package.rmdir()
    now[0] += 10
    assert sources.warnings == [CHANGED]


def test_a_command_warns_of_a_daemon_that_started_from_other_files() -> None:
    def daemon(
        *,
        version: str = VERSION,
        source_dir: str = str(SOURCES[0]),
        source_stamp: str = source_stamp(*SOURCES),
    ) -> RunningDaemon:
        return RunningDaemon(1, version, (), 0, source_dir=source_dir, source_stamp=source_stamp)

    assert daemon().version_warning == ""
    assert daemon(source_stamp="of before").version_warning == CHANGED
    assert daemon(source_stamp="of before", source_dir="/elsewhere").version_warning == "", "not our files"
    assert daemon(source_stamp="", source_dir="").version_warning == "", "it does not say"
    assert "this is trn" in daemon(version="0.0.1").version_warning


def test_temporary_files_of_a_killed_daemon_are_removed_by_the_next(tmp_path: Path) -> None:
    home = Home(tmp_path)
    for name in (".daemon.json.77", ".daemon.json.77-ab12.tmp", ".probe-77"):
        (tmp_path / name).write_bytes(b"half")
    (tmp_path / ".mine").write_bytes(b"of somebody")
    singleton = Singleton(home)
    singleton.acquire()
    assert {path.name for path in tmp_path.iterdir()} == {".mine", "daemon.lock"}
    singleton.release()


def test_a_second_daemon_is_told_who_the_first_one_is(home: Home) -> None:
    first = Singleton(home)
    first.acquire()
    first.announce(DaemonInfo(pid=4711, version="1", addresses=("unix:/somewhere",), started_ms=0))
    with pytest.raises(AlreadyRunningError, match=r"pid 4711, at unix:/somewhere"):
        Singleton(home).acquire()
    first.release()
    assert read_daemon_info(home) is None
    Singleton(home).acquire()


def test_a_daemon_that_cannot_write_its_address_says_so_in_one_line(home: Home) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trn.daemon", "--home", str(home.root), "serve"],
        env={**os.environ, "GEN_WORKER_FAILPOINTS": "daemon.announce=enospc"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"trn: {home.daemon_info} cannot be written: "), (
        done.stderr
    )
    assert "Traceback" not in done.stderr


def test_the_lock_of_a_daemon_that_was_killed_is_taken_over(home: Home) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from trn.core.home import Home; from trn.daemon.upkeep.singleton import Singleton\n"
        "Singleton(Home(Path(sys.argv[1]))).acquire(); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(home.root)], check=False).returncode == -9
    assert home.lock.exists()
    Singleton(home).acquire()


def test_of_many_that_start_at_once_exactly_one_gets_the_home(home: Home) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from trn.core.home import Home; from trn.daemon.upkeep.singleton import Singleton\n"
        "from trn.core.errors import AlreadyRunningError\n"
        "one = Singleton(Home(Path(sys.argv[1])))\n"
        "try: one.acquire(); print('mine', flush=True)\n"
        "except AlreadyRunningError: print('theirs', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(home.root)]
    many = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(6)
    ]
    said = [one.stdout.readline().strip() for one in many if one.stdout]
    for one in many:
        one.communicate()
    assert sorted(said) == ["mine"] + ["theirs"] * 5


def test_versions_are_compared_as_versions_and_not_as_text(home: Home) -> None:
    old = {"grpcio": "1.9.0", "protobuf": "7.36.2"}  # as text "1.9.0" is greater than "1.80.0"
    with pytest.raises(UnavailableError, match=r"grpcio is 1\.9\.0, but 1\.80\.0 or newer is required: pip"):
        check_start(home, Settings(), installed=old.__getitem__)


def test_everything_that_forbids_a_start_is_said_at_once(home: Home) -> None:
    def installed(name: str) -> str:
        if name == "grpcio":
            raise PackageNotFoundError(name)
        return "what?"

    with pytest.raises(UnavailableError) as refusal:
        check_start(
            home, Settings(), installed=installed, sqlite_version="3.7.0", free_bytes=lambda _path: 1 << 20
        )
    lines = str(refusal.value).splitlines()
    assert len(lines) == 5
    assert "has 1.05 MB free, but 67.1 MB are required" in lines[-1]


def test_a_home_that_cannot_be_written_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match=r"cannot be written: .*set TRN_HOME"):
        check_start(Home(tmp_path / "file" / "home"), Settings(), installed=GOOD.__getitem__)


def test_the_home_is_its_owners_alone(home: Home) -> None:
    home.root.chmod(0o755)
    check_start(home, Settings(), installed=GOOD.__getitem__)
    assert home.root.stat().st_mode & 0o077 == 0


def test_settings_that_are_wrong_are_refused_with_their_place(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    assert read_settings(path) == Settings()
    path.write_text("heartbeat_timeout_s = -1\n")
    with pytest.raises(SettingsError, match=r"settings.toml.*heartbeat_timeout_s"):
        read_settings(path)
    path.write_text('[inventory]\ndevices = [{id = "cuda:0", memory_mb = 80000}]\n')
    devices = read_settings(path).inventory.devices
    assert devices is not None
    assert devices[0].id == "cuda:0"


@pytest.mark.parametrize("is_temporary_folder_deep", [False, True])
def test_a_socket_in_a_deep_folder_gets_a_name_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_temporary_folder_deep: bool
) -> None:
    import socket

    if is_temporary_folder_deep:
        (tmp_path / ("t" * 90)).mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("t" * 90)))
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    address = socket_address(deep / "daemon.sock")
    assert len(address) <= MAX_SOCKET_PATH
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(address)
    assert (deep / "daemon.sock").exists()
    assert socket_address(tmp_path / "s") == str(tmp_path / "s")
    Path(address).parent.unlink()


class StuckFile:
    def __init__(self, busy: list[int]) -> None:
        self.busy = busy

    def checkpoint_wal(self) -> tuple[int, int, int]:
        return self.busy.pop(0), 100, 0

    def find_problem(self) -> str:
        return ""

    def rescue(self, target: Path) -> None:
        raise AssertionError


def test_a_log_that_stays_busy_warns_only_as_a_streak(home: Home, caplog: pytest.LogCaptureFixture) -> None:
    maintenance = Maintenance(
        home=home,
        settings=Settings(min_free_bytes=0),
        files={"registry.db": StuckFile([1, 1, 0, 1, 1, 1])},
        snapshots_in_use=set,
        is_busy=lambda: True,
        leave=lambda _reason: None,
    )
    for _ in range(5):
        maintenance.do_round()
    assert caplog.records == []
    maintenance.do_round()
    assert "3 times in a row (busy 1, log 100, checkpointed 0)" in caplog.text


def test_the_daemon_leaves_only_after_being_idle_without_a_break(home: Home) -> None:
    now, busy, said = [0.0], [True], list[str]()
    maintenance = Maintenance(
        home=home,
        settings=Settings(idle_exit_s=10.0),
        files={},
        snapshots_in_use=set,
        is_busy=lambda: busy[0],
        leave=said.append,
        clock=lambda: now[0],
    )
    for now[0], busy[0] in ((5.0, True), (14.0, False), (14.5, True), (24.0, False)):
        maintenance.check_idle()
    assert said == []
    now[0] = 24.5
    maintenance.check_idle()
    assert said == ["idle for 10 s"]


def test_code_that_no_run_names_is_removed_and_the_rest_is_kept(home: Home) -> None:
    store = SnapshotStore(home.snapshots)
    digests = []
    for text in (b"kept", b"nobody's"):
        with store.adding():
            file = FileEntry(
                path="code.py", sha256=store.put_bytes(text).sha256, mode=0o644, size_bytes=len(text)
            )
            digests.append(store.put_manifest(Manifest(files=(file,))))
    for path in home.snapshots.rglob("*"):
        os.utime(path, (0, 0))  # older than any snapshot that is being taken
    maintenance = Maintenance(
        home=home,
        settings=Settings(),
        files={},
        snapshots_in_use=lambda: {digests[0]},
        is_busy=lambda: False,
        leave=lambda _reason: None,
    )
    asyncio.run(maintenance.collect())
    assert store.manifest(digests[0]).files[0].path == "code.py"
    with pytest.raises(NotFoundError):
        store.manifest(digests[1])


def test_of_a_registry_that_was_deleted_all_that_was_acknowledged_is_kept_in_a_copy(home: Home) -> None:
    registry = RunRegistry(home.registry)
    registry.submit(NewRun(run_id="one", digest="1", config={})).result()
    maintenance = Maintenance(
        home=home,
        settings=Settings(),
        files={"registry.db": registry},
        snapshots_in_use=set,
        is_busy=lambda: True,
        leave=lambda _reason: None,
    )
    maintenance.check_files()
    assert maintenance.warnings == []
    home.registry.unlink()
    for _ in range(2):
        maintenance.check_files()
    (copy,) = home.backups.glob("rescued-*/registry.db")
    (warning,) = maintenance.warnings
    assert "was deleted while the daemon had it open" in warning
    assert str(copy) in warning
    with contextlib.closing(RegistryReader(copy)) as saved:
        assert saved.get("one").digest == "1"
    registry.close()


def test_a_daemon_whose_home_was_moved_away_leaves(home: Home) -> None:
    said: list[str] = []
    maintenance = Maintenance(
        home=home,
        settings=Settings(maintenance_s=0.01),
        files={},
        snapshots_in_use=set,
        is_busy=lambda: True,
        leave=said.append,
    )
    home.root.rename(home.root.with_name("moved"))
    home.make()
    asyncio.run(maintenance.run())
    assert len(said) == 1
    assert "was moved or deleted" in said[0]
