"""A share of a batch without rows is foretold, and a failure that follows from it says so."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from gen_worker.errors import TrainStepError
from gen_worker.trainer import NonFiniteGuard, StepContext, StepResult, TrainingJobSpec
from gen_worker.trainer.arrow_feed import ArrowFeed
from gen_worker.trainer.feed.order import GLOBAL_ROWS
from gen_worker.trainer.processes.empty_shares import (
    EmptyShareWatch,
    empty_share_warnings,
    find_empty_shares,
    note_empty_share,
    rows_of_last_batch,
)
from gen_worker.trainer.steps.batch_source import ListSource, StepNumbers
from gen_worker.trainer.steps.schedule import Start


def feed(folder: Path, num_rows: int, **options: Any) -> ArrowFeed:
    pq.write_table(pa.table({"x": np.arange(num_rows)}), folder / "rows.parquet")
    return ArrowFeed.open([str(folder / "rows.parquet")], **{"batch_size": 6, **options})


def context(world_size: int = 3, rank: int = 2) -> StepContext:
    return StepContext(job=TrainingJobSpec(run_id="r", max_steps=1), rank=rank, world_size=world_size)


def share(rows: int, *, of: int) -> pa.RecordBatch:
    batch = pa.record_batch({"x": np.zeros(rows)})
    return batch.replace_schema_metadata({GLOBAL_ROWS: str(of).encode()})


@pytest.mark.parametrize(
    ("num_rows", "options", "expected"),
    [
        (14, {}, 2),
        (14, {"shuffle": True}, 2),
        (14, {"drop_last": True}, None),
        (15, {}, None),
        (12, {}, None),
        (1, {}, 1),
    ],
)
def test_a_last_batch_with_fewer_rows_than_processes_is_found(
    tmp_path: Path, num_rows: int, options: dict[str, Any], expected: int | None
) -> None:
    with feed(tmp_path, num_rows, world_size=3, **options) as source:
        assert find_empty_shares(source, 3) == expected
        assert find_empty_shares(source, 1) is None


def test_data_without_rows_or_without_an_end_is_not_judged() -> None:
    assert rows_of_last_batch(ListSource([1, 2])) is None
    assert rows_of_last_batch(StepNumbers()) is None


def loop_of(source: Any, *, end: int | None, trainer: Any = None, held_out: Any = None) -> Any:
    validation = None if held_out is None else SimpleNamespace(kind="validation", source=held_out)
    parts = SimpleNamespace(trainer=trainer, ctx=context(), source=source, validation=validation, test=None)
    return SimpleNamespace(parts=parts, start=Start(), end_step=lambda: end)


def test_the_warning_names_the_remedies_and_is_left_out_where_it_cannot_happen(tmp_path: Path) -> None:
    with feed(tmp_path, 14, world_size=3) as source:
        (warning,) = empty_share_warnings(loop_of(source, end=3))
        assert "2 rows for 3 processes" in warning
        assert "dataset.drop_last: true" in warning
        assert "sum divided by global_rows" in warning
        assert list(empty_share_warnings(loop_of(source, end=2))) == []  # the last batch is never reached
        assert len(list(empty_share_warnings(loop_of(source, end=None)))) == 1
        made_for_it = SimpleNamespace(handles_empty_shares=True)
        assert list(empty_share_warnings(loop_of(source, end=3, trainer=made_for_it))) == []
        (held_out,) = empty_share_warnings(loop_of(StepNumbers(), end=3, held_out=source))
        assert "validation.dataset.drop_last: true" in held_out


def test_an_exception_names_the_empty_share_and_only_that() -> None:
    for batch, ctx, is_said in (
        (share(0, of=2), context(), True),
        (torch.zeros(0, 4), context(), True),
        (share(1, of=2), context(), False),
        (share(0, of=0), context(world_size=1, rank=0), False),
    ):
        cause = ValueError("x")
        note_empty_share(cause, batch, ctx)
        notes = "\n".join(getattr(cause, "__notes__", []))
        assert ("the share of process 2 of this batch has no rows" in notes) is is_said


class Others:
    """Two processes that say what this one says."""

    def gather(self, item: Any) -> list[Any]:
        return [False, False, item]

    def any_of(self, flag: bool) -> bool:
        return flag


class Told:
    def __init__(self) -> None:
        self.messages: list[str] = []

    def log(self, message: str, *, level: str) -> None:
        self.messages.append(f"{level}: {message}")


def look(metric: Any, *, weight: float, rows: int = 0, of: int = 2, **more: Any) -> list[str]:
    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, weight)
    trainer = SimpleNamespace(
        prepare_batch=lambda raw, _state, _ctx: raw,
        train_step=lambda _batch, _state, _ctx: StepResult(metrics={"loss": metric, "note": None}),
        **more,
    )
    told = Told()
    watch = EmptyShareWatch(trainer, Others(), told)  # type: ignore[arg-type]
    state, ctx = {"model": model}, context()
    for _ in range(2):  # and it is told once
        watch.train_step(watch.prepare_batch(share(rows, of=of), state, ctx), state, ctx)
    return told.messages


def test_a_nan_over_an_empty_share_is_told_once_with_what_it_did_to_the_weights() -> None:
    (message,) = look(torch.tensor(math.nan), weight=math.nan)
    assert message.startswith(
        "warning: the loss of process 2 became NaN in step 1: its share of that batch has no rows"
    )
    assert "2 rows for 3 processes" in message
    assert "The weights are not finite after it: set dataset.drop_last: true" in message
    (harmless,) = look(torch.tensor(math.nan), weight=1.0)
    assert harmless.startswith("info: the loss of process 2 became NaN in step 1")
    assert look(torch.tensor(math.nan), weight=1.0, handles_empty_shares=True) == []
    assert look(0.5, weight=math.nan) == []
    assert look(math.nan, weight=math.nan, rows=1) == []  # a NaN of its own making
    assert look(math.nan, weight=math.nan, rows=1, of=3) == []


def test_the_guard_says_that_the_share_had_no_rows() -> None:
    run: Any = SimpleNamespace(
        ctx=context(), state=SimpleNamespace(step=7), any_process=lambda flag: flag, log=lambda *_: None
    )
    result = StepResult(metrics={"loss": math.nan})
    words = r"is nan \(this batch has 2 rows for 3 processes, so a share has no rows: set dataset"
    for rows in (0, 1):
        with pytest.raises(TrainStepError, match=words):
            NonFiniteGuard().on_batch_end(run, share(rows, of=2), result)
    with pytest.raises(TrainStepError, match="loss is nan at step 7"):
        NonFiniteGuard().on_batch_end(run, share(1, of=3), result)
