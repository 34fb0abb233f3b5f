"""A run's events file from the outside: no half line is an event, no damage stops the rest, the end is found quickly."""

import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gen_worker.trainer.events.event_tail import read_tail
from gen_worker.trainer.reporting import TrainingReporter
from trn.daemon.ingest.event_file import (
    CHUNK_BYTES,
    MAX_LINE_BYTES,
    Damage,
    EventBatch,
    last_seq_before,
    parse,
    read_batch,
    read_terminal,
    replay,
    split,
)
from trn.daemon.ingest.followed_run import DamagedLines
from trn.executors.local.files import LocalFile


def line(seq: int, event: str = "log", attempt: int = 1, **fields: Any) -> bytes:
    head = {"schema_version": "trainer_event.v1", "event": event, "seq": seq, "run_id": "r"}
    return json.dumps({**head, "attempt": attempt, "timestamp_ms": 1000 + seq, **fields}).encode() + b"\n"


def seqs(batch: EventBatch) -> list[int]:
    return [json.loads(part)["seq"] for part in batch.lines.split(b"\n")[:-1]]


def test_half_a_line_is_left_for_later(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(line(1) + line(2)[:-20])
    batch = read_batch(LocalFile(path), 0)
    assert batch.lines == line(1)
    assert batch.is_end
    with path.open("ab") as file:
        file.write(line(2)[-20:])
    assert read_batch(LocalFile(path), batch.next_offset).lines == line(2)


def test_a_file_that_is_not_there_has_no_lines(tmp_path: Path) -> None:
    batch = read_batch(LocalFile(tmp_path / "none"), 0)
    assert (batch.lines, batch.next_offset, batch.is_end, batch.is_cut) == (b"", 0, True, False)
    assert read_batch(LocalFile(tmp_path / "none"), 7).is_cut


def test_a_place_that_is_not_between_lines_any_more_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(line(1) + line(2))
    assert not read_batch(LocalFile(path), len(line(1))).is_cut
    assert read_batch(LocalFile(path), len(line(1)) + 3).is_cut
    assert read_batch(LocalFile(path), 10_000).is_cut


def test_a_line_that_is_too_long_is_put_aside_and_the_next_one_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    long = line(2, message="x" * (MAX_LINE_BYTES * 2))
    path.write_bytes(line(1) + long[:-1])
    first = read_batch(LocalFile(path), 0)
    assert first.lines == line(1)
    assert read_batch(LocalFile(path), first.next_offset).next_offset == first.next_offset
    with path.open("ab") as file:
        file.write(b"\n" + line(3))
    second = read_batch(LocalFile(path), first.next_offset)
    (damage,) = second.damaged
    assert (damage.offset, damage.size_bytes) == (len(line(1)), len(long))
    assert read_batch(LocalFile(path), second.next_offset).lines == line(3)


NOT_EVENTS = [
    b"\n",
    b"{\n",
    b"\x00\x00\x00\n",
    b"\xff\xfe\n",
    b"[]\n",
    b'{"seq": 1}\n',
    line(0),
    line(1 << 60),
    line(2)[:-1] + line(2),
    b'{"a":' * 5000 + b"\n",
    line(2, message="~").replace(b"~", b"\xff"),
]


@pytest.mark.parametrize("bad", NOT_EVENTS)
def test_a_line_that_is_no_event_stops_nothing(bad: bytes) -> None:
    chunk = parse(line(1) + bad + line(2), 100, 0)
    assert [event.seq for event in chunk.events] == [1, 2]
    assert chunk.lines == line(1) + line(2)
    assert [damage.offset for damage in chunk.damaged] == [100 + len(line(1))]
    assert chunk.end_of(1) == 100 + len(line(1))
    assert chunk.end_of(9) == 100 + len(line(1) + bad + line(2))


def test_lines_of_which_none_is_an_event_stop_nothing() -> None:
    chunk = parse(b"x\n\ny\n", 0, 7)
    assert (chunk.events, chunk.lines, chunk.end_of(9)) == ([], b"", None)
    assert [damage.offset for damage in chunk.damaged] == [0, 2, 3]


def test_what_counts_as_an_event_is_never_cut_off_by_the_next_attempt(tmp_path: Path) -> None:
    for number, bad in enumerate(NOT_EVENTS):
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(line(1) + bad)
        chunk = parse(path.read_bytes(), 0, 0)
        try:
            good_bytes = read_tail(path).good_bytes
        except (UnicodeDecodeError, RecursionError):
            continue  # then it does not start at all
        assert len(chunk.lines) <= good_bytes


def test_a_field_of_an_authors_own_may_be_of_any_type() -> None:
    odd = line(2, "log", step="soon", values=[1], value={"a": 1}) + line(
        3, "metric", name="a", value=10**400, step=1
    )
    chunk = parse(line(1) + odd, 0, 0)
    assert [(event.seq, list(event.points())) for event in chunk.events] == [(1, []), (2, []), (3, [])]
    assert not chunk.damaged


def test_numbers_that_go_back_or_leap_into_the_future_are_put_aside_and_gaps_are_counted() -> None:
    chunk = parse(line(3) + line(4) + line(2) + line(9) + line(7_000_000) + line(10), 0, 2)
    assert [event.seq for event in chunk.events] == [3, 4, 9, 10]
    assert chunk.num_missing == 4
    assert [damage.reason for damage in chunk.damaged] == [
        "has number 2 and comes after 4",
        "has number 7000000 and comes after 9",
    ]
    assert parse(line(7_000_000_000), 0, 2).events == []


def test_values_that_are_no_numbers_come_back_from_their_words(tmp_path: Path) -> None:
    reporter = TrainingReporter(tmp_path / "events.jsonl", run_id="r")
    reporter.metrics(5, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 2})
    reporter.metric("e", math.nan, 6)
    reporter.validation(7, {"val/f": 0.5}, rows=None)
    reporter.close()
    chunk = parse((tmp_path / "events.jsonl").read_bytes(), 0, 0)
    first, second, third = (dict(event.points()) for event in chunk.events)
    assert math.isnan(first.pop("a"))
    assert first == {"b": math.inf, "c": -math.inf, "d": 2.0}
    assert math.isnan(second["e"])
    assert third == {"val/f": 0.5}


@given(sizes=st.lists(st.integers(0, 300), max_size=20), max_bytes=st.integers(1, 500))
def test_splitting_loses_no_byte_and_no_line(sizes: list[int], max_bytes: int) -> None:
    lines = b"".join(b"x" * size + b"\n" for size in sizes)
    parts = list(split(lines, max_bytes))
    assert b"".join(part for _, part in parts) == lines
    for start, part in parts:
        assert part.endswith(b"\n")
        assert lines[start:].startswith(part)
        assert len(part) <= max_bytes or part.count(b"\n") == 1


def test_the_terminal_event_is_found_from_the_end(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert read_terminal(LocalFile(path), 1) is None
    path.write_bytes(line(1, "started") + line(2, "metric", name="a", value=1, step=4))
    assert read_terminal(LocalFile(path), 1) is None
    with path.open("ab") as file:
        file.write(line(3, "failed", step=4, category="train-step", error="no"))
        file.write(b"\x00" * (MAX_LINE_BYTES + 5) + b"\n")
        file.write(b'{"half":')
    found = read_terminal(LocalFile(path), 1)
    assert found is not None
    assert (found.event, found.step, found.category, found.error) == ("failed", 4, "train-step", "no")
    assert read_terminal(LocalFile(path), 2) is None
    with path.open("ab") as file:
        file.write(b"\n" + line(4, "started", attempt=2) + line(5, attempt=2, message="y" * 200_000))
    assert read_terminal(LocalFile(path), 1) == found
    assert read_terminal(LocalFile(path), 2) is None
    with path.open("ab") as file:
        file.write(line(6, "completed", attempt=2, step=9, final_checkpoint=None))
    last = read_terminal(LocalFile(path), 2)
    assert last is not None
    assert (last.event, last.step, last.final_checkpoint) == ("completed", 9, "")


@given(count=st.integers(0, 40), at=st.integers(0, 40), size=st.integers(0, 9000))
def test_the_last_event_before_a_place_is_found(
    tmp_path_factory: pytest.TempPathFactory, count: int, at: int, size: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "last.jsonl"
    lines = [line(seq, message="z" * size) for seq in range(1, count + 1)]
    path.write_bytes(b"".join(lines) + b"half")
    at = min(at, count)
    offset = sum(map(len, lines[:at]))
    assert last_seq_before(LocalFile(path), offset) == at
    assert last_seq_before(LocalFile(path), offset + 3) == at
    chunk = parse(b"".join(lines), 50, 0)
    assert chunk.end_of(at) == (50 + offset if at else None)


def test_a_replay_gives_everything_after_a_number_in_order_in_bounded_pieces(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    lines = [line(seq, message="m" * 700) for seq in range(1, 3001)]
    lines[10] = b"not an event\n"
    path.write_bytes(b"".join(lines) + line(3001)[:9])
    offset = sum(map(len, lines[:500]))
    until = sum(map(len, lines[:2900]))
    for after_seq, from_offset in ((0, 0), (700, 0), (700, offset), (700, offset + 5)):
        batches = list(replay(LocalFile(path), after_seq, from_offset, until))
        expected = [seq for seq in range(after_seq + 1, 2901) if seq != 11]
        assert [seq for batch in batches for seq in seqs(batch)] == expected
        assert max(len(batch.lines) for batch in batches) <= CHUNK_BYTES
        assert [batch.first_seq for batch in batches] == [seqs(batch)[0] for batch in batches]
        assert [batch.last_seq for batch in batches] == [seqs(batch)[-1] for batch in batches]
    assert list(replay(LocalFile(path), 2900, 0, until)) == []


def test_a_batch_is_trimmed_to_what_comes_after_a_number() -> None:
    batch = EventBatch(first_seq=4, last_seq=6, lines=line(4) + line(5) + line(6))
    assert batch.after(3) is batch
    assert batch.after(6) is None
    trimmed = batch.after(4)
    assert trimmed is not None
    assert (trimmed.first_seq, seqs(trimmed)) == (5, [5, 6])


def test_a_damaged_line_is_kept_once_also_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "damaged.jsonl"
    damage = Damage(offset=7, size_bytes=3, reason="is odd", line=b"\xff{\n")
    DamagedLines(path).add([damage])
    again = DamagedLines(path)
    again.add([damage, Damage(offset=9, size_bytes=2, reason="is odd", line=b"x\n")])
    records = [json.loads(record) for record in path.read_text().splitlines()]
    assert [(record["offset"], record["line"]) for record in records] == [(7, "\\xff{"), (9, "x")]
    assert again.num_lines == 1


def write_gigabyte(path: Path, *, ends: bool) -> None:
    """Two events, then a line of a gigabyte that another program wrote (a hole in the file), ended or not."""
    path.write_bytes(line(1) + line(2, "completed", step=3))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + (1 << 30))
        if ends:
            file.seek(0, 2)
            file.write(b"\n")


@pytest.mark.parametrize("ends", [True, False])
def test_a_line_of_a_gigabyte_neither_stops_a_reader_nor_fills_its_memory(tmp_path: Path, ends: bool) -> None:
    path = tmp_path / "events.jsonl"
    write_gigabyte(path, ends=ends)
    known = len(line(1) + line(2, "completed", step=3))
    tracemalloc.start()
    try:
        assert read_batch(LocalFile(path), 0).lines.count(b"\n") == 2
        skipped = read_batch(LocalFile(path), known)
        assert [damage.size_bytes for damage in skipped.damaged] == ([(1 << 30) + 1] if ends else [])
        found = read_terminal(LocalFile(path), 1)
        assert last_seq_before(LocalFile(path), path.stat().st_size) == 2
        tail = read_tail(path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found is not None
    assert found.event == "completed"
    assert (tail.last_seq, tail.good_bytes) == (2, known)
    assert peak_bytes < 16 * MAX_LINE_BYTES


def test_what_is_too_long_to_be_an_event_is_none_for_reader_and_worker(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    fits = line(2, message="")
    fits = line(2, message="x" * (MAX_LINE_BYTES - len(fits)))
    assert len(fits) == MAX_LINE_BYTES
    for last, seq in ((fits, 2), (line(2, message="x" * MAX_LINE_BYTES), 1)):
        path.write_bytes(line(1) + last)
        assert read_tail(path).last_seq == seq
        assert last_seq_before(LocalFile(path), path.stat().st_size) == seq
        assert bool(read_batch(LocalFile(path), len(line(1))).lines) == (seq == 2)
