"""How many CPUs and how much memory this process may use: those of the machine, or the limits of its cgroup."""

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number about this large


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    cpus: float | None = None
    memory_bytes: int | None = None


def read_cpus(own: Path = OWN_CGROUP, root: Path = CGROUPS) -> int:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = read_limits(own, root).cpus
    return count if quota is None else max(1, min(count, int(quota)))


def read_memory_mb(own: Path = OWN_CGROUP, root: Path = CGROUPS) -> int:
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = read_limits(own, root).memory_bytes
    return (physical if limit is None else min(physical, limit)) >> 20


def read_limits(own: Path, root: Path) -> Limits:
    """The lowest limits of a cgroup and its parents. None: no limit."""
    try:
        text = own.read_text()
    except OSError:
        return Limits()
    cpus: list[float] = []
    memory: list[int] = []
    for line in text.splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            for folder in _upwards(root, path):
                cpus += parse_cpu_max(_read(folder / "cpu.max"))
                memory += _number(_read(folder / "memory.max"))
        for controller in {"cpu", "memory"} & set(controllers.split(",")):
            for folder in _upwards(root / controller, path):
                if controller == "memory":
                    memory += _number(_read(folder / "memory.limit_in_bytes"))
                else:
                    quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
                    cpus += parse_cpu_max(f"{quota} {period}")
    return Limits(cpus=min(cpus, default=None), memory_bytes=min(memory, default=None))


def parse_cpu_max(text: str) -> list[float]:
    """`quota period` in microseconds as CPUs; empty if the quota is `max` or -1."""
    words = text.split()
    if len(words) != 2 or not all(word.isdigit() and int(word) for word in words):
        return []
    return [int(words[0]) / int(words[1])]


def _number(text: str) -> list[int]:
    return [int(text)] if text.isdigit() and int(text) < UNLIMITED else []


def _upwards(root: Path, path: str) -> list[Path]:
    """Its folder and all parents. In a container the path may be the host's: then only the root exists."""
    inner = PurePosixPath(path.lstrip("/"))
    return [root / inner, *(root / parent for parent in inner.parents)]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
