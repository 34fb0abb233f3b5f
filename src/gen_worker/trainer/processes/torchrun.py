"""A run of several processes on this machine, started by torchrun.

This process starts torchrun, relays signals to rank 0, and judges the end. Rank 0 does what a worker does: lease,
events, checkpoints, and the terminal event of every end that all processes agreed on. When a process fails, this one
writes the terminal event: only it knows which process failed first.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.contract.process_identity import is_process_alive, start_ticks
from gen_worker.errors import Category, LeaseHeldError, TrainStepError
from gen_worker.trainer.attempt.child_attempt import (
    ChildAttemptError,
    Redact,
    SignalRelay,
    report_missing_end,
)
from gen_worker.trainer.attempt.runtime_env import WorkerEnvironment
from gen_worker.trainer.processes.outcome import (
    choose_root,
    read_agent_failures,
    read_living,
    read_main,
    read_outcomes,
)

POLL_S = 0.05
KILL_PATIENCE_S = 10.0


def build_command(num_processes: int) -> list[str]:
    return [
        sys.executable,
        "-m",
        "gen_worker.trainer.processes.agent",
        "--standalone",
        f"--nproc-per-node={num_processes}",
        "--max-restarts=0",
        "--monitor-interval=0.1",
        "--module",
        "gen_worker.entrypoint",
    ]


def run_processes(
    environment: WorkerEnvironment,
    job: TrainingJobSpec,
    *,
    token: str | None,
    redact: Redact,
    early_signals: Sequence[int] = (),
) -> int:
    """Run to the end: returns 0, or raises an error of the run's category."""
    folder = environment.events_path.parent / f"processes-{os.getpid()}"
    _remove_leftovers(folder)
    folder.mkdir(parents=True)
    try:
        with SignalRelay(early_signals) as relay:
            relay.send = partial(_send_to_main, folder)
            code = _run_torchrun(folder, job.resources.processes, token, relay)
            _end_survivors(folder, relay, grace_s=job.grace_s)
        return _judge(code, folder, environment, job, redact)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    """Folders of killed processes, and of an earlier one with this pid."""
    for other in folder.parent.glob("processes-*"):
        pid = other.name.rpartition("-")[2]
        if other == folder or (pid.isdigit() and not is_process_alive(int(pid))):
            shutil.rmtree(other, ignore_errors=True)


def _run_torchrun(folder: Path, num_processes: int, token: str | None, relay: SignalRelay) -> int:
    pid = os.getpid()
    environ = {
        "OMP_NUM_THREADS": str(_threads_each(num_processes)),
        **os.environ,
        "WORKER_MODE": "trainer",
        "GEN_WORKER_OUTCOME_DIR": str(folder),
        "GEN_WORKER_PARENT": f"{pid}:{start_ticks(pid) or ''}",
    }
    environ.pop("TRAINER_ISOLATED", None)  # they are processes of their own already
    if token is not None:
        environ["TRAINER_CAPABILITY_TOKEN"] = token
    # A session of its own: a Ctrl-C at the terminal reaches the run once, through the relay.
    torchrun = subprocess.Popen(build_command(num_processes), env=environ, start_new_session=True)
    try:
        while True:
            try:
                return torchrun.wait(POLL_S)
            except subprocess.TimeoutExpired:
                relay.pass_on()
    finally:
        if torchrun.poll() is None:
            torchrun.kill()
            torchrun.wait()


def _end_survivors(folder: Path, relay: SignalRelay, *, grace_s: float) -> None:
    """Stop processes that are left because torchrun was killed: SIGTERM, a grace period to save, SIGKILL."""
    for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILL_PATIENCE_S)):
        for pid in read_living(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + patience_s
        while read_living(folder) and time.monotonic() < deadline:
            relay.pass_on()
            time.sleep(POLL_S)


def _threads_each(num_processes: int) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // num_processes)


def _send_to_main(folder: Path, number: int) -> bool:
    """False while the run's main process has not started, or has exited."""
    main = read_main(folder)
    if main is None:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(main, number)
    return True


def _judge(
    code: int, folder: Path, environment: WorkerEnvironment, job: TrainingJobSpec, redact: Redact
) -> int:
    outcomes = read_outcomes(folder)
    main = outcomes.get(0)
    if main is not None and main.category is None and code == 0:
        return 0
    if main is not None and main.category is not None and main.is_agreed:
        raise ChildAttemptError(main.category, main.error)  # the terminal event is written
    root = choose_root(outcomes, read_agent_failures(folder))
    if root is None:
        cause: ChildAttemptError | TrainStepError = TrainStepError(
            f"torchrun exited with code {code}; no process reported an error"
        )
    else:
        text = f"process {root.rank} of {job.resources.processes}{' ' if root.is_exit else ': '}{root.error}"
        cause = ChildAttemptError(Category(root.category), text, root.cause)
    with contextlib.suppress(LeaseHeldError):  # then the run is another worker's, and so is its event file
        report_missing_end(environment, job, cause, redact, is_continued=True)
    raise cause
