"""What the page and its peers show: the same runs and curves, written once for each side and kept in .data/faces.

Three views: `table` has many short runs, `chart` has one long one, `overlay` has many of one metric. Ours are written
by the registry and the metric store themselves; the peers' by `faces_peer_data`, in their own environment.
"""

import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import faces_peer_data
from environments import APART
from faces_peer_data import METRIC, SECOND_METRIC, START_MS, STEP_MS, View, name_run, read_curve
from harness import DATA, HERE

OURS = "ours"
BATCH = 50_000


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
QUICK = Sizes(
    num_runs=200, num_points=100_000, num_overlaid=20, num_overlaid_points=10_000, num_listed=1_000
)


def prepare(side: str, view: str, sizes: Sizes) -> Path:
    """The folder with that view's data, written where it is missing or was written by other code."""
    wanted = sizes.view(view)
    digest = hashlib.sha256(json.dumps([side, view, asdict(wanted)]).encode())
    for path in _sources(side):
        digest.update(path.read_bytes())
    folder = DATA / "faces" / f"{side}-{view}-{digest.hexdigest()[:12]}"
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


def _sources(side: str) -> list[Path]:
    """What decides how the data looks."""
    own = [Path(__file__), Path(faces_peer_data.__file__)]
    store = HERE.parent / "src" / "trn" / "registry"
    return own if side != OURS else own + sorted(store.rglob("*.sql"))


def _is_same_size(folder: Path, wanted: View) -> bool:
    try:
        found: object = json.loads((folder / "size.json").read_text())
    except (OSError, ValueError):
        return True
    return found == asdict(wanted)


def write_home(root: Path, view: View) -> None:
    """Runs that have ended, with their points, as the daemon would have written them."""
    from trn.core.home import Home
    from trn.registry.metrics import MetricStore
    from trn.registry.sqlite import RunRegistry

    home = Home(root)
    home.make()
    registry, metrics = RunRegistry(home.registry), MetricStore(home.metrics)
    try:
        for number in range(view.num_runs):
            names = (METRIC, SECOND_METRIC) if view.has_second else (METRIC,)
            curves = {name: read_curve(number, view.num_points, name) for name in names}
            last_seq = _add_points(metrics, name_run(number), curves)
            _add_run(registry, number, view.num_points, last_seq, {n: c[-1] for n, c in curves.items()})
    finally:
        metrics.close()
        registry.close()


def _add_points(metrics: object, run_id: str, curves: dict[str, list[float]]) -> int:
    from trn.registry.metrics import MetricStore

    assert isinstance(metrics, MetricStore)
    num_points = len(next(iter(curves.values())))
    for first in range(0, num_points, BATCH):
        last = min(first + BATCH, num_points)
        points = [
            (step + 1, 1, name, step, values[step], START_MS + step * STEP_MS)
            for step in range(first, last)
            for name, values in curves.items()
        ]
        metrics.add(run_id, offset=100 * last, last_seq=last, points=points).result()
    return num_points


def _add_run(registry: object, number: int, num_points: int, last_seq: int, newest: dict[str, float]) -> None:
    from trn.core.causes import Cause
    from trn.core.runs import RunState
    from trn.registry.base import Ending, NewRun
    from trn.registry.sqlite import RunRegistry

    assert isinstance(registry, RunRegistry)
    run_id = name_run(number)
    config = {"trainer": "bench.trainers:Bench", "max_steps": num_points, "hyperparams": {"lr": 1e-3, "seed": number}}
    tags = {"kind": f"kind-{number % 5}", "group": f"group-{number % 20}"}
    registry.submit(NewRun(run_id=run_id, digest=run_id, config=config, name=f"bench {number}", tags=tags))
    registry.claim(run_id, [])
    registry.launched(run_id, 1, worker="bench", pid=1)
    registry.follow(
        run_id,
        1,
        offset=100 * last_seq,
        last_seq=last_seq,
        step=num_points,
        heartbeat_ms=START_MS,
        metrics=newest,
        end_step=num_points,
    )
    done = Ending(state=RunState.COMPLETED, cause=Cause(id="completed", values={"step": num_points}), exit_code=0)
    registry.end(run_id, 1, done).result()


PEER_NAMES: dict[str, Callable[[Path, View], None]] = faces_peer_data.WRITERS
