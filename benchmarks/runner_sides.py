"""The sides of the runner benchmark: a config file through `gen_worker.pytorch_runner`, and the same by hand.

Each is one process, kept for all rounds; a round is one stretch of steps, timed inside it.
"""

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import training_data
from harness import HERE, Prepare, Round, Sample, scratch_dir, serve
from stretches import Plan, TimedRun

VECTORS = {"inputs": {"x": "x"}, "target": "label"}
PIXELS = {
    "inputs": {"x": {"shape": [1, training_data.IMAGE_SIZE, training_data.IMAGE_SIZE], "scale": 1 / 255}},
    "target": "label",
}
ARGS: dict[str, dict[str, Any]] = {
    "mlp": {"hidden": [1024, 1024]},
    "small mlp": {"hidden": [256, 256]},
    "cnn": {"channels": [16, 32]},
}


def files_of(name: str) -> list[str]:
    return training_data.images() if name == "cnn" else training_data.vectors()


def model_section(name: str) -> dict[str, Any]:
    kind = name.rpartition(" ")[2]
    return {
        "model": {"type": kind, "args": {"out_features": training_data.NUM_CLASSES, **ARGS[name]}},
        "columns": PIXELS if kind == "cnn" else VECTORS,
    }


def rates(run: TimedRun, batch_size: int) -> Round:
    def run_round() -> Sample:
        sample = run.run_stretch()
        return {**sample, "rows_per_s": 1e6 * batch_size / sample["step_us"]}

    return run_round


def ours(options: Mapping[str, Any]) -> Round:
    """`python -m gen_worker.pytorch_runner --config FILE`: events every 10 steps, told on stdout as well."""
    plan, name, batch_size = Plan(**options["plan"]), options["model"], options["batch_size"]
    folder = Path(tempfile.mkdtemp(dir=scratch_dir(), prefix="runner-"))
    config = {
        "run_id": "runner",
        "trainer": "runner_work:TimedRunner",
        "max_steps": plan.total_steps,
        "metric_every": 10,
        "checkpoint_every": 0,
        "dataset": {"parquet_paths": files_of(name), "batch_size": batch_size},
        "resources": {"devices": ["cpu"]},
        "hyperparams": {
            **model_section(name),
            "loss": "cross_entropy",
            "optimizer": "AdamW",
            "learning_rate": 1e-3,
            "threads": 1,
        },
    }
    config_path = folder / "config.json"
    config_path.write_text(json.dumps(config), encoding="utf-8")
    runner = [
        "-m",
        "gen_worker.pytorch_runner",
        "--config",
        str(config_path),
        "--output",
        str(folder / "run"),
    ]
    return rates(TimedRun([sys.executable, *runner], {}, plan, log_path=folder / "output.log"), batch_size)


def hand(options: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Round:
    plan, name, batch_size = Plan(**options["plan"]), options["model"], options["batch_size"]
    files_of(name)
    arguments = [name, str(batch_size), str(plan.total_steps)]
    command = [sys.executable, str(HERE / "runner_hand.py"), *arguments]
    folder = Path(tempfile.mkdtemp(dir=scratch_dir(), prefix="hand-"))
    return rates(TimedRun(command, environ or {}, plan, log_path=folder / "output.log"), batch_size)


def hand_kept(options: Mapping[str, Any]) -> Round:
    """The same, where glibc neither gives the top of the heap back nor maps blocks of less than 32 MB."""
    return hand(options, {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)})


SIDES: dict[str, Prepare] = {"ours": ours, "hand": hand, "hand_kept": hand_kept}

if __name__ == "__main__":
    serve(SIDES)
