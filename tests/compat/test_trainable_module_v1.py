"""The single file in which earlier releases kept a trainable module stays readable."""

from pathlib import Path

import pytest
import torch

from gen_worker.trainer import load_trainable_module_checkpoint

FOLDER = Path(__file__).parent / "trainable_module_v1"


@pytest.mark.parametrize("path", [FOLDER / "adapter.pt", FOLDER], ids=["the file", "its folder"])
def test_a_trainable_module_file_of_earlier_releases_loads(path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    module[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(module[1].parameters())
    extra = load_trainable_module_checkpoint(module=module, optimizer=optimizer, checkpoint_dir=path)
    assert extra == {"note": "plain values"}
    assert module[1].weight.tolist() == [[1.0, 2.0, 3.0]]
    assert module[1].bias.tolist() == [0.5]
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert len(optimizer.state) == 2
