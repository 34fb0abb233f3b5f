"""The PyTorch runner, which needs no code, beside the same training by hand. The sides are in `runner_sides`."""

from collections.abc import Callable
from dataclasses import dataclass

from bars import Bar, Row, build_row
from harness import Measurements, Side, measure

OURS = "ours"
HAND = "hand-written"
# glibc gives freed memory back and asks for it again, at every step if the sizes are unlucky: a fifth of the time.
KEPT = "hand-written, told by MALLOC_… settings to keep its memory"
BATCH_SIZE = 64
# A shared machine is faster in one second than in the next: many short stretches, each beside the other side's. And
# some processes are luckier than others with where their memory lies: all are started anew for each sitting.
NUM_SITTINGS, ROUNDS_PER_SITTING = 5, 41
QUICK_ROUNDS = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """`name` is a key of `runner_sides.MODELS`; `steps` make a stretch of about a tenth of a second."""

    name: str
    words: str
    steps: int
    bar: Bar | None = None


AT_LEAST = Bar(limit=0.97, at_least=True)
MODELS = (
    Model(name="mlp", words="MLP 256-1024-1024-10 on float32", steps=8, bar=AT_LEAST),
    Model(name="cnn", words="the runner's CNN on 28 x 28 pixels", steps=5, bar=AT_LEAST),
    # So small that one sees what the runner adds to a step.
    Model(name="small mlp", words="MLP 256-256-256-10 on float32", steps=50),
)


def run(*, quick: bool, say: Callable[[str], None]) -> tuple[list[Row], Measurements]:
    everything = Measurements()
    rows: list[Row] = []
    for model in MODELS:
        sittings, rounds = (1, QUICK_ROUNDS) if quick else (NUM_SITTINGS, ROUNDS_PER_SITTING)
        measured = _measure(model, sittings, rounds, say)
        rows += build_rows(measured, model)
        everything.samples.update({f"{model.name}: {name}": got for name, got in measured.samples.items()})
        everything.failures.update({f"{model.name}: {name}": got for name, got in measured.failures.items()})
    return rows, everything


def _measure(model: Model, num_sittings: int, num_rounds: int, say: Callable[[str], None]) -> Measurements:
    plan = {
        "num_stretches": num_rounds,
        "warm_steps": max(model.steps // 10, 1),
        "steps": model.steps,
    }
    options = {"plan": plan, "model": model.name, "batch_size": BATCH_SIZE}
    sides = [
        Side(name=OURS, function="ours", options=options),
        Side(name=HAND, function="hand", options=options),
        Side(name=KEPT, function="hand_kept", options=options),
    ]
    measured = Measurements()
    for number in range(num_sittings):

        def say_place(text: str, place: str = f"{model.name}, sitting {number + 1}/{num_sittings}") -> None:
            say(f"{place}, {text}")

        sitting = measure(
            "runner_sides.py",
            sides,
            num_rounds=num_rounds,
            fresh=False,
            seed=number,
            say=say_place,
        )
        sitting.note_pair(OURS, HAND, ratio_of="rows_per_s", difference_of="step_us")
        measured.append(sitting)
    return measured


def build_rows(measured: Measurements, model: Model) -> list[Row]:
    what = f"PyTorch runner, {model.name}"
    return [
        build_row(
            measured,
            what=f"{what}: throughput against the same by hand",
            unit="× by hand",
            key="ratio",
            ours=OURS,
            bar=model.bar,
            note=(
                f"{model.words}, batch {BATCH_SIZE}, AdamW, cross entropy, one thread; `python -m"
                " gen_worker.pytorch_runner` with events every 10 steps; by hand: pyarrow row groups to tensors, decoded"
                " ahead in a thread, no events; short stretches of steps that take turns, the ratio is that of one round"
            ),
        ),
        build_row(
            measured, what=f"{what}: the same as a difference", unit="µs/step", key="difference", ours=OURS
        ),
        build_row(
            measured,
            what=f"{what}: the same as a rate",
            unit="rows/s",
            key="rows_per_s",
            ours=OURS,
            beside=[HAND, KEPT],
        ),
    ]
