"""The rows that a feed must deliver, computed from the order alone, one batch at a time."""

import numpy as np

from gen_worker.trainer.feed.order import EpochOrder, Rows


def batch_rows(plan: EpochOrder, batch: int, *, rank: int = 0, world_size: int = 1) -> Rows:
    """The dataset's row numbers of one batch, in order."""
    order = plan.order
    if batch >= order.full_batches:
        start, stop = order.tail_span(rank, world_size)
        return _lane_rows(plan, plan.tail_lane, batch, 0, start, stop)
    base = batch * order.rows_per_lane
    shares = order.shares(rank, world_size)
    return np.concatenate(
        [_lane_rows(plan, each.lane, batch, base, each.start, each.stop) for each in shares]
    )


def _lane_rows(plan: EpochOrder, lane: int, batch: int, base: int, start: int, stop: int) -> Rows:
    found = [np.empty(0, dtype=np.int64)]
    for window in plan.windows([lane], batch):
        first, last = max(base + start, window.start), min(base + stop, window.start + window.rows)
        if window.start >= base + stop:
            break
        if first < last:
            starts = plan.order.group_starts
            rows = np.concatenate([np.arange(p.start, p.stop) + starts[p.group] for p in window.pieces])
            found.append(rows[plan.permutation(window)[first - window.start : last - window.start]])
    return np.concatenate(found)
