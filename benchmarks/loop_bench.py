"""The loop's own cost per step, beside a bare loop and the peers' loops. The sides are in `loop_sides`.

One interpreter per side, kept for all rounds; in each round it times bare, framework, bare.
"""

from collections.abc import Callable

from bars import Bar, Row, build_row
from harness import Measurements, Side, measure

OURS = "ours"
# How many steps make a stretch long enough to time: about 0.3 to 3 s each.
NULL_SIDES = {
    OURS: ("ours", 400_000),
    "hand-written: cancel flag, JSON line every 10 steps": ("hand", 400_000),
    "Ignite Engine": ("ignite", 60_000),
    "Ignite Engine, JSON line every 10 steps": ("ignite_handler", 60_000),
    "Lightning Fabric, its loader": ("fabric", 30_000),
    "accelerate, its loader": ("accelerate", 12_000),
    "Lightning Trainer, everything off": ("lightning", 8_000),
    "HF Trainer, no logging": ("transformers", 6_000),
}
MODEL_SIDES = {
    OURS: "ours",
    "limit: the same hooks and results, no duties": "hooks",
    "hand-written: cancel flag, JSON line every 10 steps": "hand",
    "Ignite Engine": "ignite",
    "Lightning Trainer, everything off": "lightning",
}
NULL_BARE_STEPS = 400_000
MODEL_STEPS = 1_000
# A round of the small model can be off by a tenth either way on a shared machine; the bar is at 3 %.
MODEL_ROUNDS, MODEL_PEER_ROUNDS = 41, 9


def run(*, quick: bool, say: Callable[[str], None]) -> tuple[list[Row], Measurements]:
    shorter = 4 if quick else 1
    null_sides = [
        Side(
            name=f"null: {name}",
            function=function,
            options={"work": "null", "steps": steps // shorter, "bare_steps": NULL_BARE_STEPS // shorter},
        )
        for name, (function, steps) in NULL_SIDES.items()
    ]
    model_sides = [
        Side(
            name=f"model: {name}",
            function=function,
            options={"work": "model", "steps": MODEL_STEPS // shorter, "bare_steps": MODEL_STEPS // shorter},
            max_rounds=None if name == OURS else MODEL_PEER_ROUNDS // shorter,
        )
        for name, function in MODEL_SIDES.items()
    ]
    measured = measure("loop_sides.py", null_sides, num_rounds=2 if quick else 7, fresh=False, say=say)
    model = measure("loop_sides.py", model_sides, num_rounds=MODEL_ROUNDS // shorter, fresh=False, say=say)
    null_rows = rename(measured, "null: ")
    model_rows = rename(model, "model: ")
    measured.merge(model)
    rows = [
        build_row(
            null_rows,
            what="loop, null step: time above a bare loop with the same two hooks",
            unit="µs/step",
            key="above_us",
            ours=OURS,
            beside=list(NULL_SIDES)[1:],
            bar=Bar(limit=1.5),
            note=(
                "events.jsonl every 10 steps, heartbeat, cancel file and signals on; paired difference to bare loops"
                " before and after it in the same interpreter; peers without any logging unless it says so"
            ),
        ),
        build_row(
            model_rows,
            what="loop, small torch model: time per step against the bare loop",
            unit="× bare",
            key="ratio",
            ours=OURS,
            beside=list(MODEL_SIDES)[1:],
            bar=Bar(limit=1.03),
            note=(
                "Linear(16,16)->Linear(16,1), batch 32, SGD; the bare loop has no hooks and no metrics. The limit calls"
                " two hooks and makes a StepResult with the detached loss"
            ),
        ),
        build_row(
            model_rows,
            what="loop, small torch model: the same as a difference",
            unit="µs/step",
            key="above_us",
            ours=OURS,
            beside=list(MODEL_SIDES)[1:],
        ),
    ]
    return rows, measured


def rename(measured: Measurements, prefix: str) -> Measurements:
    """The same measurements with the names a reader sees."""
    return Measurements(
        samples={name.removeprefix(prefix): values for name, values in measured.samples.items()},
        failures={name.removeprefix(prefix): reason for name, reason in measured.failures.items()},
    )
