"""Model servers: ours beside LitServe and FastAPI with the same model, and beside uvicorn that says hello.

The load is wrk's, from Debian, on the same cores as the servers. All sides of a row are measured in the same rounds.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bars import Bar, Row, build_row
from harness import DATA, HERE, Measurements, Side, child_environment, measure
from inference_load import DELAY_S

OURS = "ours"
ONE, ARROW, WIDE_JSON = "ours, 1 client", "ours, Arrow IPC", "ours, JSON of the same rows"
LEFT, KILLED, MEMORY = "ours, clients left", "ours, worker killed", "ours, idle"
HELLO, FASTAPI = "uvicorn, hello", "FastAPI"
LITSERVE, UNBATCHED = "LitServe, batches of 32", "LitServe, no batching"
SERVED, SWAPPED, LARGE, PREDICTED = "trn serve", "trn promote", "trn promote, 100 MB", "trn predict"
READ, BY_HAND, LITSERVE_START = "hash and read 100 MB", "a loop by hand", "LitServe, start"
LITSERVE_ONE, LITSERVE_LEFT, BARE = "LitServe, 1 client", "LitServe, clients left", "the model alone"
MAX_FAILED = 32  # one batch
TIMEOUT_S = 300.0
Take = Callable[..., None]


def run(*, quick: bool, say: Callable[[str], None]) -> tuple[list[Row], Measurements]:
    DATA.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=DATA, prefix="inference-", ignore_cleanup_errors=True) as name:
        measured = _measure_all(Path(name), quick=quick, say=say)
    return build_rows(measured), measured


def _measure_all(folder: Path, *, quick: bool, say: Callable[[str], None]) -> Measurements:
    small, wide = _write_inputs(folder)
    measured = Measurements()

    def side(name: str, function: str, max_rounds: int | None = None, **options: Any) -> Side:
        return Side(name=name, function=function, options=options, max_rounds=max_rounds)

    def take(num_rounds: int, *sides: Side, script: str = "inference_sides.py") -> None:
        measured.append(
            measure(
                script,
                sides,
                num_rounds=1 if quick else num_rounds,
                fresh=False,
                say=say,
                timeout_s=TIMEOUT_S,
            )
        )

    seconds = 1.0 if quick else 4.0
    many = {"body": small["body"], "connections": 32, "seconds": seconds}
    one = {**many, "connections": 1}
    take(
        7,
        side(OURS, "front", version=small["version"], load=many),
        side(HELLO, "hello", load={"connections": 32, "seconds": seconds}),
        side(LITSERVE, "litserve", is_batched=True, load=many),
        side(UNBATCHED, "litserve", max_rounds=3, is_batched=False, load=many),
        side(FASTAPI, "fastapi", max_rounds=3, load=many),
    )
    take(
        5,
        side(ONE, "front", version=small["version"], load=one),
        side(LITSERVE_ONE, "litserve", is_batched=False, load=one),
    )
    arrow = {"body": wide["arrow"], "content_type": "application/vnd.apache.arrow.stream", "seconds": seconds}
    take(
        5,
        side(ARROW, "front", version=wide["version"], load={**arrow, "connections": 8}),
        side(
            WIDE_JSON,
            "front",
            version=wide["version"],
            load={"body": wide["body"], "connections": 8, "seconds": seconds},
        ),
    )
    take(
        5,
        side(LEFT, "front_left", version=small["slow"], body=small["body"]),
        side(LITSERVE_LEFT, "litserve_left", max_rounds=2, body=small["body"]),
    )
    take(7, side(KILLED, "front_killed", version=small["version"], load={**many, "seconds": 3.0}))
    rest = {**one, "seconds": 1.0}
    take(3, side(MEMORY, "front_memory", version=small["version"], load=rest), side(BARE, "bare_memory"))
    _take_daemon(take, side, folder, small["body"], quick=quick)
    return measured


def _take_daemon(take: Take, side: Take, folder: Path, body: str, *, quick: bool) -> None:
    """With `trn`, on a warm daemon."""

    def home(name: str) -> str:
        return str(folder / name)

    script = "inference_daemon_sides.py"
    take(7, side(SERVED, "serve", home=home("served")), script=script)
    take(3, side(LITSERVE_START, "litserve_start"))
    load = {"body": body, "connections": 32}
    swaps = {"num_swaps": 10 if quick else 100, "load": load}
    take(3, side(SWAPPED, "swap", home=home("swapped"), **swaps), script=script)
    take(
        5,
        side(LARGE, "swap_large", home=home("large")),
        side(READ, "read_large", home=home("read")),
        script=script,
    )
    num_rows = 20_000 if quick else 200_000
    take(
        5,
        side(PREDICTED, "predict", home=home("predicted"), num_rows=num_rows),
        side(BY_HAND, "predict_by_hand", home=home("by-hand"), num_rows=num_rows),
        script=script,
    )


def _write_inputs(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Files that the sides are given: versions, and the bodies of requests.

    By another interpreter: with torch in this one, its pages would be counted as shared with it, and memory is measured.
    """
    command = [sys.executable, "inference_work.py", str(folder)]
    subprocess.run(command, cwd=HERE, env=child_environment(), check=True)
    written = {path.stem: str(path) for path in folder.iterdir() if path.is_file()}
    return (
        {"version": written["small"], "slow": written["slow"], "body": written["small-body"]},
        {"version": written["wide"], "body": written["wide-body"], "arrow": written["wide-rows"]},
    )


def build_rows(measured: Measurements) -> list[Row]:
    beside = [HELLO, LITSERVE, UNBATCHED, FASTAPI]
    mlp = "MLP 64-256-256-10, JSON, 32 clients"
    models = [LITSERVE, UNBATCHED, FASTAPI]
    return [
        build_row(
            measured,
            what=f"{mlp}, against a server of models",
            unit="requests/s",
            key="per_s",
            ours=OURS,
            beside=models,
            bar=Bar(limit=10, at_least=True, against=(LITSERVE,)),
            note="wrk takes its part of the same two cores; every request has a bearer, is checked and counted",
        ),
        build_row(
            measured,
            what=f"{mlp}, against a server of nothing",
            unit="requests/s",
            key="per_s",
            ours=OURS,
            beside=[HELLO],
            bar=Bar(limit=0.7, at_least=True, against=(HELLO,)),
        ),
        build_row(measured, what=f"{mlp}: p99", unit="ms", key="p99_ms", ours=OURS, bar=Bar(limit=5)),
        build_row(
            measured,
            what=f"{mlp}: p99, against LitServe",
            unit="ms",
            key="p99_ms",
            ours=OURS,
            beside=beside,
            bar=Bar(limit=0.25, against=(LITSERVE,)),
        ),
        build_row(
            measured,
            what=f"{mlp}: processor time of a request",
            unit="µs",
            key="cpu_us",
            ours=OURS,
            beside=beside,
            bar=Bar(limit=60),
            note="of all processes of the server",
        ),
        build_row(
            measured,
            what="MLP, JSON, one client: p50",
            unit="ms",
            key="p50_ms",
            ours=ONE,
            beside=[LITSERVE_ONE],
            bar=Bar(limit=0.25),
        ),
        build_row(
            measured,
            what="one layer 784-10, 32 rows a request, Arrow IPC",
            unit="requests/s",
            key="per_s",
            ours=ARROW,
            beside=[WIDE_JSON],
            bar=Bar(limit=5, at_least=True, against=(WIDE_JSON,)),
        ),
        build_row(
            measured,
            what="100 clients leave: the next one waits",
            unit="batches",
            key="wait_batches",
            ours=LEFT,
            beside=[LITSERVE_LEFT],
            bar=Bar(limit=2),
            note=f"a batch takes {1000 * DELAY_S:.0f} ms; LitServe computes one row at a time for the clients that left",
        ),
        build_row(
            measured,
            what="a model worker of two is killed under load: failed requests",
            unit="requests",
            key="failed",
            ours=KILLED,
            bar=Bar(limit=MAX_FAILED),
        ),
        build_row(
            measured,
            what="a model worker of two is killed under load: back after",
            unit="ms",
            key="gone_ms",
            ours=KILLED,
            bar=Bar(limit=200),
        ),
        build_row(
            measured,
            what="trn serve on a warm daemon, until it answers",
            unit="ms",
            key="ms",
            ours=SERVED,
            beside=[LITSERVE_START],
            bar=Bar(limit=300),
            note="the command, from its spawn to its end with --detach; LitServe from its spawn until it listens",
        ),
        build_row(
            measured,
            what="swap under 32 clients: failed requests",
            unit="requests",
            key="failed",
            ours=SWAPPED,
            bar=Bar(limit=0),
        ),
        build_row(
            measured,
            what="swap under 32 clients: from the call to the new version",
            unit="ms",
            key="swap_ms",
            ours=SWAPPED,
            bar=Bar(limit=60),
            note="the median of all swaps of a round; each version is loaded anew",
        ),
        build_row(
            measured,
            what="swap under 32 clients: p99 of the requests meanwhile",
            unit="ms",
            key="p99_ms",
            ours=SWAPPED,
            bar=Bar(limit=20),
        ),
        build_row(
            measured,
            what="swap of a model of 100 MB",
            unit="ms",
            key="ms",
            ours=LARGE,
            beside=[READ],
            bar=Bar(limit=1.5, against=(READ,)),
        ),
        build_row(
            measured,
            what="trn predict over parquet, batches of 32",
            unit="rows/s",
            key="rows_per_s",
            ours=PREDICTED,
            beside=[BY_HAND],
            bar=Bar(limit=0.95, at_least=True, against=(BY_HAND,)),
            note="without the start of the process; ours verifies and hashes its parts",
        ),
        build_row(
            measured,
            what="idle server with a small model: memory",
            unit="MB",
            key="memory_mb",
            ours=MEMORY,
            beside=[BARE],
            bar=Bar(limit=1.3, against=(BARE,)),
            note="proportional set size of all its processes: what they share is counted once; each is measured while the"
            " other does not run",
        ),
    ]
