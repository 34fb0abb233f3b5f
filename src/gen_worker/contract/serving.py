"""The documents by which a daemon and a model server agree on what is served. Both are in the folder `serving` of the run.

`wanted.json` is written by the daemon, then the server gets SIGUSR1. `live.json` is written by the server when it has
switched: a server that is started again begins with it. Each is whole or absent (write, sync, rename).

What the server says goes into its events: their own fields are the records at the end.
"""

from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from gen_worker.contract.files.durable import replace_file
from gen_worker.contract.files.regular import read_regular
from gen_worker.contract.job.model_version import ModelVersion, VersionFacts
from gen_worker.contract.job.spec import GateSpec
from gen_worker.errors import StartupError

__all__ = [  # with those of a version, which a job holds as well
    "LiveModel",
    "ModelVersion",
    "PromotedEvent",
    "PromotionRefusedEvent",
    "ReadyEvent",
    "RequestStatsEvent",
    "VersionFacts",
    "WantedModel",
    "read_live",
    "read_wanted",
    "write_document",
]

D = TypeVar("D", "WantedModel", "LiveModel")

FOLDER = "serving"
WANTED, LIVE = "wanted.json", "live.json"


class WantedModel(msgspec.Struct, frozen=True, kw_only=True):
    """What the server is to do. A higher number replaces a lower one; one that was done is not done again.

    `promote` and `rollback` switch to the version. `shadow`: it answers too, nobody sees it, answers are compared.
    `split`: it answers `percent` of the requests. `single`: only the live version answers from now on.
    """

    number: int
    action: Literal["promote", "rollback", "shadow", "split", "single"]
    version: ModelVersion | None = None
    percent: float = 0.0
    gate: GateSpec = GateSpec()
    by: str = ""  # who asked


class LiveModel(msgspec.Struct, frozen=True, kw_only=True):
    """What the server answers with, and the number of the last `WantedModel` that it finished, done or refused."""

    number: int
    version: ModelVersion
    previous: ModelVersion | None = None


def write_document(path: Path, document: WantedModel | LiveModel) -> None:
    """Durably. Blocks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")


def read_wanted(folder: Path) -> WantedModel | None:
    """None where nothing was asked for yet; StartupError where it cannot be read."""
    return _read(folder / WANTED, WantedModel)


def read_live(folder: Path) -> LiveModel | None:
    """None where nothing was served yet; StartupError where it cannot be read."""
    return _read(folder / LIVE, LiveModel)


def _read(path: Path, kind: type[D]) -> D | None:
    try:
        return msgspec.json.decode(read_regular(path), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as fault:
        raise StartupError(f"{path} cannot be read: {fault}") from fault


class ReadyEvent(msgspec.Struct, frozen=True, kw_only=True):
    """`ready`: the server answers from now on. Once an attempt."""

    url: str  # http://HOST:PORT, or unix:PATH
    version: VersionFacts
    bearer_file: str = ""  # holds the secret that requests need; empty: they need none


class PromotedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """`promoted`: what the `WantedModel` of that number asked for is done. `version` answers from now on."""

    number: int
    version: VersionFacts
    gate: dict[str, Any] = {}  # its figures


class PromotionRefusedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """`promotion_refused`: nothing changed, the version before it answers."""

    number: int
    cause: str
    words: str  # for people
    gate: dict[str, Any] = {}


class RequestStatsEvent(msgspec.Struct, frozen=True, kw_only=True):
    """`request_stats`: figures of the last seconds, also metric points of that step (seconds since the server's start)."""

    step: int
    values: dict[str, float]  # serve/requests_per_s, serve/p50_ms, serve/p99_ms, serve/queue_rows, …
