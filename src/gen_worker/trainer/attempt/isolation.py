"""Running a trainer in a subprocess of its own (`TRAINER_ISOLATED=1`).

This process decodes the parquet files once into an Arrow IPC file and writes the contract. The child maps the batches
without a copy and does everything else. A crash in native code ends only the child; this process then writes the
terminal event.
"""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.contract.process_identity import is_process_alive
from gen_worker.contract.subprocess_contract import TrainerSubprocessContractV1, write_subprocess_contract
from gen_worker.errors import (
    EXIT_CODE_BY_CATEGORY,
    ExitCode,
    PluginError,
    TrainStepError,
    WorkerError,
)
from gen_worker.trainer.api import NO_TRAINER
from gen_worker.trainer.attempt.child_attempt import (
    ChildAttemptError,
    Redact,
    SignalRelay,
    report_missing_end,
)
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
    """Start the child and wait: 0, or an error of the child's category."""
    folder = environment.events_path.parent
    folder.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder)
    with ExitStack() as stack, SignalRelay(early_signals) as relay:
        try:
            contract_path = _hand_over(environment, job, folder, stack)
            relay.raise_if_cancelled()
        except WorkerError as cause:  # no child was started: this process is the attempt
            report_missing_end(environment, job, cause, redact, is_continued=False)
            raise
        code = _run_child(contract_path, token, relay)
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
    """Files of a parent that was killed; one may be a whole dataset."""
    for path in [*folder.glob("batches-*.arrow"), *folder.glob("contract-*.json")]:
        pid = path.stem.rpartition("-")[2]
        if pid.isdigit() and not is_process_alive(int(pid)):
            path.unlink(missing_ok=True)


def _run_child(contract_path: Path, token: str | None, relay: SignalRelay) -> int:
    environ = {**os.environ, "WORKER_MODE": "trainer", "TRAINER_CONTRACT_PATH": str(contract_path)}
    environ.pop("TRAINER_ISOLATED", None)
    if token is not None:
        environ["TRAINER_CAPABILITY_TOKEN"] = token
    # A session of its own, so that a Ctrl-C at the terminal reaches the child once, through us.
    child = subprocess.Popen(
        [sys.executable, "-m", "gen_worker.entrypoint"], env=environ, start_new_session=True
    )

    def send(number: int) -> bool:
        child.send_signal(number)
        return True

    relay.send = send
    relay.pass_on()
    return child.wait()


def _judge(code: int, environment: WorkerEnvironment, job: TrainingJobSpec, redact: Redact) -> int:
    if code == ExitCode.COMPLETED:
        return 0
    for category, known in EXIT_CODE_BY_CATEGORY.items():
        if code == known:
            raise ChildAttemptError(category, f"the trainer process exited with code {code} ({category})")
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    hint = "" if environment.doorbell else ": run the job again to resume from it"  # a daemon has its own
    cause = TrainStepError(f"the trainer process {how}; the newest checkpoint is kept{hint}")
    report_missing_end(environment, job, cause, redact, is_continued=True)
    raise cause
