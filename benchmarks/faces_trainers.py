"""A trainer whose curve jumps at each step, with time enough between two steps to see the first one painted."""

import time
from typing import Any

from daemon_trainers import Trivial
from gen_worker.trainer import StepContext, StepResult


class Beating(Trivial):
    """A point every `gap_ms`; neighbours are far from each other."""

    def train_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> StepResult:
        time.sleep(self.options["gap_ms"] / 1000)
        return StepResult(metrics={"beat": float(ctx.step % 2 + 1)})
