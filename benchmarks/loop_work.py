"""The work of the loop benchmark, the same on every side: an empty step, and a small torch model.

Null step: the hooks do nothing but return a kept result. Small model: Linear(16,16) -> Linear(16,1), batch 32, SGD,
ready in-memory batches.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

METRIC_EVERY = 10


class ClockedBatches:
    """One batch, `num_steps + 1` times, from C code; notes when the first and the last one are asked for.

    `num_before` more come first and are not clocked.
    """

    def __init__(self, batch: Any, num_steps: int, *, num_before: int = 0) -> None:
        self._batch = batch
        self._num_steps = num_steps
        self._num_before = num_before
        self._marks: list[float] = []

    def __iter__(self) -> Iterator[Any]:
        before = itertools.repeat(self._batch, self._num_before)
        between = itertools.repeat(self._batch, self._num_steps - 1)
        return itertools.chain(before, self._marked(), between, self._marked())

    def __len__(self) -> int:
        return self._num_before + self._num_steps + 1

    def _marked(self) -> Iterator[Any]:
        self._marks.append(time.perf_counter())
        yield self._batch

    @property
    def span(self) -> tuple[float, float]:
        """When the first and the last clocked batch were asked for."""
        first, last = self._marks
        return first, last

    @property
    def step_us(self) -> float:
        first, last = self.span
        return 1e6 * (last - first) / self._num_steps


Drive = Callable[[ClockedBatches], None]


class NullTrainer:
    """The author's class of the null row: two hooks that do nothing but return a kept result."""

    def __init__(self) -> None:
        from gen_worker.trainer import StepResult

        self._result = StepResult(metrics={"loss": 0.5})

    def setup(self, ctx: Any) -> None:
        pass

    def configure(self, ctx: Any) -> Any:
        return {}

    def prepare_batch(self, raw_batch: Any, state: Any, ctx: Any) -> Any:
        return raw_batch

    def train_step(self, prepared_batch: Any, state: Any, ctx: Any) -> Any:
        return self._result

    def state_dict(self, state: Any) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any, payload: dict[str, Any], ctx: Any) -> None:
        pass


def bare_null(batches: ClockedBatches) -> None:
    """The bare loop: the same two hooks, called the same way, and nothing else."""
    trainer, state, ctx = NullTrainer(), None, None
    prepare_batch, train_step = trainer.prepare_batch, trainer.train_step
    for raw_batch in batches:
        train_step(prepare_batch(raw_batch, state, ctx), state, ctx)


class SmallModel:
    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.module = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 1))
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=1e-3)
        self.batch = (torch.randn(32, 16), torch.randn(32, 1))
        self.mse_loss = torch.nn.functional.mse_loss

    def step(self, batch: Any) -> Any:
        x, y = batch
        self.optimizer.zero_grad()
        loss = self.mse_loss(self.module(x), y)
        loss.backward()
        self.optimizer.step()
        return loss

    def run_bare(self, batches: ClockedBatches) -> None:
        """The loop everybody writes first: no hooks, no results, no metrics."""
        step = self.step
        for batch in batches:
            step(batch)


class SmallModelTrainer(NullTrainer):
    """The same model as an author's class for our loop; its loss is read where a cadence emits it."""

    def __init__(self, model: SmallModel) -> None:
        from gen_worker.trainer import StepResult

        self._model = model
        self._make_result = StepResult

    def configure(self, ctx: Any) -> Any:
        return {"optimizer": self._model.optimizer}

    def train_step(self, prepared_batch: Any, state: Any, ctx: Any) -> Any:
        return self._make_result({"loss": self._model.step(prepared_batch).detach()})
