"""Durations and times: shown to people, and read from the command line."""

import math
import time
from typing import Any

import click

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def say_duration(duration_ms: float) -> str:
    """`850ms`, `42s`, `3m05s`, `2h10m`, `3d04h`."""
    if duration_ms < 1000:
        return f"{max(round(duration_ms), 0)}ms"
    total_s = int(duration_ms / 1000)
    if total_s < 60:
        return f"{total_s}s"
    if total_s < 3600:
        return f"{total_s // 60}m{total_s % 60:02d}s"
    if total_s < 86400:
        return f"{total_s // 3600}h{total_s % 3600 // 60:02d}m"
    return f"{total_s // 86400}d{total_s % 86400 // 3600:02d}h"


def say_ago(then_ms: int, at_ms: int) -> str:
    """`2h10m ago`; what is not a second old, or ahead of this clock, is `now`."""
    return "now" if at_ms - then_ms < 1000 else f"{say_duration(at_ms - then_ms)} ago"


def parse_since(text: str, at_ms: int) -> int:
    """Milliseconds of the epoch: of `90s`, `15m`, `2h`, `3d`, `1w` ago, or of an ISO date or time (local)."""
    number, unit = text[:-1], text[-1:].lower()
    if unit in _UNITS_S and number.replace(".", "", 1).isdigit():
        return at_ms - round(float(number) * _UNITS_S[unit] * 1000)
    from datetime import datetime

    return round(datetime.fromisoformat(text).timestamp() * 1000)


class Seconds(click.FloatRange):
    """A number of seconds on the command line: as `FloatRange`, without nan and inf."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = float(super().convert(value, param, ctx))
        if not math.isfinite(seconds):
            self.fail(f"{value} is not a number of seconds.", param, ctx)
        return seconds
