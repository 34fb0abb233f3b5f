"""Our commands as a person runs them; the peers' are in `cli_peers`."""

import atexit
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

import cli_peers
from command_clock import BIN, spawn_ms
from daemon_session import DEADLINE_S, Session, end_everything
from faces_data import write_home
from faces_peer_data import View
from gen_worker.launcher.server import WARM_MODULES
from harness import HERE, Prepare, Round, Sample, serve
from pseudo_terminal import PseudoTerminal

TRN = str(BIN / "trn")


def completion(_options: Mapping[str, Any]) -> Round:
    """What bash asks for when a person presses the tabulator."""
    os.environ |= {"_TRN_COMPLETE": "bash_complete", "COMP_WORDS": "trn st", "COMP_CWORD": "1"}
    return lambda: {"ms": spawn_ms([TRN])}


def list_runs(options: Mapping[str, Any]) -> Round:
    """`trn list` in a home with so many runs and no daemon."""
    home = Path(options["home"])
    write_home(home, View(num_runs=options["num_runs"], num_points=1))
    return lambda: {"ms": spawn_ms([TRN, "list"], home=home)}


def _write_job(folder: Path, trainer: str, **fields: Any) -> Path:
    path = folder / "job.json"
    job = {"trainer": trainer, "checkpoint_every": 0, "resources": {"devices": ["cpu"]}, **fields}
    path.write_text(json.dumps(job))
    return path


def one_step(options: Mapping[str, Any]) -> Round:
    """`trn run` of a one-step job on a running daemon, from its spawn to its end."""
    folder = Path(options["home"])
    session = Session(folder / "home")
    session.warm()
    project = _make_project(folder)
    job = _write_job(project, "daemon_trainers:Trivial", mock_batches=[1])
    seeds = itertools.count()

    def run() -> Sample:
        words = [TRN, "run", "--config", str(job), "--set", f"seed={next(seeds)}"]
        return {"ms": spawn_ms(words, home=session.folder, cwd=project)}

    run()
    return run


def _make_project(folder: Path) -> Path:
    """An author's folder: a trainer and a job in it, so that the snapshot is of these."""
    project = folder / "project"
    project.mkdir(parents=True)
    shutil.copy(HERE / "daemon_trainers.py", project)
    return project


def empty_home(options: Mapping[str, Any]) -> Round:
    """`trn run` where there is nothing yet, until the worker's first event: by the event's own clock."""
    folder = Path(options["home"])
    project = _make_project(folder)
    job = _write_job(project, "daemon_trainers:Trivial", mock_batches=[1])
    numbers = itertools.count()
    atexit.register(end_everything, folder)

    def run() -> Sample:
        home = folder / f"home-{next(numbers)}"
        asked_ms = time.time_ns() / 1e6
        spawn_ms([TRN, "run", "--config", str(job)], home=home, cwd=project)
        (events,) = home.glob("runs/*/metrics/events.jsonl")
        with events.open() as file:
            first = json.loads(next(file))
        end_everything(home)
        return {"ms": first["timestamp_ms"] - asked_ms}

    return run


def own_imports(_options: Mapping[str, Any]) -> Round:
    """What a worker imports before the author's code, in a fresh interpreter."""
    words = [sys.executable, "-c", f"import {', '.join(WARM_MODULES)}"]
    spawn_ms(words)
    return lambda: {"ms": spawn_ms(words)}


def follow(options: Mapping[str, Any]) -> Round:
    """`trn run` at a terminal, of a worker that writes so many events a second: its share of a core while it follows."""
    folder = Path(options["home"])
    session = Session(folder / "home")
    session.warm()
    project = _make_project(folder)
    rate, seconds = options["events_per_s"], options["seconds"]
    numbers = itertools.count()

    def run() -> Sample:
        go = folder / f"go-{next(numbers)}"
        job = _write_job(
            project,
            "daemon_trainers:Chattering",
            dataset={"generated": True},
            max_steps=rate * seconds,
            metric_every=1,
            hyperparams={"points_per_s": rate, "go": str(go)},
        )
        with PseudoTerminal() as terminal:
            process = subprocess.Popen(
                [TRN, "run", "--config", str(job)],
                cwd=project,
                env={**os.environ, "TRN_HOME": str(session.folder)},
                stdin=subprocess.DEVNULL,
                stdout=terminal.stream,
                stderr=terminal.stream,
            )
            watched = psutil.Process(process.pid)
            session.run(_until_running(session))
            time.sleep(1.0)  # its own start is over
            before = watched.cpu_times()
            started = time.monotonic()
            go.touch()
            while time.monotonic() - started < seconds - 1:
                time.sleep(0.05)
            after, elapsed_s = watched.cpu_times(), time.monotonic() - started
            if process.wait(DEADLINE_S) != 0:
                raise RuntimeError("the run that was followed did not end well")
        used_s = after.user + after.system - before.user - before.system
        return {"percent": 100 * used_s / elapsed_s, "drawn_kb_per_s": terminal.num_bytes / 1e3 / seconds}

    return run


async def _until_running(session: Session) -> None:
    async for run in session.client.watch():
        if run.state == "RUNNING":
            return


SIDES: dict[str, Prepare] = {
    **cli_peers.SIDES,
    "completion": completion,
    "list_runs": list_runs,
    "one_step": one_step,
    "empty_home": empty_home,
    "own_imports": own_imports,
    "follow": follow,
}

if __name__ == "__main__":
    serve(SIDES)
