"""A home with a trained run that can be served, and what a client of its server sees."""

import http.client
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from command_line import DEADLINE_S, read_lines, trn

SERVED = Path(__file__).parents[1] / "integration" / "trainers" / "served.py"


class Answer(NamedTuple):
    status: int
    body: dict[str, Any]
    headers: dict[str, str]

    @property
    def label(self) -> str:
        """Which model answered."""
        return f"{self.headers['x-trn-run']}@{self.headers['x-trn-step']}"


def write_project(folder: Path, **changes: Any) -> Path:
    """A linear model, its data, and a job that saves at steps 50, 100 and 150, each better than the one before."""
    import numpy
    import pyarrow
    import pyarrow.parquet

    folder.mkdir(exist_ok=True)
    shutil.copy(SERVED, folder)
    x = numpy.random.default_rng(0).normal(size=(256, 4)).astype("float32")
    y = (x @ numpy.array([1.0, 2.0, 3.0, 4.0])).astype("float32")
    rows = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(x.ravel()), 4)
    pyarrow.parquet.write_table(
        pyarrow.table({"x": rows, "y": pyarrow.array(y)}), folder / "train.parquet", row_group_size=64
    )
    data = {"parquet_paths": ["train.parquet"], "batch_size": 32}
    job = {
        "run_id": "line",
        "trainer": "served:Served",
        "dataset": data,
        "validation": {"dataset": data},
        "validate_every": 50,
        "checkpoint_every": 50,
        "max_steps": 150,
        "checkpoints": {"keep_last": 10},
        "resources": {"devices": ["cpu"]},
        **changes,
    }
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    return path


def make_home(folder: Path) -> Path:
    """With CPUs for many servers, whatever this machine has."""
    home = folder / "home"
    home.mkdir(mode=0o700)
    (home / "settings.toml").write_text("[inventory]\ncpus = 16\n")
    return home


def run_trn(home: Path, *words: object) -> list[dict[str, Any]]:
    """What it prints; it has to succeed."""
    done = trn(home, *words, "--json")
    assert done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-2000:])
    return read_lines(done)


def serve(home: Path, *words: object) -> dict[str, Any]:
    """Its `serving` object, once it answers."""
    return run_trn(home, "serve", *words, "--cpu-only", "--detach")[-1]


def ask(serving: dict[str, Any], path: str = "/v1/predict", **body: Any) -> Answer:
    place = urlsplit(serving["url"])
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=DEADLINE_S)
    headers = {"Authorization": f"Bearer {serving['bearer']}", "Content-Type": "application/json"}
    try:
        connection.request("POST", path, json.dumps(body or {"rows": [{"x": [1, 1, 1, 1]}]}), headers)
        found = connection.getresponse()
        content = json.loads(found.read())
        return Answer(found.status, content, {name.lower(): value for name, value in found.getheaders()})
    finally:
        connection.close()


def until(is_so: Callable[[], bool], what: str) -> None:
    """Looks until it is so; what is waited for has nothing to be woken by."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def status_of(home: Path, run_id: str) -> dict[str, Any]:
    return run_trn(home, "status", run_id)[0]
