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
    """Of one front. `note` is called for every answer."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, int], int] = {}  # by route and status
        self.rows = 0
        self.left = 0  # clients that left before their answer
        self.seconds = 0.0  # of requests that were answered with predictions
        self._buckets = [0] * (len(_BOUNDS) + 1)
        self._window = _Window()
        self.shadow_equal = self.shadow_different = self.shadow_failed = 0
        self.shadow_largest_difference = 0.0

    def note(self, route: str, status: int) -> None:
        key = (route, status)
        self.requests[key] = self.requests.get(key, 0) + 1
        window = self._window
        window.requests += 1
        if status >= 500:
            window.errors += 1
        elif status >= 400:
            window.refused += 1

    def note_prediction(self, num_rows: int, seconds: float) -> None:
        self.rows += num_rows
        self.seconds += seconds
        place = bisect_left(_BOUNDS, seconds)
        self._buckets[place] += 1
        self._window.rows += num_rows
        self._window.buckets[place] += 1

    def take_window(self) -> dict[str, float]:
        """The figures since the last call: of a `request_stats` event."""
        window, self._window = self._window, _Window()
        seconds = max(time.monotonic() - window.since, 1e-9)
        values = {
            "serve/requests_per_s": window.requests / seconds,
            "serve/rows_per_s": window.rows / seconds,
            "serve/errors_per_s": window.errors / seconds,
            "serve/refused_per_s": window.refused / seconds,
        }
        if any(window.buckets):
            values["serve/p50_ms"] = 1000 * _quantile(window.buckets, 0.5)
            values["serve/p99_ms"] = 1000 * _quantile(window.buckets, 0.99)
        return values

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


class _Window:
    def __init__(self) -> None:
        self.since = time.monotonic()
        self.requests = self.rows = self.errors = self.refused = 0
        self.buckets = [0] * (len(_BOUNDS) + 1)


def _quantile(buckets: list[int], share: float) -> float:
    """The upper bound of the bucket in which it lies."""
    wanted = share * sum(buckets)
    seen = 0
    for place, number in enumerate(buckets):
        seen += number
        if number and seen >= wanted:
            return _BOUNDS[min(place, len(_BOUNDS) - 1)]
    return _BOUNDS[-1]


def prometheus_line(name: str, value: float, **labels: object) -> str:
    if not labels:
        return f"{name} {value:g}"
    shown = ",".join(f'{key}="{_escape(str(label))}"' for key, label in labels.items())
    return f"{name}{{{shown}}} {value:g}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
