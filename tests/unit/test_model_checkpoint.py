"""Claims about when a checkpoint is asked for besides the job's cadence."""

from typing import Any

import pytest
from hand_built_run import HandBuiltRun

from gen_worker.contract.job.spec import EarlyStoppingSpec
from gen_worker.errors import StartupError
from gen_worker.trainer.callbacks.callback_list import CallbackList
from gen_worker.trainer.callbacks.model_checkpoint import ModelCheckpoint


def asked(run: HandBuiltRun, name: str, values: list[float]) -> list[bool]:
    found = []
    for value in values:
        run.handle.ctx.progress.step += 1
        run.validate({name: value})
        found.append(run.take_save())
    return found


def test_each_best_validation_is_saved_and_nothing_else() -> None:
    run = HandBuiltRun([ModelCheckpoint()]).begin()
    nan = float("nan")
    assert asked(run, "val/loss", [nan, 3.0, 4.0, 3.0, nan, 2.0]) == [False, True, False, False, False, True]
    assert run.state.best is not None
    assert (run.state.best.name, run.state.best.value, run.state.best.step) == ("val/loss", 2.0, 6)


def test_more_is_better_where_it_is_said_so() -> None:
    run = HandBuiltRun([ModelCheckpoint("val/accuracy", mode="max")]).begin()
    assert asked(run, "val/accuracy", [0.5, 0.4, 0.6]) == [True, False, True]
    assert asked(run, "val/loss", [0.1]) == [False]
    assert run.state.best is not None
    assert (run.state.best.name, run.state.best.mode) == ("val/accuracy", "max")


def test_without_a_setting_it_watches_what_early_stopping_watches() -> None:
    stopping = EarlyStoppingSpec(metric="val/f1", mode="max")
    run = HandBuiltRun([ModelCheckpoint()], early_stopping=stopping).begin()
    assert asked(run, "val/f1", [0.1, 0.2]) == [True, True]
    assert asked(run, "val/loss", [1.0]) == [False]


def test_a_cadence_alone_watches_no_metric() -> None:
    run = HandBuiltRun([ModelCheckpoint(every_epochs=1)]).begin()
    assert asked(run, "val/loss", [1.0]) == [False]


def test_the_best_can_be_kept_without_being_saved_for() -> None:
    run = HandBuiltRun([ModelCheckpoint("val/loss", save_on_best=False)]).begin()
    assert asked(run, "val/loss", [1.0, 0.5]) == [False, False]
    assert run.state.best is not None
    assert run.state.best.value == 0.5


def test_the_best_survives_a_resume() -> None:
    run = HandBuiltRun([ModelCheckpoint()]).begin()
    asked(run, "val/loss", [2.0])
    again = HandBuiltRun([ModelCheckpoint()], step=1)
    again.callbacks.load_state_dict(run.callbacks.state_dict())
    again.begin()
    assert asked(again, "val/loss", [2.5, 1.5]) == [False, True]


def test_a_cadence_of_steps_is_exact_and_only_then_costs_a_call_per_batch() -> None:
    assert not CallbackList([ModelCheckpoint("val/loss", every_epochs=3)]).has_batch_hooks
    run = HandBuiltRun([ModelCheckpoint(every_steps=3)]).begin()
    found = []
    for _ in range(7):
        run.end_batch(loss=1.0)
        found.append(run.take_save())
    assert found == [False, False, True, False, False, True, False]
    assert run.callbacks.state_dict() == {}


def test_a_cadence_of_epochs_counts_completed_ones() -> None:
    run = HandBuiltRun([ModelCheckpoint(every_epochs=2)]).begin()
    found = []
    for epoch in range(5):
        run.handle.ctx.progress.epoch = epoch
        run.callbacks.call("on_epoch_end", run.handle)
        found.append(run.take_save())
    assert found == [False, False, True, False, True]


@pytest.mark.parametrize("settings", [{"mode": "best"}, {"every_steps": -1}, {"every_epochs": -1}])
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(StartupError, match=r"ModelCheckpoint: .* expected"):
        ModelCheckpoint(**settings)
