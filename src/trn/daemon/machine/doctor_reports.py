"""Reports of `trn doctor` for each interpreter that runs use: made in a subprocess, kept for a while.

A report says what torch of that interpreter can do on this machine. It is valid for one boot, and until the packages of
the interpreter change. It is kept in the home for the next daemon.
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

from gen_worker.contract.files.durable import replace_file
from gen_worker.contract.process_identity import boot_id
from trn.core.home import Home
from trn.core.variables import without_workers_variables

logger = logging.getLogger("trn.daemon.doctor")

MAX_AGE_S = 3600.0  # of a report without errors
MAX_BAD_AGE_S = 120.0  # of a report with an error, or of no answer
TIMEOUT_S = 120.0  # of the doctor
LOOK_EVERY_S = 5.0  # for changed packages
DELAY_S = 30.0  # before a report is made that no run waits for: the start of the daemon belongs to the runs
NICE = 10
MAX_AT_ONCE = 2  # of the reports that runs wait for, and of the others
KILL_PATIENCE_S = 5.0  # a process that hangs in a driver is abandoned


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One check of the doctor."""

    check: str
    level: str = "ok"
    message: str = ""
    remedy: str = ""
    facts: dict[str, Any] = {}


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """The findings for an interpreter; `error` if it did not answer. `report` is the doctor's own document."""

    python: str
    boot_id: str
    asked_ms: int
    expected: dict[str, int] = {}
    packages_mark: int = 0  # when its packages changed last
    findings: list[Finding] = []
    report: dict[str, Any] = {}
    error: str = ""

    @property
    def document(self) -> dict[str, Any]:
        """For the `environment.json` of a run."""
        return self.report or {"error": self.error}

    @property
    def packages_dir(self) -> str:
        places = [item.facts.get("packages_dir") for item in self.findings if item.check == "interpreter"]
        return str(places[0]) if places and places[0] else ""

    @property
    def is_bad(self) -> bool:
        return bool(self.error) or any(finding.level == "error" for finding in self.findings)


class DoctorReports:
    """The newest report of each interpreter. `run` makes them; all other calls return at once. From the loop's thread."""

    def __init__(
        self,
        *,
        home: Home,
        expected: Mapping[str, int],
        environ: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        delay_s: float = DELAY_S,
    ) -> None:
        """`expected`: the number of GPUs of each kind that the daemon found; `environ`: what workers inherit."""
        self._home, self._expected, self._environ = home, dict(expected), environ
        self._clock, self._now_ms, self._delay_s = clock, now_ms, delay_s
        self._folder = home.root / "doctor"
        self._boot_id = boot_id() or sys.platform
        self._known: dict[str, DoctorReport] = {}
        self._looked: set[str] = set()  # for a report of the last daemon
        self._requests: dict[str, asyncio.Event] = {}  # set: a run waits for it
        self._queue: asyncio.Queue[str] = asyncio.Queue()
        self._look_again_at: dict[str, float] = {}
        self._urgent_slots, self._slots = asyncio.Semaphore(MAX_AT_ONCE), asyncio.Semaphore(MAX_AT_ONCE)
        self.on_news: list[Callable[[DoctorReport], None]] = []

    def newest(self, python: str, *, is_urgent: bool = False) -> DoctorReport | None:
        """The known report, if any. A missing or old one is requested."""
        if python not in self._looked:
            self._looked.add(python)
            self._read_saved(python)
        report = self._known.get(python)
        now_s = self._clock()
        if report is None or self._is_old(report) or now_s >= self._look_again_at.get(python, 0.0):
            self._look_again_at[python] = now_s + LOOK_EVERY_S
            self._ask(python, is_urgent=is_urgent)
        return report

    async def run(self) -> None:
        """Make the requested reports, until cancelled; then their processes are killed."""
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._make(await self._queue.get()))

    def _ask(self, python: str, *, is_urgent: bool) -> None:
        if python not in self._requests:
            self._requests[python] = asyncio.Event()
            self._queue.put_nowait(python)
        if is_urgent:
            self._requests[python].set()

    async def _make(self, python: str) -> None:
        urgent = self._requests[python]
        try:
            if await self._is_valid(python):
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._delay_s):
                    await urgent.wait()
            async with self._urgent_slots if urgent.is_set() else self._slots:
                report = await self._examine(python)
            self._known[python] = report
            if report.error:
                logger.warning("%s: no doctor report: %s", python, report.error)
            await asyncio.to_thread(self._save, report)
            for tell in self.on_news:
                tell(report)
        except Exception:
            logger.exception("%s: the doctor report failed", python)
        finally:
            del self._requests[python]

    async def _is_valid(self, python: str) -> bool:
        report = self._known.get(python)
        if report is None or self._is_old(report):
            return False
        return await asyncio.to_thread(_mark, report.packages_dir) == report.packages_mark

    async def _examine(self, python: str) -> DoctorReport:
        asked: dict[str, Any] = {
            "python": python,
            "boot_id": self._boot_id,
            "asked_ms": self._now_ms(),
            "expected": self._expected,
        }
        try:
            async with asyncio.timeout(TIMEOUT_S):
                text = await _call(python, self._arguments(), cwd=self._home.root, environ=self._environ)
            document = msgspec.json.decode(text.splitlines()[-1], type=dict[str, Any])
            findings = msgspec.convert(document["findings"], list[Finding])
        except Exception as fault:  # its runs start anyway, and report more themselves
            reason = str(fault) or type(fault).__name__
            return DoctorReport(**asked, error=f"{python} did not answer: {reason}")
        found = DoctorReport(**asked, findings=findings, report=document)
        mark = await asyncio.to_thread(_mark, found.packages_dir)
        return msgspec.structs.replace(found, packages_mark=mark)

    def _arguments(self) -> list[str]:
        expected = [f"--expect={kind}={count}" for kind, count in self._expected.items()]
        return ["--home", str(self._home.root), "--quick", "--nice", str(NICE), *expected]

    def _is_old(self, report: DoctorReport) -> bool:
        age_ms = self._now_ms() - report.asked_ms
        return not 0 <= age_ms < 1000 * (MAX_BAD_AGE_S if report.is_bad else MAX_AGE_S)

    def _path(self, python: str) -> Path:
        return self._folder / f"{hashlib.sha256(python.encode()).hexdigest()[:16]}.json"

    def _read_saved(self, python: str) -> None:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            report = msgspec.json.decode(self._path(python).read_bytes(), type=DoctorReport)
            is_ours = report.boot_id == self._boot_id and report.expected == self._expected
            if report.python == python and is_ours and not report.error:
                self._known[python] = report

    def _save(self, report: DoctorReport) -> None:
        with contextlib.suppress(OSError):  # a full disk, for example: the next daemon asks again
            self._folder.mkdir(mode=0o700, exist_ok=True)
            replace_file(self._path(report.python), msgspec.json.encode(report), sync="none")


async def _call(python: str, arguments: list[str], *, cwd: Path, environ: Mapping[str, str]) -> bytes:
    """The output of `python -m gen_worker.tools.doctor`. Cancelled: it and its children are killed."""
    starting = asyncio.create_task(
        asyncio.create_subprocess_exec(
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
    )
    try:
        # Shielded: a start that is cancelled half way would leave the children of the process.
        process = await asyncio.shield(starting)
        text, _ = await process.communicate()
    except BaseException:
        process = await starting
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_PATIENCE_S):
                await process.wait()  # also waits for its output, which another process may hold open
        raise
    return text


def _mark(folder: str) -> int:
    """Changes when a package is installed or removed: that touches its folder. Blocks, long on a network disk."""
    try:
        return Path(folder).stat().st_mtime_ns if folder else 0
    except OSError:
        return 0
