"""Whose a run's folder is. One that another submission left is never believed: it is moved aside, whole.

A restored backup does not know the runs that came after it. Their folders are still there, with records, events and
checkpoints under ids that new runs may be given. Everything in a folder carries the nonce of its submission, so the
registry's nonce tells which one is meant.
"""

import contextlib
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from gen_worker.contract.lease import FILE_NAME as LEASE
from gen_worker.contract.lease import Holder
from gen_worker.contract.process_identity import is_same_process
from gen_worker.launcher.attempt_records import AttemptRecord
from trn.core.errors import UnavailableError
from trn.core.home import Home, RunFolder

MAX_LINE_BYTES = 1 << 20

T = TypeVar("T")


def find_foreign(folder: RunFolder, nonce: str, *, is_first_attempt: bool = False) -> str:
    """Why the folder is not of this submission; empty: it is, or there is none yet. Blocks.

    What cannot be read says nothing: a power cut may have emptied it. Before the first attempt there is no folder.
    """
    is_ours = False
    for what, found in _find_nonces(folder):
        if found != nonce:
            return f"{what} is of another submission"
        is_ours = True
    if is_first_attempt and not is_ours:
        with contextlib.suppress(FileNotFoundError):
            if any(folder.root.iterdir()):
                return "it was there before the run's first attempt"
    return ""


def set_aside(home: Home, run_id: str) -> Path:
    """Move the run's folder out of the way; where it is now. UnavailableError where somebody still works in it. Blocks."""
    folder = home.run(run_id)
    worker = _find_living(folder)
    if worker:
        raise UnavailableError(
            f"{folder.root} is in use by {worker}, a worker of another submission: wait for it to end, or end it"
        )
    home.foreign.mkdir(mode=0o700, exist_ok=True)
    target = home.foreign / f"{run_id}~{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    folder.root.rename(target)
    return target


def _find_nonces(folder: RunFolder) -> Iterator[tuple[str, str]]:
    """(a file, the nonce that it carries)."""
    for path, record in _read_records(folder):
        yield f"{path.parent.name}/{path.name}", record.nonce
    holder = _read_holder(folder)
    if holder is not None:
        yield f"{folder.checkpoints.name}/{LEASE}", holder.nonce
    event = _read(folder.events, _Event)
    if event is not None:
        yield folder.events.name, event.nonce


def _read_records(folder: RunFolder) -> Iterator[tuple[Path, AttemptRecord]]:
    for path in sorted(folder.attempts.glob("*.json")):
        if path.stem.isdigit():
            record = _read(path, AttemptRecord)
            if record is not None:
                yield path, record


def _read_holder(folder: RunFolder) -> Holder | None:
    return _read(folder.checkpoints / LEASE, Holder)


class _Event(msgspec.Struct):
    seq: int
    nonce: str = ""


def _read(path: Path, kind: type[T]) -> T | None:
    """The first line of a file as such a record; None where it is none, or no regular file."""
    with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                return msgspec.json.decode(os.pread(fd, MAX_LINE_BYTES, 0).partition(b"\n")[0], type=kind)
        finally:
            os.close(fd)
    return None


def _find_living(folder: RunFolder) -> str:
    """The live process in the folder, by its records and its lease; empty: none."""
    for _, record in _read_records(folder):
        if is_same_process(record.pid, record.start_ticks, record.boot_id):
            return f"process {record.pid}"
    try:
        fd = os.open(folder.checkpoints / LEASE, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = _read_holder(folder)
        return "a process" if holder is None else f"process {holder.pid}"
    finally:
        os.close(fd)
    return ""
