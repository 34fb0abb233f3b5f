"""The page and its HTTP API, in a real browser, beside TensorBoard, MLflow's UI and trackio. Rows are in `faces_rows`.

Runs and curves are made first, the same for all, and kept in .data/faces for the next time. Peers are stopped by a
signal while others are measured.
"""

import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bars import Row
from daemon_session import end_everything
from faces_data import FULL, OURS, QUICK, Sizes, prepare
from faces_rows import BESIDE, CODE, FLOOD, GATEWAY, LIST, LIVE, PAGE, PEERS, VIEWS, build_rows
from harness import DATA, Measurements, Side, measure

SIDES = "faces_sides.py"
TIMEOUT_S = 240.0
PEER_TIMEOUT_S = 45.0  # for a view to be painted
OPENINGS = {"table": (7, 3), "chart": (7, 3), "overlay": (5, 2)}  # rounds of ours, and those with peers


def run(*, quick: bool, say: Callable[[str], None]) -> tuple[list[Row], Measurements]:
    DATA.mkdir(exist_ok=True)
    sizes = QUICK if quick else FULL
    write_data(sizes, say)
    with tempfile.TemporaryDirectory(dir=DATA, prefix="faces-", ignore_cleanup_errors=True) as name:
        try:
            measured = _measure_all(Path(name), sizes, quick=quick, say=say)
        finally:
            end_everything(Path(name))  # whatever a side that failed has left
            end_everything(DATA / "faces")
    return build_rows(measured), measured


def write_data(sizes: Sizes, say: Callable[[str], None]) -> None:
    """Before any clock runs. A peer whose data cannot be written says so when it is its turn."""
    for view in VIEWS:
        for side in (OURS, *PEERS.values()):
            say(f"data of {side}: {view}")
            try:
                prepare(side, view, sizes)
            except RuntimeError:
                if side == OURS:
                    raise
    prepare(OURS, "list", sizes)


def _measure_all(folder: Path, sizes: Sizes, *, quick: bool, say: Callable[[str], None]) -> Measurements:
    measured = Measurements()

    def side(name: str, function: str, max_rounds: int | None = None, **options: Any) -> Side:
        place = {"home": str(folder / function), "sizes": asdict(sizes)}
        return Side(name=name, function=function, options={**place, **options}, max_rounds=max_rounds)

    def take(rounds: int, *sides: Side) -> None:
        measured.append(measure(SIDES, sides, num_rounds=rounds, fresh=False, say=say, timeout_s=TIMEOUT_S))

    for view, names in VIEWS.items():
        num_rounds, num_slow = (3, 1) if quick else OPENINGS[view]
        peers = [
            side(names[peer], "peer_view", num_slow, peer=own, view=view, timeout_s=PEER_TIMEOUT_S)
            for peer, own in PEERS.items()
        ]
        take(num_rounds, side(names[PAGE], "own_view", view=view), *peers)
    take(1, side(CODE, "code"))
    take(1 if quick else 3, side(LIVE, "live", gap_ms=700, num_points=8 if quick else 14))
    take(1, side(FLOOD, "flood", points_per_s=1000, seconds=10 if quick else 60))
    take(2 if quick else 5, side(GATEWAY, "start"))
    take(1 if quick else 5, side(BESIDE, "daemon_beside", num_submits=20 if quick else 200))
    take(2 if quick else 5, side(LIST, "list_rate", num_clients=8, seconds=1 if quick else 3))
    return measured
