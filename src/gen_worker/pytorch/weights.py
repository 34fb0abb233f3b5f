"""Warm starts: the weights of another run, or of anyone's file, into a model. Nothing else of that run is taken."""

import logging
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from gen_worker.errors import CheckpointError
from gen_worker.trainer.checkpoints.choice import META_SUFFIX
from gen_worker.trainer.checkpoints.store import CheckpointStore

logger = logging.getLogger("gen_worker.pytorch")

_MAX_LISTED = 12
# What wrappers put before the names of the module inside them.
_PREFIXES = ("_orig_mod.", "module.")
# Where files of others keep their weights.
_HOLDERS = ("model", "state_dict", "model_state_dict", "parameters")


def load_weights(
    module: torch.nn.Module, path: Path, *, strict: bool = True, part: Literal["model", "ema"] = "model"
) -> None:
    """Put the weights of a checkpoint (`.meta.json`, or its data file) or of a `.pt`/`.safetensors` into `module`.

    Nothing is changed unless all of it fits; without `strict` what fits by name and shape is taken, and the log says
    what is not. Never unpickles code.
    """
    saved = _without_prefix(_read(Path(path), part))
    target = module.state_dict()
    missing = [name for name in target if name not in saved]
    unexpected = [name for name in saved if name not in target]
    fitting = [name for name in target if name in saved]
    reshaped = [name for name in fitting if saved[name].shape != target[name].shape]
    lines = [
        *([f"  - the model has, and the file lacks: {_listed(missing)}"] if missing else []),
        *([f"  - the file has, and the model lacks: {_listed(unexpected)}"] if unexpected else []),
        *(
            f"  - {name} is {list(saved[name].shape)} in the file and {list(target[name].shape)} in the model"
            for name in reshaped[:_MAX_LISTED]
        ),
    ]
    taken = {name: saved[name] for name in fitting if name not in reshaped}
    if lines and strict:
        hint = "  take what fits with `weights_strict: false`, or give the model that was saved"
        raise CheckpointError("\n".join([f"the weights of {path} do not fit the model", *lines, hint]))
    if not taken:
        raise CheckpointError("\n".join([f"nothing in {path} fits the model", *lines]))
    module.load_state_dict(taken, strict=False)
    if lines:
        logger.warning("%d of %d tensors taken from %s", len(taken), len(target), path)
        for line in lines:
            logger.warning("%s", line)


def _read(path: Path, part: str) -> dict[str, torch.Tensor]:
    is_ours = path.name.endswith(META_SUFFIX) or path.with_name(path.stem + META_SUFFIX).exists()
    if is_ours:
        state: Mapping[str, Any] = CheckpointStore(path.parent).load(path).state
        if part not in state:
            raise CheckpointError(f"{path} holds no `{part}` weights; it has {', '.join(state)}")
        state = state[part]
    elif path.suffix == ".safetensors":
        state = _read_safetensors(path)
    else:
        state = _read_pickle(path)
    tensors = {str(name): value for name, value in state.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        raise CheckpointError(f"{path} holds no weights: expected a state dict, names and tensors")
    return tensors


def _read_safetensors(path: Path) -> Mapping[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        loaded: Mapping[str, Any] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error
    return loaded


def _read_pickle(path: Path) -> Mapping[str, Any]:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{path} cannot be read as weights: {reason}") from error
    for _ in range(2):
        holder = next((name for name in _HOLDERS if isinstance(loaded, Mapping) and name in loaded), None)
        if holder is not None and isinstance(loaded[holder], Mapping):
            loaded = loaded[holder]
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{path} holds a {type(loaded).__name__}, expected a state dict")
    return loaded


def _without_prefix(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for prefix in _PREFIXES * 2:
        if tensors and all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}
    return tensors


def _listed(names: list[str]) -> str:
    rest = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + rest
