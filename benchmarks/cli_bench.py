"""The command line: how long a person waits for it, what it costs to follow a run, and the bus beside it.

The environment has bytecode of everything, as one that pip installed has.
"""

import compileall
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bars import Bar, Row, build_row
from daemon_session import end_everything
from harness import DATA, HERE, Measurements, Side, measure

PASS = "python -c pass"
LIST = "trn list"
HELP = "trn --help"
COMPLETION = "completion of `trn st`"
RUN = "trn run, one step"
EMPTY = "trn run, empty home"
IMPORTS = "the worker's own imports"
FOLLOW = "trn run, following"
OUTBOX = "ours, through the outbox"
PIPELINE = "redis-py, a pipeline of ready entries"
IMPORT_PEERS = {
    "import click": ["python", "-c", "import click"],
    "import msgspec": ["python", "-c", "import msgspec"],
}
TORCHX = "torchx list -s local_cwd, until it refuses"
RAY_LIST = "ray job list"
RAY_SUBMIT = "ray job submit, until the job's code runs"
RAY_HELP, MLFLOW_HELP, ACCELERATE_HELP = HELP_PEERS = ("ray --help", "mlflow --help", "accelerate --help")
SIDES, BUS_SIDES = "cli_sides.py", "cli_bus_sides.py"
TIMEOUT_S = 180.0


def run(*, quick: bool, say: Callable[[str], None]) -> tuple[list[Row], Measurements]:
    DATA.mkdir(exist_ok=True)
    for package in ("trn", "gen_worker"):
        compileall.compile_dir(HERE.parent / "src" / package, quiet=2)
    with tempfile.TemporaryDirectory(dir=DATA, prefix="cli-", ignore_cleanup_errors=True) as name:
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

    def take(rounds: int, *sides: Side, script: str = SIDES) -> None:
        measured.append(measure(script, sides, num_rounds=rounds, fresh=False, say=say, timeout_s=TIMEOUT_S))

    def command(name: str, *words: str, max_rounds: int | None = None, **options: Any) -> Side:
        return side(name, "command", max_rounds, command=words, **options)

    num_slow = 2 if quick else 5  # rounds of what takes seconds
    take(
        9 if quick else 25,
        side(LIST, "list_runs", num_runs=1000),
        side(COMPLETION, "completion"),
        command(PASS, "python", "-c", "pass"),
        command(HELP, "trn", "--help"),
        *(command(name, *words) for name, words in IMPORT_PEERS.items()),
        command(TORCHX, "torchx", "list", "-s", "local_cwd", is_apart=True, refusal="cannot be listed"),
        command(RAY_HELP, "ray", "--help", max_rounds=num_slow),
        command(MLFLOW_HELP, "mlflow", "--help", is_apart=True, max_rounds=num_slow),
        command(ACCELERATE_HELP, "accelerate", "--help", max_rounds=num_slow),
        side(RAY_LIST, "ray_job_list", num_slow),
    )
    take(5 if quick else 15, side(RUN, "one_step"), side(RAY_SUBMIT, "ray_job_submit", num_slow))
    take(3 if quick else 7, side(EMPTY, "empty_home"), side(IMPORTS, "own_imports"))
    take(1 if quick else 3, side(FOLLOW, "follow", events_per_s=1000, seconds=6 if quick else 10))
    events = {"num_events": 20_000 if quick else 50_000}
    bus = (side(OUTBOX, "outbox", num_runs=4, **events), side(PIPELINE, "pipelined", **events))
    take(3 if quick else 9, *bus, script=BUS_SIDES)
    measured.note_pair(EMPTY, IMPORTS, ratio_of="ms", difference_of="ms")
    return measured


def build_rows(measured: Measurements) -> list[Row]:
    whole = "a whole process, from spawn to end, page cache warm, bytecode there"
    return [
        build_row(
            measured,
            what="trn list with 1,000 runs, cold",
            unit="ms",
            key="ms",
            ours=LIST,
            beside=(PASS, *IMPORT_PEERS, TORCHX, RAY_LIST),
            bar=Bar(limit=5, against=(PASS,)),
            note=(
                f"{whole}; no daemon runs. torchx keeps no list of what it ran on this machine: its time is that to say so."
                " Ray's list has one job, on a cluster that runs in Ray's own rounds only"
            ),
        ),
        *(
            build_row(
                measured,
                what=name,
                unit="ms",
                key="ms",
                ours=name,
                beside=(PASS, *HELP_PEERS),
                bar=Bar(limit=5, against=(PASS,)),
                note=whole,
            )
            for name in (HELP, COMPLETION)
        ),
        build_row(
            measured,
            what="trn run of a one-step job on a running daemon",
            unit="ms",
            key="ms",
            ours=RUN,
            beside=(RAY_SUBMIT,),
            bar=Bar(limit=350),
            note=(
                f"{whole}, in a pipe: checks, snapshot of the folder, submit, training, final checkpoint, the end told."
                " Ray's until the first line of user code only, with --no-wait, on a cluster that has had a job"
            ),
        ),
        build_row(
            measured,
            what="trn run on an empty home, until the worker's first event, beyond the worker's own imports",
            unit="ms",
            key="difference",
            ours=EMPTY,
            bar=Bar(limit=1200),
            note=(
                "from spawn to the first event's own clock, less a fresh interpreter that imports what a worker does, of"
                " the same round; daemon and launcher are started by it"
            ),
        ),
        build_row(
            measured,
            what="trn run at a terminal, following 1,000 events/s",
            unit="% of a core",
            key="percent",
            ours=FOLLOW,
            bar=Bar(limit=10),
            note="user and system time of the command while the worker writes, 120 columns, redrawn for a person",
        ),
        build_row(
            measured,
            what="events through the outbox to a real Redis",
            unit="events/s",
            key="events_per_s",
            ours=OUTBOX,
            beside=(PIPELINE,),
            bar=Bar(limit=20_000, at_least=True),
            note=(
                "4 runs; from the registry's commit until Redis has every event and the outbox's place is committed; each"
                " side has a server with an append-only file; the pipeline reads nothing and remembers nothing"
            ),
        ),
    ]
