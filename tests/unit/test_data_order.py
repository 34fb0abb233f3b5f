"""The order of the data is a pure function: complete, repeatable, the same rows at every world size."""

from itertools import chain

import numpy as np
import pytest
from expected_rows import batch_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from gen_worker.errors import InputError
from gen_worker.trainer.feed.order import (
    Cursor,
    DataOrder,
    cursor_differences,
    default_lanes,
    default_window,
    permutation,
)

group_sizes = st.lists(st.integers(0, 23), min_size=1, max_size=12).filter(lambda sizes: sum(sizes) > 0)


@st.composite
def orders(draw: st.DrawFn, shuffle: bool | None = None) -> DataOrder:
    lanes = draw(st.integers(1, 4))
    return DataOrder(
        draw(group_sizes),
        batch_size=lanes * draw(st.integers(1, 6)),
        shuffle=draw(st.booleans()) if shuffle is None else shuffle,
        drop_last=draw(st.booleans()),
        seed=draw(st.integers(-(2**70), 2**70)),
        lanes=lanes,
        window=draw(st.integers(1, 4)),
    )


def rows_of_epoch(order: DataOrder, epoch: int, rank: int = 0, world_size: int = 1) -> list[list[int]]:
    plan = order.epoch(epoch)
    return [
        batch_rows(plan, batch, rank=rank, world_size=world_size).tolist()
        for batch in range(order.batches_per_epoch)
    ]


@given(orders(), st.integers(0, 5))
def test_every_row_comes_exactly_once_an_epoch_unless_the_last_batch_is_dropped(order, epoch):
    rows = list(chain.from_iterable(rows_of_epoch(order, epoch)))
    expected = order.num_rows - (order.num_rows % order.batch_size if order.drop_last else 0)
    assert len(rows) == len(set(rows)) == expected
    assert set(rows) <= set(range(order.num_rows))


@given(orders(), st.integers(0, 3))
def test_every_batch_but_the_last_is_full(order, epoch):
    sizes = [len(rows) for rows in rows_of_epoch(order, epoch)]
    assert sizes[: order.full_batches] == [order.batch_size] * order.full_batches
    assert all(0 < size < order.batch_size for size in sizes[order.full_batches :])


@given(orders(shuffle=False), st.integers(0, 3))
def test_unshuffled_is_row_order_in_every_epoch(order, epoch):
    rows = list(chain.from_iterable(rows_of_epoch(order, epoch)))
    assert rows == list(range(len(rows)))


@settings(max_examples=200)
@given(orders(), st.integers(0, 3), st.integers(1, 8))
def test_the_ranks_together_take_the_same_rows_of_each_batch_at_every_world_size(order, epoch, world_size):
    if order.batch_size % world_size and not (order.shuffle and order.lanes % world_size == 0):
        with pytest.raises(InputError, match="is not a multiple of"):
            order.shares(0, world_size)
        return
    alone = rows_of_epoch(order, epoch)
    ranks = [rows_of_epoch(order, epoch, rank, world_size) for rank in range(world_size)]
    for batch, expected in enumerate(alone):
        parts = [rank[batch] for rank in ranks]
        assert sorted(chain.from_iterable(parts)) == sorted(expected)
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= (0 if batch < order.full_batches else 1)


@given(orders(shuffle=True), st.integers(0, 3), st.data())
def test_a_seek_finds_the_windows_that_a_walk_from_the_start_would_hold(order, epoch, data):
    if not order.full_batches:
        return
    batch = data.draw(st.integers(0, order.full_batches - 1))
    plan = order.epoch(epoch)
    lanes = list(range(order.lanes))
    row = batch * order.rows_per_lane
    walked = [w for w in plan.windows(lanes) if w.start + w.rows > row]
    assert sorted(plan.windows(lanes, batch), key=lambda w: (w.lane, w.index)) == sorted(
        walked, key=lambda w: (w.lane, w.index)
    )


@given(orders(shuffle=True))
def test_windows_come_in_the_order_in_which_batches_need_them(order):
    needs = [w.first_batch for w in order.epoch(0).windows(list(range(order.lanes)))]
    assert needs == sorted(needs)


@given(st.integers(1, 3000), st.integers(), st.integers(0, 9))
def test_a_permutation_holds_each_number_once_and_depends_only_on_its_path(num, seed, epoch):
    first, second = permutation(num, seed, epoch), permutation(num, seed, epoch)
    assert np.array_equal(first, second)
    assert np.array_equal(np.sort(first), np.arange(num))


def test_the_order_is_the_one_that_released_checkpoints_point_into():
    # If this fails, the order changed: raise ORDER_VERSION, or every saved cursor silently names other rows.
    assert permutation(10, 0, 0).tolist() == [0, 4, 2, 6, 1, 3, 5, 7, 8, 9]
    order = DataOrder([5, 7, 3, 6], batch_size=4, shuffle=True, seed=7, lanes=2, window=2)
    assert rows_of_epoch(order, 1) == [
        [2, 3, 13, 14],
        [16, 0, 4, 12],
        [19, 20, 6, 5],
        [17, 15, 9, 10],
        [1, 18, 7, 8],
        [11],
    ]


def test_epoch_and_seed_are_not_added_up():
    def flat(seed: int, epoch: int) -> list[int]:
        order = DataOrder([8] * 8, batch_size=8, shuffle=True, seed=seed)
        return list(chain.from_iterable(rows_of_epoch(order, epoch)))

    assert flat(0, 1) != flat(1, 0)
    assert flat(0, 0) != flat(0, 1)


def test_a_shuffled_batch_mixes_rows_of_all_lanes():
    order = DataOrder([100] * 16, batch_size=8, shuffle=True, lanes=4, window=1)
    groups = {row // 100 for row in batch_rows(order.epoch(0), 0).tolist()}
    assert len(groups) == 4


def test_a_seek_into_a_large_epoch_looks_at_one_window_per_lane():
    order = DataOrder([1000] * 20_000, batch_size=64, shuffle=True, lanes=4, window=2)
    plan = order.epoch(3)
    windows = plan.windows([0, 1, 2, 3], order.full_batches * 9 // 10)
    first = [next(windows) for _ in range(4)]
    assert {window.lane for window in first} == {0, 1, 2, 3}
    row = order.full_batches * 9 // 10 * order.rows_per_lane
    assert all(window.start <= row < window.start + window.rows for window in first)


@given(st.integers(1, 4096), st.integers(1, 10_000), st.integers(0, 1 << 40))
def test_default_lanes_divide_the_batch_and_leave_each_lane_some_groups(batch_size, num_groups, group_bytes):
    lanes = default_lanes(batch_size, num_groups, group_bytes)
    assert batch_size % lanes == 0
    assert lanes == 1 or num_groups // lanes >= 4
    assert lanes <= 8


def test_a_window_of_small_row_groups_holds_many_and_of_huge_ones_a_single_one():
    assert default_window(4, 10_000, 10_000 * 100, 100 * 300) > 100
    assert default_window(4, 100, 100 * 1_000_000, 1 << 30) == 1


def cursor(**changes):
    fields = {"version": 1, "seed": 0, "epoch": 0, "batch": 0, "batch_size": 64, "lanes": 2, "window": 524}
    return Cursor(
        **{**fields, "shuffle": True, "drop_last": False, "num_rows": 4000, "manifest_digest": "x", **changes}
    )


def test_lanes_and_windows_are_named_only_where_they_do_not_follow_from_the_batch_size():
    other = cursor(batch_size=32, lanes=1, window=1048, seed=3)
    assert cursor_differences(cursor(), other) == ["batch_size was 64, is now 32", "seed was 0, is now 3"]
    assert cursor_differences(cursor(), cursor(lanes=1)) == ["lanes was 2, is now 1"]


def test_lanes_that_do_not_divide_the_batch_are_refused_with_the_choices():
    with pytest.raises(
        InputError, match=r"batch_size=12 is not a multiple of lanes=5: choose one of 1, 2, 3, 4, 6, 12"
    ):
        DataOrder([10], batch_size=12, shuffle=True, lanes=5)
