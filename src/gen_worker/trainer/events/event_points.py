"""The metric points of a run that an attempt could not upload, from its event file."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from gen_worker.errors import Category


class Point(NamedTuple):
    step: int
    timestamp_ms: int
    values: Mapping[str, float]


class _Event(msgspec.Struct):
    event: str
    attempt: int
    timestamp_ms: int = 0
    step: int | None = None
    name: str = ""
    value: float | str | None = None
    values: dict[str, float | str] = {}
    category: str = ""


_decode = msgspec.json.Decoder(_Event).decode
_POINTS = ("metric", "metrics", "validation")


def read_undelivered(path: Path, *, before_attempt: int) -> list[Point]:
    """All points of earlier attempts, in order, if one of those failed in its uploads and none completed since. Which of them
    arrived is not recorded: receivers get some twice. Empty otherwise. Blocks.
    """
    points: list[Point] = []
    is_undelivered = False
    with path.open("rb") as file:
        for line in file:
            with contextlib.suppress(msgspec.MsgspecError, ValueError, UnicodeDecodeError):
                event = _decode(line)
                if event.attempt >= before_attempt:
                    continue
                if event.event == "completed":
                    is_undelivered = False
                elif event.event == "failed":
                    is_undelivered = is_undelivered or event.category == Category.UPLOAD
                elif event.event in _POINTS:
                    found = event.values if event.value is None else {event.name: event.value}
                    values = {name: float(value) for name, value in found.items()}
                    points.append(Point(event.step or 0, event.timestamp_ms, values))
    return points if is_undelivered else []
