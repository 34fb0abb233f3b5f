"""Claims about a worker under an orchestrator: its attempt's number, its doorbell, its folder, its end told by others."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.contract.lease import RunLease
from gen_worker.errors import Category, LeaseHeldError, SpecError, StartupError, TrainStepError
from gen_worker.trainer.attempt.child_attempt import close_attempt, report_missing_end
from gen_worker.trainer.attempt.runtime_env import read_environment
from gen_worker.trainer.events.event_log import EventLog
from gen_worker.trainer.reporting import TrainingReporter


def close(folder: Path, attempt: int, error: str = "it died") -> None:
    close_attempt(
        run_id="r",
        attempt=attempt,
        checkpoints_dir=folder / "checkpoints",
        events_path=folder / "events.jsonl",
        trainer="a:B",
        category=Category.TRAIN_STEP,
        error=error,
    )


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def shown(folder: Path) -> list[tuple[int, int, str]]:
    return [(event["seq"], event["attempt"], event["event"]) for event in events(folder)]


def begin_attempt(folder: Path, attempt: int | None) -> TrainingReporter:
    path = folder / "events.jsonl"
    return TrainingReporter(path, run_id="r", log=EventLog(path, run_id="r", attempt=attempt))


def test_events_carry_the_number_that_was_given_also_over_a_gap(tmp_path: Path) -> None:
    for attempt in (2, 5):
        reporter = begin_attempt(tmp_path, attempt)
        reporter.started()
        reporter.close()
    assert shown(tmp_path) == [(1, 2, "started"), (2, 5, "started")]
    reporter = begin_attempt(tmp_path, None)
    assert reporter.attempt == 6
    reporter.close()


@pytest.mark.parametrize("attempt", [1, 2])
def test_a_number_that_was_used_or_passed_is_refused_and_the_file_stays_as_it_is(
    tmp_path: Path, attempt: int
) -> None:
    reporter = begin_attempt(tmp_path, 2)
    reporter.started()
    reporter.close()
    before = (tmp_path / "events.jsonl").read_bytes()
    with pytest.raises(StartupError, match="attempt 2, but this is attempt"):
        begin_attempt(tmp_path, attempt)
    assert (tmp_path / "events.jsonl").read_bytes() == before


def test_the_end_of_a_dead_attempt_is_written_once_however_often_it_is_asked_for(tmp_path: Path) -> None:
    reporter = begin_attempt(tmp_path, 3)
    reporter.started()
    reporter.metrics(7, {"loss": 1.0})
    reporter.close()
    for _ in range(3):
        close(tmp_path, 3)
    assert shown(tmp_path) == [(1, 3, "started"), (2, 3, "metric"), (3, 3, "failed")]
    failed = events(tmp_path)[-1]
    assert (failed["category"], failed["error"], failed["step"]) == ("train-step", "it died", 7)


def test_an_attempt_that_wrote_nothing_gets_its_start_and_its_end(tmp_path: Path) -> None:
    reporter = begin_attempt(tmp_path, 1)
    reporter.started()
    reporter.failed(step=4, category="input", error="first")
    reporter.close()
    close(tmp_path, 2)
    close(tmp_path, 2)
    assert shown(tmp_path)[2:] == [(3, 2, "started"), (4, 2, "failed")]


def test_an_attempt_that_told_its_own_end_is_left_alone(tmp_path: Path) -> None:
    reporter = begin_attempt(tmp_path, 1)
    reporter.started()
    reporter.completed(9)
    reporter.close()
    close(tmp_path, 1)
    assert shown(tmp_path) == [(1, 1, "started"), (2, 1, "completed")]


def test_the_end_is_not_written_under_a_living_worker(tmp_path: Path) -> None:
    lease = RunLease.acquire(tmp_path / "checkpoints", run_id="r")
    try:
        with pytest.raises(LeaseHeldError):
            close(tmp_path, 1)
    finally:
        lease.release()


def test_half_a_line_of_the_dead_is_cut_off_before_its_end_is_told(tmp_path: Path) -> None:
    reporter = begin_attempt(tmp_path, 1)
    reporter.started()
    reporter.close()
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{"seq": 2, "ev')
    close(tmp_path, 1)
    assert [event for _, _, event in shown(tmp_path)] == ["started", "log", "failed"]


def test_the_doorbell_rings_with_the_runs_id_after_a_write(tmp_path: Path) -> None:
    address = str(tmp_path / "bell.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bell:
        bell.bind(address)
        bell.settimeout(30)
        log = EventLog(tmp_path / "events.jsonl", run_id="r-7", doorbell=address)
        log.append(lambda seq: b'{"seq": %d, "run_id": "r-7", "attempt": 1}\n' % seq)
        assert bell.recv(100) == b"r-7"
        assert b'"seq": 1' in (tmp_path / "events.jsonl").read_bytes(), "it rang before the line was there"
        log.close()


def test_a_doorbell_that_nobody_hears_changes_nothing(tmp_path: Path) -> None:
    address = str(tmp_path / "bell.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bell:
        bell.bind(address)  # never read: its queue fills up
        log = EventLog(tmp_path / "events.jsonl", run_id="r", doorbell=address)
        for _ in range(3000):
            log.append(lambda seq: b'{"seq": %d, "run_id": "r", "attempt": 1}\n' % seq)
            log.flush()
    Path(address).unlink()
    log.append(lambda seq: b'{"seq": %d, "run_id": "r", "attempt": 1}\n' % seq)
    log.close()
    assert len((tmp_path / "events.jsonl").read_bytes().splitlines()) == 3001
    too_long = EventLog(tmp_path / "other.jsonl", run_id="r", doorbell="/" + "x" * 300)
    too_long.append(lambda seq: b"{}\n")
    too_long.close()
    assert (tmp_path / "other.jsonl").read_bytes() == b"{}\n"


def test_the_environment_gives_attempt_doorbell_and_base_folder(tmp_path: Path) -> None:
    environ = {"TRAINER_JOB_SPEC_PATH": str(tmp_path / "job.json")}
    bare = read_environment(environ)
    assert (bare.attempt, bare.doorbell, bare.job_dir) == (None, None, tmp_path)
    assert bare.resume_hint("r") == "run the job again to resume"
    given = {"TRAINER_ATTEMPT": "4", "TRAINER_DOORBELL": "/bell", "TRAINER_BASE_DIR": "/data"}
    full = read_environment({**environ, **given})
    assert (full.attempt, full.doorbell, full.job_dir) == (4, "/bell", Path("/data"))
    assert full.resume_hint("r") == "`trn resume r` resumes"
    for text in ("0", "-1", "x", "1.5", "²"):
        with pytest.raises(SpecError, match="TRAINER_ATTEMPT"):
            read_environment({**environ, "TRAINER_ATTEMPT": text})


def test_processes_that_never_began_get_the_end_of_the_attempt_they_were_to_be(tmp_path: Path) -> None:
    reporter = begin_attempt(tmp_path, 1)
    reporter.started()  # and died: its number is not theirs
    reporter.close()
    environ = {"TRAINER_JOB_SPEC_PATH": str(tmp_path / "job.json"), "TRAINER_ARTIFACTS_DIR": str(tmp_path)}
    places = {"TRAINER_EVENTS_PATH": str(tmp_path / "events.jsonl"), "TRAINER_ATTEMPT": "2"}
    environment = read_environment({**environ, **places})
    job = TrainingJobSpec(run_id="r", trainer="a:B", max_steps=1)
    for _ in range(2):
        report_missing_end(environment, job, TrainStepError("none came"), str, is_continued=True)
    assert shown(tmp_path) == [(1, 1, "started"), (2, 2, "started"), (3, 2, "failed")]
