"""A disk that is really full, on a file system of a few megabytes."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from worker_process import TRAINERS, Run

from gen_worker.errors import ExitCode
from gen_worker.trainer.checkpoints.store import CheckpointStore


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_full_disk_ends_the_attempt_in_words_and_what_was_saved_goes_on(
    small_disk: Path, tmp_path: Path
) -> None:
    run = Run(
        small_disk / "run",
        mock_batches=list(range(1, 21)),
        metric_every=1,
        checkpoint_every=1,
        checkpoints={"keep_last": 0},
        hyperparams={"size": 100_000},  # 0.8 MB a checkpoint
    )
    done = run.work()
    assert done.returncode == 14, done.stderr
    failed = run.events()[-1]
    assert (failed["event"], failed["category"]) == ("failed", "train-step")
    assert "space" in failed["error"]
    run.check_invariants()
    newest, _ = CheckpointStore(run.checkpoints).newest_verified()
    assert newest is not None
    run.job["checkpoints"] = {"keep_last": 1, "keep_best": 0}
    for path in sorted(run.checkpoints.glob("step-*"))[:-2]:
        path.unlink()  # the operator makes room
    done = run.work()
    assert done.returncode == 0, done.stderr
    assert run.losses()[20] == sum(range(1, 21))


def test_the_terminal_event_is_written_even_when_nothing_else_fits(small_disk: Path) -> None:
    run = Run(
        small_disk / "run",
        mock_batches=[1, 2, 3],
        metric_every=1,
        checkpoint_every=0,
        hyperparams={"size": 500_000},  # 4 MB: never fits
    )
    done = run.work()
    assert done.returncode == 14, done.stderr
    assert run.events()[-1]["event"] == "failed"
    run.check_invariants()


def test_a_worker_that_finds_no_room_at_all_says_so_by_its_exit_code(small_disk: Path) -> None:
    """Its log is on that disk, too: not even the error can be written."""
    run = Run(small_disk / "run", mock_batches=[1, 2, 3])
    command, environ = run.command()
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\0" * 4096)
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, env=environ, cwd=run.folder, stdout=full, stderr=full, check=False)
    assert done.returncode == ExitCode.DISK_FULL
    ballast.unlink()
    assert run.work().returncode == 0


FILLS_THE_DISK = """
import contextlib, errno
from pathlib import Path
from counting import Counting

class FillsTheDisk(Counting):
    def train_step(self, batch, state, ctx):
        disk = Path(self.options["disk"])
        for reserve in disk.rglob("*.reserve"):
            reserve.unlink()
        with (disk / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        raise OSError(errno.ENOSPC, "x" * 9000)  # no line that fits into the last page of the event file
"""


def test_a_worker_without_room_for_its_terminal_event_says_why_by_its_exit_code(
    small_disk: Path, tmp_path: Path
) -> None:
    (tmp_path / "filling.py").write_text(FILLS_THE_DISK)
    run = Run(
        small_disk / "run",
        trainer="filling:FillsTheDisk",
        mock_batches=[1, 2, 3],
        hyperparams={"disk": str(small_disk)},
    )
    done = run.work(PYTHONPATH=f"{TRAINERS}:{tmp_path}")
    *whole, rest = run.events_path.read_bytes().split(b"\n")
    assert b'"started"' in whole[0]
    assert rest == b"", "half a line is cut off"
    assert not any(b'"failed"' in line for line in whole)
    assert done.returncode == ExitCode.DISK_FULL


@pytest.mark.parametrize("program", ["trn.daemon", "trn.gateway"])
def test_a_program_that_cannot_say_why_it_does_not_start_ends_with_its_own_exit_code(
    program: str, tmp_path: Path
) -> None:
    (tmp_path / "settings.toml").write_text("nonsense = 1\n")
    serve = ["serve"] if program == "trn.daemon" else []
    command = [sys.executable, "-m", program, "--home", str(tmp_path), *serve]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    told = subprocess.run(command, env=buffered, capture_output=True, text=True, check=False)
    assert (told.returncode, "nonsense" in told.stderr) == (1, True)
    with Path("/dev/full").open("w") as full:
        untold = subprocess.run(command, env=buffered, stdout=full, stderr=full, check=False)
    assert untold.returncode == 1
