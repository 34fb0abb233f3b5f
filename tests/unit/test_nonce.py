"""What carries the nonce of another submission is not believed, wherever it is found; what is older has none."""

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest

from gen_worker.contract.lease import RunLease
from gen_worker.contract.process_identity import boot_id, read_process
from gen_worker.errors import StartupError
from gen_worker.launcher.attempt_records import (
    AttemptRecord,
    ExitRecord,
    ForeignRecordError,
    claim,
    read_exit,
    read_record,
    write_exit,
)
from gen_worker.launcher.messages import encode
from gen_worker.trainer.events.event_log import EventLog
from gen_worker.trainer.reporting import TrainingReporter
from trn.core.errors import UnavailableError
from trn.core.home import Home
from trn.daemon.ingest.event_file import last_seq_before, parse, read_terminal, replay
from trn.executors.local.files import LocalFile
from trn.executors.local.worker_process import take_or_find
from trn.executors.run_folders import find_foreign, set_aside

OURS, THEIRS = "0" * 16, "f" * 16


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    home.make()
    return home


def event(seq: int, nonce: str = "", **fields: Any) -> bytes:
    line = {"event": "log", "seq": seq, "run_id": "r", "attempt": 1, "timestamp_ms": 0, **fields}
    return json.dumps({**line, **({"nonce": nonce} if nonce else {})}).encode() + b"\n"


def test_a_record_of_another_submission_is_no_process_of_this_one(tmp_path: Path) -> None:
    path = tmp_path / "1.json"
    assert claim(path, AttemptRecord(nonce=THEIRS, boot_id=boot_id(), pid=os.getpid()))
    with pytest.raises(ForeignRecordError, match="another submission"):
        read_record(path, OURS)
    assert take_or_find(str(tmp_path), 1, OURS) is None
    found = take_or_find(str(tmp_path), 1, THEIRS)
    assert found is not None
    assert found.pid == os.getpid()


def test_an_exit_of_another_submission_is_not_how_this_one_ended(tmp_path: Path) -> None:
    path = tmp_path / "1.exit.json"
    write_exit(path, ExitRecord(exit_code=0, nonce=THEIRS))
    assert read_exit(path, OURS) is None
    assert read_exit(path, THEIRS) == ExitRecord(exit_code=0, nonce=THEIRS)


def test_records_and_exits_of_runs_from_before_there_were_nonces_are_read(tmp_path: Path) -> None:
    record, exit_ = tmp_path / "1.json", tmp_path / "1.exit.json"
    record.write_text('{"boot_id": "b", "pid": 7, "start_ticks": 9, "log_offset": 0}')
    exit_.write_text('{"exit_code": 0, "is_out_of_memory": false, "detail": "exit code 0"}')
    assert read_record(record, "") == AttemptRecord(boot_id="b", pid=7, start_ticks=9, log_offset=0)
    assert read_exit(exit_, "") == ExitRecord(exit_code=0, detail="exit code 0")
    with pytest.raises(ForeignRecordError):
        read_record(record, OURS)  # a new run cannot have been started before
    assert read_exit(exit_, OURS) is None


@pytest.mark.parametrize("nonce", ["", OURS])
def test_events_of_another_submission_are_put_aside_and_end_nothing(tmp_path: Path, nonce: str) -> None:
    path = tmp_path / "events.jsonl"
    own, foreign = [event(1, nonce), event(2, nonce)], event(3, THEIRS, event="completed", step=9)
    path.write_bytes(b"".join([*own, foreign]))
    chunk = parse(path.read_bytes(), 0, 0, nonce)
    assert [item.seq for item in chunk.events] == [1, 2]
    assert [damage.reason for damage in chunk.damaged] == ["belongs to another submission"]
    assert read_terminal(LocalFile(path), 1, nonce) is None
    assert last_seq_before(LocalFile(path), path.stat().st_size, nonce) == 2
    (batch,) = replay(LocalFile(path), 0, 0, path.stat().st_size, nonce)
    assert batch.lines == b"".join(own)
    ours = event(3, nonce, event="completed", step=2)
    path.write_bytes(b"".join([*own, ours]))
    terminal = read_terminal(LocalFile(path), 1, nonce)
    assert terminal is not None
    assert terminal.step == 2


def test_every_event_of_a_worker_carries_the_nonce_that_it_was_given(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for given in (OURS, ""):
        path.unlink(missing_ok=True)
        reporter = TrainingReporter(path, run_id="r", log=EventLog(path, run_id="r", nonce=given))
        reporter.started()
        reporter.metrics(1, {"a": 1.0, "b": 2.0})
        reporter.completed(step=1)
        reporter.close()
        events = [json.loads(line) for line in path.read_text().splitlines()]
        assert [item.get("nonce", "") for item in events] == [given] * 3


def test_a_worker_with_a_nonce_goes_on_with_no_events_or_checkpoints_of_another(tmp_path: Path) -> None:
    path, saved = tmp_path / "events.jsonl", tmp_path / "checkpoints"
    EventLog(path, run_id="r", nonce=THEIRS).close()
    EventLog(path, run_id="r", nonce=OURS).close()  # an empty file is nobody's
    for content in (event(1, THEIRS), event(1)):
        path.write_bytes(content)
        with pytest.raises(StartupError, match="another submission of run 'r'"):
            EventLog(path, run_id="r", nonce=OURS)
    RunLease.acquire(saved, run_id="r", nonce=THEIRS).release()
    RunLease.acquire(saved, run_id="r", nonce=OURS).release()  # nothing is saved there
    (saved / "step-00000001.meta.json").touch()
    RunLease.acquire(saved, run_id="r", nonce=OURS).release()
    with pytest.raises(StartupError, match="another submission of run 'r'"):
        RunLease.acquire(saved, run_id="r", nonce=THEIRS)


def test_a_worker_without_a_nonce_goes_on_as_before_there_were_any(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(event(1))
    log = EventLog(path, run_id="r")
    assert log.attempt == 2
    log.close()
    (tmp_path / ".lease").write_text('{"run_id": "r", "pid": 1, "host": "elsewhere", "started_ticks": 1}')
    (tmp_path / "step-00000001.meta.json").touch()
    RunLease.acquire(tmp_path, run_id="r").release()


@pytest.mark.parametrize("file", ["attempts/2.json", "checkpoints/.lease", "metrics/events.jsonl"])
def test_one_file_of_another_submission_makes_a_folder_foreign(home: Home, file: str) -> None:
    folder = home.run("r")
    content = {
        "attempts/2.json": encode(AttemptRecord(nonce=THEIRS)),
        "checkpoints/.lease": json.dumps({"run_id": "r", "pid": 1, "host": "h", "nonce": THEIRS}).encode(),
        "metrics/events.jsonl": event(1, THEIRS),
    }[file]
    for path in (folder.attempts / "1.json", folder.root / file):
        path.parent.mkdir(parents=True, exist_ok=True)
    (folder.attempts / "1.json").write_bytes(encode(AttemptRecord(nonce=OURS)))
    assert find_foreign(folder, OURS) == ""
    assert find_foreign(folder, "") != "", "a run from before has no nonce"
    (folder.root / file).write_bytes(content)
    assert Path(file).name in find_foreign(folder, OURS)


def test_a_folder_is_ours_without_files_that_a_power_cut_emptied_but_not_before_the_first_attempt(
    home: Home,
) -> None:
    folder = home.run("r")
    assert find_foreign(folder, OURS, is_first_attempt=True) == ""
    for path in (folder.attempts / "1.json", folder.events, folder.checkpoints / ".lease"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    assert find_foreign(folder, OURS) == ""
    assert "before the run's first attempt" in find_foreign(folder, OURS, is_first_attempt=True)


def test_a_pipe_in_the_place_of_a_file_says_nothing_and_holds_up_nobody(home: Home) -> None:
    folder = home.run("r")
    folder.events.parent.mkdir(parents=True)
    os.mkfifo(folder.events)
    assert find_foreign(folder, OURS) == ""


def test_a_folder_in_which_somebody_works_is_not_moved(home: Home) -> None:
    folder = home.run("r")
    folder.checkpoints.mkdir(parents=True)
    with (folder.checkpoints / ".lease").open("w") as lease:
        fcntl.flock(lease, fcntl.LOCK_EX)
        with pytest.raises(UnavailableError, match="is in use by"):
            set_aside(home, "r")
    state = read_process(os.getpid())
    assert state is not None
    record = AttemptRecord(nonce=THEIRS, boot_id=boot_id(), pid=os.getpid(), start_ticks=state.start_ticks)
    assert claim(folder.attempts / "1.json", record)
    with pytest.raises(UnavailableError, match=f"in use by process {os.getpid()}"):
        set_aside(home, "r")
    (folder.attempts / "1.json").unlink()
    moved = set_aside(home, "r")
    assert not folder.root.exists()
    assert (moved / "checkpoints" / ".lease").exists()
