"""Other rows in files of the same size, row counts and footer are noticed: on a resume, and while a run reads them."""

import itertools
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gen_worker.errors import InputError
from gen_worker.trainer.arrow_feed import ArrowFeed
from gen_worker.trainer.feed import content_check
from gen_worker.trainer.feed.content import CONTENT, merge_content
from gen_worker.trainer.feed.groups import ParquetGroups

ROWS, GROUP = 240, 20


def write_file(path: Path, *, flip: int = 0, start: int = 0) -> None:
    """Rows whose labels can be inverted without a trace in size or footer."""
    labels = pa.array([(row % 2) ^ flip for row in range(ROWS)], pa.int8())
    ids = pa.array(range(start, start + ROWS), pa.int32())
    plain: dict[str, Any] = {"use_dictionary": False, "write_statistics": False, "compression": "none"}
    pq.write_table(pa.table({"id": ids, "label": labels}), path, row_group_size=GROUP, **plain)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(2):
        write_file(folder / f"{number}.parquet", start=number * ROWS)
    return folder


def open_feed(folder: Path, **options: Any) -> ArrowFeed:
    return ArrowFeed.open([str(folder)], **{"batch_size": 10, "readahead": 1, **options})


def read_some(feed: ArrowFeed, num_batches: int, *, epoch: int = 0, batch: int = 0) -> list[list[int]]:
    batches = feed.batches(epoch=epoch, batch=batch)
    return [item["label"].to_pylist() for item in itertools.islice(batches, num_batches)]


def read_and_save(folder: Path, num_batches: int, **options: Any) -> tuple[dict[str, Any], bytes]:
    with open_feed(folder, **options) as feed:
        read_some(feed, num_batches)
        return feed.state(epoch=0, batch=num_batches), feed.manifest.to_json()


def test_the_swap_leaves_no_trace_but_its_rows_and_its_times(folder: Path) -> None:
    before, was = ArrowFeed.open([str(folder)], batch_size=10), (folder / "0.parquet").read_bytes()
    write_file(folder / "0.parquet", flip=1)
    after = ArrowFeed.open([str(folder)], batch_size=10)
    assert after.manifest_digest == before.manifest_digest
    assert len(was) == (folder / "0.parquet").stat().st_size
    assert read_some(after, 1) != [[row % 2 for row in range(10)]]


@pytest.mark.parametrize("is_time_put_back", [False, True])
@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_swapped_rows_are_found_before_the_first_step(
    folder: Path, tmp_path: Path, *, is_time_put_back: bool, is_replaced: bool, shuffle: bool
) -> None:
    saved, manifest = read_and_save(folder, 48, shuffle=shuffle)
    path = folder / "1.parquet"
    times = path.stat()
    written = tmp_path / "new.parquet" if is_replaced else path
    write_file(written, flip=1, start=ROWS)
    if is_replaced:
        written.replace(path)
    if is_time_put_back:
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with (
        open_feed(folder, shuffle=shuffle) as feed,
        pytest.raises(
            InputError, match=r"1\.parquet: row group 0 has changed since this run read it"
        ) as refused,
    ):
        feed.position(saved, manifest=manifest)
    assert "0.parquet" not in str(refused.value)
    assert "start a new run" in str(refused.value)


def test_of_many_changes_some_are_named_and_the_rest_counted(folder: Path) -> None:
    saved, manifest = read_and_save(folder, 48)
    for number in range(2):
        write_file(folder / f"{number}.parquet", flip=1, start=number * ROWS)
    with open_feed(folder) as feed, pytest.raises(InputError) as refused:
        feed.position(saved, manifest=manifest)
    head, *changes, more, remedy = str(refused.value).splitlines()
    assert head.startswith("the data or its order changed since the checkpoint")
    assert [line.split(": ")[1].rsplit(" has")[0] for line in changes] == [
        f"row group {number}" for number in range(5)
    ]
    assert re.fullmatch(r"  - … and \d+ more", more)
    assert remedy.startswith("  Change it back to resume, or start a new run; `weights` in its job")


def test_what_is_too_much_to_compare_at_once_is_compared_when_it_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, manifest = read_and_save(folder, 48)
    with (folder / "0.parquet").open("r+b") as file:  # one label in the last row group
        footer = pq.read_metadata(folder / "0.parquet").row_group(ROWS // GROUP - 1).column(1)
        file.seek(footer.data_page_offset + footer.total_compressed_size - 1)
        file.write(b"\x07")
    monkeypatch.setattr(content_check, "CHECK_BYTES", 1)
    with open_feed(folder) as feed:
        place = feed.position(saved, manifest=manifest)
        assert place == (1, 0)
        (note,) = feed.notes
        assert note == (
            "info",
            "1 of 2 data files were written, copied or moved since the checkpoint: 1 of their 12 row groups are"
            " unchanged, 11 are compared when they are read",
        )
        with pytest.raises(InputError, match=r"0\.parquet: row group 11 has changed"):
            read_some(feed, 48, epoch=1)


def test_rows_that_were_never_read_are_said_to_be_unknown(folder: Path) -> None:
    saved, manifest = read_and_save(folder, 2)
    write_file(folder / "1.parquet", flip=1, start=ROWS)
    with open_feed(folder) as feed:
        assert feed.position(saved, manifest=manifest) == (0, 2)
        ((level, note),) = feed.notes
        assert level == "warning"
        assert (
            "0 of their 12 row groups are unchanged, 12 were not read before and cannot be compared" in note
        )


def test_a_copy_of_the_data_is_compared_and_taken(folder: Path, tmp_path: Path) -> None:
    saved, manifest = read_and_save(folder, 48)
    shutil.copytree(folder, tmp_path / "copy")
    with open_feed(tmp_path / "copy") as feed:
        feed.position(saved, manifest=manifest)
        assert [level for level, _ in feed.notes] == ["info"]
        assert "24 of their 24 row groups are unchanged" in feed.notes[0][1]


def test_files_with_the_same_stamps_are_not_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, manifest = read_and_save(folder, 48)
    monkeypatch.setattr(ParquetGroups, "check", None)
    with open_feed(folder) as feed:
        assert feed.position(saved, manifest=manifest) == (1, 0)
        assert feed.notes == []


def test_what_any_process_has_read_is_known_to_all_at_any_number_of_them(folder: Path) -> None:
    states = []
    for rank in range(2):
        with open_feed(folder, shuffle=True, rank=rank, world_size=2) as feed:
            read_some(feed, 48)
            states.append(feed.state(epoch=0, batch=48))
            manifest = feed.manifest
    merged = {**states[0], CONTENT: merge_content([state[CONTENT] for state in states])}
    for world_size in (1, 2, 5):
        for rank in range(world_size):
            with open_feed(folder, shuffle=True, rank=rank, world_size=world_size) as feed:
                assert feed.position(merged, manifest=manifest) == (1, 0)
    write_file(folder / "0.parquet", flip=1)
    write_file(folder / "1.parquet", flip=1, start=ROWS)
    for world_size in (1, 2, 5):
        for rank in range(world_size):
            with (
                open_feed(folder, shuffle=True, rank=rank, world_size=world_size) as feed,
                pytest.raises(InputError, match="has changed"),
            ):
                feed.position(merged, manifest=manifest)


def test_processes_that_read_different_rows_are_not_saved_together(folder: Path) -> None:
    first, _ = read_and_save(folder, 48)
    write_file(folder / "0.parquet", flip=1)
    second, _ = read_and_save(folder, 48)
    with pytest.raises(InputError, match="two processes read different data in row group 0"):
        merge_content([first[CONTENT], second[CONTENT]])


def test_a_file_that_is_rewritten_under_a_run_is_found_in_its_next_epoch(folder: Path) -> None:
    with open_feed(folder) as feed:
        read_some(feed, 48)
        os.utime(folder / "0.parquet")  # a touch alone is no change
        read_some(feed, 48, epoch=1)
        write_file(folder / "0.parquet", flip=1)
        with pytest.raises(InputError, match=r"0\.parquet: row group 0 has changed"):
            read_some(feed, 48, epoch=2)


def test_another_footer_under_a_run_is_found_at_once(folder: Path) -> None:
    with open_feed(folder) as feed:
        read_some(feed, 1)
        content = (folder / "1.parquet").read_bytes()
        # The same size; the footer names another writer.
        (folder / "1.parquet").write_bytes(content.replace(b"parquet-cpp-arrow", b"parquet-cpp-ARROW"))
        with pytest.raises(InputError, match=r"1\.parquet: changed since the feed was opened"):
            read_some(feed, 48)


def test_a_decoded_cache_does_not_outlive_the_rows_it_was_made_of(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with open_feed(folder, cache_dir=cache) as feed:
        assert feed.wait_cached(60)
    write_file(folder / "0.parquet", flip=1)
    with open_feed(folder, cache_dir=cache) as feed:
        assert feed.wait_cached(60)
        assert read_some(feed, 1) == [[1 - row % 2 for row in range(10)]]


def test_a_run_that_reads_from_its_cache_knows_what_it_read(folder: Path, tmp_path: Path) -> None:
    with open_feed(folder, cache_dir=tmp_path / "cache") as feed:
        assert feed.wait_cached(60)
    with open_feed(folder, cache_dir=tmp_path / "cache") as feed:
        assert feed.wait_cached(60)
        read_some(feed, 48)
        saved, manifest = feed.state(epoch=0, batch=48), feed.manifest
    assert saved == read_and_save(folder, 48)[0]
    write_file(folder / "0.parquet", flip=1)
    for options in ({}, {"cache_dir": tmp_path / "cache"}):
        with open_feed(folder, **options) as feed, pytest.raises(InputError, match="has changed"):
            feed.position(saved, manifest=manifest)


def test_an_arrow_file_has_the_checksums_of_its_parquet_files(folder: Path, tmp_path: Path) -> None:
    saved, manifest = read_and_save(folder, 48)
    for number, is_same in enumerate((True, False)):
        with open_feed(folder) as feed:
            feed.write_ipc(tmp_path / f"{number}.arrow")
        with ArrowFeed.open_ipc(tmp_path / f"{number}.arrow", batch_size=10) as feed:
            if is_same:
                assert feed.position(saved, manifest=manifest) == (1, 0)
            else:
                with pytest.raises(InputError, match="record batch 0 has changed"):
                    feed.position(saved, manifest=manifest)
        write_file(folder / "0.parquet", flip=1)
    with ArrowFeed.open_ipc(tmp_path / "0.arrow", batch_size=10, columns=["label"]) as feed:
        label_only, label_manifest = read_and_save(folder, 48, columns=["label"])
        assert feed.position(label_only, manifest=label_manifest) == (1, 0)
        assert "the rows are not compared" in feed.notes[0][1]


def test_an_arrow_file_of_another_program_is_compared_too(tmp_path: Path) -> None:
    def write(flip: int) -> None:
        rows = pa.table({"label": pa.array([flip] * 4000, pa.int64()), "kind": pa.array(["a"] * 4000)})
        with pa.ipc.new_file(tmp_path / "x.arrow", rows.schema) as writer:
            for batch in rows.to_batches(max_chunksize=1000):
                writer.write_batch(batch)

    write(0)
    with ArrowFeed.open_ipc(tmp_path / "x.arrow", batch_size=10) as feed:
        read_some(feed, 400)
        saved, manifest = feed.state(epoch=0, batch=400), feed.manifest
    with ArrowFeed.open_ipc(tmp_path / "x.arrow", batch_size=10) as feed:
        assert feed.position(saved, manifest=manifest) == (1, 0)
    content = bytearray((tmp_path / "x.arrow").read_bytes())
    at = content.index(bytes(8 * 1000)) + 8 * 100  # between the pages of the fingerprint
    content[at] = 1
    (tmp_path / "x.arrow").write_bytes(content)
    with (
        ArrowFeed.open_ipc(tmp_path / "x.arrow", batch_size=10) as feed,
        pytest.raises(InputError, match=r"the data or its order changed|has changed"),
    ):
        feed.position(saved, manifest=manifest)


def test_a_cursor_without_checksums_is_taken_as_before(folder: Path) -> None:
    saved, manifest = read_and_save(folder, 4)
    del saved[CONTENT]
    with open_feed(folder) as feed:
        assert feed.position(saved, manifest=manifest) == (0, 4)
        assert feed.notes == []


def test_other_columns_are_refused(folder: Path) -> None:
    saved, manifest = read_and_save(folder, 4)
    with (
        open_feed(folder, columns=["label"]) as feed,
        pytest.raises(InputError, match="the columns were id: int32"),
    ):
        feed.position(saved, manifest=manifest)


def test_checksums_that_are_damaged_are_refused(folder: Path) -> None:
    saved, _ = read_and_save(folder, 4)
    saved[CONTENT] = {**saved[CONTENT], "checksums": "no base64!"}
    with (
        open_feed(folder) as feed,
        pytest.raises(InputError, match=r"checksums of the data .* are not valid"),
    ):
        feed.position(saved)
