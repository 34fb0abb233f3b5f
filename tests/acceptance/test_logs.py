"""Logs for machines, written by the real daemon: the client may have left, and the daemon may be killed."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import DEADLINE_S, WITNESSED, read_lines, trn, write_job
from daemon_process import end_everything

from trn.core.home import Home

pytestmark = pytest.mark.usefixtures("without_torch")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    home = Home(tmp_path_factory.mktemp("logs") / "home")
    yield home
    end_everything(home.root)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(WITNESSED, tmp_path)
    return tmp_path


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a log, without repeats."""
    data = path.read_bytes() if path.exists() else b""
    lines = [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]
    return drop_repeats(lines)


def drop_repeats(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    keyed = {
        (line["run_id"], line["event"], line.get("seq", line.get("offset"))): line for line in lines[::-1]
    }
    return list(keyed.values())[::-1]


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def check_day_logs(home: Home, root: Path, run_id: str) -> None:
    """All of the run is there, once and in order."""
    events = [json.loads(line) for line in home.run(run_id).events.read_bytes().splitlines()]
    printed = home.run(run_id).log.read_text().splitlines()

    def lines() -> list[dict[str, Any]]:  # of two files, if it was midnight
        paths = sorted(root.glob(f"*/*/*/{run_id}.log.jsonl"))
        return drop_repeats([line for path in paths for line in read(path)])

    wait_until(lambda: len(lines()) >= len(events) + len(printed))
    assert [line for line in lines() if "seq" in line] == events
    assert [line["message"] for line in lines() if line["event"] == "output"] == printed


def test_lines_are_written_by_the_daemon_also_when_the_client_left_and_a_daemon_was_killed(
    home: Home, folder: Path
) -> None:
    job = write_job(folder, 80, step_ms=30, hyperparams={"flood_bytes": 2048})
    event_log, log_dir = folder / "events" / "all.jsonl", folder / "logs"
    words = ["run", "-c", job, "--log-dir", log_dir, "--event-log", event_log, "--another", "--detach"]
    run_ids = [trn(home.root, *words, "--name", name).stdout.strip() for name in ("one", "two")]
    wait_until(lambda: len(read(event_log)) > 20)
    os.kill(json.loads(home.daemon_info.read_text())["pid"], signal.SIGKILL)
    assert trn(home.root, "daemon", "start").returncode == 0
    for run_id in run_ids:
        assert trn(home.root, "wait", run_id).returncode == 0
    names = {("job_completed", run_id) for run_id in run_ids}
    wait_until(lambda: {(line["event"], line["run_id"]) for line in read(event_log)} >= names)
    for run_id in run_ids:
        ours = [line for line in read(event_log) if line["run_id"] == run_id]
        events = home.run(run_id).events.read_bytes().splitlines()
        assert ours[1:-1] == [json.loads(line) for line in events]
        for root in (home.logs.root, log_dir):
            check_day_logs(home, root, run_id)
            index = [
                line["event"] for line in read(root / "jobs" / "index.jsonl") if line["run_id"] == run_id
            ]
            assert index == ["job_submitted", "job_completed"]
    assert "cannot be" not in home.daemon_log.read_text()


def test_a_path_that_cannot_be_written_is_refused_before_anything_is_queued(home: Home, folder: Path) -> None:
    def faults(*words: object) -> list[tuple[str, str]]:
        done = trn(home.root, "run", "-c", job, *words)
        (line,) = read_lines(done)
        assert (done.returncode, line["event"]) == (3, "job_rejected")
        return [(fault["path"], fault.get("found", "")) for fault in line["fault_details"]]

    job = write_job(folder)
    assert faults("--event-log", folder, "--log-dir", job / "below") == [
        ("log_dir", f"{job}/below"),
        ("event_log", str(folder)),
    ]
    assert faults("--event-log", home.registry) == [("event_log", str(home.registry))]
    assert faults("--log-dir", "/proc/nowhere", "--dry-run") == [("log_dir", "/proc/nowhere")]


def test_an_equal_run_keeps_its_own_places_and_that_is_said(home: Home, folder: Path) -> None:
    job = write_job(folder)
    first, second = folder / "first.jsonl", folder / "second.jsonl"
    done = trn(home.root, "run", "-c", job, "--event-log", first)
    run_id = read_lines(done)[-1]["run_id"]
    again = trn(home.root, "run", "-c", job, "--event-log", second)
    assert read_lines(again)[0]["existed"]
    assert f"{run_id} keeps what it was submitted with: --event-log {first}" in again.stderr
    wait_until(lambda: bool(read(first)) and read(first)[-1]["event"] == "job_completed")
    assert not second.exists()
    status = json.loads(trn(home.root, "status", run_id, "--json").stdout)
    assert status["event_log"] == str(first)
    assert str(first) in status["log_files"]
    assert any(path.endswith(f"/{run_id}.log.jsonl") for path in status["log_files"])


def test_a_resumed_run_has_the_places_that_it_was_given(home: Home, folder: Path) -> None:
    run_id = read_lines(trn(home.root, "run", "-c", write_job(folder, max_steps=3)))[-1]["run_id"]
    event_log = folder / "resumed.jsonl"
    words = ["resume", run_id, "--set", "max_steps=5", "--event-log", event_log]
    done = trn(home.root, *words)
    resumed = read_lines(done)[-1]
    assert (resumed["event"], resumed["parent_run_id"]) == ("job_completed", run_id), done.stderr
    wait_until(lambda: bool(read(event_log)) and read(event_log)[-1]["event"] == "job_completed")
    assert {line["run_id"] for line in read(event_log)} == {resumed["run_id"]}


def test_an_event_log_that_fails_later_is_warned_of_and_does_no_harm(home: Home, folder: Path) -> None:
    place = folder / "place"
    job = write_job(folder, 100, step_ms=20)
    run_id = trn(
        home.root, "run", "-c", job, "--event-log", place / "events.jsonl", "--detach"
    ).stdout.strip()
    wait_until(lambda: len(read(place / "events.jsonl")) > 3)
    written = (place / "events.jsonl").read_bytes()
    place.rename(folder / "away")
    place.write_text("in the way")
    wait_until(lambda: "cannot be written" in trn(home.root, "daemon", "status", "--json").stdout)
    assert trn(home.root, "wait", run_id).returncode == 0
    place.unlink()
    (folder / "away").rename(place)
    wait_until(lambda: read(place / "events.jsonl")[-1]["event"] == "job_completed")
    assert (place / "events.jsonl").read_bytes().startswith(written)
    seqs = [line["seq"] for line in read(place / "events.jsonl") if "seq" in line]
    assert seqs == list(range(1, len(seqs) + 1))


def test_a_daemon_that_trn_started_logs_to_its_log_alone(home: Home) -> None:
    assert trn(home.root, "daemon", "start").returncode == 0
    assert " serves " in home.daemon_log.read_text()
    assert (home.root / "daemon.out").read_text() == ""
