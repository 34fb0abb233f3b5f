"""`environment.json` of a run: the interpreter, packages, machine and code that it was trained with."""

import asyncio
import contextlib
import logging
import platform
import socket
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from gen_worker.contract.files.durable import replace_file
from gen_worker.contract.files.regular import NotRegularFileError, read_regular
from gen_worker.contract.redaction import looks_secret, strip_url_secrets
from trn.core.errors import TrnError
from trn.core.home import Home
from trn.core.runs import RunRecord
from trn.core.snapshots import SnapshotStore
from trn.core.variables import matters
from trn.daemon.machine.devices import Inventory
from trn.daemon.machine.doctor_reports import DoctorReport, DoctorReports
from trn.registry.base import ReadableRegistry

logger = logging.getLogger("trn.daemon.report")

PATCH = "code.patch"
TIMEOUT_S = 20.0
MAX_WITHOUT_DOCTOR = 10_000  # runs that wait for the first report of the doctor
ASK_AGAIN_S = 300.0  # an interpreter that did not answer
PAGE, MAX_PAGES = 200, 50  # of the search for runs with an incomplete report
SEARCH_AFTER_S = 5.0
ENVIRONMENTS = ("VIRTUAL_ENV", "CONDA_PREFIX")

# Runs in that interpreter. Reads torch's version.py: importing torch takes seconds.
QUESTION = """
import importlib.metadata, importlib.util, json, os, platform, runpy, site, sys
if sys.prefix == sys.base_prefix and site.check_enableusersite():
    site.addsitedir(site.getusersitepackages())
packages = {}
for found in importlib.metadata.distributions():
    name = found.metadata["Name"]
    if name:
        packages.setdefault(name, found.version)
torch = None
spec = importlib.util.find_spec("torch")
if spec is not None and spec.origin:
    torch = {"version": packages.get("torch", "")}
    try:
        build = runpy.run_path(os.path.join(os.path.dirname(spec.origin), "version.py"))
        torch.update((name, build.get(key)) for name, key in
                     (("version", "__version__"), ("cuda", "cuda"), ("hip", "hip"), ("git", "git_version"))
                     if build.get(key) is not None)
    except Exception:
        pass
print(json.dumps({
    "executable": sys.executable, "version": platform.python_version(),
    "implementation": platform.python_implementation(), "prefix": sys.prefix,
    "packages": sorted("%s==%s" % item for item in packages.items()),
    "torch": torch, "paths": [path for path in sys.path if os.path.isdir(path)],
}))
"""


class EnvironmentReports:
    """Writes the reports. What an interpreter says is kept until its packages change."""

    def __init__(
        self,
        inventory: Inventory,
        *,
        environ: Mapping[str, str] = MappingProxyType({}),
        doctor: DoctorReports | None = None,
    ) -> None:
        """A report of the doctor that comes later is added to the files written before."""
        self._inventory = inventory
        self._doctor = doctor
        self._without_doctor: dict[
            str, dict[Path, dict[str, bool]]
        ] = {}  # by interpreter: files, more fields
        self._own: set[Path] | None = set()  # written by this daemon; None: `complete` is done
        if doctor is not None:
            doctor.on_news.append(self._add_doctor)
        self._environ = environ
        self._locks: dict[str, threading.Lock] = {}  # a hanging interpreter blocks no other
        self._answers: dict[str, tuple[object, float, dict[str, Any]]] = {}  # (stamp, asked at, answer)
        # Its own thread: a hanging interpreter must not use up the threads that start runs.
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reports")

    def close(self) -> None:
        """Reports that are not written yet are dropped."""
        self._writer.shutdown(wait=False, cancel_futures=True)

    def write_soon(
        self, run: RunRecord, report: Path, *, python: str, store: Path, is_late: bool = False
    ) -> None:
        """Write the run's report in the background; errors are logged. From the loop's thread.

        `is_late`: the run was started by an earlier daemon, and the report says so. An existing report is kept.
        """
        found = self._doctor.newest(python) if self._doctor is not None else None
        doctor = found.document if found is not None else None
        waiting = self._without_doctor.setdefault(python, {})
        late = {"is_late": True} if is_late else {}
        if not is_late and self._own is not None:
            self._own.add(report)
        if self._doctor is not None and found is None and len(waiting) < MAX_WITHOUT_DOCTOR:
            waiting[report] = late

        def write() -> None:
            try:
                if is_late and report.exists():
                    if doctor is not None:
                        add_to_report(report, doctor=doctor, **late)
                    return
                environment = {**self.environment(python), **late, "doctor": doctor}
                write_report(run, report, environment=environment, store=store)
            except Exception:
                logger.exception("run %s: environment.json cannot be written", run.run_id)

        self._writer.submit(write)

    async def complete(
        self,
        home: Home,
        open_registry: Callable[[], ReadableRegistry],
        *,
        python: str,
        after_s: float = SEARCH_AFTER_S,
    ) -> None:
        """Once, shortly after the start: complete the reports that an earlier daemon left missing or without doctor.

        `open_registry` gives a reader for another thread. `python` is for runs that name no interpreter.
        """
        await asyncio.sleep(after_s)
        try:
            found = await asyncio.to_thread(self._find_incomplete, home, open_registry)
        except (OSError, sqlite3.Error, TrnError):
            logger.exception("runs with an incomplete environment.json cannot be searched")
            found = []
        self._own = None
        if found:
            logger.info("%d runs have an incomplete environment.json: it is completed now", len(found))
        for run in found:
            self.write_soon(
                run,
                home.run(run.run_id).report,
                python=run.interpreter or python,
                store=home.snapshots,
                is_late=True,
            )

    def _find_incomplete(self, home: Home, open_registry: Callable[[], ReadableRegistry]) -> list[RunRecord]:
        """Runs started here without a complete report. Newest first; ends after a page in which none is missing."""
        found: list[RunRecord] = []
        own = self._own or set()
        before: tuple[int, str] | None = None
        with contextlib.closing(open_registry()) as reader:
            for _ in range(MAX_PAGES):
                page = reader.page(before=before, limit=PAGE)
                reports = [
                    (run, home.run(run.run_id).report) for run in page if run.attempt and run.needs.is_local
                ]
                missing = [
                    run
                    for run, report in reports
                    if report not in own and report.parent.is_dir() and not is_complete(report)
                ]
                found += missing
                if len(page) < PAGE or not missing:
                    break
                before = (page[-1].submitted_ms, page[-1].run_id)
        return found

    def _add_doctor(self, found: DoctorReport) -> None:
        for report, late in self._without_doctor.pop(found.python, {}).items():
            with contextlib.suppress(RuntimeError):  # closed
                self._writer.submit(add_to_report, report, doctor=found.document, **late)

    def environment(self, python: str) -> dict[str, Any]:
        """What a worker of that interpreter finds. Blocks; from any thread. An error is part of the result."""
        with self._locks.setdefault(python, threading.Lock()):
            answer = self._ask(python)
        apart = ("packages", "torch", "paths")
        devices = [
            {"id": one.device_id, "name": one.name, "memory_mb": one.memory_mb, "uuid": one.uuid}
            for one in self._inventory.devices
        ]
        return {
            "python": {name: value for name, value in answer.items() if name not in apart},
            "packages": answer.get("packages", []),
            "torch": answer.get("torch"),
            "platform": platform.platform(),
            "hostname": socket.gethostname(),
            "cpus": self._inventory.cpus,
            "memory_mb": self._inventory.memory_mb,
            "devices": devices,
            "variables": relevant_variables(self._environ),
        }

    def _ask(self, python: str) -> dict[str, Any]:
        stamp, asked_at, answer = self._answers.get(python, (None, float("-inf"), {}))
        is_recent = time.monotonic() - asked_at < ASK_AGAIN_S
        if stamp == _packages_stamp(answer) if stamp is not None else is_recent:
            return answer
        answer = ask_interpreter(python)
        self._answers[python] = (_packages_stamp(answer), time.monotonic(), answer)
        return answer


def ask_interpreter(python: str) -> dict[str, Any]:
    """What the interpreter says about itself; `error` if it does not answer."""
    answer: dict[str, Any] = {"executable": python}
    try:
        done = subprocess.run(
            [python, "-I", "-c", QUESTION],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=True,
        )
        answer |= msgspec.json.decode(done.stdout.splitlines()[-1], type=dict[str, Any])
    except subprocess.CalledProcessError as fault:
        words = fault.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        answer["error"] = f"it exited with code {fault.returncode}: {words[-1]}"
    except (OSError, subprocess.TimeoutExpired, msgspec.MsgspecError, IndexError) as fault:
        answer["error"] = f"it did not answer: {fault}"
    return answer


def relevant_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that matter for training, without those that look like a secret."""
    return {
        name: strip_url_secrets(value)
        for name, value in sorted(environ.items())
        if (matters(name) or name in ENVIRONMENTS) and not looks_secret(name)
    }


def write_report(run: RunRecord, report: Path, *, environment: Mapping[str, Any], store: Path) -> None:
    """Write the report, and beside it the diff of the code to its commit. Blocks; safe to repeat."""
    code: dict[str, Any] = {"snapshot": run.snapshot, "frozen_from": run.frozen_from}
    patch = b""
    if run.snapshot:
        snapshots = SnapshotStore(store)
        try:
            git = snapshots.manifest(run.snapshot).git
            if git is not None:
                code["git"] = git
                patch = snapshots.object_path(git.diff).read_bytes() if git.diff else b""
        except (TrnError, OSError) as fault:
            code["error"] = f"the origin of the code is not known: {fault}"
    document = {
        "schema_version": "environment.v1",
        "run_id": run.run_id,
        "digest": run.digest,
        "code": code,
        **environment,
    }
    report.parent.mkdir(parents=True, exist_ok=True)
    if patch:
        replace_file(report.with_name(PATCH), patch, sync="none", mode=0o600)
    _write_json(report, document)


def add_to_report(report: Path, **fields: Any) -> None:
    """Set fields of a written report. Blocks; errors are logged."""
    try:
        document = msgspec.json.decode(read_regular(report), type=dict[str, Any])
        _write_json(report, document | fields)
    except FileNotFoundError:
        pass  # the run was removed
    except Exception:
        logger.exception("%s cannot be completed", report)


def is_complete(report: Path) -> bool:
    """Whether it exists and has the report of the doctor. Blocks."""
    try:
        return msgspec.json.decode(read_regular(report), type=dict[str, Any]).get("doctor") is not None
    except FileNotFoundError:
        return False
    except (msgspec.MsgspecError, NotRegularFileError):
        return True  # somebody else changed it; leave it alone


def _write_json(path: Path, document: dict[str, Any]) -> None:
    text = msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"
    replace_file(path, text, sync="none", mode=0o600)


def _packages_stamp(answer: Mapping[str, Any]) -> object:
    """Changes when a package is installed or removed: that touches its folder. None: not known."""
    places = [answer["executable"], *answer.get("paths", [])] if "error" not in answer else []
    stamp = []
    for place in places:
        with contextlib.suppress(OSError):
            stamp.append((place, Path(place).stat().st_mtime_ns))
    return stamp or None
