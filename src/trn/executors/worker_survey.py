"""Which workers of a home live, by the system's list of processes alone.

Every process of a worker has the run's log as its output, and a mark that names the worker. The attempt's record says
the rest, where it is still there.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from gen_worker.contract.process_identity import GONE, boot_id, list_pids, read_fd_target, read_process
from gen_worker.launcher.attempt_records import AttemptRecord
from gen_worker.launcher.process_family import read_mark
from trn.executors.base import FoundWorker, WorkerIdentity

OUTPUTS = (1, 2)


def find_workers(runs: Path) -> list[FoundWorker]:
    """Every worker whose run's folder is in `runs`, or some process of it. Blocks for a few milliseconds. Linux only."""
    found: dict[tuple[str, int, int | None], FoundWorker] = {}
    for pid, run_id in _processes_in(runs):
        root = read_mark(pid) or _root_of(pid)
        if root is not None and (run_id, *root) not in found:
            identity = WorkerIdentity(boot_id=boot_id(), pid=root[0], start_ticks=root[1])
            found[run_id, *root] = _with_record(FoundWorker(run_id=run_id, identity=identity), runs / run_id)
    return list(found.values())


def _processes_in(runs: Path) -> Iterator[tuple[int, str]]:
    """(pid, run) of every living process that writes to the log of a run."""
    prefix = f"{runs}/"
    for pid in list_pids():
        for fd in OUTPUTS:
            with contextlib.suppress(*GONE, PermissionError):
                target = read_fd_target(pid, fd)
                if target.startswith(prefix):
                    yield pid, target.removeprefix(prefix).partition("/")[0]
                    break


def _root_of(pid: int) -> tuple[int, int | None] | None:
    state = read_process(pid)
    return None if state is None or state.is_ended else (pid, state.start_ticks)


def _with_record(worker: FoundWorker, folder: Path) -> FoundWorker:
    """With what the record says of it, whatever its nonce. Of older releases it does not say what the attempt holds."""
    for path in folder.glob("attempts/*.json"):
        if not path.stem.isdigit():
            continue
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            record = msgspec.json.decode(path.read_bytes(), type=AttemptRecord)
            named = WorkerIdentity(boot_id=record.boot_id, pid=record.pid, start_ticks=record.start_ticks)
            if named == worker.identity:
                return FoundWorker(
                    run_id=worker.run_id,
                    identity=worker.identity,
                    number=int(path.stem),
                    nonce=record.nonce,
                    devices=record.devices,
                    cpus=record.cpus,
                    memory_mb=record.memory_mb,
                )
    return worker
