"""Running a trainer in a subprocess of its own (`TRAINER_ISOLATED=1`).

This process decodes the parquet files once into an Arrow IPC file and writes the contract; the child maps the batches
without a copy and does everything else: lease, events, checkpoints, terminal event. A crash in the author's native
code then takes the child, and this process lives to write the terminal event that the child could not.
"""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.contract.process_identity import is_process_alive
from gen_worker.contract.subprocess_contract import TrainerSubprocessContractV1, write_subprocess_contract
from gen_worker.errors import (
    EXIT_CODE_BY_CATEGORY,
    ExitCode,
    PluginError,
    TrainingCanceled,
    TrainStepError,
    WorkerError,
)
from gen_worker.trainer.api import NO_TRAINER
from gen_worker.trainer.attempt.child_attempt import ChildAttemptError, Redact, report_missing_end
from gen_worker.trainer.attempt.data_sources import local_paths
from gen_worker.trainer.attempt.runtime_env import WorkerEnvironment

logger = logging.getLogger("gen_worker.isolation")


def run_isolated(
    environment: WorkerEnvironment,
    job: TrainingJobSpec,
    *,
    token: str | None,
    redact: Redact,
    early_signals: Sequence[int] = (),
) -> int:
    """Hand over, wait, and end as the child ended: 0, or an error of the child's category."""
    folder = environment.events_path.parent
    folder.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder)
    signals = _SignalRelay(early_signals)
    with ExitStack() as stack, signals:
        try:
            contract_path = _hand_over(environment, job, folder, stack)
            signals.raise_if_asked()
        except WorkerError as cause:  # no child was started: this process is the attempt
            report_missing_end(environment, job, cause, redact, is_continued=False)
            raise
        code = _run_child(contract_path, token, signals)
    return _judge(code, environment, job, redact)


def _hand_over(environment: WorkerEnvironment, job: TrainingJobSpec, folder: Path, stack: ExitStack) -> Path:
    arrow_path = _decode_batches(environment, job, folder, stack)
    contract_path = folder / f"contract-{os.getpid()}.json"
    stack.callback(contract_path.unlink, missing_ok=True)
    trainer = environment.plugin or job.trainer
    if trainer is None:
        raise PluginError(NO_TRAINER)
    contract = TrainerSubprocessContractV1(
        trainer_plugin=trainer,
        job_spec_path=str(environment.job_spec_path),
        arrow_ipc_path=None if arrow_path is None else str(arrow_path),
        checkpoints_dir=str(environment.checkpoints_dir),
        samples_dir=str(environment.samples_dir),
        events_path=str(environment.events_path),
    )
    return write_subprocess_contract(contract_path, contract)


def _decode_batches(
    environment: WorkerEnvironment, job: TrainingJobSpec, folder: Path, stack: ExitStack
) -> Path | None:
    if job.dataset is None or not job.dataset.parquet_paths:
        return None
    from gen_worker.trainer.arrow_feed import ArrowFeed

    path = folder / f"batches-{os.getpid()}.arrow"
    stack.callback(path.unlink, missing_ok=True)
    paths = local_paths(environment, job.dataset)
    with ArrowFeed.open(paths, batch_size=job.dataset.batch_size, columns=job.dataset.columns) as feed:
        feed.write_ipc(path)
    return path


def _remove_leftovers(folder: Path) -> None:
    """What a parent that was killed could not remove: a whole data set, perhaps."""
    for path in [*folder.glob("batches-*.arrow"), *folder.glob("contract-*.json")]:
        pid = path.stem.rpartition("-")[2]
        if pid.isdigit() and not is_process_alive(int(pid)):
            path.unlink(missing_ok=True)


class _SignalRelay:
    """From its start, SIGTERM and SIGINT reach the child, or are kept until there is one."""

    def __init__(self, early_signals: Sequence[int]) -> None:
        self.child: subprocess.Popen[bytes] | None = None
        self._early = early_signals  # that came before there was a relay; it may still grow
        self._asked: int | None = None
        self._old: dict[int, Any] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._old[number] = signal.signal(number, self._relay)
        if self._early and self._asked is None:
            self._asked = self._early[0]

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _relay(self, number: int, _frame: FrameType | None) -> None:
        self._asked = number
        if self.child is not None:
            self.child.send_signal(number)

    def raise_if_asked(self) -> None:
        if self._asked is not None:
            raise TrainingCanceled(f"cancelled by {signal.Signals(self._asked).name}")

    def attach(self, child: "subprocess.Popen[bytes]") -> None:
        self.child = child
        if self._asked is not None:
            child.send_signal(self._asked)


def _run_child(contract_path: Path, token: str | None, signals: _SignalRelay) -> int:
    environ = {**os.environ, "WORKER_MODE": "trainer", "TRAINER_CONTRACT_PATH": str(contract_path)}
    environ.pop("TRAINER_ISOLATED", None)
    if token is not None:
        environ["TRAINER_CAPABILITY_TOKEN"] = token
    # A session of its own, so that a Ctrl-C at the terminal reaches the child once, through us.
    child = subprocess.Popen(
        [sys.executable, "-m", "gen_worker.entrypoint"], env=environ, start_new_session=True
    )
    signals.attach(child)
    return child.wait()


def _judge(code: int, environment: WorkerEnvironment, job: TrainingJobSpec, redact: Redact) -> int:
    if code == ExitCode.COMPLETED:
        return 0
    for category, known in EXIT_CODE_BY_CATEGORY.items():
        if code == known:
            raise ChildAttemptError(
                category, f"the trainer's process ended with exit code {code} ({category})"
            )
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    hint = "" if environment.doorbell else ": run the job again to go on"  # a daemon says what follows
    cause = TrainStepError(f"the trainer's process {how}; the newest checkpoint stands{hint}")
    report_missing_end(environment, job, cause, redact, is_continued=True)
    raise cause
