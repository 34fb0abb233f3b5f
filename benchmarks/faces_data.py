"""What the page and its peers show: the same runs and curves, written once for each side and kept in .data/faces.

Three views: `table` has many short runs, `chart` has one long one, `overlay` has many of one metric. Ours are written
by the registry and the metric store themselves; the peers' by `faces_peer_data`, in their own environment.
"""

import hashlib
import json
import shutil
import subprocess
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path

import faces_peer_data
from environments import APART
from faces_peer_data import START_MS, STEP_MS, View, name_run, read_curve
from harness import DATA, HERE
from trn.core.causes import Cause
from trn.core.home import Home
from trn.core.runs import RunRecord, RunState
from trn.registry.base import Ending, NewRun
from trn.registry.metrics import MetricStore
from trn.registry.sqlite import RunRegistry

OURS = "ours"
BATCH = 50_000
RUNS_AT_ONCE = 500
FORMAT = 1  # of the data; a change of what is written needs another one


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much there is to show. `num_listed` is for the API alone."""

    num_runs: int = 1_000
    num_points: int = 1_000_000
    num_overlaid: int = 100
    num_overlaid_points: int = 100_000
    num_listed: int = 10_000

    def view(self, name: str) -> View:
        return {
            "table": View(num_runs=self.num_runs, num_points=50, has_second=True),
            "chart": View(num_runs=1, num_points=self.num_points),
            "overlay": View(num_runs=self.num_overlaid, num_points=self.num_overlaid_points),
            "list": View(num_runs=self.num_listed, num_points=1),
        }[name]


FULL = Sizes()
QUICK = Sizes(num_runs=200, num_points=100_000, num_overlaid=20, num_overlaid_points=10_000, num_listed=1_000)


def prepare(side: str, view: str, sizes: Sizes) -> Path:
    """The folder with that view's data, written where it is missing or was written for other sizes or another release."""
    wanted = sizes.view(view)
    known = [FORMAT, side, view, asdict(wanted), _name_migrations() if side == OURS else []]
    digest = hashlib.sha256(json.dumps(known).encode()).hexdigest()
    folder = DATA / "faces" / f"{side}-{view}-{digest[:12]}"
    if folder.exists():
        return folder
    for old in folder.parent.glob(f"{side}-{view}-*"):
        if _is_same_size(old, wanted):
            shutil.rmtree(old)
    partial = folder.with_suffix(".part")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    (partial / "size.json").write_text(json.dumps(asdict(wanted)))
    if side == OURS:
        write_home(partial, wanted)
    else:
        script = [APART.python, faces_peer_data.__file__, side, partial, json.dumps(asdict(wanted))]
        done = subprocess.run(script, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            said = done.stderr.strip().splitlines() or ["it said nothing"]
            raise RuntimeError(f"data of {side} could not be written: {said[-1]}")
    partial.rename(folder)
    return folder


def _name_migrations() -> list[str]:
    store = HERE.parent / "src" / "trn" / "registry"
    return sorted(path.name for path in store.glob("*migrations/*.sql"))


def _is_same_size(folder: Path, wanted: View) -> bool:
    try:
        found: object = json.loads((folder / "size.json").read_text())
    except (OSError, ValueError):
        return True
    return found == asdict(wanted)


def write_home(root: Path, view: View) -> None:
    """Runs that have ended, with their points, as the daemon would have written them."""
    home = Home(root)
    home.make()
    registry, metrics = RunRegistry(home.registry), MetricStore(home.metrics)
    try:
        for number in range(view.num_runs):
            curves = {name: read_curve(number, view.num_points, name) for name in view.names}
            add_points(metrics, name_run(number), curves)
            newest = {name: values[-1] for name, values in curves.items()}
            ended = add_run(registry, number, view.num_points, newest)
            if number % RUNS_AT_ONCE == 0 or number == view.num_runs - 1:
                ended.result()
    finally:
        metrics.close()
        registry.close()


def add_points(metrics: MetricStore, run_id: str, curves: dict[str, list[float]]) -> None:
    num_points = len(next(iter(curves.values())))
    for first in range(0, num_points, BATCH):
        last = min(first + BATCH, num_points)
        points = [
            (step + 1, 1, name, step, values[step], START_MS + step * STEP_MS)
            for step in range(first, last)
            for name, values in curves.items()
        ]
        metrics.add(run_id, offset=100 * last, last_seq=last, points=points).result()


def add_run(
    registry: RunRegistry, number: int, num_points: int, newest: dict[str, float]
) -> "Future[RunRecord]":
    run_id = name_run(number)
    hyperparams = {"lr": 1e-3, "seed": number}
    config = {"trainer": "bench.trainers:Bench", "max_steps": num_points, "hyperparams": hyperparams}
    tags = {"kind": f"kind-{number % 5}", "group": f"group-{number % 20}"}
    registry.submit(NewRun(run_id=run_id, digest=run_id, config=config, name=f"bench {number}", tags=tags))
    registry.claim(run_id, [])
    registry.launched(run_id, 1, worker="bench", pid=1)
    registry.follow(
        run_id,
        1,
        offset=100 * num_points,
        last_seq=num_points,
        step=num_points,
        heartbeat_ms=START_MS,
        metrics=newest,
        end_step=num_points,
    )
    cause = Cause(id="completed", values={"step": num_points})
    return registry.end(run_id, 1, Ending(state=RunState.COMPLETED, cause=cause, exit_code=0))
