"""The protocol of a launcher: JSON, one message a line, over a Unix stream socket.

Each request has an id and gets one reply with it. `Ended` is pushed to every client.
"""

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from gen_worker.contract.installed_packages import packages_stamp, source_stamp
from gen_worker.launcher.attempt_records import ExitRecord

VERSION = 3
MAX_LINE_BYTES = 4 << 20


class WorkerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that starts one attempt's worker: the executor's `LaunchPlan` on the socket."""

    run_id: str
    number: int
    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    code_dir: str
    log_path: str
    attempt_dir: str
    is_warm: bool
    # A daemon from before an upgrade does not send the fields below.
    checkpoints_dir: str = ""
    events_path: str = ""
    trainer: str = ""
    is_writer_wanted: bool = True  # a warm worker forks its checkpoint writer first
    frozen_from: str = ""  # the folder that `code_dir` is a frozen copy of; empty: it is none
    nonce: str = ""
    devices: tuple[str, ...] = ()
    cpus: int = 1
    memory_mb: int = 0


class Request(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=str.lower):
    id: int


class Hello(Request, frozen=True, kw_only=True):
    """Asks who the launcher is, and whether it is ready."""


class Launch(Request, frozen=True, kw_only=True):
    """`secret_env` goes into the worker's environment and nowhere else."""

    plan: WorkerPlan
    secret_env: dict[str, str] = {}


class Close(Request, frozen=True, kw_only=True):
    """Write the attempt's terminal event if it has none. Needs no file: a power cut may have lost any of them."""

    plan: WorkerPlan
    category: str
    error: str
    cause: str = ""
    fault: str = ""
    values: dict[str, Any] = {}


class TryImports(Request, frozen=True, kw_only=True):
    """Import the code that the job names, as the plan's worker would, and report the faults."""

    plan: WorkerPlan
    config: dict[str, Any]
    secret_env: dict[str, str] = {}


class List(Request, frozen=True, kw_only=True):
    """Asks for the living workers of this launcher."""


class Retire(Request, frozen=True, kw_only=True):
    """Start no more workers, and exit when the last one has ended."""


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
    """The request was not done and will not be. `is_retired`: another launcher may do it."""

    message: str
    is_retired: bool = False


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="ended"):
    """Pushed: this worker has ended. Its exit file exists, unless the disk refused it."""

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
    """The id of an invalid request; 0 where it has none."""
    try:
        return msgspec.json.decode(line, type=_Numbered).id
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return 0


class LauncherInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`<instance>.json` in the launcher's folder: which process it is, and where it listens."""

    pid: int
    start_ticks: int | None
    boot_id: str
    socket: str  # a file name in the same folder
    stamp: str
    is_warm: bool = False  # False: it is still importing
    version: int = VERSION


def code_stamp() -> str:
    """Changes with the worker's sources and the installed packages. Blocks for about a millisecond."""
    stamps = f"{VERSION} {source_stamp(Path(__file__).parent.parent)} {packages_stamp()}"
    return hashlib.sha256(stamps.encode()).hexdigest()[:32]
