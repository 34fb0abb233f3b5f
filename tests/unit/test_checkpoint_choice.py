"""Resume, retry, fork and rollback begin at the same checkpoint, and give the same reasons for what they pass over."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from sealed_meta import edit_meta

from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.errors import CheckpointError, InputError
from gen_worker.trainer.artifacts import ArtifactWriter, CheckpointContent
from gen_worker.trainer.checkpoints.store import CheckpointStore
from gen_worker.trainer.restore.resume import choose_resume_point
from trn.cli.reading.run_lookup import find_checkpoint, find_unsound
from trn.core.errors import InvalidRequestError
from trn.daemon.intake.resumption import describe, with_checkpoint
from trn.daemon.intake.saved_checkpoints import find_next_start, newest_checkpoint, read_checkpoint

DEADLINE_S = 60.0
JOB = TrainingJobSpec(run_id="run", max_steps=9)
FORCED = TrainingJobSpec(run_id="run", max_steps=9, resume_non_finite=True)


def save(
    folder: Path,
    *steps: int,
    final: int | None = None,
    nan: tuple[int, ...] = (),
    run_id: str = "run",
    nonce: str = "",
    keep_last: int = 0,
) -> None:
    with ArtifactWriter(
        folder, folder / "samples", run_id=run_id, attempt=1, nonce=nonce, keep_last=keep_last, keep_best=0
    ) as writer:
        for step in (*steps, *(() if final is None else (final,))):
            weights = torch.full((20,), float("nan") if step in nan else float(step))
            content = CheckpointContent(
                step=step,
                final=step == final,
                epoch=0,
                state={"w": weights},
                loop={},
                cursor=None,
                rng={},
                identity={},
            )
            writer.save_checkpoint(content)
        writer.wait(DEADLINE_S)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 2, 4 and 6, and a final one at 8 whose weights are NaN."""
    folder = tmp_path_factory.mktemp("template")
    save(folder, 2, 4, 6, final=8, nan=(8,))
    return folder


@pytest.fixture
def folder(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "checkpoints"))


def flip(folder: Path, stem: str) -> None:
    path = folder / f"{stem}.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def leave(folder: Path, stem: str) -> None:
    pass


DAMAGES: dict[str, Callable[[Path, str], object]] = {
    "nothing": leave,
    "damaged": flip,
    "truncated": lambda folder, stem: (folder / f"{stem}.pt").write_bytes(b"short"),
    "missing file": lambda folder, stem: (folder / f"{stem}.pt").unlink(),
    "never committed": lambda folder, stem: (folder / f"{stem}.meta.json").unlink(),
    "unreadable meta": lambda folder, stem: (folder / f"{stem}.meta.json").write_text("{"),
    "another version": lambda folder, stem: edit_meta(folder, stem, schema_version="trainer_checkpoint.v9"),
    "another machine": lambda folder, stem: edit_meta(folder, stem, byteorder="big"),
    "not finite": lambda folder, stem: edit_meta(
        folder, stem, verified=False, reason="non-finite values in w"
    ),
    "overlapping": lambda folder, stem: edit_meta(
        folder, stem, storages=[{"offset": 0, "size_bytes": 80}, {"offset": 40, "size_bytes": 80}]
    ),
    "a state document": lambda folder, stem: (folder / f"{stem}.meta.json").write_text('{"state": {"w": 1}}'),
    "edited meta": lambda folder, stem: (folder / f"{stem}.meta.json").write_text(
        (folder / f"{stem}.meta.json").read_text().replace('"epoch":0', '"epoch":1')
    ),
    "another run's": lambda folder, stem: edit_meta(folder, stem, run_id="another"),
    "another's file": lambda folder, stem: (folder / "other.meta.json").write_text("{}"),
}


@pytest.mark.parametrize("is_forced", [False, True])
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("stem", ["final", "step-00000006"])
def test_a_resume_begins_where_a_retry_does_and_gives_the_same_reasons(
    folder: Path, tmp_path: Path, stem: str, damage: str, is_forced: bool
) -> None:
    """The daemon checks what is quick; the worker of the new run reads the bytes, and takes an older one if they differ."""
    DAMAGES[damage](folder, stem)
    by_daemon = newest_checkpoint(folder, "run", is_forced=is_forced)
    by_retry = choose_resume_point(FORCED if is_forced else JOB, folder, None)
    assert by_daemon is not None
    config = with_checkpoint({"run_id": "run.2", "max_steps": 9}, by_daemon)
    next_run = msgspec.convert(config, TrainingJobSpec)
    by_worker = choose_resume_point(next_run, tmp_path / "own", by_daemon.path)
    assert by_retry.checkpoint is not None
    assert by_worker.checkpoint is not None
    assert by_worker.checkpoint.path == by_retry.checkpoint.path
    reasons = {*by_daemon.passed_over, *map(str, by_worker.passed_over)}
    assert reasons == set(map(str, by_retry.passed_over))
    if damage != "damaged":  # only the bytes can tell that
        assert by_daemon.path.name.removesuffix(".meta.json") == by_retry.checkpoint.path.stem


@pytest.mark.parametrize("damage", sorted(set(DAMAGES) - {"nothing", "another's file", "damaged"}))
def test_where_no_checkpoint_can_be_resumed_both_refuse_with_every_reason(
    tmp_path: Path, damage: str
) -> None:
    save(tmp_path, 2, 4)
    for stem in ("step-00000002", "step-00000004"):
        DAMAGES[damage](tmp_path, stem)
    if damage == "never committed":
        assert newest_checkpoint(tmp_path, "run") is None
        assert choose_resume_point(JOB, tmp_path, None).checkpoint is None
        return
    with pytest.raises(InvalidRequestError, match="can be resumed") as of_daemon:
        newest_checkpoint(tmp_path, "run")
    with pytest.raises(InputError, match="can be resumed") as of_worker:
        choose_resume_point(JOB, tmp_path, None)
    assert of_daemon.value.faults
    assert all(fault in str(of_worker.value) for fault in of_daemon.value.faults)


def test_a_checkpoint_with_nan_is_passed_over_and_force_takes_it(folder: Path) -> None:
    found = newest_checkpoint(folder, "run")
    assert found is not None
    assert found.step == 6
    assert found.passed_over == ("final.meta.json: not verified: non-finite values in w",)
    forced = newest_checkpoint(folder, "run", is_forced=True)
    assert forced is not None
    assert (forced.step, forced.non_finite) == (8, "non-finite values in w")
    assert "although it holds non-finite values in w" in describe(forced)
    assert with_checkpoint({}, forced)["resume_non_finite"] is True, "its worker takes it, too"
    assert "resume_non_finite" not in with_checkpoint({}, found)
    looked_at = find_checkpoint(folder, "run")
    assert looked_at is not None
    assert looked_at.step == 6, "what `trn why` names is what a resume takes"
    assert find_unsound(folder, "run") == "non-finite values in w", (
        "and it says what is wrong with the newest"
    )
    assert find_unsound(folder, "another") == ""


def test_a_named_checkpoint_with_nan_is_refused_unless_forced(folder: Path, tmp_path: Path) -> None:
    meta = folder / "final.meta.json"
    with pytest.raises(InvalidRequestError, match=r"non-finite values in w.* --force"):
        read_checkpoint(meta)
    assert read_checkpoint(meta, is_forced=True).non_finite == "non-finite values in w"
    with pytest.raises(CheckpointError, match="resume_non_finite"):
        choose_resume_point(JOB, tmp_path / "none", meta)
    taken = choose_resume_point(FORCED, tmp_path / "none", folder / "final.pt")
    assert taken.checkpoint is not None
    assert taken.checkpoint.step == 8


@pytest.mark.parametrize(
    "damage", ["damaged", "truncated", "missing file", "unreadable meta", "another version"]
)
def test_a_named_checkpoint_that_is_damaged_is_never_taken(folder: Path, tmp_path: Path, damage: str) -> None:
    DAMAGES[damage](folder, "step-00000006")
    meta = folder / "step-00000006.meta.json"
    if damage != "damaged":  # whose bytes the worker finds
        with pytest.raises(InvalidRequestError):
            read_checkpoint(meta, is_forced=True)
    with pytest.raises(CheckpointError):
        choose_resume_point(FORCED, tmp_path / "none", meta)


def test_where_bytes_are_damaged_and_nothing_is_older_the_worker_refuses_with_the_reason(
    folder: Path, tmp_path: Path
) -> None:
    for stem in ("step-00000002", "step-00000004"):
        flip(folder, stem)
    job = TrainingJobSpec(run_id="run.2", max_steps=9, resume_older=True)
    with pytest.raises(InputError, match="hash mismatch") as refused:
        choose_resume_point(job, tmp_path / "own", folder / "step-00000004.meta.json")
    assert "step-00000002" in str(refused.value)
    assert "step-00000006" not in str(refused.value), "newer than what was asked for"


def test_a_checkpoint_of_a_terabyte_is_accepted_without_reading_it(folder: Path) -> None:
    size = 1 << 40
    meta = json.loads((folder / "step-00000006.meta.json").read_text())
    edit_meta(folder, "step-00000006", files=[meta["files"][0] | {"size_bytes": size}])
    with (folder / "step-00000006.pt").open("r+b") as file:
        file.truncate(size)
    found = newest_checkpoint(folder, "run")
    assert found is not None
    assert found.step == 6
    assert read_checkpoint(folder / "step-00000006.meta.json").step == 6


def test_a_meta_without_a_digest_is_read_and_said_to_be_unverifiable(folder: Path) -> None:
    path = folder / "step-00000006.meta.json"
    document = json.loads(path.read_text())
    del document["digest"]
    path.write_text(json.dumps(document))
    found = newest_checkpoint(folder, "run")
    assert found is not None
    assert found.step == 6
    assert "its meta has no digest" in describe(found)


def test_a_plain_state_document_is_taken_by_both(tmp_path: Path) -> None:
    plain = tmp_path / "start.json"
    plain.write_text('{"state": {"w": 1}}')
    assert read_checkpoint(plain).step == 0
    point = choose_resume_point(JOB, tmp_path / "none", plain)
    assert point.checkpoint is not None
    assert point.checkpoint.state == {"w": 1}


def test_a_rollback_passes_over_what_a_resume_would(folder: Path) -> None:
    flip(folder, "step-00000006")
    chosen = CheckpointStore(folder).choose(is_candidate=lambda info: info.step % 2 == 0)
    assert chosen.taken is not None
    assert chosen.taken.step == 4


def test_to_choose_takes_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, gen_worker.contract.checkpoints.choice\n"
        "assert not {'torch', 'numpy', 'pyarrow'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_progress_is_measured_where_the_next_attempt_would_begin(folder: Path) -> None:
    assert find_next_start(folder, "run") == 6  # the final one is NaN, which no resume takes by itself
    (folder / "step-00000006.meta.json").unlink()
    assert find_next_start(folder, "run") == 4
    assert find_next_start(folder / "nowhere", "run") == 0


def test_what_another_submission_saved_under_the_same_id_is_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 2, 4, nonce="ours")
    save(tmp_path, 6, final=8, nonce="theirs")
    assert find_next_start(tmp_path, "run", "ours") == 4
    found = newest_checkpoint(tmp_path, "run", "ours")
    assert found is not None
    assert (found.step, found.nonce) == (4, "ours")
    assert all("another submission of run 'run'" in text for text in found.passed_over)
    point = choose_resume_point(JOB, tmp_path, None, nonce="ours")
    assert point.checkpoint is not None
    assert point.checkpoint.step == 4
    assert len(point.passed_over) == 2
    looked_at = find_checkpoint(tmp_path, "run", "ours")
    assert looked_at is not None
    assert looked_at.step == 4


@pytest.mark.parametrize("saver", [("another", ""), ("run", "theirs")])
def test_a_run_beside_nothing_but_what_others_saved_is_refused(
    tmp_path: Path, saver: tuple[str, str]
) -> None:
    save(tmp_path, 6, run_id=saver[0], nonce=saver[1])
    with pytest.raises(InputError, match=r"it is of (run 'another'|another submission)"):
        choose_resume_point(JOB, tmp_path, None, nonce="ours")
    with pytest.raises(InvalidRequestError, match=r"it is of (run 'another'|another submission)"):
        newest_checkpoint(tmp_path, "run", "ours")


def test_a_worker_without_a_nonce_resumes_what_older_releases_saved(folder: Path) -> None:
    path = folder / "step-00000006.meta.json"
    document = json.loads(path.read_text())
    del document["digest"], document["nonce"]
    path.write_text(json.dumps(document))
    point = choose_resume_point(JOB, folder, None)
    assert point.checkpoint is not None
    assert point.checkpoint.step == 6
    assert find_next_start(folder, "run", "ours") == 0, "a new run cannot have saved it"


def test_what_others_saved_neither_counts_for_retention_nor_is_removed_by_it(tmp_path: Path) -> None:
    save(tmp_path, 1, 3, nonce="theirs")
    save(tmp_path, 2, 4, 6, nonce="ours", keep_last=2)
    names = sorted(path.name for path in tmp_path.glob("*.meta.json"))
    assert names == [f"step-{step:08d}.meta.json" for step in (1, 3, 4, 6)]
