"""Losses are found by the names that people use, and their totals over counts are torch's own means."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from gen_worker.errors import SpecError
from gen_worker.pytorch.config import LossSpec
from gen_worker.pytorch.model.losses import FUNCTION_BY_NAME, FUNCTIONS, build_loss, loss_faults

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", [*FUNCTION_BY_NAME, *FUNCTIONS])
def test_every_name_is_a_loss_of_torch(name: str) -> None:
    spec = LossSpec(name=name)
    assert loss_faults(spec) == []
    assert build_loss(spec, device=CPU).mean is FUNCTIONS[FUNCTION_BY_NAME.get(name, name)]


def test_losses_of_other_tensors_are_not_offered() -> None:
    for name in ("triplet_margin_loss", "ctc_loss", "cosine_embedding_loss", "gaussian_nll_loss"):
        (fault,) = loss_faults(LossSpec(name=name))
        assert "a loss of torch.nn on (output, target), or module:symbol" in fault


@pytest.mark.parametrize(
    "args",
    [
        {"ignore_index": 2},
        {"weight": [1.0, 3.0, 0.5]},
        {"weight": [1.0, 3.0, 0.5], "ignore_index": 0, "label_smoothing": 0.1},
        {"ignore_index": -1},
    ],
)
def test_total_over_count_is_the_mean_that_torch_takes(args: dict[str, Any]) -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(9, 3, 4), torch.randint(0, 3, (9, 4))
    if args.get("ignore_index") == -1:
        target[0, :3] = -1
    loss = build_loss(LossSpec(name="cross_entropy", args=args), device=CPU)
    tensors = {key: torch.tensor(value) if key == "weight" else value for key, value in args.items()}
    expected = functional.cross_entropy(logits, target, **tensors)
    assert loss.total is not None
    assert loss.count is not None
    torch.testing.assert_close(loss.total(logits, target) / loss.count(target), expected)
    torch.testing.assert_close(loss.mean(logits, target), expected)


def test_probabilities_of_classes_are_counted_by_position() -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(5, 3), torch.randn(5, 3).softmax(-1)
    loss = build_loss(LossSpec(name="cross_entropy", args={"weight": [1.0, 2.0, 3.0]}), device=CPU)
    assert loss.total is not None
    assert loss.count is not None
    torch.testing.assert_close(loss.total(logits, target) / loss.count(target), loss.mean(logits, target))


def test_padding_is_never_counted() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 5)
    target = torch.tensor([[1, 2, 0], [3, 0, 0]])
    loss = build_loss(LossSpec(name="next_token"), device=CPU, pad_id=0)
    kept = torch.stack([logits[0, 0], logits[0, 1], logits[1, 0]])
    torch.testing.assert_close(
        loss.mean(logits, target), functional.cross_entropy(kept, torch.tensor([1, 2, 3]))
    )
    assert loss.count is not None
    assert float(loss.count(target)) == 3
    nothing = loss.mean(logits, torch.zeros(2, 3, dtype=torch.int64))
    assert float(nothing) == 0.0


def test_a_loss_of_the_authors_is_a_class_or_a_function() -> None:
    by_function = build_loss(LossSpec(name="torch.nn.functional:huber_loss", args={"delta": 2.0}), device=CPU)
    by_class = build_loss(LossSpec(name="torch.nn:HuberLoss", args={"delta": 2.0}), device=CPU)
    output, target = torch.tensor([1.0, 5.0]), torch.tensor([0.0, 0.0])
    expected = functional.huber_loss(output, target, delta=2.0)
    assert float(by_function.mean(output, target)) == float(by_class.mean(output, target)) == float(expected)
    (fault,) = loss_faults(LossSpec(name="torch.nn:HuberLoss", args={"delt": 2.0}))
    assert "HuberLoss has no argument `delt`: did you mean `delta`?" in fault
    with pytest.raises(SpecError, match="has no 'hubber_loss'"):
        build_loss(LossSpec(name="torch.nn.functional:hubber_loss"), device=CPU)
