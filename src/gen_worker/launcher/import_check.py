"""Can a worker load the code that a job names, and read its data? Checked before the run is queued, in a process of its own.

`python -m gen_worker.launcher.import_check` reads a job from stdin and writes its faults as JSON on stdout: for an
interpreter that no launcher has warm.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from gen_worker.contract.job.rules import parse_job_spec
from gen_worker.contract.job.spec import PredictionSpec
from gen_worker.errors import Fault, WorkerError
from gen_worker.trainer.api import find_job_faults, load_trainer_plugin
from gen_worker.trainer.callbacks.callback_list import load_callback
from gen_worker.trainer.contracts import TrainerPlugin
from gen_worker.trainer.datasets.index import INDEX_NAME
from gen_worker.trainer.datasets.job_content import is_remote
from gen_worker.trainer.datasets.parquet_paths import expand_parquet_paths
from gen_worker.trainer.sources.opening import find_source
from gen_worker.trainer.steps.evaluation import require_hook

MAX_FOOTERS = 16  # of one path; the worker reads them all


def find_import_faults(config: dict[str, Any]) -> list[Fault]:
    """Load trainer class, callbacks and data sources as a worker would, with the job's `env`; let the class check the
    job, and the runner also its data; read the footers of parquet files that no index describes.

    Changes this process's environment and runs the author's modules.
    """
    job = parse_job_spec(config, source="the job")
    os.environ.update(job.env)
    base_dir = Path(os.environ.get("TRAINER_BASE_DIR") or Path.cwd())
    if job.prediction is not None:
        copied = job.prediction.columns or None  # none: the model says what it reads
        paths = job.prediction.parquet_paths
        return [
            *find_footer_faults("prediction", paths, copied, base_dir),
            *_predict_faults(job.prediction),
        ]

    faults: list[Fault] = []
    trainer: TrainerPlugin | None = None
    try:
        trainer = load_trainer_plugin(job.trainer or "")
        faults += (Fault.of(words, "code") for words in find_job_faults(trainer, job))
        if job.validation is not None and job.validate_every:
            require_hook(trainer, "validation")
        if job.test is not None:
            require_hook(trainer, "test")
    except WorkerError as fault:
        faults.append(Fault(str(fault), path="trainer", kind="code"))
    for number, ref in enumerate(job.callbacks):
        try:
            load_callback(ref, f"callbacks[{number}]")
        except WorkerError as fault:
            faults.append(Fault.of(str(fault), "code"))
    if trainer is not None and not faults and (find := getattr(trainer, "find_start_faults", None)):
        faults += (Fault.of(words, "data") for words in find(job, base_dir))
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
                faults.append(Fault.of(str(fault), "code"))
        elif dataset:
            faults += find_footer_faults(field, dataset.parquet_paths, dataset.columns, base_dir)
    return faults


def _predict_faults(prediction: PredictionSpec) -> Iterator[Fault]:
    """Of the class that is to predict, with the code of the run that saved its checkpoint."""
    if prediction.version is None:
        return
    from gen_worker.inference.model.loading import enter, require_predict

    version = prediction.version
    try:
        enter(version)
        require_predict(load_trainer_plugin(version.trainer), version.trainer)
    except WorkerError as fault:
        yield Fault(str(fault), path="trainer", kind="code")


def find_footer_faults(
    field: str, paths: Sequence[str], columns: Sequence[str] | None, base_dir: Path
) -> Iterator[Fault]:
    """Of the first parquet files: one that is not complete, or lacks a column. Files that are missing are judged before."""
    for number, text in enumerate(paths):
        path = base_dir / text
        folder = path.parent if path.name == INDEX_NAME else path
        if is_remote(text) or (folder / INDEX_NAME).is_file():
            continue
        try:
            from gen_worker.trainer.datasets.schema import column_faults
            from gen_worker.trainer.feed.manifest import read_footer
        except ImportError:  # the worker names what is not installed
            return
        for file in expand_parquet_paths([str(path)], [])[:MAX_FOOTERS]:
            footer = read_footer(file)
            if isinstance(footer, str):
                found = [footer]
            else:
                names = footer.schema.names
                found = [] if columns is None else column_faults(columns, names, file)
            for words in found:
                yield Fault(words, path=f"{field}.parquet_paths[{number}]", kind="data", found=file)


def main() -> NoReturn:
    answer_fd = os.dup(1)
    os.dup2(2, 1)  # what the author's modules print is not the answer
    faults = find_import_faults(msgspec.json.decode(sys.stdin.buffer.read()))
    os.write(answer_fd, msgspec.json.encode([fault.to_data() for fault in faults]))
    os._exit(0)  # without waiting for the threads of the author's modules


if __name__ == "__main__":
    main()
