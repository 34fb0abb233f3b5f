"""Trainer classes that are served. Some rows make the model do what must not hurt other rows."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import torch
from dropout_mlp import DropoutMlp

from gen_worker.trainer import StepContext, StepResult, batch_to_torch

RAISES, KILLS, SHORT, ONE_NUMBER, EATS = 1001.0, 1002.0, 1003.0, 1004.0, 1005.0  # as the first value of a row
HAS_NO_TEXT, HAS_MUCH_TEXT, FORKS, OTHER_BYTES, WIDE = 2001.0, 2002.0, 2003.0, 2004.0, 2005.0


class ServingMlp(DropoutMlp):
    def predict(self, rows: pa.RecordBatch, state: dict[str, Any], ctx: StepContext) -> dict[str, Any]:
        x = batch_to_torch(rows, ["x"])["x"]
        first = set(x[:, 0].tolist())
        if RAISES in first:
            raise ValueError("this row cannot be predicted")
        if KILLS in first:
            os.kill(os.getpid(), signal.SIGKILL)
        if EATS in first:
            np.ones(256 << 20)  # two gigabytes
        y = state["model"](x).squeeze(1)
        if SHORT in first:
            return {"y": y[1:]}
        if ONE_NUMBER in first:
            return {"y": y.sum()}
        return {"y": y, "is_high": y > 0, "name": [f"{value:.3f}" for value in y.tolist()]}

    def predict_stream(self, row: pa.RecordBatch, state: dict[str, Any], ctx: StepContext) -> Iterator[Any]:
        count = int(batch_to_torch(row, ["x"])["x"][0, 0])
        try:
            for number in range(count):
                if number == 900:
                    raise ValueError("no more")
                yield {"number": number, "y": state["model"](batch_to_torch(row, ["x"])["x"])[0]}
        finally:
            print(f"stream of {count} closed", file=sys.stderr, flush=True)


class Large(ServingMlp):
    """16 MB: its checkpoint is read beside `configure`. Answers with them, too."""

    def configure(self, ctx: StepContext) -> dict[str, Any]:
        state = super().configure(ctx)
        state["model"].register_buffer("ballast", torch.rand(4 << 20))
        return state

    def predict(self, rows: pa.RecordBatch, state: dict[str, Any], ctx: StepContext) -> dict[str, Any]:
        ballast = state["model"].ballast
        return super().predict(rows, state, ctx) | {"ballast": [float(ballast.sum())] * rows.num_rows}


class ReusesMemory(ServingMlp):
    """Writes every answer into the same tensor."""

    def predict(self, rows: pa.RecordBatch, state: dict[str, Any], ctx: StepContext) -> dict[str, Any]:
        y = super().predict(rows, state, ctx)["y"]
        if "answer" not in state:
            state["answer"] = y.new_empty(32)
        state["answer"][: len(y)] = y
        return {"y": state["answer"][: len(y)]}


class OfNoColumns:
    """Its batches are numbers, so nothing says what a request has."""

    def setup(self, ctx: StepContext) -> None: ...

    def configure(self, ctx: StepContext) -> dict[str, Any]:
        return {"sum": 0}

    def prepare_batch(self, raw_batch: Any, state: dict[str, Any], ctx: StepContext) -> Any:
        return raw_batch

    def train_step(self, prepared_batch: Any, state: dict[str, Any], ctx: StepContext) -> StepResult:
        state["sum"] += prepared_batch
        return StepResult(metrics={"loss": state["sum"]})

    def predict(self, rows: pa.RecordBatch, state: dict[str, Any], ctx: StepContext) -> dict[str, Any]:
        return {"type": [str(rows.schema.field("x").type)] * rows.num_rows}

    def state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        return state

    def load_state_dict(self, state: dict[str, Any], payload: dict[str, Any], ctx: StepContext) -> None:
        state.update(payload)


class HasNoText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Misbehaves(ServingMlp):
    """What the first value of a row says."""

    def predict(self, rows: pa.RecordBatch, state: dict[str, Any], ctx: StepContext) -> dict[str, Any]:
        first = set(batch_to_torch(rows, ["x"])["x"][:, 0].tolist())
        if HAS_NO_TEXT in first:
            raise HasNoText
        if HAS_MUCH_TEXT in first:
            raise ValueError("much" * (8 << 20))
        if FORKS in first and os.fork() == 0:
            print(f"child {os.getpid()}", file=sys.stderr, flush=True)
        y = np.arange(rows.num_rows, dtype="float32")
        if OTHER_BYTES in first:
            return {"y": y.astype(">f4")}
        return {"y": y.astype(np.longdouble) if WIDE in first else y}


class FromRecords(DropoutMlp):
    """By annotation: no Arrow in sight."""

    class Point(msgspec.Struct):
        x: list[float]
        label: str = "none"
        weight: float | None = None

    class Answer(msgspec.Struct):
        total: float
        label: str

    def predict(self, rows: list[Point], state: dict[str, Any], ctx: StepContext) -> list[Answer]:
        return [self.Answer(total=sum(row.x) * (row.weight or 1.0), label=row.label) for row in rows]


class Shrinks(ServingMlp):
    """Serves without what only training needs."""

    def serving_state(self, state: dict[str, Any], ctx: StepContext) -> dict[str, Any]:
        return {"model": state["model"]}

    def predict(self, rows: pa.RecordBatch, state: dict[str, Any], ctx: StepContext) -> dict[str, Any]:
        assert list(state) == ["model"]
        assert ctx.optimizer is None
        assert not state["model"].training
        return super().predict(rows, state, ctx)


class Forgets(ServingMlp):
    def serving_state(self, state: dict[str, Any], ctx: StepContext) -> None:
        return None


class Names(ServingMlp):
    label_columns = ("y",)


class NamesNothing(ServingMlp):
    label_columns = ("z",)


class WritesItself(ServingMlp):
    """Shows who answers, and from where."""

    def predict(self, rows: pa.RecordBatch, state: dict[str, Any], ctx: StepContext) -> dict[str, Any]:
        import torch

        rows.column("x")
        count = rows.num_rows
        return {
            "pid": np.full(count, os.getpid()),
            "threads": np.full(count, torch.get_num_threads()),
            "os_threads": np.full(count, len(list(Path("/proc/self/task").iterdir()))),
            "parent": np.full(count, os.getppid()),
            "file": [__file__] * count,
            "cwd": [str(Path.cwd())] * count,
            "has_gradients": np.full(count, torch.is_grad_enabled()),
            "rows": np.full(count, count),
        }


class StartsThreads(ServingMlp):
    """Cannot be forked once it is loaded."""

    def setup(self, ctx: StepContext) -> None:
        import threading

        super().setup(ctx)
        threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()


class FailsToLoad(ServingMlp):
    def load_state_dict(self, state: dict[str, Any], payload: dict[str, Any], ctx: StepContext) -> None:
        raise RuntimeError("the state does not fit")


class DiesLoading(ServingMlp):
    def load_state_dict(self, state: dict[str, Any], payload: dict[str, Any], ctx: StepContext) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


class NoPredict(DropoutMlp):
    pass


class NeedsFirstCall(ServingMlp):
    """Notes every batch size it was called with."""

    def predict(self, rows: pa.RecordBatch, state: dict[str, Any], ctx: StepContext) -> dict[str, Any]:
        sizes = state.setdefault("sizes", [])
        sizes.append(rows.num_rows)
        rows.column("x")
        return {"seen": [",".join(str(size) for size in sorted(set(sizes)))] * rows.num_rows}


class TakesItsTime(ServingMlp):
    """A second for each batch after the first row group of 120 rows, unless the environment says HURRY."""

    def predict(self, rows: pa.RecordBatch, state: dict[str, Any], ctx: StepContext) -> dict[str, Any]:
        state["calls"] = state.get("calls", 0) + 1
        if state["calls"] > 20 and "HURRY" not in os.environ:
            time.sleep(1)
        return super().predict(rows, state, ctx)
