"""What `trn doctor` says of each interpreter that runs train with: asked in a process of its own, kept for a while.

A report says what torch of that interpreter can do on this machine. It is true for one boot, and until the packages
of the interpreter change. It lies in the home too, so the next daemon does not begin by asking.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from gen_worker.contract.durable_files import replace_file
from gen_worker.contract.process_identity import boot_id
from trn.core.home import Home
from trn.core.workers_variables import without_workers_variables

logger = logging.getLogger("trn.daemon.doctor")

GOOD_AGAIN_S = 3600.0  # a report in which nothing is wrong
BAD_AGAIN_S = 120.0  # one with an error in it, or none at all
PATIENCE_S = 120.0  # with an interpreter that does not answer
LOOK_EVERY_S = 5.0  # whether the packages of one changed
CALM_S = 30.0  # before one is asked of whom nothing depends on it: the first half minute belongs to the runs
NICE = 10
MAX_AT_ONCE = 2  # of those that runs wait for, and as many of the others
KILL_PATIENCE_S = 5.0  # a process that hangs in a driver is left to itself


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that the doctor looked at."""

    check: str
    level: str = "ok"
    message: str = ""
    remedy: str = ""
    facts: dict[str, Any] = {}


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """What an interpreter said; `error` where it said nothing. `report` is its own document, kept with runs."""

    python: str
    boot_id: str
    asked_ms: int
    expected: dict[str, int] = {}
    packages_mark: int = 0  # when its packages last changed
    findings: list[Finding] = []
    report: dict[str, Any] = {}
    error: str = ""

    @property
    def document(self) -> dict[str, Any]:
        """As it is kept with a run."""
        return self.report or {"error": self.error}

    @property
    def packages_dir(self) -> str:
        places = [item.facts.get("packages_dir") for item in self.findings if item.check == "interpreter"]
        return str(places[0]) if places and places[0] else ""

    @property
    def is_bad(self) -> bool:
        return bool(self.error) or any(finding.level == "error" for finding in self.findings)


class DoctorReports:
    """The newest report of each interpreter. `run` asks; everything else answers at once, from the loop's thread."""

    def __init__(
        self,
        *,
        home: Home,
        expected: Mapping[str, int],
        environ: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        calm_s: float = CALM_S,
    ) -> None:
        """`expected` is how many GPUs of each kind the daemon has found; `environ` is what workers inherit."""
        self._home, self._expected, self._environ = home, dict(expected), environ
        self._clock, self._now_ms, self._calm_s = clock, now_ms, calm_s
        self._folder = home.root / "doctor"
        self._boot_id = boot_id() or sys.platform
        self._known: dict[str, DoctorReport] = {}
        self._looked: set[str] = set()  # whether the last daemon left a report
        self._asked: dict[str, asyncio.Task[None] | None] = {}  # None: its task is to be made
        self._look_again_at: dict[str, float] = {}
        self._hurried: set[str] = set()
        self._hurry = asyncio.Event()
        self._urgent_slots, self._slots = asyncio.Semaphore(MAX_AT_ONCE), asyncio.Semaphore(MAX_AT_ONCE)
        self._wanted = asyncio.Event()
        self.on_news: list[Callable[[DoctorReport], None]] = []

    def newest(self, python: str, *, is_urgent: bool = False) -> DoctorReport | None:
        """What is known of it, if anything; a new one is asked for where that is missing or old."""
        if python not in self._looked:
            self._looked.add(python)
            self._read_left(python)
        report = self._known.get(python)
        now_s = self._clock()
        if report is None or self._is_old(report) or now_s >= self._look_again_at.get(python, 0.0):
            self._look_again_at[python] = now_s + LOOK_EVERY_S
            self._ask(python, is_urgent=is_urgent)
        return report

    async def run(self) -> None:
        """Ask whoever is to be asked, for ever. Cancelled: those that were asked are ended."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._wanted.wait()
                self._wanted.clear()
                for python in [python for python, task in self._asked.items() if task is None]:
                    self._asked[python] = group.create_task(self._tend(python))

    def _ask(self, python: str, *, is_urgent: bool) -> None:
        if is_urgent and python not in self._hurried:
            self._hurried.add(python)
            self._hurry.set()
        if python not in self._asked:
            self._asked[python] = None
            self._wanted.set()

    async def _tend(self, python: str) -> None:
        try:
            if await self._is_still_true(python):
                return
            await self._be_calm(python)
            async with self._urgent_slots if python in self._hurried else self._slots:
                report = await self._examine(python)
            self._known[python] = report
            if report.error:
                logger.warning("%s: no report of the machine: %s", python, report.error)
            await asyncio.to_thread(self._leave, report)
            for tell in self.on_news:
                tell(report)
        except Exception:
            logger.exception("%s: its report of the machine failed", python)
        finally:
            del self._asked[python]
            self._hurried.discard(python)

    async def _is_still_true(self, python: str) -> bool:
        report = self._known.get(python)
        if report is None or self._is_old(report):
            return False
        return await asyncio.to_thread(_mark, report.packages_dir) == report.packages_mark

    async def _be_calm(self, python: str) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._calm_s):
                while python not in self._hurried:
                    self._hurry.clear()
                    await self._hurry.wait()

    async def _examine(self, python: str) -> DoctorReport:
        asked: dict[str, Any] = {
            "python": python,
            "boot_id": self._boot_id,
            "asked_ms": self._now_ms(),
            "expected": self._expected,
        }
        try:
            async with asyncio.timeout(PATIENCE_S):
                text = await _call(python, self._arguments(), cwd=self._home.root, environ=self._environ)
            document = msgspec.json.decode(text.splitlines()[-1], type=dict[str, Any])
            findings = msgspec.convert(document["findings"], list[Finding])
        except (
            Exception
        ) as fault:  # whatever it is: its runs start as if it were good, and say more themselves
            return DoctorReport(
                **asked, error=f"{python} did not answer: {str(fault) or type(fault).__name__}"
            )
        found = DoctorReport(**asked, findings=findings, report=document)
        mark = await asyncio.to_thread(_mark, found.packages_dir)
        return msgspec.structs.replace(found, packages_mark=mark)

    def _arguments(self) -> list[str]:
        expected = [f"--expect={kind}={count}" for kind, count in self._expected.items()]
        return ["--home", str(self._home.root), "--quick", "--nice", str(NICE), *expected]

    def _is_old(self, report: DoctorReport) -> bool:
        age_ms = self._now_ms() - report.asked_ms
        return not 0 <= age_ms < 1000 * (BAD_AGAIN_S if report.is_bad else GOOD_AGAIN_S)

    def _path(self, python: str) -> Path:
        return self._folder / f"{hashlib.sha256(python.encode()).hexdigest()[:16]}.json"

    def _read_left(self, python: str) -> None:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            report = msgspec.json.decode(self._path(python).read_bytes(), type=DoctorReport)
            is_ours = report.boot_id == self._boot_id and report.expected == self._expected
            if report.python == python and is_ours and not report.error:
                self._known[python] = report

    def _leave(self, report: DoctorReport) -> None:
        with contextlib.suppress(OSError):  # a full disk, say: it is only asked for again
            self._folder.mkdir(mode=0o700, exist_ok=True)
            replace_file(self._path(report.python), msgspec.json.encode(report), sync="none")


async def _call(python: str, arguments: list[str], *, cwd: Path, environ: Mapping[str, str]) -> bytes:
    """What `python -m gen_worker.tools.doctor` prints. Cancelled: it is killed, and whatever it started."""
    process = await asyncio.create_subprocess_exec(
        python,
        *("-P", "-m", "gen_worker.tools.doctor"),
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        cwd=cwd,
        env=without_workers_variables(environ),
        start_new_session=True,
    )
    try:
        text, _ = await process.communicate()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_PATIENCE_S):
                await process.wait()  # also for the end of its output, which another may hold open
        raise
    return text


def _mark(folder: str) -> int:
    """Changes when a package comes or goes: that touches the folder it is in. Blocks, on a network disk for long."""
    try:
        return Path(folder).stat().st_mtime_ns if folder else 0
    except OSError:
        return 0
