"""Can a worker load the code that a job names? Asked before the run is queued, in a process that does nothing else.

`python -m gen_worker.launcher.import_check` reads a job from stdin and writes its faults as JSON on stdout: for an
interpreter that no launcher has warm.
"""

import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from gen_worker.contract.job.rules import parse_job_spec
from gen_worker.errors import WorkerError
from gen_worker.trainer.api import find_job_faults, load_trainer_plugin
from gen_worker.trainer.callbacks.callback_list import load_callback
from gen_worker.trainer.contracts import TrainerPlugin
from gen_worker.trainer.sources.opening import find_source
from gen_worker.trainer.steps.evaluation import require_hook


def find_import_faults(config: dict[str, Any]) -> list[str]:
    """Load trainer class, callbacks and data sources as a worker would, with the job's `env`, and let the class check
    the job, the runner also its data; what they would say of each, with the field that it is about.

    Changes this process's environment and runs the author's modules.
    """
    job = parse_job_spec(config, source="the job")
    os.environ.update(job.env)

    faults: list[str] = []
    trainer: TrainerPlugin | None = None
    try:
        trainer = load_trainer_plugin(job.trainer or "")
        faults += find_job_faults(trainer, job)
        if job.validation is not None and job.validate_every:
            require_hook(trainer, "validation")
        if job.test is not None:
            require_hook(trainer, "test")
    except WorkerError as fault:
        faults.append(f"trainer: {str(fault).removeprefix('trainer ')}")
    for number, ref in enumerate(job.callbacks):
        try:
            load_callback(ref, f"callbacks[{number}]")
        except WorkerError as fault:
            faults.append(str(fault))
    if trainer is not None and not faults and (find := getattr(trainer, "find_start_faults", None)):
        faults += find(job, Path(os.environ.get("TRAINER_BASE_DIR") or Path.cwd()))
    datasets = {
        "dataset": job.dataset,
        "validation.dataset": job.validation and job.validation.dataset,
        "test.dataset": job.test and job.test.dataset,
    }
    for field, dataset in datasets.items():
        if dataset and dataset.source:
            try:
                find_source(dataset.source, dataset.args, field=field)
            except WorkerError as fault:
                faults.append(str(fault))
    return faults


def main() -> NoReturn:
    answer_fd = os.dup(1)
    os.dup2(2, 1)  # what the author's modules print is not the answer
    answer = msgspec.json.encode(find_import_faults(msgspec.json.decode(sys.stdin.buffer.read())))
    os.write(answer_fd, answer)
    os._exit(0)  # nobody waits for the threads of the author's modules


if __name__ == "__main__":
    main()
