"""AdamW with warm-up and cosine, and checkpoints of what is trained: for authors who want the usual."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from gen_worker.errors import CheckpointError, SpecError, StartupError

if TYPE_CHECKING:
    from pathlib import Path

    import torch

_FORMAT = "trainable_module.v1"


class AdamWBundle(NamedTuple):
    """Step the optimizer, then the scheduler, once per training step."""

    optimizer: "torch.optim.AdamW"
    scheduler: "torch.optim.lr_scheduler.LambdaLR"


class _Settings(NamedTuple):
    learning_rate: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    warmup_steps: int
    total_steps: int | None
    min_lr_ratio: float


def build_default_adamw_bundle(
    model_or_params: Any, hyperparams: Mapping[str, Any] | None = None
) -> AdamWBundle:
    """AdamW over the trainable parameters, with a linear warm-up and then a cosine down to `min_lr_ratio`.

    `model_or_params`: a module, parameters, (name, parameter) pairs, or parameter groups.
    Read from `hyperparams`: `learning_rate` or `lr` (1e-4), `weight_decay` (0.01), `betas` ((0.9, 0.999)),
    `eps` (1e-8), `warmup_steps` (0), `total_steps` or `max_steps` (without it the rate stays constant after
    the warm-up), `min_lr_ratio` (0). Other names are the author's own and are ignored.
    The rate is a function of the scheduler's step count alone, so a resumed run continues exactly.
    """
    import torch

    settings = _read_settings(hyperparams or {})
    groups = _trainable_groups(model_or_params)
    optimizer = torch.optim.AdamW(
        groups,
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    factor = warmup_cosine_factor(settings.warmup_steps, settings.total_steps, settings.min_lr_ratio)
    return AdamWBundle(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor))


def warmup_cosine_factor(
    warmup_steps: int, total_steps: int | None, min_lr_ratio: float
) -> Callable[[int], float]:
    """Step (from 0) -> what the learning rate is multiplied with."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        if total_steps is None:
            return 1.0
        decay_steps = max(1, total_steps - warmup_steps)
        progress = min(1.0, (step - warmup_steps) / decay_steps)
        return min_lr_ratio + (1.0 - min_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))

    return factor


def _read_settings(hyperparams: Mapping[str, Any]) -> _Settings:
    faults: list[str] = []

    def number(
        names: tuple[str, ...], default: float, accepts: Callable[[float], bool], expected: str
    ) -> float:
        for name in names:
            value = hyperparams.get(name)
            if value is None:
                continue
            if (
                isinstance(value, (int, float))
                and not isinstance(value, bool)
                and math.isfinite(value)
                and accepts(value)
            ):
                return float(value)
            faults.append(f"{name}: found {value!r:.60}, expected {expected}")
            return default
        return default

    def count(names: tuple[str, ...], at_least: int) -> int | None:
        for name in names:
            value = hyperparams.get(name)
            if value is None:
                continue
            if type(value) is int and value >= at_least:
                return value
            faults.append(f"{name}: found {value!r:.60}, expected a whole number of at least {at_least}")
            return None
        return None

    if None not in (hyperparams.get("lr"), hyperparams.get("learning_rate")):
        faults.append("lr: given together with `learning_rate`, expected one of the two")
    betas = hyperparams.get("betas")
    if betas is None:
        betas = (0.9, 0.999)
    elif not (
        isinstance(betas, (list, tuple))
        and len(betas) == 2
        and all(
            isinstance(beta, (int, float)) and not isinstance(beta, bool) and 0 <= beta < 1 for beta in betas
        )
    ):
        faults.append(f"betas: found {betas!r:.60}, expected two numbers from 0 to below 1")
        betas = (0.9, 0.999)
    settings = _Settings(
        learning_rate=number(("learning_rate", "lr"), 1e-4, lambda v: v > 0, "a number above 0"),
        weight_decay=number(("weight_decay",), 0.01, lambda v: v >= 0, "a number of at least 0"),
        betas=(float(betas[0]), float(betas[1])),
        eps=number(("eps",), 1e-8, lambda v: v > 0, "a number above 0"),
        warmup_steps=count(("warmup_steps",), 0) or 0,
        total_steps=count(("total_steps", "max_steps"), 1),
        min_lr_ratio=number(("min_lr_ratio",), 0.0, lambda v: 0 <= v <= 1, "a number from 0 to 1"),
    )
    if settings.total_steps is not None and settings.warmup_steps > settings.total_steps:
        faults.append(
            f"warmup_steps: found {settings.warmup_steps}, expected at most the {settings.total_steps} steps in all"
        )
    if faults:
        raise SpecError("hyperparams", faults)
    return settings


def _trainable_groups(model_or_params: Any) -> list[dict[str, Any]]:
    import torch

    if isinstance(model_or_params, torch.nn.Module):
        given: list[Any] = list(model_or_params.parameters())
    elif isinstance(model_or_params, torch.Tensor):
        given = [model_or_params]
    else:
        given = list(model_or_params)
    groups = given if given and isinstance(given[0], Mapping) else [{"params": given}]
    trainable = []
    for group in groups:
        members = group["params"]
        members = (
            [members] if isinstance(members, torch.Tensor) else [_parameter(member) for member in members]
        )
        members = [member for member in members if member.requires_grad]
        if members:
            trainable.append({**group, "params": members})
    if not trainable:
        raise StartupError(
            "there is nothing to train: no parameter has requires_grad set; unfreeze some, or pass the right module"
        )
    return trainable


def _parameter(member: Any) -> "torch.Tensor":
    import torch

    found = member[1] if isinstance(member, tuple) and len(member) == 2 else member
    if not isinstance(found, torch.Tensor):
        raise TypeError(
            f"expected a module, parameters or parameter groups, found a {type(found).__name__} among them"
        )
    return found


def save_trainable_module_checkpoint(
    module: "torch.nn.Module",
    path: "str | Path",
    optimizer: "torch.optim.Optimizer | None" = None,
    extra: Mapping[str, Any] | None = None,
    *,
    buffers: Iterable[str] = (),
) -> "Path":
    """Write the trainable parameters of `module` (LoRA style: not the frozen rest), the named buffers, the
    optimizer's state and `extra` (plain values and tensors) to `path`, atomically and synced. Return the path.
    """
    from pathlib import Path

    import torch

    path = Path(path)
    known_buffers = dict(module.named_buffers())
    asked = list(buffers)
    unknown = [name for name in asked if name not in known_buffers]
    if unknown:
        raise CheckpointError(
            f"{path}: the module has no buffer {', '.join(unknown)}; it has {_names(known_buffers)}"
        )
    parameters = _trainable_parameters(module)
    if not parameters:
        raise CheckpointError(f"{path}: the module has no trainable parameters, so there is nothing to save")
    _require_loadable(extra, "extra", path)
    payload = {
        "format": _FORMAT,
        "parameters": {name: tensor.detach() for name, tensor in parameters.items()},
        "buffers": {name: known_buffers[name].detach() for name in asked},
        "optimizer": None if optimizer is None else optimizer.state_dict(),
        "extra": dict(extra or {}),
    }
    _write_atomically(path, lambda file: torch.save(payload, file))
    return path


def load_trainable_module_checkpoint(
    module: "torch.nn.Module",
    path: "str | Path",
    optimizer: "torch.optim.Optimizer | None" = None,
    strict: bool = True,
) -> dict[str, Any]:
    """Put a saved checkpoint back into `module` (and `optimizer`) and return its `extra`.

    Nothing is changed unless everything fits. `strict=False` loads the names that both sides have and casts
    where the dtypes differ; shapes must agree always. Never unpickles code.
    """
    from pathlib import Path

    import torch

    path = Path(path)
    payload = _read_payload(path)
    targets: dict[str, torch.Tensor] = {**_trainable_parameters(module)}
    saved: dict[str, torch.Tensor] = {**payload["parameters"]}
    missing = [name for name in targets if name not in saved]
    unexpected = [name for name in saved if name not in targets]
    known_buffers = dict(module.named_buffers())
    unexpected += [name for name in payload["buffers"] if name not in known_buffers]
    targets.update({name: tensor for name, tensor in known_buffers.items() if name in payload["buffers"]})
    saved.update(payload["buffers"])

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
    if optimizer is not None and payload["optimizer"] is None:
        faults.append("it holds no optimizer state")
    if faults:
        raise CheckpointError(f"{path} does not fit this module: {'; '.join(faults)}")
    if optimizer is not None:
        try:
            optimizer.load_state_dict(payload["optimizer"])  # checks its groups before it changes anything
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path}: its optimizer state does not fit this optimizer: {error}"
            ) from error
    with torch.no_grad():
        for name in common:
            targets[name].copy_(saved[name])
    extra: dict[str, Any] = payload["extra"]
    return extra


def _trainable_parameters(module: "torch.nn.Module") -> dict[str, "torch.Tensor"]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def _names(names: Iterable[str], most: int = 20) -> str:
    every = list(names)
    rest = f" and {len(every) - most} more" if len(every) > most else ""
    return (", ".join(every[:most]) or "none") + rest


def _require_loadable(value: Any, where: str, path: "Path") -> None:
    """A value that `weights_only` would refuse to load must not be saved."""
    import torch

    if value is None or isinstance(value, torch.Tensor) or type(value) in (bool, int, float, str, bytes):
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            _require_loadable(key, f"a key of {where}", path)
            _require_loadable(item, f"{where}[{key!r}]", path)
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            _require_loadable(item, f"{where}[{index}]", path)
    else:
        raise CheckpointError(
            f"{path}: {where} is a {type(value).__name__}, expected tensors, numbers, text, bytes, None, "
            "or lists, tuples and dicts of these"
        )


def _read_payload(path: "Path") -> dict[str, Any]:
    import pickle

    import torch

    try:
        payload = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist") from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {error}") from error
    found = payload.get("format") if isinstance(payload, dict) else None
    if found != _FORMAT:
        raise CheckpointError(
            f"{path}: its format is {found!r}, expected {_FORMAT!r}: was it written by another function?"
        )
    return payload  # type: ignore[no-any-return]


def _write_atomically(path: "Path", write: Callable[[Any], None]) -> None:
    import os
    import tempfile
    from pathlib import Path

    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
