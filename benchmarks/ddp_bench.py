"""Training in two processes through the worker, beside DDP by hand under torchrun. The sides are in `ddp_sides`."""

from collections.abc import Callable

from bars import Bar, Row, build_row
from harness import Measurements, Side, measure

OURS = "ours"
HAND = "hand-written: DDP under torchrun"


def run(*, quick: bool, say: Callable[[str], None]) -> tuple[list[Row], Measurements]:
    # Short stretches, and many: a shared machine is faster in one second than in the next.
    num_rounds = 21 if quick else 401
    plan = {"num_stretches": num_rounds, "warm_steps": 1, "steps": 5}
    sides = [
        Side(name=OURS, function="ours", options={"plan": plan}),
        Side(name=HAND, function="hand", options={"plan": plan}),
    ]
    measured = measure("ddp_sides.py", sides, num_rounds=num_rounds, fresh=False, say=say)
    measured.note_pair(OURS, HAND, ratio_of="rows_per_s", difference_of="step_us")
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
