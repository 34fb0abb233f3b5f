"""What a config's model answers: one value a row and name, by its loss."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import torch

from gen_worker.pytorch.data.preparation import Preparation
from gen_worker.pytorch.model.losses import FUNCTION_BY_NAME, NEXT_TOKEN
from gen_worker.pytorch.runner_state import RunnerState

Tensor = torch.Tensor


@dataclass(slots=True, kw_only=True)
class ServedState:
    """What is needed to answer: no optimizer, and of model and average only the one that is evaluated."""

    module: torch.nn.Module
    evaluate: Callable[[Any], Any]
    prepare: Preparation
    autocast: AbstractContextManager[Any]
    classes: list[str] | None

    @classmethod
    def of(cls, state: RunnerState) -> "ServedState":
        return cls(
            module=state.evaluated_module.requires_grad_(False),
            evaluate=state.evaluate,
            prepare=state.prepare,
            autocast=state.autocast,
            classes=state.classes,
        )


def answer_rows(rows: pa.RecordBatch, state: RunnerState | ServedState, loss: str) -> dict[str, Any]:
    inputs = state.prepare.read_inputs(rows)
    name = FUNCTION_BY_NAME.get(loss, loss)
    if name == NEXT_TOKEN:
        return _next_token(inputs, state)
    with state.autocast:
        output = state.evaluate(inputs)
    if isinstance(output, Mapping):
        return dict(output)
    if not isinstance(output, Tensor):
        return {f"output_{number}": each for number, each in enumerate(output)}
    if name in ("cross_entropy", "nll_loss") and output.ndim == 2:
        probability = output.float().softmax(dim=1) if name == "cross_entropy" else output.float().exp()
        best = probability.argmax(dim=1)
        classes = state.classes
        return {
            "class": best if classes is None else [classes[each] for each in best.tolist()],
            "probability": probability,
        }
    if output.ndim == 2 and output.shape[1] == 1:
        output = output.squeeze(1)
    if name == "binary_cross_entropy_with_logits":
        return {"probability": output.float().sigmoid()}
    return {"probability" if name == "binary_cross_entropy" else "output": output}


def _next_token(tokens: Tensor, state: RunnerState | ServedState) -> dict[str, Any]:
    """The token that follows the last one that is no padding."""
    shape, pad_id = state.prepare.row_shape, state.prepare.pad_id
    length = tokens.shape[1] if shape is None else shape[0]
    given = torch.full((len(tokens),), tokens.shape[1]) if pad_id is None else (tokens != pad_id).sum(dim=1)
    given = given.to(tokens.device).clamp(min=1)
    first = (given - length).clamp(min=0)
    window = tokens.gather(1, first[:, None] + torch.arange(length, device=tokens.device))
    with state.autocast:
        logits = state.evaluate(window)
    last = logits[torch.arange(len(tokens), device=tokens.device), given - first - 1].float()
    probability = last.softmax(dim=1)
    best = probability.argmax(dim=1)
    return {"next_token": best, "probability": probability}
