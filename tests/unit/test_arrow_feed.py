"""The feed delivers what the order says, in bounded memory, and stops when told."""

import gc
import itertools
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from expected_rows import batch_rows
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gen_worker.errors import InputError
from gen_worker.trainer.arrow_feed import ArrowFeed, batch_to_torch
from gen_worker.trainer.feed import gather as window_gather
from gen_worker.trainer.feed import stream as batch_stream
from gen_worker.trainer.feed.order import DataOrder

WIDTH = 3


def make_table(start: int, num: int) -> pa.Table:
    ids = np.arange(start, start + num)
    x = pa.array(np.repeat(ids, WIDTH).astype(np.float32))
    return pa.table(
        {
            "id": pa.array(ids),
            "x": pa.FixedSizeListArray.from_arrays(x, WIDTH),
            "text": pa.array([None if i % 7 == 0 else f"row {i}" for i in ids]),
            "tags": pa.array([[f"t{j}" for j in range(i % 3)] for i in ids], pa.list_(pa.string())),
            "pair": pa.array([{"a": int(i), "b": [float(i)]} for i in ids]),
            "kind": pa.array([f"k{i % 5}-{start}" for i in ids]).dictionary_encode(),
        }
    )


def expected_row(i: int, start_of_file: int) -> dict:
    return {
        "id": i,
        "x": [float(i)] * WIDTH,
        "text": None if i % 7 == 0 else f"row {i}",
        "tags": [f"t{j}" for j in range(i % 3)],
        "pair": {"a": i, "b": [float(i)]},
        "kind": f"k{i % 5}-{start_of_file}",
    }


def write_dataset(folder: Path, sizes: list[list[int]]) -> list[int]:
    """One file for each list, one row group for each number; returns the first row of every file."""
    folder.mkdir(parents=True, exist_ok=True)
    start, starts = 0, []
    for number, groups in enumerate(sizes):
        starts.append(start)
        table = make_table(start, sum(groups))
        with pq.ParquetWriter(folder / f"part-{number:03}.parquet", table.schema) as writer:
            at = 0
            for rows in groups:
                writer.write_table(table.slice(at, rows), row_group_size=max(rows, 1))
                at += rows
        start += sum(groups)
    return starts


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dataset")
    write_dataset(folder, [[40, 17, 33], [64], [5, 5, 5, 90], [1, 30]])
    return folder


def take_epochs(feed: ArrowFeed, epochs: int, epoch: int = 0, batch: int = 0) -> list[pa.RecordBatch]:
    iterator = feed.batches(epoch=epoch, batch=batch)
    taken = list(itertools.islice(iterator, epochs * feed.batches_per_epoch - batch))
    iterator.close()
    return taken


def ids_of(batches: list[pa.RecordBatch]) -> list[list[int]]:
    return [batch.column("id").to_pylist() for batch in batches]


def feed_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("feed-")]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_feed_delivers_exactly_the_rows_of_the_order_function(data, tmp_path_factory, monkeypatch):
    groups = st.lists(st.integers(0, 20), min_size=1, max_size=4)
    sizes = data.draw(st.lists(groups, min_size=1, max_size=3).filter(lambda s: sum(map(sum, s)) > 0))
    lanes = data.draw(st.integers(1, 3))
    batch_size = lanes * data.draw(st.integers(1, 8))
    shuffle, seed = data.draw(st.booleans()), data.draw(st.integers(0, 9))
    folder = tmp_path_factory.mktemp("drawn")
    write_dataset(folder, sizes)
    block_rows = data.draw(st.integers(1, 40), "rows of a block, and of a piece too large to be joined")
    monkeypatch.setattr(batch_stream, "BLOCK_ROWS", block_rows)
    monkeypatch.setattr(window_gather, "BLOCK_ROWS", block_rows)
    world_size = data.draw(st.sampled_from([n for n in range(1, 5) if batch_size % n == 0]))
    for rank in range(world_size):
        with ArrowFeed.open(
            [str(folder)],
            batch_size=batch_size,
            columns=["id"],
            shuffle=shuffle,
            seed=seed,
            lanes=lanes,
            rank=rank,
            world_size=world_size,
        ) as feed:
            state = feed.state(epoch=0, batch=0)
            order = DataOrder(
                [n for file in sizes for n in file],
                batch_size=batch_size,
                shuffle=shuffle,
                seed=seed,
                lanes=lanes,
                window=state["window"],
            )
            start = data.draw(st.integers(0, feed.batches_per_epoch - 1))
            expected = [
                batch_rows(order.epoch(epoch), batch, rank=rank, world_size=world_size).tolist()
                for epoch in (1, 2, 3)
                for batch in range(feed.batches_per_epoch)
            ]
            assert ids_of(take_epochs(feed, 3, epoch=1, batch=start)) == expected[start:]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("batch_size", [4, 24, 300])
@pytest.mark.parametrize("lanes", [1, 4])
def test_nested_dictionary_and_null_columns_stay_with_their_row(tmp_path, shuffle, batch_size, lanes):
    sizes = [[40, 17, 33], [64], [5, 5, 5, 90]]
    starts = write_dataset(tmp_path, sizes)
    with ArrowFeed.open([str(tmp_path)], batch_size=batch_size, shuffle=shuffle, lanes=lanes) as feed:
        rows = [row for batch in take_epochs(feed, 1) for row in batch.to_pylist()]
    assert len(rows) == 259
    for row in rows:
        file_start = max(start for start in starts if start <= row["id"])
        assert row == expected_row(row["id"], file_start)


def test_a_batch_has_the_asked_columns_in_the_asked_order(dataset):
    with ArrowFeed.open([str(dataset)], batch_size=16, columns=["x", "id"]) as feed:
        batch = next(feed.batches())
    assert batch.schema == feed.schema
    assert batch.schema.names == ["x", "id"]


def test_files_folders_and_globs_name_the_same_dataset(dataset):
    files = sorted(str(path) for path in dataset.glob("*.parquet"))
    digests = set()
    for paths in (files, [str(dataset)], [str(dataset / "part-*.parquet")]):
        with ArrowFeed.open(paths, batch_size=8) as feed:
            digests.add(feed.manifest_digest)
    assert len(digests) == 1


def test_unshuffled_batches_inside_a_row_group_share_its_memory(tmp_path):
    pq.write_table(make_table(0, 100), tmp_path / "a.parquet", row_group_size=50)
    with ArrowFeed.open([str(tmp_path)], batch_size=20, columns=["id"]) as feed:
        batches = list(itertools.islice(feed.batches(), 5))
    addresses = [b.column(0).buffers()[1].address for b in batches]
    assert addresses[0] == addresses[1], "two batches of one row group are views of one buffer"
    assert addresses[3] == addresses[4]
    assert addresses[2] not in (addresses[0], addresses[4]), "the batch on the border is joined"


@pytest.mark.parametrize("shuffle", [False, True])
def test_three_resumes_in_a_row_give_the_batches_of_one_uninterrupted_run(dataset, shuffle):
    def open_feed() -> ArrowFeed:
        return ArrowFeed.open([str(dataset)], batch_size=12, shuffle=shuffle, seed=3, columns=["id"])

    with open_feed() as feed:
        per_epoch = feed.batches_per_epoch
        uninterrupted = ids_of(take_epochs(feed, 3))
    seen: list[list[int]] = []
    state = None
    for stop_after in (7, per_epoch - 7, 5, 2 * per_epoch - 5):  # the second stops exactly on the boundary
        with open_feed() as feed:
            epoch, batch = feed.position(state) if state else (0, 0)
            seen += ids_of(list(itertools.islice(feed.batches(epoch=epoch, batch=batch), stop_after)))
            committed = epoch * per_epoch + batch + stop_after
            state = feed.state(epoch=(committed - 1) // per_epoch, batch=(committed - 1) % per_epoch + 1)
    assert seen == uninterrupted


@pytest.mark.parametrize("drop_last", [False, True])
def test_every_rank_has_the_same_number_of_batches_and_an_empty_one_has_the_schema(tmp_path, drop_last):
    pq.write_table(make_table(0, 18), tmp_path / "a.parquet", row_group_size=5)
    for shuffle in (False, True):
        counts, rows = set(), []
        for rank in range(4):
            with ArrowFeed.open(
                [str(tmp_path)], batch_size=16, shuffle=shuffle, rank=rank, world_size=4, drop_last=drop_last
            ) as feed:
                batches = take_epochs(feed, 1)
                counts.add(len(batches))
                assert all(batch.schema == feed.schema for batch in batches)
                rows.append([batch.num_rows for batch in batches])
        assert counts == {1 if drop_last else 2}
        if not drop_last:
            assert sorted(row[1] for row in rows) == [0, 0, 1, 1]


def test_a_batch_size_that_the_ranks_cannot_share_is_refused(dataset):
    with pytest.raises(InputError, match="batch_size=8 is not a multiple of world_size=3"):
        ArrowFeed.open([str(dataset)], batch_size=8, rank=0, world_size=3)


def test_fewer_rows_than_a_batch_with_drop_last_is_refused(tmp_path):
    pq.write_table(make_table(0, 5), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="5 rows are less than one batch of 8"):
        ArrowFeed.open([str(tmp_path)], batch_size=8, drop_last=True)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_row_group_that_cannot_be_decoded_spoils_only_its_own_batches(tmp_path, shuffle):
    path = tmp_path / "a.parquet"
    pq.write_table(
        make_table(0, 4000).select(["id"]),
        path,
        row_group_size=1000,
        use_dictionary=False,
        compression="snappy",
    )
    chunk = pq.ParquetFile(path).metadata.row_group(2).column(0)
    with path.open("r+b") as file:
        file.seek(chunk.data_page_offset)
        file.write(b"\xff" * (chunk.total_compressed_size // 2))
    with ArrowFeed.open([str(path)], batch_size=100, shuffle=shuffle, lanes=1) as feed:
        order = feed._order
        good = next(
            batch
            for batch in range(40)
            if any(2000 <= row < 3000 for row in batch_rows(order.epoch(0), batch))
        )
        if shuffle and order.window > 1:
            good = 0  # the spoilt group shares the first window
        iterator = feed.batches()
        assert len(list(itertools.islice(iterator, good))) == good
        with pytest.raises(InputError, match=r"a\.parquet: row group 2 cannot be decoded"):
            next(iterator)


@pytest.mark.parametrize("shuffle", [False, True])
def test_closing_the_iterator_stops_its_threads_and_frees_what_it_read(dataset, shuffle):
    gc.collect()
    before = pa.total_allocated_bytes()
    feed = ArrowFeed.open([str(dataset)], batch_size=8, shuffle=shuffle)
    iterator = feed.batches()
    next(iterator)
    assert feed_threads()
    iterator.close()
    assert feed_threads() == []
    gc.collect()
    assert pa.total_allocated_bytes() == before
    feed.close()


@pytest.mark.parametrize("shuffle", [False, True])
def test_closing_the_feed_ends_every_iterator(dataset, shuffle):
    gc.collect()
    before = pa.total_allocated_bytes()
    feed = ArrowFeed.open([str(dataset)], batch_size=8, shuffle=shuffle)
    iterators = [feed.batches(), feed.batches(epoch=1)]
    for iterator in iterators:
        next(iterator)
    feed.close()
    assert feed_threads() == []
    gc.collect()
    assert pa.total_allocated_bytes() == before
    with pytest.raises(RuntimeError, match="closed"):
        feed.batches()


def test_closing_the_feed_wakes_a_consumer_that_waits_in_another_thread(dataset, monkeypatch):
    feed = ArrowFeed.open([str(dataset)], batch_size=8)
    reached, release = threading.Event(), threading.Event()

    def stuck(group: int) -> pa.RecordBatch:
        reached.set()
        release.wait(60)
        raise InputError("too late")

    monkeypatch.setattr(feed._source, "read", stuck)
    errors: list[BaseException] = []

    def consume() -> None:
        try:
            next(feed.batches())
        except RuntimeError as error:
            errors.append(error)

    consumer = threading.Thread(target=consume)
    consumer.start()
    assert reached.wait(60)
    (stream,) = feed._streams
    closer = threading.Thread(target=feed.close)
    closer.start()
    while closer.is_alive() and not stream._is_closed:
        closer.join(0.01)
    release.set()
    closer.join(60)
    consumer.join(60)
    assert not consumer.is_alive()
    assert "closed" in str(errors[0])


@pytest.mark.parametrize("shuffle", [False, True])
def test_memory_does_not_grow_over_epochs(tmp_path, shuffle):
    table = make_table(0, 20_000).select(["id", "x"])
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=1000)
    # The shuffle mixes all of this small dataset at once: a window, one being joined, three blocks. One row
    # group lost in each epoch would be 1.5 times the dataset at the end.
    bound = table.nbytes * 3 if shuffle else table.nbytes // 2
    gc.collect()
    before = pa.total_allocated_bytes()
    with ArrowFeed.open([str(tmp_path)], batch_size=64, shuffle=shuffle, lanes=2) as feed:
        iterator = feed.batches()
        for _ in range(30 * feed.batches_per_epoch):
            next(iterator)
            assert pa.total_allocated_bytes() - before < bound
        iterator.close()


def test_readahead_never_holds_more_than_its_bytes(tmp_path):
    table = make_table(0, 20_000).select(["id", "x"])
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=1000)
    group_bytes = table.nbytes // 20
    with ArrowFeed.open(
        [str(tmp_path)], batch_size=100, readahead=16, readahead_bytes=3 * group_bytes
    ) as feed:
        for _ in itertools.islice(feed.batches(), 400):
            (stream,) = feed._streams
            assert sum(stage.held_bytes for stage in stream._stages) <= 3 * group_bytes * 1.2
            assert pa.total_allocated_bytes() < 8 * group_bytes


def test_a_file_that_changes_while_it_is_fed_is_named(tmp_path):
    write_dataset(tmp_path, [[50], [50]])
    with ArrowFeed.open([str(tmp_path)], batch_size=50, readahead=1) as feed:
        pq.write_table(make_table(0, 51), tmp_path / "part-001.parquet")
        iterator = feed.batches()
        next(iterator)
        with pytest.raises(InputError, match=r"part-001\.parquet: changed since the feed was opened"):
            next(iterator)


def test_a_cursor_of_another_dataset_is_refused_and_the_changed_file_is_named(tmp_path):
    write_dataset(tmp_path, [[10, 10], [12]])
    with ArrowFeed.open([str(tmp_path)], batch_size=4) as feed:
        state, manifest = feed.state(epoch=0, batch=3), feed.manifest.to_json()
    table = pq.read_table(tmp_path / "part-001.parquet")
    pq.write_table(table.slice(0, 11), tmp_path / "part-001.parquet")
    with ArrowFeed.open([str(tmp_path)], batch_size=4) as feed:
        with pytest.raises(InputError, match="the dataset was blake2b:"):
            feed.position(state)
        with pytest.raises(
            InputError, match=r"part-001\.parquet: changed \(was .* 12 rows; is .* 11 rows\)"
        ) as caught:
            feed.position(state, manifest=json.loads(manifest))
        assert "part-000" not in str(caught.value)


def test_a_cursor_says_every_setting_that_changed(dataset):
    with ArrowFeed.open([str(dataset)], batch_size=8, shuffle=True, seed=1, lanes=2) as feed:
        state = feed.state(epoch=2, batch=1)
    with (
        ArrowFeed.open([str(dataset)], batch_size=16, shuffle=True, seed=2, lanes=2) as feed,
        pytest.raises(InputError) as caught,
    ):
        feed.position(state)
    assert "batch_size was 8, is now 16" in str(caught.value)
    assert "seed was 1, is now 2" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 9}, "version 9"),
        ({"batch": 10_000}, "at batch 10000"),
        ({"batch": -1}, "at batch -1"),
        ({"epoch": "x"}, "epoch"),
        ({"extra": 1}, "extra"),
    ],
)
def test_a_damaged_cursor_is_refused(dataset, change, message):
    with (
        ArrowFeed.open([str(dataset)], batch_size=8) as feed,
        pytest.raises(InputError, match=message),
    ):
        feed.position({**feed.state(epoch=0, batch=0), **change})


def test_the_end_of_an_epoch_is_the_start_of_the_next(dataset):
    with ArrowFeed.open([str(dataset)], batch_size=8) as feed:
        assert feed.position(feed.state(epoch=4, batch=feed.batches_per_epoch)) == (5, 0)
        assert next(feed.batches(epoch=4, batch=feed.batches_per_epoch)).equals(next(feed.batches(epoch=5)))


def test_the_order_does_not_depend_on_the_folder(dataset, tmp_path):
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for file in dataset.glob("*.parquet"):
        (moved / file.name).write_bytes(file.read_bytes())
    with ArrowFeed.open([str(dataset)], batch_size=8) as feed:
        state = feed.state(epoch=1, batch=2)
    with ArrowFeed.open([str(moved)], batch_size=8) as feed:
        assert feed.position(state) == (1, 2)


def test_a_process_may_exit_or_fork_in_the_middle_of_an_epoch(dataset):
    program = (
        "import os, sys\n"
        "from gen_worker.trainer.arrow_feed import ArrowFeed\n"
        "feed = ArrowFeed.open([sys.argv[1]], batch_size=8, shuffle=True)\n"
        "iterator = feed.batches()\n"
        "next(iterator)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try:\n"
        "        for _ in range(10_000): next(iterator)\n"
        "    except RuntimeError as error:\n"
        "        assert 'fork' in str(error), error\n"
        "        os._exit(7)\n"
        "    os._exit(1)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
        "next(iterator)\n"
        "print('done')\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program, str(dataset)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONFAULTHANDLER": "1"},
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr


torch = pytest.importorskip("torch")


def torch_batch() -> pa.RecordBatch:
    num = 10
    flat = pa.array(np.arange(num * 6, dtype=np.float32))
    matrix = pa.FixedSizeListArray.from_arrays(pa.FixedSizeListArray.from_arrays(flat, 3), 2)
    tensor = pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.float32(), (3, 2)), pa.FixedSizeListArray.from_arrays(flat, 6)
    )
    return pa.RecordBatch.from_pydict(
        {
            "label": pa.array(np.arange(num)),
            "half": pa.array(np.arange(num).astype(np.float16)),
            "flag": pa.array([i % 3 == 0 for i in range(num)]),
            "matrix": matrix,
            "tensor": tensor,
        }
    )


@pytest.mark.parametrize(("start", "num"), [(0, 10), (3, 4), (9, 1), (5, 0)])
def test_tensors_are_views_of_the_batch_also_of_a_slice(start, num):
    batch = torch_batch().slice(start, num)
    tensors = batch_to_torch(batch)
    assert tensors["label"].tolist() == list(range(start, start + num))
    assert tensors["half"].dtype == torch.float16
    assert tensors["flag"].tolist() == batch.column("flag").to_pylist()
    assert tensors["matrix"].shape == (num, 2, 3)
    assert tensors["matrix"].tolist() == batch.column("matrix").to_pylist()
    assert tensors["tensor"].shape == (num, 3, 2)
    if num:
        address = batch.column("label").buffers()[1].address + 8 * start
        assert tensors["label"].data_ptr() == address


def test_a_tensor_keeps_its_memory_after_the_batch_is_gone(tmp_path):
    pq.write_table(make_table(0, 1000), tmp_path / "a.parquet")
    with ArrowFeed.open([str(tmp_path)], batch_size=100, shuffle=True) as feed:
        order = batch_rows(feed._order.epoch(0), 0).tolist()
        tensors = batch_to_torch(next(feed.batches()), ["id", "x"])
    gc.collect()
    assert tensors["id"].tolist() == order
    assert tensors["x"][:, 0].tolist() == order


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array(["a"]), "exclude it"),
        (pa.array([1, None]), "has nulls and"),
        (pa.array([[1.0, None]], pa.list_(pa.float32(), 2)), "nulls among its elements"),
        (pa.array([None, [1.0, 2.0]], pa.list_(pa.float32(), 2)), "has nulls and"),
        (pa.array([[1]]), "different lengths"),
        (pa.array(["a"]).dictionary_encode(), "indices"),
        (pa.array([{"a": 1}]), "columns of their own"),
    ],
)
def test_a_column_that_cannot_be_a_tensor_is_named_with_a_remedy(column, message):
    with pytest.raises(InputError, match=rf"column 'c' .*{message}"):
        batch_to_torch(pa.RecordBatch.from_arrays([column], names=["c"]))


def test_an_unknown_column_names_those_there_are():
    with pytest.raises(InputError, match=r"no column 'labels' in the batch: it has label, half"):
        batch_to_torch(torch_batch(), ["labels"])


def test_batches_that_share_a_buffer_in_different_ways_are_not_mixed_up():
    """The tensor of a whole buffer is kept between calls; every way to look at that buffer must stay right."""
    values = pa.array(np.arange(24, dtype="float32"))
    for offset in (0, 4, 5):
        for size in (2, 4):
            child = values.slice(offset, 16)
            lists = pa.FixedSizeListArray.from_arrays(child, size)
            for start, length in ((0, 3), (1, 2), (2, 0)):
                batch = pa.record_batch({"v": lists}).slice(start, length)
                expected = np.array(batch.column("v").to_pylist(), dtype="float32").reshape(length, size)
                assert batch_to_torch(batch)["v"].numpy().tolist() == expected.tolist()
        flat = pa.record_batch({"v": values.slice(offset, 7)})
        assert batch_to_torch(flat)["v"].tolist() == flat.column("v").to_pylist()
    as_int = pa.Array.from_buffers(pa.int32(), 24, values.buffers())
    assert batch_to_torch(pa.record_batch({"v": as_int}))["v"].tolist() == as_int.to_pylist()


def test_a_null_elsewhere_in_a_row_group_does_not_hide_and_does_not_harm():
    values = pa.array([1.0, 2.0, None, 4.0], pa.float32())
    batch = pa.record_batch({"v": values})
    assert batch_to_torch(batch.slice(0, 2))["v"].tolist() == [1.0, 2.0]
    assert batch_to_torch(batch.slice(3))["v"].tolist() == [4.0]
    with pytest.raises(InputError, match="nulls"):
        batch_to_torch(batch.slice(1, 2))
    full = pa.array([1.0, None, 3.0, 4.0], pa.float32()).slice(2)  # a bitmap, but no null in sight
    assert batch_to_torch(pa.record_batch({"v": full}))["v"].tolist() == [3.0, 4.0]


def test_batches_of_a_row_group_are_converted_once(tmp_path, monkeypatch):
    from gen_worker.trainer.feed import tensors

    pq.write_table(
        pa.table({"x": np.arange(640, dtype="float32")}), tmp_path / "a.parquet", row_group_size=320
    )
    calls = []
    convert = tensors._convert
    monkeypatch.setattr(tensors, "_convert", lambda values: calls.append(len(values)) or convert(values))
    with ArrowFeed.open([str(tmp_path)], batch_size=32) as feed:
        seen = [batch_to_torch(batch)["x"] for batch, _ in zip(feed.batches(), range(20), strict=False)]
    assert [value for tensor in seen for value in tensor.tolist()] == list(range(640))
    assert len(calls) == 2


@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_of_two_feeds_read_in_turns_have_their_own_tensors(tmp_path, shuffle):
    rows = np.arange(640, dtype="float32")
    for name, sign in (("a", 1), ("b", -1)):
        pq.write_table(pa.table({"x": sign * rows}), tmp_path / f"{name}.parquet", row_group_size=320)
    with (
        ArrowFeed.open([str(tmp_path / "a.parquet")], batch_size=30, shuffle=shuffle) as one,
        ArrowFeed.open([str(tmp_path / "b.parquet")], batch_size=30, shuffle=shuffle) as other,
    ):
        for first, second in itertools.islice(zip(one.batches(), other.batches(), strict=True), 60):
            for batch in (first, second, first):
                assert batch_to_torch(batch)["x"].tolist() == batch.column("x").to_pylist()


def test_a_batch_without_nulls_is_a_tensor_though_its_row_group_has_some(tmp_path):
    pq.write_table(
        pa.table({"x": [1.0, 2.0, None, 4.0, 5.0, 6.0], "y": [1, 2, 3, 4, 5, 6]}), tmp_path / "a.parquet"
    )
    with ArrowFeed.open([str(tmp_path)], batch_size=2) as feed:
        batches = feed.batches()
        assert batch_to_torch(next(batches))["x"].tolist() == [1.0, 2.0]
        with pytest.raises(InputError, match="has nulls"):
            batch_to_torch(next(batches))
        last = batch_to_torch(next(batches))
        assert (last["x"].tolist(), last["y"].tolist()) == ([5.0, 6.0], [5, 6])


def test_booleans_of_a_batch_are_its_own_copy(tmp_path):
    pq.write_table(pa.table({"b": [True, False, True, False]}), tmp_path / "a.parquet")
    with ArrowFeed.open([str(tmp_path)], batch_size=2) as feed:
        batch = next(feed.batches())
        batch_to_torch(batch)["b"].fill_(True)
        assert batch_to_torch(batch)["b"].tolist() == [True, False]
