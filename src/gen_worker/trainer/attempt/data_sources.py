"""Opens a job's data: parquet files, an Arrow IPC file, the user's own data, batches in the job, or none; finds its weights."""

from contextlib import ExitStack
from typing import Any

from gen_worker.contract.job.spec import DatasetSpec, TrainingJobSpec
from gen_worker.errors import InputError
from gen_worker.trainer.attempt.runtime_env import WorkerEnvironment
from gen_worker.trainer.contracts import StopSignal
from gen_worker.trainer.inputs import MaterializedInputs
from gen_worker.trainer.job_lifecycle import raise_stop
from gen_worker.trainer.processes.group import Processes
from gen_worker.trainer.reporting import TrainingReporter
from gen_worker.trainer.sources.base import OwnSource, SourceOptions
from gen_worker.trainer.sources.opening import load_source, open_own_data
from gen_worker.trainer.steps.batch_source import BatchSource, ListSource, StepNumbers


def open_training_data(
    environment: WorkerEnvironment,
    job: TrainingJobSpec,
    inputs: MaterializedInputs,
    *,
    rank: int,
    world_size: int,
    stop: StopSignal | None = None,
) -> BatchSource:
    """The training data of this process."""
    if job.mock_batches is not None:
        if not job.mock_batches:
            raise InputError("mock_batches is empty")
        return ListSource(job.mock_batches)
    dataset = job.dataset or DatasetSpec()  # a job may name its data by ref alone
    if dataset.generated:
        return StepNumbers()
    if dataset.source is not None:
        return _open_own(job, dataset, dataset.source, rank=rank, world_size=world_size)
    from gen_worker.trainer.arrow_feed import ArrowFeed

    options = _feed_options(job, dataset, rank, world_size)
    if environment.arrow_ipc_path is not None:
        return ArrowFeed.open_ipc(environment.arrow_ipc_path, **options)
    paths = [str(path) for path in inputs.parquet_paths] or local_paths(environment, dataset, stop=stop)
    cache_dir = environment.cache_dir / "decoded" if dataset.decode_cache else None
    return ArrowFeed.open(paths, cache_dir=cache_dir, **options)


def open_held_out_data(
    environment: WorkerEnvironment,
    job: TrainingJobSpec,
    dataset: DatasetSpec,
    *,
    rank: int,
    world_size: int,
    stop: StopSignal | None = None,
) -> BatchSource:
    """Validation or test data, in the order of its rows."""
    if dataset.source is not None:
        return _open_own(job, dataset, dataset.source, rank=rank, world_size=world_size, is_held_out=True)
    from gen_worker.trainer.arrow_feed import ArrowFeed

    return ArrowFeed.open(
        local_paths(environment, dataset, stop=stop),
        cache_dir=environment.cache_dir / "decoded" if dataset.decode_cache else None,
        **{**_feed_options(job, dataset, rank, world_size), "shuffle": False},
    )


def _open_own(
    job: TrainingJobSpec,
    dataset: DatasetSpec,
    ref: str,
    *,
    rank: int,
    world_size: int,
    is_held_out: bool = False,
) -> BatchSource:
    options = SourceOptions(
        batch_size=dataset.batch_size,
        shuffle=dataset.shuffle and not is_held_out,
        drop_last=dataset.drop_last,
        seed=job.seed,
        rank=rank,
        world_size=world_size,
        is_held_out=is_held_out,
    )
    return open_own_data(load_source(ref, dataset.args, seed=job.seed), options)


def attach_own_data(
    source: BatchSource,
    kind: str,
    processes: Processes,
    reporter: TrainingReporter,
    stop: StopSignal,
    stack: ExitStack,
) -> None:
    """Connect the user's own data to log and stop signal; InputError where the processes have different data."""
    if not isinstance(source, OwnSource):
        return
    source.attach(log=reporter.log, stop=stop)
    stack.callback(source.close)
    if processes.world_size == 1:
        return
    first, *others = processes.gather(source.signature())
    for rank, other in enumerate(others, start=1):
        differing = [name for name in first if first[name] != other.get(name)]
        if differing:
            name = differing[0]
            raise InputError(
                f"the {kind} data differs between processes: {name} is {first[name]!r:.60} in process 0 and"
                f" {other.get(name)!r:.60} in process {rank}. Seed its generators with a fixed number, and do not let"
                " it depend on the process"
            )


def local_paths(
    environment: WorkerEnvironment, dataset: DatasetSpec, *, stop: StopSignal | None = None
) -> list[str]:
    """The files that a job names. Folders with an index are verified: schema, sizes, rows and hashes."""
    import pyarrow.parquet as pq

    from gen_worker.trainer.datasets.index import resolve_dataset_paths
    from gen_worker.trainer.datasets.schema import check_schema
    from gen_worker.trainer.datasets.shard_loader import ShardLoader

    base = environment.job_dir
    resolved = resolve_dataset_paths([str(base / path) for path in dataset.parquet_paths])
    for (folder, index), schema in zip(resolved.indexes, resolved.schemas, strict=True):
        with ShardLoader(index, folder, cache_dir=environment.cache_dir / "verified") as shards:
            if not shards.verify_all(stop=stop).is_complete and stop is not None:
                raise_stop(stop)
        for first in index.shard_paths(folder)[:1]:  # the feed compares the others with it
            check_schema(schema, pq.read_schema(first), str(folder))
    return resolved.parquet_paths


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


def find_model_handles(
    environment: WorkerEnvironment, job: TrainingJobSpec, inputs: MaterializedInputs
) -> dict[str, Any]:
    """`ctx.model_handles`: the base model and the initial weights."""
    handles: dict[str, Any] = {}
    if inputs.base_model_path is not None:
        handles["base_model"] = inputs.base_model_path
    if job.weights is not None:
        handles["weights"] = environment.job_dir / job.weights
        if not handles["weights"].exists():
            raise InputError(f"weights: {handles['weights']} does not exist")
    return handles
