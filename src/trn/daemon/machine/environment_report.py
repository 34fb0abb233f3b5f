"""What a run trained with: interpreter, packages, machine, code. Kept with every run."""

import contextlib
import logging
import platform
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from gen_worker.contract.durable_files import replace_file
from gen_worker.contract.redaction import looks_secret, strip_url_secrets
from gen_worker.contract.regular_files import NotRegularFileError, read_regular
from trn.core.errors import TrnError
from trn.core.runs import RunRecord
from trn.core.snapshots import SnapshotStore
from trn.core.training_variables import matters
from trn.daemon.machine.devices import Inventory
from trn.daemon.machine.doctor_reports import DoctorReport, DoctorReports

logger = logging.getLogger("trn.daemon.report")

PATCH = "code.patch"
TIMEOUT_S = 20.0
MAX_WITHOUT_DOCTOR = 10_000  # runs that wait for a first word of the doctor
ASK_AGAIN_S = 300.0  # an interpreter that did not answer
ENVIRONMENTS = ("VIRTUAL_ENV", "CONDA_PREFIX")

# Runs in the interpreter that is asked about. Reads torch's own note of its build; importing torch takes seconds.
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
    """One report for each interpreter, made when it is first asked for and again when its packages change."""

    def __init__(
        self,
        inventory: Inventory,
        *,
        environ: Mapping[str, str] = MappingProxyType({}),
        doctor: DoctorReports | None = None,
    ) -> None:
        """`doctor` says what the machine can do; what it says later is added to what was written before."""
        self._inventory = inventory
        self._doctor = doctor
        self._without_doctor: dict[str, dict[Path, dict[str, bool]]] = {}  # what else to say of each
        self._own: set[Path] | None = set()  # until it is known what daemons before us left
        if doctor is not None:
            doctor.on_news.append(self._add_doctor)
        self._environ = environ
        self._locks: dict[str, threading.Lock] = {}  # one that hangs holds up nobody else
        self._known: dict[str, tuple[object, dict[str, Any]]] = {}
        self._silent: dict[str, tuple[float, dict[str, Any]]] = {}
        # A thread of its own: an interpreter that hangs must not take those that runs are started with.
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reports")

    def close(self) -> None:
        """What is not written yet stays so."""
        self._writer.shutdown(wait=False, cancel_futures=True)

    def is_own(self, report: Path) -> bool:
        """Whether it was asked for here, since the start. From any thread."""
        return self._own is not None and report in self._own

    def forget_own(self) -> None:
        self._own = None

    def write_soon(self, run: RunRecord, report: Path, *, python: str, store: Path) -> None:
        """Write the run's report when there is time for it. A fault is logged. From the loop's thread."""
        if self._own is not None:
            self._own.add(report)
        self._write_soon(run, report, python=python, store=store)

    def write_late(self, run: RunRecord, report: Path, *, python: str, store: Path) -> None:
        """The same for a run of a daemon before us: what is written says so. What it wrote itself is kept."""
        self._write_soon(run, report, python=python, store=store, is_late=True)

    def _write_soon(
        self, run: RunRecord, report: Path, *, python: str, store: Path, is_late: bool = False
    ) -> None:
        found = self._doctor.newest(python) if self._doctor is not None else None
        doctor = found.document if found is not None else None
        waiting = self._without_doctor.setdefault(python, {})
        late = {"is_late": True} if is_late else {}
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
                logger.exception("run %s: what it trains with could not be written down", run.run_id)

        self._writer.submit(write)

    def _add_doctor(self, found: DoctorReport) -> None:
        for report, late in self._without_doctor.pop(found.python, {}).items():
            with contextlib.suppress(RuntimeError):  # we are closed
                self._writer.submit(add_to_report, report, doctor=found.document, **late)

    def environment(self, python: str) -> dict[str, Any]:
        """What a worker of that interpreter finds. Blocks; from any thread. A fault is told in it, not raised."""
        with self._locks.setdefault(python, threading.Lock()):
            answer = self._ask(python)
        return {
            "python": {
                name: value for name, value in answer.items() if name not in ("packages", "torch", "paths")
            },
            "packages": answer.get("packages", []),
            "torch": answer.get("torch"),
            "platform": platform.platform(),
            "hostname": socket.gethostname(),
            "cpus": self._inventory.cpus,
            "memory_mb": self._inventory.memory_mb,
            "devices": [
                {
                    "id": device.device_id,
                    "name": device.name,
                    "memory_mb": device.memory_mb,
                    "uuid": device.uuid,
                }
                for device in self._inventory.devices
            ],
            "variables": telling_variables(self._environ),
        }

    def _ask(self, python: str) -> dict[str, Any]:
        mark, answer = self._known.get(python, (None, {}))
        if mark is not None and mark == _mark(answer):
            return answer
        since, answer = self._silent.get(python, (float("-inf"), {}))
        if time.monotonic() - since < ASK_AGAIN_S:
            return answer
        answer = ask_interpreter(python)
        mark = _mark(answer)
        if mark is None:
            self._silent[python] = (time.monotonic(), answer)
        else:
            self._known[python] = (mark, answer)
        return answer


def ask_interpreter(python: str) -> dict[str, Any]:
    """What that interpreter says of itself; `error` where it says nothing."""
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
        words = fault.stderr.decode(errors="replace").strip().splitlines()
        answer["error"] = (
            f"it ended with exit code {fault.returncode}: {words[-1] if words else 'without a word'}"
        )
    except (OSError, subprocess.TimeoutExpired, msgspec.MsgspecError, IndexError) as fault:
        answer["error"] = f"it did not answer: {fault}"
    return answer


def telling_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Those that matter for a training, without anything that looks like a secret."""
    return {
        name: strip_url_secrets(value)
        for name, value in sorted(environ.items())
        if (matters(name) or name in ENVIRONMENTS) and not looks_secret(name)
    }


def write_report(run: RunRecord, report: Path, *, environment: Mapping[str, Any], store: Path) -> None:
    """Write the run's report, and beside it the patch that its code is to its commit. Blocks; safe to repeat."""
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
            code["error"] = f"where the code came from is not known: {fault}"
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
    replace_file(
        report, msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n", sync="none", mode=0o600
    )


def add_to_report(report: Path, **fields: Any) -> None:
    """Set fields of a report that was written. Blocks; a fault is logged."""
    try:
        document = msgspec.json.decode(read_regular(report), type=dict[str, Any])
        replace_file(
            report,
            msgspec.json.format(msgspec.json.encode(document | fields), indent=2) + b"\n",
            sync="none",
            mode=0o600,
        )
    except FileNotFoundError:
        pass  # the run was removed meanwhile
    except Exception:
        logger.exception("%s could not be completed", report)


def is_whole(report: Path) -> bool:
    """Whether it is there, and has the doctor's. Blocks."""
    try:
        return msgspec.json.decode(read_regular(report), type=dict[str, Any]).get("doctor") is not None
    except FileNotFoundError:
        return False
    except (msgspec.MsgspecError, NotRegularFileError):
        return True  # somebody else's hand: it is not ours to change


def _mark(answer: Mapping[str, Any]) -> object:
    """Changes when a package comes or goes: that touches the folder it is in. None: ask again."""
    places = [answer["executable"], *answer.get("paths", [])] if "error" not in answer else []
    mark = []
    for place in places:
        with contextlib.suppress(OSError):
            mark.append((place, Path(place).stat().st_mtime_ns))
    return mark or None
