"""Training from a file alone, in real processes: it learns, it speaks JSON lines, and it resumes to the bit."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from warm_python import python_folder
from worker_process import DEADLINE_S, Run, write_rows

from gen_worker.trainer.checkpoints.store import CheckpointStore

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TRAINER = "gen_worker.pytorch_runner:PyTorchTrainer"

# Everything that has a state, and that a resume could get wrong.
HYPERPARAMS: dict[str, Any] = {
    "model": {"type": "mlp", "args": {"out_features": 1, "hidden": [16, 16], "dropout": 0.3}},
    "columns": {"inputs": {"x": "x"}, "target": {"column": "y", "shape": [1]}},
    "loss": "smooth_l1",
    "metrics": {"r2": "R2Score"},
    "optimizer": {"name": "AdamW", "no_weight_decay": "auto"},
    "learning_rate": 0.01,
    "scheduler": {"name": "warmup_cosine", "args": {"warmup_steps": 7}},
    "gradient_accumulation": 3,
    "gradient_clip_norm": 1.0,
    "ema": {"decay": 0.95, "every": 2},
    "threads": 1,
}
# Ends a worker in the middle of training; the trainer class itself knows nothing of it.
ENDING = """\
import os
import signal

from gen_worker.trainer.callbacks import Callback


class Ending(Callback):
    def on_batch_end(self, run, batch, result):
        for name, number in (("KILL_AT_STEP", signal.SIGKILL), ("TERM_AT_STEP", signal.SIGTERM)):
            if run.state.step == int(os.environ.get(name, "0")):
                os.kill(os.getpid(), number)
"""


def job(folder: Path, **changes: Any) -> dict[str, Any]:
    """100 rows in batches of 8: 13 steps an epoch, the last one shorter."""
    data = write_rows(folder / "data" / "rows.parquet")
    return {
        "run_id": "run-1",
        "max_steps": 40,
        "metric_every": 1,
        "checkpoint_every": 6,
        "validate_every": "epoch",
        "seed": 7,
        "precision": "bf16",
        "dataset": {"parquet_paths": [str(data)], "batch_size": 8, "shuffle": True},
        "validation": {"dataset": {"parquet_paths": [str(data)], "batch_size": 32}},
        "callbacks": ["ending:Ending"],
        "hyperparams": HYPERPARAMS,
        **changes,
    }


def new_run(folder: Path, name: str, **changes: Any) -> Run:
    run = Run(folder / name, **job(folder, trainer=TRAINER, **changes))
    (run.folder / "ending.py").write_text(ENDING)
    return run


def fingerprint(checkpoints: Path) -> dict[str, Any]:
    meta = json.loads((checkpoints / "final.meta.json").read_text())
    weights = hashlib.sha256((checkpoints / "final.pt").read_bytes()).hexdigest()
    return {"weights": weights, **{name: meta[name] for name in ("state", "rng", "cursor")}}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = new_run(tmp_path_factory.mktemp("reference"), "run")
    done = run.work()
    assert done.returncode == 0, done.stderr
    return run


def run_cli(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": os.environ["TORCHINDUCTOR_CACHE_DIR"],
        "PYTHONPATH": str(folder),
        **env,
    }
    return subprocess.run(
        [f"{python_folder()}/python", "-m", "gen_worker.pytorch_runner", *arguments],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def lines_of(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """Stdout is JSON lines and nothing else."""
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_kills_and_stops_anywhere_change_no_bit(tmp_path: Path, reference: Run) -> None:
    """Dropout, accumulation, bf16, clipping, warm-up with cosine, weight groups and an average of the weights."""
    run = new_run(tmp_path, "run")
    assert run.work(KILL_AT_STEP="9").returncode == -9
    assert run.work(TERM_AT_STEP="13").returncode == 75  # exactly at the end of an epoch
    assert run.work(KILL_AT_STEP="31").returncode == -9
    done = run.work()
    assert done.returncode == 0, done.stderr
    assert fingerprint(run.checkpoints) == fingerprint(reference.checkpoints)
    assert run.losses() == reference.losses()
    run.check_invariants()


def test_fp16_resumes_with_its_scale(tmp_path: Path) -> None:
    changes = {"precision": "fp16", "max_steps": 14, "validate_every": 0}
    straight, broken = (new_run(tmp_path, name, **changes) for name in ("straight", "broken"))
    assert straight.work().returncode == 0
    assert broken.work(KILL_AT_STEP="8").returncode == -9
    assert broken.work().returncode == 0
    assert fingerprint(broken.checkpoints) == fingerprint(straight.checkpoints)
    assert "scaler" in fingerprint(broken.checkpoints)["state"]


def test_the_command_trains_the_same_run_and_mirrors_its_events(tmp_path: Path, reference: Run) -> None:
    """Stopped once by a signal; what it prints is what the event file says, attempt by attempt."""
    document = job(tmp_path)
    document["dataset"]["parquet_paths"] = ["data/rows.parquet"]  # relative to the config, not to the run
    (tmp_path / "run-1.json").write_text(json.dumps({k: v for k, v in document.items() if k != "run_id"}))
    (tmp_path / "ending.py").write_text(ENDING + "\nprint('an author who prints')\n")
    stopped = run_cli(tmp_path, "--config", "run-1.json", TERM_AT_STEP="20")
    assert stopped.returncode == 75, stopped.stderr
    done = run_cli(tmp_path, "--config", "run-1.json")
    assert done.returncode == 0, done.stderr
    assert "an author who prints" in done.stderr

    folder = tmp_path / "runs" / "run-1"
    printed = [line for each in (stopped, done) for line in lines_of(each)]
    ours = [line for line in printed if line["event"].startswith("job_")]
    assert [line["event"] for line in ours] == ["job_started", "job_failed", "job_started", "job_completed"]
    assert (ours[1]["exit_code"], ours[3]["exit_code"]) == (75, 0)
    written = [json.loads(line) for line in (folder / "metrics" / "events.jsonl").read_text().splitlines()]
    assert [line for line in printed if not line["event"].startswith("job_")] == written
    assert lines_of(stopped)[-2]["event"] == "failed"
    assert lines_of(done)[-2]["event"] == "completed"
    assert fingerprint(folder / "checkpoints") == fingerprint(reference.checkpoints)


def test_weights_of_a_run_begin_another_one(tmp_path: Path, reference: Run) -> None:
    hyperparams = {
        **HYPERPARAMS,
        "optimizer": "SGD",
        "learning_rate": 1e-30,  # so that the weights stay what they were
        "weights_from": "ema",
    }
    run = new_run(
        tmp_path,
        "run",
        hyperparams=hyperparams,
        max_steps=1,
        weights=str(reference.checkpoints / "final.meta.json"),
    )
    done = run.work()
    assert done.returncode == 0, done.stderr
    source = CheckpointStore(reference.checkpoints).load(reference.checkpoints / "final.pt")
    started = CheckpointStore(run.checkpoints).load(run.checkpoints / "final.pt")
    assert started.step == 1
    wanted: Any = source.state["ema"]
    found: Any = started.state["model"]
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_stop_before_the_first_step_is_answered(tmp_path: Path) -> None:
    """The signal comes while torch is imported; the attempt ends as cancelled, with its terminal event."""
    (tmp_path / "config.json").write_text(json.dumps(job(tmp_path, callbacks=[])))
    script = (
        "import os, signal, sys\n"
        "from gen_worker import pytorch_runner\n"
        "from gen_worker.pytorch import job_file\n"
        "write = job_file.write_job_file\n"
        "def stop(*given):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return write(*given)\n"
        "job_file.write_job_file = stop\n"
        "sys.exit(pytorch_runner.main(['--config', 'config.json', '--output', 'out']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 75, done.stderr
    assert [line["event"] for line in lines_of(done)][-2:] == ["failed", "job_failed"]
    assert signal.SIGTERM.name in lines_of(done)[-2]["error"]


def test_help_shows_an_example_that_is_a_valid_config(tmp_path: Path) -> None:
    shown = run_cli(tmp_path, "--help")
    assert shown.returncode == 0
    example = shown.stdout.partition("# config.yaml\n")[2].partition("\n\n")[0]
    (tmp_path / "config.yaml").write_text("\n".join(line[2:] for line in example.splitlines()))
    write_digits(tmp_path / "digits")
    checked = run_cli(tmp_path, "--config", "config.yaml", "--check")
    assert checked.returncode == 0, checked.stderr
    assert lines_of(checked)[-1]["event"] == "job_checked"
    wrong = run_cli(tmp_path, "--confg", "config.yaml")
    assert wrong.returncode == 10
    assert wrong.stdout == ""


def write_digits(folder: Path) -> None:
    import numpy as np
    import pyarrow as pa

    folder.mkdir()
    pixels = np.zeros((8, 16), np.uint8)
    table = pa.table(
        {
            "pixels": pa.FixedSizeListArray.from_arrays(pa.array(pixels.reshape(-1)), 16),
            "label": pa.array(range(8)),
        }
    )
    pq.write_table(table, folder / "part.parquet")


def train_example(name: str, folder: Path) -> list[dict[str, Any]]:
    """Its data made, its config run as the docs say; the events that it printed."""
    shutil.copytree(EXAMPLES / name, folder, ignore=shutil.ignore_patterns("data", "runs", "__pycache__"))
    subprocess.run([sys.executable, "make_data.py"], cwd=folder, check=True, timeout=DEADLINE_S)
    done = run_cli(folder, "--config", "config.yaml")
    assert done.returncode == 0, done.stderr
    return lines_of(done)


def test_the_example_of_images_learns_to_read_digits(tmp_path: Path) -> None:
    events = train_example("images_by_config", tmp_path / "example")
    scores = [event["values"] for event in events if event["event"] == "validation"]
    assert scores[-1]["val/accuracy"] > 0.9
    assert scores[-1]["val/f1"] > 0.9
    assert scores[-1]["val/loss"] < 0.5 * scores[0]["val/loss"]


def test_the_example_of_a_language_model_learns_more_than_the_letters(tmp_path: Path) -> None:
    """3.0 is what a model reaches that only knows how often each byte comes."""
    events = train_example("language_model", tmp_path / "example")
    scores = [event["values"] for event in events if event["event"] == "validation"]
    assert scores[-1]["val/loss"] < 2.5
    assert scores[-1]["val/loss"] < scores[0]["val/loss"]
    samples = [Path(event["path"]).read_text() for event in events if event["event"] == "sample"]
    assert len(samples) == 1
    assert samples[0].startswith("The ")
    assert len(samples[0]) == 84
