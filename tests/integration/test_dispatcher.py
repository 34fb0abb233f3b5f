"""The dispatcher and its supervisors: every way out frees the slots once, no restart loses or doubles a run."""

import asyncio
import contextlib
import errno
import random
import shutil
import signal
import sqlite3
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from dispatcher_world import World, in_world

from gen_worker.contract.redaction import Secret
from gen_worker.trainer.artifacts import ArtifactWriter, CheckpointContent
from trn.core.causes import Cause
from trn.core.errors import UnavailableError
from trn.core.runs import Needs, RunState
from trn.daemon.api.secret_values import SecretValues
from trn.daemon.dispatch.dispatcher import TrainerDispatcher
from trn.daemon.upkeep import retries
from trn.executors.base import AttemptKey, LaunchPlan, LaunchUnknownError, WorkerExit
from trn.executors.fake import FakeExecutor, Script, read_events
from trn.registry.base import Ending, NewRun

LASTING = Script(lasts=True)
RETRIES = {"max_attempts": 3, "backoff_s": 0}


def failing(category: str = "train-step", error: str = "boom", *, code: int = 14, step: int = 1) -> Script:
    return Script(event="failed", category=category, error=error, step=step, exit=WorkerExit(exit_code=code))


def killed(number: int, **fields: Any) -> Script:
    return Script(event="", exit=WorkerExit(exit_code=-number, **fields))


def terminals(world: World, run_id: str) -> list[tuple[int, str]]:
    events = read_events(world.home.run(run_id).events)
    assert [item["seq"] for item in events] == list(range(1, len(events) + 1))
    return [(item["attempt"], item["event"]) for item in events if item["event"] in ("completed", "failed")]


def note_points(world: World) -> list[str]:
    """The calls of the executor from now on."""
    points: list[str] = []

    async def at(point: str, _key: AttemptKey) -> None:
        points.append(point)

    world.executor.at = at
    return points


def test_a_submitted_run_is_placed_launched_followed_and_completed(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        async with world.daemon():
            world.submit("one", resources={"gpus": 2})
            [run] = await world.until_ended("one")
        assert (run.state, run.reason, run.step) == (RunState.COMPLETED, "completed at step 1", 1)
        [attempt] = world.registry.attempts("one")
        assert (attempt.devices, attempt.exit_code) == (("cuda:0", "cuda:1"), 0)
        assert world.executor.processes[world.key("one", 1)].plan.env["CUDA_VISIBLE_DEVICES"] == "0,1"
        assert world.ingest is not None
        with pytest.raises(KeyError):  # its events are let go of
            world.ingest.last_growth("one")
        world.check_nothing_is_held()

    in_world(tmp_path, story)


def test_secrets_reach_every_attempt_and_a_daemon_that_lost_them_says_how_to_go_on(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        values = {"HF_TOKEN": Secret("hunter2")}
        async with world.daemon():
            world.submit("one", secret_env=values, retry=RETRIES)
            [run] = await world.until_ended("one")
            assert run.state is RunState.FAILED
        assert [world.executor.secrets[world.key("one", number)] for number in (1, 2)] == [
            {"HF_TOKEN": "hunter2"}
        ] * 2

        world.submit(
            "two", secret_env=values, retry={"max_attempts": 1}
        )  # no daemon runs: it waits for the next
        world.secrets = SecretValues({})
        async with world.daemon():
            [run] = await world.until_ended("two")
        assert run.state is RunState.FAILED
        assert "were lost when the daemon stopped: HF_TOKEN" in run.reason
        assert run.cause.values["names"] == ["HF_TOKEN"]
        assert world.key("two", 1) not in world.executor.processes, "it is not started without them"

        world.submit("three", secret_env=values, retry={"max_attempts": 1})
        world.secrets = SecretValues({"HF_TOKEN": "of the daemon"})
        async with world.daemon():
            await world.until_ended("three")
        assert world.executor.secrets[world.key("three", 1)] == {"HF_TOKEN": "of the daemon"}
        world.check_nothing_is_held()

    in_world(tmp_path, story, executor=FakeExecutor(behave=lambda _plan: killed(signal.SIGKILL)))


WAYS_OUT: dict[str, tuple[Script, RunState, str]] = {
    "completed": (Script(), RunState.COMPLETED, "completed at step 1"),
    "completed, then crashed": (
        Script(exit=WorkerExit(exit_code=-11)),
        RunState.COMPLETED,
        "the process was then killed by SIGSEGV",
    ),
    "failed": (failing(), RunState.FAILED, "training failed at step 1: boom"),
    "input": (failing("input", code=11), RunState.FAILED, "invalid input: boom"),
    "killed": (killed(signal.SIGKILL), RunState.FAILED, "killed by SIGKILL"),
    "crashed": (killed(signal.SIGSEGV), RunState.FAILED, "invalid memory access"),
    "out of memory": (killed(9, is_out_of_memory=True), RunState.FAILED, "out of memory"),
    "nobody knows": (Script(event="", exit=WorkerExit()), RunState.FAILED, "exit status unknown"),
    "without a word": (
        Script(event="", exit=WorkerExit(exit_code=0)),
        RunState.FAILED,
        "exited without a terminal event",
    ),
    "silent from the start": (
        Script(event="", is_silent=True, exit=WorkerExit(exit_code=1)),
        RunState.FAILED,
        "exit code 1 (bug)",
    ),
}


@pytest.mark.parametrize("way", WAYS_OUT)
def test_every_way_out_frees_the_slots_and_leaves_one_terminal_event(way: str, tmp_path: Path) -> None:
    script, state, words = WAYS_OUT[way]

    async def story(world: World) -> None:
        async with world.daemon():
            world.submit("one", resources={"gpus": 1}, retry={"max_attempts": 0})
            [run] = await world.until_ended("one")
        assert run.state is state
        assert words in run.reason
        assert terminals(world, "one") == [(1, "completed" if state is RunState.COMPLETED else "failed")]
        assert run.last_seq == len(read_events(world.home.run("one").events))  # all of it was taken in
        assert world.executor.processes[world.key("one", 1)].num_ends >= 1  # whatever it left was ended
        world.check_nothing_is_held()

    in_world(tmp_path, story, executor=FakeExecutor(behave=lambda _plan: script))


class ReluctantExecutor(FakeExecutor):
    """Cannot write an attempt's end at first: the disk is full, or its launcher was just killed."""

    num_refusals = 6

    async def close_attempt(self, plan: LaunchPlan, *, category: str, error: str, cause: Cause) -> bool:
        if self.num_refusals:
            self.num_refusals -= 1
            return False
        return await super().close_attempt(plan, category=category, error=error, cause=cause)


def test_a_terminal_event_that_cannot_be_written_at_first_is_written_later(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        async with world.daemon():
            world.submit("one", resources={"gpus": 1}, retry={"max_attempts": 0})
            [run] = await world.until_ended("one")
        assert terminals(world, "one") == [(1, "failed")]
        assert run.last_seq == len(read_events(world.home.run("one").events))
        world.check_nothing_is_held()

    in_world(tmp_path, story, executor=ReluctantExecutor(behave=lambda _plan: killed(signal.SIGKILL)))


def test_a_waiting_run_is_cancelled_at_once_and_never_launched(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        async with world.daemon():
            world.submit("first", resources={"gpus": 2})
            await world.until_state("first", RunState.RUNNING)
            world.submit("second", resources={"gpus": 1})
            await world.until(lambda: world.registry.get("second").reason == "waits for 1 GPU")
            world.cancel("second")
            [second] = await world.until_ended("second")
            assert second.state is RunState.CANCELLED
            world.executor.finish("first")
            await world.until_ended("first")
        assert [key.run_id for key in world.executor.processes] == ["first"]
        world.check_nothing_is_held()

    in_world(tmp_path, story, executor=FakeExecutor(behave=lambda _plan: LASTING))


def test_a_run_that_is_cancelled_while_it_is_launched_ends(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        is_asked, may_go_on = asyncio.Event(), asyncio.Event()

        async def at(point: str, _key: AttemptKey) -> None:
            if point == "launch.asked":
                is_asked.set()
                await may_go_on.wait()

        world.executor.at = at
        async with world.daemon():
            world.submit("one")
            await is_asked.wait()
            assert world.registry.get("one").state is RunState.DISPATCHING
            world.cancel("one")
            may_go_on.set()
            [run] = await world.until_ended("one")
        assert (run.state, run.reason) == (RunState.CANCELLED, "asked by a test; stopped at step 1")
        world.check_nothing_is_held()

    in_world(tmp_path, story, executor=FakeExecutor(behave=lambda _plan: LASTING))


@pytest.mark.parametrize("is_deaf", [False, True])
def test_a_running_run_is_asked_to_stop_and_killed_if_it_does_not(is_deaf: bool, tmp_path: Path) -> None:
    async def story(world: World) -> None:
        async with world.daemon():
            world.submit("one", resources={"gpus": 1}, retry=RETRIES)
            await world.until_state("one", RunState.RUNNING)
            world.cancel("one")
            [run] = await world.until_ended("one")
        process = world.executor.processes[world.key("one", 1)]
        assert process.num_stops == 1
        assert run.state is RunState.CANCELLED
        assert ("killed at step" in run.reason) == is_deaf
        assert terminals(world, "one") == [(1, "failed")]
        assert read_events(world.home.run("one").events)[-1]["category"] == "cancelled"
        world.check_nothing_is_held()

    in_world(tmp_path, story, executor=FakeExecutor(behave=lambda _plan: Script(lasts=True, is_deaf=is_deaf)))


def test_a_second_cancel_does_not_shorten_the_grace(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        async with world.daemon():
            world.submit("one", grace_s=600)
            await world.until_state("one", RunState.RUNNING)
            process = world.executor.processes[world.key("one", 1)]
            world.cancel("one")
            await world.until(lambda: process.num_stops == 1)
            for _ in range(3):
                world.cancel("one")
                await asyncio.sleep(0)
            assert not process.ended.is_set()
            world.executor.finish("one", failing("cancelled", code=75))
            [run] = await world.until_ended("one")
        assert run.state is RunState.CANCELLED
        assert "killed at step" not in run.reason

    in_world(tmp_path, story, executor=FakeExecutor(behave=lambda _plan: Script(lasts=True, is_deaf=True)))


def test_a_cancel_that_comes_after_the_work_was_done_changes_nothing(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        is_ended, may_go_on = asyncio.Event(), asyncio.Event()

        async def at(point: str, _key: AttemptKey) -> None:
            if point == "end.asked":
                is_ended.set()
                await may_go_on.wait()

        world.executor.at = at
        async with world.daemon():
            world.submit("one")
            await is_ended.wait()
            world.cancel("one")
            may_go_on.set()
            [run] = await world.until_ended("one")
        assert run.state is RunState.COMPLETED

    in_world(tmp_path, story)


def test_failures_are_retried_after_their_backoff_and_no_more_often_than_asked(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        async with world.daemon() as dispatcher:
            world.submit("one", retry={"backoff_s": 100})
            for number, most_s in ((1, 110), (2, 220)):
                await world.until(lambda n=number: world.registry.get("one").attempt == n)
                run = await world.until_state("one", RunState.PENDING)
                assert f"(attempt {number + 1}; {number} of 3 without a newer checkpoint)" in run.reason
                wait_ms = run.not_before_ms - world.clock.ms
                assert 0 < wait_ms <= most_s * 1000
                world.clock.ms += wait_ms - 1
                dispatcher.wake()
                world.submit(f"probe-{number}")  # ends before the backoff does: the dispatcher has looked
                await world.until_ended(f"probe-{number}")
                assert world.registry.get("one").attempt == number
                world.clock.ms += 1
                dispatcher.wake()
            [run] = await world.until_ended("one")
        assert (run.state, run.attempt) == (RunState.FAILED, 3)
        assert "3 attempts without a newer checkpoint" in run.reason
        assert terminals(world, "one") == [(1, "failed"), (2, "failed"), (3, "failed")]
        world.check_nothing_is_held()

    def behave(plan: LaunchPlan) -> Script:
        return killed(signal.SIGKILL) if plan.run_id == "one" else Script()

    in_world(tmp_path, story, executor=FakeExecutor(behave=behave))


def test_attempts_that_save_further_steps_follow_at_once_however_many_they_are(tmp_path: Path) -> None:
    """The clock stands still: whoever waited for a backoff would wait for ever."""

    saved = tmp_path / "saved"

    async def story(world: World) -> None:
        nonce = world.submit("one").nonce
        save_checkpoints(saved, [10 * number for number in range(1, 8)], nonce=nonce)

        async def at(point: str, key: AttemptKey) -> None:
            if point == "end.asked":
                folder = world.home.run("one").checkpoints
                folder.mkdir(exist_ok=True)
                for path in saved.glob(f"step-{10 * key.number:08d}.*"):
                    shutil.copy(path, folder)

        world.executor.at = at
        async with world.daemon():
            [run] = await world.until_ended("one")
        assert (run.state, run.attempt) == (RunState.COMPLETED, 8)
        attempts = world.registry.attempts("one")
        assert [attempt.saved_step for attempt in attempts[:3]] == [10, 20, 30]
        assert {attempt.cause.id for attempt in attempts[:-1]} == {"killed"}
        world.check_nothing_is_held()

    def behave(plan: LaunchPlan) -> Script:
        return Script() if plan.number == 8 else killed(signal.SIGKILL)

    in_world(tmp_path, story, executor=FakeExecutor(behave=behave))


def save_checkpoints(folder: Path, steps: list[int], *, nonce: str) -> None:
    with ArtifactWriter(
        folder, folder / "samples", run_id="one", attempt=1, nonce=nonce, keep_last=0
    ) as writer:
        for step in steps:
            writer.save_checkpoint(
                CheckpointContent(
                    step=step,
                    final=False,
                    epoch=0,
                    state={"w": step},
                    loop={},
                    cursor=None,
                    rng={},
                    identity={},
                )
            )
        writer.wait(60)


def test_a_silent_worker_is_ended_and_tried_again(tmp_path: Path) -> None:
    def behave(plan: LaunchPlan) -> Script:
        return Script(lasts=plan.number == 1, is_deaf=True)

    async def story(world: World) -> None:
        async with world.daemon():
            world.submit("one", retry=RETRIES, heartbeat_s=0.01, resources={"gpus": 2})
            [run] = await world.until_ended("one")
        assert (run.state, run.attempt) == (RunState.COMPLETED, 2)
        assert "no heartbeat" in world.registry.attempts("one")[0].reason
        assert terminals(world, "one") == [(1, "failed"), (2, "completed")]
        world.check_nothing_is_held()

    in_world(
        tmp_path,
        story,
        executor=FakeExecutor(behave=behave),
        settings={"heartbeat_timeout_s": 0.5, "min_heartbeats_missed": 1},
    )


def test_a_daemon_that_slept_itself_does_not_take_its_workers_for_dead(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        async with world.daemon():
            world.submit("one")
            await world.until_state("one", RunState.RUNNING)
            points = note_points(world)
            await world.until(lambda: points.count("wait.asked") >= 3)  # it has seen the worker speak
            for _ in range(3):
                world.slept_s += 1000
                num_looks = points.count("wait.asked")
                await world.until(lambda n=num_looks: points.count("wait.asked") >= n + 4)
            assert "stop" not in points
            world.executor.finish("one")
            [run] = await world.until_ended("one")
        assert (run.state, run.attempt) == (RunState.COMPLETED, 1)

    in_world(tmp_path, story, executor=FakeExecutor(behave=lambda _plan: LASTING))


def test_a_worker_that_runs_though_its_launch_seemed_to_fail_is_judged_by_its_own_end(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        async def at(point: str, _key: AttemptKey) -> None:
            if point == "launch.done":
                raise UnavailableError("it does not run, or so it seems")

        world.executor.at = at
        async with world.daemon():
            world.submit("one")
            [run] = await world.until_ended("one")
        assert (run.state, run.attempt) == (RunState.FAILED, 1)
        assert "invalid input" in run.reason
        world.check_nothing_is_held()

    in_world(tmp_path, story, executor=FakeExecutor(behave=lambda _plan: failing("input", code=11)))


def test_a_worker_that_never_says_a_word_is_ended_after_the_start_timeout(tmp_path: Path) -> None:
    script = Script(lasts=True, is_silent=True, event="")

    async def story(world: World) -> None:
        async with world.daemon():
            world.submit("one", retry={"max_attempts": 0})
            [run] = await world.until_ended("one")
        assert run.state is RunState.FAILED
        assert run.cause.id == "start-timeout"
        world.check_nothing_is_held()

    in_world(
        tmp_path, story, executor=FakeExecutor(behave=lambda _plan: script), settings={"start_timeout_s": 0.5}
    )


def test_a_worker_that_overruns_its_time_limit_is_ended_and_not_retried(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        async with world.daemon():
            world.submit("one", time_limit_s=0.1, grace_s=0.01, retry=RETRIES)
            [run] = await world.until_ended("one")
        assert (run.state, run.attempt) == (RunState.FAILED, 1)
        assert "did not stop at its time limit" in run.reason
        assert world.registry.attempts("one")[0].category == "timeout"

    in_world(tmp_path, story, executor=FakeExecutor(behave=lambda _plan: Script(lasts=True, is_deaf=True)))


def test_a_launch_that_fails_is_tried_again_and_one_that_is_unknown_is_looked_for(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        faults: list[Exception] = [UnavailableError("no launcher"), LaunchUnknownError("the reply was lost")]
        points = ["launch.asked", "launch.done"]

        async def at(point: str, _key: AttemptKey) -> None:
            if points and point == points[0]:
                points.pop(0)
                raise faults.pop(0)

        world.executor.at = at
        async with world.daemon():
            world.submit("one", retry={"max_attempts": 1})
            [run] = await world.until_ended("one")
        assert (run.state, run.attempt, run.num_interruptions) == (RunState.COMPLETED, 2, 1)
        assert "could not be launched: no launcher" in world.registry.attempts("one")[0].reason
        assert list(world.executor.processes) == [world.key("one", 2)]
        world.check_nothing_is_held()

    in_world(tmp_path, story)


def test_a_run_whose_snapshot_is_gone_fails_in_words(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        async with world.daemon() as dispatcher:
            record = world.submit("template")
            await world.until_ended("template")
            snapshot = "0" * 64
            config = {**record.config, "run_id": "one"}
            world.registry.submit(NewRun(run_id="one", digest="d", config=config, snapshot=snapshot)).result()
            dispatcher.wake()
            [run] = await world.until_ended("one")
        assert run.state is RunState.FAILED
        assert "no snapshot 0000" in run.reason
        world.check_nothing_is_held()

    in_world(tmp_path, story)


def test_a_device_that_somebody_still_uses_is_set_aside_until_it_is_clean(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.devices.foreign = {"cuda:0": [4711]}
        async with world.daemon():
            world.submit("one", resources={"devices": ["cuda:0"]})
            await world.until_ended("one")
            reasons = {slot["device_id"]: slot["quarantine_reason"] for slot in world.registry.slots()}
            assert "still in use by process 4711" in reasons["cuda:0"]
            world.submit("two", resources={"devices": ["cuda:0"]})
            world.submit("three", resources={"gpus": 1})
            await world.until_ended("three")
            assert world.registry.attempts("three")[0].devices == ("cuda:1",)
            await world.until(lambda: "set aside" in world.registry.get("two").reason)
            assert world.registry.get("two").attempt == 0
            world.devices.foreign = {}
            await world.until_ended("two")
        assert world.registry.attempts("two")[0].devices == ("cuda:0",)
        world.check_nothing_is_held()

    in_world(tmp_path, story)


def test_slots_stay_held_as_long_as_what_holds_them_cannot_be_ended(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        async with world.daemon():
            world.submit("one", resources={"gpus": 2})
            process_of = world.executor.processes
            await world.until(lambda: world.key("one", 1) in process_of)
            process = process_of[world.key("one", 1)]
            await world.until(lambda: process.num_ends >= 2)
            assert world.registry.get("one").state is RunState.RUNNING
            assert {slot["run_id"] for slot in world.registry.slots()} == {"one"}
            assert all("cannot be ended" in slot["quarantine_reason"] for slot in world.registry.slots())
            await world.until_ended("one")
            world.submit("two", resources={"gpus": 2})
            await world.until_ended("two")  # handed out again
        world.check_nothing_is_held()

    def behave(plan: LaunchPlan) -> Script:
        return Script(num_end_faults=4 if plan.run_id == "one" else 0)

    in_world(tmp_path, story, executor=FakeExecutor(behave=behave))


def test_nothing_is_launched_while_the_disk_is_nearly_full(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.free_bytes = 1 << 20
        async with world.daemon():
            world.submit("one")
            await world.until(lambda: "nearly full" in world.registry.get("one").reason)
            world.free_bytes = 1 << 40
            [run] = await world.until_ended("one")
        assert run.state is RunState.COMPLETED

    in_world(tmp_path, story)


def test_a_run_that_this_machine_cannot_hold_any_more_keeps_nothing_from_others(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.submit("large", resources={"gpus": 2})
        world.registry.quarantine("cuda:1", "in use by a stranger").result()
        world.devices.foreign = {"cuda:1": [4711]}
        world.clock.ms += 10**9  # long past any patience
        async with world.daemon() as dispatcher:
            world.submit("small", resources={"gpus": 1})
            await world.until_ended("small")
            assert "devices are missing" in world.registry.get("large").reason
            world.devices.foreign = {}
            world.registry.quarantine("cuda:1", "").result()
            dispatcher.wake()
            await world.until_ended("large")
        world.check_nothing_is_held()

    in_world(tmp_path, story)


def test_a_fault_of_ours_does_not_leave_a_run_behind(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        seen: set[str] = set()

        async def at(point: str, _key: AttemptKey) -> None:
            if point not in seen:
                seen.add(point)
                raise RuntimeError(f"a bug at {point}")

        world.executor.at = at
        async with world.daemon():
            world.submit("one", retry={"max_attempts": 1})
            world.submit("two", retry={"max_attempts": 1})
            await world.until_ended("one", "two")
        assert {"launch.asked", "find.asked", "wait.asked", "end.asked"} <= seen
        assert {world.registry.get(run_id).state for run_id in ("one", "two")} == {RunState.COMPLETED}
        world.check_nothing_is_held()

    in_world(tmp_path, story)


def test_trouble_of_the_daemon_ends_no_worker_however_long_it_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "MAX_PAUSE_S", retries.FIRST_PAUSE_S)

    async def story(world: World) -> None:
        num_faults = 0

        async def at(point: str, _key: AttemptKey) -> None:
            nonlocal num_faults
            if point == "wait.asked" and num_faults < 100:
                num_faults += 1
                raise OSError(errno.EMFILE, "Too many open files")

        async with world.daemon():
            world.submit("one", retry={"max_attempts": 1})
            await world.until_state("one", RunState.RUNNING)
            world.executor.at = at
            await world.until(lambda: num_faults == 100)
            points = note_points(world)
            await world.until(lambda: points.count("wait.asked") >= 3)  # it is watched as before
            (process,) = world.executor.live()
            assert (process.num_stops, process.num_ends) == (0, 0)
            world.executor.finish("one")
            [run] = await world.until_ended("one")
        assert (run.state, run.attempt) == (RunState.COMPLETED, 1)
        world.check_nothing_is_held()

    in_world(tmp_path, story, executor=FakeExecutor(behave=lambda _plan: LASTING))


def test_the_end_of_a_worker_is_seen_though_the_rest_of_its_watch_fails(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        async with world.daemon():
            world.submit("one")
            await world.until_state("one", RunState.RUNNING)
            assert world.ingest is not None
            grown, world.ingest.last_growth = world.ingest.last_growth, broken  # type: ignore[method-assign]
            points = note_points(world)
            await world.until(lambda: points.count("wait.asked") >= 3)
            world.executor.finish("one")
            await world.until(lambda: "end.asked" in points)
            world.ingest.last_growth = grown  # type: ignore[method-assign]
            [run] = await world.until_ended("one")
        assert run.state == RunState.COMPLETED

    def broken(_run_id: str) -> float:
        raise RuntimeError("a bug")

    in_world(tmp_path, story, executor=FakeExecutor(behave=lambda _plan: LASTING))


@pytest.mark.parametrize(
    "fault", [OSError(errno.EMFILE, "Too many open files"), sqlite3.OperationalError("disk I/O error")]
)
def test_trouble_of_the_daemon_fails_no_run_that_has_just_ended(
    tmp_path: Path, fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "MAX_PAUSE_S", retries.FIRST_PAUSE_S)

    async def story(world: World) -> None:
        async with world.daemon():
            ingest = world.ingest
            assert ingest is not None
            read, num_reads = ingest.terminal, 0

            async def terminal(run_id: str, number: int) -> Any:
                nonlocal num_reads
                num_reads += 1
                if num_reads < 10:
                    raise fault
                return await read(run_id, number)

            ingest.terminal = terminal  # type: ignore[method-assign]
            world.submit("one", retry={"max_attempts": 1})
            [run] = await world.until_ended("one")
            assert num_reads >= 10
        assert (run.state, run.attempt) == (RunState.COMPLETED, 1)
        assert terminals(world, "one") == [(1, "completed")]

    in_world(tmp_path, story)


def test_the_end_of_the_daemon_leaves_workers_running_and_the_next_one_adopts_them(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        async with world.daemon():
            world.submit("one", resources={"gpus": 1})
            world.submit("two", resources={"gpus": 1})
            for run_id in ("one", "two"):
                await world.until_state(run_id, RunState.RUNNING)
        assert len(world.executor.live()) == 2
        assert all(process.num_stops == 0 for process in world.executor.live())
        assert world.registry.get("one").state is RunState.RUNNING
        world.executor.finish("one")  # while nobody looks
        world.registry.want_cancel("two", "asked by a test").result()  # just before the daemon died
        written = {run_id: world.home.run(run_id).job.stat() for run_id in ("one", "two")}
        points = note_points(world)
        async with world.daemon():
            one, two = await world.until_ended("one", "two")
        assert "find.asked" not in points, "the registry knows its process"
        assert "launch.asked" not in points
        assert {run_id: world.home.run(run_id).job.stat() for run_id in ("one", "two")} == written
        assert (one.state, two.state) == (RunState.COMPLETED, RunState.CANCELLED)
        assert [run.attempt for run in (one, two)] == [1, 1]
        world.check_nothing_is_held()

    in_world(tmp_path, story, executor=FakeExecutor(behave=lambda _plan: LASTING))


def test_what_a_worker_holds_that_the_registry_does_not_know_is_handed_to_nobody_until_it_ends(
    tmp_path: Path,
) -> None:
    """As after a restored backup: the registry of the first world is gone, its worker lives."""
    executor = FakeExecutor(behave=lambda plan: LASTING if plan.devices == ("cuda:0",) else Script())

    async def before(world: World) -> None:
        async with world.daemon():
            world.submit("same", resources={"gpus": 1, "cpus": 3, "memory_mb": 900})
            await world.until_state("same", RunState.RUNNING)

    async def story(world: World) -> None:
        async with world.daemon():
            assert (world.unknown.held.cpus, world.unknown.held.memory_mb) == (3, 900)
            (warning,) = world.unknown.warnings
            assert "cuda:0, 3 CPUs" in warning
            world.submit("same", resources={"gpus": 0})
            world.submit("both", resources={"gpus": 2})
            world.submit("large", resources={"gpus": 0, "memory_mb": 200})
            world.submit("small", resources={"gpus": 0})
            world.submit("gpu", resources={"gpus": 1})
            await world.until_ended("small", "gpu")
            (process,) = executor.live()
            await world.until(lambda: f"process {process.worker.pid}" in world.registry.get("same").reason)
            for run_id in ("same", "both", "large"):
                assert world.registry.get(run_id).state is RunState.PENDING
            assert executor.processes[world.key("gpu", 1)].plan.devices == ("cuda:1",)
            executor.finish("same")
            await world.until_ended("same", "both", "large")
            assert world.unknown.warnings == []
        assert [attempt.pid for attempt in world.registry.attempts("same")] != [process.worker.pid]
        world.check_nothing_is_held()

    in_world(tmp_path / "before", before, executor=executor)
    in_world(tmp_path / "after", story, executor=executor)


def test_a_worker_is_adopted_by_what_the_registry_knows_though_its_record_is_gone(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        async with world.daemon():
            world.submit("one")
            await world.until_state("one", RunState.RUNNING)

        async def no_record(point: str, key: AttemptKey) -> None:
            assert point != "find.asked", f"{key} would be given up, and started again"

        world.executor.at = no_record
        async with world.daemon():
            await world.until(lambda: world.dispatcher is not None and bool(world.dispatcher._supervisors))
            assert world.unknown.warnings == []
            world.executor.finish("one")
            [run] = await world.until_ended("one")
        assert (run.state, run.attempt) == (RunState.COMPLETED, 1)
        world.check_nothing_is_held()

    in_world(tmp_path, story, executor=FakeExecutor(behave=lambda _plan: LASTING))


FATES = [
    Script(),
    Script(),
    failing(),
    failing("input", code=11),
    killed(9),
    Script(event="", exit=WorkerExit(is_reboot=True)),
    Script(lasts=True),
    Script(lasts=True, is_deaf=True),
    Script(num_end_faults=1),
]
FUSE = 12  # a daemon dies at one of its first so many calls and commits
MAX_DEATHS = 60


def test_a_run_is_not_taken_again_before_its_last_supervisor_is_gone(tmp_path: Path) -> None:
    """Between the commit of an attempt's end and the moment in which its supervisor hears of it, a round may come."""

    async def story(world: World) -> None:
        end, heard = world.registry.end, asyncio.get_running_loop().create_future()

        def end_unheard(run_id: str, number: int, ending: Ending) -> Future[Any]:
            committed, told = end(run_id, number, ending), Future[Any]()
            heard.add_done_callback(lambda _: told.set_result(committed.result()))
            return told if (run_id, number) == ("again", 1) else committed

        world.registry.end = end_unheard  # type: ignore[method-assign]
        async with world.daemon():
            world.submit("again", retry=RETRIES)
            await world.until(lambda: any(attempt.ended_ms for attempt in world.registry.attempts("again")))
            world.submit("other")
            await world.until_ended("other")  # a round has looked at the queue
            assert len(world.registry.attempts("again")) == 1
            heard.set_result(None)
            await world.until_ended("again")
            assert len(world.registry.attempts("again")) == 2
        world.check_nothing_is_held()

    fates = {("again", 1): killed(signal.SIGKILL)}
    behave = lambda plan: fates.get((plan.run_id, plan.number), Script())  # noqa: E731
    in_world(tmp_path, story, executor=FakeExecutor(behave=behave))


@pytest.mark.parametrize("seed", range(12))
def test_restarts_at_any_moment_leave_every_run_ended_and_none_run_twice(seed: int, tmp_path: Path) -> None:
    """The daemon dies at calls of the executor, before and after their effect, and after commits."""
    dice = random.Random(seed)

    def behave(plan: LaunchPlan) -> Script:
        return random.Random(f"{seed}/{plan.key}").choice(FATES)

    async def story(world: World) -> None:
        run_ids = [f"run-{index}" for index in range(10)]
        for run_id in run_ids:
            gpus = dice.choice([0, 1, 2])
            world.submit(run_id, resources={"gpus": gpus}, retry={"max_attempts": 3, "backoff_s": 0})

        def is_done() -> bool:
            return all(world.registry.get(run_id).state.is_terminal for run_id in run_ids)

        num_deaths = 0
        while not is_done():
            fuse = dice.randint(1, FUSE) if num_deaths < MAX_DEATHS else 0
            num_deaths += await live_until_death(world, fuse, is_done)
        # Each of the ten runs makes at least six calls and three commits: no luck is needed to die so often.
        assert num_deaths >= 6
        for run_id in run_ids:
            run = world.registry.get(run_id)
            ends = terminals(world, run_id)
            assert len({number for number, _ in ends}) == len(ends)
            assert ("completed" in {event for _, event in ends}) == (run.state is RunState.COMPLETED), run
            assert all(attempt.ended_ms is not None for attempt in world.registry.attempts(run_id))
        world.check_nothing_is_held()

    in_world(tmp_path, story, executor=FakeExecutor(behave=behave))


async def live_until_death(world: World, fuse: int, is_done: Callable[[], bool]) -> bool:
    """A life of the daemon: until its fuse is burnt (0: it has none), or all is done. True: it died."""
    loop, is_dead, left = asyncio.get_running_loop(), asyncio.Event(), fuse

    def burn() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            is_dead.set()

    async def at(_point: str, _key: AttemptKey) -> None:
        burn()
        if is_dead.is_set():
            await asyncio.Event().wait()  # what is dead says nothing more

    world.executor.at, world.on_commit = at, lambda: loop.call_soon_threadsafe(burn)
    async with world.daemon():
        while not is_dead.is_set() and not is_done():
            for process in world.executor.live():  # somebody wants the lasting ones gone
                world.cancel(process.plan.run_id)
            world.clock.ms += 10_000
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.02):
                    await is_dead.wait()
    world.on_commit = lambda: None
    return is_dead.is_set()


def test_a_burst_shares_its_commits_and_never_oversubscribes(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        run_ids = [f"run-{index}" for index in range(100)]
        for run_id in run_ids:
            world.submit(run_id, resources={"gpus": 0})
        async with world.daemon():
            runs = await world.until_ended(*run_ids)
        assert {run.state for run in runs} == {RunState.COMPLETED}
        world.check_nothing_is_held()

    in_world(tmp_path, story, cpus=8)


def test_a_round_costs_the_same_however_many_runs_wait(tmp_path: Path) -> None:
    """Counted as the steps of SQLite's machine, not as time."""

    async def story(world: World) -> None:
        costs, num_waiting = [], 0
        async with world.daemon():
            world.submit("holder", resources={"gpus": 2, "cpus": 4})
            await world.until_state("holder", RunState.RUNNING)
        for total in (100, 3000):
            futures = [
                world.registry.submit(
                    NewRun(run_id=f"run-{index}", digest=f"d{index}", config={}, needs=Needs(gpus=1))
                )
                for index in range(num_waiting, total)
            ]
            for future in futures:
                future.result()
            num_waiting = total
            async with world.daemon() as dispatcher:
                await world.until(lambda: world.registry.get("run-0").reason == "waits for 1 GPU, 1 CPU")
                await world.until(lambda: _reasons_are_said(world))
            costs.append(await _count_steps(world, dispatcher))
        assert costs[1] <= 2 * costs[0], costs

    in_world(tmp_path, story, executor=FakeExecutor(behave=lambda _plan: LASTING))


def _reasons_are_said(world: World) -> bool:
    assert world.dispatcher is not None
    world.dispatcher.wake()
    return all(run.cause.id == "waits-for-gpu" for run in world.registry.queue(world.clock.ms, 64))


async def _count_steps(world: World, dispatcher: TrainerDispatcher) -> int:
    """What one round, and the wait after it, ask of the registry."""
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    world.registry._read.set_progress_handler(count, 1)
    dispatcher._swept = float("inf")  # the sweep is not what is measured
    async with asyncio.TaskGroup() as group:
        await dispatcher._round(group)
    dispatcher._idle_s()
    world.registry._read.set_progress_handler(None, 0)
    return steps


def test_a_plan_is_told_without_queueing_anything(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        async with world.daemon() as dispatcher:
            config = {"run_id": "dry", "trainer": "a:B"}
            files = dispatcher.plan(NewRun(run_id="dry", digest="d", config=config, needs=Needs(gpus=2)))
            assert files.plan.env["CUDA_VISIBLE_DEVICES"] == "0,1"
            assert not world.home.run("dry").root.exists()
        assert world.registry.counts() == {}

    in_world(tmp_path, story)
