"""The notes of a certificate: what was not compared, what may be wrong, time and memory."""

import itertools
import math
import statistics

from gen_worker.contract.sizes import show_bytes
from gen_worker.tools.certificate.causes import Divergence, differing_metrics, is_loss, not_restored
from gen_worker.tools.certificate.probe_runs import Kill
from gen_worker.tools.certificate.trace import Moment

LEAK_BYTES, LEAK_BYTES_PER_STEP = 64 << 20, 1 << 20


def find_notes(
    straight: list[Moment], killed: list[Moment], kills: list[Kill], divergence: Divergence | None
) -> list[str]:
    notes = []
    if not straight[-1].state and not any(is_loss(name) for name in straight[-1].metrics):
        notes.append("only the batches were compared: state_dict is empty, and no metric is a loss")
    if not any(kill.is_at_epoch_end for kill in kills):
        notes.append("no epoch ended within these steps: give more --steps to test a kill at its end")
    if divergence is None:
        hidden = not_restored(straight, killed)
        if hidden:
            notes.append(f"not restored by a resume, without effect in these steps: {', '.join(hidden[:8])}")
        metrics = differing_metrics(straight, killed)
        if metrics:
            notes.append(f"metrics that differ between equal runs (times?): {', '.join(metrics[:8])}")
    steps = [moment for moment in straight if moment.kind == "step"]
    return [*notes, *note_losses(steps), *note_memory(steps)]


def note_losses(steps: list[Moment]) -> list[str]:
    notes = []
    for name in sorted({name for moment in steps for name in moment.metrics if is_loss(name)}):
        bad = [
            moment.step
            for moment in steps
            if name in moment.metrics and not math.isfinite(float.fromhex(moment.metrics[name]))
        ]
        if bad:
            when = (
                "at every step" if len(bad) == len(steps) else f"at {len(bad)} steps, first at step {bad[0]}"
            )
            notes.append(f"{name} is not finite {when}: training resumes exactly but does not learn")
    return notes


def note_memory(steps: list[Moment]) -> list[str]:
    """Memory that grows on every step; a single jump comes from the allocator."""
    half = steps[len(steps) // 2 :]
    grown = half[-1].rss_bytes - half[0].rss_bytes
    each = [after.rss_bytes - before.rss_bytes for before, after in itertools.pairwise(half)]
    if grown <= LEAK_BYTES and (not each or statistics.median(each) < LEAK_BYTES_PER_STEP):
        return []
    return [
        f"memory grew by {show_bytes(grown)} in the last {len(half)} steps: a possible leak."
        " Look for lists that grow, or for losses that are kept with their graph"
    ]


def measure(straight: list[Moment], checkpoints: list[tuple[float, int]]) -> dict[str, float]:
    """Times and sizes of the straight run; `checkpoints` are (duration_s, size_bytes)."""
    steps = [moment for moment in straight if moment.kind == "step"]
    half = steps[len(steps) // 2 :]
    author_s = statistics.median(moment.author_s for moment in steps)
    loop_s = statistics.median(moment.loop_s for moment in steps)
    measures = {
        "author_s_per_step": author_s,
        "loop_s_per_step": loop_s,
        "overhead_ratio": loop_s / author_s if author_s else 0.0,
        "rss_bytes": float(steps[-1].rss_bytes),
        "rss_growth_bytes_per_step": (half[-1].rss_bytes - half[0].rss_bytes) / max(1, len(half) - 1),
    }
    if checkpoints:
        measures["checkpoint_s"] = statistics.median(duration_s for duration_s, _ in checkpoints)
        measures["checkpoint_bytes"] = float(max(size_bytes for _, size_bytes in checkpoints))
    return measures
