"""Pictures are changed at random while training, as the config says: the same at every resume, never in evaluation."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from gen_worker.errors import InputError, SpecError, TrainingCanceled
from gen_worker.pytorch.config import AugmentSpec
from gen_worker.pytorch.data.augmentation import Augmentation, step_generator
from gen_worker.trainer import Callback, RunHandle, StepResult, Trainer, TrainerConfig

PICTURES = torch.randint(
    0, 256, (40, 3, 12, 10), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
)
ALL = {"crop_padding": 2, "horizontal_flip": 0.5, "brightness": 0.3, "contrast": 0.3, "erase": 0.5}


def change(pictures: torch.Tensor = PICTURES, *, step: int = 0, rank: int = 0, **spec: Any) -> torch.Tensor:
    before = pictures.clone()
    changed = Augmentation(AugmentSpec(**spec))(pictures, step_generator(7, step=step, rank=rank))
    assert torch.equal(pictures, before)  # the batch's memory is not ours
    assert (changed.shape, changed.dtype) == (pictures.shape, pictures.dtype)
    return changed


def test_the_same_step_gives_the_same_pictures_and_another_one_others() -> None:
    assert torch.equal(change(**ALL), change(**ALL))
    assert not torch.equal(change(**ALL), change(step=1, **ALL))
    assert not torch.equal(change(**ALL), change(rank=1, **ALL))


def test_no_other_random_stream_is_touched() -> None:
    before = torch.get_rng_state()
    change(**ALL)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_crop_is_a_piece_of_the_padded_picture() -> None:
    changed = change(crop_padding=3)
    padded = torch.nn.functional.pad(PICTURES, (3, 3, 3, 3))
    places = set()
    for picture, whole in zip(changed, padded, strict=True):
        found = {
            (y, x)
            for y in range(7)
            for x in range(7)
            if torch.equal(picture, whole[:, y : y + 12, x : x + 10])
        }
        assert len(found) >= 1
        places |= found
    assert {y for y, _ in places} == {x for _, x in places} == set(range(7))


def test_a_flip_mirrors_about_as_many_as_asked_for() -> None:
    changed = change(horizontal_flip=0.5)
    mirrored = [torch.equal(one, other.flip(-1)) for one, other in zip(changed, PICTURES, strict=True)]
    kept = [torch.equal(one, other) for one, other in zip(changed, PICTURES, strict=True)]
    assert all(one != other for one, other in zip(mirrored, kept, strict=True))
    assert 10 <= sum(mirrored) <= 30
    assert torch.equal(change(horizontal_flip=1.0), PICTURES.flip(-1))


def test_brightness_scales_and_contrast_keeps_the_mean() -> None:
    dark = (PICTURES // 4) + 50  # so that nothing is cut off at 0 or 255
    brighter = change(dark, brightness=0.2).float().mean((1, 2, 3)) / dark.float().mean((1, 2, 3))
    assert bool(((brighter > 0.79) & (brighter < 1.21)).all())
    assert float(brighter.std()) > 0.05
    changed = change(dark, contrast=0.4).float()
    assert torch.allclose(changed.mean((1, 2, 3)), dark.float().mean((1, 2, 3)), atol=0.6)
    spread = changed.std((1, 2, 3)) / dark.float().std((1, 2, 3))
    assert bool(((spread > 0.55) & (spread < 1.45)).all())
    bright = change(torch.full_like(PICTURES, 250), brightness=0.5)
    assert int(bright.max()) == 255  # cut off, not wrapped around


def test_what_is_erased_is_one_black_rectangle() -> None:
    white = torch.full_like(PICTURES, 255)
    changed = change(white, erase=1.0)
    for picture in changed:
        rows, columns = (
            (picture[0] == 0).any(1).nonzero().flatten(),
            (picture[0] == 0).any(0).nonzero().flatten(),
        )
        assert bool((picture[:, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] == 0).all())
        share = float((picture == 0).float().mean())
        assert 0.005 <= share <= 0.5
    assert 5 <= sum(bool((picture == 0).any()) for picture in change(white, erase=0.5)) <= 35


def test_a_setting_that_is_added_leaves_the_others_draws_as_they_were() -> None:
    flipped = change(horizontal_flip=0.5)
    both = change(horizontal_flip=0.5, brightness=1e-9)
    assert torch.equal(flipped, both)


def test_no_rows_are_no_trouble() -> None:
    assert change(PICTURES[:0], **ALL).shape == (0, 3, 12, 10)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (60, 3 * 8 * 8), dtype=np.uint8)
    column = pa.FixedSizeListArray.from_arrays(pa.array(pixels.reshape(-1)), 3 * 8 * 8)
    path = tmp_path_factory.mktemp("data") / "pixels.parquet"
    pq.write_table(
        pa.table({"x": column, "label": random.integers(0, 3, 60), "real": random.random(60)}), path
    )
    return path


def make(folder: Path, data: Path, *callbacks: Callback, augment: Any = ALL, **column: Any) -> Trainer:
    column = {"shape": [3, 8, 8], "scale": 1 / 255, **column}
    hyperparams = {
        "model": {"type": "cnn", "args": {"out_features": 3, "channels": [4], "hidden": [8], "dropout": 0.2}},
        "columns": {
            "inputs": {"x": {**column, "augment": augment} if augment else column},
            "target": "label",
        },
        "loss": "cross_entropy",
        "threads": 1,
    }
    config = TrainerConfig(
        epochs=3, batch_size=12, shuffle=True, metric_every=1, checkpoint_every=5, hyperparams=hyperparams
    )
    return Trainer(
        "gen_worker.pytorch_runner:PyTorchTrainer",
        config,
        train_data=data,
        validation_data=data,
        callbacks=callbacks,
        folder=folder,
    )


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_batch_end(self, run: RunHandle, batch: Any, result: StepResult) -> None:
        if run.state.step == self._step:
            run.ctx.is_canceled.request("cancelled by the test")


def test_a_resumed_run_sees_the_pictures_of_one_that_was_never_stopped(tmp_path: Path, data: Path) -> None:
    straight = make(tmp_path / "straight", data)
    record = straight.train()
    with pytest.raises(TrainingCanceled):
        make(tmp_path / "stopped", data, StopAt(7)).train()
    resumed = make(tmp_path / "stopped", data)
    assert resumed.train().metrics == record.metrics
    for name, value in straight.model_state.module.state_dict().items():
        assert torch.equal(value, resumed.model_state.module.state_dict()[name])
    plain = make(tmp_path / "plain", data, augment=None).train()
    assert plain.metrics["train/loss"] != record.metrics["train/loss"]


def test_held_out_pictures_stay_as_they_are(tmp_path: Path, data: Path) -> None:
    trainer, plain = make(tmp_path / "augmented", data), make(tmp_path / "plain", data, augment=None)
    trainer.train()
    plain.train()
    batch = pq.read_table(data).to_batches()[0]
    prepare, state = trainer.model_state.prepare, trainer.model_state
    expected = plain.model_state.prepare(batch)[0]
    assert torch.equal(prepare(batch)[0], expected)
    assert not torch.equal(prepare(batch, step=3)[0], expected)
    plugin = trainer._injected.trainer
    ctx = trainer.attempt.loop.parts.ctx
    assert not torch.equal(plugin.prepare_batch(batch, state, ctx)[0], expected)
    plugin.begin_evaluation("validation", state, ctx)
    assert torch.equal(plugin.prepare_batch(batch, state, ctx)[0], expected)


@pytest.mark.parametrize(
    ("column", "augment", "said"),
    [
        ({}, {"flip": 0.5}, "augment: unknown field `flip`"),
        ({}, {"horizontal_flip": 1.5}, "augment.horizontal_flip: found 1.5"),
        ({}, {"brightness": 0.0}, "augment: everything is off, expected at least one of crop_padding"),
        ({"shape": [3, 64]}, {"erase": 0.5}, "has shape [3, 64], expected [channels, height, width]"),
        (
            {"column": "real", "shape": None},
            {"contrast": 0.5},
            "brightness and contrast need uint8 pixels",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_step(
    tmp_path: Path, data: Path, column: dict[str, Any], augment: dict[str, Any], said: str
) -> None:
    with pytest.raises((SpecError, InputError)) as caught:
        make(tmp_path, data, augment=augment, **column).train()
    assert said in str(caught.value)
