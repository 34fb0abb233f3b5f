"""No shard that differs from its index reaches a trainer; one that was hashed before is not hashed again."""

import itertools
import logging
import os
import sys
import threading
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gen_worker.errors import InputError
from gen_worker.trainer.datasets import shard_loader
from gen_worker.trainer.datasets.index import DatasetIndex
from gen_worker.trainer.datasets.shard_hash import FileIdentity, HashStoppedError, Stamp, Stamps, hash_shard
from gen_worker.trainer.datasets.shard_loader import ShardLoader

LONG_AGO_NS = 1_600_000_000 * 10**9
NUM_SHARDS = 6


def backdate(path: Path) -> None:
    """As a file that was not written a moment ago."""
    os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))


def write_shards(folder: Path, num_shards: int = NUM_SHARDS, num_rows: int = 20) -> DatasetIndex:
    folder.mkdir()
    for shard in range(num_shards):
        ids = range(shard * num_rows, (shard + 1) * num_rows)
        table = pa.table({"id": pa.array(ids), "text": [f"row {i}" for i in ids], "x": [i / 2 for i in ids]})
        pq.write_table(table, folder / f"{shard}.parquet")
        backdate(folder / f"{shard}.parquet")
    return DatasetIndex.build(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_shards(tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture
def index(folder: Path) -> DatasetIndex:
    return DatasetIndex.read(folder)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    left = [t.name for t in threading.enumerate() if t.name.startswith(("shard-loader", "shards"))]
    assert left == []


def flip_bit(path: Path) -> None:
    """One bit of the data: size, footer and row count stay as they were."""
    with path.open("r+b") as file:
        file.seek(20)
        byte = file.read(1)[0]
        file.seek(20)
        file.write(bytes([byte ^ 1]))


def flip_bit_unseen(path: Path) -> None:
    """... and the time of change is set back."""
    before = path.stat()
    flip_bit(path)
    while True:  # the clock of the file system ticks within milliseconds
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        if path.stat().st_ctime_ns != before.st_ctime_ns:
            break
    assert (path.stat().st_size, path.stat().st_mtime_ns, path.stat().st_ino) == (
        before.st_size,
        before.st_mtime_ns,
        before.st_ino,
    )


# --- iterating


def test_shards_come_in_the_order_of_the_index_or_in_the_one_asked_for(folder, index):
    with ShardLoader(index, folder) as loader:
        shards = list(loader)
        assert [shard.path for shard in shards] == [folder / f"{n}.parquet" for n in range(NUM_SHARDS)]
        assert [shard.rows for shard in shards] == [20] * NUM_SHARDS
        assert shards[2].table()["id"].to_pylist() == list(range(40, 60))
        assert [shard.index for shard in loader.shards([4, 0, 4])] == [4, 0, 4]
        assert list(loader.shards([])) == []
        with pytest.raises(InputError, match="order: found 6, expected 0 to 5"):
            loader.shards([0, 6])


def test_tables_hold_every_row_once_and_only_the_columns_asked_for(folder, index):
    with ShardLoader(index, folder, columns=["x", "id"]) as loader:
        tables = list(loader.tables())
    assert [table.column_names for table in tables] == [["x", "id"]] * NUM_SHARDS
    assert pa.concat_tables(tables)["id"].to_pylist() == list(range(20 * NUM_SHARDS))
    with pytest.raises(InputError) as caught:
        ShardLoader(index, folder, columns=["x", "txt", "x"])
    assert "no column 'txt': did you mean 'text'?" in str(caught.value)
    assert "column 'x' is listed more than once" in str(caught.value)


def test_neither_a_folder_name_nor_a_longer_name_becomes_a_column(tmp_path):
    part = tmp_path / "data" / "split=train" / "x.parquet"
    part.parent.mkdir(parents=True)
    pq.write_table(pa.table({"id": [1, 2], "a.b": [3, 4], "a": [5, 6]}), part)
    index = DatasetIndex.build(tmp_path / "data")
    with ShardLoader(index, tmp_path / "data") as loader:
        (table,) = loader.tables()
    assert table.to_pydict() == {"id": [1, 2], "a.b": [3, 4], "a": [5, 6]}
    with ShardLoader(index, tmp_path / "data", columns=["a"]) as loader:
        (table,) = loader.tables()
    assert table.to_pydict() == {"a": [5, 6]}


@settings(max_examples=20)
@given(prefetch=st.integers(1, 4), order=st.permutations(range(NUM_SHARDS)), takes=st.integers(0, NUM_SHARDS))
def test_any_order_at_any_prefetch_and_stopped_anywhere(tmp_path_factory, prefetch, order, takes):
    folder = tmp_path_factory.getbasetemp() / "shards-for-any-order"
    index = DatasetIndex.read(folder) if folder.exists() else write_shards(folder)
    with ShardLoader(index, folder, prefetch=prefetch) as loader:
        tables = list(itertools.islice(loader.tables(order), takes))
    assert [table["id"][0].as_py() // 20 for table in tables] == list(order)[:takes]


def wait_until_asleep(thread_name: str) -> None:
    """Until the thread waits for others, or has ended."""
    while threads := [thread for thread in threading.enumerate() if thread.name.startswith(thread_name)]:
        frame = sys._current_frames().get(threads[0].ident or 0)
        if frame is not None and frame.f_code is threading.Condition.wait.__code__:
            return
        os.sched_yield()


@pytest.mark.parametrize(
    ("options", "ahead"), [({"prefetch": 2}, 2), ({"prefetch": 3, "prefetch_bytes": 1}, 1)]
)
def test_reading_ahead_is_bounded_in_shards_and_in_bytes(folder, index, monkeypatch, options, ahead):
    hashed: list[str] = []

    def note(path, is_stopped):
        hashed.append(path.name)
        return hash_shard(path, is_stopped)

    monkeypatch.setattr(shard_loader, "hash_shard", note)
    with ShardLoader(index, folder, **options) as loader:
        for taken, _ in enumerate(loader, start=1):
            while len(hashed) < min(taken + ahead, NUM_SHARDS):
                os.sched_yield()
            wait_until_asleep("shard-loader")  # it is awake now, and goes on if nothing holds it
            assert len(hashed) == min(taken + ahead, NUM_SHARDS)


def test_a_bad_shard_is_an_error_in_its_place(folder, index):
    flip_bit(folder / "2.parquet")
    with ShardLoader(index, folder, prefetch=4) as loader:
        shards = iter(loader)
        assert [next(shards).index, next(shards).index] == [0, 1]
        with pytest.raises(
            InputError, match=r"2\.parquet: content changed: hash sha256:.*\n.*DatasetIndex.build"
        ):
            next(shards)
        assert [shard.index for shard in loader.shards([3, 4])] == [3, 4]


def test_without_verification_only_the_size_and_the_columns_are_compared(folder, index):
    flip_bit(folder / "0.parquet")
    (folder / "1.parquet").write_bytes(b"")
    other = pa.table({"id": ["a"], "text": ["b"], "x": [0.5]})
    pq.write_table(other, folder / "2.parquet", compression="none")
    lying = msgspec.structs.replace(index.shards[2], size_bytes=(folder / "2.parquet").stat().st_size)
    index = msgspec.structs.replace(index, shards=[*index.shards[:2], lying, *index.shards[3:]])
    with ShardLoader(index, folder, verify=False) as loader:
        assert next(loader.shards([0])).rows == 20
        with pytest.raises(InputError, match=r"1\.parquet: has 0 bytes, expected"):
            next(loader.shards([1]))
        with pytest.raises(InputError, match="column 'id' is string, expected int64"):
            next(loader.tables([2]))
        with pytest.raises(InputError, match="3 faults"):
            loader.verify_all()


def test_a_file_that_changes_after_it_was_verified_is_not_decoded_as_if_it_had_not(folder, index):
    with ShardLoader(index, folder) as loader:
        shard = next(loader.shards([3]))
        pq.write_table(pq.read_table(folder / "4.parquet"), shard.path)
        with pytest.raises(InputError, match=r"3\.parquet: changed while it was read"):
            shard.table()
        shard.path.unlink()
        with pytest.raises(InputError, match=r"3\.parquet: cannot be decoded"):
            shard.table()


def test_closing_ends_all_iterators_and_refuses_new_ones(folder, index):
    loader = ShardLoader(index, folder)
    first, second = iter(loader), loader.tables()
    next(first)
    next(second)
    loader.close()
    loader.close()
    assert list(first) == list(second) == []
    for use in (loader.shards, loader.tables, loader.verify_all):
        with pytest.raises(RuntimeError, match="the shard loader is closed"):
            use()


def test_closing_wakes_one_who_waits_for_a_shard(folder, index, monkeypatch):
    is_hashing = threading.Event()

    def hash_for_ever(path, is_stopped):
        is_hashing.set()
        while not is_stopped():
            os.sched_yield()
        raise HashStoppedError

    monkeypatch.setattr(shard_loader, "hash_shard", hash_for_ever)
    loader = ShardLoader(index, folder)
    outcome: list[BaseException] = []

    def consume() -> None:
        try:
            list(loader)
        except RuntimeError as error:
            outcome.append(error)

    consumer = threading.Thread(target=consume)
    consumer.start()
    assert is_hashing.wait(60)
    loader.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("shard-loader")]
    consumer.join(60)
    assert "closed while a shard was awaited" in str(outcome[0])


# --- verifying everything


def test_every_bad_shard_is_named_in_one_error_with_what_to_do(folder, index):
    (folder / "0.parquet").unlink()
    with (folder / "1.parquet").open("ab") as file:
        file.write(b"more")
    flip_bit(folder / "2.parquet")
    size_bytes = index.shards[3].size_bytes
    (folder / "3.parquet").write_bytes(b"x" * size_bytes)
    lying = msgspec.structs.replace(index.shards[4], rows=21)
    index = msgspec.structs.replace(index, shards=[*index.shards[:4], lying, index.shards[5]])
    with ShardLoader(index, folder) as loader, pytest.raises(InputError) as caught:
        loader.verify_all()
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{folder}: 5 faults"
    assert lines[1] == "  - 0.parquet: missing"
    size_bytes = index.shards[1].size_bytes
    assert lines[2] == f"  - 1.parquet: has {size_bytes + 4} bytes, expected {size_bytes}"
    assert lines[3].startswith("  - 2.parquet: content changed: hash sha256:")
    assert lines[3].endswith(f"expected {index.shards[2].hash}")
    assert lines[4].startswith("  - 3.parquet: cannot be read")
    assert lines[5] == "  - 4.parquet: has 20 rows, expected 21"
    assert lines[6].startswith("restore these files")
    assert f"`DatasetIndex.build({str(folder)!r})`" in lines[6]


def test_a_sound_dataset_is_reported_with_its_size(folder, index):
    calls: list[tuple[str, int, int]] = []
    with ShardLoader(index, folder) as loader:
        report = loader.verify_all(on_progress=lambda *call: calls.append(call))
    assert (report.num_shards, report.rows, report.size_bytes) == (NUM_SHARDS, index.rows, index.size_bytes)
    assert report.hashed_bytes == index.size_bytes
    assert report.is_complete
    assert {name for name, _, _ in calls} == {shard.path for shard in index.shards}
    assert calls[-1][1:] == (index.size_bytes, index.size_bytes)


def test_a_stop_ends_verification_and_the_report_says_so(folder, index):
    asked = itertools.count()
    with ShardLoader(index, folder) as loader:
        report = loader.verify_all(stop=lambda: next(asked) >= 4)
        assert not report.is_complete
        assert report.num_shards < NUM_SHARDS
        assert loader.verify_all(stop=lambda: True).hashed_bytes == 0
        assert loader.verify_all(stop=lambda: False).is_complete


def test_a_stop_is_seen_in_the_middle_of_a_file(tmp_path):
    path = tmp_path / "large"
    path.write_bytes(bytes(5 << 20))
    asked = itertools.count()
    with pytest.raises(HashStoppedError):
        hash_shard(path, lambda: next(asked) >= 2)
    assert next(asked) == 3


def test_an_error_of_the_watcher_ends_the_hash_of_the_others(folder, index, monkeypatch):
    def hash_one_and_the_others_for_ever(path, is_stopped):
        if path.name == "0.parquet":
            return hash_shard(path, is_stopped)
        while not is_stopped():
            os.sched_yield()
        raise HashStoppedError

    def fail(*_call: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(shard_loader, "hash_shard", hash_one_and_the_others_for_ever)
    with ShardLoader(index, folder) as loader, pytest.raises(ZeroDivisionError):
        loader.verify_all(on_progress=fail)


# --- what was verified before


def bytes_read() -> int:
    """All that this process has read, by whatever library."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="only Linux counts what a process reads")
def test_an_unchanged_dataset_is_verified_without_reading_it(tmp_path):
    index = write_shards(tmp_path / "data", num_shards=3, num_rows=50_000)
    with ShardLoader(index, tmp_path / "data", cache_dir=tmp_path / "cache") as loader:
        before = bytes_read()
        assert loader.verify_all().hashed_bytes == index.size_bytes
        assert bytes_read() - before >= index.size_bytes
    with ShardLoader(index, tmp_path / "data", cache_dir=tmp_path / "cache") as loader:
        before = bytes_read()
        report = loader.verify_all()
        assert bytes_read() - before < 10_000 < index.size_bytes / 10
    assert (report.hashed_bytes, report.is_complete) == (0, True)


def test_only_the_file_that_was_touched_is_hashed_again(folder, index, tmp_path):
    with ShardLoader(index, folder, cache_dir=tmp_path / "cache") as loader:
        list(loader)  # reading stamps as verifying does
    os.utime(folder / "1.parquet", ns=(LONG_AGO_NS, LONG_AGO_NS + 1))
    with ShardLoader(index, folder, cache_dir=tmp_path / "cache") as loader:
        assert loader.verify_all().hashed_bytes == index.shards[1].size_bytes
    with ShardLoader(index, folder, cache_dir=tmp_path / "cache") as loader:
        assert loader.verify_all().hashed_bytes == 0


def test_a_change_is_found_though_size_inode_and_time_are_as_before(folder, index, tmp_path):
    with ShardLoader(index, folder, cache_dir=tmp_path / "cache") as loader:
        loader.verify_all()
        flip_bit_unseen(folder / "3.parquet")
        with pytest.raises(InputError, match=r"1 fault\n  - 3\.parquet: content changed"):
            loader.verify_all()


def test_a_stamp_of_another_index_does_not_count(folder, index, tmp_path):
    with ShardLoader(index, folder, cache_dir=tmp_path / "cache") as loader:
        loader.verify_all()
    wrong = msgspec.structs.replace(index.shards[0], hash="sha256:" + "0" * 64)
    index = msgspec.structs.replace(index, shards=[wrong, *index.shards[1:]])
    loader = ShardLoader(index, folder, cache_dir=tmp_path / "cache")
    with loader, pytest.raises(InputError, match=r"1 fault\n  - 0\.parquet: content changed"):
        loader.verify_all()


def test_a_file_that_was_written_this_moment_is_not_trusted_next_time(folder, index, tmp_path):
    (folder / "0.parquet").touch()
    for _ in range(2):
        with ShardLoader(index, folder, cache_dir=tmp_path / "cache") as loader:
            hashed_bytes = loader.verify_all().hashed_bytes
    assert hashed_bytes == index.shards[0].size_bytes


def test_torn_stamps_cost_a_hash_and_harm_no_other(folder, index, tmp_path):
    with ShardLoader(index, folder, cache_dir=tmp_path / "cache") as loader:
        loader.verify_all()
    (stamps,) = (tmp_path / "cache").iterdir()
    stamps.write_bytes(stamps.read_bytes()[:-5] + b"\xff")
    for expected in (1, 0):
        with ShardLoader(index, folder, cache_dir=tmp_path / "cache") as loader:
            assert (loader.verify_all().hashed_bytes > 0) == bool(expected)


def test_a_cache_that_cannot_be_written_is_said_and_does_no_harm(folder, index, tmp_path, caplog):
    (tmp_path / "cache").write_text("a file where a folder should be")
    with caplog.at_level(logging.WARNING), ShardLoader(index, folder, cache_dir=tmp_path / "cache") as loader:
        assert loader.verify_all().is_complete
        assert loader.verify_all().hashed_bytes == 0  # what this loader saw itself it remembers
    assert len(caplog.records) == 1
    assert "cannot be written" in caplog.text


@given(
    st.lists(
        st.builds(
            Stamp,
            path=st.sampled_from("abc"),
            identity=st.builds(
                FileIdentity, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)
            ),
            rows=st.integers(0, 9),
            hash=st.sampled_from(["x", "y"]),
        ),
        min_size=1,
        max_size=8,
    )
)
@settings(max_examples=30)
def test_the_last_stamp_of_a_file_counts_in_every_process(tmp_path_factory, stamps):
    folder = tmp_path_factory.mktemp("stamps")
    (folder / "shard").touch()
    first, second = Stamps(folder, folder), Stamps(folder, folder)
    for writer, stamp in zip(itertools.cycle([first, second]), stamps, strict=False):
        writer.add(stamp, folder / "shard")
    last = {stamp.path: stamp for stamp in stamps}
    fresh = Stamps(folder, folder)
    for stamp in stamps:
        assert fresh.holds(stamp) == (last[stamp.path] == stamp)
