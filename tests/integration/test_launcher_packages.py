"""Claims about a launcher whose environment changes under it: the next run has what was installed, the others go on."""

import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from launched_run import stop_launchers

import gen_worker
from trn.core.home import Home

HERE = Path(__file__).parent

# In an environment of its own: a run waits, a package is installed, another run needs it.
SCRIPT = """
import asyncio, json, os, sys
from pathlib import Path

sys.path.append({here!r})
from launched_run import LaunchedRun, living, runs, until
from trn.core.home import Home
from trn.executors.base import ImportCheck
from trn.executors.local.executor import LocalExecutor

home, code, site = Home(Path({home!r})), Path({code!r}), Path({site!r})
(code / "needy.py").write_text("import freshly_installed\\nfrom counting import Counting\\n")
(code / "counting.py").write_text((Path({here!r}) / "trainers" / "counting.py").read_text())


def install():
    project = code.parent / "project"
    project.mkdir()
    (project / "freshly_installed.py").touch()
    (site / "freshly_installed-1.0.dist-info").mkdir()
    (site / "__editable__.freshly_installed-1.0.pth").write_text(f"{{project}}\\n")


async def main():
    executor = LocalExecutor(home, is_bare=True)
    await executor.start()
    await executor.wait_ready()
    old = living(home)[0]
    waiting = LaunchedRun(home, "waiting", hyperparams={{"at_step": 2, "do": "wait for the stop"}})
    identity = await executor.launch(waiting.plan(code=code))
    await until(lambda: waiting.events("started"), "its start")
    run = LaunchedRun(home, "needy", trainer="needy:Counting")
    plan = run.plan(code=code)
    before = await executor.check_imports(plan, run.job)
    assert len(before.faults) == 1 and "freshly_installed" in before.faults[0], before

    install()
    assert await executor.check_imports(plan, run.job) == ImportCheck()
    ended = await executor.wait(run.key(), await executor.launch(plan))
    assert ended.exit_code == 0, run.log()
    assert runs(old), "it has a worker"
    assert len(living(home)) == 2
    assert [info for info in living(home) if info.pid != old.pid][0].stamp != old.stamp

    assert await executor.stop(identity)
    ended = await executor.wait(waiting.key(), identity)
    assert ended.exit_code is not None, "how it ended is known"
    await until(lambda: not runs(old), "the old launcher's end")
    await executor.aclose()
    print("all of it")


asyncio.run(main())
"""


@pytest.fixture
def environment(tmp_path: Path) -> tuple[Path, Path]:
    """(interpreter, site folder) of a new environment that has our packages by links."""
    folder = tmp_path / "env"
    venv.create(folder, with_pip=False, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "lib" / version / "site-packages"
    ours = [path for path in sys.path if path.endswith("site-packages")]
    ours.append(str(Path(gen_worker.__file__).parent.parent))
    (site / "ours.pth").write_text("\n".join(ours))
    return folder / "bin" / "python", site


def test_a_package_that_was_installed_after_the_launcher_started_is_there_for_the_next_run(
    tmp_path: Path, environment: tuple[Path, Path]
) -> None:
    python, site = environment
    home, code = Home(tmp_path / "home"), tmp_path / "code"
    home.make()
    code.mkdir()
    script = SCRIPT.format(here=str(HERE), home=str(home.root), code=str(code), site=str(site))
    try:
        done = subprocess.run(
            [python, "-P", "-c", script], capture_output=True, text=True, timeout=240, check=False
        )
        assert done.stdout.splitlines()[-1:] == ["all of it"], done.stderr
    finally:
        stop_launchers(home)


def test_a_launcher_that_was_just_started_is_taken_whatever_its_stamp_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upgraded launcher may make its stamp in another way than a daemon of before."""
    import asyncio

    from trn.executors.local import executor as local
    from trn.executors.local import launcher_keeper

    home = Home(tmp_path / "home")
    home.make()
    monkeypatch.setattr(launcher_keeper, "code_stamp", lambda: "of another release")

    async def main() -> None:
        executor = local.LocalExecutor(home, is_bare=True)
        await executor.wait_ready()
        await executor.wait_ready()
        await executor.aclose()

    try:
        asyncio.run(main())
        (info,) = (json.loads(path.read_text()) for path in home.launcher.glob("*.json"))
        assert info["stamp"] != "of another release"
    finally:
        stop_launchers(home)
