"""A commit counts only in the file that its path names: nothing is acknowledged into one that is gone."""

import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trn.core.errors import RegistryGoneError
from trn.registry.base import NewRun
from trn.registry.connection import back_up, check_integrity
from trn.registry.metrics import MetricStore
from trn.registry.sqlite import RunRegistry


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "home" / "registry.db"


@pytest.fixture
def registry(path: Path) -> Iterator[RunRegistry]:
    path.parent.mkdir()
    registry = RunRegistry(path)
    yield registry
    registry.close()


def new(run_id: str) -> NewRun:
    return NewRun(run_id=run_id, digest=run_id, config={})


def delete(path: Path) -> None:
    path.unlink()


def delete_log(path: Path) -> None:
    path.with_name("registry.db-wal").unlink()


def put_copy_in_its_place(path: Path) -> None:
    path.with_name("copy.db").replace(path)


def copy_over_it(path: Path) -> None:
    shutil.copy(path.with_name("copy.db"), path)


def replace_folder(path: Path) -> None:
    path.parent.rename(path.parent.with_name("away"))
    path.parent.mkdir()


@pytest.mark.parametrize("strike", [delete, delete_log, put_copy_in_its_place, copy_over_it, replace_folder])
def test_no_submit_is_acknowledged_into_a_registry_that_was_deleted_or_replaced(
    registry: RunRegistry, path: Path, strike: Callable[[Path], None]
) -> None:
    registry.submit(new("one")).result()
    back_up(path, path.with_name("copy.db"))
    registry.submit(new("two")).result()
    assert registry.find_problem() == ""
    strike(path)
    for run_id in ("three", "four"):
        with pytest.raises(RegistryGoneError, match=r"the daemon had it open.*Stop the daemon"):
            registry.submit(new(run_id)).result()
    assert registry.find_problem()
    with pytest.raises(RegistryGoneError):
        registry.checkpoint_wal()  # it would mix two registries
    if strike is copy_over_it:
        assert path.read_bytes() == path.with_name("copy.db").read_bytes(), "nothing of ours is in it"


def test_a_registry_that_is_moved_back_is_used_again_and_holds_nothing_that_was_refused(
    registry: RunRegistry, path: Path
) -> None:
    path.rename(path.with_name("away.db"))
    with pytest.raises(RegistryGoneError, match="was deleted"):
        registry.submit(new("one")).result()
    path.with_name("away.db").rename(path)
    registry.submit(new("two")).result()
    assert [run.run_id for run in registry.page()] == ["two"]
    registry.checkpoint_wal()
    assert check_integrity(path) == []


def test_what_the_daemon_itself_and_readers_do_is_no_replacement(registry: RunRegistry, path: Path) -> None:
    for number in range(5):
        registry.submit(new(f"run-{number}")).result()
        registry.checkpoint_wal()
        assert check_integrity(path) == []
        back_up(path, path.with_name(f"copy-{number}.db"))
        path.chmod(0o600)
        path.touch()
        assert registry.find_problem() == ""
    assert len(registry.page()) == 5


def test_a_file_of_the_same_size_and_other_bytes_is_no_touch(registry: RunRegistry, path: Path) -> None:
    registry.checkpoint_wal()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    with path.open("r+b") as file:
        file.write(content)
    assert "written by another program" in registry.find_problem()
    content[-1] ^= 1
    with path.open("r+b") as file:
        file.write(content)
    assert registry.find_problem() == ""


def test_points_are_not_taken_into_a_store_that_was_deleted(tmp_path: Path) -> None:
    path = tmp_path / "metrics.db"
    store = MetricStore(path)
    store.add("r", offset=10, last_seq=1, points=[(1, 1, "loss", 1, 0.5, 0)]).result()
    store.checkpoint_wal()
    path.unlink()
    with pytest.raises(RegistryGoneError, match="was deleted"):
        store.add("r", offset=20, last_seq=2, points=[(2, 1, "loss", 2, 0.25, 0)]).result()
    store.close()


def test_a_checkpoint_that_fails_half_way_is_no_strangers_doing(
    registry: RunRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk it has written some pages and then fails: the file has changed, and it was us."""

    def fail_after_writing(connection: sqlite3.Connection) -> tuple[int, int, int]:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        raise sqlite3.OperationalError("database or disk is full")

    registry.submit(new("one")).result()
    monkeypatch.setattr("trn.registry.connection.checkpoint", fail_after_writing)
    with pytest.raises(sqlite3.OperationalError):
        registry.checkpoint_wal()
    registry.submit(new("two")).result()
    assert registry.find_problem() == ""
