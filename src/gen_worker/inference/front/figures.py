"""What a front counts: for Prometheus since its start, for `request_stats` since the last time it was asked."""

import time
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

# Bounds of latencies in seconds, 12 % apart: exact enough for a median and a 99th percentile.
_BOUNDS = [1e-5 * 1.12**power for power in range(150)]
# Those that Prometheus gets.
_SHOWN_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Figures:
    """Of one front. The notes are taken for every answer; all sums are made when somebody asks."""

    def __init__(self) -> None:
        self.requests: dict[tuple[bytes, int], int] = {}  # by path and status
        self.rows = 0
        self.left = 0  # clients that left before their answer
        self.seconds = 0.0  # of requests that were answered with predictions
        self.shadow_equal = self.shadow_different = self.shadow_failed = 0
        self.shadow_largest_difference = 0.0
        self._buckets = [0] * (len(_BOUNDS) + 1)
        self._last = self._sum_up()

    def note(self, path: bytes, status: int) -> None:
        key = (path, status)
        self.requests[key] = self.requests.get(key, 0) + 1

    def note_prediction(self, num_rows: int, seconds: float) -> None:
        self.rows += num_rows
        self.seconds += seconds
        self._buckets[bisect_left(_BOUNDS, seconds)] += 1

    def take_window(self) -> dict[str, float]:
        """The figures since the last call: of a `request_stats` event."""
        last, self._last = self._last, self._sum_up()
        now = self._last
        seconds = max(now.taken_at - last.taken_at, 1e-9)
        values = {
            "serve/requests_per_s": (now.requests - last.requests) / seconds,
            "serve/rows_per_s": (now.rows - last.rows) / seconds,
            "serve/errors_per_s": (now.errors - last.errors) / seconds,
            "serve/refused_per_s": (now.refused - last.refused) / seconds,
        }
        buckets = [new - old for new, old in zip(now.buckets, last.buckets, strict=True)]
        if any(buckets):
            values["serve/p50_ms"] = 1000 * _quantile(buckets, 0.5)
            values["serve/p99_ms"] = 1000 * _quantile(buckets, 0.99)
        return values

    def _sum_up(self) -> "_Sums":
        requests = errors = refused = 0
        for (_, status), number in self.requests.items():
            requests += number
            errors += number * (status >= 500)
            refused += number * (400 <= status < 500)
        return _Sums(
            taken_at=time.monotonic(),
            requests=requests,
            rows=self.rows,
            errors=errors,
            refused=refused,
            buckets=tuple(self._buckets),
        )

    def histogram(self) -> Iterable[tuple[float, int]]:
        """(bound, how many were below it)."""
        return [(bound, sum(self._buckets[: bisect_left(_BOUNDS, bound)])) for bound in _SHOWN_BOUNDS]

    @property
    def num_predictions(self) -> int:
        return sum(self._buckets)


@dataclass(slots=True, kw_only=True)
class PoolCounters:
    """Since the pool was made."""

    batches: dict[int, int] = field(default_factory=dict)  # by shape
    rows: int = 0
    compute_s: float = 0.0
    raised_batches: int = 0
    worker_ends: int = 0
    quarantined_rows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sums:
    taken_at: float
    requests: int
    rows: int
    errors: int
    refused: int
    buckets: tuple[int, ...]


def _quantile(buckets: list[int], share: float) -> float:
    """The upper bound of the bucket in which it lies."""
    wanted = share * sum(buckets)
    seen = 0
    for place, number in enumerate(buckets):
        seen += number
        if number and seen >= wanted:
            return _BOUNDS[min(place, len(_BOUNDS) - 1)]
    return _BOUNDS[-1]
