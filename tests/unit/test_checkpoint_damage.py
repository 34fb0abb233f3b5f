"""Every flipped bit of a checkpoint is found by whoever reads it; what no reader can take is an error in words."""

import io
import json
import pickle
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from gen_worker.contract.checkpoints.choice import read_named, scan, verify_files
from gen_worker.contract.checkpoints.meta import encode_meta, parse_meta
from gen_worker.errors import CheckpointError
from gen_worker.trainer.artifacts import ArtifactWriter, CheckpointContent
from gen_worker.trainer.checkpoints.store import CheckpointStore
from gen_worker.trainer.restore.weights import load_weights

DEADLINE_S = 60.0


@pytest.fixture(scope="module", params=["pt", "safetensors"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints")
    with ArtifactWriter(path, path / "samples", run_id="run", attempt=2, format=request.param) as writer:
        writer.save_checkpoint(
            CheckpointContent(
                step=100,
                final=False,
                epoch=3,
                state={
                    "weight": torch.arange(6.0).reshape(2, 3),
                    "lr": 0.001,
                    "step": 100,
                    "n": np.arange(4),
                },
                loop={"version": 1, "is_work_due": False},
                cursor={"version": 1, "epoch": 3, "batch": 7},
                rng={"python": [1, 2, 3]},
                identity={"config_digest": "abc"},
                metric=("val/loss", 0.5, "min"),
            )
        )
        writer.wait(DEADLINE_S)
    return path


def flips(content: bytes, *, places: list[int] | range) -> Any:
    damaged = bytearray(content)
    for place in places:
        for bit in range(8):
            damaged[place] ^= 1 << bit
            yield f"byte {place}, bit {bit}", bytes(damaged)
            damaged[place] ^= 1 << bit


def test_no_flipped_bit_of_a_meta_is_taken(folder: Path) -> None:
    path = folder / "step-00000100.meta.json"
    content = path.read_bytes()
    assert parse_meta(content, path.name).digest
    taken = []
    for where, damaged in flips(content, places=range(len(content))):
        try:
            parse_meta(damaged, path.name)
        except CheckpointError:
            continue
        taken.append(where)
    assert taken == []


def test_a_damaged_meta_is_never_taken_for_a_plain_state(folder: Path, tmp_path: Path) -> None:
    """A flipped bit in the name of `schema_version` leaves a document with a `state`."""
    content = (folder / "step-00000100.meta.json").read_bytes()
    for name in ("step-00000100.meta.json", "copy.json"):
        path = tmp_path / name
        path.write_bytes(content.replace(b'"schema_version"', b'"schema_versioo"', 1))
        with pytest.raises(CheckpointError):
            read_named(path)


@pytest.mark.parametrize("cut", [1, 2, 5, 40, 80, 100])
def test_a_meta_that_was_cut_is_not_taken_for_an_old_one(folder: Path, cut: int) -> None:
    content = (folder / "step-00000100.meta.json").read_bytes()
    for tail in (b"", b"}", b"}\n", b'"}\n'):
        damaged = content[:-cut] + tail
        if damaged == content:
            continue
        with pytest.raises(CheckpointError):
            parse_meta(damaged, "step-00000100.meta.json")


def test_a_field_of_a_later_release_is_read_past(folder: Path) -> None:
    import hashlib

    content = (folder / "step-00000100.meta.json").read_bytes()
    covered = content.rpartition(b',"digest":')[0] + b',"later":{"a":1}'
    digest = hashlib.sha256(covered).hexdigest().encode()
    assert parse_meta(covered + b',"digest":"sha256:' + digest + b'"}\n', "later").step == 100


def test_a_copy_of_an_old_meta_does_not_get_a_digest_that_it_never_had(folder: Path) -> None:
    meta = parse_meta((folder / "step-00000100.meta.json").read_bytes(), "new")
    old = parse_meta(encode_meta(meta, with_digest=False), "old")
    assert (old.digest, old.step) == ("", 100)


def test_flipped_bits_of_the_data_are_found_by_the_loader_and_by_verify(folder: Path, tmp_path: Path) -> None:
    (info,), _ = scan(folder)
    content = info.data_path.read_bytes()
    (tmp_path / info.meta_path.name).write_bytes(info.meta_path.read_bytes())
    places = random.Random(1).sample(range(len(content)), 60)
    for where, damaged in flips(content, places=places):
        (tmp_path / info.data_path.name).write_bytes(damaged)
        with pytest.raises(CheckpointError):
            CheckpointStore(tmp_path).load(tmp_path / info.meta_path.name)
        (copied,), _ = scan(tmp_path)
        with pytest.raises(CheckpointError):
            pytest.fail(where) if verify_files(copied) else None


NESTED = b'{"a":' * 200_000 + b"1" + b"}" * 200_000


@pytest.mark.parametrize(
    "document",
    [
        NESTED,
        b'{"state":' + NESTED + b"}",
        b'{"schema_version":"trainer_checkpoint.v1","state":' + NESTED + b"}",
    ],
)
def test_a_deeply_nested_document_is_refused_in_words(document: bytes, tmp_path: Path) -> None:
    for name in ("step-00000001.meta.json", "start.json"):
        (tmp_path / name).write_bytes(document)
        with pytest.raises(CheckpointError):
            CheckpointStore(tmp_path).load(tmp_path / name)


def test_a_state_as_deep_as_a_reader_can_go_is_refused_in_words(folder: Path, tmp_path: Path) -> None:
    """Deep enough for the parser, too deep for those that come after it."""
    meta = json.loads((folder / "step-00000100.meta.json").read_text())
    del meta["digest"]
    for depth in (100, 400, 900, 2000):
        meta["state"] = {"deep": 0}
        text = json.dumps(meta)
        nested = '{"$tuple":[' * depth + "1" + "]}" * depth
        (tmp_path / "step-00000100.meta.json").write_text(
            text.replace('{"deep": 0}', f'{{"deep": {nested}}}')
        )
        data = next(path for path in folder.iterdir() if path.suffix in (".pt", ".safetensors"))
        (tmp_path / data.name).write_bytes(data.read_bytes())
        try:
            CheckpointStore(tmp_path).load(tmp_path / "step-00000100.meta.json")
        except CheckpointError:
            continue


class TestWeightsOfOthers:
    """Files that carry no hash: damage cannot be found, but whatever is wrong with one is said in words."""

    @pytest.fixture
    def module(self) -> torch.nn.Module:
        return torch.nn.Linear(3, 2)

    @pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
    def test_damage_is_an_error_in_words_or_other_numbers(
        self, module: torch.nn.Module, tmp_path: Path, suffix: str
    ) -> None:
        path = tmp_path / f"weights{suffix}"
        if suffix == ".pt":
            torch.save(module.state_dict(), path)
        else:
            save_file(module.state_dict(), path)
        content = path.read_bytes()
        places = random.Random(2).sample(range(len(content)), min(len(content), 120))
        for _, damaged in flips(content, places=places):
            path.write_bytes(damaged)
            try:
                load_weights(module, path)
            except CheckpointError:
                continue
        for size in range(0, len(content), 97):
            path.write_bytes(content[:size])
            with pytest.raises(CheckpointError):
                load_weights(module, path)

    def test_a_zip_bomb_is_refused_before_it_is_unpacked(
        self, module: torch.nn.Module, tmp_path: Path
    ) -> None:
        path = tmp_path / "weights.pt"
        torch.save(module.state_dict(), path)
        bomb = tmp_path / "bomb.pt"
        with zipfile.ZipFile(path) as source, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as target:
            for item in source.infolist():
                target.writestr(item.filename, source.read(item))
            target.writestr("weights/data/9", bytes(64 << 20))
        with pytest.raises(CheckpointError, match="compressed"):
            load_weights(module, bomb)

    def test_a_pickle_of_any_depth_is_refused_in_words(self, module: torch.nn.Module, tmp_path: Path) -> None:
        deep: Any = {}
        for _ in range(100):
            deep = {"model": deep}
        path = tmp_path / "deep.pt"
        torch.save(deep, path)
        with pytest.raises(CheckpointError):
            load_weights(module, path)
        buffer = io.BytesIO()
        pickle.dump({"weight": object}, buffer)
        path.write_bytes(buffer.getvalue())
        with pytest.raises(CheckpointError):
            load_weights(module, path)
