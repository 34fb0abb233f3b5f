"""Warm starts: loads only the weights of another run, or of a file, into a model."""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from gen_worker.contract.checkpoints.choice import META_SUFFIX
from gen_worker.contract.screen_repr import name_some
from gen_worker.errors import CheckpointError
from gen_worker.trainer.checkpoints.foreign import load_pickle
from gen_worker.trainer.checkpoints.store import CheckpointStore

logger = logging.getLogger("gen_worker.pytorch")

_MAX_LISTED = 12
# Prefixes of wrapper modules.
_PREFIXES = ("_orig_mod.", "module.")
# Where other tools' files keep the weights.
_HOLDERS = ("model", "state_dict", "model_state_dict", "parameters")


def load_weights(
    module: torch.nn.Module, path: Path, *, strict: bool = True, part: Literal["model", "ema"] = "model"
) -> None:
    """Load the weights of a checkpoint (`.meta.json`, or its data file) or of a `.pt`/`.safetensors` into `module`.

    All of it must fit; without `strict` what fits by name and shape is loaded, and the rest is logged. Never unpickles
    code.
    """
    hint = "load what fits with `weights_strict: false`, or use the model that was saved"
    _load(module, _without_prefix(_read(Path(path), part)), path, strict=strict, hint=hint)


def load_into_modules(modules: Mapping[str, torch.nn.Module], path: Path) -> None:
    """For a class that does not read the job's `weights` itself: `modules` of its state, by path.

    Of a checkpoint, each module gets the part with its name, or the only part that fits. A file of weights needs a
    single module. CheckpointError, with nothing changed, where this is ambiguous. Optimizers are not touched.
    """
    bare = {place: _unwrapped(module) for place, module in modules.items()}
    how = 'read ctx.model_handles["weights"] in configure and load them there'
    if not bare:
        raise CheckpointError(
            f"weights: {path} was given, but the class does not read it, and its state has no torch module: {how}"
        )
    if any(hasattr(value, "full_tensor") for module in bare.values() for value in module.parameters()):
        raise CheckpointError(
            f"weights: {path} cannot be loaded into a sharded module: {how}, before it is sharded"
        )
    chosen: dict[str, dict[str, torch.Tensor]] = {}
    if _is_ours(path):
        state = CheckpointStore(path.parent).load(path).state
        chosen = {place: _part_for(place, module, state, path, how) for place, module in bare.items()}
    elif len(bare) == 1:
        chosen = {place: _without_prefix(_read(path, "model")) for place in bare}
    else:
        raise CheckpointError(
            f"weights: {path} has one set of weights, but the state has {len(bare)} modules ({', '.join(bare)}): {how}"
        )
    for place, module in bare.items():
        _load(
            module,
            chosen[place],
            path,
            strict=True,
            hint=f"give the weights of this model, or {how}",
            is_trial=True,
        )
    for place, module in bare.items():
        _load(module, chosen[place], path, strict=True, hint="")


def _part_for(
    place: str, module: torch.nn.Module, state: Mapping[str, Any], path: Path, how: str
) -> dict[str, torch.Tensor]:
    parts = {name: _without_prefix(tensors) for name, tensors in _sets_of_tensors(state)}
    own = place.rpartition(".")[2].rpartition("['")[2].removesuffix("']")
    if own in parts:
        return parts[own]
    shapes = {name: value.shape for name, value in module.state_dict().items()}
    fitting = [
        name for name, part in parts.items() if {key: value.shape for key, value in part.items()} == shapes
    ]
    if len(fitting) == 1:
        return parts[fitting[0]]
    raise CheckpointError(
        f"weights: {path} has {_listed(list(parts)) or 'no weights'}, and"
        f" {'more than one of these fit' if fitting else 'none of these fits'} {place}: {how}"
    )


def _sets_of_tensors(
    tree: Mapping[str, Any], path: str = ""
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Parts of a saved state that contain only tensors, without optimizers."""
    tensors = {str(name): value for name, value in tree.items() if isinstance(value, torch.Tensor)}
    if tensors and len(tensors) == len(tree):
        yield path, tensors
    for name, value in tree.items():
        if isinstance(value, Mapping) and "param_groups" not in value:
            yield from _sets_of_tensors(value, f"{path}.{name}" if path else str(name))


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside a distributed or compiled one."""
    for name in ("module", "_orig_mod", "module"):
        inner = getattr(module, name, None)
        is_wrapper = type(module).__name__ in ("DistributedDataParallel", "DataParallel", "OptimizedModule")
        module = inner if is_wrapper and isinstance(inner, torch.nn.Module) else module
    return module


def _load(
    module: torch.nn.Module,
    saved: Mapping[str, torch.Tensor],
    path: Path,
    *,
    strict: bool,
    hint: str,
    is_trial: bool = False,
) -> None:
    target = module.state_dict()
    missing = [name for name in target if name not in saved]
    unexpected = [name for name in saved if name not in target]
    fitting = [name for name in target if name in saved]
    reshaped = [name for name in fitting if saved[name].shape != target[name].shape]
    lines = [
        *([f"  - missing in the file: {_listed(missing)}"] if missing else []),
        *([f"  - missing in the model: {_listed(unexpected)}"] if unexpected else []),
        *(
            f"  - {name} is {list(saved[name].shape)} in the file and {list(target[name].shape)} in the model"
            for name in reshaped[:_MAX_LISTED]
        ),
    ]
    taken = {name: saved[name] for name in fitting if name not in reshaped}
    if lines and strict:
        raise CheckpointError("\n".join([f"the weights of {path} do not fit the model", *lines, f"  {hint}"]))
    if not taken:
        raise CheckpointError("\n".join([f"nothing in {path} fits the model", *lines]))
    if is_trial:
        return
    _require_finite(taken, target, path)
    module.load_state_dict(taken, strict=False)
    if lines:
        logger.warning("%d of %d tensors taken from %s", len(taken), len(target), path)
        for line in lines:
            logger.warning("%s", line)


def _require_finite(
    taken: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor], path: Path
) -> None:
    """An infinity is allowed only where the model has one itself, for example in a mask."""
    bad = [name for name, value in taken.items() if _is_spoilt(value, target[name])]
    if bad:
        raise CheckpointError(
            f"the weights of {path} contain NaN or infinity: {_listed(bad)}. Use an earlier checkpoint"
        )


def _is_spoilt(value: torch.Tensor, fresh: torch.Tensor) -> bool:
    if not value.is_floating_point() or value.element_size() == 1 or bool(value.isfinite().all()):
        return False
    return bool(value.isnan().any()) or bool(fresh.isfinite().all())


def _is_ours(path: Path) -> bool:
    return path.name.endswith(META_SUFFIX) or path.with_name(path.stem + META_SUFFIX).exists()


def _read(path: Path, part: str) -> dict[str, torch.Tensor]:
    if _is_ours(path):
        state: Mapping[str, Any] = CheckpointStore(path.parent).load(path).state
        if part not in state:
            raise CheckpointError(f"{path} has no `{part}` weights; it has {', '.join(state)}")
        state = state[part]
    elif path.suffix == ".safetensors":
        state = _read_safetensors(path)
    else:
        state = _read_pickle(path)
    tensors = {str(name): value for name, value in state.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        raise CheckpointError(f"{path} has no weights: expected a state dict with names and tensors")
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
        with path.open("rb") as file:
            loaded = load_pickle(file, path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read as weights: {error}") from error
    for _ in range(2):
        holder = next((name for name in _HOLDERS if isinstance(loaded, Mapping) and name in loaded), None)
        if holder is not None and isinstance(loaded[holder], Mapping):
            loaded = loaded[holder]
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{path} contains a {type(loaded).__name__}, expected a state dict")
    return loaded


def _without_prefix(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for prefix in _PREFIXES * 2:
        if tensors and all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}
    return tensors


def _listed(names: list[str]) -> str:
    return name_some(names, _MAX_LISTED)
