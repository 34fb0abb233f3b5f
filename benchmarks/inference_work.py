"""The models that the servers of the topic `inference` answer with, and the checkpoints of ours.

The same weights for every side: drawn from a fixed seed. The wide model is one layer: its requests of 32 × 784 numbers
are to measure how they are read.
"""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from gen_worker.contract.job.model_version import ModelVersion
from gen_worker.trainer import StepContext, StepResult, batch_to_torch

HERE = Path(__file__).resolve().parent
SMALL, WIDE = 64, 784
NUM_ROWS = 256
ROW_GROUP = 16_384
BATCH_ROWS = 32


def make_model(width: int) -> torch.nn.Module:
    torch.manual_seed(0)
    if width == WIDE:
        return torch.nn.Linear(WIDE, 10)
    return torch.nn.Sequential(
        torch.nn.Linear(width, 256),
        torch.nn.ReLU(),
        torch.nn.Linear(256, 256),
        torch.nn.ReLU(),
        torch.nn.Linear(256, 10),
    )


class Mlp:
    """`hyperparams.width` is the length of `x`; `delay_s` is added to each batch, `ballast_mb` to the weights."""

    label_columns = ("y",)

    def setup(self, ctx: StepContext) -> None:
        torch.set_num_threads(1)
        self.delay_s: float = ctx.job.hyperparams.get("delay_s", 0.0)

    def configure(self, ctx: StepContext) -> dict[str, Any]:
        model = make_model(ctx.job.hyperparams["width"])
        if ballast_mb := ctx.job.hyperparams.get("ballast_mb"):
            model.register_buffer("ballast", torch.rand(ballast_mb << 18))
        return {"model": model}

    def prepare_batch(self, raw_batch: Any, state: dict[str, Any], ctx: StepContext) -> Any:
        return batch_to_torch(raw_batch, ["x"])["x"]

    def train_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> StepResult:
        with torch.no_grad():  # the weights stay as they were drawn
            return StepResult(metrics={"loss": state["model"](batch).square().mean()})

    def state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        return {"model": state["model"].state_dict()}

    def load_state_dict(self, state: dict[str, Any], payload: dict[str, Any], ctx: StepContext) -> None:
        state["model"].load_state_dict(payload["model"])

    def predict(self, rows: Any, state: dict[str, Any], ctx: StepContext) -> dict[str, Any]:
        if self.delay_s:
            time.sleep(self.delay_s)
        return {"logits": state["model"](batch_to_torch(rows, ["x"])["x"])}


def write_rows(path: Path, width: int, num_rows: int = NUM_ROWS) -> None:
    values = np.random.default_rng(0).random((num_rows, width), dtype=np.float32)
    x = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), width)
    pq.write_table(
        pa.table({"x": x, "y": pa.array([0] * num_rows, pa.int64())}), path, row_group_size=ROW_GROUP
    )


def make_version(folder: Path, width: int, delay_s: float = 0.0) -> ModelVersion:
    """Train one step that changes nothing, for a checkpoint that is served as any other."""
    data, runs = folder / f"data-{width}.parquet", folder / f"run-{width}-{delay_s:g}"
    runs.mkdir(parents=True)
    write_rows(data, width)
    job = {
        "trainer_api_version": "v1",
        "run_id": runs.name,
        "trainer": "inference_work:Mlp",
        "max_steps": 1,
        "hyperparams": {"width": width, "delay_s": delay_s},
        "dataset": {"parquet_paths": [str(data)], "batch_size": 32},
    }
    (runs / "job.json").write_text(json.dumps(job))
    environment = {
        **os.environ,
        "WORKER_MODE": "trainer",
        "TRAINER_JOB_SPEC_PATH": str(runs / "job.json"),
        "TRAINER_ARTIFACTS_DIR": str(runs),
        "PYTHONPATH": str(HERE),
    }
    command = [sys.executable, "-m", "gen_worker.entrypoint"]
    subprocess.run(command, env=environment, cwd=HERE, check=True, stdout=subprocess.DEVNULL)
    meta = runs / "checkpoints" / "final.meta.json"
    (data_file,) = json.loads(meta.read_text())["files"]
    return ModelVersion(
        run_id=runs.name,
        step=1,
        weights_hash=data_file["hash"],
        checkpoint=str(meta),
        trainer="inference_work:Mlp",
        config=job,
        base_dir=str(HERE),
    )


def write_inputs(folder: Path) -> None:
    """Versions, and the bodies of requests."""
    from inference_load import DELAY_S  # not above: a model process imports this module

    for name, width, delay_s in (("small", SMALL, 0.0), ("slow", SMALL, DELAY_S), ("wide", WIDE, 0.0)):
        version = make_version(folder, width, delay_s)
        (folder / f"{name}.json").write_bytes(msgspec.json.encode(version))
    rng = random.Random(0)
    row = [round(rng.random(), 4) for _ in range(SMALL)]
    (folder / "small-body.json").write_text(json.dumps({"rows": [{"x": row}]}))
    values = np.random.default_rng(0).random((BATCH_ROWS, WIDE), dtype=np.float32)
    (folder / "wide-body.json").write_text(json.dumps({"rows": [{"x": row} for row in values.tolist()]}))
    x = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), WIDE)
    with pa.ipc.new_stream(str(folder / "wide-rows.arrow"), pa.schema([("x", x.type)])) as writer:
        writer.write_batch(pa.record_batch({"x": x}))


if __name__ == "__main__":
    write_inputs(Path(sys.argv[1]))
