"""`train/lr` is reported wherever the class keeps its optimizer."""

from typing import Any

import pytest

from gen_worker.trainer import StepContext, TrainingJobSpec
from gen_worker.trainer.author.author_state import _bind_optimizer


class Rate:
    def __init__(self, lr: float) -> None:
        self.param_groups = [{"lr": lr}]


class Holder:
    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)


@pytest.mark.parametrize(
    "state", [{"opt": Rate(0.5)}, Holder(adam=Rate(0.5)), {"parts": [Rate(0.5)]}, {"optimizer": Rate(0.5)}]
)
def test_the_only_optimizer_of_a_state_is_found_under_any_name(state: Any) -> None:
    ctx = StepContext(job=TrainingJobSpec(run_id="r"))
    _bind_optimizer(ctx, state)
    assert ctx.optimizer.param_groups[0]["lr"] == 0.5


def test_of_two_optimizers_none_is_taken_for_the_one() -> None:
    ctx = StepContext(job=TrainingJobSpec(run_id="r"))
    _bind_optimizer(ctx, {"generator": Rate(0.1), "critic": Rate(0.2)})
    assert ctx.optimizer is None
