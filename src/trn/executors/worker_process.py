"""A worker's processes on this machine, by identity: watch, signal and end them. Needs no launcher."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterator

from gen_worker.contract.process_identity import is_same_process
from gen_worker.launcher.attempt_records import (
    AttemptRecord,
    ForeignRecordError,
    claim,
    read_record,
    record_path,
)
from gen_worker.launcher.process_family import END_PATIENCE_S, end_family, open_pidfd, send_process_signal
from trn.executors.base import WorkerIdentity

logger = logging.getLogger("trn.executor")


def is_alive(identity: WorkerIdentity) -> bool:
    return is_same_process(identity.pid, identity.start_ticks, identity.boot_id)


def take_or_find(attempt_dir: str, number: int, nonce: str) -> WorkerIdentity | None:
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
    return WorkerIdentity(boot_id=record.boot_id, pid=record.pid, start_ticks=record.start_ticks)


def send_signal(identity: WorkerIdentity, number: int) -> bool:
    """To that very process; False where it is gone."""
    return send_process_signal(identity.pid, identity.start_ticks, identity.boot_id, number)


@contextlib.contextmanager
def end_alarm(identity: WorkerIdentity, ring: Callable[[], None]) -> Iterator[bool]:
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


def end_processes(identity: WorkerIdentity, *, patience_s: float = END_PATIENCE_S) -> list[int]:
    """As `end_family`: the worker and everything it started."""
    return end_family(identity.pid, identity.start_ticks, identity.boot_id, patience_s=patience_s)
