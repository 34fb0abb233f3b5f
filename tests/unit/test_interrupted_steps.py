"""An attempt may end at every point of what follows a step; the resumed run is the one that was never interrupted."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gen_worker.contract.job.spec import EarlyStoppingSpec
from gen_worker.errors import TrainingCanceled, TrainStepError
from gen_worker.trainer import (
    Callback,
    MetricsRecord,
    RunHandle,
    StepContext,
    StepResult,
    Trainer,
    TrainerConfig,
)

BATCHES = [[float(n)] * 4 for n in range(4)]
# Epochs of 4 steps; early stopping ends the run at step 10 of 16.
CONFIG: dict[str, Any] = {
    "epochs": 4,
    "metric_every": 2,
    "validate_every": 2,
    "checkpoint_every": 3,
    "sample_every": 4,
    "early_stopping": EarlyStoppingSpec(metric="val/distance", patience=2),
}


class Walk:
    """Its weight walks at random, and each end of an epoch moves it once more (see `Witness`)."""

    def __init__(self, fuse: "Fuse") -> None:
        self._fuse = fuse

    def setup(self, ctx: StepContext) -> None: ...

    def configure(self, ctx: StepContext) -> dict[str, Any]:
        return {"weight": np.zeros(2)}

    def prepare_batch(self, raw_batch: Any, state: dict[str, Any], ctx: StepContext) -> Any:
        return np.asarray(raw_batch)

    def train_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> StepResult:
        state["weight"] += batch.mean() + np.random.standard_normal(2)
        return StepResult(metrics={"loss": Reading(self._fuse, ctx.step + 1, float(state["weight"].sum()))})

    def validate_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> dict[str, float]:
        np.random.standard_normal(3)
        self._fuse.burn("validate_step", ctx.step)
        # Best at step 6: the two validations after it use up the patience.
        return {"distance": abs(ctx.step - 6.0), "weight": float(state["weight"].sum())}

    test_step = validate_step

    def sample(
        self, *, state: dict[str, Any], step: int, request: Any, output_dir: str, ctx: StepContext
    ) -> None:
        self._fuse.burn("sample", step)
        (Path(output_dir) / "weight.txt").write_text(repr(state["weight"].tolist()))

    def state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        return dict(state)

    def load_state_dict(self, state: dict[str, Any], payload: dict[str, Any], ctx: StepContext) -> None:
        state.update(payload)


class Fuse:
    """Counts the points that a run passes; raises at one of them, once."""

    def __init__(self, raise_at: str = "") -> None:
        self.raise_at = raise_at
        self.passed: list[str] = []

    def burn(self, what: str, step: int) -> None:
        point = f"{what}@{step}"
        number = self.passed.count(point)
        self.passed.append(point)
        if f"{point}#{number}" == self.raise_at:
            raise RuntimeError("interrupted here")

    @property
    def points(self) -> list[str]:
        seen: dict[str, int] = {}
        for point in self.passed:
            seen[point] = seen.get(point, -1) + 1
        return [f"{point}#{number}" for point, count in seen.items() for number in range(count + 1)]


class Reading:
    """A number whose reading may fail, as that of a tensor on a broken device does."""

    def __init__(self, fuse: Fuse, step: int, value: float) -> None:
        self._fuse, self._step, self._value = fuse, step, value

    def item(self) -> float:
        self._fuse.burn("read_metric", self._step)
        return self._value


class Witness(Callback):
    """Keeps all that it hears, and changes the weights at the end of an epoch."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def on_epoch_begin(self, run: RunHandle) -> None:
        self.heard.append(["epoch begins", run.state.step, run.state.epoch])

    def on_metrics(self, run: RunHandle, values: Mapping[str, float]) -> None:
        self.heard.append(["metrics", run.state.step, dict(values)])

    def on_validation_end(self, run: RunHandle, record: MetricsRecord) -> None:
        self.heard.append(["validation", record.step, record.epoch, record.rows, dict(record.metrics)])

    def on_epoch_end(self, run: RunHandle) -> None:
        self.heard.append(["epoch ends", run.state.step, run.state.epoch])
        run.model_state["weight"] *= 0.5


class Bomb(Callback):
    """Burns the fuse in every hook; without `in_batches` in none of those of a batch, so that the plain loop runs."""

    def __init__(self, fuse: Fuse, *, in_batches: bool) -> None:
        self._fuse = fuse
        if in_batches:
            self.on_batch_begin = lambda run, _batch: fuse.burn("on_batch_begin", run.state.step)
            self.on_batch_end = lambda run, _batch, _result: fuse.burn("on_batch_end", run.state.step)

    def on_epoch_begin(self, run: RunHandle) -> None:
        self._fuse.burn("on_epoch_begin", run.state.step)

    def on_metrics(self, run: RunHandle, values: Mapping[str, float]) -> None:
        self._fuse.burn("on_metrics", run.state.step)
        if run.state.step == 6 and "train/loss" in values:
            run.save_checkpoint()

    def on_validation_end(self, run: RunHandle, record: MetricsRecord) -> None:
        self._fuse.burn("on_validation_end", run.state.step)

    def on_epoch_end(self, run: RunHandle) -> None:
        self._fuse.burn("on_epoch_end", run.state.step)

    def on_checkpoint(self, run: RunHandle, checkpoint: Any) -> None:
        self._fuse.burn("on_checkpoint", checkpoint.step)


class Swap(Callback):
    """Validates with other weights than those it trains: a run must never be saved in between."""

    def on_validation_begin(self, run: RunHandle) -> None:
        self._kept = run.model_state["weight"]
        run.model_state["weight"] = self._kept + 100.0

    def on_validation_end(self, run: RunHandle, record: MetricsRecord) -> None:
        run.model_state["weight"] = self._kept


class Work:
    """One folder, trained until it is done."""

    def __init__(self, folder: Path, *, in_batches: bool, swaps: bool) -> None:
        self.folder = folder
        self._in_batches, self._swaps = in_batches, swaps
        self.witnesses: list[Witness] = []

    def train(self, fuse: Fuse) -> MetricsRecord:
        self.witnesses = [Witness(), Witness()]
        first, last = self.witnesses
        between = [Bomb(fuse, in_batches=self._in_batches), *([Swap()] if self._swaps else [])]
        trainer = Trainer(
            Walk(fuse),
            TrainerConfig(**CONFIG),
            train_data=BATCHES,
            validation_data=BATCHES[:2],
            test_data=BATCHES[2:],
            callbacks=[first, *between, last],
            folder=self.folder,
        )
        return trainer.train()

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        lines = (self.folder / "metrics" / "events.jsonl").read_text().splitlines()
        return [event for line in lines if (event := json.loads(line))["event"] in kinds]

    def measured(self) -> list[tuple[Any, ...]]:
        found = []
        for event in self.events("metric", "metrics", "validation"):
            values = event.get("values") or {event["name"]: event["value"]}
            found.append((event["event"], event["step"], json.dumps(values)))
        return found

    def outcome(self) -> dict[str, Any]:
        meta = json.loads((self.folder / "checkpoints" / "final.meta.json").read_text())
        last = self.events("completed")[-1]
        return {
            "weights": (self.folder / "checkpoints" / "final.pt").read_bytes(),
            "rng": meta["rng"],
            "cursor": meta["cursor"],
            "metric": meta["metric"],
            "callbacks": meta["loop"]["callbacks"],
            "history": {**meta["loop"]["trainer_state"], "checkpoint": None},
            "heard": [witness.heard for witness in self.witnesses],
            "end": (last["step"], last["reason"]),
            "samples": {
                str(path.relative_to(self.folder)): path.read_text()
                for path in (self.folder / "samples").rglob("*.txt")
            },
        }


class Case:
    def __init__(self, folder: Path, **options: Any) -> None:
        self.options = options
        straight = Work(folder, **options)
        fuse = Fuse()
        straight.train(fuse)
        self.points = fuse.points
        self.outcome, self.measured = straight.outcome(), straight.measured()


STEPS = (0, 4, 10)  # the first; one at which all is due; the last
CASES: dict[str, dict[str, bool]] = {
    "plain": {"in_batches": False, "swaps": False},
    "batch hooks": {"in_batches": True, "swaps": False},
    "swapped weights": {"in_batches": False, "swaps": True},
}
# What the first case has not shown already.
HOOKS = {
    "plain": ("",),
    "batch hooks": ("on_batch_begin", "on_batch_end"),
    "swapped weights": ("on_validation_end", "validate_step"),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    found = Case(tmp_path_factory.mktemp("straight"), **CASES[request.param])
    found.points = [
        point
        for point in found.points
        if point.startswith(HOOKS[request.param]) and int(point.partition("@")[2].partition("#")[0]) in STEPS
    ]
    return found


def is_repeated(point: str, options: Mapping[str, bool]) -> bool:
    """Where the state is not sound, the run begins again at an earlier checkpoint, and measures some steps twice."""
    what = point.partition("@")[0]
    in_authors_hands = {"read_metric", "validate_step", "sample", "on_batch_begin", "on_batch_end"}
    return what in in_authors_hands or (options["swaps"] and what == "on_validation_end")


def test_a_run_that_raises_at_any_point_resumes_to_the_same_end(case: Case, tmp_path: Path) -> None:
    assert case.outcome["end"][0] == 10, "early stopping ends it"
    assert len(case.points) > 3
    for number, point in enumerate(case.points):
        work = Work(tmp_path / str(number), **case.options)
        with pytest.raises((TrainStepError, RuntimeError), match="interrupted here"):
            work.train(Fuse(point))
        last = work.events("failed")[-1]
        assert "interrupted here" in last["error"], point
        work.train(Fuse())
        assert work.outcome() == case.outcome, point
        if is_repeated(point, case.options):
            assert dict.fromkeys(sorted(work.measured())) == dict.fromkeys(sorted(case.measured)), point
        else:
            assert work.measured() == case.measured, point


@pytest.mark.parametrize("place", ["checkpoint.data_written", "checkpoint.meta_renamed"])
@pytest.mark.parametrize("number", [2, 3, 4, 5])
def test_a_killed_checkpoint_writer_costs_a_step_nothing(
    place: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of every save, the final one too; the loop learns of it some steps later, or at once."""
    straight = Case(tmp_path / "straight", in_batches=False, swaps=False)
    work = Work(tmp_path / "work", in_batches=False, swaps=False)
    monkeypatch.setenv("GEN_WORKER_FAILPOINTS", f"{place}=kill@{number}")
    with pytest.raises(TrainStepError, match="the checkpoint writer was killed by SIGKILL"):
        work.train(Fuse())
    monkeypatch.delenv("GEN_WORKER_FAILPOINTS")
    failed = work.events("failed")[-1]
    saved = [int(path.name[5:13]) for path in (work.folder / "checkpoints").glob("step-*.meta.json")]
    assert max(saved) == failed["step"], "the last step is saved on the way out by another writer"
    work.train(Fuse())
    assert work.outcome() == straight.outcome
    assert work.measured() == straight.measured


def test_a_stop_during_a_validation_with_other_weights_waits_for_its_end(tmp_path: Path) -> None:
    class Stops(Callback):
        def on_validation_begin(self, run: RunHandle) -> None:
            run.ctx.is_canceled.request("cancelled: enough for today")

    fuse = Fuse()
    trainer = Trainer(
        Walk(fuse),
        TrainerConfig(epochs=1, validate_every=2, checkpoint_every=0),
        train_data=BATCHES,
        validation_data=BATCHES,
        callbacks=[Swap(), Stops()],
        folder=tmp_path,
    )
    with pytest.raises(TrainingCanceled):
        trainer.train()
    assert fuse.passed.count("validate_step@2") == len(BATCHES)
    again = Trainer(
        Walk(Fuse()),
        TrainerConfig(max_steps=2, checkpoint_every=0),
        train_data=BATCHES,
        folder=tmp_path,
    )
    again.train()
    assert abs(again.model_state["weight"]).max() < 50, "saved with the weights it trains"
