"""Checkpoints of the released format v1 stay readable. The files are never rewritten; a new format adds its own."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gen_worker.contract.checkpoints.choice import scan
from gen_worker.trainer.checkpoints.store import CheckpointStore

FOLDER = Path(__file__).parent / "checkpoint_v1"


@pytest.mark.parametrize(
    ("name", "step", "final"), [("step-00000002.pt", 2, False), ("final.safetensors", 4, True)]
)
def test_v1_loads_to_the_values_it_was_written_with(name, step, final):
    checkpoint = CheckpointStore(FOLDER).load(FOLDER / name)
    assert (checkpoint.step, checkpoint.epoch, checkpoint.final) == (step, step // 2, final)
    model = checkpoint.state["model"]
    assert model["fc.weight"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert model["tied.a"].tolist() == [1.0, 2.0, 3.0, 4.0]
    model["tied.a"][2] = 9.0
    assert model["tied.b"].tolist() == [9.0, 4.0, 5.0, 6.0]
    assert model["half"].dtype == torch.bfloat16
    assert model["param"].requires_grad
    assert checkpoint.state["optimizer"]["param_groups"] == [
        {"lr": 1e-3, "betas": (0.9, 0.999), "params": [0]}
    ]
    assert checkpoint.state["optimizer"]["state"][0]["step"].item() == 3.0
    assert checkpoint.state["array"].dtype == np.int16
    assert checkpoint.state["array"].tolist() == [3, 2, 1, 0]
    assert type(checkpoint.state["scalar"]) is np.float32
    plain = {key: checkpoint.state[key] for key in ("big", "inf", "none", "blob", "$odd")}
    assert plain == {"big": 2**80, "inf": float("inf"), "none": None, "blob": b"\x00\xff", "$odd": True}
    assert checkpoint.loop == {"next_due": step + 1}
    assert checkpoint.cursor == {"epoch": 1, "batch": step, "manifest": "sha256:00"}
    assert checkpoint.rng["python"] == (3, (1, 2, 3), None)
    assert checkpoint.rng["numpy"].tolist() == [0, 1, 2]
    assert checkpoint.identity == {"config_digest": "sha256:11", "code": "abc"}
    assert checkpoint.metric == ("val/loss", 0.25, "min")


def test_v1_author_files_load():
    checkpoint = CheckpointStore(FOLDER).load(FOLDER / "step-00000002.meta.json")
    assert (checkpoint.author_files / "note.txt").read_text() == "by the author\n"
    assert checkpoint.author_payload == {"rank": 4}


def test_v1_resume_order_and_the_gate():
    checkpoint, passed_over = CheckpointStore(FOLDER).newest_verified()
    assert checkpoint.step == 4
    assert passed_over == []
    by_stem = {info.stem: info for info in scan(FOLDER)[0]}
    assert not by_stem["step-00000003"].verified
    assert by_stem["step-00000003"].reason == "non-finite values in w"


def test_v1_plain_state_loads():
    assert CheckpointStore(FOLDER).load(FOLDER / "plain.json").state == {"w": [1.0, 2.0], "step": 7}


def test_v1_data_files_open_with_the_plain_libraries():
    flat = torch.load(FOLDER / "step-00000002.pt", weights_only=True)
    assert flat["model.fc.weight"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert flat["optimizer.state.0.exp_avg"].shape == (2, 3)
    assert load_file(FOLDER / "final.safetensors")["model.half"].tolist() == [1.5, -2.0]
