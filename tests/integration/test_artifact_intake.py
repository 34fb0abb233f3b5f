"""Artifacts: each file that an event names is recorded once, whatever fails; a bad file is a warning and nothing more."""

import asyncio
import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ingest_stores import Stores, append, line

from artifact_samples import make_checkpoint, make_mp4
from trn.core.artifacts.files import open_artifact
from trn.core.artifacts.records import ArtifactRecord, ArtifactState
from trn.core.causes import Cause
from trn.core.errors import NotFoundError, UnavailableError
from trn.core.home import Home
from trn.core.runs import RunState
from trn.daemon.ingest.artifact_intake import record_gone
from trn.daemon.ingest.ingest import Ingest
from trn.daemon.upkeep.removal import PruneRule, Removal
from trn.registry.base import Ending
from trn.registry.reader import RegistryReader
from trn.registry.writer import committed


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    stores = Stores(tmp_path)
    yield stores
    stores.close()


def run_folder(stores: Stores) -> Path:
    folder = stores.home.run("r")
    folder.samples.mkdir(parents=True, exist_ok=True)
    folder.checkpoints.mkdir(exist_ok=True)
    return folder.root


def ingest_all(stores: Stores, then: Callable[[Ingest], Awaitable[None]] | None = None) -> None:
    """Take in what is in the file, to the end of the attempt."""

    async def main() -> None:
        async with stores.ingesting() as ingest:
            ingest.follow("r", 1)
            await ingest.unfollow("r")
            if then is not None:
                await then(ingest)

    asyncio.run(main())


def recorded(stores: Stores, **wanted: Any) -> list[ArtifactRecord]:
    """In the order of the events."""
    return stores.registry.artifacts("r", limit=1000, **wanted)[::-1]


def test_files_of_every_kind_become_artifacts_with_size_hash_and_poster(stores: Stores) -> None:
    stores.start_run("r")
    root = run_folder(stores)
    checkpoint, checkpoint_hash = make_checkpoint(root / "checkpoints", step=10, run_id="r")
    (root / "samples" / "a.png").write_bytes(b"picture")
    (root / "samples" / "a.mp4").write_bytes(make_mp4())
    (root / "samples" / "poster.png").write_bytes(b"poster")
    (root / "notes.txt").write_bytes(b"notes")
    poster = str(root / "samples" / "poster.png")
    lines = [
        line(1, "checkpoint", path=str(checkpoint), step=10, size_bytes=999),
        line(2, "sample", path=str(root / "samples" / "a.png"), step=10, size_bytes=7),
        line(3, "video", path=str(root / "samples" / "a.mp4"), step=11, poster=poster),
        line(4, "artifact", path=str(root / "notes.txt"), step=12),
        line(5, "artifact", path=str(root / "samples" / "a.png"), step=12, kind="sample"),
        line(6, "log", path="/etc/passwd", message="no file"),
        line(7, "artifact", path=17, step=12),
    ]
    append(stores.path("r"), b"".join(lines))
    ingest_all(stores)
    kinds = [(item.kind, item.name, item.media_type, item.step, item.state) for item in recorded(stores)]
    present, removed = ArtifactState.PRESENT, ArtifactState.REMOVED
    assert kinds[:2] == [
        ("checkpoint", "step-00000010.pt", "application/octet-stream", 10, present),
        ("sample", "a.png", "image/png", 10, removed),  # the later event is of the same file
    ]
    assert sorted(kinds[2:]) == sorted(
        [
            ("file", "poster.png", "image/png", 11, present),
            ("video", "a.mp4", "video/mp4", 11, present),
            ("file", "notes.txt", "text/plain", 12, present),
            ("sample", "a.png", "image/png", 12, present),
        ]
    )
    found = {(item.kind, item.step): item for item in recorded(stores)}
    assert found["checkpoint", 10].sha256 == checkpoint_hash
    assert found["video", 11].sha256 == hashlib.sha256(make_mp4()).hexdigest()
    assert found["video", 11].poster_id == found["file", 11].artifact_id
    assert found["sample", 12].created_ms == 1005
    run = stores.registry.get("r")
    assert run.newest_video == found["video", 11].artifact_id
    assert run.newest_sample == found["sample", 12].artifact_id
    assert run.num_refused_artifacts == 0


def test_bad_files_are_refused_with_a_warning_and_the_rest_of_the_run_goes_on(stores: Stores) -> None:
    stores.start_run("r")
    root = run_folder(stores)
    (stores.home.root / "token").write_text("secret")
    (root / "samples" / "empty.png").touch()
    (root / "samples" / "half.mp4").write_bytes(make_mp4()[:20])
    (root / "samples" / "link.png").symlink_to(stores.home.root / "token")
    (root / "linked").symlink_to(stores.home.root)
    os.mkfifo(root / "samples" / "fifo")
    (root / "samples" / "good.png").write_bytes(b"good")
    change = stores.registry.get("r").change
    paths = {
        "samples/empty.png": "artifact-empty",
        "samples/half.mp4": "artifact-half-written",
        "samples/link.png": "artifact-link",
        "linked/token": "artifact-link",
        "samples/fifo": "artifact-not-file",
        "../../token": "artifact-outside",
        "/dev/zero": "artifact-outside",
        str(stores.home.root / "token"): "artifact-outside",
        "samples/\x1b[2J<script>.png": "artifact-missing",
        "x" * 100_000: "artifact-outside",
        "samples/good.png": "",
    }
    lines = [line(seq, "sample", path=path, step=seq) for seq, path in enumerate(paths, 1)]
    lines.append(line(len(lines) + 1, "metric", name="loss", value=0.5, step=77))
    append(stores.path("r"), b"".join(lines))
    ingest_all(stores)
    assert [item.cause.id for item in recorded(stores)] == list(paths.values())
    assert [item.reason == "" for item in recorded(stores)] == [not cause for cause in paths.values()]
    run = stores.registry.get("r")
    assert (run.step, run.metrics["loss"], run.num_refused_artifacts) == (77, 0.5, 10)
    assert stores.registry.artifact(run.newest_sample).name == "good.png"
    assert run.change > change  # watchers see it
    assert {item.name for item in recorded(stores, state="present")} == {"good.png"}


def test_events_that_are_read_again_add_nothing(stores: Stores) -> None:
    stores.start_run("r")
    root = run_folder(stores)
    for seq in range(1, 21):
        (root / "samples" / f"{seq}.txt").write_bytes(b"x")
        append(stores.path("r"), line(seq, "sample", path=str(root / "samples" / f"{seq}.txt"), step=seq))
    ingest_all(stores)
    before = recorded(stores)
    stores.registry.rewind("r", 0).result()  # as after a cut file: everything is read again
    ingest_all(stores)
    ingest_all(stores)
    assert recorded(stores) == before
    assert len(before) == 20


def test_a_registry_that_cannot_be_written_delays_artifacts_and_loses_none(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores.start_run("r")
    root = run_folder(stores)
    (root / "samples" / "a.txt").write_bytes(b"x")
    append(stores.path("r"), line(1, "sample", path=str(root / "samples" / "a.txt"), step=1))
    settle, calls = stores.registry.settle_artifacts, []

    def fail_first(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise UnavailableError("the disk is full")
        return settle(*args, **options)

    monkeypatch.setattr(stores.registry, "settle_artifacts", fail_first)
    ingest_all(stores)
    assert [item.state for item in recorded(stores)] == [ArtifactState.PRESENT]


WORKER = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from ingest_stores import Stores
from gen_worker.contract.failpoints import arm_from_env
stores = Stores(Path(sys.argv[2]))
arm_from_env()

async def main():
    async with stores.ingesting() as ingest:
        ingest.follow("r", 1)
        await ingest.unfollow("r")

asyncio.run(main())
stores.close()
"""


@pytest.mark.parametrize(
    "place",
    [
        "registry.before_commit",  # of the event
        "registry.before_commit=kill@2",  # of what was found
        "registry.committed",
        "registry.committed=kill@2",
        "ingest.read",
        "ingest.committed",
        "artifacts.checked",
        "artifacts.recorded",
    ],
)
def test_kill_9_between_event_file_and_registry_loses_and_doubles_nothing(
    stores: Stores, tmp_path: Path, place: str
) -> None:
    stores.start_run("r")
    root = run_folder(stores)
    lines = []
    for seq in range(1, 6):
        (root / "samples" / f"{seq}.txt").write_bytes(str(seq).encode())
        lines.append(line(seq, "sample", path=str(root / "samples" / f"{seq}.txt"), step=seq))
    append(stores.path("r"), b"".join(lines))
    stores.close()
    failpoint = place if "=" in place else f"{place}=kill"
    command = [sys.executable, "-c", WORKER, str(Path(__file__).parent), str(tmp_path)]
    killed = subprocess.run(command, env={**os.environ, "GEN_WORKER_FAILPOINTS": failpoint}, check=False)
    assert killed.returncode == -signal.SIGKILL
    stores.open()
    ingest_all(stores)
    assert [(item.seq, item.state, item.sha256) for item in recorded(stores)] == [
        (seq, ArtifactState.PRESENT, hashlib.sha256(str(seq).encode()).hexdigest()) for seq in range(1, 6)
    ]


def test_files_that_a_killed_daemon_left_unchecked_are_recorded_also_of_runs_that_ended(
    stores: Stores,
) -> None:
    stores.start_run("r")
    root = run_folder(stores)
    (root / "samples" / "a.txt").write_bytes(b"x")
    append(stores.path("r"), line(1, "sample", path=str(root / "samples" / "a.txt"), step=1))
    from trn.daemon.ingest.event_file import parse

    content = stores.path("r").read_bytes()
    (event,) = parse(content, 0, 0).events
    stores.registry.follow(
        "r",
        1,
        offset=len(content),
        last_seq=1,
        step=1,
        heartbeat_ms=1,
        metrics={},
        named_files=event.named_files(),
    ).result()
    stores.end_attempt("r", 1)
    assert [item.state for item in recorded(stores)] == [ArtifactState.CHECKING]

    async def main() -> None:
        async with stores.ingesting():  # which follows no run
            while recorded(stores, state="checking"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    asyncio.run(main())
    assert [item.state for item in recorded(stores)] == [ArtifactState.PRESENT]


def test_what_retention_and_a_later_attempt_take_away_is_recorded_as_removed(stores: Stores) -> None:
    stores.start_run("r")
    root = run_folder(stores)
    first, _ = make_checkpoint(root / "checkpoints", step=1, run_id="r")
    make_checkpoint(root / "checkpoints", step=2, run_id="r")
    for seq in (1, 2):
        path = str(root / "checkpoints" / f"step-{seq:08d}.pt")
        append(stores.path("r"), line(seq, "checkpoint", path=path, step=seq))
    gone = str(root / "checkpoints" / "step-00000000.pt")  # removed before anyone looked
    append(stores.path("r"), line(3, "checkpoint", path=gone, step=0))
    ingest_all(stores)
    states = [item.state for item in recorded(stores)]
    assert states == [ArtifactState.PRESENT, ArtifactState.PRESENT, ArtifactState.REMOVED]
    assert stores.registry.get("r").num_refused_artifacts == 0
    # The next attempt saves step 2 again, and its retention removes step 1.
    stores.end_attempt("r", 1)
    stores.start_attempt("r")
    first.unlink()
    again, sha256 = make_checkpoint(root / "checkpoints", step=2, run_id="r", content=b"other weights")
    append(stores.path("r"), line(4, "checkpoint", attempt=2, path=str(again), step=2))
    ingest_all(stores)
    present = recorded(stores, state="present")
    assert [(item.seq, item.attempt, item.sha256) for item in present] == [(4, 2, sha256)]


def test_a_poster_that_is_refused_or_gone_is_no_poster(stores: Stores) -> None:
    stores.start_run("r")
    root = run_folder(stores)
    for name in ("a", "b"):
        (root / "samples" / f"{name}.mp4").write_bytes(make_mp4())
    (root / "samples" / "a.png").touch()
    (root / "samples" / "b.png").write_bytes(b"poster")
    for seq, name in enumerate(("a", "b"), 1):
        event = line(seq, "video", path=f"samples/{name}.mp4", poster=f"samples/{name}.png", step=seq)
        append(stores.path("r"), event)
    ingest_all(stores)
    assert [item.poster_id != "" for item in recorded(stores, kind="video")] == [False, True]
    (root / "samples" / "b.png").unlink()
    asyncio.run(record_gone(stores.registry, stores.home, "r"))
    assert [item.poster_id for item in recorded(stores, kind="video")] == ["", ""]
    assert [item.is_present for item in recorded(stores, kind="video")] == [True, True]


def test_a_removed_run_has_no_artifacts_and_its_successor_has_its_own(stores: Stores) -> None:
    stores.start_run("r")
    root = run_folder(stores)
    (root / "samples" / "a.txt").write_bytes(b"x")
    append(stores.path("r"), line(1, "sample", path=str(root / "samples" / "a.txt"), step=1))
    ingest_all(stores)
    (artifact,) = recorded(stores)
    stores.registry.want_cancel("r", "").result()
    stores.end_attempt("r", 1)
    stores.registry.remove(["r"]).result()
    with pytest.raises(NotFoundError):
        stores.registry.artifact(artifact.artifact_id)
    assert recorded(stores) == []


def test_ten_thousand_artifacts_are_recorded_once_each_read_page_by_page_and_removed(stores: Stores) -> None:
    stores.start_run("r")
    root = run_folder(stores)
    num = 10_000
    for number in range(1, num + 1):
        (root / "samples" / str(number)).write_bytes(b"x")
    lines = [line(seq, "sample", path=f"samples/{seq}", step=seq) for seq in range(1, num + 1)]
    append(stores.path("r"), b"".join(lines))
    ingest_all(stores)
    with contextlib.closing(RegistryReader(stores.home.registry)) as reader:
        seqs: list[int] = []
        before = None
        while page := reader.artifacts("r", kind="sample", state="present", before=before, limit=1000):
            seqs += [item.seq for item in page]
            before = page[-1].seq, page[-1].artifact_id
    assert seqs == list(range(num, 0, -1))
    assert stores.registry.artifact(stores.registry.get("r").newest_sample).step == num
    shutil.rmtree(root / "samples")
    asyncio.run(record_gone(stores.registry, stores.home, "r"))
    assert stores.registry.present_files("r") == []
    assert stores.registry.get("r").newest_sample == ""


def test_files_that_vanish_after_the_end_are_recorded_without_a_change_of_the_run(stores: Stores) -> None:
    """A change of an ended run would be published as a second end."""
    stores.start_run("r")
    root = run_folder(stores)
    (root / "samples" / "a.mp4").write_bytes(make_mp4())
    append(stores.path("r"), line(1, "video", path=str(root / "samples" / "a.mp4"), step=1))
    ingest_all(stores)
    stores.registry.want_cancel("r", "").result()
    stores.end_attempt("r", 1)
    run = stores.registry.get("r")
    assert run.newest_video
    (root / "samples" / "a.mp4").unlink()
    asyncio.run(record_gone(stores.registry, stores.home, "r"))
    after = stores.registry.get("r")
    assert (after.newest_video, after.change) == ("", run.change)


def test_checkpoints_that_prune_removes_are_recorded_as_removed(stores: Stores) -> None:
    stores.start_run("r")
    root = run_folder(stores)
    for step in (1, 2, 3):
        path, _ = make_checkpoint(root / "checkpoints", step=step, run_id="r")
        append(stores.path("r"), line(step, "checkpoint", path=str(path), step=step))
    append(stores.path("r"), line(4, "metric", name="train/loss", value=0.5, step=3))  # it is the best run
    ingest_all(stores)
    stores.registry.end("r", 1, Ending(state=RunState.COMPLETED, cause=Cause(id="completed"))).result()

    async def main() -> None:
        removal = Removal(
            registry=stores.registry,
            metrics=stores.metrics,
            home=stores.home,
            cache_dir=stores.home.root / "cache",
        )
        rule = PruneRule(ended_before_ms=1 << 60, keep_best=1)
        pruned = await removal.prune(rule)
        assert [item.kind for item in pruned.freed] == ["checkpoint", "checkpoint"]

    asyncio.run(main())
    assert [(item.step, item.is_present) for item in recorded(stores)] == [(1, False), (2, False), (3, True)]


def test_the_files_of_artifacts_can_be_read_without_a_daemon(stores: Stores) -> None:
    stores.start_run("r")
    root = run_folder(stores)
    (root / "samples" / "a.txt").write_bytes(b"content")
    append(stores.path("r"), line(1, "sample", path=str(root / "samples" / "a.txt"), step=1))
    ingest_all(stores)
    stores.close()
    with contextlib.closing(RegistryReader(stores.home.registry)) as reader:
        (artifact,) = reader.artifacts("r")
        with os.fdopen(open_artifact(Home(stores.home.root), artifact), "rb") as file:
            assert file.read() == b"content"
    stores.open()


def test_an_event_of_a_file_and_its_row_are_one_commit(stores: Stores) -> None:
    """Whoever sees the event taken in sees the row, also while it is checked."""
    stores.start_run("r")
    root = run_folder(stores)
    (root / "samples" / "a.txt").write_bytes(b"x")
    append(stores.path("r"), line(1, "sample", path=str(root / "samples" / "a.txt"), step=1))

    async def main() -> None:
        async with stores.ingesting() as ingest:
            ingest.follow("r", 1)
            await ingest.drain("r")
            assert len(recorded(stores)) == stores.registry.get("r").last_seq == 1
            await committed(stores.registry.settle_artifacts("r"))  # nothing is new

    asyncio.run(main())
