"""Training in two processes through the worker, beside DDP by hand under torchrun. The sides are in `ddp_sides`."""

from collections.abc import Callable

from bars import Bar, Row, build_row
from harness import Measurements, Side, measure

OURS = "ours"
HAND = "hand-written: DDP under torchrun"
# A shared machine is faster in one second than in the next: many short stretches, each beside the other side's. And
# some processes are luckier than others with where their memory lies: all are started anew for each sitting.
NUM_SITTINGS, ROUNDS_PER_SITTING = 5, 61
QUICK_ROUNDS = 15


def run(*, quick: bool, say: Callable[[str], None]) -> tuple[list[Row], Measurements]:
    num_sittings, num_rounds = (1, QUICK_ROUNDS) if quick else (NUM_SITTINGS, ROUNDS_PER_SITTING)
    plan = {"num_stretches": num_rounds, "warm_steps": 1, "steps": 5}
    sides = [
        Side(name=OURS, function="ours", options={"plan": plan}),
        Side(name=HAND, function="hand", options={"plan": plan}),
    ]
    measured = Measurements()
    for number in range(num_sittings):
        sitting = measure("ddp_sides.py", sides, num_rounds=num_rounds, fresh=False, seed=number, say=say)
        sitting.note_pair(OURS, HAND, ratio_of="rows_per_s", difference_of="step_us")
        measured.append(sitting)
    rows = [
        build_row(
            measured,
            what="DDP, 2 gloo processes through the worker: throughput against a loop by hand",
            unit="× by hand",
            key="ratio",
            ours=OURS,
            bar=Bar(limit=0.97, at_least=True),
            note=(
                "MLP 256-1024-1024-10, batch 64 and one thread in each process, the same parquet files; `resources:"
                " {processes: 2}` and `distribute_module`, events every 10 steps; short stretches of steps that take turns,"
                " the ratio is that of one round"
            ),
        ),
        build_row(
            measured,
            what="DDP, 2 gloo processes through the worker: the same as a rate",
            unit="rows/s",
            key="rows_per_s",
            ours=OURS,
            beside=[HAND],
        ),
    ]
    return rows, measured
