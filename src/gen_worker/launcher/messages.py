"""What passes between a launcher, its workers and whoever asks for them: messages, record files, names of processes.

Messages are JSON, one a line, over a Unix stream socket. Each request has an id and gets one reply with it; `Ended` is
pushed to everyone who is connected.

The record file of an attempt (`<n>.json`) decides who it belongs to. The worker makes it before it does anything, and
whoever gives an attempt up makes it first; making it fails where it exists, so that only one of them can. How the
worker ended is in `<n>.exit.json`, written before the process is reaped: a process that is gone without that file
ended when nobody was there to see it.
"""

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from gen_worker.contract.files.durable import create_file, replace_file
from gen_worker.contract.files.regular import NotRegularFileError, read_regular
from gen_worker.contract.installed_packages import packages_stamp, source_stamp

VERSION = 3
MAX_LINE_BYTES = 4 << 20
MAX_RECORD_BYTES = 1 << 20


class ExitRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`<n>.exit.json`: how that process ended; a negative code is the signal that ended it."""

    exit_code: int | None
    is_out_of_memory: bool = False
    detail: str = ""
    nonce: str = ""


class WorkerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All that starts one attempt's worker: the executor's `LaunchPlan`, as it crosses the socket."""

    run_id: str
    number: int
    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    code_dir: str
    log_path: str
    attempt_dir: str
    is_warm: bool
    # A daemon that was started before an upgrade does not give these three: a field that is added has a default.
    checkpoints_dir: str = ""
    events_path: str = ""
    trainer: str = ""
    is_writer_wanted: bool = True  # a warm worker forks its checkpoint writer first of all
    frozen_from: str = ""  # the folder that `code_dir` is a frozen copy of; empty: it is none
    nonce: str = ""
    devices: tuple[str, ...] = ()
    cpus: int = 1
    memory_mb: int = 0


class Request(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=str.lower):
    id: int


class Hello(Request, frozen=True, kw_only=True):
    """Who are you, and are you ready?"""


class Launch(Request, frozen=True, kw_only=True):
    """`secret_env` goes into the worker's environment, and nowhere else."""

    plan: WorkerPlan
    secret_env: dict[str, str] = {}


class Close(Request, frozen=True, kw_only=True):
    """Write the attempt's terminal event if it wrote none itself. Needs no file: after a power cut any may be lost."""

    plan: WorkerPlan
    category: str
    error: str
    cause: str = ""


class TryImports(Request, frozen=True, kw_only=True):
    """Load the code that the job names as the plan's worker would, and say how that went."""

    plan: WorkerPlan
    config: dict[str, Any]
    secret_env: dict[str, str] = {}


class List(Request, frozen=True, kw_only=True):
    """Which workers are yours and alive?"""


class Retire(Request, frozen=True, kw_only=True):
    """Start no worker any more, and leave when the last has ended."""


AnyRequest = Hello | Launch | Close | TryImports | List | Retire


class Reply(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=str.lower):
    id: int


class Welcome(Reply, frozen=True, kw_only=True):
    pid: int
    stamp: str
    is_retired: bool
    version: int = VERSION
    environ: dict[str, str] = {}  # what its workers inherit


class Launched(Reply, frozen=True, kw_only=True):
    boot_id: str
    pid: int
    start_ticks: int | None


class Closed(Reply, frozen=True, kw_only=True):
    is_closed: bool
    detail: str = ""


class Tried(Reply, frozen=True, kw_only=True):
    """What is wrong with the author's code or the data; `problem`: why it could not be checked."""

    faults: tuple[dict[str, str], ...] = ()  # `Fault.to_data`
    problem: str = ""


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    run_id: str
    number: int
    pid: int


class Workers(Reply, frozen=True, kw_only=True):
    workers: tuple[Worker, ...]


class Retired(Reply, frozen=True, kw_only=True):
    num_workers: int


class Refused(Reply, frozen=True, kw_only=True):
    """It was not done, and will not be. A retired launcher says so: another one may do it."""

    message: str
    is_retired: bool = False


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="ended"):
    """Pushed: this worker has ended, and its exit file is there unless the disk refuses it."""

    run_id: str
    number: int
    pid: int
    exit: ExitRecord  # with the nonce


AnyReply = Welcome | Launched | Closed | Tried | Workers | Retired | Refused | Ended

encode = msgspec.json.Encoder().encode
request_decoder: msgspec.json.Decoder[AnyRequest] = msgspec.json.Decoder(AnyRequest)
reply_decoder: msgspec.json.Decoder[AnyReply] = msgspec.json.Decoder(AnyReply)


class _Numbered(msgspec.Struct):
    id: int = 0


def read_id(line: bytes) -> int:
    """The id of a request that is none otherwise; 0 where there is no telling."""
    try:
        return msgspec.json.decode(line, type=_Numbered).id
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return 0


class LauncherInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`<instance>.json` in the launcher's folder: where it listens, and whether it is still the one."""

    pid: int
    start_ticks: int | None
    boot_id: str
    socket: str  # a file name in the same folder
    stamp: str
    is_warm: bool = False  # it answers at once; before, it imports
    version: int = VERSION


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`<n>.json`: the one process of an attempt, or that there is none and will never be.

    `nonce` is the submission's: a record with another is not this run's. Empty: of a run from before there were any.
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


def record_path(attempt_dir: str, number: int) -> Path:
    return Path(attempt_dir) / f"{number}.json"


def exit_path(attempt_dir: str, number: int) -> Path:
    return Path(attempt_dir) / f"{number}.exit.json"


def claim(path: Path, record: AttemptRecord) -> bool:
    """Make the attempt's record; False where somebody was first. OSError: nobody knows, since the disk refuses."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return create_file(path, encode(record))


class ForeignRecordError(Exception):
    """The record in the attempt's place is of another submission."""

    def __init__(self, path: Path, record: AttemptRecord) -> None:
        super().__init__(f"{path} is of another submission (process {record.pid})")


def read_record(path: Path, nonce: str) -> AttemptRecord | None:
    """None where nobody made it. One that a power cut emptied, or somebody replaced, names a process of another boot.

    ForeignRecordError.
    """
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
    replace_file(path, encode(record), sync="file", mode=0o600)


def read_exit(path: Path, nonce: str) -> ExitRecord | None:
    """None where there is none, or only that of another submission."""
    try:
        record = msgspec.json.decode(read_regular(path, MAX_RECORD_BYTES), type=ExitRecord)
    except (FileNotFoundError, msgspec.MsgspecError, NotRegularFileError):
        return None
    return record if record.nonce == nonce else None


def code_stamp() -> str:
    """Changes with the worker's sources and with all that is installed: a warm process has imported the old ones.

    Blocks for about a millisecond.
    """
    stamps = f"{VERSION} {source_stamp(Path(__file__).parent.parent)} {packages_stamp()}"
    return hashlib.sha256(stamps.encode()).hexdigest()[:32]
