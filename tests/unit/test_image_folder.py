"""A folder of pictures, one subfolder for each class, as rows by number: what is read, in which order, what is refused."""

import io
import logging
import shutil
import struct
import subprocess
import sys
import zlib
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gen_worker.errors import CheckpointError, InputError, TrainingCanceled
from gen_worker.pytorch.config import ColumnSpec, ColumnsSpec, ImageSpec
from gen_worker.pytorch.data.columns import fit_columns
from gen_worker.pytorch.image_folder import ImageFolder, decode_image
from gen_worker.trainer import (
    Callback,
    RunHandle,
    StepContext,
    StepResult,
    Trainer,
    TrainerConfig,
    TrainingJobSpec,
    batch_to_torch,
    global_rows,
    load_checkpoint,
)
from gen_worker.trainer.sources.base import SourceOptions
from gen_worker.trainer.sources.opening import open_own_data


def draw(path: Path, value: int, *, size: tuple[int, int] = (6, 4), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode == "L" else (value, 0, 255 - value)).save(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    for number in range(3):
        draw(folder / "dog" / f"{number}.png", number)
        draw(folder / "cat" / "young" / f"{number}.jpg", 100 + number)
    draw(folder / "cat" / "old.PNG", 9, mode="L")
    return folder


def test_classes_are_the_folders_and_rows_are_in_the_order_of_their_names(root: Path) -> None:
    data = ImageFolder(str(root))
    assert data.classes == ["cat", "dog"]
    assert data.paths == [
        "cat/old.PNG",
        "cat/young/0.jpg",
        "cat/young/1.jpg",
        "cat/young/2.jpg",
        "dog/0.png",
        "dog/1.png",
        "dog/2.png",
    ]
    assert data.labels.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert len(data) == 7
    assert data[5] == {
        "image": {"bytes": (root / "dog" / "1.png").read_bytes(), "path": str(root / "dog" / "1.png")},
        "label": 1,
    }
    assert "7 images of 2 classes" in repr(data)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_batch_is_arrow_with_the_bytes_that_the_runner_decodes(root: Path, threads: int) -> None:
    data = ImageFolder(str(root), threads=threads)
    batch = data.collate_fn(data.__getitems__([6, 0, 4]))
    assert batch.schema == data.schema
    assert batch.column("label").to_pylist() == [1, 0, 1]
    spec = ColumnsSpec(
        inputs={"image": ColumnSpec(image=ImageSpec(size=[4, 6]), dtype="uint8")}, target="label"
    )
    inputs, target = fit_columns(spec, data.schema, device="cpu").read(batch)
    assert inputs.shape == (3, 3, 4, 6)
    assert inputs[:, 0, 0, 0].tolist() == [2, 9, 0]
    assert target.tolist() == [1, 0, 1]


def test_with_a_size_a_batch_holds_pixels_for_any_trainer_class(root: Path) -> None:
    data = ImageFolder(str(root), size=[8, 5])
    batch = data.collate_fn(data.__getitems__([4, 5]))
    assert batch.schema == data.schema
    tensors = batch_to_torch(batch)
    assert (tuple(tensors["image"].shape), str(tensors["image"].dtype)) == ((2, 3, 8, 5), "torch.uint8")
    assert tensors["image"][:, 0, 0, 0].tolist() == [0, 1]
    assert tensors["image"][0, :, 0, 0].tolist() == [0, 0, 255]
    grey = ImageFolder(str(root), size=[4, 6], mode="L")
    assert grey[0]["image"].shape == (1, 4, 6)
    assert grey.collate_fn([grey[0]])[:0].num_rows == 0


def test_a_file_that_is_no_picture_is_named(root: Path) -> None:
    (root / "dog" / "1.png").write_bytes(b"not a picture")
    decoded, encoded = ImageFolder(str(root), size=[4, 4]), ImageFolder(str(root))
    with pytest.raises(InputError, match=r"pictures/dog/1\.png cannot be decoded as an image \(13 bytes\)"):
        decoded.__getitems__([0, 5])
    spec = ColumnsSpec(inputs={"image": ColumnSpec(image=ImageSpec(size=[4, 4]))})
    columns = fit_columns(spec, encoded.schema, device="cpu")
    with pytest.raises(InputError, match=r"pictures/dog/1\.png cannot be decoded"):
        columns.read(encoded.collate_fn(encoded.__getitems__([0, 5])))
    (root / "dog" / "1.png").unlink()
    with pytest.raises(InputError, match=r"dog/1\.png cannot be read: No such file"):
        encoded[5]


def test_a_small_file_of_very_many_pixels_is_refused_before_it_is_decoded() -> None:
    width, height = 20_000, 20_000
    content = io.BytesIO()
    Image.new("1", (1, 1)).save(content, "PNG")
    png = bytearray(content.getvalue())
    png[16:24] = struct.pack(">II", width, height)
    png[29:33] = struct.pack(">I", zlib.crc32(png[12:29]))
    with pytest.raises(InputError, match="decompression bomb"):
        decode_image(bytes(png), size=(4, 6), mode="RGB", where="x")


def test_what_is_left_out_is_said(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    (root / "cat" / "notes.txt").touch()
    (root / "cat" / ".hidden").touch()
    with caplog.at_level(logging.WARNING):
        assert len(ImageFolder(str(root))) == 7
    (message,) = caplog.messages
    assert message.startswith("1 files in")
    assert "cat/notes.txt" in message


def test_the_fingerprint_tells_other_pictures_and_not_another_place(root: Path, tmp_path: Path) -> None:
    first = ImageFolder(str(root)).fingerprint()
    assert ImageFolder(str(shutil.copytree(root, tmp_path / "copy"))).fingerprint() == first
    draw(root / "dog" / "3.png", 4)
    assert ImageFolder(str(root)).fingerprint() != first


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"root": "nowhere"}, "nowhere cannot be read: No such file"),
        ({"root": "empty"}, "has no folders: expected one folder"),
        ({"root": "bare"}, "bare/cat has no images"),
        ({"root": "pictures", "size": [32]}, "size: found .32., expected height and width"),
        ({"root": "pictures", "mode": "CMYK"}, "mode: found 'CMYK', expected L or RGB"),
        ({"root": "pictures", "threads": 0}, "threads: found 0"),
    ],
)
def test_what_cannot_be_read_is_refused_at_once(
    root: Path, tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bare" / "cat").mkdir(parents=True)
    with pytest.raises(InputError, match=said):
        ImageFolder(**{**options, "root": str(tmp_path / options["root"])})


def test_it_needs_no_torch() -> None:
    code = "import gen_worker.pytorch.image_folder, sys; print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "False\n"
    )


def test_pixels_are_the_same_whichever_way_they_are_decoded(root: Path) -> None:
    encoded, decoded = ImageFolder(str(root)), ImageFolder(str(root), size=[9, 7])
    spec = ColumnsSpec(inputs={"image": ColumnSpec(image=ImageSpec(size=[9, 7]), dtype="uint8")})
    inputs, _ = fit_columns(spec, encoded.schema, device="cpu").read(
        encoded.collate_fn(encoded.__getitems__(range(7)))
    )
    pixels = np.stack([decoded[index]["image"] for index in range(7)])
    assert (inputs.numpy() == pixels).all()


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_batch_end(self, run: RunHandle, batch: Any, result: StepResult) -> None:
        if run.state.step == self._step:
            run.ctx.is_canceled.request("cancelled by the test")


def make(folder: Path, root: Path, *callbacks: Callback) -> Trainer:
    column = {"image": {"size": [8, 8]}, "augment": {"crop_padding": 1, "horizontal_flip": 0.5}}
    hyperparams = {
        "model": {"type": "cnn", "args": {"out_features": 2, "channels": [4], "hidden": [8]}},
        "columns": {"inputs": {"image": column}, "target": "label"},
        "loss": "cross_entropy",
        "threads": 1,
    }
    config = TrainerConfig(
        epochs=4, batch_size=3, shuffle=True, metric_every=1, checkpoint_every=2, hyperparams=hyperparams
    )
    data = {"train_data": ImageFolder(str(root)), "validation_data": ImageFolder(str(root))}
    return Trainer(
        "gen_worker.pytorch_runner:PyTorchTrainer", config, **data, callbacks=callbacks, folder=folder
    )


def test_the_runner_trains_on_a_folder_resumes_exactly_and_keeps_the_names_of_the_classes(
    root: Path, tmp_path: Path
) -> None:
    record = make(tmp_path / "straight", root).train()
    assert (record.step, record.epoch) == (12, 4)
    with pytest.raises(TrainingCanceled):
        make(tmp_path / "stopped", root, StopAt(5)).train()
    resumed = make(tmp_path / "stopped", root)
    assert resumed.train().metrics == record.metrics
    assert load_checkpoint(tmp_path / "stopped")["classes"] == ["cat", "dog"]


def test_a_resume_on_other_pictures_or_other_classes_is_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingCanceled):
        make(tmp_path / "run", root, StopAt(5)).train()
    draw(root / "dog" / "3.png", 4)
    with pytest.raises(InputError, match="fingerprint was"):
        make(tmp_path / "run", root).train()
    (root / "dog" / "3.png").unlink()
    trainer = make(tmp_path / "run", root)
    trainer.train()
    plugin, state, ctx = trainer._injected.trainer, trainer.model_state, trainer.attempt.loop.parts.ctx
    payload = {**plugin.state_dict(state), "classes": ["bird", "cat"]}
    with pytest.raises(CheckpointError, match="on the classes bird, cat, the data now has cat, dog"):
        plugin.load_state_dict(state, payload, ctx)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_short_last_batch_knows_its_rows_over_all_processes(root: Path, rank: int) -> None:
    options = SourceOptions(batch_size=4, rank=rank, world_size=2)
    source = open_own_data(ImageFolder(str(root)), options)
    ctx = StepContext(job=TrainingJobSpec(run_id="r", max_steps=1), rank=rank, world_size=2)
    found = [(batch.num_rows, global_rows(batch, ctx)) for batch in islice(source.batches(), 2)]
    assert found == [(2, 4), (1 + rank, 3)]
