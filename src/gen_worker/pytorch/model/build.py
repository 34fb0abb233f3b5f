"""The model of a config: built with the same initial weights in every process, and tested before training."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch

from gen_worker.contract.document_schema import convert_document
from gen_worker.errors import ModelLoadError, SpecError, WorkerError
from gen_worker.pytorch.config import SHIPPED_MODELS, ModelSpec
from gen_worker.pytorch.model.models import Shape, build_cnn, build_mlp, build_transformer_lm
from gen_worker.pytorch.model.names import argument_faults, import_reference, is_reference, unknown_name
from gen_worker.pytorch.model.optimizers import unmatched_pattern
from gen_worker.trainer.attempt.failure import author_place
from gen_worker.trainer.compute.repro import seed_everything
from gen_worker.trainer.model_runtime import capture_rng, restore_rng

_PATH = "hyperparams.model"
_BUILDERS: dict[str, Callable[[Any, Shape | None], torch.nn.Module]] = {
    "mlp": build_mlp,
    "cnn": build_cnn,
    "transformer_lm": build_transformer_lm,
}
# The weights have a random stream of their own, so that dropout does not repeat their numbers.
_INIT_SALT = 0x9E3779B97F4A7C15


def model_faults(spec: ModelSpec) -> list[str]:
    """Faults of a model's name and arguments; it is not built."""
    if is_reference(spec.type):
        found, faults = import_reference(f"{_PATH}.type", spec.type)
        if faults:
            return faults
        if not callable(found):
            return [f"{_PATH}.type: {spec.type} is a {type(found).__name__}, expected a class or a function"]
        return argument_faults(f"{_PATH}.args", found, spec.args)
    if spec.type not in SHIPPED_MODELS:
        what = "module:symbol or a shipped model"
        return [unknown_name(f"{_PATH}.type", spec.type, SHIPPED_MODELS, what)]
    try:
        _shipped_args(spec)
    except SpecError as error:
        return error.faults
    return []


def _shipped_args(spec: ModelSpec) -> Any:
    at = ("hyperparams", "model", "args")
    return convert_document(dict(spec.args), SHIPPED_MODELS[spec.type], source=_PATH, at=at)


def build_model(spec: ModelSpec, *, seed: int, row_shape: Shape | None, device: str) -> torch.nn.Module:
    """The same weights for the same seed, in every process. The global random streams do not change."""
    rng = capture_rng()
    try:
        seed_everything((seed + _INIT_SALT) % 2**64)
        if is_reference(spec.type):
            found, faults = import_reference(f"{_PATH}.type", spec.type)
            if faults:
                raise SpecError("the model cannot be built", faults)
            with _named_after(f"building {spec.type}"):
                model = found(**spec.args)
        else:
            model = _BUILDERS[spec.type](_shipped_args(spec), row_shape)
    finally:
        restore_rng(rng)
    if not isinstance(model, torch.nn.Module):
        raise ModelLoadError(f"{spec.type} returned a {type(model).__name__}, expected a torch.nn.Module")
    return model.to(device)


def freeze(module: torch.nn.Module, patterns: list[str]) -> None:
    """Freeze parameters whose name matches; SpecError for a pattern without match."""
    names = dict(module.named_parameters())
    faults = []
    for index, pattern in enumerate(patterns):
        found = [name for name in names if fnmatchcase(name, pattern)]
        if not found:
            faults.append(unmatched_pattern(f"hyperparams.freeze[{index}]", pattern, list(names)))
        for name in found:
            names[name].requires_grad_(False)
    if faults:
        raise SpecError("the model cannot be frozen", faults)


def try_model(
    module: torch.nn.Module,
    forward: Callable[[Any], Any],
    measure: Callable[[Any, Any], Any],
    inputs: Any,
    target: Any,
    *,
    what: str,
) -> Any:
    """The output for rows of zeros, so that wrong shapes are found before the first step.

    Trains nothing and does not change the random streams. Initializes lazy parameters.
    """
    rng = capture_rng()
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            with _named_after(f"the model {what} rejects {shapes_in_words(inputs)}"):
                output = forward(inputs)
            given = f"{shapes_in_words(output)} from the model and {shapes_in_words(target)} as target"
            remedy = _loss_remedy(output, target)
            with _named_after(f"the loss rejects {given}{remedy}"), warnings.catch_warnings():
                # torch only warns about shapes that it broadcasts; the loss would be a different one.
                warnings.simplefilter("error", UserWarning)
                measure(output, target)
    finally:
        module.train(training)
        restore_rng(rng)
    return output


def _loss_remedy(output: Any, target: Any) -> str:
    """What usually helps, by shapes and types."""
    if not isinstance(output, torch.Tensor) or not isinstance(target, torch.Tensor):
        return ""
    if output.ndim == target.ndim + 1 and output.shape[-1] == 1:
        return " (add `shape: [1]` to the target's column)"
    if output.ndim == target.ndim + 1 and target.is_floating_point():
        return " (a loss over classes needs an integer target: remove its `dtype`)"
    if output.ndim == target.ndim and output.is_floating_point() and not target.is_floating_point():
        return " (this loss needs a float target: add `dtype: float32` to the target's column)"
    return ""


def shapes_in_words(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {shapes_in_words(item)}" for name, item in value.items())
    return "nothing" if value is None else f"a {type(value).__name__}"


@contextmanager
def _named_after(what: str) -> Iterator[None]:
    """Turn any exception into a ModelLoadError, with the author's line if there is one."""
    try:
        yield
    except WorkerError:
        raise
    except Exception as error:
        text = str(error).strip().partition("\n")[0]
        place = author_place(error)
        where = f" (at {place})" if place else ""
        raise ModelLoadError(f"{what}: {type(error).__name__}: {text}{where}") from error
