"""Whatever instant the writer dies at, a verified checkpoint is there; its failures reach the trainer."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import msgspec
import numpy as np
import pytest

from gen_worker.contract import failpoints
from gen_worker.errors import CheckpointError
from gen_worker.trainer.artifacts import ArtifactWriter, CheckpointContent
from gen_worker.trainer.checkpoints.files.staging import StagingBuffer
from gen_worker.trainer.checkpoints.store import CheckpointStore
from gen_worker.trainer.checkpoints.writing import client as checkpoint_client
from gen_worker.trainer.checkpoints.writing import commit as checkpoint_commit
from gen_worker.trainer.checkpoints.writing.messages import Inbox, WriterConfig
from gen_worker.trainer.checkpoints.writing.writer import CheckpointWriter

DEADLINE_S = 60.0
IN_WRITER = [
    name for name in failpoints.ALL if name.startswith("checkpoint.") and name != "checkpoint.staged"
]


def content(step, value, *, final=False, **more):
    fields = {"epoch": 0, "loop": {}, "cursor": None, "rng": {}, "identity": {}} | more
    return CheckpointContent(step=step, final=final, state={"w": np.full(100, float(value))}, **fields)


def open_writer(folder, **options):
    return ArtifactWriter(folder / "checkpoints", folder / "samples", run_id="run", **options)


def save(writer, step, value, *, final=False, with_files=False):
    more = {}
    if with_files:
        more["author_files"] = writer.author_dir(step, final)
        (more["author_files"] / "note.txt").write_text(f"value {value}")
    writer.save_checkpoint(content(step, value, final=final, **more))
    (saved,) = writer.wait(DEADLINE_S)
    return saved


def newest(folder):
    checkpoint, passed_over = CheckpointStore(folder / "checkpoints").newest_verified()
    return checkpoint, passed_over


def value_of(checkpoint):
    (value,) = set(checkpoint.state["w"].tolist())
    if checkpoint.author_files:
        assert (checkpoint.author_files / "note.txt").read_text() == f"value {int(value)}"
    return value


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def failure_of(action):
    """The message of the CheckpointError it raises, empty if it does not."""
    try:
        action()
    except CheckpointError as error:
        return str(error)
    return ""


class WriterThread:
    """Stands in for the writer process, so that a test can reach into it and saves the time of a start."""

    pid = 2**31 - 1  # of no process
    returncode = None

    def __init__(self, command, **options):
        config = msgspec.json.decode(command[-1], type=WriterConfig)
        # Taken before the client closes its copies.
        connection = socket.socket(fileno=os.dup(config.socket_fd))
        staging = StagingBuffer(os.dup(config.staging_fd))
        self._thread = threading.Thread(target=self._serve, args=(config, connection, staging))
        self._thread.start()

    def _serve(self, config, connection, staging):
        with connection:
            CheckpointWriter(config, connection, staging).serve(Inbox())
        staging.close()

    def poll(self):
        return None if self._thread.is_alive() else 0

    def wait(self):
        self._thread.join()


@pytest.fixture
def writer_thread():
    """Within it, the writer is a thread of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_client.subprocess, "Popen", WriterThread)
        yield patch
    failpoints.arm("")


SCENARIOS = {
    # (step, final) that holds a checkpoint with value 1, then (step, final) of the save with value 2
    "the next step": ((1, False), (2, False)),
    "the same step again": ((1, False), (1, False)),
    "final again": ((1, True), (2, True)),
}


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("place", IN_WRITER)
def test_a_kill_at_any_durable_step_leaves_a_verified_checkpoint_and_nothing_to_clean_by_hand(
    tmp_path, monkeypatch, writer_thread, place, scenario
):
    (old_step, old_final), (new_step, new_final) = SCENARIOS[scenario]
    options = {"keep_last": 1, "keep_best": 0}
    with open_writer(tmp_path, **options) as writer:
        save(writer, old_step, 1, final=old_final, with_files=True)

    monkeypatch.setenv(failpoints.ENV, f"{place}=kill")
    writer_thread.undo()
    with open_writer(tmp_path, **options) as writer:
        message = failure_of(lambda: save(writer, new_step, 2, final=new_final, with_files=True))
        checkpoint, _ = newest(tmp_path)
        if message:
            assert "killed by SIGKILL while saving" in message
            assert value_of(checkpoint) in (1.0, 2.0)
        else:  # this scenario does not come by that place
            assert value_of(checkpoint) == 2.0

    writer_thread.setattr(checkpoint_client.subprocess, "Popen", WriterThread)
    with open_writer(tmp_path, **options) as writer:
        save(writer, 3, 3, final=new_final, with_files=True)
    checkpoint, _ = newest(tmp_path)
    assert (checkpoint.step, value_of(checkpoint)) == (3, 3.0)
    stem = "final" if new_final else "step-00000003"
    assert names(tmp_path) == [f"{checkpoint.author_files.name}", f"{stem}.meta.json", f"{stem}.pt"]


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("place", IN_WRITER)
def test_a_full_disk_at_any_durable_step_is_reported_and_harms_nothing(
    tmp_path, writer_thread, place, scenario
):
    (old_step, old_final), (new_step, new_final) = SCENARIOS[scenario]
    with open_writer(tmp_path, keep_last=1, keep_best=0) as writer:
        save(writer, old_step, 1, final=old_final, with_files=True)
    before = names(tmp_path)

    failpoints.arm(f"{place}=enospc")
    with open_writer(tmp_path, keep_last=1, keep_best=0) as writer:
        message = failure_of(lambda: save(writer, new_step, 2, final=new_final, with_files=True))
        checkpoint, _ = newest(tmp_path)
        if place in ("checkpoint.meta_renamed", "checkpoint.reread", "checkpoint.retention"):
            assert value_of(checkpoint) == 2.0  # it was committed already
        else:
            assert "no space left for" in message
            assert "MB free" in message
            assert value_of(checkpoint) == 1.0
            assert names(tmp_path) == before
        # The same writer goes on: a full disk may have room again.
        save(writer, 5, 5, final=new_final)
        assert value_of(newest(tmp_path)[0]) == 5.0
    assert not [name for name in names(tmp_path) if "tmp-" in name or "previous" in name]


def test_a_writer_killed_in_the_middle_is_reported_once_and_replaced(tmp_path, monkeypatch):
    monkeypatch.setenv(failpoints.ENV, "checkpoint.data_written=kill")
    writer = open_writer(tmp_path)
    writer.save_checkpoint(content(1, 1))
    with pytest.raises(CheckpointError, match="killed by SIGKILL while saving step-00000001"):
        writer.wait(DEADLINE_S)
    monkeypatch.delenv(failpoints.ENV)
    assert writer.poll() == []
    assert save(writer, 2, 2).verified
    writer.close()
    assert names(tmp_path) == ["step-00000002.meta.json", "step-00000002.pt"]


def test_a_failure_is_raised_by_the_next_save_if_nobody_polled(tmp_path, monkeypatch):
    monkeypatch.setenv(failpoints.ENV, "checkpoint.data_synced=enospc")
    with open_writer(tmp_path) as writer:
        writer.save_checkpoint(content(1, 1))
        with pytest.raises(CheckpointError, match="no space left for step-00000001: it needs"):
            writer.save_checkpoint(content(2, 2))
        assert save(writer, 2, 2).step == 2


def test_a_writer_that_died_while_idle_is_replaced_without_an_error(tmp_path):
    with open_writer(tmp_path) as writer:
        save(writer, 1, 1)
        os.kill(writer._client.pid, signal.SIGKILL)
        writer._client._process.wait()
        assert save(writer, 2, 2).verified


def test_signals_to_the_group_do_not_end_the_writer(tmp_path):
    with open_writer(tmp_path) as writer:
        writer.start()
        pid = writer._client.pid
        for number in (signal.SIGTERM, signal.SIGINT):  # at once: it may not even have begun to run
            os.kill(pid, number)
        save(writer, 1, 1)
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(pid, number)
        save(writer, 2, 2)
        assert writer._client.pid == pid


def test_the_writer_finishes_its_save_and_ends_when_the_trainer_is_killed(tmp_path):
    """And holds the inherited descriptor until then: the run's lease outlives the trainer with it."""
    read_end, write_end = os.pipe()
    code = f"""
import os, signal
from pathlib import Path
import numpy as np
from gen_worker.trainer.artifacts import ArtifactWriter, CheckpointContent
folder = Path({str(tmp_path)!r})
writer = ArtifactWriter(folder / "checkpoints", folder / "samples", run_id="run", inherit_fds=[{write_end}])
writer.save_checkpoint(CheckpointContent(step=1, epoch=0, final=False, state={{"w": np.ones(2_000_000)}},
    loop={{}}, cursor=None, rng={{}}, identity={{}}))
os.kill(os.getpid(), signal.SIGKILL)
"""
    trainer = subprocess.run([sys.executable, "-c", code], pass_fds=(write_end,), check=False)
    assert trainer.returncode == -signal.SIGKILL
    os.close(write_end)
    with os.fdopen(read_end, "rb") as lease:
        assert lease.read() == b""  # returns when the last holder, the writer, has ended
    checkpoint, passed_over = newest(tmp_path)
    assert checkpoint.step == 1
    assert passed_over == []
    assert names(tmp_path) == ["step-00000001.meta.json", "step-00000001.pt"]


def test_the_writer_never_imports_torch(tmp_path):
    code = "import sys, gen_worker.trainer.checkpoints.writing.writer; print('torch' in sys.modules or 'pyarrow' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"


def test_what_the_disk_gives_back_wrong_is_marked_damaged_and_the_older_one_stays(tmp_path, writer_thread):
    with open_writer(tmp_path) as writer:
        save(writer, 1, 1)

    real = checkpoint_commit.sync_path

    def flip_a_bit_behind_the_commit(folder):
        real(folder)
        target = tmp_path / "checkpoints" / "step-00000001.pt"
        meta = tmp_path / "checkpoints" / "step-00000001.meta.json"
        if meta.exists() and '"attempt":2' in meta.read_text():
            data = bytearray(target.read_bytes())
            data[len(data) // 2] ^= 1
            target.write_bytes(data)

    writer_thread.setattr(checkpoint_commit, "sync_path", flip_a_bit_behind_the_commit)
    with open_writer(tmp_path, attempt=2) as writer:
        writer.save_checkpoint(content(1, 2))
        with pytest.raises(CheckpointError, match="did not read back as written"):
            writer.wait(DEADLINE_S)
    assert "step-00000001.meta.json.damaged" in names(tmp_path)
    checkpoint, passed_over = newest(tmp_path)
    assert value_of(checkpoint) == 1.0
    assert any("did not match" in item.reason for item in passed_over)


def test_an_unverified_save_of_the_same_step_does_not_push_out_the_verified_one(tmp_path, writer_thread):
    with open_writer(tmp_path) as writer:
        save(writer, 1, 1, with_files=True)
        bad = save(writer, 1, float("nan"))
        assert not bad.verified
        assert "non-finite values in w" in bad.reason
    with open_writer(tmp_path) as writer:  # nor does cleaning up at the next start
        writer.start()
        assert value_of(newest(tmp_path)[0]) == 1.0
        save(writer, 1, float("inf"))
        checkpoint, passed_over = newest(tmp_path)
        assert value_of(checkpoint) == 1.0
        assert "not verified: non-finite" in passed_over[0].reason
        save(writer, 1, 4)
        assert value_of(newest(tmp_path)[0]) == 4.0
    assert names(tmp_path) == ["step-00000001.meta.json", "step-00000001.pt"]


def test_the_same_bytes_again_keep_the_file_that_is_there(tmp_path, writer_thread):
    path = tmp_path / "checkpoints" / "step-00000001.pt"
    with open_writer(tmp_path) as writer:
        save(writer, 1, 1)
        inode = path.stat().st_ino
    with open_writer(tmp_path, attempt=2) as writer:
        save(writer, 1, 1)
    assert path.stat().st_ino == inode
    assert newest(tmp_path)[0].meta.attempt == 2


def test_the_same_bytes_again_heal_a_file_that_rotted(tmp_path, writer_thread):
    path = tmp_path / "checkpoints" / "step-00000001.pt"
    with open_writer(tmp_path) as writer:
        save(writer, 1, 1)
        path.write_bytes(path.read_bytes()[:-1])
        save(writer, 1, 1)
    assert value_of(newest(tmp_path)[0]) == 1.0


def test_a_checkpoint_of_a_newer_version_under_the_same_name_is_moved_aside_not_lost(tmp_path, writer_thread):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "step-00000001.meta.json").write_text('{"schema_version":"trainer_checkpoint.v9"}')
    (folder / "step-00000001.pt").write_bytes(b"from the future")
    with open_writer(tmp_path) as writer:
        save(writer, 1, 1)
    assert (folder / "step-00000001.pt.unreadable-1").read_bytes() == b"from the future"
    assert "v9" in (folder / "step-00000001.meta.json.unreadable-1").read_text()
    assert value_of(newest(tmp_path)[0]) == 1.0


def test_the_other_format_under_the_same_name_replaces_the_first(tmp_path, writer_thread):
    with open_writer(tmp_path, format="pt") as writer:
        save(writer, 1, 1)
    with open_writer(tmp_path, format="safetensors") as writer:
        save(writer, 1, 2)
    assert names(tmp_path) == ["step-00000001.meta.json", "step-00000001.safetensors"]
    assert value_of(newest(tmp_path)[0]) == 2.0


def test_leftovers_of_dead_attempts_go_and_foreign_files_stay(tmp_path, writer_thread):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    ours = [
        "step-00000003.pt.tmp-0badcafe",
        "step-00000003.meta.json.tmp-0badcafe",
        "final.safetensors.tmp-0badcafe",
        "step-00000001.pt",  # data without a meta, older than the newest
        "step-00000001.previous.pt",
    ]
    foreign = [
        "notes.txt",
        "model.pt",
        "mine.tmp-abc",
        "step-00000099.pt",
        "step-00000001.meta.json.damaged.bak",
    ]
    for name in [*ours, *foreign]:
        (folder / name).write_bytes(b"x")
    (folder / "step-00000002.files.tmp-0badcafe-1").mkdir()
    (folder / "step-00000001.files").mkdir()
    (folder / "step-00000007.pt").write_bytes(b"x")
    (folder / "step-00000007.meta.json").write_text("not json")
    (folder / "step-00000007.files").mkdir()
    with open_writer(tmp_path) as writer:
        mine = writer.author_dir(9, False)
        save(writer, 8, 8)
        assert mine.is_dir()
    left = set(names(tmp_path)) - {mine.name, "step-00000008.pt", "step-00000008.meta.json"}
    kept_for_unreadable = {"step-00000007.pt", "step-00000007.meta.json", "step-00000007.files"}
    assert left - {"step-00000001.pt", "step-00000001.files"} == {*foreign} | kept_for_unreadable


def test_the_staged_failpoint_reaches_the_trainer_as_a_checkpoint_error(tmp_path):
    failpoints.arm("checkpoint.staged=enospc")
    try:
        with open_writer(tmp_path) as writer:
            with pytest.raises(CheckpointError, match="staging step-00000001 failed"):
                writer.save_checkpoint(content(1, 1))
            assert save(writer, 1, 1).verified
    finally:
        failpoints.arm("")


def test_a_save_says_how_long_it_took_and_how_long_it_blocked(tmp_path):
    with open_writer(tmp_path) as writer:
        before = time.monotonic()
        writer.save_checkpoint(content(1, 1))
        (saved,) = writer.wait(DEADLINE_S)
        assert (tmp_path / "checkpoints" / "step-00000001.meta.json").exists()
        assert 0 < saved.blocked_s <= saved.duration_s <= time.monotonic() - before
