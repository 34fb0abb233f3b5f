"""A real daemon in a home of its own, and the end of everything that it started."""

import asyncio
import atexit
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import psutil

from harness import HERE
from trn.client.client import AsyncClient
from trn.core.home import Home
from trn.daemon.upkeep.singleton import read_daemon_info

DEADLINE_S = 100.0
POLL_S = 0.002
ONE_CPU = "[inventory]\ncpus = 1\ndevices = []\n"

T = TypeVar("T")


class Daemon:
    """Started by its making; a context that ends daemon, launcher and workers."""

    def __init__(self, root: Path, *, settings: str = "") -> None:
        self.home = Home(root)
        self.home.make()
        self.home.settings.write_text(settings)
        self._output = root / "output.txt"
        self._numbers = itertools.count()
        self.started = time.monotonic()
        with self._output.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "trn.daemon", "--home", str(root), "serve"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def wait_announced(self) -> None:
        """Until it says where it serves."""
        while time.monotonic() - self.started < DEADLINE_S:
            info = read_daemon_info(self.home)
            if info is not None and info.pid == self.process.pid:
                return
            if self.process.poll() is not None:
                break
            time.sleep(POLL_S)
        raise RuntimeError(f"the daemon does not serve: {self._last_line()}")

    def _last_line(self) -> str:
        lines = self._output.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def client(self) -> AsyncClient:
        return AsyncClient(self.home.root, patience_s=0)

    async def wait_warm(self, client: AsyncClient) -> None:
        """Until its launcher has everything imported: the first run waits for that."""
        run_id = await self.submit(client, self.job("daemon_trainers:Trivial", mock_batches=[1]))
        await self.wait_state(client, run_id, "COMPLETED")

    def job(self, trainer: str, **fields: Any) -> dict[str, Any]:
        """A job on the CPU, other than all before it."""
        return {
            "name": f"bench-{next(self._numbers)}",
            "trainer": trainer,
            "checkpoint_every": 0,
            "resources": {"devices": ["cpu"]},
            **fields,
        }

    async def submit(self, client: AsyncClient, job: Mapping[str, Any]) -> str:
        return (await client.submit(job, base_dir=HERE)).run.run_id

    async def hold(self, client: AsyncClient) -> None:
        """Let a run take the only CPU: what is submitted from here on stays in the queue."""
        job = self.job("daemon_trainers:Holding", dataset={"generated": True}, max_steps=1_000_000)
        await self.wait_state(client, await self.submit(client, job), "RUNNING")

    async def wait_state(self, client: AsyncClient, run_id: str, state: str) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while (run := await client.get(run_id)).state != state:
                if run.is_terminal:
                    raise RuntimeError(f"the run is {run.state}, not {state}: {run.reason}")
                await asyncio.sleep(POLL_S)

    def launchers(self) -> list[psutil.Process]:
        return [found for found in _processes_of(self.home.root) if found.pid != self.process.pid]

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(DEADLINE_S / 10)
        finally:
            end_everything(self.home.root)
            self.process.wait(DEADLINE_S / 10)

    def __enter__(self) -> "Daemon":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def end_everything(folder: Path) -> None:
    """Daemons, launchers, workers, clusters: whatever `find_everything` finds there."""
    end_processes(find_everything(folder))


def find_everything(folder: Path) -> set[psutil.Process]:
    """Every process that names a path in that folder, and their children."""
    found = set(_processes_of(folder))
    for process in list(found):
        try:
            found.update(process.children(recursive=True))
        except psutil.Error:
            continue
    return found


def end_processes(processes: Iterable[psutil.Process]) -> None:
    """Kill them, and return when they are gone."""
    ending = list(processes)
    for process in ending:
        try:
            process.kill()
        except psutil.Error:
            continue
    psutil.wait_procs(ending, timeout=DEADLINE_S)


def _processes_of(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            arguments = process.cmdline()
        except psutil.Error:
            continue
        is_there = any(text == str(folder) or f"{folder}{os.sep}" in text for text in arguments)
        if is_there and process.pid != os.getpid():
            found.append(process)
    return found


class Session:
    """A side's daemon with a client and the loop that the client belongs to; ended with the side's interpreter."""

    def __init__(self, folder: Path, *, settings: str = "") -> None:
        self.folder = folder
        self.daemon = Daemon(folder, settings=settings)
        atexit.register(self.daemon.close)
        self.daemon.wait_announced()
        self._runner = asyncio.Runner()
        self.client = self.daemon.client()
        atexit.register(self._close)

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(main)

    def warm(self) -> None:
        self.run(self.daemon.wait_warm(self.client))

    def _close(self) -> None:
        self._runner.run(self.client.close())
        self._runner.close()
