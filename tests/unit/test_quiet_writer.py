"""A checkpoint writer that is stopped or hangs: the run says so, gives it up by a deadline, and saves with another one."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gen_worker.errors import CheckpointError, TrainStepError
from gen_worker.trainer import Callback, RunHandle, StepContext, StepResult, Trainer, TrainerConfig
from gen_worker.trainer.artifacts import POLL_EVERY_S, ArtifactWriter, CheckpointContent
from gen_worker.trainer.checkpoints.writing import client, stall_timer
from gen_worker.trainer.checkpoints.writing.stall_timer import (
    MAX_COUNTED_S,
    StallLimits,
    StallTimer,
    describe_state,
)

DEADLINE_S = 60.0


class Impatient(StallTimer):
    """With a process that is stopped; with one that is only slow it is as patient as ever."""

    give_up_s = 0.2

    def is_over(self, pid: int) -> bool:
        if "stopped" in describe_state(pid):  # not where it waits for a disk
            self._warn_s, self._give_up_s = 0.05, self.give_up_s
        return super().is_over(pid)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "StallTimer", Impatient)
    monkeypatch.setattr(stall_timer, "MAX_SLICE_S", 0.05)


def content(step: int, **state: Any) -> CheckpointContent:
    state = {"w": np.full(10, float(step)), **state}
    return CheckpointContent(
        step=step, final=False, epoch=0, state=state, loop={}, cursor=None, rng={}, identity={}
    )


def open_writer(folder: Path, told: list[str]) -> ArtifactWriter:
    return ArtifactWriter(folder, folder / "samples", run_id="run", tell=told.append)


def stop_writer(writer: ArtifactWriter) -> int:
    writer.save_checkpoint(content(1))
    writer.wait(DEADLINE_S)
    pid = writer._client.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    return pid


def test_a_stopped_writer_is_told_and_given_up_and_the_next_save_has_another(tmp_path: Path) -> None:
    told: list[str] = []
    with open_writer(tmp_path, told) as writer:
        pid = stop_writer(writer)
        writer.save_checkpoint(content(2))
        with pytest.raises(
            CheckpointError, match=r"has not answered for .* killed; that save is lost"
        ) as fault:
            writer.wait()
        assert fault.value.cause == "SIGKILL", (
            "the attempt is tried again, as that of any process that was killed"
        )
        assert len(told) == 1
        assert f"process {pid}, stopped by a signal" in told[0]
        assert not Path(f"/proc/{pid}").exists()
        writer.save_checkpoint(content(3))
        (saved,) = writer.wait(DEADLINE_S)
        assert (saved.step, saved.verified) == (3, True)


def test_a_loop_that_only_polls_gives_it_up_too(tmp_path: Path) -> None:
    told: list[str] = []
    with open_writer(tmp_path, told) as writer:
        stop_writer(writer)
        writer.save_checkpoint(content(2))
        with pytest.raises(CheckpointError, match="has not answered"):
            poll_for_ever(writer)
    assert len(told) == 1


def poll_for_ever(writer: ArtifactWriter) -> None:
    while True:
        writer.poll()


def test_a_writer_that_goes_on_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Impatient, "give_up_s", float("inf"))
    told: list[str] = []
    with open_writer(tmp_path, told) as writer:
        pid = stop_writer(writer)
        writer.save_checkpoint(content(2))
        while not told:
            writer.poll()
        os.kill(pid, signal.SIGCONT)
        (saved,) = writer.wait(DEADLINE_S)
        assert saved.step == 2
    assert told[1].startswith("the checkpoint writer answers again")


def test_a_save_whose_meta_does_not_fit_into_the_socket_is_given_up_too(tmp_path: Path) -> None:
    told: list[str] = []
    with open_writer(tmp_path, told) as writer:
        stop_writer(writer)
        with pytest.raises(CheckpointError, match="has not answered"):
            writer.save_checkpoint(content(2, many=list(range(1_000_000))))
    assert told


def test_the_end_of_a_run_does_not_wait_for_a_stopped_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "CLOSE_S", 0.1)
    with open_writer(tmp_path, []) as writer:
        pid = stop_writer(writer)
    assert not Path(f"/proc/{pid}").exists()


def test_only_time_in_which_the_trainer_itself_ran_is_counted() -> None:
    now, told = 0.0, []
    watch = StallTimer(StallLimits(warn_s=60, give_up_s=600), told.append, clock=lambda: now)
    watch.begin("step-00000001", 0)
    now += 86_400  # both were stopped, or the lid was closed
    assert not watch.is_over(1)
    assert told == []
    for _ in range(int(600 / MAX_COUNTED_S)):
        assert len(told) <= 1
        now += MAX_COUNTED_S
        is_over = watch.is_over(1)
    assert is_over
    assert len(told) == 1


def test_a_writer_that_was_given_up_does_not_answer_again_when_another_begins() -> None:
    told: list[str] = []
    now = [0.0]
    timer = StallTimer(StallLimits(warn_s=1.0, give_up_s=2.0), told.append, lambda: now[0])
    timer.begin("step-00000001", 0)
    now[0] = 3.0
    assert timer.is_over(os.getpid())
    assert len(told) == 1
    timer.begin("step-00000002", 0)
    assert len(told) == 1
    assert not timer.is_over(os.getpid())
    now[0] = 4.5
    assert not timer.is_over(os.getpid())
    timer.reset()
    assert told[2:] == ["the checkpoint writer answers again, after 2 s"]


def test_a_large_save_has_more_time() -> None:
    now, told = 0.0, []
    watch = StallTimer(StallLimits(), told.append, clock=lambda: now)
    watch.begin("final", 100_000_000_000)
    for _ in range(66):
        now += MAX_COUNTED_S
        assert not watch.is_over(1)
    assert told == [], "a disk that writes 50 MB/s is not quiet before 2,060 s"


class Count:
    def setup(self, ctx: StepContext) -> None: ...

    def configure(self, ctx: StepContext) -> dict[str, Any]:
        return {"n": 0.0}

    def prepare_batch(self, raw_batch: Any, state: dict[str, Any], ctx: StepContext) -> Any:
        return raw_batch

    def train_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> StepResult:
        state["n"] += batch
        return StepResult(metrics={"loss": state["n"]})

    def state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        return dict(state)

    def load_state_dict(self, state: dict[str, Any], payload: dict[str, Any], ctx: StepContext) -> None:
        state.update(payload)


class StopsTheWriter(Callback):
    def on_metrics(self, run: RunHandle, values: Any) -> None:
        if run.state.step == 3:
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            (writer,) = (
                pid
                for pid in children
                if b"checkpoints.writing.writer" in Path(f"/proc/{pid}/cmdline").read_bytes()
            )
            os.kill(int(writer), signal.SIGSTOP)


def test_a_run_with_a_stopped_writer_fails_with_words_and_resumes_with_nothing_lost(tmp_path: Path) -> None:
    config = TrainerConfig(max_steps=8, metric_every=1, checkpoint_every=2)
    batches = [1.0, 2.0, 3.0, 4.0]
    with pytest.raises(TrainStepError, match="has not answered"):
        Trainer(Count, config, train_data=batches, callbacks=[StopsTheWriter()], folder=tmp_path).train()
    lines = (tmp_path / "metrics" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert any(event["event"] == "log" and "stopped by a signal" in event["message"] for event in events)
    failed = events[-1]
    assert (failed["event"], failed["cause"]) == ("failed", "killed")
    assert (tmp_path / "checkpoints" / f"step-{failed['step']:08}.meta.json").exists(), "by another writer"
    again = Trainer(Count, config, train_data=batches, folder=tmp_path)
    assert again.train()["train/loss"] == 20.0


def test_a_loop_of_quick_steps_asks_the_writer_once_a_millisecond(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question costs a system call and an exception, and a save of a second lasts ten thousand small steps."""
    with open_writer(tmp_path, []) as writer:
        pid = stop_writer(writer)
        writer.save_checkpoint(content(2))
        asked: list[float | None] = []
        monkeypatch.setattr(writer._client, "receive", lambda timeout_s: asked.append(timeout_s) or [])
        began, polls = time.monotonic(), 0
        while time.monotonic() - began < 0.05:
            assert writer.poll() == []
            polls += 1
        taken_s = time.monotonic() - began
        assert 2 <= len(asked) <= taken_s / POLL_EVERY_S + 2
        assert polls > 3 * len(asked)
        monkeypatch.undo()
        os.kill(pid, signal.SIGCONT)
        (saved,) = writer.wait(DEADLINE_S)
    assert saved.step == 2
