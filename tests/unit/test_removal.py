"""A run is removed whole or not at all, whoever is killed meanwhile; what somebody needs stays."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from trn.core.causes import Cause
from trn.core.errors import ConflictError
from trn.core.home import Home
from trn.core.runs import RunState
from trn.daemon.upkeep.removal import Freed, PruneRule, Removal
from trn.executors.base import Worker
from trn.registry.base import Ending, NewRun
from trn.registry.metrics import MetricStore
from trn.registry.sqlite import RunRegistry

NEVER, ALWAYS = 0, 1 << 60


class World:
    """A home with a registry and metric points, and a removal over them."""

    def __init__(self, root: Path) -> None:
        self.home = Home(root)
        self.home.make()
        self.clock_ms = 1000
        self._open()

    def _open(self) -> None:
        self.registry = RunRegistry(self.home.registry, clock_ms=lambda: self.clock_ms)
        self.metrics = MetricStore(self.home.metrics)
        self.removal = Removal(
            registry=self.registry,
            metrics=self.metrics,
            home=self.home,
            cache_dir=self.home.root / "cache",
            consumers=["logs"],
        )

    def close(self) -> None:
        self.registry.close()
        self.metrics.close()

    def restart(self) -> None:
        """Another daemon: what the last one left is completed."""
        self.close()
        self._open()
        asyncio.run(self.removal.complete())

    def add(
        self,
        run_id: str,
        *,
        state: RunState | None = RunState.COMPLETED,
        loss: float | None = None,
        parent: str = "",
        **config: Any,
    ) -> None:
        new = NewRun(
            run_id=run_id,
            digest=run_id,
            config={"trainer": "a:B", **config},
            parent_run_id=parent,
        )
        self.registry.submit(new).result()
        folder = self.home.run(run_id).root
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "worker.log").write_text("x" * 100)
        if loss is not None:
            points = [(1, 1, "val/loss", 1, loss, 1)]
            self.metrics.add(run_id, offset=10, last_seq=1, points=points).result()
        if state is None:
            return
        self.registry.claim(run_id, []).result()
        self.registry.end(run_id, 1, Ending(state=state, cause=Cause(id="completed"))).result()

    def add_checkpoint(self, run_id: str, step: int) -> Path:
        folder = self.home.run(run_id).checkpoints
        data, meta = folder / f"step-{step:08d}.pt", folder / f"step-{step:08d}.meta.json"
        data.write_bytes(b"y" * 50)
        meta.write_bytes(
            msgspec.json.encode(
                {
                    "schema_version": "trainer_checkpoint.v1",
                    "run_id": run_id,
                    "attempt": 1,
                    "step": step,
                    "epoch": 0,
                    "final": False,
                    "verified": True,
                    "files": [{"name": data.name, "size_bytes": 50, "hash": "sha256:0"}],
                }
            )
        )
        return meta

    def ids(self) -> list[str]:
        return sorted(run.run_id for run in self.registry.page())

    def folders(self) -> list[str]:
        return sorted(path.name for path in (self.home.root / "runs").iterdir())

    def remove(self, *run_ids: str, **options: Any) -> list[Freed]:
        return asyncio.run(self.removal.remove(run_ids, **options))

    def prune(self, before_ms: int = ALWAYS, *, is_dry_run: bool = False, **rule: Any) -> list[str]:
        done = asyncio.run(
            self.removal.prune(PruneRule(ended_before_ms=before_ms, **rule), is_dry_run=is_dry_run)
        )
        return sorted(item.name for item in done.freed)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "home")
    yield made
    made.close()


def test_a_removed_run_leaves_no_record_no_folder_and_no_points(world: World) -> None:
    world.add("a", loss=1.0)
    world.add("b", loss=2.0)
    assert world.remove("a", is_dry_run=True) == [Freed("run", "a", 100)]
    assert world.ids() == world.folders() == ["a", "b"]
    assert world.remove("a") == [Freed("run", "a", 100)]
    assert world.ids() == world.folders() == world.metrics.run_ids() == ["b"]
    assert list(world.home.trash.iterdir()) == []
    assert world.registry.was_removed("a")


def test_the_count_of_changes_never_goes_back(world: World) -> None:
    """Watchers and the event bus ask for what came after a change: a number that is used twice would be missed."""
    world.add("a")
    world.add("b")
    before = world.registry.last_change()
    world.remove("b")
    world.restart()
    assert world.registry.last_change() > before
    world.add("c")
    assert [run.run_id for run in world.registry.changed(before)] == ["c"]


def test_what_is_needed_stays_and_then_nothing_is_removed(world: World) -> None:
    world.add("ended")
    world.add("waits", state=None)
    world.add("parent")
    world.add("child", parent="parent")
    weights = world.home.run("teacher").root / "final.pt"
    world.add("teacher")
    world.add("student", state=None, weights=str(weights))
    with pytest.raises(ConflictError) as refused:
        world.remove("ended", "waits", "parent", "teacher")
    for reason in (
        "waits is PENDING",
        "run child was resumed from it",
        "run student has not ended and uses a file",
    ):
        assert reason in str(refused.value)
    assert len(world.ids()) == len(world.folders()) == 6
    world.remove("parent", "child")
    assert "parent" not in world.ids()


def test_a_run_whose_events_the_logs_have_not_got_stays(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trn.daemon.upkeep.removal.DELIVERY_TIMEOUT_S", 0.0)
    connection = world.registry.writer
    connection.write(
        lambda db: db.execute("INSERT INTO outbox_cursors (consumer, change) VALUES ('logs', 0)")
    )
    world.add("a")
    with pytest.raises(ConflictError, match="have not reached the logs yet"):
        world.remove("a")
    connection.write(lambda db: db.execute("UPDATE outbox_cursors SET change = 1000"))
    world.remove("a")
    assert world.ids() == []


@pytest.mark.parametrize("step", ["_forget", "rmtree"])
def test_a_daemon_that_dies_while_it_removes_is_completed_by_the_next(
    world: World, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    class Killed(BaseException):
        pass

    def die(*_args: Any, **_options: Any) -> None:
        raise Killed

    world.add("a", loss=1.0)
    world.add("b")
    with monkeypatch.context() as patch:
        patch.setattr(
            *(("trn.daemon.upkeep.removal.shutil.rmtree", die) if step == "rmtree" else (Removal, step, die))
        )
        with pytest.raises(Killed):
            world.remove("a")
    assert world.folders() == ["b"]  # the rename has decided
    world.restart()
    assert world.ids() == world.folders() == ["b"]
    assert world.metrics.run_ids() == []
    assert list(world.home.trash.iterdir()) == []


def test_a_refusal_of_the_registry_puts_the_folder_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child may be submitted between the look and the removal."""
    world.add("a")

    async def sees_nothing(*_args: Any) -> dict[str, str]:
        world.add("child", parent="a", state=None)
        return {}

    monkeypatch.setattr(Removal, "_find_reasons", sees_nothing)
    with pytest.raises(ConflictError, match="run child began from a"):
        world.remove("a")
    assert world.folders() == world.ids() == ["a", "child"]


def test_a_folder_that_another_submission_left_is_moved_aside_and_not_deleted(world: World) -> None:
    world.add("a")
    record = world.home.run("a").attempts / "1.json"
    record.parent.mkdir()
    record.write_text('{"nonce": "of another"}')
    world.remove("a")
    assert world.folders() == world.ids() == []
    (aside,) = world.home.foreign.iterdir()
    assert (aside / "worker.log").exists()


def test_a_run_stays_while_a_worker_that_nobody_knows_works_in_its_folder(world: World) -> None:
    world.add("a")
    world.removal.worker_in = {"a": Worker(ref="w", pid=4711)}.get
    with pytest.raises(ConflictError, match="process 4711, which is not in the registry"):
        world.remove("a")
    assert world.folders() == world.ids() == ["a"]


def test_points_that_a_power_cut_brought_back_are_removed_at_the_next_start(world: World) -> None:
    world.add("a")
    world.metrics.add("gone", offset=10, last_seq=1, points=[(1, 1, "loss", 1, 1.0, 1)]).result()
    world.restart()
    assert world.metrics.run_ids() == []


def test_prune_removes_old_runs_but_keeps_the_best_and_the_parents_of_those(world: World) -> None:
    world.add("worst", loss=3.0)
    world.add("parent", loss=2.5)
    world.add("best", loss=1.0, parent="parent")
    world.add("failed", state=RunState.FAILED)
    world.clock_ms = 5000
    world.add("young", loss=9.0)
    assert world.prune(4000, keep_best=1, is_dry_run=True) == ["failed", "worst"]
    assert len(world.ids()) == 5
    assert world.prune(4000, keep_best=1) == ["failed", "worst"]
    assert world.ids() == world.folders() == ["best", "parent", "young"]
    assert world.prune(4000) == ["best", "parent"]
    assert world.prune(NEVER) == []


def test_prune_leaves_of_a_kept_run_the_newest_checkpoint_and_those_that_others_began_from(
    world: World,
) -> None:
    world.add("kept", loss=1.0)
    metas = [world.add_checkpoint("kept", step) for step in (10, 20, 30)]
    world.add("child", parent="kept", resume_checkpoint_path=str(metas[0]), loss=0.5)
    assert world.prune(keep_best=2) == ["kept step-00000020"]
    assert [path.exists() for path in metas] == [True, False, True]
    assert not metas[1].with_name("step-00000020.pt").exists()


def test_prune_clears_caches_only_while_no_run_lives(world: World) -> None:
    decoded = world.home.root / "cache" / "decoded" / "group"
    decoded.mkdir(parents=True)
    (decoded / "0.arrow").write_bytes(b"z" * 10)
    for path in (decoded / "0.arrow", decoded):
        os.utime(path, (1, 1))
    world.add("lives", state=None)
    assert world.prune(10_000) == []
    world.registry.want_cancel("lives", "").result()
    assert str(decoded) in world.prune(10_000)
    assert not decoded.exists()
