"""A job's data, opened: parquet files, an Arrow IPC file, batches in the job, or none at all."""

from pathlib import Path
from typing import Any

from gen_worker.errors import InputError
from gen_worker.trainer.batch_source import BatchSource, FirstBatches, ListSource, StepNumbers
from gen_worker.trainer.contracts import DatasetSpec, TrainingJobSpec
from gen_worker.trainer.inputs import MaterializedInputs
from gen_worker.trainer.runtime_env import WorkerEnvironment


def open_training_data(
    environment: WorkerEnvironment,
    job: TrainingJobSpec,
    inputs: MaterializedInputs,
    *,
    rank: int,
    world_size: int,
) -> BatchSource:
    """What this process trains on."""
    source = _open_training_data(environment, job, inputs, rank, world_size)
    return FirstBatches(source, job.overfit_batches) if job.overfit_batches else source


def open_held_out_data(
    environment: WorkerEnvironment, job: TrainingJobSpec, dataset: DatasetSpec, *, rank: int, world_size: int
) -> BatchSource:
    """What is only looked at: in the order of its rows, since a mean does not depend on it."""
    from gen_worker.trainer.arrow_feed import ArrowFeed

    return ArrowFeed.open(
        _local_paths(environment, dataset),
        cache_dir=environment.cache_dir / "decoded" if dataset.decode_cache else None,
        **{**_feed_options(job, dataset, rank, world_size), "shuffle": False},
    )


def _open_training_data(
    environment: WorkerEnvironment,
    job: TrainingJobSpec,
    inputs: MaterializedInputs,
    rank: int,
    world_size: int,
) -> BatchSource:
    if job.mock_batches is not None:
        if not job.mock_batches:
            raise InputError("mock_batches is empty: there is nothing to train on")
        return ListSource(job.mock_batches)
    dataset = job.dataset or DatasetSpec()  # a job may name its data by ref alone
    if dataset.generated:
        return StepNumbers()
    from gen_worker.trainer.arrow_feed import ArrowFeed

    options = _feed_options(job, dataset, rank, world_size)
    if environment.arrow_ipc_path is not None:
        return ArrowFeed.open_ipc(environment.arrow_ipc_path, **options)
    paths = [str(path) for path in inputs.parquet_paths] or _local_paths(environment, dataset)
    cache_dir = environment.cache_dir / "decoded" if dataset.decode_cache else None
    return ArrowFeed.open(paths, cache_dir=cache_dir, **options)


def _local_paths(environment: WorkerEnvironment, dataset: DatasetSpec) -> list[str]:
    base: Path = environment.job_spec_path.parent
    return [str(base / path) for path in dataset.parquet_paths]


def _feed_options(job: TrainingJobSpec, dataset: DatasetSpec, rank: int, world_size: int) -> dict[str, Any]:
    return {
        "batch_size": dataset.batch_size,
        "columns": dataset.columns,
        "shuffle": dataset.shuffle,
        "drop_last": dataset.drop_last,
        "seed": job.seed,
        "readahead": dataset.readahead,
        "rank": rank,
        "world_size": world_size,
    }
