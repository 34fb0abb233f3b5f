"""Output lines are split the same way whenever they are read, so a repeat has the same key."""

import json

import pytest

from trn.daemon.outlets.log_lines import (
    MAX_MESSAGE_BYTES,
    OutputLine,
    encode_lines,
    split_output,
)
from trn.executors.base import AttemptStart

LONG = MAX_MESSAGE_BYTES


def split(data: bytes, *, is_all: bool) -> list[OutputLine]:
    return list(split_output(data, 0, run_id="r", is_all=is_all))


def cut(
    data: bytes, *, is_all: bool = True, starts: tuple[AttemptStart, ...] = ()
) -> list[tuple[int, bool, str]]:
    lines = list(split_output(data, 100, run_id="r", is_all=is_all, starts=starts))
    assert [line.offset for line in lines] == [
        100 + sum(line.size_bytes for line in lines[:index]) for index in range(len(lines))
    ]
    return [(line.attempt, line.is_partial, line.message) for line in lines]


def test_a_line_that_is_not_ended_waits_until_it_is_or_the_run_has_ended() -> None:
    assert cut(b"one\ntwo\nthr", is_all=False) == [(1, False, "one"), (1, False, "two")]
    assert cut(b"one\ntwo\nthr") == [(1, False, "one"), (1, False, "two"), (1, False, "thr")]
    assert cut(b"\n\n") == [(1, False, ""), (1, False, "")]


def test_bytes_that_are_no_text_are_shown_as_what_they_are() -> None:
    assert cut(b"\xff\x00\xe2\x82\n") == [(1, False, "\\xff\x00\\xe2\\x82")]
    [line] = split_output("\x00\r\u2028".encode(), 0, run_id="r", is_all=True)
    assert json.loads(encode_lines([line]))["message"] == "\x00\r\u2028"


def test_an_endless_line_is_cut_into_marked_pieces_that_make_it_up() -> None:
    text = "ä" * LONG  # of two bytes each: no cut may go through one
    pieces = cut(b"x" + text.encode() + b"\nnext\n")
    assert [is_partial for _, is_partial, _ in pieces] == [True, True, False, False]
    assert "".join(part for _, _, part in pieces[:3]) == "x" + text
    assert all(len(part.encode()) <= LONG for _, _, part in pieces)


@pytest.mark.parametrize("size", [LONG - 1, LONG, LONG + 1])
def test_where_a_line_is_cut_does_not_depend_on_how_much_was_there(size: int) -> None:
    data = b"a" * size + b"\nb\n"
    whole = split(data, is_all=True)
    for end in (size // 2, LONG - 1, LONG, LONG + 1, size + 1, len(data)):
        early = split(data[:end], is_all=False)
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
