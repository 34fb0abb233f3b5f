"""An exception in the words of a `failed` event: its category, and one text a person can read."""

import traceback
from pathlib import Path

from gen_worker.errors import Category, WorkerError
from gen_worker.frozen_imports import name_originals

_OURS = str(Path(__file__).resolve().parent.parent)
_PYTHONS = str(Path(traceback.__file__).resolve().parent)


def describe_failure(cause: BaseException, *, phase: Category = Category.TRAIN_STEP) -> tuple[Category, str]:
    """(category, text). What is not one of our errors came out of the author's code in `phase`; it is named with its place."""
    if isinstance(cause, WorkerError):
        category, text = cause.category, str(cause)
    elif isinstance(cause, KeyboardInterrupt):
        category, text = Category.CANCELLED, "interrupted"
    else:
        category = phase
        text = f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
        place = author_place(cause)
        if place is not None:
            text = f"{text} (at {place})"
        if is_our_fault(cause):
            text = f"a fault of the worker itself, please report it: {text}"
    return category, name_originals("\n".join([text, *getattr(cause, "__notes__", ())]))


def is_our_fault(cause: BaseException) -> bool:
    """True where an error that is not one of ours was raised by our own code on its own: a bug of the worker."""
    if isinstance(cause, WorkerError | KeyboardInterrupt | OSError) or author_place(cause) is not None:
        return False
    frames = traceback.extract_tb(cause.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(_OURS)


def author_place(cause: BaseException) -> str | None:
    """`file:line` of the innermost frame that is the author's: not ours, not Python's, not an installed package's."""
    for frame in reversed(traceback.extract_tb(cause.__traceback__)):
        path = frame.filename
        if path.startswith("/") and not path.startswith((_OURS, _PYTHONS)) and "site-packages" not in path:
            return f"{frame.filename}:{frame.lineno}, in {frame.name}"
    return None
