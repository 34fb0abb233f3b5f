"""The sides of the benchmark of several processes: a worker with `resources.processes: 2`, and a loop by hand under
torchrun. Each keeps its processes for all rounds; a round is one stretch of steps, timed in the main process."""

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import training_data
from ddp_hand import BATCH_SIZE
from harness import HERE, Prepare, Round, Sample, scratch_dir, serve
from stretches import Plan, TimedRun

NUM_PROCESSES = 2


def rates(run: TimedRun) -> Round:
    def run_round() -> Sample:
        sample = run.run_stretch()
        return {**sample, "rows_per_s": 1e6 * BATCH_SIZE * NUM_PROCESSES / sample["step_us"]}

    return run_round


def ours(options: Mapping[str, Any]) -> Round:
    """Through the worker: events every 10 steps, heartbeat, the agreed way to stop, the checkpoint writer."""
    plan = Plan(**options["plan"])
    folder = Path(tempfile.mkdtemp(dir=scratch_dir(), prefix="ddp-"))
    job = {
        "run_id": "ddp",
        "trainer": "ddp_work:MlpTrainer",
        "max_steps": plan.total_steps,
        "metric_every": 10,
        "checkpoint_every": 0,
        "dataset": {"parquet_paths": training_data.vectors(), "batch_size": BATCH_SIZE * NUM_PROCESSES},
        "resources": {"devices": ["cpu"], "processes": NUM_PROCESSES},
    }
    job_path = folder / "job.json"
    job_path.write_text(json.dumps(job), encoding="utf-8")
    environ = {
        "WORKER_MODE": "trainer",
        "TRAINER_JOB_SPEC_PATH": str(job_path),
        "TRAINER_ARTIFACTS_DIR": str(folder / "run"),
    }
    command = [sys.executable, "-m", "gen_worker.entrypoint"]
    return rates(TimedRun(command, environ, plan, log_path=folder / "output.log"))


def hand(options: Mapping[str, Any]) -> Round:
    """`torchrun --standalone --nproc-per-node 2 ddp_hand.py`."""
    plan = Plan(**options["plan"])
    training_data.vectors()
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_PROCESSES}"]
    command = [sys.executable, *launcher, str(HERE / "ddp_hand.py"), str(plan.total_steps)]
    folder = Path(tempfile.mkdtemp(dir=scratch_dir(), prefix="hand-"))
    return rates(TimedRun(command, {}, plan, log_path=folder / "output.log"))


SIDES: dict[str, Prepare] = {"ours": ours, "hand": hand}

if __name__ == "__main__":
    serve(SIDES)
