"""Data of people's own, and a trainer class that takes its batches as they are."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from dropout_mlp import DropoutMlp
from parallel_mlp import ParallelMlp
from torch.utils.data import DataLoader, Dataset, IterableDataset

from gen_worker.trainer import StepContext, global_rows


def make_row(index: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Augmented with the global generators."""
    values = torch.tensor(np.random.default_rng([seed, index]).standard_normal(5), dtype=torch.float32)
    return values[:4] + 0.01 * torch.randn(4) + 0.01 * random.random() + 0.01 * np.random.rand(), values[4]


class Rows(Dataset[Any]):
    def __init__(self, num_rows: int = 100, seed: int = 0) -> None:
        self.num_rows, self.seed = num_rows, seed

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> Any:
        return make_row(index, self.seed)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (make_row(index) for index in range(100))


def make_loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(
        Rows(), **{"batch_size": 8, "shuffle": True, "generator": torch.Generator().manual_seed(5), **options}
    )


class OwnParallel(ParallelMlp):
    def prepare_batch(self, raw_batch: Any, state: dict[str, Any], ctx: StepContext) -> Any:
        x, y = raw_batch
        return x, y, global_rows(raw_batch, ctx)


class OwnMlp(DropoutMlp):
    def prepare_batch(self, raw_batch: Any, state: dict[str, Any], ctx: StepContext) -> Any:
        x, y = raw_batch
        return x + np.random.rand() * 0.01, y

    def validate_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> dict[str, Any]:
        x, y = batch
        return {"loss": torch.nn.functional.mse_loss(state["model"](x).squeeze(1), y) + torch.rand(())}
