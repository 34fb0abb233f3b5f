"""The files of one attempt: `<n>.json` names its process, `<n>.exit.json` says how that process ended.

`<n>.json` decides who owns the attempt. The worker creates it before it does anything else; who gives an attempt up
creates it too. Creating it fails where it exists, so only one of them can. The exit file is written before the process
is reaped: a process that is gone without that file ended while no launcher was running.
"""

from pathlib import Path

import msgspec

from gen_worker.contract.files.durable import create_file, replace_file
from gen_worker.contract.files.regular import NotRegularFileError, read_regular

MAX_RECORD_BYTES = 1 << 20


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`<n>.json`: the one process of an attempt, or that there is none and will never be.

    `nonce` is the submission's: a record with another one belongs to another run. Empty: from before nonces existed.
    """

    nonce: str = ""
    boot_id: str = ""
    pid: int = 0
    start_ticks: int | None = None
    log_offset: int | None = None  # of the run's log, where the output of this attempt begins
    abandoned: bool = False
    # What the attempt holds, for a daemon whose registry does not know it.
    devices: tuple[str, ...] = ()
    cpus: int = 1
    memory_mb: int = 0


class ExitRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`<n>.exit.json`: how that process ended; a negative code is the signal that killed it."""

    exit_code: int | None
    is_out_of_memory: bool = False
    detail: str = ""
    nonce: str = ""


class ForeignRecordError(Exception):
    """The record in the attempt's place belongs to another submission."""

    def __init__(self, path: Path, record: AttemptRecord) -> None:
        super().__init__(f"{path} belongs to another submission (process {record.pid})")


def record_path(attempt_dir: str, number: int) -> Path:
    return Path(attempt_dir) / f"{number}.json"


def exit_path(attempt_dir: str, number: int) -> Path:
    return Path(attempt_dir) / f"{number}.exit.json"


def claim(path: Path, record: AttemptRecord) -> bool:
    """Create the attempt's record; False where it exists already. OSError: the disk refuses, so it is not known."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return create_file(path, msgspec.json.encode(record))


def read_record(path: Path, nonce: str) -> AttemptRecord | None:
    """None where there is none. A damaged record reads as one whose process is of another boot. ForeignRecordError."""
    try:
        record = msgspec.json.decode(read_regular(path, MAX_RECORD_BYTES), type=AttemptRecord)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, NotRegularFileError):
        return AttemptRecord(nonce=nonce)
    if record.nonce != nonce:
        raise ForeignRecordError(path, record)
    return record


def write_exit(path: Path, record: ExitRecord) -> None:
    replace_file(path, msgspec.json.encode(record), sync="file", mode=0o600)


def read_exit(path: Path, nonce: str) -> ExitRecord | None:
    """None where there is none, or only that of another submission."""
    try:
        record = msgspec.json.decode(read_regular(path, MAX_RECORD_BYTES), type=ExitRecord)
    except (FileNotFoundError, msgspec.MsgspecError, NotRegularFileError):
        return None
    return record if record.nonce == nonce else None
