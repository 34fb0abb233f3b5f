"""How much memory a further model may take: what the machine has available, or what the control group leaves."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from gen_worker.contract.checkpoints.choice import CheckpointInfo

MEMORY = Path("/proc/meminfo")
OWN_CGROUP = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")
BESIDE_WEIGHTS = 64 << 20  # of a template and its workers: what they write to


def estimate_need(info: CheckpointInfo) -> int:
    """Bytes. While it is loaded, a model has its fresh parameters and those of the checkpoint."""
    return 2 * info.size_bytes + BESIDE_WEIGHTS


def find_shortage(info: CheckpointInfo) -> str:
    """Why that model is too large to be loaded beside the served one; empty where it may fit."""
    needed, available = estimate_need(info), read_available()
    if available is None or needed <= available:
        return ""
    return f"it needs about {needed >> 20} MB beside the served version, {available >> 20} MB are available"


def read_available(
    memory: Path = MEMORY, own_cgroup: Path = OWN_CGROUP, cgroups: Path = CGROUPS
) -> int | None:
    """Bytes; None where the system does not say."""
    found = [*_of_machine(memory), *_of_cgroups(own_cgroup, cgroups)]
    return max(min(found), 0) if found else None


def _of_machine(path: Path) -> Iterator[int]:
    for line in _read(path).splitlines():
        name, _, value = line.partition(":")
        number = value.removesuffix("kB").strip()
        if name == "MemAvailable" and number.isdigit():
            yield int(number) << 10


def _of_cgroups(own: Path, root: Path) -> Iterator[int]:
    """What each limit leaves. Pages of files can be given back, and count as free."""
    for line in _read(own).splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            yield from _left(root, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _left(root / "memory", path, *names)


def _left(root: Path, path: str, limit_name: str, used_name: str, files_name: str) -> Iterator[int]:
    inner = PurePosixPath(path.lstrip("/"))
    for folder in (root / inner, *(root / parent for parent in inner.parents)):
        limit, used = _read(folder / limit_name).strip(), _read(folder / used_name).strip()
        if limit.isdigit() and used.isdigit():
            stat = dict(
                line.split(None, 1) for line in _read(folder / "memory.stat").splitlines() if " " in line
            )
            yield int(limit) - int(used) + int(stat.get(files_name, "0"))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
