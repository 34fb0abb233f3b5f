"""Saving 403 MB of fp32 state: how long the loop is blocked, when it is durable, what small steps lose meanwhile.

The sides are in `checkpoint_sides`; blocking saves have no steps beside them, background ones do.
"""

from collections.abc import Callable

from bars import Bar, Row, build_row
from harness import Measurements, Side, measure

OURS = "ours"
MEMCPY = "limit: memcpy into kept buffers"
WRITE = "limit: write + fsync"
HASH = "limit: a warm copy, then SHA-256 in another process"
TORCH_SAVE = "torch.save + fsync"
DCP = "DCP async_save"
LIGHTNING = "Lightning AsyncCheckpointIO"
SAFETENSORS = "ours, format safetensors"
CONTROL = "no save at all: the machine's noise"


def run(*, quick: bool, say: Callable[[str], None]) -> tuple[list[Row], Measurements]:
    sides = [
        Side(name=OURS, function="ours", options={"format": "pt"}),
        Side(name=SAFETENSORS, function="ours", options={"format": "safetensors"}),
        Side(name=MEMCPY, function="memcpy"),
        Side(name=WRITE, function="write"),
        Side(name=HASH, function="copy_and_hash"),
        Side(name=TORCH_SAVE, function="torch_save"),
        Side(name=DCP, function="dcp_async"),
        Side(name=LIGHTNING, function="lightning_async"),
        Side(name=CONTROL, function="no_save", options={"seconds": 0.6}),
    ]
    measured = measure("checkpoint_sides.py", sides, num_rounds=2 if quick else 9, fresh=False, say=say)
    saves = [SAFETENSORS, TORCH_SAVE, DCP, LIGHTNING]
    return [
        build_row(
            measured,
            what="checkpoint of 403 MB: loop blocked",
            unit="ms",
            key="blocked_ms",
            ours=OURS,
            beside=[MEMCPY, *saves],
            bar=Bar(limit=1.5, against=(MEMCPY,), text="a warm memcpy"),
        ),
        build_row(
            measured,
            what="checkpoint of 403 MB: durable",
            unit="s",
            key="durable_s",
            ours=OURS,
            beside=[WRITE, HASH, *saves],
            bar=Bar(limit=1.4, against=(WRITE,), text="write + fsync"),
            note=(
                "ours is also hashed and committed by then; background saves run beside a busy training thread. One"
                " thread can hash a file, whatever the number of cores"
            ),
        ),
        build_row(
            measured,
            what="checkpoint of 403 MB: lost by small steps meanwhile",
            unit="ms",
            key="lost_ms",
            ours=OURS,
            beside=[SAFETENSORS, HASH, DCP, LIGHTNING, CONTROL],
            bar=Bar(limit=60),
            note="against the mean of the steps before and after; ours until it is also read back and reported",
        ),
        build_row(
            measured,
            what="checkpoint of 403 MB: read back and reported",
            unit="s",
            key="done_s",
            ours=OURS,
            beside=[SAFETENSORS, DCP, LIGHTNING],
            note="only ours reads its files back and compares checksums",
        ),
        build_row(
            measured,
            what="checkpoint of 403 MB: worst step meanwhile",
            unit="ms",
            key="worst_step_ms",
            ours=OURS,
            beside=[SAFETENSORS, DCP, LIGHTNING, CONTROL],
        ),
    ], measured
