"""From `kill -9` of a worker to the next step that is committed: under the daemon, and under torchrun.

Both train the same small model, one process, a checkpoint every ten steps, and resume from the newest.
"""

import atexit
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from daemon_session import DEADLINE_S, POLL_S, Session, end_everything
from harness import HERE, Prepare, Round, Sample, serve

CHECKPOINT_EVERY = 10


def killed_run(options: Mapping[str, Any]) -> Round:
    """One run under the daemon, with no setting for retries."""
    session = Session(Path(options["home"]))
    session.warm()
    clock = session.folder / "steps"
    job = session.daemon.job(
        "daemon_torch_trainer:Recovering",
        dataset={"generated": True},
        max_steps=10_000_000,
        checkpoint_every=CHECKPOINT_EVERY,
        hyperparams={"clock": str(clock)},
    )
    run_id = session.run(session.daemon.submit(session.client, job))
    saved = session.daemon.home.run(run_id).checkpoints
    return _kill_again_and_again(clock, lambda: {path.name for path in saved.glob("step-*.meta.json")})


def killed_torchrun(options: Mapping[str, Any]) -> Round:
    """One gloo process under torchrun, which restarts it."""
    folder = Path(options["home"])
    folder.mkdir(parents=True)
    clock, saved = folder / "steps", folder / "checkpoint.pt"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--max-restarts", "1000"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
        *(str(HERE / "daemon_recovery_script.py"), str(clock), str(saved), str(CHECKPOINT_EVERY)),
    ]
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    atexit.register(end_everything, folder)
    atexit.register(process.kill)
    return _kill_again_and_again(clock, lambda: {str(saved.stat().st_mtime_ns)} if saved.exists() else set())


def _kill_again_and_again(clock: Path, saved: Callable[[], set[str]]) -> Round:
    def kill() -> Sample:
        known = saved()
        pid = _wait_for_step(clock, after=None)[0]
        _wait_until(lambda: not saved() <= known)  # a kill without progress would be waited after
        killed = time.monotonic_ns()
        os.kill(pid, signal.SIGKILL)
        began = _wait_for_step(clock, after=pid)[2]
        return {"ms": (began - killed) / 1e6}

    kill()  # page cache
    return kill


def _wait_for_step(clock: Path, *, after: int | None) -> tuple[int, int, int]:
    """(pid, step, when) of the newest step; with `after`, of the first step of the process that follows it."""
    found: list[tuple[int, int, int]] = []

    def look() -> bool:
        lines = clock.read_bytes().split(b"\n")[:-1] if clock.exists() else []
        steps = [(int(pid), int(step), int(at)) for pid, step, at in map(bytes.split, lines)]
        if after is not None:
            known = max(index for index, item in enumerate(steps) if item[0] == after)
            steps = steps[known + 1 :]
        found[:] = steps
        return bool(steps)

    _wait_until(look)
    return found[-1] if after is None else found[0]


def _wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_true():
        if time.monotonic() > deadline:
            raise TimeoutError("it did not train on")
        time.sleep(POLL_S)


SIDES: dict[str, Prepare] = {"killed_run": killed_run, "killed_torchrun": killed_torchrun}

if __name__ == "__main__":
    serve(SIDES)
