"""What callbacks and validation cost above a trainer without them. The sides are in `trainer_sides`.

One interpreter per side, kept for all rounds; what is reported are paired differences within it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bars import Bar, Row, build_row
from harness import Measurements, Side, measure

LOOKING_ON = "three that look on"
OURS = "ours"
WITHOUT = "ours, without callbacks"
BAR_ALONE = "ours, ProgressBar alone"
THROUGHPUT_ALONE = "ours, ThroughputMonitor alone"
MODEL = "small model"
VALIDATION = "validation"
LIGHTNING = "Lightning Trainer, its progress bar"
TRANSFORMERS = "HF Trainer, its progress bar"
PEERS = {LIGHTNING: ("lightning", 4_000), TRANSFORMERS: ("transformers", 3_000)}
BARE_STEPS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """A quick run takes a quarter of the rounds, and of most steps."""

    quick: bool

    def rounds(self, full: int) -> int:
        return max(full // 4, 2) if self.quick else full

    def steps(self, full: int) -> int:
        return full // 4 if self.quick else full

    def side(self, name: str, function: str, steps: int, *, rounds: int | None = None, **more: Any) -> Side:
        options = {"steps": self.steps(steps), "bare_steps": self.steps(BARE_STEPS), **more}
        return Side(
            name=name,
            function=function,
            options=options,
            max_rounds=None if rounds is None else self.rounds(rounds),
        )


def run(*, quick: bool, say: Callable[[str], None]) -> tuple[list[Row], Measurements]:
    effort = Effort(quick=quick)

    def take(sides: list[Side], num_rounds: int) -> Measurements:
        rounds = effort.rounds(num_rounds)
        return measure("trainer_sides.py", sides, num_rounds=rounds, fresh=False, say=say)

    # The bar is a fifth of a microsecond: many short rounds, and nothing else in between.
    measured = take([effort.side(LOOKING_ON, "looking_on", 100_000)], 61)
    shipped = [
        effort.side(OURS, "shipped", 300_000),
        effort.side(THROUGHPUT_ALONE, "shipped", 300_000, rounds=5, only="throughput"),
        effort.side(BAR_ALONE, "shipped", 300_000, rounds=5, only="bar"),
        *(effort.side(name, function, steps, rounds=7) for name, (function, steps) in PEERS.items()),
    ]
    measured.merge(take(shipped, 15))
    model_steps = {"steps": effort.steps(1_000), "bare_steps": effort.steps(1_000)}
    measured.merge(take([Side(name=MODEL, function="shipped_model", options=model_steps)], 25))
    passes = {"validate_every": 10, "passes": 4}
    measured.merge(take([Side(name=VALIDATION, function="validation", options=passes)], 41))
    if OURS in measured.samples:
        measured.samples[WITHOUT] = [
            {"above_us": sample["without_above_us"]} for sample in measured.samples[OURS]
        ]
    return build_rows(measured), measured


def build_rows(measured: Measurements) -> list[Row]:
    return [
        build_row(
            measured,
            what="Trainer, null step: three callbacks that look at no batch, more than without",
            unit="µs/step",
            key="more_us",
            ours=LOOKING_ON,
            bar=Bar(limit=0.2),
            note=(
                "each has every hook but the two of a batch; metrics every 10 steps; paired difference to the same"
                " Trainer without callbacks before and after it in the same interpreter"
            ),
        ),
        build_row(
            measured,
            what="Trainer, null step: EarlyStopping, ThroughputMonitor and ProgressBar, more than without",
            unit="µs/step",
            key="more_us",
            ours=OURS,
            beside=[THROUGHPUT_ALONE, BAR_ALONE, *PEERS],
            bar=Bar(limit=5),
            note=(
                "metrics every 10 steps, bars drawn into a pseudo-terminal; two null batches are validated every 1000"
                " steps with and without the callbacks, so that validation is in neither; a peer's line is what its"
                " own progress bar adds to its Trainer with everything off"
            ),
        ),
        build_row(
            measured,
            what="Trainer, null step, callbacks on: time above a bare loop with the same two hooks",
            unit="µs/step",
            key="above_us",
            ours=OURS,
            beside=[WITHOUT, *PEERS],
            note="the sides of the line above it; ours with its validation",
        ),
        build_row(
            measured,
            what="Trainer, small torch model: the three shipped callbacks, against without",
            unit="× without",
            key="more_ratio",
            ours=MODEL,
            note="a bar that is drawn four times a second costs by the second, not by the step: no bar is set for it",
        ),
        build_row(
            measured,
            what="validation: a pass after the first, against bare validate_step calls on ready batches",
            unit="× bare",
            key="ratio",
            ours=VALIDATION,
            bar=Bar(limit=1.1),
            note=(
                "20 batches of 64 from parquet every 10 steps, MLP 256-1024-1024-10; time of a run with validation"
                " less that of one without; reading and prepare_batch are in ours, not in the bare calls"
            ),
        ),
        build_row(
            measured,
            what="validation: feed openings and thread starts after the first pass",
            unit="",
            key="openings_and_starts",
            ours=VALIDATION,
            bar=Bar(limit=0),
        ),
    ]
