"""The documents by which a daemon and a model server agree on what is served. Both are in the folder `serving` of the run.

`wanted.json` is written by the daemon, then the server gets SIGUSR1. `live.json` is written by the server, before it
switches: a server that is started again begins with it. Each is whole or absent (write, sync, rename).

What the server says goes into its events: their own fields are the records at the end. `settled.json` answers its
`feedback_due`.
"""

from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from gen_worker.contract.files.durable import Sync, replace_file
from gen_worker.contract.files.regular import read_regular
from gen_worker.contract.job.model_version import ModelVersion, VersionFacts
from gen_worker.contract.job.spec import GateSpec
from gen_worker.contract.sizes import Count
from gen_worker.errors import StartupError

__all__ = [  # with those of a version, which a job holds as well
    "FeedbackDueEvent",
    "LiveModel",
    "ModelVersion",
    "PromotedEvent",
    "PromotionRefusedEvent",
    "ReadyEvent",
    "RequestStatsEvent",
    "SettledFeedback",
    "VersionFacts",
    "WantedModel",
    "read_live",
    "read_settled",
    "read_wanted",
    "write_document",
]

Action = Literal["promote", "rollback", "shadow", "split", "single"]
D = TypeVar("D", "WantedModel", "LiveModel", "SettledFeedback")

FOLDER = "serving"
MAX_DOCUMENT_BYTES = 64 << 20
WANTED, LIVE, SETTLED = "wanted.json", "live.json", "settled.json"


class WantedModel(msgspec.Struct, frozen=True, kw_only=True):
    """What the server is to do. A higher number replaces a lower one; one that was done is not done again.

    `promote` and `rollback` switch to the version; a `rollback` without one goes back to the previous version, and is not
    measured by the gate. `shadow`: its answers are compared and not sent. `split`: it answers `percent` of
    the requests. `single`: only the live version answers from now on; so it is after a switch.
    """

    number: Count
    action: Action
    version: ModelVersion | None = None
    percent: float = 0.0
    gate: GateSpec | None = None  # None: that of the job
    by: str = ""  # who asked


class ReadyEvent(msgspec.Struct, frozen=True, kw_only=True):
    """`ready`: the server answers from now on. Once an attempt."""

    url: str  # http://HOST:PORT, or unix:PATH
    version: VersionFacts
    number: Count = 0  # of the last `WantedModel` that is finished
    bearer_file: str = ""  # holds the secret that requests need; empty: they need none


class PromotedEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="promoted"):
    """`promoted`: what the `WantedModel` of that number asked for is done. `version` answers from now on.

    It may be written again after a crash, with the same fields.
    """

    number: Count
    version: VersionFacts
    previous: VersionFacts | None = None  # which answered before; None: the same
    action: Action = "promote"
    second: VersionFacts | None = None  # of `shadow` and `split`
    percent: float = 0.0  # of the requests, which `second` answers
    by: str = ""
    gate: dict[str, Any] = {}  # its figures


class PromotionRefusedEvent(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="promotion_refused"
):
    """`promotion_refused`: nothing changed, the version before it answers. It may be written again after a crash."""

    number: Count
    cause: str
    words: str  # for people
    version: VersionFacts | None = None  # which was refused
    action: Action = "promote"
    by: str = ""
    gate: dict[str, Any] = {}


class RequestStatsEvent(msgspec.Struct, frozen=True, kw_only=True):
    """`request_stats`: figures of the last seconds. Also metric points of that step, in an event `metrics`."""

    step: Count  # seconds since the run's first start
    values: dict[str, float]  # serve/requests_per_s, serve/p50_ms, serve/p99_ms, serve/queue_rows, …


class FeedbackDueEvent(msgspec.Struct, frozen=True, kw_only=True):
    """`feedback_due`: the next training run is to be submitted. It may be written again, with the same fields."""

    number: Count  # 1, 2, 3… per run
    rows: Count  # that are new since the one before it
    files: list[str]  # parquet with these rows, in the training schema
    folder: str  # has the files of all rows so far
    reason: Literal["rows", "max_age_s", "metric"]
    version: VersionFacts  # which answers now
    figures: dict[str, float] = {}


class SettledFeedback(msgspec.Struct, frozen=True, kw_only=True):
    """The run that the `feedback_due` of that number asked for has ended, and so has its promotion. The next one may come."""

    number: Count


class LiveModel(msgspec.Struct, frozen=True, kw_only=True):
    """What the server answers with, and the number of the last `WantedModel` that it finished, done or refused."""

    number: Count
    version: ModelVersion
    previous: ModelVersion | None = None
    second: ModelVersion | None = None  # beside it: a shadow, or for `percent` of the requests
    second_is: Literal["", "shadow", "split"] = ""
    percent: float = 0.0
    origin: VersionFacts | None = (
        None  # what the job named: where it names another one, this document is no more
    )
    started_ms: int = 0  # when the run first served
    url: str = ""  # where it answered last
    outcome: PromotedEvent | PromotionRefusedEvent | None = None  # until its event is durable


def write_document(
    path: Path, document: WantedModel | LiveModel | SettledFeedback, *, sync: Sync = "folder"
) -> None:
    """Durably; with `sync="file"` a power cut may leave the document before it. Blocks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n", sync=sync)


def read_wanted(folder: Path) -> WantedModel | None:
    """None where nothing was asked for yet; StartupError where it cannot be read."""
    return _read(folder / WANTED, WantedModel)


def read_live(folder: Path) -> LiveModel | None:
    """None where nothing was served yet; StartupError where it cannot be read."""
    return _read(folder / LIVE, LiveModel)


def read_settled(folder: Path) -> int:
    """The number of the last `feedback_due` that is settled; 0 where none is. StartupError where it cannot be read."""
    found = _read(folder / SETTLED, SettledFeedback)
    return 0 if found is None else found.number


def _read(path: Path, kind: type[D]) -> D | None:
    try:
        content = read_regular(path, MAX_DOCUMENT_BYTES + 1)
        if len(content) > MAX_DOCUMENT_BYTES:
            raise StartupError(f"{path} cannot be read: it has more than {MAX_DOCUMENT_BYTES} bytes")
        return msgspec.json.decode(content, type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as fault:
        raise StartupError(f"{path} cannot be read: {fault}") from fault
