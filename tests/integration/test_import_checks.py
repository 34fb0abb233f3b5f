"""Claims about a run's code being loaded before the run is queued: as its worker would, without a trace, by a fork."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from launched_run import LaunchedRun, is_running, living, stop_launchers, until

from gen_worker.contract.job.rules import RUNNER
from gen_worker.contract.process_identity import ProcessIdentity, boot_id, read_process
from gen_worker.errors import SpecError
from gen_worker.pytorch.sections import read_runner_config
from trn.core.home import Home
from trn.core.runs import LOCAL_POOL
from trn.core.snapshots import SnapshotStore
from trn.daemon.intake.import_checks import ImportChecks
from trn.executors.base import ImportCheck
from trn.executors.fake import FakeExecutor
from trn.executors.local.executor import LocalExecutor
from trn.executors.local.launcher_link import start_launcher
from trn.executors.local.worker_process import worker_of
from trn.executors.pools import Pools

TRAINER = """
class Mine:
    def setup(self, ctx): ...
    def configure(self, ctx): ...
    def prepare_batch(self, raw_batch, state, ctx): ...
    def train_step(self, prepared_batch, state, ctx): ...
    def state_dict(self, state): ...
    def load_state_dict(self, state, payload, ctx): ...
"""

HELD_OUT = {"dataset": {"parquet_paths": ["held-out.parquet"]}}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """A home whose launcher nobody kills. It is warm: a check is then a fork, where a bare one imports for each."""
    home = Home(tmp_path_factory.mktemp("home"))
    home.make()
    start_launcher(home.launcher, idle_exit_s=600.0)
    yield home
    stop_launchers(home)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path / "home")
    home.make()
    yield home
    stop_launchers(home)


@contextlib.asynccontextmanager
async def executor_of(home: Home) -> AsyncIterator[LocalExecutor]:
    executor = LocalExecutor(home, is_bare=True)
    await executor.start()
    try:
        yield executor
    finally:
        await executor.aclose()


def work(home: Home, claims: Callable[[LocalExecutor], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(240), executor_of(home) as executor:
            await claims(executor)

    asyncio.run(main())


def try_(
    home: Home, code: Path, source: str, *, plan: dict[str, Any] | None = None, **job: Any
) -> ImportCheck:
    """What comes of `mine:Mine` with that source."""
    (code / "mine.py").write_text(source)
    run = LaunchedRun(home, f"run-{os.urandom(4).hex()}", **{"trainer": "mine:Mine", **job})
    found: list[ImportCheck] = []

    async def claims(executor: LocalExecutor) -> None:
        found.append(
            await executor.check_imports(run.plan(code=code, is_writer_wanted=False, **(plan or {})), run.job)
        )

    work(home, claims)
    assert not run.folder.log.exists()
    assert not list(run.folder.attempts.iterdir()), "it is no attempt"
    return found[0]


@pytest.mark.parametrize("is_warm", [True, False])
def test_sound_code_has_no_fault_whatever_it_prints_and_leaves_running(
    shared: Home, tmp_path: Path, is_warm: bool
) -> None:
    noisy = f"""
import os, subprocess, sys, threading, time
print("said at import", flush=True)
sys.stderr.write("and this\\n")
assert os.environ["OF_THE_JOB"] == "yes"
threading.Thread(target=time.sleep, args=(600,)).start()
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(sleep)
leaver = subprocess.Popen(sleep, start_new_session=True, env={{}}, cwd="/")
open({str(tmp_path / "pids")!r}, "w").write(f"{{child.pid}} {{leaver.pid}}")
{TRAINER}"""
    tried = try_(shared, tmp_path, noisy, plan={"is_warm": is_warm}, env={"OF_THE_JOB": "yes"})
    assert tried == ImportCheck()
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]

    def is_gone() -> bool:
        states = [read_process(pid) for pid in pids]
        return all(state is None or state.is_ended for state in states)

    asyncio.run(until(is_gone, "the end of what the module started"))


def test_a_module_that_writes_into_the_launchers_pipe_does_not_end_the_launcher(
    shared: Home, tmp_path: Path
) -> None:
    source = f"""
import os, stat
for fd in range(3, 256):
    try:
        if stat.S_ISFIFO(os.fstat(fd).st_mode):
            os.write(fd, b"[not a report]\\n" + b"\\xff" * 5000 + b"\\n")
    except OSError:
        pass
{TRAINER}"""
    assert try_(shared, tmp_path, TRAINER) == ImportCheck()
    before = [info.pid for info in living(shared)]
    assert try_(shared, tmp_path, source) == ImportCheck()
    assert [info.pid for info in living(shared)] == before


@pytest.mark.parametrize("is_warm", [True, False])
@pytest.mark.parametrize(
    ("source", "job", "told"),
    [
        ("import nowhere\n", {}, ["mine.py:1", "No module named 'nowhere'"]),
        ("class Mine: ...\n", {}, ["setup", "load_state_dict"]),
        (TRAINER.replace("Mine", "Mien"), {}, ["did you mean 'Mien'?"]),
        (TRAINER, {"callbacks": ["mine:Nobody"]}, ["callbacks[0]: ", "has no 'Nobody'"]),
        (TRAINER, {"validate_every": 1, "validation": HELD_OUT}, ["Mine has no `validate_step(self, "]),
        (TRAINER, {"test": HELD_OUT}, ["Mine has no `test_step(self, "]),
        ("import os; os._exit(3)\n", {}, ["end", "3"]),
    ],
)
def test_what_a_worker_would_stumble_over_is_told(
    shared: Home, tmp_path: Path, is_warm: bool, source: str, job: dict[str, Any], told: list[str]
) -> None:
    tried = try_(shared, tmp_path, source, plan={"is_warm": is_warm}, **job)
    (fault,) = tried.faults
    assert not tried.problem
    for part in told:
        assert part in fault


def test_every_module_that_is_missing_is_told_with_its_field(shared: Home, tmp_path: Path) -> None:
    held_out = {"dataset": {"source": "nowhere:Rows"}}
    job = {"callbacks": ["nowhere:Logger", "mine:Mine", "ProgressBar"], "test": held_out}
    with_test = f"{TRAINER}\n    def test_step(self, batch, state, ctx): ...\n"
    tried = try_(shared, tmp_path, with_test, **job)
    assert [fault.partition(" (")[0] for fault in tried.faults] == [
        "callbacks[0]: module 'nowhere' is not found",
        "callbacks[1]: mine:Mine is a class, expected a subclass of gen_worker.trainer.Callback",
        "callbacks[2]: found 'ProgressBar', expected module:symbol: did you mean"
        " gen_worker.trainer.callbacks:ProgressBar?",
        "test.dataset.source: module 'nowhere' is not found",
    ]


@pytest.mark.parametrize("is_warm", [True, False])
def test_a_class_checks_the_job_before_it_is_queued(shared: Home, tmp_path: Path, is_warm: bool) -> None:
    checking = f"""{TRAINER}
    def check_job(self, job):
        return [f"hyperparams.{{name}}: not known" for name in job.hyperparams]
"""
    given = {"hyperparams": {"a": 1, "b": 2}}
    tried = try_(shared, tmp_path, checking, plan={"is_warm": is_warm}, **given)
    assert tried.faults == ("hyperparams.a: not known", "hyperparams.b: not known")
    assert try_(shared, tmp_path, checking, plan={"is_warm": is_warm}) == ImportCheck()
    for body, told in (
        ("return 'no'", "expected a list of texts"),
        ("raise ValueError(job.seed)", "ValueError: 0"),
    ):
        odd = f"{TRAINER}\n    def check_job(self, job):\n        {body}\n"
        (fault,) = try_(shared, tmp_path, odd, plan={"is_warm": is_warm}).faults
        assert fault.startswith("trainer: ")
        assert told in fault


def test_a_config_of_the_runner_is_checked_as_the_runner_does_with_every_fault(
    shared: Home, tmp_path: Path
) -> None:
    run = LaunchedRun(shared, "runner", trainer="gen_worker.pytorch:PyTorchTrainer")
    config = {
        **run.job,
        "trainer": RUNNER,
        "hyperparams": {
            "model": {"type": "mlp", "args": {"hiden": [4]}},
            "columns": {"inputs": {"x": "x"}, "target": "y"},
            "loss": "cros_entropy",
            "learning_rate": -1,
        },
    }

    async def claims(executor: LocalExecutor) -> None:
        tried = await executor.check_imports(run.plan(code=tmp_path, cwd=str(tmp_path)), config)
        assert not tried.problem
        told = "\n".join(tried.faults)
        assert all(word in told for word in ("hiden", "cros_entropy", "hyperparams.learning_rate")), told
        with pytest.raises(SpecError) as refused:
            read_runner_config(config["hyperparams"], source="the job")
        assert list(tried.faults) == refused.value.faults

    work(shared, claims)


@pytest.mark.parametrize("is_warm", [True, False])
def test_a_config_of_the_runner_is_checked_against_its_data_as_the_runner_does(
    shared: Home, tmp_path: Path, is_warm: bool
) -> None:
    x = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(12, "float32")), 4)
    for name in ("train", "val"):
        pq.write_table(pa.table({"x": x, "kind": pa.array([0, 1, 2])}), tmp_path / f"{name}.parquet")
    run = LaunchedRun(shared, f"runner-{is_warm}", trainer=RUNNER)
    config = {
        **run.job,
        "mock_batches": None,
        "max_steps": 1,
        "dataset": {"parquet_paths": ["train.parquet"]},
        "validation": {"dataset": {"parquet_paths": ["val.parquet"]}},
        "trainer": RUNNER,
        "hyperparams": {
            "model": {"type": "mlp", "args": {"out_features": 3, "hidden": [4]}},
            "columns": {"inputs": {"x": {}}, "target": "kind"},
            "loss": "cross_entropy",
        },
    }

    def changed(**hyperparams: Any) -> dict[str, Any]:
        return {**config, "hyperparams": {**config["hyperparams"], **hyperparams}}

    async def claims(executor: LocalExecutor) -> None:
        async def faults(config: dict[str, Any]) -> tuple[str, ...]:
            plan = run.plan(code=tmp_path, cwd=str(tmp_path), is_warm=is_warm)
            tried = await executor.check_imports(plan, config)
            assert not tried.problem
            return tried.faults

        assert await faults(config) == ()
        (fault,) = await faults(changed(columns={"inputs": {"x": {}}, "target": "kinds"}))
        assert fault == "hyperparams.columns.target: the data has no column `kinds`: did you mean `kind`?"
        if not is_warm:
            return  # the check is the same one, and a new interpreter imports torch for each
        by_epochs = changed(scheduler={"name": "warmup_cosine", "args": {"warmup_steps": 10}})
        by_epochs = {**by_epochs, "max_steps": None, "epochs": 1, "precision": "fp16"}
        assert await faults(by_epochs) == (), "its length is known once the data is open, its device later"
        held_out = {"dataset": {"parquet_paths": ["train.parquet"], "columns": ["x"]}}
        assert await faults({**config, "validation": held_out}) == (), (
            "without validate_every nobody reads it"
        )
        (fault,) = await faults({**config, "validation": held_out, "validate_every": 1})
        assert "the data has no column `kind`" in fault
        (fault,) = await faults(changed(loss="mse"))
        assert fault.startswith("the loss rejects float32 [2, 3] from the model and int64 [2] as target")
        huge = {"type": "mlp", "args": {"out_features": 3, "hidden": [1_000_000, 1_000_000]}}
        assert await faults(changed(model=huge)) == (), "not built: it would take 4 TB"

    work(shared, claims)


def test_a_module_that_brings_the_process_down_is_a_fault_and_the_launcher_lives(
    shared: Home, tmp_path: Path
) -> None:
    tried = try_(shared, tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    assert tried.faults == ("trainer: importing it ends the process: killed by SIGSEGV",)
    assert len(living(shared)) == 1
    assert try_(shared, tmp_path, TRAINER) == ImportCheck()
    # Nobody can tell whose doing this is: the system's, for want of memory, or somebody's here.
    tried = try_(shared, tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    assert tried == ImportCheck(problem="the importing process was killed")


def test_a_fault_of_ours_is_no_fault_of_the_author(shared: Home, tmp_path: Path) -> None:
    """As when the worker's code is replaced under a launcher that has parts of the old one in memory."""
    tried = try_(shared, tmp_path, TRAINER, mock_batches="of another age")
    assert tried.faults == ()
    assert "mock_batches" in tried.problem


def test_an_interpreter_that_cannot_do_it_is_told_with_its_own_words(shared: Home, tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\necho 'No module named gen_worker' >&2\nexit 1\n")
    bare.chmod(0o755)
    (fault,) = try_(shared, tmp_path, TRAINER, plan={"is_warm": False, "argv": (str(bare),)}).faults
    assert "ended with 1" in fault
    assert "No module named gen_worker" in fault
    (fault,) = try_(shared, tmp_path, TRAINER, plan={"is_warm": False, "argv": ("/nowhere/python",)}).faults
    assert "/nowhere/python" in fault


def test_a_launcher_that_dies_meanwhile_is_only_time(home: Home, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        f"""
import os, pathlib, time
mark = pathlib.Path({str(tmp_path / "first")!r})
if not mark.exists():
    mark.write_text(str(os.getpid()))
    time.sleep(600)
{TRAINER}"""
    )
    run = LaunchedRun(home, "run", trainer="mine:Mine")

    async def claims(executor: LocalExecutor) -> None:
        trying = asyncio.create_task(
            executor.check_imports(run.plan(code=tmp_path, is_writer_wanted=False), run.job)
        )
        await until(lambda: (tmp_path / "first").exists() and (tmp_path / "first").read_text(), "its import")
        (info,) = living(home)
        os.kill(info.pid, signal.SIGKILL)
        assert await trying == ImportCheck()
        first = worker_of(ProcessIdentity(boot_id(), int((tmp_path / "first").read_text())))
        await until(lambda: not is_running(first), "the end of what the dead launcher had begun")

    work(home, claims)


def test_a_trial_that_takes_too_long_is_ended_with_all_of_its_own(home: Home, tmp_path: Path) -> None:
    """The launcher's patience is cut short in a launcher of this test's own."""
    (tmp_path / "mine.py").write_text(
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    hasty = (
        "import sys\nfrom gen_worker.launcher import server as launcher\nlauncher.IMPORT_PATIENCE_S = 0.5\n"
        "sys.exit(launcher.main(sys.argv[1:]))"
    )
    subprocess.run(
        [sys.executable, "-P", "-c", hasty, "--folder", str(home.launcher), "--bare"], check=True, timeout=120
    )
    run = LaunchedRun(home, "run", trainer="mine:Mine")

    async def claims(executor: LocalExecutor) -> None:
        plan = run.plan(code=tmp_path, is_writer_wanted=False)
        tried = await executor.check_imports(plan, run.job)
        assert tried == ImportCheck(problem="the import timed out")

    work(home, claims)
    pid = int((tmp_path / "pid").read_text())
    assert not is_running(worker_of(ProcessIdentity(boot_id(), pid)))


def test_frozen_code_is_tried_as_it_was_frozen_and_named_by_its_place_in_it(
    shared: Home, tmp_path: Path
) -> None:
    store = SnapshotStore(shared.snapshots)
    (tmp_path / "mine.py").write_text(TRAINER)  # what lies beside is not what was frozen
    with store.adding():
        stored = store.put_bytes(b"import nowhere\n")
        digest = store.put_manifest(_manifest("mine.py", stored.sha256, stored.size_bytes))
    run = LaunchedRun(shared, "frozen", trainer="mine:Mine")

    async def claims(executor: LocalExecutor) -> None:
        checks = ImportChecks(Pools({LOCAL_POOL: executor}), shared)
        plan = run.plan(code=tmp_path, cwd=str(tmp_path))
        (fault,), _ = await checks.find_faults(plan, run.job, pool=LOCAL_POOL, snapshot=digest)
        assert (
            fault
            == "trainer: mine.py:1: importing 'mine' raised ModuleNotFoundError: No module named 'nowhere'"
        )
        assert (fault.path, fault.kind) == ("trainer", "code")
        assert await checks.find_faults(plan, run.job, pool=LOCAL_POOL, snapshot="") == ([], [])
        (fault,), _ = await checks.find_faults(
            plan, {**run.job, "trainer": "mien:Mine"}, pool=LOCAL_POOL, snapshot=digest
        )
        assert fault.startswith("trainer: module 'mien' is not found")
        assert "did you mean 'mine'?; searched: the code of this run, " in fault
        assert "\n" not in fault

    work(shared, claims)
    assert list(shared.trials.iterdir()) == []


def test_what_cannot_be_found_out_is_a_warning_and_what_a_killed_daemon_left_is_removed(
    tmp_path: Path,
) -> None:
    home = Home(tmp_path / "home")
    home.make()
    (home.trials / "of-a-dead-one").mkdir(parents=True)
    run = LaunchedRun(home, "run")
    executor = FakeExecutor(try_=lambda _plan, _config: ImportCheck(problem="no launcher"))
    checks = ImportChecks(Pools({LOCAL_POOL: executor}), home)
    checks.prepare()
    assert not home.trials.exists()
    assert asyncio.run(checks.find_faults(run.plan(), run.job, pool=LOCAL_POOL, snapshot="")) == (
        [],
        ["the code was not checked: no launcher"],
    )


def _manifest(path: str, sha256: str, size_bytes: int) -> Any:
    from trn.core.snapshot_manifest import FileEntry, Manifest

    entry = FileEntry(path=path, sha256=sha256, size_bytes=size_bytes, mode=0o644)
    return Manifest(files=(entry,))
