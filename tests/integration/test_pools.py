"""Runs of several pools in one dispatcher: each is started, found, stopped and read through its own pool's executor."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from dispatcher_world import World, in_world

from trn.core.causes import Cause
from trn.core.runs import LOCAL_POOL, RunState
from trn.daemon.api.broadcaster import RunEventBroadcaster
from trn.daemon.api.run_streams import RunStreams, StreamNote
from trn.daemon.dispatch.dispatcher import WINDOW
from trn.daemon.outlets.outbox import Outbox, Place
from trn.executors.base import NO_SECRETS, LaunchPlan, Worker
from trn.executors.fake import FakeExecutor, Script

LASTING = Script(lasts=True)
LAB = {"pool": "lab"}


@dataclass
class FarExecutor(FakeExecutor):
    """Its workers write into a folder that is not the home's: what reads there went through it."""

    root: Path = Path("/nonexistent")

    async def launch(self, plan: LaunchPlan, secret_env: Mapping[str, str] = NO_SECRETS) -> Worker:
        return await super().launch(self._elsewhere(plan), secret_env)

    async def close_attempt(self, plan: LaunchPlan, *, category: str, error: str, cause: Cause) -> bool:
        return await super().close_attempt(self._elsewhere(plan), category=category, error=error, cause=cause)

    def _elsewhere(self, plan: LaunchPlan) -> LaunchPlan:
        folder = self.root / plan.run_id
        return msgspec.structs.replace(
            plan, events_path=str(folder / "events.jsonl"), log_path=str(folder / "worker.log")
        )


def far(tmp_path: Path, script: Script = LASTING) -> FarExecutor:
    return FarExecutor(behave=lambda _plan: script, root=tmp_path / "far")


def run_ids(executor: FakeExecutor) -> list[str]:
    return [process.plan.run_id for process in executor.live()]


def test_runs_go_to_the_executor_of_their_pool_and_hold_nothing_of_this_machine_in_another(
    tmp_path: Path,
) -> None:
    lab = far(tmp_path)

    async def story(world: World) -> None:
        async with world.daemon() as dispatcher:
            world.submit("here", resources={"gpus": 2, "cpus": 4, "memory_mb": 1000})
            await world.until_state("here", RunState.RUNNING)
            wanted = {**LAB, "gpus": 8, "cpus": 64, "memory_mb": 1 << 20}  # more than this machine has
            world.submit("there", resources=wanted, hyperparams={"a": 1})
            world.submit("waits", resources={"gpus": 0})
            run = await world.until_state("there", RunState.RUNNING)
            assert (run.devices, run.needs.pool) == ((), "lab")
            assert (run_ids(world.executor), run_ids(lab)) == (["here"], ["there"])
            assert world.registry.held() == (4, 1000), "of the local run alone"
            assert {slot["run_id"] for slot in world.registry.slots()} == {"here"}
            await world.until(lambda: "waits for 1 CPU" in world.registry.get("waits").reason)

            plan = lab.processes[world.key("there", 1)].plan
            assert (plan.gpus, plan.cpus, plan.memory_mb, plan.devices) == (8, 64, 1 << 20, ())
            assert not {"CUDA_VISIBLE_DEVICES", "TRAINER_DOORBELL"} & plan.env.keys()
            job = json.loads(world.home.run("there").job.read_bytes())
            assert job["resources"] == {"pool": "lab", "cpus": 64, "memory_mb": 1 << 20}
            assert not world.home.run("there").report.exists(), "it would describe this machine"
            assert dispatcher.worker_environ("lab") is lab.environ

            lab.finish("there")
            world.executor.finish("here")
            ended = await world.until_ended("here", "there", "waits")
        assert {run.state for run in ended} == {RunState.COMPLETED}
        world.check_nothing_is_held()

    in_world(
        tmp_path / "home",
        story,
        executor=FakeExecutor(behave=lambda plan: LASTING if plan.run_id == "here" else Script()),
        others={"lab": lab},
    )


def test_after_a_restart_each_worker_is_adopted_from_its_own_executor(tmp_path: Path) -> None:
    lab = far(tmp_path)

    async def story(world: World) -> None:
        async with world.daemon():
            world.submit("here", resources={"gpus": 0})
            world.submit("there", resources=LAB)
            await world.until_state("here", RunState.RUNNING)
            await world.until_state("there", RunState.RUNNING)
        lab.finish("there")  # while no daemon runs
        async with world.daemon():
            [there] = await world.until_ended("there")
            assert world.unknown.warnings == []
            world.executor.finish("here")
            [here] = await world.until_ended("here")
        assert [(run.state, run.attempt) for run in (here, there)] == [(RunState.COMPLETED, 1)] * 2
        world.check_nothing_is_held()

    in_world(
        tmp_path / "home",
        story,
        executor=FakeExecutor(behave=lambda _plan: LASTING),
        others={"lab": lab},
    )


def test_cancel_and_kill_reach_the_worker_of_the_runs_own_pool_and_no_other(tmp_path: Path) -> None:
    lab = far(tmp_path, Script(lasts=True, is_deaf=True))

    async def story(world: World) -> None:
        async with world.daemon():
            world.submit("here", resources={"gpus": 0})
            world.submit("there", resources=LAB)
            await world.until_state("here", RunState.RUNNING)
            await world.until_state("there", RunState.RUNNING)
            world.cancel("there")
            [there] = await world.until_ended("there")
            assert there.cause.values["stage"] == "killed"
            assert run_ids(world.executor) == ["here"]
            process = world.executor.processes[world.key("here", 1)]
            assert (process.num_stops, process.num_ends) == (0, 0)
            world.cancel("here")
            [here] = await world.until_ended("here")
        assert (here.state, here.cause.values["stage"]) == (RunState.CANCELLED, "stopped")
        assert lab.processes[world.key("there", 1)].num_ends >= 1
        world.check_nothing_is_held()

    in_world(
        tmp_path / "home",
        story,
        executor=FakeExecutor(behave=lambda _plan: LASTING),
        others={"lab": lab},
    )


def test_events_and_logs_are_read_through_the_handle_of_the_runs_pool(tmp_path: Path) -> None:
    lab = far(tmp_path, Script(step=7))

    async def story(world: World) -> None:
        async with world.daemon():
            world.submit("there", resources=LAB)
            [run] = await world.until_ended("there")
            assert (run.state, run.step, run.last_seq) == (RunState.COMPLETED, 7, 2)
            assert not world.home.run("there").events.exists()
            (tmp_path / "far" / "there" / "worker.log").write_bytes(b"far away\n")
            streams = RunStreams(
                registry=world.registry,
                broadcaster=RunEventBroadcaster(world.registry),
                files=world.pools,
                home=world.home,
            )
            chunks = [chunk async for chunk in streams.stream_logs("there")]
            assert b"".join(chunk.data for chunk in chunks) == b"far away\n"
            lines = b"".join(
                [
                    item.item.lines
                    async for item in streams.stream_events("there")
                    if not isinstance(item, StreamNote)
                ]
            )
            assert [json.loads(line)["event"] for line in lines.splitlines()] == ["started", "completed"]
            outbox = Outbox(world.registry, world.pools, "bus")
            assert [batch.last_seq for batch, _ in outbox.batches(run, Place(0, 0))] == [2]
            outbox.close()

    in_world(tmp_path / "home", story, others={"lab": lab})


def test_a_full_machine_and_a_long_queue_keep_no_run_of_another_pool_waiting(tmp_path: Path) -> None:
    lab = far(tmp_path, Script())
    names = [f"there-{number}" for number in range(WINDOW + 8)]

    async def story(world: World) -> None:
        async with world.daemon() as dispatcher:
            world.submit("here", resources={"gpus": 0, "cpus": 4})
            await world.until_state("here", RunState.RUNNING)
            world.dispatcher = None  # it is told as by an API call
            for name in names:
                world.submit(name, resources=LAB)
            dispatcher.submitted()
            ended = await world.until_ended(*names)
            assert {run.state for run in ended} == {RunState.COMPLETED}
            world.executor.finish("here")
            await world.until_ended("here")
        world.check_nothing_is_held()

    in_world(
        tmp_path / "home",
        story,
        executor=FakeExecutor(behave=lambda _plan: LASTING),
        others={"lab": lab},
        settings={"sweep_s": 3600},  # nothing but what wakes the dispatcher
    )


def test_a_pool_that_left_the_settings_is_named_and_its_runs_go_on_once_it_is_back(tmp_path: Path) -> None:
    lab = far(tmp_path)

    async def story(world: World) -> None:
        async with world.daemon():
            world.submit("there", resources=LAB)
            await world.until_state("there", RunState.RUNNING)
        world.submit("later", resources=LAB)
        world.submit("never", resources=LAB)
        world.others = {}
        async with world.daemon():
            world.submit("here", resources={"gpus": 0})
            await world.until_ended("here")
            await world.until(lambda: world.registry.get("later").cause.id == "pool-missing")
            assert "add [pools.lab] again" in world.registry.get("later").reason
            await world.until(lambda: bool(world.pools.warnings))
            (warning,) = world.pools.warnings
            assert "'lab', which is not in settings.toml" in warning
            world.cancel("never")
            await world.until_ended("never")
            assert world.registry.get("there").state is RunState.RUNNING
        assert run_ids(lab) == ["there"]
        assert lab.processes[world.key("there", 1)].num_stops == 0
        world.others = {"lab": lab}
        async with world.daemon():
            await world.until_state("later", RunState.RUNNING)
            lab.finish("there")
            lab.finish("later")
            ended = await world.until_ended("there", "later")
        assert [(run.state, run.attempt) for run in ended] == [(RunState.COMPLETED, 1)] * 2
        world.check_nothing_is_held()

    in_world(tmp_path / "home", story, others={"lab": lab})


def test_an_unknown_worker_of_another_pool_is_named_and_holds_nothing_here(tmp_path: Path) -> None:
    lab = far(tmp_path)

    async def before(world: World) -> None:
        async with world.daemon():
            world.submit("same", resources=LAB)
            await world.until_state("same", RunState.RUNNING)

    async def story(world: World) -> None:
        async with world.daemon():
            assert (world.unknown.held.cpus, dict(world.unknown.held.devices)) == (0, {})
            (warning,) = world.unknown.warnings
            assert "of the pool lab is in the folder of run same" in warning
            world.submit("same", resources={"gpus": 0})
            await world.until(lambda: world.registry.get("same").cause.id == "waits-for-process")
            lab.finish("same")
            await world.until_ended("same")
            assert world.unknown.warnings == []

    in_world(tmp_path / "before", before, others={"lab": lab})
    in_world(tmp_path / "after", story, others={"lab": lab})


def test_a_record_from_before_there_were_pools_is_of_this_machine(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.submit("old", resources={"gpus": 0})

        def forget_pool(connection: Any) -> None:
            connection.execute("UPDATE runs SET needs = json_remove(needs, '$.pool')")

        world.registry.writer.submit(forget_pool).result()
        assert world.registry.get("old").needs.pool == LOCAL_POOL
        async with world.daemon():
            await world.until_ended("old")
        assert world.executor.processes.keys() == {world.key("old", 1)}

    in_world(tmp_path / "home", story, others={"lab": far(tmp_path)})
