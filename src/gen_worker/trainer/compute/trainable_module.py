"""Checkpoints of the trainable parameters (LoRA) and the optimizer.

A folder with `lora.safetensors`, `optimizer.pt` and, written last, `checkpoint_meta.json` with the digests of both and of
itself. The single `.pt` file of earlier releases is still read. Nothing here unpickles code.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gen_worker.contract.files.durable import replace_file
from gen_worker.contract.files.hashes import hash_bytes
from gen_worker.contract.screen_repr import name_some
from gen_worker.errors import CheckpointError
from gen_worker.trainer.checkpoints.foreign import load_pickle

if TYPE_CHECKING:
    import torch

PRIMARY_FILE = "lora.safetensors"
OPTIMIZER_FILE = "optimizer.pt"
META_FILE = "checkpoint_meta.json"
FORMAT = "lora_safetensors_v1"
_OLD_FORMAT = "trainable_module.v1"
_BUFFER_PREFIX = "buffers/"
_DIGEST_PREFIX = "meta-sha256:"


class NothingTrainableError(CheckpointError, ValueError):
    """The module has no parameter with `requires_grad`."""


def save_trainable_module_checkpoint(
    *,
    module: "torch.nn.Module",
    optimizer: "torch.optim.Optimizer | None",
    output_dir: str | Path,
    step: int,
    final: bool,
    model_name_or_path: str = "",
    metadata: Mapping[str, Any] | None = None,
    buffers: Iterable[str] = (),
) -> dict[str, Any]:
    """Write the trainable parameters, the named buffers and the optimizer's state into `output_dir`.

    Each file is written whole and synced, the meta file last. Returns the meta with the paths of the files
    (`primary_path`, `optimizer_path`). `metadata` (JSON values) is part of it.
    """
    from safetensors.torch import save

    folder = Path(output_dir)
    tensors = _named_tensors(module, list(buffers), folder)
    meta: dict[str, Any] = {
        "format": FORMAT,
        "step": int(step),
        "final": bool(final),
        "model_name_or_path": str(model_name_or_path),
        "primary_path": PRIMARY_FILE,
        **({} if optimizer is None else {"optimizer_path": OPTIMIZER_FILE}),
    }
    own = _checked_metadata(
        metadata or {}, taken={*meta, "sha256", "digest", "optimizer_path"}, folder=folder
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be created: {error.strerror or error}") from error
    digests = {PRIMARY_FILE: _write(folder / PRIMARY_FILE, save(tensors))}
    if optimizer is not None:
        digests[OPTIMIZER_FILE] = _write(folder / OPTIMIZER_FILE, _optimizer_bytes(optimizer))
    meta |= {**own, "sha256": digests}
    meta["digest"] = _meta_digest(meta)
    _write(folder / META_FILE, _encode_meta(meta))
    paths: dict[str, Any] = {
        name: str(folder / meta[name]) for name in ("primary_path", "optimizer_path") if name in meta
    }
    return {**meta, **paths}


def load_trainable_module_checkpoint(
    *,
    module: "torch.nn.Module",
    optimizer: "torch.optim.Optimizer | None",
    checkpoint_dir: str | Path,
    strict: bool = True,
) -> dict[str, Any]:
    """Load a checkpoint into `module` (and `optimizer`). Returns its meta.

    Nothing is changed unless everything fits. `strict=False` loads the names that both sides have and casts dtypes;
    shapes must always be equal. `checkpoint_dir` may also be a file of an earlier release.
    """
    import torch

    folder = Path(checkpoint_dir)
    parameters, saved_buffers, optimizer_state, meta = _read(folder)
    targets: dict[str, torch.Tensor] = {**_trainable_parameters(module)}
    saved = dict(parameters)
    missing = [name for name in targets if name not in saved]
    unexpected = [name for name in saved if name not in targets]
    known_buffers = dict(module.named_buffers())
    unexpected += [name for name in saved_buffers if name not in known_buffers]
    targets.update({name: tensor for name, tensor in known_buffers.items() if name in saved_buffers})
    saved.update(saved_buffers)

    faults = []
    if strict and missing:
        faults.append(f"it lacks {_names(missing)}")
    if strict and unexpected:
        faults.append(f"it holds {_names(unexpected)}, which the module does not train")
    common = [name for name in targets if name in saved]
    for name in common:
        if saved[name].shape != targets[name].shape:
            faults.append(
                f"{name} has shape {tuple(saved[name].shape)}, the module's {tuple(targets[name].shape)}"
            )
        elif strict and saved[name].dtype != targets[name].dtype:
            faults.append(f"{name} is {saved[name].dtype}, the module's {targets[name].dtype}")
    if optimizer is not None and optimizer_state is None:
        faults.append("it holds no optimizer state")
    if faults:
        raise CheckpointError(f"{folder} does not fit this module: {'; '.join(faults)}")
    if optimizer is not None:
        try:
            optimizer.load_state_dict(optimizer_state)  # checks its groups before it changes anything
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{folder}: its optimizer state does not fit this optimizer: {error}"
            ) from error
    with torch.no_grad():
        for name in common:
            targets[name].copy_(saved[name])
    return meta


def _named_tensors(module: "torch.nn.Module", buffers: list[str], folder: Path) -> dict[str, "torch.Tensor"]:
    known_buffers = dict(module.named_buffers())
    unknown = [name for name in buffers if name not in known_buffers]
    if unknown:
        raise CheckpointError(
            f"{folder}: the module has no buffer {', '.join(unknown)}; it has {_names(known_buffers)}"
        )
    parameters = _trainable_parameters(module)
    if not parameters:
        raise NothingTrainableError(
            f"{folder}: the module has no trainable parameters, so there is nothing to save"
        )
    tensors = {**parameters, **{_BUFFER_PREFIX + name: known_buffers[name] for name in buffers}}
    return _with_own_memory({name: tensor.detach().cpu() for name, tensor in tensors.items()})


def _with_own_memory(tensors: dict[str, "torch.Tensor"]) -> dict[str, "torch.Tensor"]:
    """Copies tensors that share memory: the format holds no views."""
    seen: set[int] = set()
    for name, tensor in tensors.items():
        is_whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        if not is_whole or tensor.data_ptr() in seen:
            tensors[name] = tensor.contiguous().clone()
        seen.add(tensor.data_ptr())
    return tensors


def _checked_metadata(metadata: Mapping[str, Any], *, taken: set[str], folder: Path) -> dict[str, Any]:
    own = {str(name): value for name, value in metadata.items()}
    reserved = sorted(taken & set(own))
    if reserved:
        raise CheckpointError(f"{folder}: metadata has the reserved name {_names(reserved)}: rename it")
    for name, value in own.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"{folder}: metadata[{name!r}] cannot be written as JSON: {error}"
            ) from error
    return own


def _optimizer_bytes(optimizer: "torch.optim.Optimizer") -> bytes:
    import io

    import torch

    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    return buffer.getvalue()


_Parts = tuple[dict[str, "torch.Tensor"], dict[str, "torch.Tensor"], Any, dict[str, Any]]


def _read(path: Path) -> _Parts:
    """(parameters, buffers, optimizer state, meta) of a folder, or of a file of an earlier release."""
    if path.is_file():
        return _read_old_file(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if (path / PRIMARY_FILE).exists():
        return _read_folder(path)
    old = sorted(path.glob("*.pt"))
    if len(old) == 1:
        return _read_old_file(old[0])
    raise CheckpointError(f"{path} has no {PRIMARY_FILE}: give the folder that the checkpoint was written to")


def _read_folder(folder: Path) -> _Parts:
    from safetensors import SafetensorError
    from safetensors.torch import load

    meta = _read_meta(folder / META_FILE) if (folder / META_FILE).exists() else {}
    digests: Mapping[str, str] = meta.get("sha256", {})
    try:
        tensors = load(_verified_bytes(folder / PRIMARY_FILE, digests))
    except SafetensorError as error:
        raise CheckpointError(f"{folder / PRIMARY_FILE} cannot be read as safetensors: {error}") from error
    buffers = {
        name.removeprefix(_BUFFER_PREFIX): tensor
        for name, tensor in tensors.items()
        if name.startswith(_BUFFER_PREFIX)
    }
    parameters = {name: tensor for name, tensor in tensors.items() if not name.startswith(_BUFFER_PREFIX)}
    optimizer_state = None
    if (folder / OPTIMIZER_FILE).exists() and (not digests or OPTIMIZER_FILE in digests):
        optimizer_state = _load_safely(
            folder / OPTIMIZER_FILE, _verified_bytes(folder / OPTIMIZER_FILE, digests)
        )
    return parameters, buffers, optimizer_state, meta


def _encode_meta(meta: Mapping[str, Any]) -> bytes:
    return json.dumps(meta, indent=2, sort_keys=True).encode() + b"\n"


def _meta_digest(meta: Mapping[str, Any]) -> str:
    others = {name: value for name, value in meta.items() if name != "digest"}
    return "meta-" + hash_bytes(_encode_meta(others))


def _read_meta(path: Path) -> dict[str, Any]:
    """CheckpointError where its digest does not match. Earlier releases wrote no digest."""
    try:
        meta = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(meta, dict) or not isinstance(meta.get("sha256", {}), dict):
        raise CheckpointError(
            f"{path} is not a valid {META_FILE}: expected an object with the digests of the files"
        )
    # Also if the name of the field is damaged.
    has_digest = any(isinstance(value, str) and value.startswith(_DIGEST_PREFIX) for value in meta.values())
    if ("digest" in meta or has_digest) and meta.get("digest") != _meta_digest(meta):
        raise CheckpointError(f"{path} is damaged or was edited: its digest does not match")
    return meta


def _read_old_file(path: Path) -> _Parts:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    payload = _load_safely(path, content)
    found = payload.get("format") if isinstance(payload, dict) else None
    if found != _OLD_FORMAT:
        raise CheckpointError(f"{path} has the format {found!r}, expected {_OLD_FORMAT!r}")
    return payload["parameters"], payload["buffers"], payload["optimizer"], payload["extra"]


def _verified_bytes(path: Path, digests: Mapping[str, str]) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    expected = digests.get(path.name)
    if expected is not None and _sha256(content) != expected:
        raise CheckpointError(f"{path} is damaged or of another save: its SHA-256 differs from {META_FILE}")
    return content


def _load_safely(path: Path, content: bytes) -> Any:
    import io

    return load_pickle(io.BytesIO(content), path)


def _sha256(content: bytes) -> str:
    return hash_bytes(content).removeprefix("sha256:")


def _trainable_parameters(module: "torch.nn.Module") -> dict[str, "torch.Tensor"]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def _names(names: Iterable[str]) -> str:
    return name_some(list(names), 20) or "none"


def _write(path: Path, content: bytes) -> str:
    """Write durably; the SHA-256."""
    try:
        replace_file(path, content, mode=0o600)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}") from error
    return _sha256(content)
