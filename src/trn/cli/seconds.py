"""A number of seconds on the command line: finite, for nothing ends after nan of them."""

import math
from typing import Any

import click


class Seconds(click.FloatRange):
    """As `FloatRange`, without nan and inf."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = float(super().convert(value, param, ctx))
        if not math.isfinite(seconds):
            self.fail(f"{value} is no number of seconds.", param, ctx)
        return seconds
