"""A served name and what became of its promotions, as the registry has them."""

from enum import StrEnum
from typing import Any, Literal

import msgspec

from gen_worker.contract.job.model_version import ModelVersion, VersionFacts
from gen_worker.contract.job.spec import GateSpec

Action = Literal["promote", "rollback", "shadow", "split", "single"]


class PromotionState(StrEnum):
    WANTED = "wanted"  # recorded; each daemon that starts sends it to the server again
    DONE = "done"
    REFUSED = "refused"  # nothing changed
    REPLACED = "replaced"  # a later one was wanted before it was done


class Promotion(msgspec.Struct, frozen=True, kw_only=True):
    """One change of what a name answers with. `previous` answered before it; `gate` has the gate's figures."""

    name: str
    run_id: str  # of the server
    number: int  # 1, 2, 3… per name
    action: str
    state: str  # of PromotionState
    version: VersionFacts | None = None
    previous: VersionFacts | None = None
    percent: float = 0.0  # of the requests, with `split`
    by: str = ""
    asked_ms: int = 0
    ended_ms: int | None = None
    cause: str = ""  # why it was refused
    words: str = ""
    gate: dict[str, Any] | None = None  # the gate's figures
    promotion_id: str = ""  # drawn by the caller, and repeated after a lost reply


class WantedPromotion(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be recorded, and then done."""

    run_id: str  # of the server
    action: Action
    version: ModelVersion | None = None
    percent: float = 0.0
    gate: GateSpec = GateSpec()
    by: str = ""
    promotion_id: str = ""
    after: int = 0  # its number is higher: the server knows of this one, and a restored registry may not


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A served name: its newest server, and what that answers with as far as its events were read."""

    name: str
    run_id: str
    state: str  # of the server's run
    is_ready: bool = False  # its newest attempt answers, or did until it ended
    url: str = ""
    bearer_file: str = ""
    live: VersionFacts | None = None
    previous: VersionFacts | None = None
    second: VersionFacts | None = None  # beside it: a shadow, or for `percent` of the requests
    second_is: str = ""
    percent: float = 0.0
    ready_ms: int = 0
    ready_attempt: int = 0


class DueFeedback(msgspec.Struct, frozen=True, kw_only=True):
    """A server asked for the next training run. `child` is that run, once it was submitted."""

    run_id: str  # of the server
    number: int
    rows: int
    files: list[str]
    reason: str
    version: VersionFacts
    figures: dict[str, float] = {}
    at_ms: int = 0
    child: str = ""
    fault: str = ""  # why no run was submitted
    is_settled: bool = False  # its run has ended, and what became of it was promoted or not
