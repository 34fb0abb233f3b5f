"""Lines of the logs: cut the same way whenever they are read, known again, and completed byte for byte."""

import json

import pytest

from trn.daemon.outlets.log_lines import (
    MAX_MESSAGE_BYTES,
    AttemptStart,
    Mark,
    completion,
    cut_output,
    output_line,
    read_mark,
)

LONG = MAX_MESSAGE_BYTES


def cut(
    data: bytes, *, is_all: bool = True, starts: tuple[AttemptStart, ...] = ()
) -> list[tuple[int, bool, str]]:
    pieces = list(cut_output(data, 100, is_all=is_all, starts=starts))
    assert [offset for _, offset, _, _, _ in pieces] == [
        100 + sum(size for _, _, size, _, _ in pieces[:index]) for index in range(len(pieces))
    ]
    return [(attempt, is_partial, text) for attempt, _, _, is_partial, text in pieces]


def test_a_line_that_is_not_ended_waits_until_it_is_or_the_run_has_ended() -> None:
    assert cut(b"one\ntwo\nthr", is_all=False) == [(1, False, "one"), (1, False, "two")]
    assert cut(b"one\ntwo\nthr") == [(1, False, "one"), (1, False, "two"), (1, False, "thr")]
    assert cut(b"\n\n") == [(1, False, ""), (1, False, "")]


def test_bytes_that_are_no_text_are_shown_as_what_they_are() -> None:
    assert cut(b"\xff\x00\xe2\x82\n") == [(1, False, "\\xff\x00\\xe2\\x82")]
    assert json.loads(output_line("r", (1, 0, 5, False, "\x00\r\u2028"), 7))["message"] == "\x00\r\u2028"


def test_an_endless_line_is_cut_into_marked_pieces_that_make_it_up() -> None:
    text = "ä" * LONG  # of two bytes each: no cut may go through one
    pieces = cut(b"x" + text.encode() + b"\nnext\n")
    assert [is_partial for _, is_partial, _ in pieces] == [True, True, False, False]
    assert "".join(part for _, _, part in pieces[:3]) == "x" + text
    assert all(len(part.encode()) <= LONG for _, _, part in pieces)


@pytest.mark.parametrize("size", [LONG - 1, LONG, LONG + 1])
def test_where_a_line_is_cut_does_not_depend_on_how_much_was_there(size: int) -> None:
    data = b"a" * size + b"\nb\n"
    whole = list(cut_output(data, 0, is_all=True))
    for end in (size // 2, LONG - 1, LONG, LONG + 1, size + 1, len(data)):
        early = list(cut_output(data[:end], 0, is_all=False))
        assert early == whole[: len(early)]


def test_output_belongs_to_the_attempt_that_printed_it_and_no_line_to_two() -> None:
    starts = (AttemptStart(100, 1), AttemptStart(108, 2), AttemptStart(108, 3))
    assert cut(b"one\nkillnext\n", starts=starts) == [
        (1, False, "one"),
        (1, False, "kill"),
        (3, False, "next"),
    ]
    # Also before the rest of it is there.
    assert cut(b"one\nkill", is_all=False, starts=starts) == [(1, False, "one"), (1, False, "kill")]


def test_every_line_says_what_it_is_a_copy_of() -> None:
    event = b'{"schema_version":"trainer_event.v1","event":"x","seq":7,"run_id":"r","offset":"no number"}'
    assert read_mark(event) == Mark("r", "event", 7)
    assert read_mark(output_line("r", (1, 10, 6, False, "hello"), 5)) == Mark("r", "output", 16)
    assert read_mark(b'{"schema_version":"trainer_job.v1","event":"job_submitted","run_id":"r"}') == Mark(
        "r", "job", 1
    )
    assert read_mark(b'{"schema_version":"trainer_job.v1","event":"job_failed","run_id":"r"}') == Mark(
        "r", "job", 2
    )
    for foreign in (b"", b"text", b'{"event":"x"}', b"[1]", b'{"run_id":"r","event":"x","seq":"1"}', b"\xff"):
        assert read_mark(foreign) is None


def test_a_half_line_is_completed_at_every_byte_also_when_the_time_is_another() -> None:
    before = output_line("r", (1, 10, 6, False, 'he said "x"\\'), 1_700_000_000_123)
    now = output_line("r", (1, 10, 6, False, 'he said "x"\\'), 1_800_000_000_456) + b"more\n"
    for end in range(1, len(before)):
        rest = completion(before[:end], now)
        assert rest is not None
        line, more = (before[:end] + rest).splitlines()
        assert more == b"more"
        told = json.loads(line)
        assert abs(told.pop("timestamp_ms") - 1_750_000_000_000) < 1e12
        expected = json.loads(before)
        del expected["timestamp_ms"]
        assert told == expected


def test_what_is_no_beginning_of_the_line_is_not_taken_for_one() -> None:
    line = output_line("r", (1, 10, 6, False, "hello"), 1_700_000_000_123)
    other = output_line("r", (1, 16, 6, False, "hello"), 1_700_000_000_123)
    assert completion(other[:-5], line) is None
    assert completion(b"text", line) is None
    assert completion(line[:-15] + b"x", line) is None
