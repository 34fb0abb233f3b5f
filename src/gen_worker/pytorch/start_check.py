"""Check before a run is queued what `configure` would reject: columns, then shapes through model, loss and metrics.

Reads the footer of one parquet file of each dataset, and builds small models on the CPU. Large models and the author's
own are checked by the worker and by `--check`.
"""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from gen_worker.contract.job.spec import DatasetSpec, ResourcesSpec, TrainingJobSpec
from gen_worker.errors import WorkerError
from gen_worker.pytorch.config import SHIPPED_MODELS, RunnerConfig
from gen_worker.pytorch.data.preparation import Preparation
from gen_worker.pytorch.model.build import build_model
from gen_worker.pytorch.runner_state import build_preparation, build_tried_parts
from gen_worker.trainer.contracts import StepContext
from gen_worker.trainer.datasets.index import resolve_dataset_paths
from gen_worker.trainer.datasets.parquet_paths import expand_parquet_paths

MAX_PARAMETERS = 50_000_000


def find_start_faults(config: RunnerConfig, job: TrainingJobSpec, base_dir: Path) -> list[str]:
    """One text for each fault. What cannot be checked here is no fault. Blocks."""
    try:
        schemas = dict(_schemas(job, base_dir))
    except (OSError, pa.ArrowException, WorkerError):
        return []  # whether the data can be read is checked elsewhere
    training = schemas.pop("dataset", None)
    if training is None and not job.mock_batches:
        return []
    ctx = StepContext(
        job=msgspec.structs.replace(job, resources=ResourcesSpec(devices=["cpu"]), precision="fp32"),
        dataset=None if training is None else SimpleNamespace(schema=training),
        device="cpu",
    )
    try:
        prepare = build_preparation(config, ctx)
        for schema in schemas.values():
            prepare.require(schema)
        if _is_small(config, prepare):
            build_tried_parts(config, ctx, prepare, nullcontext())
    except WorkerError as error:
        return getattr(error, "faults", None) or [str(error)]
    return []


def _schemas(job: TrainingJobSpec, base_dir: Path) -> Iterator[tuple[str, pa.Schema]]:
    named: Mapping[str, DatasetSpec | None] = {
        "dataset": job.dataset,
        "validation.dataset": job.validation.dataset if job.validation and job.validate_every else None,
        "test.dataset": None if job.test is None else job.test.dataset,
    }
    for field, dataset in named.items():
        if dataset is None or not dataset.parquet_paths:
            continue
        resolved = resolve_dataset_paths([str(base_dir / path) for path in dataset.parquet_paths])
        files = expand_parquet_paths(resolved.parquet_paths, [])
        if not files:
            continue
        schema = pq.read_schema(files[0])
        if dataset.columns is not None:
            schema = pa.schema([schema.field(name) for name in dataset.columns if name in schema.names])
        yield field, schema


def _is_small(config: RunnerConfig, prepare: Preparation) -> bool:
    if config.model.type not in SHIPPED_MODELS:
        return False
    try:
        with torch.device("meta"):  # shapes without memory
            module = build_model(config.model, seed=0, row_shape=prepare.row_shape, device="meta")
    except (RuntimeError, NotImplementedError):
        return False
    return sum(parameter.numel() for parameter in module.parameters()) <= MAX_PARAMETERS
