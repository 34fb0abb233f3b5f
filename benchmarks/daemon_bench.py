"""The daemon: starting runs, taking submits, telling watchers, and standing by. Rows are made in `daemon_rows`.

Every side has a daemon, a home and an interpreter of its own; the homes are on the disk of this folder. Ray and submitit
take no part in the rounds of the others: an idle cluster uses the processor.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bars import Row
from daemon_rows import (
    BURST,
    CALLS,
    COLD,
    EVENTS,
    FAN_OUT,
    FORK,
    IDLE,
    IMPORT,
    POINTS,
    QUEUE,
    RAY,
    RECOVERY,
    SERVING,
    SINGLE,
    START,
    SUBMITIT,
    TORCHRUN,
    build_rows,
)
from daemon_session import end_everything
from harness import DATA, Measurements, Side, measure

STARTS = "daemon_start_sides.py"
CALL_SIDES = "daemon_call_sides.py"
STREAMS = "daemon_stream_sides.py"
RECOVERIES = "daemon_recovery_sides.py"
PEER_TIMEOUT_S = 180.0


def run(*, quick: bool, say: Callable[[str], None]) -> tuple[list[Row], Measurements]:
    DATA.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=DATA, prefix="daemon-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        try:
            measured = _measure_all(folder, quick=quick, say=say)
        finally:
            end_everything(folder)  # whatever a side that failed has left
    return build_rows(measured), measured


def _measure_all(folder: Path, *, quick: bool, say: Callable[[str], None]) -> Measurements:
    measured = Measurements()

    def side(name: str, function: str, max_rounds: int | None = None, **options: Any) -> Side:
        place = {"home": str(folder / function)}
        return Side(name=name, function=function, options={**place, **options}, max_rounds=max_rounds)

    def take(script: str, rounds: int, *sides: Side) -> None:
        measured.append(
            measure(script, sides, num_rounds=rounds, fresh=False, say=say, timeout_s=PEER_TIMEOUT_S)
        )

    num_slow = 2 if quick else 7
    starts = [
        side(START, "first_step"),
        side(FORK, "warm_fork"),
        side(COLD, "cold_worker", max_rounds=num_slow),
        side(IMPORT, "import_torch", max_rounds=num_slow),
    ]
    take(STARTS, 8 if quick else 21, *starts)
    take(STARTS, 1 if quick else 3, side(BURST, "burst", num_runs=100))
    recoveries = [side(RECOVERY, "killed_run"), side(TORCHRUN, "killed_torchrun")]
    take(RECOVERIES, 3 if quick else 11, *recoveries)
    peers = {"num_rounds": 3 if quick else 5}
    take(STARTS, peers["num_rounds"], side(SUBMITIT, "submitit_jobs", num_runs=20, **peers))
    take(STARTS, peers["num_rounds"], side(RAY, "ray_jobs", num_runs=5 if quick else 10, **peers))

    take(CALL_SIDES, 5 if quick else 11, side(CALLS, "submits", seconds=0.3 if quick else 1.0))
    take(STREAMS, 1 if quick else 3, side(EVENTS, "event_latency", num_events=100 if quick else 300))
    fan_out = {"num_watchers": 100, "num_events": 20_000 if quick else 50_000, "num_single_events": 300}
    streams = [side(FAN_OUT, "fan_out", **fan_out), side(SINGLE, "single_events", **fan_out)]
    take(STREAMS, 2 if quick else 5, *streams)
    take(CALL_SIDES, 1 if quick else 3, side(QUEUE, "queue", num_runs=10_000, num_calls=40))
    take(STARTS, 3 if quick else 7, side(SERVING, "serving"))
    take(STARTS, 1, side(IDLE, "idle", seconds=10 if quick else 30))
    take(STREAMS, 1 if quick else 3, side(POINTS, "points", points_per_s=50_000, seconds=3 if quick else 6))
    return measured
