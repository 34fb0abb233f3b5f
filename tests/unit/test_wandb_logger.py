"""Claims about the Weights & Biases logger, with the real client in offline mode: what its own files hold afterwards."""

import contextlib
import json
import math
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hand_built_run import HandBuiltRun

from gen_worker.errors import StartupError, TrainStepError
from gen_worker.trainer.callbacks.loggers import WandbLogger
from gen_worker.trainer.callbacks.wandb_sink import nested


@pytest.fixture(autouse=True)
def wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Offline. It takes a second to import: not while tests are collected, which each process does."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path))  # no login of whoever runs the tests
    return pytest.importorskip("wandb", reason="wandb is not installed")


def stored(folder: Path) -> list[dict[str, Any]]:
    """Of each W&B run folder, oldest first: its id, config, rows of metrics and summary, read from its file."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    found = []
    for path in sorted(
        (folder / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime_ns
    ):
        store = DataStore()
        store.open_for_scan(str(path))
        run: dict[str, Any] = {"config": {}, "rows": [], "summary": {}, "exit": None}
        while (data := store.scan_data()) is not None:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                run |= {
                    "id": record.run.run_id,
                    "project": record.run.project,
                    "name": record.run.display_name,
                }
                run["tags"] = list(record.run.tags)
                run["config"] = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            elif kind == "history":
                run["rows"].append(items(record.history.item))
            elif kind == "summary":
                run["summary"] |= items(record.summary.update)
            elif kind == "exit":
                run["exit"] = record.exit.exit_code
        store.close()
        found.append(run)
    return found


def items(records: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in records}


def open_files() -> list[str]:
    found = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            found.append(str(fd.readlink()))
    return found


def metrics(run: dict[str, Any]) -> dict[int, float]:
    return {row["trainer/step"]: row["train/loss"] for row in run["rows"] if "train/loss" in row}


def test_config_metrics_summary_and_the_end_arrive_in_an_offline_run(tmp_path: Path) -> None:
    job = {
        "hyperparams": {"lr": 0.1, "net": {"width": 8}},
        "tags": {"team": "blue"},
        "env": {"KEY": "secret"},
    }
    logger = WandbLogger(project="digits", run_name="first")
    run = HandBuiltRun([logger], tmp_path / "run", **job).begin()
    for step in (1, 2, 3):
        run.handle.ctx.progress.step = step
        run.emit({"train/loss": 1.0 / step})
    run.validate({"val/loss": float("nan")})
    run.end()
    assert run.said == []
    (found,) = stored(tmp_path / "run")
    assert (found["project"], found["name"], found["tags"]) == ("digits", "first", ["team=blue"])
    assert found["config"]["hyperparams"] == {"lr": 0.1, "net": {"width": 8}}
    assert "env" not in found["config"]
    assert metrics(found) == {1: 1.0, 2: 0.5, 3: 1.0 / 3}
    assert math.isnan(found["rows"][-1]["val/loss"])
    assert found["summary"]["train/loss"] == 1.0 / 3
    assert (found["summary"]["trn/status"], found["summary"]["trn/step"]) == ("completed", 3)
    assert found["exit"] == 0


def test_nothing_of_it_is_left_open_and_the_authors_own_run_stays_theirs(tmp_path: Path, wandb: Any) -> None:
    run = HandBuiltRun([WandbLogger()], tmp_path / "run").begin()
    run.end(TrainStepError("boom"))
    assert stored(tmp_path / "run")[0]["exit"] == 1
    assert stored(tmp_path / "run")[0]["summary"]["trn/reason"] == "TrainStepError: boom"
    assert [path for path in open_files() if "wandb" in path] == []
    assert [thread.name for thread in threading.enumerate() if "wandb" in thread.name] == []

    own = wandb.init(project="own", dir=str(tmp_path), settings=wandb.Settings(silent=True, console="off"))
    HandBuiltRun([WandbLogger()], tmp_path / "other").begin().end()
    assert wandb.run is own
    own.log({"mine": 1})
    own.finish()
    wandb.teardown()


TRAINING = """
import logging, os, signal, sys
logging.basicConfig(level=logging.INFO)
from gen_worker.trainer import StepResult, Trainer, TrainerConfig, WandbLogger

class Counting:
    def setup(self, ctx): ...
    def configure(self, ctx): return {"value": 0.0}
    def prepare_batch(self, raw_batch, state, ctx): return raw_batch
    def train_step(self, batch, state, ctx):
        state["value"] += batch
        return StepResult(metrics={"loss": state["value"]})
    def state_dict(self, state): return state
    def load_state_dict(self, state, payload, ctx): state.update(payload)

class KillAt(WandbLogger):
    def on_batch_end(self, run, batch, result):
        if run.state.step == int(sys.argv[2]):
            while not list(run.folder.glob("wandb/offline-run-*")):
                self._delivery._done.wait(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

config = TrainerConfig(max_steps=9, metric_every=1, checkpoint_every=3)
Trainer(Counting, config, train_data=[1.0] * 9, callbacks=[KillAt()], folder=sys.argv[1]).train()
"""


def test_a_run_that_was_killed_continues_the_same_wandb_run(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TRAINING, str(tmp_path / "run")]
    killed = subprocess.run([*command, "7"], capture_output=True, text=True, timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    done = subprocess.run([*command, "0"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "wandb" not in done.stderr
    # offline-run-TIME-ID, with a number behind it where two began in one second
    first, second = (path.name.split("-") for path in (tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert first[3] == second[3]
    # Steps that are trained again are on the same axis: nothing is dropped as too old.
    assert metrics(stored(tmp_path / "run")[-1]) == {7: 7.0, 8: 8.0, 9: 9.0}


def test_wandb_that_fails_never_ends_training_and_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wandb: Any
) -> None:
    real, faults = wandb.init, [OSError("the disk is full")]

    def init(**options: Any) -> Any:
        if faults:
            raise faults.pop()
        return real(**options)

    monkeypatch.setattr(wandb, "init", init)
    run = HandBuiltRun([WandbLogger()], tmp_path / "run").begin()
    run.handle.ctx.progress.step = 1
    run.emit({"train/loss": 0.5})
    run.end()
    assert metrics(stored(tmp_path / "run")[0]) == {1: 0.5}
    assert "cannot be written: OSError: the disk is full. Training continues" in run.said[0][1]
    assert "can be written again: nothing was lost" in run.said[1][1]


def test_online_without_a_key_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(StartupError, match=r"no API key: run `wandb login`.*offline"):
        WandbLogger(mode="online").make_sink(HandBuiltRun([], tmp_path).handle)


def test_a_config_is_grouped_by_its_dots_and_loses_nothing() -> None:
    flat = {"a": 1, "h.lr": 2, "h.net.width": 3, "a.b": 4}
    assert nested(flat) == {"a": 1, "h": {"lr": 2, "net": {"width": 3}}, "a.b": 4}
