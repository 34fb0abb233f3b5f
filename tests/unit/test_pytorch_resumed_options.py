"""The runner after a resume with other settings: it trains as a loop that was written by hand and changed at that step."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from gen_worker.errors import InputError
from gen_worker.pytorch.trainer import PyTorchTrainer
from gen_worker.trainer import Trainer, TrainerConfig
from gen_worker.trainer.arrow_feed import ArrowFeed
from gen_worker.trainer.compute.optim import warmup_cosine_factor

FIRST, LAST, BATCH = 5, 12, 8
BASE: dict[str, Any] = {
    "model": {"type": "mlp", "args": {"out_features": 1, "hidden": [6]}},
    "columns": {"inputs": {"x": "x"}, "target": {"column": "y", "shape": [1]}},
    "loss": "MSELoss",
    "optimizer": {"name": "AdamW", "args": {"weight_decay": 0.0, "betas": [0.9, 0.999]}},
    "learning_rate": 0.05,
    "scheduler": {"name": "warmup_cosine", "args": {"warmup_steps": 2, "total_steps": 20}},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    x = np.random.default_rng(0).standard_normal((BATCH * LAST, 4)).astype("float32")
    columns = {
        "x": pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), 4),
        "y": pa.array(x.sum(axis=1)),
    }
    path = tmp_path_factory.mktemp("data") / "rows.parquet"
    pq.write_table(pa.table(columns), path)
    return path


def trainer(folder: Path, data: Path, hyperparams: dict[str, Any], steps: int, **config: Any) -> Trainer:
    settings = TrainerConfig(
        max_steps=steps, batch_size=BATCH, checkpoint_every=0, hyperparams=hyperparams, **config
    )
    return Trainer(PyTorchTrainer, settings, train_data=data, folder=folder)


def changed_after(folder: Path, data: Path, first: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    trainer(folder, data, first, FIRST).train()
    again = trainer(folder, data, then, LAST)
    again.train()
    state: dict[str, Any] = again.model_state.module.state_dict()
    return state


def by_hand(start: dict[str, Any], data: Path, first: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 1))
    model.load_state_dict(dict(zip(model.state_dict(), start.values(), strict=True)))
    optimizer = torch.optim.AdamW(model.parameters())
    with ArrowFeed.open([str(data)], batch_size=BATCH) as feed:
        for step, batch in zip(range(LAST), feed.batches(), strict=False):
            now = first if step < FIRST else then
            rates = now["scheduler"]["args"]
            factor = warmup_cosine_factor(rates["warmup_steps"], rates["total_steps"], 0.0)
            args = now["optimizer"]["args"]
            optimizer.param_groups[0].update(
                lr=now["learning_rate"] * factor(step),
                weight_decay=args["weight_decay"],
                betas=tuple(args["betas"]),
            )
            x = torch.from_numpy(np.stack(batch["x"].to_numpy(zero_copy_only=False)))
            y = torch.from_numpy(batch["y"].to_numpy().copy()).reshape(-1, 1)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            if now.get("gradient_clip_norm"):
                torch.nn.utils.clip_grad_norm_(model.parameters(), now["gradient_clip_norm"])
            optimizer.step()
    return model.state_dict()


CHANGES: dict[str, dict[str, Any]] = {
    "learning rate": {"learning_rate": 0.005},
    "weight decay": {"optimizer": {"name": "AdamW", "args": {"weight_decay": 0.5, "betas": [0.9, 0.999]}}},
    "betas": {"optimizer": {"name": "AdamW", "args": {"weight_decay": 0.0, "betas": [0.5, 0.9]}}},
    "warm-up": {"scheduler": {"name": "warmup_cosine", "args": {"warmup_steps": 10, "total_steps": 20}}},
    "length": {"scheduler": {"name": "warmup_cosine", "args": {"warmup_steps": 2, "total_steps": 40}}},
    "gradient clip": {"gradient_clip_norm": 0.01},
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_setting_takes_effect_as_in_a_loop_by_hand(tmp_path: Path, data: Path, name: str) -> None:
    then = BASE | CHANGES[name]
    fresh = trainer(tmp_path / "fresh", data, BASE, 1, fast_dev_run=0)
    start = _initial_weights(fresh)
    changed = changed_after(tmp_path / "changed", data, BASE, then)
    kept = changed_after(tmp_path / "kept", data, BASE, BASE)
    for ours, theirs in (
        (kept, by_hand(start, data, BASE, BASE)),
        (changed, by_hand(start, data, BASE, then)),
    ):
        for one, other in zip(ours.values(), theirs.values(), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert any(not torch.equal(kept[key], changed[key]) for key in kept)


def _initial_weights(fresh: Trainer) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    plugin = fresh._injected.trainer
    assert isinstance(plugin, PyTorchTrainer)
    configure = plugin.configure

    def remember(ctx: Any) -> Any:
        state = configure(ctx)
        seen.update({key: value.clone() for key, value in state.module.state_dict().items()})
        return state

    plugin.configure = remember  # type: ignore[method-assign]
    fresh.train()
    return seen


def test_another_optimizer_or_schedule_is_refused(tmp_path: Path, data: Path) -> None:
    trainer(tmp_path, data, BASE, FIRST).train()
    for section, words in (
        ({"optimizer": "SGD"}, "was AdamW and is now SGD"),
        ({"scheduler": {"name": "StepLR", "args": {"step_size": 3}}}, "was LambdaLR and is now StepLR"),
    ):
        with pytest.raises(InputError, match=words):
            trainer(tmp_path, data, BASE | section, LAST).train()
