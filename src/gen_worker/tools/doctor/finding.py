"""One thing that was looked at on a machine, how grave it is, and what to do about it."""

from enum import StrEnum
from typing import Any

import msgspec


class Level(StrEnum):
    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at. `facts` has its numbers."""

    check: str
    level: Level = Level.OK
    message: str
    remedy: str = ""
    facts: dict[str, Any] = {}
