"""A checkpoint outside of a run: its state comes back as it was saved, and other programs can read a plain file of it."""

import math
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gen_worker.errors import CheckpointError
from gen_worker.trainer import Trainer, export_checkpoint, load_checkpoint
from gen_worker.trainer.artifacts import ArtifactWriter, CheckpointContent


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "half": torch.arange(4, dtype=torch.bfloat16),
        "nested": {"list": [1, (2.5, None), {"deep": torch.ones(2)}], 7: "seven", (1, "a"): True},
        "array": np.arange(6.0).reshape(2, 3),
        "scalar": np.float32(1.5),
        "numbers": [0, 2**80, math.inf, b"bytes", "text", False],
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any]) -> Path:
    folder = tmp_path_factory.mktemp("run")
    with ArtifactWriter(folder / "checkpoints", folder / "samples", run_id="run") as writer:
        for step, saved in ((1, {"model": {"old": torch.zeros(1)}}), (2, state)):
            writer.save_checkpoint(
                CheckpointContent(
                    step=step,
                    epoch=0,
                    final=step == 2,
                    state=saved,
                    loop={},
                    cursor=None,
                    rng={},
                    identity={},
                )
            )
            writer.wait()
    return folder


def assert_same(found: Any, saved: Any) -> None:
    if isinstance(saved, torch.Tensor | np.ndarray):
        assert type(found) is type(saved)
        assert found.dtype == saved.dtype
        assert found.shape == saved.shape
        assert bool((found == saved).all())
    elif isinstance(saved, dict):
        assert type(found) is dict
        assert list(found) == list(saved)
        for key in saved:
            assert_same(found[key], saved[key])
    elif isinstance(saved, list | tuple):
        assert type(found) is type(saved)
        assert len(found) == len(saved)
        for one, other in zip(found, saved, strict=True):
            assert_same(one, other)
    else:
        assert type(found) is type(saved)
        assert found == saved


@pytest.mark.parametrize("name", ["", "checkpoints", "checkpoints/final.meta.json", "checkpoints/final.pt"])
def test_the_nested_state_comes_back_as_it_was_saved(run: Path, state: dict[str, Any], name: str) -> None:
    for load in (load_checkpoint, Trainer.load):
        assert_same(load(run / name), state)
        assert_same(load(str(run / name)), state)


def test_a_named_checkpoint_is_loaded_and_not_the_newest(run: Path) -> None:
    assert list(load_checkpoint(run / "checkpoints" / "step-00000001.meta.json")["model"]) == ["old"]


def test_what_cannot_be_loaded_says_why(run: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist: give a run's folder"):
        load_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        load_checkpoint(tmp_path)
    (tmp_path / "final.meta.json").write_bytes((run / "checkpoints" / "final.meta.json").read_bytes())
    damaged = bytearray((run / "checkpoints" / "final.pt").read_bytes())
    damaged[-1000] ^= 1
    (tmp_path / "final.pt").write_bytes(damaged)
    with pytest.raises(CheckpointError, match="hash mismatch"):
        load_checkpoint(tmp_path / "final.meta.json")


def test_an_exported_pt_is_understood_by_torch_alone(
    run: Path, state: dict[str, Any], tmp_path: Path
) -> None:
    out = export_checkpoint(run, tmp_path / "new" / "model.pt")
    found = torch.load(out, weights_only=True)
    assert_same(found["model"], dict(state["model"]))
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    model.load_state_dict(found["model"])
    torch.optim.AdamW(model.parameters()).load_state_dict(found["optimizer"])
    assert torch.equal(found["array"], torch.from_numpy(state["array"]))
    assert found["scalar"] == 1.5
    assert_same(found["nested"], state["nested"])
    assert_same(found["numbers"], state["numbers"])
    assert torch.load(export_checkpoint(run, out, part="half"), weights_only=True).dtype == torch.bfloat16
    assert [path.name for path in out.parent.iterdir()] == ["model.pt"]


def test_an_exported_safetensors_file_holds_the_weights_by_their_names(run: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    found = load_file(export_checkpoint(run, tmp_path / "model.safetensors"))
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    model.load_state_dict(found)
    with pytest.raises(CheckpointError, match=r"param_groups.* are not tensors: give a `part`"):
        export_checkpoint(run, tmp_path / "x.safetensors", part="optimizer")
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_tied_weights_keep_both_names_in_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    weight = torch.randn(3, 3)
    with ArtifactWriter(tmp_path / "checkpoints", tmp_path / "samples", run_id="run") as writer:
        saved = OrderedDict(one=weight, other=weight)
        content = CheckpointContent(
            step=1, epoch=0, final=True, state=saved, loop={}, cursor=None, rng={}, identity={}
        )
        writer.save_checkpoint(content)
        writer.wait()
    found = load_file(export_checkpoint(tmp_path, tmp_path / "tied.safetensors"))
    assert torch.equal(found["one"], weight)
    assert torch.equal(found["other"], weight)


def test_wrong_wishes_are_refused_with_what_there_is(run: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected \.pt or \.safetensors"):
        export_checkpoint(run, tmp_path / "model.bin")
    with pytest.raises(CheckpointError, match="has no part 'weights'; it has model, optimizer, half"):
        export_checkpoint(run, tmp_path / "model.pt", part="weights")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written"):
        export_checkpoint(run, tmp_path / "file" / "model.pt")


def test_the_command_writes_the_same_file(run: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gen_worker.trainer.checkpoints.export", run]
    done = subprocess.run([*command, tmp_path / "m.pt"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"wrote {tmp_path / 'm.pt'}: ")
    assert "model" in torch.load(tmp_path / "m.pt", weights_only=True)
    refused = subprocess.run([*command, tmp_path / "m.bin"], capture_output=True, text=True, check=False)
    assert refused.returncode == 11
    assert refused.stderr.startswith("gen_worker: input: ")
    assert len(refused.stderr.splitlines()) == 1
