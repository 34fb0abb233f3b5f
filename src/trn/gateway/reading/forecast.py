"""When a run will be done: by its own speed, with a band from past runs of the same trainer class."""

from collections.abc import Sequence
from statistics import median, quantiles
from typing import NamedTuple

import msgspec

from trn.core.runs import AttemptRecord, RunRecord, RunState

MIN_STEPS, MIN_S = 10, 2.0  # of an attempt, before its own speed counts
MIN_PAST = 3  # runs, for a band
MAX_PAST = 50


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """`low_ms` to `high_ms`: between the 10 % fastest and slowest of the past runs."""

    finish_ms: int
    low_ms: int
    high_ms: int
    basis: str


class Outlook(NamedTuple):
    """A forecast, or why there is none."""

    forecast: Forecast | None
    reason: str = ""


def forecast(
    run: RunRecord, attempts: Sequence[AttemptRecord], past: Sequence[float], now_ms: int, trainer: str
) -> Outlook:
    """`past` are seconds per step of completed runs of the same trainer class."""
    if run.state.is_terminal:
        return Outlook(None, "the run has ended")
    if run.end_step is None:
        return Outlook(None, "the number of steps is not known")
    own = _own_speed(run, attempts, now_ms)
    if own is None and run.state is RunState.RUNNING:
        return Outlook(None, "too few steps of this attempt yet")  # past runs may have had other data
    if own is None and not past:
        return Outlook(
            None, f"no completed run of {trainer or 'this trainer class'} yet, and too few steps of this one"
        )
    usual = median(past) if past else own
    assert usual is not None
    speed = usual if own is None else own
    low, high = _band(past)
    left_ms = 1000 * max(run.end_step - run.step, 0)
    begin_ms = max(now_ms, run.not_before_ms)
    basis = [] if own is None else ["the speed of this run"]
    if past:
        basis.append(f"{len(past)} completed run{'s' if len(past) > 1 else ''} of {trainer}")
    return Outlook(
        Forecast(
            finish_ms=begin_ms + round(left_ms * speed),
            low_ms=begin_ms + round(left_ms * speed * low),
            high_ms=begin_ms + round(left_ms * speed * high),
            basis=" and ".join(basis),
        )
    )


def _own_speed(run: RunRecord, attempts: Sequence[AttemptRecord], now_ms: int) -> float | None:
    """Seconds per step of the attempt that runs."""
    if not attempts or attempts[-1].ended_ms is not None:
        return None
    begin = attempts[-2].saved_step if len(attempts) > 1 else run.start_step
    num_steps = attempts[-1].step - begin
    took_s = (now_ms - attempts[-1].launched_ms) / 1000
    return took_s / num_steps if num_steps >= MIN_STEPS and took_s >= MIN_S else None


def _band(past: Sequence[float]) -> tuple[float, float]:
    """How much faster and slower than usual past runs were."""
    if len(past) < MIN_PAST:
        return 0.8, 1.25
    usual = median(past)
    deciles = quantiles(past, n=10, method="inclusive")
    return min(deciles[0] / usual, 1.0), max(deciles[-1] / usual, 1.0)
