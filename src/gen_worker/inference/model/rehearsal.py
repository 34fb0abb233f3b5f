"""What every load of a model begins with, done before its version is known.

A fork shares its memory until it writes to it, and the first write to each page costs more than the work of a small load.
So the process that is kept ahead goes through a load with a model of our own: then the pages are its own. It runs none of
the author's hooks; code that is frozen is imported, because it cannot change until it is wanted.
"""

from pathlib import Path
from typing import Any

import pyarrow as pa

from gen_worker.contract.job.model_version import ModelVersion
from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.inference.model.inputs import RecordedData, make_rows
from gen_worker.inference.model.loading import LARGE_BYTES, CheckpointReading, enter, set_threads
from gen_worker.inference.model.predictor import Predictor
from gen_worker.inference.model.probe import Probe
from gen_worker.trainer.arrow_feed import batch_to_torch
from gen_worker.trainer.author.plugin_import import import_author_module, split_ref

WIDTH, BATCH_ROWS = 64, 32


def rehearse(version: ModelVersion) -> None:
    """For a version with the code, the environment and the data of that one. Raises whatever is wrong with these."""
    job = enter(version)
    set_threads(1)
    if version.code_hash:
        import_author_module(split_ref(version.trainer)[0])
    _read(version, job)
    _answer()


def _read(version: ModelVersion, job: TrainingJobSpec) -> None:
    reading = CheckpointReading(version, is_begun=False)
    data = RecordedData.of(reading.identity, job, Path(version.base_dir or Path.cwd()))
    data.first_rows()
    data.columns_with_nulls()
    if reading.info.size_bytes < LARGE_BYTES:
        reading.take()


def _answer() -> None:
    try:
        import torch
    except ImportError:
        return
    before = torch.get_rng_state()  # the author's module may draw numbers when it is imported
    state = {"model": _make_model(torch)}
    state["model"].load_state_dict(_make_model(torch).state_dict())
    state["model"].eval()
    rows = make_rows(pa.schema([("x", pa.list_(pa.float32(), WIDTH))]), BATCH_ROWS)
    predictor = Predictor(_Trainer(), state, None)  # type: ignore[arg-type]
    Probe(rows=rows, are_made_up=True).run(predictor, BATCH_ROWS)
    torch.set_rng_state(before)


def _make_model(torch: Any) -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 1))


class _Trainer:
    def predict(self, rows: Any, state: dict[str, Any], _ctx: Any) -> dict[str, Any]:
        return {"y": state["model"](batch_to_torch(rows, ["x"])["x"])[:, 0]}
