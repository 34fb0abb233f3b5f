"""Notes and tags that are changed after a submit: every fault at once, and never more than lists can carry."""

from typing import Any

import pytest

from trn.core.causes import QUEUED
from trn.core.errors import InvalidRequestError
from trn.core.runs import RunRecord, RunState
from trn.daemon.intake.run_labels import (
    MAX_NAME,
    MAX_NOTES_BYTES,
    MAX_TAG_NAME,
    MAX_TAG_VALUE,
    MAX_TAGS,
    check_labels,
)


def run(**tags: str) -> RunRecord:
    return RunRecord(
        run_id="one", digest="", state=RunState.PENDING, cause=QUEUED, config={}, submitted_ms=0, tags=tags
    )


def check(record: RunRecord, **change: Any) -> None:
    check_labels(record, **{"name": None, "notes": None, "tags": {}, "removed_tags": (), **change})


def test_what_fits_is_taken() -> None:
    check(run(), notes="n" * MAX_NOTES_BYTES)
    check(run(), notes="")
    check(run(), name="")
    check(run(), name="ü" * MAX_NAME)
    check(run(), notes="a line\n\tand another, 測試")
    check(run(), tags={"k" * MAX_TAG_NAME: "v" * MAX_TAG_VALUE, "group": "", "team: größe": "a=b"})
    check(run(), removed_tags=["none", "x" * 999])
    check(run(), tags={f"t{number}": "" for number in range(MAX_TAGS)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "nothing to change: give name, notes, tags or removed_tags"),
        ({"name": "x" * (MAX_NAME + 1)}, "expected at most 256 printable characters in one line"),
        ({"name": "two\nlines"}, "name: found 'two\\nlines', expected at most 256"),
        (
            {"notes": "ü" * MAX_NOTES_BYTES},
            f"notes: has {2 * MAX_NOTES_BYTES} bytes, at most {MAX_NOTES_BYTES}",
        ),
        ({"notes": "a\0b"}, "notes: holds a NUL character"),
        ({"notes": "\ud800"}, "notes: character 0 is not valid Unicode"),
        ({"tags": {"": "v"}}, "tags: found the name '', expected 1 to 128 printable characters without `=`"),
        ({"tags": {"a=b": "v"}}, "tags: found the name 'a=b'"),
        ({"tags": {"a\nb": "v"}}, "tags: found the name 'a\\nb'"),
        ({"tags": {"k" * (MAX_TAG_NAME + 1): "v"}}, "tags: found the name"),
        ({"tags": {"k": "v" * (MAX_TAG_VALUE + 1)}}, "tags.k: found 'vvv"),
        ({"tags": {"k": "\x1b[2J"}}, "tags.k: found '\\x1b[2J', expected at most 1024 printable characters"),
        ({"tags": {"k": "v"}, "removed_tags": ["k"]}, "tags.k: is set and removed: give it once"),
        (
            {"tags": {f"t{number}": "" for number in range(65)}},
            "the run would have 65 tags, at most 64 are kept",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_limit(change: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check(run(), **change)
    assert words in str(caught.value)


def test_all_faults_come_at_once() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check(run(), notes="\0", tags={"": "v", "k": "\n"})
    assert [fault.path for fault in caught.value.faults] == ["notes", "tags", "tags.k"]


def test_a_run_that_was_submitted_with_many_tags_can_still_be_changed() -> None:
    many = run(**{f"t{number}": "" for number in range(MAX_TAGS + 10)})
    check(many, tags={"t0": "other"})
    check(many, tags={"new": "1"}, removed_tags=["t0"])
    with pytest.raises(InvalidRequestError, match="would have 75 tags"):
        check(many, tags={"new": "1"})
