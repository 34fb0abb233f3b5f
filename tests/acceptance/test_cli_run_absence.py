"""Whoever follows a run while its daemon is stopped, or hangs, is told so, and can still cancel it."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import (
    WITNESSED,
    Terminal,
    read_lines,
    read_rest,
    read_until,
    start,
    trn,
    write_job,
)
from daemon_process import end_everything

pytestmark = pytest.mark.usefixtures("without_torch")
STOPPED = "the daemon was stopped; "
INNARDS = ("addresses", "FAILED_PRECONDITION", "python -m", "Traceback")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("absence") / "home"
    yield home
    end_everything(home)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(WITNESSED, tmp_path)
    return tmp_path


def read_words(process: "subprocess.Popen[str]", text: str) -> str:
    """What it said on stderr, up to the line with that text."""
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if text in line:
            return said
    raise AssertionError(f"no {text!r} in {said}")


def test_at_a_terminal_a_stopped_daemon_is_said_at_once_and_a_cancel_starts_another(
    home: Path, folder: Path
) -> None:
    terminal = Terminal(home, "run", "-c", write_job(folder, 3000, step_ms=20))
    terminal.wait_for("/3,000  loss ")
    assert trn(home, "daemon", "stop").returncode == 0
    terminal.wait_for(f"{STOPPED}the run continues meanwhile; `trn daemon start`")
    terminal.press(b"\x03")
    terminal.wait_for("(Enter)?")
    terminal.press(b"c")
    terminal.wait_for("as soon as a daemon answers")
    code, seen = terminal.end()
    assert (code, "cancelled at step" in seen) == (8, True), seen
    assert not any(word in seen for word in INNARDS), seen


def test_in_a_pipe_a_stopped_daemon_is_said_once_and_ctrl_c_still_cancels(home: Path, folder: Path) -> None:
    process = start(home, "run", "-c", write_job(folder, 3000, step_ms=20))
    read_until(process, "metric")
    assert trn(home, "daemon", "stop").returncode == 0
    said = read_words(process, STOPPED)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    lines = [json.loads(line) for line in process.stdout]
    assert process.stderr is not None
    said += process.stderr.read()
    read_rest(process)
    assert (process.returncode, lines[-1]["event"]) == (8, "job_cancelled")
    assert said.count(STOPPED) == 1
    assert not any(word in said for word in INNARDS), said


def test_a_cancel_that_no_daemon_can_record_is_said_to_be_none(home: Path, folder: Path) -> None:
    process = start(home, "run", "-c", write_job(folder, 3000, step_ms=20))
    run_id = read_until(process, "metric")[0]["run_id"]
    assert trn(home, "daemon", "stop").returncode == 0
    read_words(process, STOPPED)
    (home / "settings.toml").write_text("of no = daemon\n")  # the next one refuses to start
    process.send_signal(signal.SIGINT)
    said = read_words(process, f"to cancel it: trn cancel {run_id}")
    assert f"{run_id} continues and is not cancelled" in said
    assert "settings.toml" in said
    read_rest(process)
    assert process.returncode == 5
    (home / "settings.toml").unlink()
    (line,) = read_lines(trn(home, "cancel", run_id))
    assert line["was_live"] is True
    assert trn(home, "wait", run_id).returncode == 8


def test_a_daemon_that_hangs_is_named_and_not_said_to_be_absent(home: Path, folder: Path) -> None:
    assert trn(home, "daemon", "start").returncode == 0
    pid = json.loads((home / "daemon.json").read_text())["pid"]
    os.kill(pid, signal.SIGSTOP)
    what = f"the daemon, pid {pid}, is suspended"
    try:
        refused = trn(home, "run", "-c", write_job(folder))
        code, seen = Terminal(home, "daemon", "status").end()
    finally:
        stopped = trn(home, "daemon", "stop")  # wakes it to hear that
    assert refused.returncode == code == 5
    assert what in refused.stderr
    assert f"`kill -CONT {pid}` resumes it; runs continue meanwhile" in refused.stderr
    assert "starts one" not in refused.stderr
    assert not any(word in refused.stderr for word in INNARDS), refused.stderr
    assert f"silent: {what}; runs continue meanwhile" in seen
    assert "no daemon" not in seen
    assert stopped.returncode == 0, stopped
