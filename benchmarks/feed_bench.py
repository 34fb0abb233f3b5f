"""The feed beside hand-written readers, pyarrow and HF datasets. The sides are in `feed_sides`.

A fresh interpreter for every sample. Rows follow the bars: first pass, later passes over the decode-once cache,
shuffled (rate and memory), tensors, seek, memory over epochs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bars import Bar, Row, build_row
from harness import Measurements, Side, measure

OURS = "ours"
SIZES = (32, 1024)
HAND = {
    "hand-written: pool of 2 decoders, slices": {"decoders": 2},
    "hand-written: 1 decode thread, slices": {"decoders": 1},
}
HF_STREAMING = "HF datasets streaming"
HF_MAPPED = "HF datasets memory-mapped"
HF_SHUFFLED = "HF streaming shuffle(10000)"
BY_HAND_MAPPED = "limit: slices of the mapped copy by hand"
AT_START = "ours, first batch at 0"
IN_TENSORS = {"HF streaming with_format('torch')": False, "HF memory-mapped with_format('torch')": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    quick: bool

    @property
    def num_close_rounds(self) -> int:
        """Where the bar is close to the reference."""
        return 2 if self.quick else 5

    @property
    def num_rounds(self) -> int:
        return 1 if self.quick else 3

    @property
    def options(self) -> dict[str, Any]:
        return {"quick": self.quick, "seconds": 0.4 if self.quick else 1.5}


def run(*, quick: bool, say: Callable[[str], None]) -> tuple[list[Row], Measurements]:
    effort = Effort(quick=quick)
    everything = Measurements()
    rows: list[Row] = []

    def take(part: str, sides: Sequence[Side], *, num_rounds: int) -> Measurements:
        measured = measure(
            "feed_sides.py", sides, num_rounds=num_rounds, fresh=True, say=lambda text: say(f"{part}, {text}")
        )
        everything.samples.update({f"{part}: {name}": got for name, got in measured.samples.items()})
        everything.failures.update({f"{part}: {name}": got for name, got in measured.failures.items()})
        return measured

    caches = Side(name="decode-once copies", function="make_caches", options=effort.options)
    take("preparation", [caches], num_rounds=1)
    for batch_size in SIZES:
        sides = _first_pass_sides(effort, batch_size)
        measured = take(f"first pass {batch_size}", sides, num_rounds=effort.num_close_rounds)
        rows.append(
            build_row(
                measured,
                what=f"feed, first pass over parquet, batch {batch_size}",
                unit="rows/s",
                key="rows_per_s",
                ours=OURS,
                beside=[side.name for side in sides[1:]],
                bar=Bar(limit=0.9, at_least=True, against=tuple(HAND), text="the fastest by hand"),
            )
        )
    for batch_size, limit in zip(SIZES, (2.0, 1.0), strict=True):
        sides = [
            Side(name=OURS, function="ours_cached", options={**effort.options, "batch_size": batch_size}),
            Side(
                name=BY_HAND_MAPPED,
                function="hand_mapped",
                options={**effort.options, "batch_size": batch_size},
            ),
            Side(name=HF_MAPPED, function="hf_mapped", options={**effort.options, "batch_size": batch_size}),
        ]
        measured = take(f"later passes {batch_size}", sides, num_rounds=effort.num_rounds)
        rows.append(
            build_row(
                measured,
                what=f"feed, later passes, decode-once cache, batch {batch_size}",
                unit="rows/s",
                key="rows_per_s",
                ours=OURS,
                beside=[BY_HAND_MAPPED, HF_MAPPED],
                bar=Bar(limit=limit, at_least=True, against=(HF_MAPPED,)),
                note=(
                    "all sides read every value of all three columns, with the same numpy calls, which are nearly all of"
                    " the time of a batch of 32"
                ),
            )
        )
    for batch_size in SIZES:
        rows += _shuffled_rows(effort, batch_size, take)
    rows += _tensor_rows(effort, take)
    rows += _seek_rows(effort, take)
    rows += _memory_rows(effort, take)
    return rows, everything


Take = Callable[..., Measurements]


def _first_pass_sides(effort: Effort, batch_size: int) -> list[Side]:
    options = {**effort.options, "batch_size": batch_size}
    beside = {
        "pyarrow dataset scanner": "scanner",
        "pyarrow iter_batches": "iter_batches",
        HF_STREAMING: "hf_streaming",
    }
    return [
        Side(name=OURS, function="ours", options=options),
        *(Side(name=name, function="hand_pool", options={**options, **how}) for name, how in HAND.items()),
        *(
            Side(name=name, function=function, options=options, max_rounds=effort.num_rounds)
            for name, function in beside.items()
        ),
    ]


def _shuffled_rows(effort: Effort, batch_size: int, take: Take) -> list[Row]:
    options = {**effort.options, "batch_size": batch_size, "shuffle": True}
    sides = [
        Side(name=OURS, function="ours", options=options),
        Side(name=HF_SHUFFLED, function="hf_streaming", options=options),
    ]
    measured = take(f"shuffled {batch_size}", sides, num_rounds=effort.num_rounds)
    return [
        build_row(
            measured,
            what=f"feed, shuffled, batch {batch_size}",
            unit="rows/s",
            key="rows_per_s",
            ours=OURS,
            beside=[HF_SHUFFLED],
            bar=Bar(limit=1.2, at_least=True, against=(HF_SHUFFLED,)),
        ),
        build_row(
            measured,
            what=f"feed, shuffled, batch {batch_size}: memory",
            unit="MB",
            key="memory_mb",
            ours=OURS,
            beside=[HF_SHUFFLED],
            bar=Bar(limit=1 / 3, against=(HF_SHUFFLED,)),
            note="growth of the peak resident set over the level after imports, in the same runs",
        ),
    ]


def _tensor_rows(effort: Effort, take: Take) -> list[Row]:
    rows = []
    for captions in (True, False):
        options = {**effort.options, "batch_size": 32, "captions": captions}
        sides = [
            Side(name=OURS, function="ours_torch", options=options),
            *(
                Side(
                    name=name,
                    function="hf_torch",
                    options={**options, "mapped": mapped},
                    max_rounds=effort.num_rounds,
                )
                for name, mapped in IN_TENSORS.items()
            ),
        ]
        what = "batch -> torch tensors, batch 32"
        if not captions:
            what += ", without captions"
        rows.append(
            build_row(
                take(what, sides, num_rounds=effort.num_rounds),
                what=what,
                unit="rows/s",
                key="rows_per_s",
                ours=OURS,
                beside=list(IN_TENSORS),
                bar=Bar(limit=10, at_least=True, against=tuple(IN_TENSORS), text="HF with_format('torch')"),
                note="from parquet to x and label as tensors"
                + (
                    ", and captions as Python strings, as HF delivers them"
                    if captions
                    else "; no caption column"
                ),
            )
        )
    return rows


def _seek_rows(effort: Effort, take: Take) -> list[Row]:
    rows = []
    for shuffle in (False, True):
        options = {**effort.options, "batch_size": 32, "shuffle": shuffle}
        sides = [
            Side(name=OURS, function="ours_first_batch", options={**options, "position": 0.9}),
            Side(name=AT_START, function="ours_first_batch", options={**options, "position": 0.0}),
        ]
        if not shuffle:
            peers = {"HF streaming skip()": "hf_first_batch", "StatefulDataLoader": "dataloader_first_batch"}
            sides += [
                Side(
                    name=f"{name}, first batch at {where}",
                    function=function,
                    options={**options, "position": position},
                    max_rounds=effort.num_rounds,
                )
                for name, function in peers.items()
                for where, position in (("90 %", 0.9), ("0", 0.0))
            ]
        order = "shuffled" if shuffle else "no shuffle"
        rows.append(
            build_row(
                take(f"seek, {order}", sides, num_rounds=effort.num_rounds),
                what=f"seek, {order}: first batch at 90 % of an epoch",
                unit="ms",
                key="first_batch_ms",
                ours=OURS,
                beside=[side.name for side in sides[1:]],
                bar=Bar(limit=2, against=(AT_START,)),
                note="from asking an open feed for an iterator to its first batch of 32; a fresh interpreter that has taken"
                " one first batch before, so that one-time costs do not hide the difference",
            )
        )
    return rows


def _memory_rows(effort: Effort, take: Take) -> list[Row]:
    rows = []
    for shuffle in (False, True):
        order = "shuffled" if shuffle else "no shuffle"
        options = {**effort.options, "batch_size": 1024, "shuffle": shuffle}
        side = Side(name=OURS, function="ours_epochs", options=options)
        measured = take(f"memory, {order}", [side], num_rounds=effort.num_rounds)
        rows.append(
            build_row(
                measured,
                what=f"memory, {order}: peak after 5 epochs against after 1",
                unit="×",
                key="ratio",
                ours=OURS,
                bar=Bar(limit=1.05),
                note="peak resident set of the whole process",
            )
        )
    return rows
