"""Stop requests, heartbeats and the one terminal event, with a clock of our own."""

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.errors import Category, TrainingCanceled, TrainingTimeout
from gen_worker.trainer.author.author_state import _bind_optimizer
from gen_worker.trainer.contracts import Progress, StepContext, StopSignal
from gen_worker.trainer.job_lifecycle import ONE_KEYPRESS_S, JobLifecycle, raise_stop
from gen_worker.trainer.reporting import TrainingReporter


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Stubborn:
    """An author's object that is interrupted while the loop asks it something."""

    @property
    def optimizer(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)


class Bench:
    """A lifecycle whose watcher is driven by hand."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.clock = Clock()
        self.stop = StopSignal()
        self.progress = Progress()
        self.exits: list[int] = []
        self.path = folder / "events.jsonl"
        self.reporter = TrainingReporter(self.path, run_id="r")
        self.lifecycle = JobLifecycle(
            reporter=self.reporter,
            stop=self.stop,
            progress=self.progress,
            **{"heartbeat_s": 5.0, "grace_s": 10.0, **options},
            clock=self.clock,
            exit_process=self.exits.append,
        )

    def after(self, seconds: float) -> None:
        self.clock.now += seconds
        self.lifecycle.look()

    def events(self) -> list[dict[str, Any]]:
        self.reporter.flush()
        return [json.loads(line) for line in self.path.read_text().splitlines()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def test_it_beats_while_a_step_is_in_progress(folder: Path) -> None:
    bench = Bench(folder)
    bench.progress.step = 7
    for _ in range(20):
        bench.after(1.0)
    beats = [event for event in bench.events() if event["event"] == "heartbeat"]
    assert len(beats) == 4
    assert beats[0]["step"] == 7


def test_the_watcher_thread_beats_without_the_main_thread(folder: Path) -> None:
    beaten = threading.Event()
    bench = Bench(folder, heartbeat_s=0.01)
    bench.reporter.heartbeat = lambda *_: beaten.set()  # type: ignore[method-assign]
    bench.lifecycle._clock = __import__("time").monotonic
    bench.lifecycle._next_beat = 0.0
    with bench.lifecycle:
        beaten.clear()
        assert beaten.wait(60)


def test_the_cancel_file_stops_the_run(folder: Path) -> None:
    bench = Bench(folder, cancel_file=folder / "cancel")
    bench.after(1)
    assert not bench.stop
    (folder / "cancel").touch()
    bench.after(1)
    assert bench.stop.category == "cancelled"
    with pytest.raises(TrainingCanceled, match="cancel"):
        raise_stop(bench.stop)


def test_the_time_limit_stops_the_run_as_a_timeout(folder: Path) -> None:
    bench = Bench(folder, time_limit_s=30.0)
    bench.after(29)
    assert not bench.stop
    bench.after(1)
    with pytest.raises(TrainingTimeout, match="30 s"):
        raise_stop(bench.stop)


def test_the_first_reason_to_stop_stays(folder: Path) -> None:
    bench = Bench(folder, time_limit_s=30.0)
    bench.stop.request("cancelled by SIGTERM")
    bench.after(40)
    assert bench.stop.reason == "cancelled by SIGTERM"
    assert bench.stop.category == "cancelled"


def test_a_step_that_outlasts_the_grace_is_reported_and_left_with_the_resumable_code(folder: Path) -> None:
    bench = Bench(folder)
    bench.stop.request("cancelled by SIGTERM")
    bench.after(0)
    bench.after(9.9)
    assert bench.exits == []
    bench.after(0.2)
    assert bench.exits == [75]
    (failed,) = [event for event in bench.events() if event["event"] == "failed"]
    assert failed["category"] == "cancelled"
    assert "grace of 10 s" in failed["error"]
    assert not bench.reporter.completed(step=0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_the_loop_to_stop_and_interrupts_nothing(folder: Path, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    bench = Bench(folder)
    with bench.lifecycle:
        os.kill(os.getpid(), number)
        assert bench.stop.reason == f"cancelled by {number.name}"
    assert signal.getsignal(number) == before


def test_a_second_ctrl_c_stops_at_once(folder: Path) -> None:
    """In the author's code it breaks off; in the middle of our own, where it could harm, it does not."""
    bench = Bench(folder)
    with bench.lifecycle:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        bench.clock.now += ONE_KEYPRESS_S
        with pytest.raises(TrainingCanceled, match="second time"):
            _bind_optimizer(StepContext(job=TrainingJobSpec(run_id="r")), Stubborn())


def test_one_ctrl_c_that_arrives_twice_is_one(folder: Path) -> None:
    bench = Bench(folder)
    with bench.lifecycle:
        os.kill(os.getpid(), signal.SIGINT)
        _bind_optimizer(StepContext(job=TrainingJobSpec(run_id="r")), Stubborn())
        assert bench.stop.reason == "cancelled by SIGINT"


def test_a_second_sigterm_changes_nothing(folder: Path) -> None:
    bench = Bench(folder)
    with bench.lifecycle:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert bench.stop.reason == "cancelled by SIGTERM"


def test_only_one_way_out_is_written(folder: Path) -> None:
    bench = Bench(folder)
    assert bench.reporter.failed(step=0, error="boom", category=Category.TRAIN_STEP)
    assert not bench.reporter.failed(step=0, error="late", category=Category.CANCELLED)
    assert not bench.reporter.completed(step=0)
    assert [event["event"] for event in bench.events()] == ["failed"]
