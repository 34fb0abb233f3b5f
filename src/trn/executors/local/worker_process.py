"""A worker's processes on this machine: find, watch, signal and end them. Needs no launcher.

Every process of a worker has the run's log as its output, and a mark that names the worker. The attempt's record says
the rest, where it is still there.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from gen_worker.contract.process_identity import (
    GONE,
    ProcessIdentity,
    boot_id,
    list_pids,
    read_fd_target,
    read_process,
)
from gen_worker.launcher.attempt_records import (
    AttemptRecord,
    ForeignRecordError,
    claim,
    read_record,
    record_path,
)
from gen_worker.launcher.process_family import (
    END_PATIENCE_S,
    end_family,
    open_pidfd,
    read_mark,
    send_process_signal,
)
from trn.executors.base import FoundWorker, Worker

logger = logging.getLogger("trn.executor")

OUTPUTS = (1, 2)


def worker_of(identity: ProcessIdentity) -> Worker:
    return Worker(ref=identity.ref, pid=identity.pid)


def take_or_find(attempt_dir: str, number: int, nonce: str) -> ProcessIdentity | None:
    """The process of the attempt; None once the attempt is given up, by us now or by someone before.

    In the place of another submission's record no worker of this one could make its own: then there is none, either.
    """
    path = record_path(attempt_dir, number)
    try:
        record = read_record(path, nonce)
        if record is None:
            given_up = AttemptRecord(nonce=nonce, abandoned=True)
            record = given_up if claim(path, given_up) else read_record(path, nonce)
    except ForeignRecordError as fault:
        logger.warning("%s; this attempt was never started", fault)
        return None
    if record is None or record.abandoned:
        return None
    return ProcessIdentity(boot_id=record.boot_id, pid=record.pid, start_ticks=record.start_ticks)


def send_signal(identity: ProcessIdentity, number: int) -> bool:
    """To that very process; False where it is gone."""
    return send_process_signal(identity.pid, identity.start_ticks, identity.boot_id, number)


@contextlib.contextmanager
def end_alarm(identity: ProcessIdentity, ring: Callable[[], None]) -> Iterator[bool]:
    """While it is entered, `ring` is called in this event loop when the process ends. False: the system has no such
    alarm, and the caller has to look.
    """
    fd = open_pidfd(identity.pid)
    if fd is None:
        yield False
        return
    loop = asyncio.get_running_loop()

    def end() -> None:
        loop.remove_reader(fd)
        ring()

    loop.add_reader(fd, end)
    try:
        yield True
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def end_processes(identity: ProcessIdentity, *, patience_s: float = END_PATIENCE_S) -> list[int]:
    """As `end_family`: the worker and everything it started."""
    return end_family(identity.pid, identity.start_ticks, identity.boot_id, patience_s=patience_s)


def find_workers(runs: Path) -> list[FoundWorker]:
    """Every worker whose run's folder is in `runs`, or some process of it. Blocks for a few milliseconds. Linux only."""
    found: dict[tuple[str, int, int | None], FoundWorker] = {}
    for pid, run_id in _processes_in(runs):
        root = read_mark(pid) or _root_of(pid)
        if root is not None and (run_id, *root) not in found:
            identity = ProcessIdentity(boot_id=boot_id(), pid=root[0], start_ticks=root[1])
            found[run_id, *root] = _with_record(
                FoundWorker(run_id=run_id, worker=worker_of(identity)), runs / run_id
            )
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
            named = ProcessIdentity(boot_id=record.boot_id, pid=record.pid, start_ticks=record.start_ticks)
            if worker_of(named) == worker.worker:
                return FoundWorker(
                    run_id=worker.run_id,
                    worker=worker.worker,
                    number=int(path.stem),
                    nonce=record.nonce,
                    devices=record.devices,
                    cpus=record.cpus,
                    memory_mb=record.memory_mb,
                )
    return worker
