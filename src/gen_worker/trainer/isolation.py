"""Running a trainer in a subprocess of its own (`TRAINER_ISOLATED=1`).

This process decodes the parquet files once into an Arrow IPC file and writes the contract; the child maps the batches
without a copy and does everything else: lease, events, checkpoints, terminal event. A crash in the author's native
code then takes the child, and this process lives to tell how it ended.
"""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

from gen_worker.errors import EXIT_CODE_BY_CATEGORY, Category, TrainStepError, WorkerError
from gen_worker.trainer.contracts import TrainingJobSpec
from gen_worker.trainer.runtime_env import WorkerEnvironment
from gen_worker.trainer.subprocess_contract import TrainerSubprocessContractV1, write_subprocess_contract

logger = logging.getLogger("gen_worker.isolation")


class IsolatedTrainerError(WorkerError):
    """The child ended with a category of its own; its terminal event has the reason."""

    def __init__(self, category: Category, message: str) -> None:
        super().__init__(message)
        self.category = category


def run_isolated(environment: WorkerEnvironment, job: TrainingJobSpec, *, token: str | None) -> int:
    """Hand over, wait, and end as the child ended: 0, or an error of the child's category."""
    folder = environment.events_path.parent
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        arrow_path = _hand_over_batches(environment, job, folder, stack)
        contract_path = folder / f"contract-{os.getpid()}.json"
        stack.callback(contract_path.unlink, missing_ok=True)
        write_subprocess_contract(
            TrainerSubprocessContractV1(
                trainer_plugin=environment.plugin or job.trainer or "",
                job_spec_path=str(environment.job_spec_path),
                arrow_ipc_path=None if arrow_path is None else str(arrow_path),
                checkpoints_dir=str(environment.checkpoints_dir),
                samples_dir=str(environment.samples_dir),
                events_path=str(environment.events_path),
            ),
            contract_path,
        )
        code = _run_child(contract_path, token)
    return _judge(code)


def _hand_over_batches(
    environment: WorkerEnvironment, job: TrainingJobSpec, folder: Path, stack: ExitStack
) -> Path | None:
    if job.dataset is None or not job.dataset.parquet_paths:
        return None
    from gen_worker.trainer.arrow_feed import ArrowFeed

    path = folder / f"batches-{os.getpid()}.arrow"
    stack.callback(path.unlink, missing_ok=True)
    base = environment.job_spec_path.parent
    paths = [str(base / item) for item in job.dataset.parquet_paths]
    with ArrowFeed.open(paths, batch_size=job.dataset.batch_size, columns=job.dataset.columns) as feed:
        feed.write_ipc(path)
    return path


def _run_child(contract_path: Path, token: str | None) -> int:
    environ = {**os.environ, "WORKER_MODE": "trainer", "TRAINER_CONTRACT_PATH": str(contract_path)}
    environ.pop("TRAINER_ISOLATED", None)
    if token is not None:
        environ["TRAINER_CAPABILITY_TOKEN"] = token
    # A session of its own, so that a Ctrl-C at the terminal reaches the child once, through us.
    child = subprocess.Popen(
        [sys.executable, "-m", "gen_worker.entrypoint"], env=environ, start_new_session=True
    )

    def forward(number: int, _frame: FrameType | None) -> None:
        child.send_signal(number)

    with _signals_to(forward):
        return child.wait()


class _signals_to:  # noqa: N801  (reads as a verb at its one place of use)
    def __init__(self, handler: Callable[[int, FrameType | None], None]) -> None:
        self._handler = handler
        self._old: dict[int, Any] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._old[number] = signal.signal(number, self._handler)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)


def _judge(code: int) -> int:
    if code == 0:
        return 0
    for category, known in EXIT_CODE_BY_CATEGORY.items():
        if code == known:
            raise IsolatedTrainerError(
                category, f"the trainer's process ended with exit code {code} ({category})"
            )
    if code < 0:
        raise TrainStepError(f"the trainer's process was killed by {signal.Signals(-code).name}")
    raise TrainStepError(f"the trainer's process ended with exit code {code}")
