"""Runs by family: each below the run that it continues, and its line of descent as a small curve."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trn.cli.reading.registry_view import RunRow

if TYPE_CHECKING:
    from trn.core.home import Home

CURVE_METRIC = "train/loss"
CURVE_WIDTH = 24


def sort_by_family(runs: Sequence[RunRow]) -> list[tuple[int, RunRow]]:
    """(how deep, run): families in the order of their first run here; in each the oldest first, children below it."""
    families: dict[str, list[RunRow]] = {}
    for run in runs:
        families.setdefault(run.family, []).append(run)
    ordered: list[tuple[int, RunRow]] = []
    for members in families.values():
        members.sort(key=lambda run: (run.submitted_ms, run.member))
        here = {run.run_id for run in members}
        children: dict[str, list[RunRow]] = {}
        for run in members:
            children.setdefault(run.parent_run_id if run.parent_run_id in here else "", []).append(run)
        todo = [(0, run) for run in reversed(children.get("", []))]
        while todo:
            depth, run = todo.pop()
            ordered.append((depth, run))
            todo += [(depth + 1, child) for child in reversed(children.pop(run.run_id, []))]
    return ordered


def draw_curve(home: "Home", run_id: str, *, is_unicode: bool) -> str:
    """The line of descent of a run, in one line; empty where it has fewer than two points."""
    from trn.cli.reading.run_lookup import find_curve, find_run
    from trn.client.screen.terminal_chart import draw_sparkline

    found = find_run(home, run_id, is_exact=True)
    curve = find_curve(home, found, CURVE_METRIC, max_points=4 * CURVE_WIDTH)
    if curve is None or len(curve.steps) < 2:
        return ""
    seams = [part.from_step for part in found.lineage[1:]]
    return draw_sparkline(curve.steps, curve.values, width=CURVE_WIDTH, seams=seams, is_unicode=is_unicode)
