"""A pass over held-out data costs its own batches, and nothing of training can tell that it took place."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.errors import PluginError, TrainStepError
from gen_worker.trainer.arrow_feed import ArrowFeed
from gen_worker.trainer.contracts import StepContext
from gen_worker.trainer.steps.batch_source import FirstBatches, ListSource
from gen_worker.trainer.steps.evaluation import Evaluator, evaluation_mode

torch = pytest.importorskip("torch")


class Mean:
    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def prepare_batch(self, raw_batch: Any, state: Any, ctx: StepContext) -> Any:
        return raw_batch

    def validate_step(self, batch: Any, state: Any, ctx: StepContext) -> Any:
        rows = batch.column("n").to_pylist()
        self.seen.append(rows)
        return {"mean": sum(rows) / len(rows), "tensor": torch.tensor(float(rows[0]))}


def context() -> StepContext:
    return StepContext(job=TrainingJobSpec(run_id="r", max_steps=1))


def make(trainer: Any, source: Any, **options: Any) -> Evaluator:
    return Evaluator(kind="validation", source=source, trainer=trainer, ctx=context(), **options)


@pytest.fixture
def feed(tmp_path: Path) -> Iterator[ArrowFeed]:
    pq.write_table(pa.table({"n": list(range(10))}), tmp_path / "rows.parquet", row_group_size=3)
    with ArrowFeed.open([str(tmp_path / "rows.parquet")], batch_size=4) as feed:
        yield feed


def test_every_pass_sees_the_same_rows_through_one_reader(
    feed: ArrowFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Mean()
    evaluator = make(trainer, feed)
    num_started = [0]
    start = threading.Thread.start

    def counted(thread: threading.Thread) -> None:
        num_started[0] += 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", counted)
    opened = []
    batches = feed.batches
    monkeypatch.setattr(feed, "batches", lambda **place: opened.append(place) or batches(**place))
    first = evaluator.run(None)
    num_for_the_first = num_started[0]
    assert [evaluator.run(None).metrics for _ in range(5)] == [first.metrics] * 5
    assert trainer.seen == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] * 6
    assert first.rows == 10
    assert first["val/mean"] == pytest.approx(4.5)
    assert first["val/tensor"] == pytest.approx((0 * 4 + 4 * 4 + 8 * 2) / 10)
    assert opened == [{"epoch": 0, "batch": 0}]
    assert num_started[0] == num_for_the_first
    evaluator.close()


def test_a_pass_that_failed_is_followed_by_a_whole_one(feed: ArrowFeed) -> None:
    class Fails(Mean):
        def validate_step(self, batch: Any, state: Any, ctx: StepContext) -> Any:
            if state == "fail" and len(self.seen) == 1:
                raise ValueError("no")
            return super().validate_step(batch, state, ctx)

    trainer = Fails()
    evaluator = make(trainer, feed)
    with pytest.raises(ValueError, match="no"):
        evaluator.run("fail")
    assert evaluator.run(None).rows == 10
    assert trainer.seen[1:] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    evaluator.close()


def test_a_part_of_a_pass_begins_at_the_beginning_each_time(feed: ArrowFeed) -> None:
    trainer = Mean()
    evaluator = make(trainer, feed, max_batches=2)
    assert [evaluator.run(None).rows for _ in range(3)] == [8, 8, 8]
    assert trainer.seen == [[0, 1, 2, 3], [4, 5, 6, 7]] * 3


class Weighted(Mean):
    def validate_step(self, batch: Any, state: Any, ctx: StepContext) -> Any:
        return {"value": float(batch[0])}


@pytest.mark.parametrize("is_endless", [False, True])
def test_batches_in_memory_are_passed_over_again(is_endless: bool) -> None:
    evaluator = make(Weighted(), ListSource([[1, 1, 1], [5]], is_endless=is_endless))
    assert [evaluator.run(None)["val/value"] for _ in range(3)] == [2.0, 2.0, 2.0]


def test_random_streams_and_modes_are_as_they_were() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))
    model[0].eval()  # frozen by its author, and to stay so

    class Draws(Weighted):
        def validate_step(self, batch: Any, state: Any, ctx: StepContext) -> Any:
            assert not any(module.training for module in state["parts"]["model"].modules())
            assert not torch.is_grad_enabled()
            np.random.random(), torch.rand(1)
            return {"value": 1.0}

    streams = np.random.get_state()[1].copy(), torch.get_rng_state().clone()
    make(Draws(), ListSource([[1]])).run({"parts": {"model": model}})
    assert (np.random.get_state()[1] == streams[0]).all()
    assert torch.equal(torch.get_rng_state(), streams[1])
    assert [module.training for module in model.modules()] == [True, False, True]
    assert torch.is_grad_enabled()


def test_modules_are_found_in_objects_and_in_the_trainer_itself() -> None:
    class Holder:
        __slots__ = ("net",)

        def __init__(self) -> None:
            self.net = torch.nn.Linear(1, 1)

    class Trainer:
        def __init__(self) -> None:
            self.nets = [torch.nn.Linear(1, 1)]

    trainer, holder = Trainer(), Holder()
    with evaluation_mode(trainer, holder):
        assert not trainer.nets[0].training
        assert not holder.net.training
    assert trainer.nets[0].training
    assert holder.net.training


def test_metrics_of_a_whole_pass_are_added_as_they_are() -> None:
    class WholePass(Weighted):
        def begin_evaluation(self, kind: str, state: Any, ctx: StepContext) -> None:
            self.kinds = [kind]

        def end_evaluation(self, kind: str, state: Any, ctx: StepContext) -> dict[str, Any]:
            return {"f1": torch.tensor(0.25), "kinds": len(self.kinds)}

    record = make(WholePass(), ListSource([[1], [3]])).run(None)
    assert record.metrics == {"val/value": 2.0, "val/f1": 0.25, "val/kinds": 1.0}


def test_a_stop_request_ends_a_pass() -> None:
    class Stops(Weighted):
        def validate_step(self, batch: Any, state: Any, ctx: StepContext) -> Any:
            ctx.is_canceled.request("enough")
            return {"value": 1.0}

    class SwapsWeights(Stops):
        def end_evaluation(self, kind: str, state: Any, ctx: StepContext) -> None:
            state.append("the training weights are back")

    assert make(Stops(), ListSource([[1], [2]])).run(None) is None
    state: list[str] = []
    record = make(SwapsWeights(), ListSource([[1], [2]])).run(state)
    assert record is not None
    assert record.rows == 2
    assert state == ["the training weights are back"]


def test_what_cannot_be_averaged_is_refused_by_name() -> None:
    class Wrong(Weighted):
        def validate_step(self, batch: Any, state: Any, ctx: StepContext) -> Any:
            return state

    with pytest.raises(TrainStepError, match="validate_step returned float, expected a dict"):
        make(Wrong(), ListSource([[1]])).run(1.0)
    with pytest.raises(TrainStepError, match="the value of 'logits' is not a number"):
        make(Wrong(), ListSource([[1]])).run({"logits": torch.zeros(3)})
    with pytest.raises(PluginError, match=r"has validation data, but object has no `validate_step"):
        make(object(), ListSource([[1]]))


def test_the_first_batches_again_and_again_have_a_position_of_their_own() -> None:
    source = FirstBatches(ListSource([1, 2, 3], is_endless=True), 2)
    state = source.state(epoch=5, batch=1)
    assert source.position(state) == (5, 1)
    iterator = source.batches(epoch=5, batch=1)
    assert [next(iterator) for _ in range(4)] == [2, 1, 2, 1]


def test_sums_over_many_batches_are_those_of_one_by_one_whatever_the_values_are() -> None:
    from gen_worker.trainer.steps.evaluation import NUM_UNREAD, RowSums

    sums, expected = RowSums(), 0.0
    for number in range(NUM_UNREAD + 5):
        value = 1 / (number + 1)
        kinds = (torch.tensor(value), value, np.float64(value), torch.tensor([value], dtype=torch.float64))
        kind = kinds[0] if number < NUM_UNREAD else kinds[number % 4]
        sums.add({"loss": kind, **({"rare": torch.tensor(2)} if number == 7 else {})}, rows=3)
        expected += float(kind) * 3
    assert sums.totals() == {"loss": expected, "rare": 6.0}
    assert sums.num_rows == 3 * (NUM_UNREAD + 5)


def test_a_value_that_is_part_of_a_large_tensor_does_not_keep_it() -> None:
    from gen_worker.trainer.steps.evaluation import RowSums

    sums = RowSums()
    sums.add({"loss": torch.ones(10_000)[0]}, rows=1)
    assert sums._unread[0][0]["loss"].untyped_storage().nbytes() < 100
    assert sums.totals() == {"loss": 1.0}
