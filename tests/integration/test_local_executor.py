"""Claims about workers on this machine: one process per attempt, its end known, whoever of us is killed."""

import asyncio
import contextlib
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from launched_run import TRAINERS, LaunchedRun, is_running, living, runs, stop_launchers, until, wait_until
from worker_process import write_rows

from gen_worker.contract.process_identity import ProcessIdentity, boot_id, read_process
from gen_worker.launcher.attempt_records import AttemptRecord, claim
from gen_worker.launcher.messages import LauncherInfo
from trn.core.causes import failure
from trn.core.errors import UnavailableError
from trn.core.home import Home
from trn.executors.base import Executor, ImportCheck, Worker, WorkerExit
from trn.executors.local import executor as local
from trn.executors.local import launcher_keeper
from trn.executors.local.executor import LocalExecutor
from trn.executors.local.launcher_link import LauncherLink, start_launcher
from trn.executors.local.worker_process import worker_of

WAITING = {"hyperparams": {"at_step": 2, "do": "wait for the stop"}}

LOST = failure("lost")


@contextlib.asynccontextmanager
async def executor_of(home: Home, **options: Any) -> AsyncIterator[LocalExecutor]:
    executor = LocalExecutor(home, **{"is_bare": True, **options})
    await executor.start()
    try:
        yield executor
    finally:
        await executor.aclose()


def work(home: Home, claims: Callable[[LocalExecutor], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(240), executor_of(home, **options) as executor:
            await claims(executor)

    asyncio.run(main())


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """A home whose launcher nobody kills."""
    home = Home(tmp_path_factory.mktemp("home"))
    home.make()
    yield home
    stop_launchers(home)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path / "home")
    home.make()
    yield home
    stop_launchers(home)


async def finish(executor: Executor, run: LaunchedRun, identity: Worker) -> WorkerExit:
    return await executor.wait(run.key(), identity)


async def launch_waiting(executor: Executor, home: Home, name: str) -> tuple[LaunchedRun, Worker]:
    """A worker in the middle of its training."""
    run = LaunchedRun(home, name, **WAITING)
    identity = await executor.launch(run.plan())
    await until(lambda: run.events("log"), f"the training of {name}: {run.log()}")
    return run, identity


def test_a_warm_worker_trains_a_real_run_and_its_events_carry_its_attempt(home: Home, tmp_path: Path) -> None:
    write_rows(tmp_path / "data" / "rows.parquet")
    run = LaunchedRun(
        home,
        "real",
        trainer="dropout_mlp:DropoutMlp",
        mock_batches=None,
        max_steps=6,
        metric_every=2,
        checkpoint_every=3,
        dataset={"parquet_paths": ["rows.parquet"], "batch_size": 8, "columns": ["x", "y"]},
    )

    async def claims(executor: LocalExecutor) -> None:
        await executor.wait_ready()
        assert "warm" in executor.state()
        plan = run.plan(7, env={"TRAINER_BASE_DIR": str(tmp_path / "data")})
        identity = await executor.launch(plan)
        ended = await executor.wait(run.key(7), identity)
        assert ended.exit_code == 0, run.log()

    work(home, claims, is_bare=False)
    events = run.events()
    assert {event["attempt"] for event in events} == {7}
    assert events[-1]["event"] == "completed"
    assert json.loads((run.folder.checkpoints / "final.meta.json").read_text())["attempt"] == 7


@pytest.mark.parametrize(
    ("hyperparams", "exit_code"),
    [
        ({"fail_in": "train_step", "at_step": 1}, 14),
        ({"do": "kill", "at_step": 1}, -9),
        ({"do": "sigterm", "at_step": 1}, 75),
        ({"fail_in": "setup"}, 13),
        ({}, 0),
    ],
)
def test_how_a_worker_ended_is_told(shared: Home, hyperparams: dict[str, Any], exit_code: int) -> None:
    run = LaunchedRun(shared, f"code{exit_code}", hyperparams=hyperparams)

    async def claims(executor: LocalExecutor) -> None:
        ended = await finish(executor, run, await executor.launch(run.plan()))
        assert ended.exit_code == exit_code, run.log()
        assert not ended.is_out_of_memory
        assert not ended.is_reboot
        assert ended.detail == ""
        # And again, when it is long over.
        identity = await executor.find(run.key())
        assert identity is not None
        assert (await finish(executor, run, identity)).exit_code == exit_code

    work(shared, claims)


def test_a_number_below_that_of_the_file_is_refused_by_the_worker(shared: Home) -> None:
    run = LaunchedRun(shared, "numbered")

    async def claims(executor: LocalExecutor) -> None:
        for number, exit_code in ((3, 0), (2, 10)):
            identity = await executor.launch(run.plan(number))
            ended = await executor.wait(run.key(number), identity)
            assert ended.exit_code == exit_code, run.log()
        assert {event["attempt"] for event in run.events()} == {3}

    work(shared, claims)


def test_an_end_that_no_daemon_was_there_to_see_is_told_to_the_next(shared: Home) -> None:
    found: list[tuple[LaunchedRun, Worker]] = []

    async def first(executor: LocalExecutor) -> None:
        found.append(await launch_waiting(executor, shared, "adopted"))

    async def second(executor: LocalExecutor) -> None:
        run, identity = found[0]
        assert await executor.find(run.key()) == identity
        assert (await finish(executor, run, identity)).exit_code == 75

    work(shared, first)
    run, identity = found[0]
    assert is_running(identity), "the daemon's end harmed it"
    os.kill(identity.pid, signal.SIGTERM)
    asyncio.run(until((run.folder.attempts / "1.exit.json").exists, "its exit"))
    work(shared, second)


def test_a_living_worker_is_adopted_and_watched(shared: Home) -> None:
    found: list[tuple[LaunchedRun, Worker]] = []

    async def first(executor: LocalExecutor) -> None:
        found.append(await launch_waiting(executor, shared, "watched"))

    async def second(executor: LocalExecutor) -> None:
        run, identity = found[0]
        waiting = asyncio.create_task(finish(executor, run, identity))
        await executor.wait_ready()
        assert await executor.stop(identity)
        assert (await waiting).exit_code == 75
        assert not await executor.stop(identity)

    work(shared, first)
    work(shared, second)


def test_a_killed_launcher_harms_no_worker_and_its_end_is_noticed(home: Home) -> None:
    async def claims(executor: LocalExecutor) -> None:
        run, identity = await launch_waiting(executor, home, "orphan")
        (info,) = living(home)
        waiting = asyncio.create_task(finish(executor, run, identity))
        os.kill(info.pid, signal.SIGKILL)
        await until(lambda: not runs(info), "the launcher's end")
        assert is_running(identity)
        # Another launcher takes the next worker, without anyone's doing.
        other = LaunchedRun(home, "other")
        assert (await finish(executor, other, await executor.launch(other.plan()))).exit_code == 0
        assert living(home)[0].pid != info.pid
        assert not waiting.done()
        assert await executor.stop(identity)
        ended = await waiting
        assert ended.exit_code is None
        assert ended.detail == ""
        assert run.events()[-1]["category"] == "cancelled"

    work(home, claims)


def test_find_is_right_and_nothing_starts_late_when_the_launcher_dies_at_any_moment(home: Home) -> None:
    """Kills the launcher while a launch is on its way, each time a little later; then asks what became of it."""
    outcomes = []

    async def claims(executor: LocalExecutor) -> None:
        moments = random.Random(4)
        for number in range(12):
            await until(lambda: living(home), "the next launcher")
            await executor.wait_ready()
            (info,) = living(home)
            run = LaunchedRun(home, f"torn-{number}", **WAITING)
            launching = asyncio.create_task(executor.launch(run.plan()))
            await asyncio.sleep(moments.random() * 0.02)  # any moment will do
            os.kill(info.pid, signal.SIGKILL)
            launching.cancel()  # and with it the daemon
            await asyncio.wait([launching])
            if not launching.cancelled():
                launching.exception()
            identity = await executor.find(run.key())
            assert await executor.find(run.key()) == identity
            outcomes.append((run, identity))
            await until(lambda info=info: not runs(info), "the launcher's end")

    work(home, claims)

    async def settle(executor: LocalExecutor) -> None:
        for run, identity in outcomes:
            if identity is None:
                with pytest.raises(UnavailableError):
                    await executor.launch(run.plan())
                assert not run.folder.events.exists()
            else:
                assert await executor.launch(run.plan()) == identity
                await until(lambda run=run: run.events("log"), f"the training of {run.run_id}")
                assert len(run.events("started")) == 1
                assert run.events("started")[0]["pid"] == identity.pid
                await executor.end(identity)

    work(home, settle)


def test_a_launch_whose_launcher_dies_is_made_by_the_next_one(home: Home) -> None:
    async def claims(executor: LocalExecutor) -> None:
        await executor.wait_ready()
        (info,) = living(home)
        os.kill(info.pid, signal.SIGSTOP)  # it takes the request and never answers
        run = LaunchedRun(home, "moved")
        launching = asyncio.create_task(executor.launch(run.plan()))
        await asyncio.sleep(0)
        os.kill(info.pid, signal.SIGKILL)
        assert (await finish(executor, run, await launching)).exit_code == 0
        assert len(run.events("started")) == 1

    work(home, claims)


def test_a_worker_that_comes_after_its_attempt_was_given_up_ends_without_a_trace(shared: Home) -> None:
    run = LaunchedRun(shared, "late")

    async def claims(executor: LocalExecutor) -> None:
        assert await executor.find(run.key()) is None
        with pytest.raises(UnavailableError, match="given up"):
            await executor.launch(run.plan())
        with pytest.raises(UnavailableError, match="given up"):
            await executor.launch(run.plan(is_warm=False))
        assert not run.folder.events.exists()
        assert await executor.find(run.key()) is None

    work(shared, claims)


def test_launches_of_one_attempt_at_once_are_one_process(shared: Home) -> None:
    run = LaunchedRun(shared, "at-once")

    async def claims(executor: LocalExecutor) -> None:
        identities = await asyncio.gather(*(executor.launch(run.plan()) for _ in range(8)))
        assert len(set(identities)) == 1
        assert (await finish(executor, run, identities[0])).exit_code == 0
        assert len(run.events("started")) == 1

    work(shared, claims)


@pytest.mark.parametrize("is_warm", [True, False])
def test_a_worker_trains_frozen_code_though_an_editable_install_leads_to_the_edited_one(
    shared: Home, tmp_path: Path, is_warm: bool
) -> None:
    project, code = tmp_path / "project", tmp_path / "code"
    source = (TRAINERS / "counting.py").read_text()
    for folder, text in ((project, "raise SystemExit('edited since')\n"), (code, source)):
        (folder / "src" / "shapes").mkdir(parents=True)
        (folder / "src" / "shapes" / "__init__.py").write_text("")
        (folder / "src" / "shapes" / "train.py").write_text(text)
    fault = {"fail_in": "train_step", "at_step": 2}
    run = LaunchedRun(shared, f"frozen-{is_warm}", trainer="shapes.train:Counting", hyperparams=fault)
    plan = run.plan(
        code=code,
        frozen_from=str(project),
        cwd=str(project),
        env={"PYTHONPATH": str(project / "src")},
        is_warm=is_warm,
    )

    async def claims(executor: LocalExecutor) -> None:
        assert await executor.check_imports(plan, run.job) == ImportCheck()
        await finish(executor, run, await executor.launch(plan))

    work(shared, claims)
    (failed,) = run.events("failed")
    assert failed["step"] == 1
    theirs, frozen = (folder / "src" / "shapes" / "train.py" for folder in (project, code))
    assert re.search(
        rf"at {re.escape(str(theirs))}:\d+ \(frozen copy: {re.escape(str(frozen))}\)", failed["error"]
    )
    assert re.search(rf'File "{re.escape(str(theirs))}", line \d+, in \w+ \(frozen copy: ', run.log())


def test_a_worker_of_another_interpreter_is_started_cold(shared: Home) -> None:
    run = LaunchedRun(shared, "cold")
    python = run.folder.root / "python"
    # Its record is made before the interpreter runs, so this one can tell.
    python.write_text(f'#!/bin/sh\ncp "{run.folder.attempts}/1.json" seen.json\nexec {sys.executable} "$@"\n')
    python.chmod(0o700)

    async def claims(executor: LocalExecutor) -> None:
        argv = (str(python), "-P", "-m", "gen_worker.entrypoint")
        identity = await executor.launch(run.plan(argv=argv, is_warm=False))
        assert (await finish(executor, run, identity)).exit_code == 0, run.log()
        assert json.loads((run.folder.root / "seen.json").read_text())["pid"] == identity.pid
        assert run.events("started")[0]["pid"] == identity.pid
        assert run.events()[-1]["event"] == "completed"

    work(shared, claims)


FAMILY = """
import os, subprocess, sys, time
from pathlib import Path
from counting import Counting

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


class Family(Counting):
    def setup(self, ctx):
        super().setup(ctx)
        pids = [subprocess.Popen(SLEEP).pid, subprocess.Popen(SLEEP, start_new_session=True).pid]
        # One whose parent is gone at once, in a session of its own.
        script = f"import subprocess, sys; print(subprocess.Popen({SLEEP!r}, stdout=2, start_new_session=True).pid)"
        pids.append(int(subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE).stdout))
        pid = os.fork()
        if pid == 0:
            os.setsid()
            time.sleep(600)
            os._exit(0)
        # And one that does the same without another program: only what a fork inherits tells whose it is.
        told, tell = os.pipe()
        middle = os.fork()
        if middle == 0:
            os.setsid()
            if os.fork() == 0:
                os.setsid()
                os.write(tell, str(os.getpid()).encode())
                time.sleep(600)
            os._exit(0)
        os.waitpid(middle, 0)
        pids.append(int(os.read(told, 100)))
        # What a program does that wants to leave for good: nothing of the worker's is left to it.
        middle = os.fork()
        if middle == 0:
            os.setsid()
            if os.fork() == 0:
                os.chdir("/")
                null = os.open(os.devnull, os.O_RDWR)
                for number in (0, 1, 2):
                    os.dup2(null, number)
                os.write(tell, str(os.getpid()).encode())
                os.closerange(3, 4096)
                os.execve(sys.executable, SLEEP, {})
            os._exit(0)
        os.waitpid(middle, 0)
        pids.append(int(os.read(told, 100)))
        lone = subprocess.Popen(SLEEP, env={}, start_new_session=True, cwd="/", close_fds=True)
        pids.append(lone.pid)
        Path(ctx.job.hyperparams["pids"]).write_text(" ".join(map(str, [*pids, pid])))
"""


@pytest.mark.parametrize("has_launcher", [True, False])
def test_ending_a_worker_takes_all_that_it_started_and_nothing_else(
    home: Home, tmp_path: Path, has_launcher: bool
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "family.py").write_text(FAMILY)
    trainers = str(Path(__file__).parent / "trainers")
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    async def claims(executor: LocalExecutor) -> None:
        pids_path = tmp_path / "pids"
        hyperparams = {**WAITING["hyperparams"], "pids": str(pids_path)}
        run = LaunchedRun(home, "family", trainer="family:Family", hyperparams=hyperparams)
        env = {"PYTHONPATH": trainers}
        identity = await executor.launch(run.plan(code=tmp_path / "code", env=env))
        _, other_identity = await launch_waiting(executor, home, "sibling")
        await until(lambda: run.events("log") or not is_running(identity), "its training")
        pids = [identity.pid, *map(int, pids_path.read_text().split())]
        states = [read_process(pid) for pid in pids]
        assert len(pids) == 8
        assert all(state is not None and not state.is_ended for state in states), run.log()
        if not has_launcher:
            (info,) = living(home)
            await executor.aclose()
            os.kill(info.pid, signal.SIGKILL)
            await until(lambda: not runs(info), "the launcher's end")
        await executor.end(identity)
        for pid, state in zip(pids, states, strict=True):
            now = read_process(pid)
            assert now is None or now.is_ended or now.start_ticks != state.start_ticks  # type: ignore[union-attr]
        assert bystander.poll() is None
        assert is_running(other_identity)
        ended = await finish(executor, run, identity)
        assert ended.exit_code == (-9 if has_launcher else None)
        assert not ended.is_out_of_memory
        await executor.end(identity)  # and again
        await executor.end(other_identity)
        assert psutil.pid_exists(bystander.pid)

    try:
        work(home, claims)
    finally:
        bystander.kill()
        bystander.wait()


def test_a_stopped_worker_is_ended_too(shared: Home) -> None:
    async def claims(executor: LocalExecutor) -> None:
        run, identity = await launch_waiting(executor, shared, "stopped")
        os.kill(identity.pid, signal.SIGSTOP)
        await executor.end(identity)
        assert (await finish(executor, run, identity)).exit_code == -9

    work(shared, claims)


def test_a_pid_that_is_anothers_by_now_is_left_alone(shared: Home) -> None:
    bystander = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
    )
    state = read_process(bystander.pid)
    assert state is not None
    before = worker_of(ProcessIdentity(boot_id(), bystander.pid, state.start_ticks - 1))
    other_boot = worker_of(ProcessIdentity("before", bystander.pid, state.start_ticks))
    run = LaunchedRun(shared, "reused")

    async def claims(executor: LocalExecutor) -> None:
        for identity in (before, other_boot):
            assert not await executor.stop(identity)
            await executor.end(identity)
            ended = await finish(executor, run, identity)
            assert ended.exit_code is None
            assert ended.is_reboot == (identity is other_boot)
        assert bystander.poll() is None

    try:
        work(shared, claims)
    finally:
        bystander.kill()
        bystander.wait()


def test_the_end_of_a_killed_attempt_is_written_once_and_under_a_living_one_not_at_all(shared: Home) -> None:
    async def claims(executor: LocalExecutor) -> None:
        run, identity = await launch_waiting(executor, shared, "closed")
        plan = run.plan()
        assert not await executor.close_attempt(plan, category="train-step", error="too early", cause=LOST)
        assert not run.events("failed")
        await executor.end(identity)
        for _ in range(2):
            assert await executor.close_attempt(
                plan, category="timeout", error="no heartbeat for 60 s", cause=LOST
            )
        (failed,) = run.events("failed")
        assert (failed["category"], failed["error"]) == ("timeout", "no heartbeat for 60 s")
        assert failed["attempt"] == 1
        assert [event["seq"] for event in run.events()] == list(range(1, len(run.events()) + 1))

    work(shared, claims)


def test_an_attempt_that_never_came_to_be_gets_its_end_too(shared: Home) -> None:
    run = LaunchedRun(shared, "never")

    async def claims(executor: LocalExecutor) -> None:
        assert await executor.find(run.key(4)) is None
        assert await executor.close_attempt(
            run.plan(4), category="startup", error="the disk is full", cause=LOST
        )
        assert not await executor.close_attempt(
            run.plan(4), category="no such category", error="x", cause=LOST
        )
        assert [(event["event"], event["attempt"]) for event in run.events()] == [
            ("started", 4),
            ("failed", 4),
        ]

    work(shared, claims)


def test_an_end_is_written_without_any_file_that_a_power_cut_may_take(shared: Home) -> None:
    async def claims(executor: LocalExecutor) -> None:
        run, identity = await launch_waiting(executor, shared, "cut")
        await executor.end(identity)
        for path in (run.folder.job, run.folder.contract):
            path.write_bytes(b"")  # as a file that was not synced may be found
        assert await executor.close_attempt(
            run.plan(), category="cancelled", error="the machine went down", cause=LOST
        )
        (failed,) = run.events("failed")
        assert (failed["attempt"], failed["error"]) == (1, "the machine went down")

    work(shared, claims)


def test_a_launcher_of_other_code_is_retired_and_its_worker_goes_on(home: Home) -> None:
    found: list[tuple[LaunchedRun, Worker]] = []

    async def first(executor: LocalExecutor) -> None:
        found.append(await launch_waiting(executor, home, "old"))

    work(home, first)
    (old,) = living(home)
    (path,) = home.launcher.glob("*.json")
    path.write_text(path.read_text().replace(old.stamp, "of other sources"))

    async def second(executor: LocalExecutor) -> None:
        run, identity = found[0]
        other = LaunchedRun(home, "new")
        assert (await finish(executor, other, await executor.launch(other.plan()))).exit_code == 0
        assert len(living(home)) == 2
        assert is_running(identity)
        waiting = asyncio.create_task(finish(executor, run, identity))
        await executor.stop(identity)
        assert (await waiting).exit_code == 75, "the retired launcher saw its end"
        await until(lambda: not runs(old), "its leave")
        assert len(living(home)) == 1

    work(home, second)


def test_of_two_launchers_one_is_left(home: Home) -> None:
    for _ in range(2):
        start_launcher(home.launcher, idle_exit_s=600.0, is_bare=True)
    old, new = living(home)

    async def claims(executor: LocalExecutor) -> None:
        await executor.wait_ready()
        await until(lambda: not runs(new), "its leave")
        assert runs(old)

    work(home, claims)


def test_a_launcher_that_hangs_holds_no_run_and_takes_no_other(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def claims(executor: LocalExecutor) -> None:
        run, identity = await launch_waiting(executor, home, "held")
        (old,) = living(home)
        os.kill(old.pid, signal.SIGSTOP)
        os.kill(identity.pid, signal.SIGKILL)
        with monkeypatch.context() as patch:
            patch.setattr(local, "EXIT_PATIENCE_S", 0.1)
            ended = await finish(executor, run, identity)
        assert ended.exit_code is None
        assert "hangs" in ended.detail
        with monkeypatch.context() as patch:
            patch.setattr(launcher_keeper, "SILENCE_S", 1.0)
            closing = executor.close_attempt(run.plan(), category="train-step", error="it died", cause=LOST)
            other = LaunchedRun(home, "other")
            is_closed, other_identity = await asyncio.gather(closing, executor.launch(other.plan()))
        assert is_closed
        assert len(run.events("failed")) == 1
        assert (await finish(executor, other, other_identity)).exit_code == 0
        assert len(other.events("started")) == 1
        assert runs(old)
        os.kill(old.pid, signal.SIGCONT)
        await until(lambda: not runs(old), "its leave")
        assert len(living(home)) == 1
        assert (await finish(executor, run, identity)).exit_code == -9, "what it saw in the end is lost"
        assert len(run.events("failed")) == 1

    work(home, claims)


@pytest.mark.parametrize("stamp", ["of other sources", None])
def test_a_launcher_that_hangs_keeps_no_other_from_being_had(
    home: Home, monkeypatch: pytest.MonkeyPatch, stamp: str | None
) -> None:
    start_launcher(home.launcher, idle_exit_s=600.0, is_bare=True)
    wait_until(lambda: living(home)[0].is_warm, "its word that it is warm")
    (old,) = living(home)
    os.kill(old.pid, signal.SIGSTOP)
    (path,) = home.launcher.glob("*.json")
    path.write_text(path.read_text().replace(old.stamp, stamp or old.stamp))
    monkeypatch.setattr(launcher_keeper, "RETIRE_PATIENCE_S", 0.1)
    monkeypatch.setattr(launcher_keeper, "ANSWER_PATIENCE_S", 2.0)

    async def claims(executor: LocalExecutor) -> None:
        async with asyncio.timeout(launcher_keeper.WARM_PATIENCE_S / 2):
            await executor.wait_ready()
        assert runs(old)
        assert f"pid {old.pid}" not in executor.state()
        os.kill(old.pid, signal.SIGCONT)
        await until(lambda: not runs(old), "its leave")

    work(home, claims)


def test_a_link_whose_close_is_cancelled_leaves_no_connection_open(tmp_path: Path) -> None:
    async def close() -> None:
        left = asyncio.Event()

        async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            left.set()
            writer.close()

        async with await asyncio.start_unix_server(listen, tmp_path / "a.sock"):
            info = LauncherInfo(pid=1, start_ticks=None, boot_id="", socket="a.sock", stamp="")
            link = await LauncherLink.connect(tmp_path, info, lambda _: None)
            closing = asyncio.create_task(link.aclose())
            await asyncio.sleep(0)  # it waits now
            closing.cancel()
            await asyncio.wait_for(left.wait(), 60)

    asyncio.run(close())


@pytest.mark.parametrize("is_warm", [True, False])
def test_a_launcher_that_hangs_is_given_up_within_the_start_timeout(home: Home, is_warm: bool) -> None:
    start_timeout_s = 12.0  # less than the patience with a launcher that may take as long as it wants
    start_launcher(home.launcher, idle_exit_s=600.0, is_bare=True)
    wait_until(lambda: living(home)[0].is_warm, "its word that it is warm")
    (old,) = living(home)
    os.kill(old.pid, signal.SIGSTOP)
    (path,) = home.launcher.glob("*.json")
    info = msgspec.json.decode(path.read_bytes(), type=LauncherInfo)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(info, is_warm=is_warm)))

    async def claims(executor: LocalExecutor) -> None:
        run = LaunchedRun(home, "started")
        for number in range(
            1, 6
        ):  # each as long as a supervisor would wait; a slow machine may need a second one
            try:
                async with asyncio.timeout(start_timeout_s):
                    identity = await executor.launch(run.plan(number))
                break
            except TimeoutError:
                assert await executor.find(run.key(number)) is None
        ended = await executor.wait(run.key(number), identity)
        assert ended.exit_code == 0
        assert runs(old)
        os.kill(old.pid, signal.SIGCONT)
        await until(lambda: not runs(old), "its leave")
        assert [event["attempt"] for event in run.events("started")] == [number], "a late start"

    work(home, claims, start_timeout_s=start_timeout_s)


def test_workers_keep_the_limit_of_open_files_that_the_daemon_was_started_with(home: Home) -> None:
    run = LaunchedRun(home, "limited", **WAITING)

    async def claims(executor: LocalExecutor) -> None:
        identity = await executor.launch(run.plan())
        assert resource.prlimit(identity.pid, resource.RLIMIT_NOFILE)[0] == 777
        await executor.end(identity)

    work(home, claims, worker_open_files=777)


def test_a_full_disk_ends_no_launcher(home: Home) -> None:
    (home.launcher / "launcher.log").symlink_to("/dev/full")

    async def claims(executor: LocalExecutor) -> None:
        run, identity = await launch_waiting(executor, home, "unwritten")
        (info,) = living(home)
        run.folder.attempts.rename(run.folder.root / "moved")
        run.folder.attempts.write_text("")  # its exit cannot be written, nor that it cannot
        await executor.end(identity)
        other = LaunchedRun(home, "other")
        assert (await finish(executor, other, await executor.launch(other.plan()))).exit_code == 0
        assert [found.pid for found in living(home)] == [info.pid]

    work(home, claims)


def test_what_a_dead_launcher_left_is_removed_and_a_broken_note_is_no_launcher(home: Home) -> None:
    async def nothing(executor: LocalExecutor) -> None:
        await executor.wait_ready()

    work(home, nothing)
    (info,) = living(home)
    os.kill(info.pid, signal.SIGKILL)
    (home.launcher / "broken.json").write_text("{")

    async def claims(executor: LocalExecutor) -> None:
        await executor.wait_ready()
        (new,) = living(home)
        assert new.pid != info.pid
        assert {path.name for path in home.launcher.iterdir()} == {
            new.socket,
            new.socket.replace(".sock", ".json"),
            "launcher.log",
        }

    work(home, claims)


def test_without_a_launcher_a_launch_fails_for_certain(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.make()
    run = LaunchedRun(home, "nowhere")
    (home.launcher / "launcher.log").mkdir()  # so that none can be started

    async def claims(executor: LocalExecutor) -> None:
        with pytest.raises(UnavailableError, match="did not start: no launcher can be started"):
            await executor.launch(run.plan())
        assert await executor.find(run.key()) is None
        assert not await executor.close_attempt(run.plan(), category="startup", error="x", cause=LOST)
        assert executor.state().startswith("no launcher")

    work(home, claims)
    assert not living(home)


def test_an_emptied_record_is_a_worker_of_a_machine_that_went_down(shared: Home) -> None:
    run = LaunchedRun(shared, "emptied")
    path = run.folder.attempts / "1.json"
    assert claim(path, AttemptRecord(boot_id=boot_id(), pid=1))
    path.write_bytes(b"")

    async def claims(executor: LocalExecutor) -> None:
        identity = await executor.find(run.key())
        assert identity is not None
        assert (await finish(executor, run, identity)).is_reboot
        await executor.end(identity)

    work(shared, claims)


def test_the_executor_is_one() -> None:
    executor: Executor = LocalExecutor(Home(Path("/nowhere")))
    assert executor is not None
