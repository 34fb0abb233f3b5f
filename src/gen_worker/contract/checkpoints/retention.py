"""Which checkpoints are removed: a pure function."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gen_worker.contract.checkpoints.choice import CheckpointInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    name: str
    step: int
    created_ms: int = 0
    verified: bool
    is_final: bool = False
    metric_name: str | None = None
    metric_value: float | None = None
    metric_mode: str = "min"


def candidate_of(info: CheckpointInfo) -> Candidate:
    metric = info.meta.metric
    return Candidate(
        name=info.stem,
        step=info.step,
        created_ms=info.created_ms,
        verified=info.verified,
        is_final=info.stem == "final",
        metric_name=metric.name if metric else None,
        metric_value=metric.value if metric else None,
        metric_mode=metric.mode if metric else "min",
    )


def select_removals(candidates: Sequence[Candidate], *, keep_last: int, keep_best: int) -> list[str]:
    """Names to remove, oldest first.

    Kept: the `keep_last` newest (0: all), the `keep_best` best by the newest metric, the newest verified one,
    every final one, and the `keep_last` newest of those that are not verified.
    """
    if keep_last <= 0:
        return []
    by_age = sorted(candidates, key=lambda item: (item.step, item.is_final, item.created_ms, item.name))
    verified = [item for item in by_age if item.verified]
    kept = {item.name for item in verified[-1:]}
    removable = [item for item in verified if not item.is_final]
    kept.update(item.name for item in removable[-keep_last:])
    kept.update(item.name for item in _best(verified, keep_best))
    unverified = [item for item in by_age if not item.verified and not item.is_final]
    kept.update(item.name for item in unverified[-keep_last:])
    return [item.name for item in by_age if not item.is_final and item.name not in kept]


def _best(verified: Sequence[Candidate], keep_best: int) -> list[Candidate]:
    measured = [
        item for item in verified if item.metric_value is not None and math.isfinite(item.metric_value)
    ]
    if keep_best <= 0 or not measured:
        return []
    newest = measured[-1]  # a changed job may have changed the metric
    sign = -1.0 if newest.metric_mode == "max" else 1.0
    comparable = [item for item in measured if item.metric_name == newest.metric_name]
    # Of equals the newer one is kept.
    comparable.reverse()
    return sorted(comparable, key=lambda item: sign * (item.metric_value or 0.0))[:keep_best]
