"""`trn run` where the world is against it: no room, no right to write, another daemon's version, kill -9, ten at once."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from command_line import (
    DEADLINE_S,
    TRN,
    WITNESSED,
    Terminal,
    environ,
    losses,
    read_lines,
    read_rest,
    read_until,
    seqs,
    start,
    trn,
    write_job,
)
from daemon_process import end_everything

from trn.core.version import VERSION

pytestmark = pytest.mark.usefixtures("without_torch")
# Root may read and write everywhere; without two of its powers it may not.
BOUND = (
    "import ctypes, os, sys; [ctypes.CDLL(None).prctl(24, power, 0, 0, 0) for power in (1, 2)];"
    " os.execv(sys.argv[1], sys.argv[1:])"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(WITNESSED, tmp_path)
    return tmp_path


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """Not there yet."""
    yield tmp_path / "home"
    end_everything(tmp_path / "home")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    if mounted.returncode != 0:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    (disk / "home").mkdir()
    (disk / "home" / "settings.toml").write_text("min_free_bytes = 1000000\n")
    yield disk
    end_everything(disk / "home")
    subprocess.run(["umount", "--lazy", str(disk)], check=True, timeout=DEADLINE_S)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\0" * 4096)


def without_powers(home: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """`trn` as somebody whom permissions bind."""
    return subprocess.run(
        [sys.executable, "-c", BOUND, TRN, *map(str, words)],
        env=environ(home),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def test_a_full_disk_is_said_in_words_and_after_there_is_room_everything_goes_on(
    small_disk: Path, folder: Path
) -> None:
    home = small_disk / "home"
    before = read_lines(trn(home, "run", "-c", write_job(folder, 3, seed=1)))[-1]
    assert before["event"] == "job_completed"

    def waits(job: Path) -> bool:
        """As long as there is room for code and registry a submit is kept, and waits; then it is refused."""
        done = trn(home, "run", "--detach", "--another", "-c", job)
        assert "Traceback" not in done.stderr
        if done.returncode != 0:
            assert (done.returncode, "space" in done.stderr or "full" in done.stderr) == (5, True), done
        else:
            assert f"{home} has " in done.stderr, "that the disk is full is said"
        return done.returncode == 0

    fill(small_disk / "filler")
    # Of a job like the one before it is known how large its checkpoints are: it is refused. Others may need none.
    same = trn(home, "run", "--no-snapshot", "-c", write_job(folder, 3, seed=2))
    assert (same.returncode, "checkpoints: the run needs room for" in same.stderr) == (3, True), same
    kept = sum(waits(write_job(folder, 3, hyperparams={"other": 1})) for _ in range(3))
    assert trn(home, "daemon", "stop").returncode == 0
    last = write_job(folder, 3, hyperparams={"other": 2})
    refused = trn(home, "run", "-c", last)
    assert refused.returncode == 5
    # The daemon that will not start is quoted, where there is room for its words.
    assert re.search(r" free, (but 1 MB are required|too little even for an error message)", refused.stderr)
    assert "Traceback" not in refused.stderr

    (small_disk / "filler").unlink()
    after = read_lines(trn(home, "run", "-c", last))
    assert after[-1]["event"] == "job_completed"
    listed = {line["run_id"]: line["state"] for line in read_lines(trn(home, "list"))}
    assert len(listed) == 2 + kept
    assert listed[before["run_id"]] == "COMPLETED"
    for run_id in listed:
        assert trn(home, "wait", run_id).returncode == 0


def test_a_home_that_cannot_be_written_is_refused_and_can_still_be_looked_at(
    small_disk: Path, folder: Path
) -> None:
    home = small_disk / "home"
    ended = read_lines(trn(home, "run", "-c", write_job(folder, 3)))[-1]
    assert trn(home, "daemon", "stop").returncode == 0
    end_everything(home)
    remount = ["mount", "-o", "remount,ro", str(small_disk)]
    done = subprocess.run(remount, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    if done.returncode != 0:
        pytest.skip(f"a file system cannot be made read-only here: {done.stderr.strip()}")
    refused = trn(home, "run", "-c", write_job(folder, 4))
    assert refused.returncode == 5
    assert "Traceback" not in refused.stderr
    assert f"the home {home} cannot be written: Read-only file system; set TRN_HOME" in refused.stderr
    assert read_lines(trn(home, "status", ended["run_id"]))[0]["state"] == "COMPLETED"


def test_a_home_without_the_right_to_write_is_refused_in_words_by_every_verb_that_needs_it(
    home: Path, folder: Path
) -> None:
    job = write_job(folder)
    home.mkdir()
    (home / "daemon-start.lock").touch(mode=0o444)
    for mode, named in ((0o500, f"the home {home}"), (0o700, f"{home / 'daemon-start.lock'} in the home")):
        home.chmod(mode)
        for words in (("daemon", "start"), ("run", "-c", job)):
            refused = without_powers(home, *words)
            assert refused.returncode == 5, refused
            assert "Traceback" not in refused.stderr
            assert f"{named}" in refused.stderr
            assert (
                "cannot be written: Permission denied; give yourself the right to (`chmod -R"
                in refused.stderr
            )
            assert json.loads(refused.stdout.splitlines()[-1])["code"] == "unavailable"
        assert home.stat().st_mode & 0o777 == mode, "what its owner took away is not given back"
    assert without_powers(home, "list").returncode == 0


def test_a_config_that_one_may_not_read_is_refused_in_words(home: Path, folder: Path) -> None:
    job = write_job(folder)
    job.chmod(0)
    done = without_powers(home, "run", "-c", job)
    (line,) = read_lines(done)
    assert (done.returncode, line["event"]) == (3, "job_rejected"), done
    assert "Permission denied" in done.stderr
    assert "Traceback" not in done.stderr
    assert not home.exists()


def test_data_that_is_gone_or_cut_is_refused_by_the_daemon_and_wrong_fields_before_one_is_started(
    home: Path, folder: Path
) -> None:
    (folder / "cut.parquet").write_bytes(b"PAR1 and no more")
    data = {"parquet_paths": ["cut.parquet", "gone.parquet"]}
    job = write_job(
        folder,
        max_steps=3,
        mock_batches=None,
        dataset=data,
        validation={"dataset": {"parquet_paths": ["held-out"]}},
    )
    wrong = trn(home, "run", "-c", job, "--set", "seed=-1")
    (line,) = read_lines(wrong)
    assert (wrong.returncode, [fault["path"] for fault in line["fault_details"]]) == (3, ["seed"])
    assert not home.exists()
    trained = ["dataset.parquet_paths[1]", "validation.dataset.parquet_paths[0]", "dataset.parquet_paths[0]"]
    for more in ((), ("--dry-run",), ("--set", "seed=-1")):
        done = trn(home, "run", "-c", job, *more)
        (line,) = read_lines(done)
        assert (done.returncode, line["event"], line["code"]) == (3, "job_rejected", "invalid")
        paths = [fault["path"] for fault in line["fault_details"]]
        assert paths == (["seed", *trained] if "seed=-1" in more else trained)
        assert line["faults"] == [fault["text"] for fault in line["fault_details"]]
        for part in ("truncated", "no such file or folder"):
            assert part in done.stderr
    assert read_lines(trn(home, "list")) == []


def test_a_daemon_of_another_version_is_named_and_the_run_goes_through(home: Path, folder: Path) -> None:
    assert version("trn") == VERSION
    assert trn(home, "daemon", "start").returncode == 0
    info = home / "daemon.json"
    info.write_text(info.read_text().replace(f'"{VERSION}"', '"0.0.9"'))
    done = trn(home, "run", "-c", write_job(folder))
    assert (done.returncode, read_lines(done)[-1]["event"]) == (0, "job_completed")
    assert f"the daemon is trn 0.0.9 and this is trn {VERSION}: `trn daemon stop`" in done.stderr


def test_kill_9_of_the_command_leaves_the_run_and_watch_picks_it_up(home: Path, folder: Path) -> None:
    process = start(home, "run", "-c", write_job(folder, 60, step_ms=30))
    run_id = read_until(process, "metric")[0]["run_id"]
    process.kill()
    read_rest(process)
    assert process.returncode == -signal.SIGKILL
    done = trn(home, "watch", run_id)
    lines = read_lines(done)
    assert (done.returncode, lines[-1]["event"], lines[-1]["attempt"]) == (0, "job_completed", 1)
    assert seqs(lines) == list(range(1, max(seqs(lines)) + 1))
    assert losses(lines)[60] == sum(range(61))


def test_kill_9_of_the_daemon_is_only_a_pause_to_whoever_looks_at_a_terminal(
    home: Path, folder: Path
) -> None:
    terminal = Terminal(home, "run", "-c", write_job(folder, 60, step_ms=50))
    terminal.wait_for("/60  loss ")
    os.kill(json.loads((home / "daemon.json").read_text())["pid"], signal.SIGKILL)
    terminal.wait_for("completed at step 60 of 60")
    code, seen = terminal.end()
    assert (code, "Traceback" in seen) == (0, False), seen


def test_ten_at_once_on_a_fresh_home_get_one_daemon_and_all_their_runs(home: Path, folder: Path) -> None:
    assert not home.exists()
    jobs = []
    for number in range(5):  # each twice: equal ones are one run
        jobs += [write_job(folder, 3, seed=number).rename(folder / f"job-{number}.json")] * 2
    processes = [start(home, "run", "-c", job) for job in jobs]
    ended = [read_rest(process) for process in processes]
    assert [process.returncode for process in processes] == [0] * 10
    assert {lines[-1]["event"] for lines in ended} == {"job_completed"}
    ids = [lines[-1]["run_id"] for lines in ended]
    assert (len(set(ids)), ids[::2]) == (5, ids[1::2])
    assert [lines[0]["existed"] for lines in ended].count(True) == 5
    assert len(read_lines(trn(home, "list"))) == 5
    text = (home / "daemon.log").read_text()
    assert text.count(" serves ") == 1, text
