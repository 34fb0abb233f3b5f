"""One result of the doctor: a level, a message, and what to do."""

from enum import StrEnum
from typing import Any

import msgspec


class Level(StrEnum):
    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """`facts` has the numbers."""

    check: str
    level: Level = Level.OK
    message: str
    remedy: str = ""
    facts: dict[str, Any] = {}

    @classmethod
    def judge(
        cls,
        check: str,
        message: str,
        facts: dict[str, Any],
        *,
        is_bad: bool,
        remedy: str,
        level: Level = Level.WARNING,
    ) -> "Finding":
        """OK, or where `is_bad`: at `level`, with the remedy."""
        if not is_bad:
            return cls(check=check, message=message, facts=facts)
        return cls(check=check, level=level, message=message, remedy=remedy, facts=facts)
