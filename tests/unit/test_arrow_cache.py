"""Decode once: the cache is the same dataset, shared safely, and never a reason to fail."""

import itertools
import logging
import multiprocessing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gen_worker.contract import failpoints
from gen_worker.errors import InputError
from gen_worker.trainer.arrow_feed import ArrowFeed
from gen_worker.trainer.feed import cache as arrow_cache


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    folder = tmp_path / "dataset"
    folder.mkdir()
    for part in range(3):
        ids = np.arange(part * 100, part * 100 + 100)
        table = pa.table(
            {
                "id": ids,
                "kind": pa.array([f"kind {i // 30}" for i in ids]).dictionary_encode(),
                "kinds": pa.array([[f"kind {i // 20}"] for i in ids]),
                "text": [None if i % 9 == 0 else str(i) for i in ids],
            }
        )
        pq.write_table(table, folder / f"{part}.parquet", row_group_size=30)
    return folder


@pytest.fixture(autouse=True)
def _disarm():
    yield
    failpoints.arm("")


def rows(feed: ArrowFeed, epochs: int = 2) -> list[list[dict]]:
    iterator = feed.batches()
    found = [b.to_pylist() for b in itertools.islice(iterator, epochs * feed.batches_per_epoch)]
    iterator.close()
    return found


def plain_rows(dataset: Path, **options: object) -> list[list[dict]]:
    with ArrowFeed.open([str(dataset)], batch_size=16, **options) as feed:
        return rows(feed)


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_ipc_file_gives_the_batches_and_the_digest_of_its_parquet_files(dataset, tmp_path, shuffle):
    with ArrowFeed.open([str(dataset)], batch_size=16, shuffle=shuffle) as feed:
        feed.write_ipc(tmp_path / "all.arrow")
        state = feed.state(epoch=1, batch=3)
    with ArrowFeed.open_ipc(tmp_path / "all.arrow", batch_size=16, shuffle=shuffle) as feed:
        assert rows(feed) == plain_rows(dataset, shuffle=shuffle)
        assert feed.position(state) == (1, 3)


def test_dictionaries_that_grow_vanish_and_nest_are_the_same_values_in_an_ipc_file(tmp_path):
    kinds = pa.dictionary(pa.int32(), pa.string())
    path = tmp_path / "a.parquet"
    groups = [["a", "b"], ["c", None], [], ["b", "d"], [None, None]]
    tables = [
        pa.table({"kind": pa.array(g, kinds), "kinds": pa.array([[v] for v in g], pa.list_(kinds))})
        for g in groups
    ]
    with pq.ParquetWriter(path, tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table)
    with ArrowFeed.open([str(path)], batch_size=3) as feed:
        expected = rows(feed)
        feed.write_ipc(tmp_path / "all.arrow")
    assert [row["kind"] for batch in expected[:3] for row in batch] == [v for g in groups for v in g]
    with ArrowFeed.open_ipc(tmp_path / "all.arrow", batch_size=3) as feed:
        assert rows(feed) == expected


@pytest.mark.parametrize("columns", [["id"], ["text", "id"]])
def test_a_projection_of_an_ipc_file_is_the_same_projection_of_the_parquet_files(dataset, tmp_path, columns):
    with ArrowFeed.open([str(dataset)], batch_size=16) as feed:
        feed.write_ipc(tmp_path / "all.arrow")
    with (
        ArrowFeed.open_ipc(tmp_path / "all.arrow", batch_size=16, columns=columns, shuffle=True) as mapped,
        ArrowFeed.open([str(dataset)], batch_size=16, columns=columns, shuffle=True) as decoded,
    ):
        assert mapped.manifest_digest == decoded.manifest_digest
        assert rows(mapped) == rows(decoded)
        assert mapped.schema.names == columns
    with pytest.raises(InputError, match="no column 'ids': did you mean 'id'"):
        ArrowFeed.open_ipc(tmp_path / "all.arrow", batch_size=16, columns=["ids"])


def test_batches_of_an_ipc_file_are_views_of_the_mapped_file(dataset, tmp_path):
    with ArrowFeed.open([str(dataset)], batch_size=10, columns=["id"]) as feed:
        feed.write_ipc(tmp_path / "all.arrow")
    before = pa.total_allocated_bytes()
    with ArrowFeed.open_ipc(tmp_path / "all.arrow", batch_size=10) as feed:
        kept = list(itertools.islice(feed.batches(), 3))
        assert pa.total_allocated_bytes() - before < 100 * 8
    assert kept[2].column("id").to_pylist() == list(range(20, 30)), "also after the feed is closed"


def test_an_ipc_file_of_another_program_has_a_digest_of_its_own_content(tmp_path):
    def write(name: str, value: int) -> Path:
        batch = pa.record_batch({"id": np.full(5000, value)})
        with pa.ipc.new_file(tmp_path / name, batch.schema) as writer:
            for _ in range(3):
                writer.write_batch(batch)
        return tmp_path / name

    digests = []
    for value in (1, 2):
        path = write("a.arrow", value)
        with ArrowFeed.open_ipc(path, batch_size=1000) as feed:
            assert feed.num_rows == 15_000
            assert feed.batches_per_epoch == 15
            digests.append(feed.manifest_digest)
    assert digests[0] != digests[1]


@pytest.mark.parametrize("content", [b"", b"ARROW1\0\0", b"no arrow file at all, but long enough to be one"])
def test_a_file_that_is_not_arrow_is_refused_by_name(tmp_path, content):
    path = tmp_path / "x.arrow"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"x\.arrow"):
        ArrowFeed.open_ipc(path, batch_size=1)
    with pytest.raises(InputError, match=r"y\.arrow: cannot be opened"):
        ArrowFeed.open_ipc(tmp_path / "y.arrow", batch_size=1)


def test_a_second_feed_reads_the_cache_and_no_parquet(dataset, tmp_path, monkeypatch):
    expected = plain_rows(dataset)
    with ArrowFeed.open([str(dataset)], batch_size=16, cache_dir=tmp_path / "cache") as feed:
        assert rows(feed) == expected
        assert feed.wait_cached(60)
        assert rows(feed) == expected, "after the switch"
    monkeypatch.setattr("gen_worker.trainer.feed.groups.ParquetGroups.read", None)
    with ArrowFeed.open([str(dataset)], batch_size=16, cache_dir=tmp_path / "cache") as feed:
        assert feed.wait_cached(0)
        assert rows(feed) == expected


def cache_file(folder: Path) -> Path:
    (path,) = folder.glob("*.arrow")
    return path


@pytest.mark.parametrize("damage", ["cut", "garbage", "empty", "other"])
def test_a_damaged_cache_is_ignored_and_made_anew(dataset, tmp_path, damage, caplog):
    with ArrowFeed.open([str(dataset)], batch_size=16, cache_dir=tmp_path) as feed:
        assert feed.wait_cached(60)
    path = cache_file(tmp_path)
    content = path.read_bytes()
    if damage == "other":
        with ArrowFeed.open([str(dataset / "0.parquet")], batch_size=16) as feed:
            feed.write_ipc(path)
    else:
        path.write_bytes({"cut": content[:-100], "garbage": b"x" * len(content), "empty": b""}[damage])
    with ArrowFeed.open([str(dataset)], batch_size=16, cache_dir=tmp_path) as feed:
        assert rows(feed) == plain_rows(dataset)
        assert feed.wait_cached(60)
    assert "not valid and is written again" in caplog.text
    assert len(path.read_bytes()) == len(content)


def test_another_dataset_gets_another_cache_file(dataset, tmp_path):
    for columns in (["id"], ["id", "text"]):
        with ArrowFeed.open([str(dataset)], batch_size=16, columns=columns, cache_dir=tmp_path) as feed:
            assert feed.wait_cached(60)
    assert len(list(tmp_path.glob("*.arrow"))) == 2


def test_a_full_disk_only_costs_the_cache(dataset, tmp_path, caplog):
    failpoints.arm("feed_cache.write=enospc@2")
    with (
        caplog.at_level(logging.WARNING),
        ArrowFeed.open([str(dataset)], batch_size=16, cache_dir=tmp_path / "cache") as feed,
    ):
        assert feed.wait_cached(60) is False
        assert rows(feed) == plain_rows(dataset)
    assert "continues without it" in caplog.text
    assert list((tmp_path / "cache").glob("*.arrow")) == []
    assert list((tmp_path / "cache").glob(".*.tmp")) == []


def test_too_little_free_space_is_seen_before_anything_is_written(dataset, tmp_path, caplog, monkeypatch):
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr(arrow_cache.shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(arrow_cache, "write_groups", None)
    with ArrowFeed.open([str(dataset)], batch_size=16, cache_dir=tmp_path / "cache") as feed:
        assert feed.wait_cached(60) is False
    assert "0 MiB are free" in caplog.text


def test_closing_the_feed_stops_a_build_and_leaves_no_part_behind(dataset, tmp_path, monkeypatch):
    reads = itertools.count()
    feed = ArrowFeed.open([str(dataset)], batch_size=16)
    read = feed._source.read

    class Slow:
        checksums = feed._source.checksums

        def read(self, group: int) -> pa.RecordBatch:
            if next(reads) == 2:
                cached._stop.set()
            return read(group)

        def check(self, group: int) -> None: ...

        def forget(self) -> None: ...

        def close(self) -> None:
            feed.close()

    monkeypatch.setattr(arrow_cache.threading.Thread, "start", lambda self: None)
    cached = arrow_cache.CachedGroups(Slow(), feed.manifest, tmp_path / "cache")
    monkeypatch.undo()
    cached._builder = None
    cached._build()
    cached.close()
    assert next(reads) == 3
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_part_left_by_a_killed_builder_is_removed(dataset, tmp_path):
    with ArrowFeed.open([str(dataset)], batch_size=16, cache_dir=tmp_path) as feed:
        assert feed.wait_cached(60)
    path = cache_file(tmp_path)
    path.unlink()
    leftover = tmp_path / f".{path.name}.1-abc.tmp"
    leftover.write_bytes(b"half")
    with ArrowFeed.open([str(dataset)], batch_size=16, cache_dir=tmp_path) as feed:
        assert feed.wait_cached(60)
    assert not leftover.exists()


def build_and_read(dataset: str, folder: str, start, results) -> None:
    start.wait(60)
    with ArrowFeed.open([dataset], batch_size=16, cache_dir=Path(folder)) as feed:
        found = rows(feed)
        results.put((feed.wait_cached(60), found))


def test_two_workers_share_one_cache(dataset, tmp_path):
    spawn = multiprocessing.get_context("spawn")
    start, results = spawn.Barrier(3), spawn.Queue()
    workers = [
        spawn.Process(target=build_and_read, args=(str(dataset), str(tmp_path / "cache"), start, results))
        for _ in range(2)
    ]
    for worker in workers:
        worker.start()
    start.wait(60)
    found = [results.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(60)
    assert found == [(True, plain_rows(dataset))] * 2
    assert len(list((tmp_path / "cache").glob("*.arrow"))) == 1


def test_write_ipc_replaces_a_file_only_when_the_new_one_is_whole(dataset, tmp_path):
    target = tmp_path / "all.arrow"
    target.write_bytes(b"old")
    failpoints.arm("feed_cache.write=enospc@3")
    with ArrowFeed.open([str(dataset)], batch_size=16) as feed:
        with pytest.raises(OSError, match="no space left"):
            feed.write_ipc(target)
        assert target.read_bytes() == b"old"
        assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["all.arrow"]
        feed.write_ipc(target)
    with ArrowFeed.open_ipc(target, batch_size=16) as feed:
        assert feed.num_rows == 300
