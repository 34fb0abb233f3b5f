"""Which checkpoints are removed: a pure function."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gen_worker.contract.checkpoints.choice import CheckpointInfo, best_first
from gen_worker.contract.checkpoints.meta import Metric


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

    @property
    def metric(self) -> Metric | None:
        if self.metric_name is None:
            return None
        mode: Literal["min", "max"] = "max" if self.metric_mode == "max" else "min"
        return Metric(name=self.metric_name, value=self.metric_value, mode=mode)


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
    return best_first(verified, lambda item: item.metric)[:keep_best] if keep_best > 0 else []
