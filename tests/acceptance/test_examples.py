"""Each example runs as docs/examples.md says, learns what it is about, and resumes to the exact bit."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from documents import ROOT, read_blocks
from numpy.typing import NDArray

from gen_worker.trainer.checkpoints.store import Checkpoint, CheckpointStore

sys.path.insert(0, str(ROOT / "tests" / "integration"))
from warm_python import python_folder

DEADLINE_S = 240
WORKER = "WORKER_MODE=trainer TRAINER_JOB_SPEC_PATH=job.yaml TRAINER_ARTIFACTS_DIR=run exec python -m gen_worker.entrypoint"


class Example:
    """A copy of an example's folder, and what its workers left there."""

    def __init__(self, name: str, root: Path) -> None:
        self.name = name
        self.root = root
        self.folder = root / "examples" / name

    @classmethod
    def run_as_documented(cls, name: str, root: Path, **env: str) -> "Example":
        """Copy it and run the commands of the docs, down to the last one."""
        example = cls(name, root)
        shutil.copytree(
            ROOT / "examples" / name, example.folder, ignore=shutil.ignore_patterns("__pycache__", "run")
        )
        (commands,) = [
            block.text
            for block in read_blocks(ROOT / "docs" / "examples.md")
            if f"cd examples/{name}\n" in block.text
        ]
        example.shell(commands, folder=root, **env)
        return example

    def resume(self, root: Path, *, step: int) -> "Example":
        """Another folder, as a kill after the checkpoint of `step` leaves it; a worker goes on there to the end."""
        example = Example(self.name, root)
        shutil.copytree(self.folder, example.folder, ignore=shutil.ignore_patterns("run"))
        example.checkpoints.mkdir(parents=True)
        for path in self.checkpoints.glob(f"step-{step:08d}.*"):
            (shutil.copytree if path.is_dir() else shutil.copy)(path, example.checkpoints / path.name)
        example.shell(WORKER, folder=example.folder)
        messages = [event["message"] for event in example.events("log")]
        assert any(message.startswith(f"resumed at step {step},") for message in messages), messages
        return example

    def shell(self, commands: str, *, folder: Path, **env: str) -> None:
        programs = [str(Path(sys.executable).parent), os.environ["PATH"]]
        if self.name != "numpy_trainer":  # its workers never load torch
            programs.insert(0, python_folder())
        environ = {
            "PATH": os.pathsep.join(programs),
            "HOME": str(self.root),
            "TORCHINDUCTOR_CACHE_DIR": os.environ["TORCHINDUCTOR_CACHE_DIR"],
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONWARNINGS": "error",
            **env,
        }
        with (self.root / "output.log").open("w") as log:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", commands],
                cwd=folder,
                env=environ,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=DEADLINE_S,
                check=False,
            )
        assert done.returncode == 0, self.output()

    def output(self) -> str:
        """What the newest commands printed."""
        return (self.root / "output.log").read_text()

    @property
    def checkpoints(self) -> Path:
        return self.folder / "run" / "checkpoints"

    def predict(self, parquet: str, *columns: str) -> dict[str, list[Any]]:
        """What its class answers for the rows of a file, with columns of that file beside it."""
        checkpoint = "run/checkpoints/final.meta.json"
        spec = {"checkpoint": checkpoint, "parquet_paths": [parquet], "out": "predicted", "columns": columns}
        job = {"run_id": "predicted", "mode": "inference", "prediction": spec}
        (self.folder / "predict.json").write_text(json.dumps(job))
        command = WORKER.replace("trainer", "inference", 1).replace("job.yaml", "predict.json")
        self.shell(command.replace("=run ", "=predicting "), folder=self.folder)
        found: dict[str, list[Any]] = {}
        parts = json.loads((self.folder / "predicted" / "predictions.json").read_text())["parts"]
        for part in parts:
            for name, values in pq.read_table(self.folder / "predicted" / part["name"]).to_pydict().items():
                found.setdefault(name, []).extend(values)
        return found

    def events(self, kind: str) -> list[dict[str, Any]]:
        path = self.folder / "run" / "metrics" / "events.jsonl"
        return [
            event for line in path.read_text().splitlines() if (event := json.loads(line))["event"] == kind
        ]

    def metrics(self) -> dict[int, dict[str, float]]:
        """step -> what was reported of it, of training and of validation."""
        found: dict[int, dict[str, float]] = {}
        for event in [*self.events("metric"), *self.events("metrics"), *self.events("validation")]:
            values = event.get("values") or {event["name"]: event["value"]}
            found.setdefault(event["step"], {}).update(values)
        return dict(sorted(found.items()))

    def checkpoint(self) -> Checkpoint:
        """The final one."""
        return CheckpointStore(self.checkpoints).load(self.checkpoints / "final.pt")


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """The paths at which two states differ in type or in any bit."""
    if type(one) is not type(other):
        yield f"{where}: {type(one).__name__}, {type(other).__name__}"
    elif isinstance(one, Mapping):
        for key in [*one, *(key for key in other if key not in one)]:
            yield from differences(one.get(key), other.get(key), f"{where}/{key}")
    elif isinstance(one, list | tuple) and len(one) == len(other):
        for index, pair in enumerate(zip(one, other, strict=True)):
            yield from differences(*pair, f"{where}/{index}")
    elif hasattr(one, "dtype"):
        a, b = np.asarray(one), np.asarray(other)
        if (a.dtype, a.shape, a.tobytes()) != (b.dtype, b.shape, b.tobytes()):
            yield where
    elif one != other:
        yield where


def assert_same_bits(one: Checkpoint, other: Checkpoint) -> None:
    assert one.step == other.step
    assert list(differences(one.state, other.state, "state")) == []
    assert list(differences(one.rng, other.rng, "rng")) == []


def test_plain_torch_learns_stops_early_and_resumes_exactly(tmp_path: Path) -> None:
    straight = Example.run_as_documented("plain_torch", tmp_path / "straight")
    (completed,) = straight.events("completed")
    assert completed["step"] < 2_000, "early stopping ended it"
    assert max(values.get("val/accuracy", 0) for values in straight.metrics().values()) > 0.8, "a guess: 0.33"
    found = straight.predict("validation.parquet", "point")
    assert set(found) == {"arm", "probability", "point"}
    right = pq.read_table(straight.folder / "validation.parquet")
    assert found["point"] == right.column("point").to_pylist()
    assert np.mean(np.array(found["arm"]) == right.column("arm").to_numpy()) > 0.8
    resumed = straight.resume(tmp_path / "resumed", step=(completed["step"] - 1) // 100 * 100)
    assert_same_bits(straight.checkpoint(), resumed.checkpoint())


def test_lora_finetune_beats_its_base_saves_only_the_adapter_and_resumes_exactly(tmp_path: Path) -> None:
    straight = Example.run_as_documented("lora_finetune", tmp_path / "straight")
    last = straight.metrics()[600]
    assert last["train/loss"] < last["base_loss"] / 10
    final = straight.checkpoint()
    assert final.state.keys() == {"adapter", "optimizer", "scheduler"}
    names = {f"{layer}.{part}" for layer in (0, 2, 4) for part in "ab"}
    assert final.state["adapter"].keys() == names
    assert len(final.state["optimizer"]["state"]) == len(names)
    assert final.author_files is not None
    adapter_file, base_file = final.author_files / "lora.safetensors", straight.folder / "base.pt"
    assert adapter_file.stat().st_size < base_file.stat().st_size / 5
    found = straight.predict("moon.parquet")
    assert set(found) == {"acceleration", "base"}
    resumed = straight.resume(tmp_path / "resumed", step=200)
    assert_same_bits(final, resumed.checkpoint())


def test_cartpole_balances_films_itself_and_resumes_exactly(tmp_path: Path) -> None:
    straight = Example.run_as_documented("cartpole", tmp_path / "straight")
    returns = [values["return"] for values in straight.metrics().values()]
    assert len(returns) == 20
    assert np.mean(returns[:5]) < 100
    assert np.mean(returns[-5:]) > 150
    videos = straight.events("video")
    assert [event["step"] for event in videos] == [10, 20]
    assert {Path(event["path"]).parent for event in videos} == {
        straight.folder / "run" / "videos" / "attempt-1"
    }
    for event in videos:
        assert Path(event["poster"]).stat().st_size > 0
        images = read_video(Path(event["path"]))
        assert len(images) > 10
        assert images[0].min() < 100, "the cart is black"
        assert images[0].max() > 200, "on white ground"
        assert (images[0] != images[-1]).any(), "and something moves"
    assert re.search(r"(?m)\.mp4$", straight.output()), "the docs list the film"
    names = ["position", "velocity", "angle", "angular_velocity"]
    carts = {name: [0.0, 0.0] for name in names} | {"angle": [-0.1, 0.1], "angular_velocity": [-1.0, 1.0]}
    pq.write_table(pa.table(carts), straight.folder / "carts.parquet")
    assert straight.predict("carts.parquet")["to_the_right"] == [False, True], "it pushes under the pole"
    resumed = straight.resume(tmp_path / "resumed", step=10)
    assert_same_bits(straight.checkpoint(), resumed.checkpoint())


def read_video(path: Path) -> NDArray[np.uint8]:
    """All frames in grey; ffmpeg fails where it cannot play the file."""
    import imageio_ffmpeg

    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(path)]
    command += ["-f", "rawvideo", "-pix_fmt", "gray", "-"]
    done = subprocess.run(command, capture_output=True, timeout=DEADLINE_S, check=True)
    return np.frombuffer(done.stdout, np.uint8).reshape(-1, 400, 600)


def test_numpy_trainer_learns_never_loads_torch_and_resumes_exactly(tmp_path: Path) -> None:
    straight = Example.run_as_documented("numpy_trainer", tmp_path / "straight", PYTHONPROFILEIMPORTTIME="1")
    loaded = set(re.findall(r"(?m)^import time: .*\| +([\w.]+)$", straight.output()))
    assert {"numpy", "gen_worker.trainer.loop"} <= loaded
    assert "torch" not in loaded
    validated = [values["val/loss"] for values in straight.metrics().values() if "val/loss" in values]
    assert len(validated) == 10
    assert validated[-1] < 0.15, "the variance of the ratings is about 1, their noise 0.04"
    assert isinstance(straight.checkpoint().state["likes"], np.ndarray)
    found = straight.predict("validation.parquet", "person")
    assert len(found["rating"]) == len(found["person"]) > 0
    resumed = straight.resume(tmp_path / "resumed", step=1_500)
    assert_same_bits(straight.checkpoint(), resumed.checkpoint())
