"""`Trainer` in the caller's process: the same attempt that a worker makes, with batches and callbacks handed over."""

import json
import math
import signal
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gen_worker.contract.job.spec import CheckpointsSpec, EarlyStoppingSpec, TrainingJobSpec
from gen_worker.errors import InputError, SpecError, StartupError, TrainingCanceled, TrainStepError
from gen_worker.trainer import (
    Callback,
    MetricsRecord,
    RunHandle,
    StepContext,
    StepResult,
    Trainer,
    TrainerConfig,
    TrainerInterface,
)
from gen_worker.trainer.author.identity import changes_since, describe_identity
from gen_worker.trainer.steps.batch_source import ListSource

BATCHES = [[float(n)] * 4 for n in range(5)]


class Drift:
    """Its weight moves by the mean of the batch and a random number; validation measures the weight."""

    def setup(self, ctx: StepContext) -> None: ...

    def configure(self, ctx: StepContext) -> dict[str, Any]:
        return {"weight": np.zeros(2)}

    def prepare_batch(self, raw_batch: Any, state: dict[str, Any], ctx: StepContext) -> Any:
        return np.asarray(raw_batch)

    def train_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> StepResult:
        state["weight"] += batch.mean() + np.random.standard_normal(2)
        return StepResult(metrics={"loss": float(state["weight"].sum())})

    def validate_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> dict[str, float]:
        np.random.standard_normal(3)
        return {"loss": float(state["weight"].sum()), "mean": float(batch.mean())}

    test_step = validate_step

    def state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        return dict(state)

    def load_state_dict(self, state: dict[str, Any], payload: dict[str, Any], ctx: StepContext) -> None:
        state.update(payload)


def make(folder: Path, *callbacks: Callback, plugin: Any = Drift, **config: Any) -> Trainer:
    data = {
        name: config.pop(name) for name in ("train_data", "validation_data", "test_data") if name in config
    }
    config = {"epochs": 3, "metric_every": 2, "checkpoint_every": 4, **config}
    return Trainer(
        plugin,
        TrainerConfig(**config),
        **{"train_data": BATCHES, **data},
        callbacks=callbacks,
        folder=folder,
    )


def events(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    lines = (folder / "metrics" / "events.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [event for event in found if not kinds or event["event"] in kinds]


def test_it_is_the_typed_interface_of_the_three_operations(tmp_path: Path) -> None:
    assert isinstance(make(tmp_path), TrainerInterface)


def test_train_returns_what_was_measured_and_leaves_a_whole_run_behind(tmp_path: Path) -> None:
    trainer = make(tmp_path, validation_data=BATCHES[:2], test_data=BATCHES[3:])
    record = trainer.train()
    assert isinstance(record, MetricsRecord)
    assert (record.kind, record.step, record.epoch) == ("train", 15, 3)
    assert record.checkpoint == tmp_path / "checkpoints" / "final.pt"
    assert record["val/mean"] == 0.5
    assert record["test/mean"] == 3.5
    assert trainer.state is not None
    assert [step for step, _ in trainer.state.train_loss] == [2, 4, 6, 8, 10, 12, 14]
    assert [step for step, _ in trainer.state.validation_loss] == [5, 10, 15]
    assert trainer.state.best is not None
    assert trainer.state.best.name == "val/loss"
    assert [event["event"] for event in events(tmp_path, "started", "completed")] == ["started", "completed"]
    assert [event["values"]["val/mean"] for event in events(tmp_path, "validation")] == [0.5] * 3


def test_validate_and_test_change_nothing_and_write_nothing(tmp_path: Path) -> None:
    trainer = make(tmp_path, validation_data=BATCHES[:2], test_data=BATCHES)
    trainer.train()
    before = (tmp_path / "metrics" / "events.jsonl").read_bytes()
    weight = trainer.model_state["weight"].copy()
    stream = np.random.get_state()
    first, second = trainer.validate(), trainer.validate()
    assert trainer.test()["test/mean"] == 2.0
    assert (first.kind, first.rows, first.metrics) == ("validation", 8, second.metrics)
    assert (trainer.model_state["weight"] == weight).all()
    assert (np.random.get_state()[1] == stream[1]).all()
    assert (tmp_path / "metrics" / "events.jsonl").read_bytes() == before


def test_validate_in_another_process_takes_the_newest_checkpoint(tmp_path: Path) -> None:
    trained = make(tmp_path, validation_data=BATCHES)
    trained.train()
    fresh = make(tmp_path, validation_data=BATCHES)
    record = fresh.validate()
    assert record.step == 15
    assert record.metrics == trained.validate().metrics


def test_a_run_is_the_same_with_and_without_validation(tmp_path: Path) -> None:
    plain = make(tmp_path / "plain")
    watched = make(tmp_path / "watched", validation_data=BATCHES, validate_every=1)
    plain.train(), watched.train()
    assert (plain.model_state["weight"] == watched.model_state["weight"]).all()


def test_training_again_on_the_same_folder_goes_on_to_the_bit(tmp_path: Path) -> None:
    straight = make(tmp_path / "straight", epochs=4)
    straight.train()
    make(tmp_path / "parts", max_steps=7).train()
    again = make(tmp_path / "parts", epochs=4)
    record = again.train()
    assert record.step == 20
    assert (again.model_state["weight"] == straight.model_state["weight"]).all()
    finished = make(tmp_path / "parts", epochs=4).train()
    assert finished.step == 20


def test_early_stopping_ends_the_run_as_complete_and_it_stays_so(tmp_path: Path) -> None:
    stopping = EarlyStoppingSpec(metric="val/mean", patience=2)
    trainer = make(tmp_path, validation_data=BATCHES, validate_every=1, early_stopping=stopping)
    record = trainer.train()
    assert record.step == 3
    assert record.stop_reason is not None
    assert record.stop_reason.startswith("val/mean did not fall below 2 (step 1)")
    (completed,) = events(tmp_path, "completed")
    assert completed["reason"] == record.stop_reason
    assert trainer.state is not None
    assert trainer.state.early_stopping == {
        "metric": "val/mean",
        "mode": "min",
        "best": 2.0,
        "best_step": 1,
        "num_without_improvement": 2,
    }
    again = make(tmp_path, validation_data=BATCHES, validate_every=1, early_stopping=stopping)
    assert again.train().step == 3
    # More patience is another job: it goes on, and counts anew from the best it had.
    patient = EarlyStoppingSpec(metric="val/mean", patience=4)
    longer = make(tmp_path, validation_data=BATCHES, validate_every=1, early_stopping=patient)
    assert longer.train().step == 7


def test_early_stopping_on_a_metric_that_validation_does_not_give_says_so(tmp_path: Path) -> None:
    trainer = make(tmp_path, validation_data=BATCHES, early_stopping={"metric": "val/accuracy"})
    with pytest.raises(
        TrainStepError, match=r"watches 'val/accuracy', which validation did not report.*val/loss, val/mean"
    ):
        trainer.train()
    assert events(tmp_path)[-1]["event"] == "failed"


class Order(Callback):
    def __init__(self, name: str, heard: list[str]) -> None:
        self._name = name
        self._heard = heard

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return object.__getattribute__(self, name)

        def hear(run: RunHandle, *args: Any) -> None:
            self._heard.append(f"{self._name}.{name}@{run.state.step}")

        return hear


def test_the_order_of_callbacks_is_the_published_one(tmp_path: Path) -> None:
    heard: list[str] = []
    trainer = make(
        tmp_path,
        Order("a", heard),
        Order("b", heard),
        train_data=BATCHES[:2],
        validation_data=BATCHES[:1],
        epochs=1,
        checkpoint_every=0,
    )
    trainer.train()
    moments = [
        "on_train_begin@0",
        "on_epoch_begin@0",
        "on_batch_begin@0",
        "on_batch_end@1",
        "on_batch_begin@1",
        "on_batch_end@2",
        "on_metrics@2",
        "on_validation_begin@2",
        "on_validation_end@2",
        "on_metrics@2",
        "on_epoch_end@2",
        "on_checkpoint@2",
        "on_train_end@2",
    ]
    assert heard == [f"{name}.{moment}" for moment in moments for name in "ab"]


class Counter(Callback):
    """Keeps its state without a word about it."""

    def __init__(self, limit: int = 100) -> None:
        self.limit = limit
        self.num_batches = 0
        self.seen: list[float] = []

    def on_batch_end(self, run: RunHandle, batch: Any, result: StepResult) -> None:
        self.num_batches += 1
        self.seen.append(float(batch[0]))
        if self.num_batches == self.limit:
            run.stop("that is enough")


def test_a_callback_keeps_its_state_by_default_and_its_settings_are_those_given(tmp_path: Path) -> None:
    make(tmp_path, Counter(), max_steps=7).train()
    counter = Counter(limit=9)
    record = make(tmp_path, counter, max_steps=12).train()
    assert (counter.num_batches, counter.limit, record.step) == (9, 9, 9)
    assert counter.seen == [0, 1, 2, 3, 4, 0, 1, 2, 3]


def test_a_callback_that_raises_names_itself_and_the_run_has_its_terminal_event(tmp_path: Path) -> None:
    class Broken(Callback):
        def on_epoch_end(self, run: RunHandle) -> None:
            raise KeyError("oh")

    with pytest.raises(TrainStepError, match=r"the callback Broken\.on_epoch_end raised KeyError: 'oh'"):
        make(tmp_path, Broken()).train()
    last = events(tmp_path)[-1]
    assert (last["event"], last["category"], last["step"]) == ("failed", "train-step", 5)
    assert (tmp_path / "checkpoints" / "step-00000005.meta.json").exists()  # the state was sound


def test_every_callback_hears_of_the_end_even_where_another_one_raises(tmp_path: Path) -> None:
    heard: list[str] = []

    class Broken(Callback):
        def on_batch_end(self, run: RunHandle, batch: Any, result: StepResult) -> None:
            raise ValueError("first")

        def on_exception(self, run: RunHandle, error: BaseException) -> None:
            raise RuntimeError("second")

    class Last(Callback):
        def on_exception(self, run: RunHandle, error: BaseException) -> None:
            heard.append(str(error))

    with pytest.raises(TrainStepError, match="first"):
        make(tmp_path, Broken(), Last()).train()
    assert len(heard) == 1
    assert "on_exception hook of a callback failed: second" in events(tmp_path)[-1]["error"]


def test_a_callback_can_ask_for_a_checkpoint_and_report_metrics(tmp_path: Path) -> None:
    class Asking(Callback):
        def on_batch_end(self, run: RunHandle, batch: Any, result: StepResult) -> None:
            if run.state.step == 3:
                run.save_checkpoint()
                run.report({"asked": 1.0})

    make(tmp_path, Asking(), checkpoint_every=0).train()
    assert 3 in [event["step"] for event in events(tmp_path, "checkpoint")]
    (asked,) = (event for event in events(tmp_path, "metric") if event["name"] == "asked")
    assert asked["step"] == 3


def test_a_rollback_takes_the_state_back_and_the_data_on(tmp_path: Path) -> None:
    class TakeBack(Callback):
        def __init__(self) -> None:
            self.num_taken_back = 0
            self.seen: list[tuple[int, float]] = []

        def on_batch_end(self, run: RunHandle, batch: Any, result: StepResult) -> None:
            self.seen.append((run.state.step, batch[0]))
            if run.state.step == 3 and not self.num_taken_back:
                self.num_taken_back += 1
                run.roll_back({"weight": np.full(2, 7.0)}, step=2)

    back = TakeBack()
    trainer = make(tmp_path, back, epochs=2, checkpoint_every=0)
    record = trainer.train()
    # Step 3 is trained twice, on the third batch and then on the fourth: one batch less is left for other steps.
    assert back.seen == [(1, 0), (2, 1), (3, 2), (3, 3), (4, 4), (5, 0), (6, 1), (7, 2), (8, 3), (9, 4)]
    assert (record.step, record.epoch) == (9, 2)


def test_a_rollback_to_the_newest_checkpoint(tmp_path: Path) -> None:
    class TakeBack(Callback):
        def __init__(self) -> None:
            self.num_taken_back = 0

        def on_batch_end(self, run: RunHandle, batch: Any, result: StepResult) -> None:
            if run.state.step == 6 and not self.num_taken_back:
                self.num_taken_back += 1
                run.roll_back()

    make(tmp_path, TakeBack(), epochs=2).train()
    messages = [event["message"] for event in events(tmp_path, "log")]
    assert "rolled back from step 6 to step 4" in messages
    (place,) = (event for event in events(tmp_path, "log") if "rolled back" in event["message"])
    assert (place["step"], place["epoch"], place["batch"]) == (4, 1, 1)
    with pytest.raises(TrainStepError, match="cannot be rolled back: there is no checkpoint"):
        make(tmp_path / "without", TakeBack(), checkpoint_every=0).train()


def test_fast_dev_run_takes_a_few_steps_through_everything(tmp_path: Path) -> None:
    trainer = make(tmp_path, fast_dev_run=2, validation_data=BATCHES, epochs=100)
    assert trainer.train().step == 2
    (validation,) = events(tmp_path, "validation")
    assert validation["rows"] == 8  # two of its batches
    assert [event["step"] for event in events(tmp_path, "metric")] == [1, 2]


def test_a_trial_run_leaves_nothing_that_a_real_one_would_take_for_its_own(tmp_path: Path) -> None:
    make(tmp_path, fast_dev_run=2).train()
    assert (tmp_path / "fast_dev_run" / "checkpoints" / "final.pt").exists()
    assert make(tmp_path).train().step == 15
    assert make(tmp_path, fast_dev_run=2).train().step == 2
    assert (tmp_path / "checkpoints" / "final.pt").exists()


def test_a_second_train_in_one_process_saves_what_the_first_one_counted(tmp_path: Path) -> None:
    counter = Counter()
    trainer = make(tmp_path, counter, max_steps=5)
    trainer.train()
    weight = trainer.model_state["weight"].copy()
    assert trainer.train().step == 5  # finished: nothing is trained, and what is in memory stays
    assert (trainer.model_state["weight"] == weight).all()
    make(tmp_path, counter, max_steps=7).train()
    fresh = Counter()
    make(tmp_path, fresh, max_steps=8).train()
    assert (counter.num_batches, fresh.num_batches) == (7, 8)


def test_a_folder_of_an_overfitting_run_is_not_taken_for_a_real_one(tmp_path: Path) -> None:
    make(tmp_path, overfit_batches=2).train()
    with pytest.raises(InputError, match="was saved with overfit_batches"):
        make(tmp_path, epochs=9).train()


def test_overfitting_sees_the_first_batches_again_and_again(tmp_path: Path) -> None:
    counter = Counter()
    make(tmp_path, counter, overfit_batches=2, epochs=3).train()
    assert counter.seen == [0, 1] * 3


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "epochs: neither it nor `max_steps`"),
        ({"epochs": 0}, "epochs: found 0"),
        ({"epochs": 1, "batch_size": "many"}, 'batch_size: found "many"'),
        ({"epochs": 1, "learning_rate": -1.0}, "learning_rate: found -1"),
        ({"epochs": 1, "precision": "fp8"}, 'precision: found "fp8"'),
        ({"epochs": 1, "validate_every": "step"}, 'validate_every: found "step"'),
        ({"epochs": 1, "seed": -1}, "seed: found -1"),
        (
            {"epochs": 1, "early_stopping": {"patienc": 2}},
            "early_stopping: unknown field `patienc`: did you mean `patience`",
        ),
        ({"epochs": 1, "gradient_clip_norm": 0}, "gradient_clip_norm: found 0"),
        ({"epoch": 3}, "unknown field `epoch`: did you mean `epochs`?"),
        ({"epochs": 3, "lr": 0.1}, "unknown field `lr`: settings of your own belong into `hyperparams`"),
        ({"epochs": 1, "checkpoints": CheckpointsSpec(), "x": 1, "batch_size": 0}, "TrainerConfig: 2 faults"),
        (
            {"epochs": 1, "learning_rate": 1.0, "hyperparams": {"learning_rate": 2}},
            "hyperparams.learning_rate: given together",
        ),
    ],
)
def test_a_wrong_config_says_what_is_wrong(config: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as caught:
        TrainerConfig(**config)
    assert said in str(caught.value)


def test_all_faults_of_a_config_come_at_once_and_a_misspelt_field_is_recognised() -> None:
    with pytest.raises(SpecError) as caught:
        TrainerConfig.from_document({"epoch": 3, "batch_size": 0, "seed": "x"})
    assert len(caught.value.faults) == 3
    assert "did you mean `epochs`" in str(caught.value)


def test_wrong_parts_are_refused_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="can be iterated only once"):
        make(tmp_path, train_data=iter(BATCHES))
    with pytest.raises(StartupError, match=r"found the class Counter: write Counter\(\)"):
        make(tmp_path, Counter)  # type: ignore[arg-type]
    with pytest.raises(StartupError, match="expected a list of instances of"):
        make(tmp_path, print)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="there is no test data"):
        make(tmp_path).test()

    class NoValidation(Drift):
        validate_step = None  # type: ignore[assignment]

    with pytest.raises(StartupError, match="has no `validate_step"):
        make(tmp_path, plugin=NoValidation, validation_data=BATCHES).train()


class Interrupted(Callback):
    """Raises in a hook, once for each name in `faults`."""

    def __init__(self, *faults: str) -> None:
        self._faults = list(faults)

    def _maybe(self, hook: str, step: int) -> None:
        if f"{hook}@{step}" in self._faults:
            self._faults.remove(f"{hook}@{step}")
            raise RuntimeError("the power is cut")

    def on_validation_end(self, run: RunHandle, record: MetricsRecord) -> None:
        self._maybe("on_validation_end", run.state.step)

    def on_epoch_end(self, run: RunHandle) -> None:
        self._maybe("on_epoch_end", run.state.step)


class Ledger(Callback):
    def __init__(self) -> None:
        self.validated: list[int] = []
        self.ended: list[int] = []

    def on_validation_end(self, run: RunHandle, record: MetricsRecord) -> None:
        self.validated.append(run.state.step)

    def on_epoch_end(self, run: RunHandle) -> None:
        self.ended.append(run.state.step)


@pytest.mark.parametrize(
    ("fault", "validated"), [("on_validation_end@10", [10, 15]), ("on_epoch_end@10", [15])]
)
def test_what_was_due_at_an_interrupted_step_is_made_up_for(
    tmp_path: Path, fault: str, validated: list[int]
) -> None:
    straight = make(tmp_path / "straight", validation_data=BATCHES, checkpoint_every=0)
    straight.train()
    interrupted = make(tmp_path / "parts", Interrupted(fault), validation_data=BATCHES, checkpoint_every=0)
    with pytest.raises(TrainStepError, match="the power is cut"):
        interrupted.train()
    ledger = Ledger()
    again = make(tmp_path / "parts", ledger, validation_data=BATCHES, checkpoint_every=0)
    again.train()
    assert (again.model_state["weight"] == straight.model_state["weight"]).all()
    assert ledger.ended == [10, 15]
    assert ledger.validated == validated  # what was done is not repeated
    assert again.state is not None
    assert straight.state is not None
    assert list(again.state.validation_loss)[-2:] == list(straight.state.validation_loss)[-2:]


def test_a_stop_in_the_middle_of_validation_loses_neither_steps_nor_validation(tmp_path: Path) -> None:
    class Stops(Drift):
        is_first = True

        def validate_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> dict[str, float]:
            if ctx.step == 10 and Stops.is_first:
                Stops.is_first = False
                ctx.is_canceled.request("enough for today")
            return super().validate_step(batch, state, ctx)

    straight = make(tmp_path / "straight", validation_data=BATCHES)
    straight.train()
    with pytest.raises(TrainingCanceled, match="enough for today"):
        make(tmp_path / "parts", plugin=Stops, validation_data=BATCHES, checkpoint_every=0).train()
    assert (tmp_path / "parts" / "checkpoints" / "step-00000010.meta.json").exists()
    again = make(tmp_path / "parts", plugin=Stops, validation_data=BATCHES)
    again.train()
    assert [event["step"] for event in events(tmp_path / "parts", "validation")] == [5, 10, 15]
    assert (again.model_state["weight"] == straight.model_state["weight"]).all()


def test_training_is_not_lost_with_a_test_that_fails(tmp_path: Path) -> None:
    class BadTest(Drift):
        def test_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> dict[str, float]:
            raise ValueError("this test is wrong")

    with pytest.raises(ValueError, match="this test is wrong"):
        make(tmp_path, plugin=BadTest, test_data=BATCHES, checkpoint_every=0).train()
    assert (tmp_path / "checkpoints" / "step-00000015.meta.json").exists()
    assert make(tmp_path, test_data=BATCHES, checkpoint_every=0).train()["test/mean"] == 2.0


def test_a_run_that_stopped_early_and_died_before_its_final_checkpoint_ends_where_it_was(
    tmp_path: Path,
) -> None:
    class BadTest(Drift):
        def test_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> dict[str, float]:
            raise ValueError("this test is wrong")

    settings: dict[str, Any] = {
        "validation_data": BATCHES,
        "test_data": BATCHES,
        "validate_every": 1,
        "early_stopping": {"metric": "val/mean", "patience": 2},
    }
    with pytest.raises(ValueError, match="this test is wrong"):
        make(tmp_path, plugin=BadTest, **settings).train()
    record = make(tmp_path, **settings).train()
    assert record.step == 3
    assert record.stop_reason is not None


def test_a_checkpoint_is_kept_as_best_only_for_what_its_own_step_measured(tmp_path: Path) -> None:
    class Falls(Drift):
        def validate_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> dict[str, float]:
            return {"loss": 0.1 if ctx.step == 4 else 1.0}

    make(
        tmp_path,
        plugin=Falls,
        validation_data=BATCHES[:1],
        validate_every=4,
        checkpoint_every=2,
        checkpoints={"keep_last": 1, "keep_best": 1},
        epochs=3,
    ).train()
    kept = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*.meta.json"))
    assert kept == ["step-00000004.meta.json", "step-00000014.meta.json"]


def test_one_callback_object_serves_two_runs_without_mixing_them_up(tmp_path: Path) -> None:
    counter = Counter()
    make(tmp_path / "one", counter, max_steps=4).train()
    make(tmp_path / "two", counter, max_steps=3).train()
    assert counter.num_batches == 3


def test_a_torch_data_loader_resumes_to_the_bit_shuffled_or_not(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    class Sums(Drift):
        def prepare_batch(self, raw_batch: Any, state: dict[str, Any], ctx: StepContext) -> Any:
            return raw_batch[0].numpy() + torch.rand(1).item()

    rows = torch.utils.data.TensorDataset(torch.arange(10.0))
    for shuffle in (False, True):
        loader = torch.utils.data.DataLoader(rows, batch_size=4, shuffle=shuffle)
        parts = tmp_path / f"parts-{shuffle}"
        straight = make(tmp_path / f"straight-{shuffle}", plugin=Sums, train_data=loader, epochs=4)
        straight.train()
        make(parts, plugin=Sums, train_data=loader, max_steps=4).train()
        make(parts, plugin=Sums, train_data=loader, max_steps=7).train()
        again = make(parts, plugin=Sums, train_data=loader, validation_data=loader, epochs=4)
        again.train()
        assert (again.model_state["weight"] == straight.model_state["weight"]).all()
        assert again.validate().rows == 10


def test_what_has_no_batches_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the training data has no batches"):
        make(tmp_path, train_data=[]).train()
    with pytest.raises(InputError, match="the validation data has no batches"):
        make(tmp_path, validation_data=[]).train()
    with pytest.raises(SpecError, match="but nothing is validated: give validation_data"):
        make(tmp_path, early_stopping={"metric": "val/loss"})
    with pytest.raises(SpecError, match="but `metric_every` is 0: no step reports it"):
        make(tmp_path, early_stopping={"metric": "train/loss"}, metric_every=0)


def test_a_stop_that_a_callback_asked_for_is_obeyed_from_any_hook(tmp_path: Path) -> None:
    class Stop(Callback):
        def __init__(self, hook: str) -> None:
            self._hook = hook

        def on_train_begin(self, run: RunHandle) -> None:
            if self._hook == "on_train_begin":
                run.stop("now")

        def on_epoch_begin(self, run: RunHandle) -> None:
            if self._hook == "on_epoch_begin" and run.state.epoch == 1:
                run.stop("now")

    assert make(tmp_path / "a", Stop("on_train_begin")).train().step == 0
    assert make(tmp_path / "b", Stop("on_epoch_begin")).train().step == 5


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("val_loss", "watches 'val_loss', which validation did not report.*did you mean 'val/loss'"),
        ("train/los", "watches 'train/los', which train_step did not report.*did you mean 'train/loss'"),
    ],
)
def test_early_stopping_never_waits_for_a_metric_that_does_not_exist(
    tmp_path: Path, metric: str, said: str
) -> None:
    trainer = make(tmp_path, validation_data=BATCHES, early_stopping={"metric": metric})
    with pytest.raises(TrainStepError, match=said):
        trainer.train()


def test_a_resume_says_what_changed_about_the_job(tmp_path: Path) -> None:
    make(tmp_path, epochs=1).train()
    make(tmp_path, epochs=2, seed=0, batch_size=32, learning_rate=0.5).train()
    (said,) = (event["message"] for event in events(tmp_path, "log") if "the job changed" in event["message"])
    assert "epochs was 1, is now 2" in said
    assert "learning_rate" not in said  # which this class does not read


def test_what_every_resume_changes_is_no_news(tmp_path: Path) -> None:
    def identity(**fields: Any) -> dict[str, Any]:
        job = TrainingJobSpec(**{"run_id": "first", "max_steps": 5, **fields})
        return describe_identity(job, Drift(), ListSource([1]))

    saved = identity()
    again = {"run_id": "second", "resume_checkpoint_path": str(tmp_path / "step-00000005.meta.json")}
    older = {name: value for name, value in saved.items() if name != "job_digest"}
    assert changes_since(saved, identity(**again)) == changes_since(older, identity(**again)) == []
    assert changes_since(saved, identity(**again, hyperparams={"lr": 1})) == [
        "the job changed: hyperparams.lr was not set, is now 1"
    ]
    assert changes_since(saved, identity(**again, env={"SECRET": "x"})) == ["the job changed"]


def test_the_event_that_training_begins_says_where_in_the_data(tmp_path: Path) -> None:
    make(tmp_path, epochs=1).train()
    make(tmp_path, epochs=3).train()
    begun = [event for event in events(tmp_path, "log") if "training from" in event["message"]]
    places = [
        [event[name] for name in ("step", "end_step", "epoch", "batch", "epochs", "steps_per_epoch")]
        for event in begun
    ]
    assert places == [[0, 5, 0, 0, 1, 5], [5, 15, 1, 0, 3, 5]]


class Fragile(Drift):
    """Fails once, in the middle of its run."""

    fails_at: int | None = 7

    def train_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> StepResult:
        if ctx.step + 1 == self.fails_at:
            type(self).fails_at = None
            raise RuntimeError("a bad batch")
        return super().train_step(batch, state, ctx)


def test_after_an_error_the_state_is_there_and_training_resumes(tmp_path: Path) -> None:
    trainer = make(tmp_path / "failed", plugin=Fragile, validation_data=BATCHES)
    with pytest.raises(RuntimeError, match="a bad batch"):
        trainer.train()
    assert trainer.state is not None
    assert trainer.state.step == 6
    assert trainer.state.train_loss[-1][0] == 6
    assert trainer.model_state["weight"].shape == (2,)
    assert trainer.validate().step == 6
    assert trainer.train().step == 15
    whole = make(tmp_path / "whole", validation_data=BATCHES)
    whole.train()
    assert (trainer.model_state["weight"] == whole.model_state["weight"]).all()


class Interrupt(Callback):
    """What Ctrl-C does, at one step of the first attempt."""

    def __init__(self, step: int) -> None:
        self._step: int | None = step

    def on_batch_end(self, run: RunHandle, batch: Any, result: StepResult) -> None:
        if run.state.step == self._step:
            self._step = None
            signal.raise_signal(signal.SIGINT)


def test_after_an_interrupt_the_state_is_there_and_training_resumes(tmp_path: Path) -> None:
    trainer = make(tmp_path, Interrupt(7), validation_data=BATCHES)
    with pytest.raises(TrainingCanceled) as caught:
        trainer.train()
    assert trainer.state is not None
    assert trainer.state.step == 7
    assert trainer.model_state["weight"].any()
    assert trainer.validate().step == 7
    assert caught.value._render_traceback_() == [
        "TrainingCanceled: cancelled by SIGINT",
        "saved at step 7: call train() again to continue from there",
    ]
    assert trainer.train().step == 15


def test_an_interrupt_shows_nothing_of_our_own_loop(tmp_path: Path) -> None:
    with pytest.raises(TrainingCanceled) as caught:
        make(tmp_path, Interrupt(2)).train()
    shown = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert shown == ["test_an_interrupt_shows_nothing_of_our_own_loop", "train"]
    assert caught.value.__suppress_context__


def test_an_interrupt_before_the_first_step_says_that_nothing_was_saved(tmp_path: Path) -> None:
    class Early(Callback):
        def on_train_begin(self, run: RunHandle) -> None:
            signal.raise_signal(signal.SIGINT)

    trainer = make(tmp_path, Early())
    with pytest.raises(TrainingCanceled) as caught:
        trainer.train()
    assert caught.value._render_traceback_()[1:] == ["nothing was saved: no step was completed"]


def test_the_first_loss_that_is_not_finite_is_reported_once_with_what_stops_such_a_run(
    tmp_path: Path,
) -> None:
    class Diverges(Drift):
        def train_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> StepResult:
            result = super().train_step(batch, state, ctx)
            return StepResult(metrics={"loss": math.nan}) if ctx.step >= 4 else result

    make(tmp_path, plugin=Diverges).train()
    messages = [event["message"] for event in events(tmp_path, "log")]
    (said,) = (message for message in messages if "NonFiniteGuard" in message)
    assert said.startswith("train/loss is nan at step 6, and training continues.")


def test_a_run_that_is_too_short_to_report_a_training_metric_says_so(tmp_path: Path) -> None:
    for metric_every, is_told in ((1, False), (0, False), (5, False), (100, True)):
        folder = tmp_path / str(metric_every)
        make(folder, metric_every=metric_every, epochs=None, max_steps=5).train()
        (begun,) = (
            event["message"] for event in events(folder, "log") if "training from" in event["message"]
        )
        assert ("metric_every is 100: no training metrics" in begun) == is_told
    make(tmp_path / "5", metric_every=5, epochs=None, max_steps=9).train()
    messages = [event["message"] for event in events(tmp_path / "5", "log")]
    assert "training from step 5 to 9; metric_every is 5: no training metrics" in messages
