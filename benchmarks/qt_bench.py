"""The desktop window and its bridge thread: from a worker's event to a slot, under a flood, and until it is shown.

Windows are on Qt's platform `offscreen`: everything but the last copy to a screen.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bars import Bar, Row, build_row
from daemon_session import end_everything
from harness import DATA, Measurements, Side, measure

SIDES = "qt_sides.py"
TIMEOUT_S = 240.0
LATENCY, FLOOD, EMPTY, SHOWN = "trn, events", "trn, 1,000 records/s", "an empty event loop", "trn gui"
RATE = 1000


def run(*, quick: bool, say: Callable[[str], None]) -> tuple[list[Row], Measurements]:
    DATA.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=DATA, prefix="qt-", ignore_cleanup_errors=True) as name:
        try:
            measured = _measure_all(Path(name), quick=quick, say=say)
        finally:
            end_everything(Path(name))
    return build_rows(measured), measured


def _measure_all(folder: Path, *, quick: bool, say: Callable[[str], None]) -> Measurements:
    measured = Measurements()

    def take(rounds: int, name: str, function: str, **options: Any) -> None:
        side = Side(name=name, function=function, options={"home": str(folder / function), **options})
        measured.append(measure(SIDES, [side], num_rounds=rounds, fresh=False, say=say, timeout_s=TIMEOUT_S))

    seconds = 10 if quick else 60
    take(2 if quick else 5, LATENCY, "event_latency", num_events=200)
    take(1, FLOOD, "flood", rate=RATE, seconds=seconds, num_runs=200)
    take(1, EMPTY, "empty_loop", seconds=seconds)
    take(3 if quick else 7, SHOWN, "shown")
    return measured


def build_rows(measured: Measurements) -> list[Row]:
    def row(
        what: str, unit: str, key: str, ours: str, bar: Bar | None = None, note: str = "", *beside: str
    ) -> Row:
        return build_row(
            measured, what=what, unit=unit, key=key, ours=ours, beside=beside, bar=bar, note=note
        )

    latency = "event written by the worker → slot on the GUI thread"
    flood = "window under 1,000 record updates/s"
    return [
        row(
            latency,
            "ms",
            "ms",
            LATENCY,
            Bar(limit=50),
            "from the event's own time, before the worker's writer has it, to the slot; a real worker and daemon, a step every"
            " 17 ms, the median of a run's events",
        ),
        row(f"{latency}, p99", "ms", "p99_ms", LATENCY),
        row(
            f"{flood}: longest time in which the GUI's event loop did nothing else",
            "ms",
            "max_block_ms",
            FLOOD,
            Bar(limit=100),
            "the whole window on 200 runs for 60 s; records by a server that speaks the daemon's API, so that none is merged on the"
            " way; a timer of 5 ms in the window's thread says how late it was. Beside it the same timer alone in a process, at another"
            " time: what the machine itself adds",
            EMPTY,
        ),
        row(f"{flood}: p99.9 of the same", "ms", "p999_block_ms", FLOOD, None, "", EMPTY),
        row(
            f"{flood}: most processor time of the GUI's thread at a stretch",
            "ms",
            "max_cpu_ms",
            FLOOD,
            None,
            "between two beats of the same timer: what the window itself does, however busy the machine is",
            EMPTY,
        ),
        row(
            f"{flood}: records that reached the bridge",
            "1/s",
            "records_per_s",
            FLOOD,
            Bar(limit=900, at_least=True),
        ),
        row(
            f"{flood}: growth of its memory",
            "MB",
            "growth_mb",
            FLOOD,
            Bar(limit=5),
            "resident, from the end of the first sixth to the end",
        ),
        row(f"{flood}: processor time", "%", "cpu_percent", FLOOD, None, "of one core, the window's process"),
        row(f"{flood}: stop() of the bridge", "ms", "stop_ms", FLOOD, Bar(limit=1000)),
        row(
            "trn gui → window shown, warm cache",
            "ms",
            "ms",
            SHOWN,
            Bar(limit=1500),
            "from the start of the process to the end of its first paint; its daemon runs",
        ),
        row(
            "trn gui → window shown: processor time",
            "ms",
            "cpu_ms",
            SHOWN,
            None,
            "what a busy machine stretches",
        ),
        row("trn gui → runs in the table", "ms", "rows_ms", SHOWN),
    ]
