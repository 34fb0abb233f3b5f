"""What a notebook shows of our objects: it fits a screen, whatever they hold, and shows what matters."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hand_built_run import HandBuiltRun

from gen_worker.contract.screen_repr import MAX_COLUMNS, MAX_LINES, screen_repr
from gen_worker.trainer import (
    MetricsRecord,
    StepContext,
    StepResult,
    Trainer,
    TrainerConfig,
    TrainerState,
    TrainingJobSpec,
)

MANY = {f"train/metric_{number}": number / 7 for number in range(200)}
LONG = {
    "a": "x" * 5000,
    "b": list(range(9000)),
    "c": {str(n): {str(m): m for m in range(99)} for n in range(99)},
}


class Steady:
    def setup(self, ctx: StepContext) -> None: ...

    def configure(self, ctx: StepContext) -> dict[str, Any]:
        return {"weight": np.zeros(10_000)}

    def prepare_batch(self, raw_batch: Any, state: Any, ctx: StepContext) -> Any:
        return raw_batch

    def train_step(self, batch: Any, state: Any, ctx: StepContext) -> StepResult:
        return StepResult(metrics={"loss": 0.5, **MANY})

    def state_dict(self, state: Any) -> dict[str, Any]:
        return state

    def load_state_dict(self, state: Any, payload: dict[str, Any], ctx: StepContext) -> None:
        state.update(payload)


def assert_fits(shown: str) -> None:
    lines = shown.splitlines()
    assert len(lines) <= MAX_LINES, shown
    assert max(map(len, lines)) <= MAX_COLUMNS, shown


def test_everything_that_a_notebook_shows_of_a_run_fits_a_screen(tmp_path: Path) -> None:
    config = TrainerConfig(max_steps=30, metric_every=1, hyperparams=LONG, checkpoint_every=0)
    trainer = Trainer(Steady, config, train_data=[[1.0]] * 40, folder=tmp_path)
    assert "<not trained yet>" in repr(trainer)
    record = trainer.train()
    assert trainer.attempt is not None
    assert trainer.state is not None
    shown = (config, trainer, record, trainer.state, trainer.job, trainer.attempt, trainer.attempt.loop)
    for item in shown:
        assert_fits(repr(item))
    assert "Steady" in repr(trainer)
    assert "step=30" in repr(trainer)
    assert "<30 values, 0.5 at step 30>" in repr(trainer.state)
    run = HandBuiltRun([]).begin()
    for part in (run.handle, run.handle.ctx):
        assert_fits(repr(part))


def test_a_config_shows_what_was_changed_and_nothing_else() -> None:
    assert repr(TrainerConfig(epochs=3, seed=7)) == "TrainerConfig(epochs=3, seed=7)"
    job = TrainingJobSpec(run_id="r", max_steps=3, mock_batches=[[1.0] * 1000] * 1000)
    assert repr(job).startswith("TrainingJobSpec(")
    assert_fits(repr(job))


def test_a_record_is_a_table_in_a_notebook_and_names_are_escaped() -> None:
    record = MetricsRecord(kind="test", step=3, epoch=1, metrics={"val/<b>": 0.25, **MANY})
    shown = record._repr_html_()
    assert "<td>val/&lt;b&gt;</td><td>0.25</td>" in shown
    assert "and 181 more" in shown
    assert shown.count("<tr>") <= 21


def test_a_state_without_anything_is_short() -> None:
    assert repr(TrainerState()) == "TrainerState(step=0, epoch=0, metrics={})"


@pytest.mark.parametrize("value", [np.zeros(100_000), object(), [np.zeros(3)] * 100, {"x": np.zeros(9)}])
def test_what_is_no_plain_value_is_shown_by_its_type(value: object) -> None:
    shown = screen_repr(object(), {"value": value})
    assert_fits(shown)
    assert "0.," not in shown
