"""Claims about the callbacks that look on: learning rates, throughput, the guard against NaN."""

import copy
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hand_built_run import HandBuiltRun

from gen_worker.errors import StartupError, TrainStepError
from gen_worker.trainer.callbacks import monitors
from gen_worker.trainer.callbacks.callback_list import CallbackList
from gen_worker.trainer.callbacks.monitors import LearningRateMonitor, NonFiniteGuard, ThroughputMonitor
from gen_worker.trainer.callbacks.state_copy import copy_state, nonfinite_names, nonfinite_part

NAN = float("nan")


def test_the_rate_of_every_group_is_reported_once_a_report_under_its_name_or_number() -> None:
    groups = [
        {"lr": 0.1, "name": "head"},
        {"lr": torch.tensor(0.25)},
        {"lr": 3, "name": "x"},
        {"lr": 4, "name": "x"},
    ]
    run = HandBuiltRun([LearningRateMonitor()], optimizer=SimpleNamespace(param_groups=groups)).begin()
    run.emit({"train/loss": 1.0})
    rates = {"lr/head": 0.1, "lr/1": 0.25, "lr/x-2": 3.0, "lr/x-3": 4.0}
    assert run.reports == [{"train/loss": 1.0}, rates]
    run.validate({"val/loss": 2.0})
    run.emit({"throughput/steps_per_s": 1.0})
    assert len(run.reports) == 3


def test_a_run_without_an_optimizer_reports_no_rates() -> None:
    run = HandBuiltRun([LearningRateMonitor()]).begin()
    run.emit({"train/loss": 1.0})
    assert run.reports == [{"train/loss": 1.0}]


def test_the_rates_cost_no_call_per_batch() -> None:
    assert not CallbackList([LearningRateMonitor()]).has_batch_hooks


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(monitors, "perf_counter", lambda: self.now_s)

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def drive(run: HandBuiltRun, clock: Clock, *, wait_s: float, step_s: float, num_steps: int = 1) -> None:
    for _ in range(num_steps):
        clock.pass_s(wait_s)
        run.begin_batch()
        clock.pass_s(step_s)
        run.end_batch()


def throughput(run: HandBuiltRun) -> dict[str, float]:
    run.reports.clear()
    run.emit({"train/loss": 1.0})
    (_, report) = run.reports
    return {name.removeprefix("throughput/"): value for name, value in report.items()}


def test_throughput_counts_steps_samples_and_the_wait_for_data(clock: Clock) -> None:
    run = HandBuiltRun([ThroughputMonitor(report_s=0)], samples_per_step=32).begin()
    drive(run, clock, wait_s=50.0, step_s=1.0)  # what the first batch took is the start's, not the data's
    drive(run, clock, wait_s=3.0, step_s=1.0, num_steps=3)
    assert throughput(run) == {
        "steps_per_s": pytest.approx(4 / 13),
        "samples_per_s": pytest.approx(32 * 4 / 13),
        "data_wait_share": pytest.approx(9 / 13),
        "step_p50_s": 1.0,
        "step_p95_s": 1.0,
        "step_p99_s": 1.0,
    }


def test_throughput_is_not_reported_for_less_than_the_time_asked_for(clock: Clock) -> None:
    run = HandBuiltRun([ThroughputMonitor(report_s=10.0)]).begin()
    drive(run, clock, wait_s=0.0, step_s=1.0, num_steps=9)
    run.emit({"train/loss": 1.0})
    assert run.reports[-1] == {"train/loss": 1.0}
    drive(run, clock, wait_s=0.0, step_s=1.0, num_steps=3)
    assert throughput(run)["steps_per_s"] == pytest.approx(1.0)


def test_every_report_is_about_the_steps_since_the_last_one(clock: Clock) -> None:
    run = HandBuiltRun([ThroughputMonitor(report_s=0)], samples_per_step=2).begin()
    drive(run, clock, wait_s=5.0, step_s=100.0, num_steps=4)
    throughput(run)
    drive(run, clock, wait_s=1.0, step_s=1.0, num_steps=2)
    found = throughput(run)
    assert found["steps_per_s"] == pytest.approx(2 / 4)  # the wait after a report counts again
    assert found["samples_per_s"] == pytest.approx(4 / 4)
    assert found["step_p99_s"] == 1.0
    run.emit({"train/loss": 1.0})
    assert run.reports[-1] == {"train/loss": 1.0}  # no step since: nothing to say


def test_percentiles_are_those_of_the_newest_steps_in_bounded_memory(clock: Clock) -> None:
    monitor = ThroughputMonitor(report_s=0)
    run = HandBuiltRun([monitor]).begin()
    drive(run, clock, wait_s=0.0, step_s=512.0, num_steps=500)
    for number in range(1, 1025):
        drive(run, clock, wait_s=0.0, step_s=number / 64)
    found = throughput(run)
    assert (found["step_p50_s"], found["step_p95_s"], found["step_p99_s"]) == (512 / 64, 973 / 64, 1014 / 64)
    assert found["steps_per_s"] == pytest.approx(1524 / (500 * 512 + 1024 * 1025 / 2 / 64))
    assert "samples_per_s" not in found


def validate(run: HandBuiltRun, pause: Callable[[], None]) -> None:
    run.validate({"val/loss": 1.0}, during=pause)
    pause()  # a save that another callback asked for because of it


def end_epoch(run: HandBuiltRun, pause: Callable[[], None]) -> None:
    run.callbacks.call("on_epoch_end", run.handle)
    pause()


def just_pause(run: HandBuiltRun, pause: Callable[[], None]) -> None:
    pause()


def report_then_pause(run: HandBuiltRun, pause: Callable[[], None]) -> None:
    run.emit({"val/x": 1.0})
    pause()


@pytest.mark.parametrize(
    ("job", "happen"),
    [
        ({}, validate),
        ({}, end_epoch),
        ({"checkpoint_every": 3}, just_pause),
        ({"checkpoint_every": 3}, report_then_pause),
        ({"sample_every": 3}, just_pause),
        ({"checkpoint_every": 2, "sample_every": 3}, just_pause),
    ],
)
def test_validation_saves_and_samples_are_not_taken_for_a_wait_for_data(
    clock: Clock, job: dict[str, int], happen: Callable[[HandBuiltRun, Callable[[], None]], None]
) -> None:
    run = HandBuiltRun([ThroughputMonitor(report_s=0)], **job).begin()
    for _ in range(5):
        drive(run, clock, wait_s=1.0, step_s=1.0)
        if run.step == 3:
            happen(run, lambda: clock.pass_s(1000.0))
    found = throughput(run)
    num_waits = 3 - (1 if job.get("checkpoint_every") == 2 else 0) * 2  # after 2 and 4, besides 3
    assert found["data_wait_share"] == pytest.approx(num_waits / (num_waits + 5))


def test_a_save_that_a_callback_before_it_asks_for_is_not_taken_for_a_wait(clock: Clock) -> None:
    class Saver(monitors.Callback):
        def on_batch_end(self, run: Any, batch: Any, result: Any) -> None:
            run.save_checkpoint()

    run = HandBuiltRun([Saver(), ThroughputMonitor(report_s=0)]).begin()
    for _ in range(3):
        drive(run, clock, wait_s=0.0, step_s=1.0)
        assert run.take_save()
        clock.pass_s(1000.0)
    assert throughput(run)["data_wait_share"] == 0.0


def test_a_checkpoint_keeps_nothing_of_the_monitors(clock: Clock) -> None:
    callbacks = [LearningRateMonitor(), ThroughputMonitor(report_s=0)]
    run = HandBuiltRun(callbacks).begin()
    drive(run, clock, wait_s=1.0, step_s=1.0, num_steps=3)
    assert run.callbacks.state_dict() == {}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (NAN, "nan"),
        (-math.inf, "-inf"),
        (np.float32(NAN), "nan"),
        (torch.tensor(math.inf), "inf"),
        (torch.tensor([1.0, NAN, 2.0]), "non-finite in 1 of 3 places"),
        (np.array([[NAN, math.inf]]), "non-finite in 2 of 2 places"),
    ],
)
def test_the_guard_stops_at_a_loss_that_is_no_number_and_says_where(value: Any, words: str) -> None:
    run = HandBuiltRun([NonFiniteGuard()]).begin()
    run.end_batch(loss=torch.tensor(1.0))
    run.end_batch(loss=2)
    with pytest.raises(TrainStepError, match=f"^loss is {words} at step 3: "):
        run.end_batch(loss=value)


def test_the_guard_finds_the_loss_by_its_other_name_and_other_metrics_by_theirs() -> None:
    run = HandBuiltRun([NonFiniteGuard(metric=["loss", "grad_norm"])]).begin()
    run.end_batch(train_loss=1.0, grad_norm=1.0)
    with pytest.raises(TrainStepError, match="grad_norm is nan"):
        run.end_batch(train_loss=1.0, grad_norm=NAN)
    with pytest.raises(TrainStepError, match="train_loss is nan"):
        run.end_batch(train_loss=NAN, grad_norm=1.0)


def test_the_guard_looks_only_every_so_many_steps() -> None:
    run = HandBuiltRun([NonFiniteGuard(every=3)]).begin()
    run.end_batch(loss=NAN)
    run.end_batch(loss=NAN)
    with pytest.raises(TrainStepError, match="step 3"):
        run.end_batch(loss=NAN)


def test_a_guard_with_nothing_to_look_at_says_so_once() -> None:
    run = HandBuiltRun([NonFiniteGuard()]).begin()
    run.end_batch(error=1.0)
    run.end_batch(error=1.0)
    (warning,) = run.warnings
    assert "'loss'" in warning
    assert "'error'" in warning


@pytest.mark.parametrize("settings", [{"action": "ignore"}, {"every": 0}])
def test_a_guard_that_cannot_work_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(StartupError, match=r"NonFiniteGuard: .* expected"):
        NonFiniteGuard(**settings)


class Line:
    """A trainer class as far as the guard needs one: a line, fitted with Adam, in torch."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)

    def state_dict(self, state: Any) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def step(self, x: float) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = (self.model(torch.tensor([[x]])) - 2 * x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def load(self, payload: dict[str, Any]) -> None:
        self.model.load_state_dict(payload["model"])
        self.optimizer.load_state_dict(payload["optimizer"])

    def snapshot(self) -> dict[str, Any]:
        return copy.deepcopy(self.state_dict(None))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def take_rollback(run: HandBuiltRun) -> tuple[Any, int]:
    asked, run.handle.rollback = run.handle.rollback, None
    assert asked is not None
    return asked


def test_a_skipped_batch_leaves_weights_and_optimizer_as_they_were_however_often_it_happens() -> None:
    line = Line()
    guard = NonFiniteGuard(action="skip")
    run = HandBuiltRun([guard], trainer=line).begin()
    for x in (0.5, 1.0, 1.5):
        run.end_batch(loss=line.step(x))
    before = line.snapshot()
    for number in range(1, 4):  # the optimizer trains in place on what it was given back
        run.end_batch(loss=line.step(NAN))
        payload, step = take_rollback(run)
        assert step == 3
        line.load(payload)
        run.handle.ctx.progress.step = step
        assert same(line.state_dict(None), before)
        assert (guard.num_in_a_row, guard.num_skips) == (number, number)
    run.end_batch(loss=line.step(0.5))
    assert run.handle.rollback is None
    assert (guard.num_in_a_row, guard.num_skips) == (0, 3)
    assert len(run.warnings) == 3
    assert "loss is nan at step 4: restoring step 3 (1 of at most 10" in run.warnings[0]


def test_a_bad_first_batch_goes_back_to_the_beginning() -> None:
    line = Line()
    before = line.snapshot()
    run = HandBuiltRun([NonFiniteGuard(action="skip")], trainer=line, step=7).begin()
    run.end_batch(loss=line.step(NAN))
    payload, step = take_rollback(run)
    assert step == 7
    assert same(payload, before)


def test_a_state_that_went_bad_behind_a_good_loss_is_not_what_the_guard_goes_back_to() -> None:
    line = Line()
    run = HandBuiltRun([NonFiniteGuard(action="skip")], trainer=line).begin()
    run.end_batch(loss=line.step(1.0))
    before = line.snapshot()
    line.step(NAN)
    run.end_batch(loss=0.5)
    payload, step = take_rollback(run)
    assert step == 1
    assert same(payload, before)
    assert "model.weight of the state is not finite" in run.warnings[0]


def test_infinities_that_were_there_from_the_beginning_are_meant() -> None:
    state = {"mask": torch.tensor([0.0, -math.inf]), "table": np.array([math.inf]), "weight": torch.ones(2)}
    trainer = SimpleNamespace(state_dict=lambda _: state)
    run = HandBuiltRun([NonFiniteGuard(action="skip")], trainer=trainer).begin()
    run.end_batch(loss=1.0)
    assert run.handle.rollback is None
    state["weight"][0] = NAN
    run.end_batch(loss=1.0)
    assert "weight of the state" in run.warnings[0]


def test_the_guard_rolls_back_to_the_newest_checkpoint() -> None:
    run = HandBuiltRun([NonFiniteGuard(action="rollback")]).begin()
    run.end_batch(loss=NAN)
    assert take_rollback(run) == (None, 0)
    assert "restoring the newest checkpoint" in run.warnings[0]


def test_the_guard_gives_up_where_going_back_never_gets_past_the_bad_step() -> None:
    guard = NonFiniteGuard(action="rollback", max_skips=2)
    run = HandBuiltRun([guard], step=8).begin()
    for bad_step in (10, 9):
        while run.step < bad_step - 1:
            run.end_batch(loss=1.0)  # good steps on the way there are no success
        run.end_batch(loss=NAN)
        take_rollback(run)
        run.handle.ctx.progress.step = 5
    with pytest.raises(TrainStepError, match=r"Restoring 2 times \(max_skips\) did not get past step 10"):
        run.end_batch(loss=NAN)


def test_getting_past_the_bad_step_starts_the_count_anew() -> None:
    guard = NonFiniteGuard(action="rollback", max_skips=1)
    run = HandBuiltRun([guard]).begin()
    for _ in range(4):
        run.end_batch(loss=NAN)
        bad_step = run.step
        take_rollback(run)
        run.handle.ctx.progress.step -= 1
        while run.step < bad_step:
            run.end_batch(loss=1.0)
    assert (guard.num_in_a_row, guard.num_skips) == (0, 4)


def test_the_guards_counts_survive_a_resume() -> None:
    run = HandBuiltRun([NonFiniteGuard(action="rollback", max_skips=1)], step=4).begin()
    run.end_batch(loss=NAN)
    saved = run.callbacks.state_dict()
    assert saved == {"NonFiniteGuard": {"num_skips": 1, "num_in_a_row": 1, "bad_step": 5}}
    again = HandBuiltRun([NonFiniteGuard(action="rollback", max_skips=1)], step=4)
    again.callbacks.load_state_dict(saved)
    with pytest.raises(TrainStepError, match="did not get past step 5"):
        again.begin().end_batch(loss=NAN)


def test_all_processes_go_back_where_one_of_them_found_something() -> None:
    flags: list[bool] = []

    def is_any_process(flag: bool) -> bool:
        flags.append(flag)
        return True

    guard = NonFiniteGuard(action="rollback")
    run = HandBuiltRun([guard], rank=1, world_size=2, is_any_process=is_any_process).begin()
    run.end_batch(loss=1.0)
    assert flags == [False]
    assert take_rollback(run) == (None, 0)
    run.end_batch(loss=NAN)
    assert flags == [False, True]


def test_a_copy_shares_nothing_and_is_written_into_again() -> None:
    state = {
        "w": torch.ones(3, requires_grad=True),
        "a": np.ones(2),
        "list": [torch.zeros(1), {"n": [1]}],
        "pair": (1, torch.ones(1)),
        "object": np.array([[1], "x"], dtype=object),
    }
    first = copy_state(state)
    with torch.no_grad():
        state["w"] += 1
    state["a"] += 1
    state["list"][1]["n"].append(2)
    state["object"][0].append(2)
    assert first["w"].tolist() == [1, 1, 1]
    assert not first["w"].requires_grad
    assert first["a"].tolist() == [1, 1]
    assert first["list"][1] == {"n": [1]}
    assert first["object"][0] == [1]
    second = copy_state(state, first)
    assert second["w"].tolist() == [2, 2, 2]
    assert second["w"].data_ptr() == first["w"].data_ptr()
    assert second["a"] is first["a"]
    third = copy_state({**state, "w": torch.ones(4), "a": np.ones(5)}, second)
    assert third["w"].shape == (4,)
    assert third["a"].shape == (5,)
    assert isinstance(third["pair"], tuple)


def test_what_is_not_finite_is_found_by_name_in_any_dtype() -> None:
    state = {
        "half": torch.tensor([math.inf], dtype=torch.bfloat16),
        "eight": torch.tensor([NAN]).to(torch.float8_e4m3fn),
        "ints": torch.tensor([1]),
        "good": [np.ones(1), torch.ones(1)],
        "nested": {0: {"exp_avg": np.array([NAN])}},
        "best": math.inf,
    }
    assert sorted(nonfinite_names(state)) == ["eight", "half", "nested.0.exp_avg"]
    assert nonfinite_part(torch.ones(2)) is None
    assert nonfinite_part(np.int64(3)) is None


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from hand_built_run import HandBuiltRun
import numpy as np
from gen_worker.trainer.callbacks.loggers import JsonlLogger
from gen_worker.trainer.callbacks.model_checkpoint import ModelCheckpoint
from gen_worker.trainer.callbacks.monitors import LearningRateMonitor, NonFiniteGuard, ThroughputMonitor
from gen_worker.trainer.callbacks.progress_bar import ProgressBar
class Trainer:
    def state_dict(self, state):
        return state
state = {"w": np.ones(2)}
callbacks = [LearningRateMonitor(), NonFiniteGuard("skip"), ModelCheckpoint(), ProgressBar(), JsonlLogger(), ThroughputMonitor(report_s=0)]
run = HandBuiltRun(callbacks, Path(sys.argv[2]), trainer=Trainer(), model_state=state).begin()
run.begin_batch()
run.end_batch(loss=np.float32(1.0))
run.emit({"train/loss": 1.0})
run.validate({"val/loss": 1.0})
run.begin_batch()
state["w"] += 1
run.end_batch(loss=np.float32("nan"))
payload, step = run.handle.rollback
assert (payload["w"].tolist(), step) == ([1.0, 1.0], 1)
run.end()
"""


def test_every_callback_works_where_torch_is_not_installed(tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT_TORCH, here, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
