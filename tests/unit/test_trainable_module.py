import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gen_worker.errors import CheckpointError
from gen_worker.trainer import (
    build_default_adamw_bundle,
    load_trainable_module_checkpoint,
    save_trainable_module_checkpoint,
)


class Lora(torch.nn.Module):
    """A frozen base, a trained adapter, and a buffer."""

    def __init__(self, rank: int = 2) -> None:
        super().__init__()
        self.base = torch.nn.Linear(4, 4)
        self.base.requires_grad_(False)
        self.down = torch.nn.Linear(4, rank, bias=False)
        self.up = torch.nn.Linear(rank, 4, bias=False)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x) + self.up(self.down(x))
        return result


def train(module: torch.nn.Module, bundle: Any, steps: int) -> None:
    for step in range(steps):
        bundle.optimizer.zero_grad()
        module(torch.full((2, 4), float(step + 1))).square().mean().backward()
        bundle.optimizer.step()
        bundle.scheduler.step()


def save(folder: Path, module: torch.nn.Module | None = None, optimizer: Any = None, **more: Any) -> Path:
    save_trainable_module_checkpoint(
        module=Lora() if module is None else module,
        optimizer=optimizer,
        output_dir=folder,
        step=1,
        final=False,
        **more,
    )
    return folder


def load(folder: Path, module: torch.nn.Module | None = None, optimizer: Any = None, **more: Any) -> Any:
    return load_trainable_module_checkpoint(
        module=Lora() if module is None else module, optimizer=optimizer, checkpoint_dir=folder, **more
    )


def test_a_resumed_module_ends_with_the_same_bits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Lora()
    frozen = {name: tensor.clone() for name, tensor in module.base.state_dict().items()}
    bundle = build_default_adamw_bundle(module, {"lr": 0.01})
    train(module, bundle, 3)
    scheduler = bundle.scheduler.state_dict()
    save(tmp_path / "deep" / "lora", module, bundle.optimizer, metadata={"scheduler": scheduler})
    train(module, bundle, 3)

    torch.manual_seed(99)
    other = Lora()
    other.base.load_state_dict(frozen)
    again = build_default_adamw_bundle(other, {"lr": 0.01})
    loaded = load(tmp_path / "deep" / "lora", other, again.optimizer)
    again.scheduler.load_state_dict(loaded["scheduler"])
    train(other, again, 3)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_what_is_returned_names_the_files_and_the_meta_file_can_be_moved_with_them(tmp_path: Path) -> None:
    module = Lora()
    optimizer = build_default_adamw_bundle(module).optimizer
    saved = save_trainable_module_checkpoint(
        module=module,
        optimizer=optimizer,
        output_dir=str(tmp_path / "a"),
        step=7,
        final=True,
        model_name_or_path="org/base",
        metadata={"rank": 2},
    )
    assert Path(saved["primary_path"]).is_file()
    assert Path(saved["optimizer_path"]).is_file()
    (tmp_path / "a").rename(tmp_path / "b")
    meta = json.loads((tmp_path / "b" / "checkpoint_meta.json").read_text())
    assert (meta["step"], meta["final"], meta["model_name_or_path"], meta["rank"]) == (7, True, "org/base", 2)
    assert load(tmp_path / "b", module, optimizer) == meta
    bare = save_trainable_module_checkpoint(
        module=module, optimizer=None, output_dir=tmp_path / "c", step=1, final=False
    )
    assert "optimizer_path" not in bare


def test_other_programs_read_the_file_and_the_frozen_rest_is_not_in_it(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    save(tmp_path)
    assert set(load_file(tmp_path / "lora.safetensors")) == {"down.weight", "up.weight"}


def test_views_and_shared_tensors_are_saved_as_they_are_seen(tmp_path: Path) -> None:
    module = Lora()
    whole = torch.arange(32.0).reshape(4, 8)
    module.down.weight = torch.nn.Parameter(whole[:2, :4])
    module.up.weight = torch.nn.Parameter(whole[:, ::4])
    save(tmp_path, module)
    other = Lora()
    load(tmp_path, other)
    assert torch.equal(other.down.weight, module.down.weight)
    assert torch.equal(other.up.weight, module.up.weight)


def test_asked_buffers_are_kept(tmp_path: Path) -> None:
    module = Lora()
    module.get_buffer("count").fill_(5)
    save(tmp_path, module, buffers=["count"])
    other = Lora()
    load(tmp_path, other)
    assert other.get_buffer("count").item() == 5
    with pytest.raises(CheckpointError, match="no buffer cuont; it has count"):
        save(tmp_path, module, buffers=["cuont"])


def test_names_that_do_not_fit_are_all_named_and_nothing_is_changed(tmp_path: Path) -> None:
    module = Lora()
    module.up.requires_grad_(False)
    module.base.bias.requires_grad_(True)
    save(tmp_path, module)
    other = Lora()
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(
        CheckpointError, match=r"it lacks up.weight; it holds base.bias, which the module does not train"
    ):
        load(tmp_path, other)
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in before.items())
    load(tmp_path, other, strict=False)
    assert torch.equal(other.down.weight, module.down.weight)
    assert torch.equal(other.up.weight, before["up.weight"])


def test_shapes_and_dtypes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    save(tmp_path, Lora(rank=3))
    with pytest.raises(CheckpointError, match=r"down.weight has shape \(3, 4\), the module's \(2, 4\)"):
        load(tmp_path, strict=False)
    half = Lora(rank=3).to(torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"down.weight is torch.float32, the module's torch.bfloat16"):
        load(tmp_path, half)
    load(tmp_path, half, strict=False)


def test_an_optimizer_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    module = Lora()
    optimizer = build_default_adamw_bundle(module).optimizer
    save(tmp_path / "bare", module)
    with pytest.raises(CheckpointError, match="holds no optimizer state"):
        load(tmp_path / "bare", module, optimizer)
    save(tmp_path / "full", module, optimizer)
    with pytest.raises(CheckpointError, match="does not fit this optimizer"):
        load(tmp_path / "full", module, build_default_adamw_bundle([module.up.weight]).optimizer)
    save(tmp_path / "full", module)  # without one, over a save that had one
    with pytest.raises(CheckpointError, match="holds no optimizer state"):
        load(tmp_path / "full", module, optimizer)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"f": print}, r"metadata\['f'\] cannot be written as JSON"),
        ({"step": 3}, "metadata has the reserved name step"),
    ],
)
def test_metadata_that_could_not_be_read_back_is_not_saved(
    tmp_path: Path, metadata: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        save(tmp_path, metadata=metadata)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_files_and_no_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, metadata={"n": 1})
    before = sorted(path.name for path in tmp_path.iterdir())

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(CheckpointError, match="No space left"):
        save(tmp_path, metadata={"n": 2})
    monkeypatch.undo()
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert load(tmp_path)["n"] == 1


def test_files_of_two_saves_are_not_taken_for_one(tmp_path: Path) -> None:
    save(tmp_path / "a")
    save(tmp_path / "b")
    (tmp_path / "b" / "lora.safetensors").replace(tmp_path / "a" / "lora.safetensors")
    with pytest.raises(CheckpointError, match="is damaged or of another save"):
        load(tmp_path / "a")


def test_a_folder_without_our_meta_file_is_read_by_its_names(tmp_path: Path) -> None:
    """As the original library writes it."""
    module = Lora()
    optimizer = build_default_adamw_bundle(module).optimizer
    save(tmp_path, module, optimizer)
    (tmp_path / "checkpoint_meta.json").unlink()
    other = Lora()
    assert load(tmp_path, other, build_default_adamw_bundle(other).optimizer) == {}
    assert torch.equal(other.up.weight, module.up.weight)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04broken"])
def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"a\.pt cannot be read"):
        load(tmp_path / "a.pt")
    (tmp_path / "lora.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        load(tmp_path)


def test_a_missing_folder_an_empty_one_and_another_format_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        load(tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"has no lora\.safetensors"):
        load(tmp_path)
    torch.save({"weights": torch.ones(1)}, tmp_path / "b.pt")
    with pytest.raises(CheckpointError, match="has the format None"):
        load(tmp_path / "b.pt")


def test_a_file_with_code_in_it_is_never_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path(tmp_path / "ran").touch, ())

    module = Lora()
    save(tmp_path / "a", module)
    (tmp_path / "a" / "checkpoint_meta.json").unlink()
    torch.save({"state": Evil()}, tmp_path / "a" / "optimizer.pt")
    torch.save({"format": Evil()}, tmp_path / "b.pt")
    for path in (tmp_path / "a", tmp_path / "b.pt"):
        with pytest.raises(CheckpointError, match="cannot be read"):
            load(path, module, build_default_adamw_bundle(module).optimizer)
    assert not (tmp_path / "ran").exists()


def test_a_module_without_trainable_parameters_is_a_value_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no trainable parameters") as caught:
        save(tmp_path, Lora().base)
    assert isinstance(caught.value, CheckpointError)


def test_no_flipped_bit_of_its_meta_is_taken(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 1)
    save_trainable_module_checkpoint(
        module=module, optimizer=None, output_dir=tmp_path, step=12, final=False, metadata={"rank": 8}
    )
    path = tmp_path / "checkpoint_meta.json"
    content = bytearray(path.read_bytes())
    said = json.loads(content)
    for place in range(len(content)):
        for bit in range(8):
            content[place] ^= 1 << bit
            path.write_bytes(content)
            content[place] ^= 1 << bit
            try:
                found = load_trainable_module_checkpoint(
                    module=module, optimizer=None, checkpoint_dir=tmp_path
                )
            except CheckpointError:
                continue
            assert found == said, f"byte {place}, bit {bit}: only what changes no value may be taken"


@pytest.mark.parametrize("text", ["[]", "3", '{"sha256": 3}', "{" * 9, '{"a":' * 100_000])
def test_a_meta_that_is_none_is_refused_in_words(tmp_path: Path, text: str) -> None:
    module = torch.nn.Linear(2, 1)
    save_trainable_module_checkpoint(module=module, optimizer=None, output_dir=tmp_path, step=1, final=True)
    (tmp_path / "checkpoint_meta.json").write_text(text)
    with pytest.raises(CheckpointError):
        load_trainable_module_checkpoint(module=module, optimizer=None, checkpoint_dir=tmp_path)
