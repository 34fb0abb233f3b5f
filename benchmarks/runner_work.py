"""What the runner's trainer class lacks to be timed from outside: a tick before each step."""

from typing import Any

from gen_worker.pytorch_runner import PyTorchTrainer
from stretches import Stretches


class TimedRunner(PyTorchTrainer):
    def setup(self, ctx: Any) -> None:
        super().setup(ctx)
        self._stretches: Stretches | None = None

    def train_step(self, prepared_batch: Any, state: Any, ctx: Any) -> Any:
        if self._stretches is None:
            self._stretches = Stretches()
        self._stretches.tick()
        return super().train_step(prepared_batch, state, ctx)
