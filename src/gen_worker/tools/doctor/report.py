"""`python -m gen_worker.tools.doctor --home DIR`: what this machine can do, as one JSON object on stdout.

Each finding has a level and, where it is not ok, a remedy. `is_ready`: no finding is an error; the exit code is then 0,
else 1. It imports torch if it is installed: nothing else shows whether a GPU works.
"""

import argparse
import contextlib
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from gen_worker.contract.sizes import show_bytes
from gen_worker.tools.doctor.finding import Finding, Level
from gen_worker.tools.doctor.torch_tests import NO_DEVICES, check_torch

VERSION = "machine_report.v1"
MIN_PYTHON = (3, 11)
MIN_SHM_BYTES = 1 << 30  # data loaders with worker processes need it
MIN_FREE_BYTES, LOW_FREE_BYTES = 1 << 30, 20 << 30
PROBE_BYTES = 16 << 20
SLOW_BYTES_PER_S = 30e6
MIN_OPEN_FILES, MIN_PROCESSES = 1024, 1024
MIN_LOCKED_BYTES = 64 << 20
MAX_SKEW_S = 2.0


class MachineReport(msgspec.Struct, frozen=True, kw_only=True):
    schema_version: str = VERSION
    created_ms: int
    host: str
    system: str
    is_ready: bool
    findings: list[Finding]


def make_report(
    home: Path, *, expected: Mapping[str, int] = NO_DEVICES, is_quick: bool = False
) -> MachineReport:
    """Run all checks. Blocks for the import of torch and a write of 16 MB (`is_quick`: no write). Raises nothing."""
    findings: list[Finding] = []
    checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "interpreter": check_interpreter,
        "packages": check_packages,
        "torch": lambda: check_torch(expected),
        "processors": check_processors,
        "shared-memory": check_shared_memory,
        "disk": lambda: check_disk(home, is_timed=not is_quick),
        "limits": check_limits,
        "clock": lambda: check_clock(home),
    }
    for name, check in checks.items():
        try:
            findings += check()
        except Exception as error:  # one failed check must not hide the others
            findings.append(
                Finding(
                    check=name,
                    level=Level.WARNING,
                    message=f"the check failed: {type(error).__name__}: {error}",
                    remedy="report this as a bug of trn",
                )
            )
    return MachineReport(
        created_ms=time.time_ns() // 1_000_000,
        host=socket.gethostname(),
        system=platform.platform(),
        is_ready=all(finding.level is not Level.ERROR for finding in findings),
        findings=findings,
    )


def check_interpreter() -> Iterator[Finding]:
    facts = {
        "version": platform.python_version(),
        "executable": sys.executable,
        "prefix": sys.prefix,
        "packages_dir": sysconfig.get_paths()["purelib"],
    }
    words = f"{platform.python_implementation()} {facts['version']} at {sys.executable}"
    is_old = sys.version_info < MIN_PYTHON
    remedy = "install Python 3.11 or newer"
    yield Finding.judge("interpreter", words, facts, is_bad=is_old, level=Level.ERROR, remedy=remedy)


def check_packages(distribution: str = "trn") -> Iterator[Finding]:
    """The requirements of the distribution, against the installed versions."""
    from packaging.requirements import Requirement

    try:
        texts = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            check="packages",
            level=Level.ERROR,
            message=f"the distribution {distribution} is not installed for {sys.executable}",
            remedy=f"run `{sys.executable} -m pip install {distribution}`",
        )
        return
    versions: dict[str, str | None] = {}
    faults: list[str] = []
    for requirement in map(Requirement, texts):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            versions[requirement.name] = None
            faults.append(f"{requirement.name} is missing")
            continue
        versions[requirement.name] = found
        if not requirement.specifier.contains(found, prereleases=True):
            faults.append(f"{requirement.name} is {found}, expected {requirement.specifier}")
    message = "; ".join(faults) or f"all {len(versions)} requirements of {distribution} are installed"
    remedy = f"run `{sys.executable} -m pip install --upgrade {distribution}`"
    facts = {"versions": versions}
    yield Finding.judge("packages", message, facts, is_bad=bool(faults), level=Level.ERROR, remedy=remedy)


def check_processors() -> Iterator[Finding]:
    """Processors and memory of this process, within the limits of its container."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0]
    yield Finding.judge(
        "processors",
        f"{cpus} processors, load {load:.1f}",
        {"num_cpus": cpus, "load": load},
        is_bad=load > 2 * cpus,
        remedy="find the busy processes with `top`: runs will share the processors with them",
    )
    values = dict(re.findall(r"(\w+):\s+(\d+) kB", _read_text("/proc/meminfo")))
    if "MemTotal" not in values:
        return
    total, free = int(values["MemTotal"]) << 10, int(values.get("MemAvailable", 0)) << 10
    limit = _read_text("/sys/fs/cgroup/memory.max").strip()
    if limit.isdigit() and int(limit) < total:
        used = _read_text("/sys/fs/cgroup/memory.current").strip()
        total, free = int(limit), min(free, max(0, int(limit) - int(used or 0)))
    yield Finding.judge(
        "memory",
        f"{show_bytes(free)} of {show_bytes(total)} free",
        {"total_bytes": total, "free_bytes": free},
        is_bad=free < 1 << 30,
        remedy="free some memory: a worker with torch needs 500 MB before it trains",
    )


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Iterator[Finding]:  # noqa: S108
    if not folder.is_dir():
        yield Finding(
            check="shared-memory",
            level=Level.NOTE,
            message=f"{folder} does not exist",
            remedy=f"mount a tmpfs at {folder} if you use a data loader with worker processes",
            facts={"size_bytes": 0},
        )
        return
    usage = shutil.disk_usage(folder)
    yield Finding.judge(
        "shared-memory",
        f"{folder} has {show_bytes(usage.free)} of {show_bytes(usage.total)} free",
        {"size_bytes": usage.total, "free_bytes": usage.free},
        is_bad=usage.total < MIN_SHM_BYTES,
        remedy="start the container with `--shm-size=8g` (or `--ipc=host`)",
    )


def check_disk(home: Path, *, is_timed: bool = True) -> Iterator[Finding]:
    """Free space and write speed at the home, or at its nearest existing parent."""
    place = _existing(home)
    usage = shutil.disk_usage(place)
    yield Finding.judge(
        "disk",
        f"{show_bytes(usage.free)} of {show_bytes(usage.total)} free at {place}",
        {"path": str(place), "size_bytes": usage.total, "free_bytes": usage.free},
        is_bad=usage.free < LOW_FREE_BYTES,
        level=Level.ERROR if usage.free < MIN_FREE_BYTES else Level.WARNING,
        remedy="free some space, or set TRN_HOME to a larger disk",
    )
    if not is_timed or usage.free < 2 * PROBE_BYTES:
        return
    try:
        duration_s = _time_write(place)
    except OSError as error:
        yield Finding(
            check="disk-speed",
            level=Level.ERROR,
            message=f"{place} cannot be written: {error.strerror or error}",
            remedy="change its permissions, or set TRN_HOME to another folder",
        )
        return
    speed = PROBE_BYTES / duration_s
    yield Finding.judge(
        "disk-speed",
        f"{show_bytes(speed)}/s written and synced at {place}",
        {"bytes_per_s": round(speed), "probe_bytes": PROBE_BYTES, "duration_s": round(duration_s, 4)},
        is_bad=speed < SLOW_BYTES_PER_S,
        remedy="checkpoints will be slow: set TRN_HOME to a faster disk",
    )


def _time_write(folder: Path) -> float:
    chunk = os.urandom(1 << 20)
    with tempfile.TemporaryFile(dir=folder, prefix=".trn-probe-") as file:
        began = time.perf_counter()
        for _ in range(PROBE_BYTES // len(chunk)):
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
        return max(time.perf_counter() - began, 1e-9)


def check_limits() -> Iterator[Finding]:
    for name, which, least, option, show in (
        ("open-files", resource.RLIMIT_NOFILE, MIN_OPEN_FILES, "-n", "{} files".format),
        ("processes", resource.RLIMIT_NPROC, MIN_PROCESSES, "-u", "{} processes".format),
        ("locked-memory", resource.RLIMIT_MEMLOCK, MIN_LOCKED_BYTES, "-l", show_bytes),
    ):
        soft, hard = resource.getrlimit(which)
        is_low = soft != resource.RLIM_INFINITY and soft < least
        words = f"limit {show(soft)}" + (f", expected {show(least)}" if is_low else "")
        yield Finding.judge(
            name,
            "no limit" if soft == resource.RLIM_INFINITY else words,
            {"soft": _limit(soft), "hard": _limit(hard)},
            is_bad=is_low,
            # Only pinned buffers of GPUs and fast networks need locked memory.
            level=Level.NOTE if name == "locked-memory" else Level.WARNING,
            remedy=f"raise it: `ulimit {option} {least >> 10 if option == '-l' else least}`",
        )


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def check_clock(home: Path) -> Iterator[Finding]:
    """Compares the clock with our own files and with the disk, which may be of another machine."""
    faults: list[str] = []
    now_s = time.time()
    own_s = Path(__file__).stat().st_mtime
    if now_s < own_s - 86_400:
        faults.append(f"the clock says {time.strftime('%Y-%m-%d', time.gmtime(now_s))}, which is in the past")
    skew_s = 0.0
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=_existing(home)) as file:
        before_s = time.time()
        file.write(b"1")
        file.flush()
        stamp_s = os.fstat(file.fileno()).st_mtime
        skew_s = 0.0 if before_s - 0.1 <= stamp_s <= time.time() + 0.1 else stamp_s - before_s
        if abs(skew_s) > MAX_SKEW_S:
            faults.append(f"the clock of the home's disk differs by {skew_s:.1f} s")
    yield Finding.judge(
        "clock",
        "; ".join(faults) or f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime(now_s))}",
        {"time_ms": int(now_s * 1000), "disk_skew_s": round(skew_s, 3)},
        is_bad=bool(faults),
        remedy="set the clocks by NTP",
    )


def _existing(path: Path) -> Path:
    """The folder, or its nearest existing parent."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.is_dir())


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m gen_worker.tools.doctor", description="What this machine can do, as JSON."
    )
    parser.add_argument("--home", type=Path, default=Path.cwd(), help="where runs will be kept (here)")
    parser.add_argument("--quick", action="store_true", help="do not measure the disk")
    parser.add_argument("--nice", type=int, default=0, metavar="N", help="lower the priority")
    parser.add_argument(
        "--expect",
        action="append",
        default=[],
        metavar="KIND=N",
        help="GPUs that the daemon found: cuda=2, rocm=1",
    )
    asked = parser.parse_args(arguments)
    if asked.nice:
        os.nice(asked.nice)
    expected = {kind: int(count) for kind, _, count in (text.partition("=") for text in asked.expect)}
    report = make_report(asked.home, expected=expected, is_quick=asked.quick)
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    sys.stdout.buffer.flush()
    return 0 if report.is_ready else 1
