"""A failed event names what a person can act on."""

from dataclasses import dataclass

import pytest

from gen_worker.errors import AuthError, Category, SpecError
from gen_worker.trainer.attempt import failure
from gen_worker.trainer.attempt.failure import describe_failure, is_our_fault


def fail_here() -> None:
    raise ValueError("bad shape")


def test_a_fault_of_the_author_names_the_authors_line() -> None:
    with pytest.raises(ValueError, match="bad shape") as caught:
        fail_here()
    category, text = describe_failure(caught.value, phase=Category.MODEL_LOAD)
    assert category == Category.MODEL_LOAD
    assert text.startswith("ValueError: bad shape (at ")
    assert "test_failure.py:" in text
    assert text.endswith("in fail_here)")


def test_our_own_errors_keep_their_category_and_words() -> None:
    assert describe_failure(AuthError("no token"), phase=Category.TRAIN_STEP) == (Category.AUTH, "no token")
    assert describe_failure(SpecError("job.json", ["a", "b"]))[1] == "job.json: 2 faults\n  - a\n  - b"


def test_notes_are_part_of_the_text() -> None:
    cause = AuthError("no token")
    cause.add_note("and this")
    assert describe_failure(cause)[1] == "no token\nand this"


def test_a_bug_of_the_worker_is_not_blamed_on_the_author() -> None:
    cause = AttributeError("our own doing")
    frames = [FakeFrame(f"{failure._OURS}/trainer/loop.py", 1, "run")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failure.traceback, "extract_tb", lambda _: frames)
        assert is_our_fault(cause)
        assert "please report it" in describe_failure(cause)[1]
        frames.insert(0, FakeFrame("/home/ada/trainer.py", 7, "setup"))
        assert not is_our_fault(cause), "the author called us wrongly"
        assert "/home/ada/trainer.py:7, in setup" in describe_failure(cause)[1]


@dataclass
class FakeFrame:
    filename: str
    lineno: int
    name: str
