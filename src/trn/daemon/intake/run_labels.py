"""Name, notes and tags that are changed after a submit: what may be set. Pure.

Lists and watches carry them with every run, so they are small.
"""

from collections.abc import Iterator, Mapping, Sequence

from gen_worker.errors import Fault
from trn.core.errors import InvalidRequestError
from trn.core.runs import RunRecord

MAX_NAME = 256  # characters
MAX_NOTES_BYTES = 8192
MAX_TAGS = 64
MAX_TAG_NAME = 128  # characters
MAX_TAG_VALUE = 1024


def check_labels(
    run: RunRecord,
    *,
    name: str | None,
    notes: str | None,
    tags: Mapping[str, str],
    removed_tags: Sequence[str],
) -> None:
    """InvalidRequestError with every fault of the change, where it has any."""
    if name is None and notes is None and not tags and not removed_tags:
        raise InvalidRequestError("nothing to change: give name, notes, tags or removed_tags")
    faults = [*_find_notes_faults(notes or ""), *_find_tag_faults(tags, removed_tags)]
    if name is not None and (len(name) > MAX_NAME or not name.isprintable()):
        faults.append(
            Fault.of_value("name", f"{name[:60]!r}", f"at most {MAX_NAME} printable characters in one line")
        )
    num_after = len({*run.tags, *tags} - set(removed_tags))
    if num_after > max(MAX_TAGS, len(run.tags)):  # a submit may have given more
        message = f"the run would have {num_after} tags, at most {MAX_TAGS} are kept: remove some"
        faults.append(Fault(message, path="tags", kind="value"))
    if faults:
        raise InvalidRequestError("name, notes or tags are not valid", faults)


def _find_notes_faults(notes: str) -> Iterator[Fault]:
    try:
        size_bytes = len(notes.encode())
    except UnicodeEncodeError as fault:
        message = f"character {fault.start} is not valid Unicode: remove it"
        yield Fault(message, path="notes", kind="value")
        return
    if size_bytes > MAX_NOTES_BYTES:
        message = f"has {size_bytes} bytes, at most {MAX_NOTES_BYTES} are kept: put longer text into a file"
        yield Fault(message, path="notes", kind="value")
    if "\0" in notes:
        yield Fault("holds a NUL character: remove it", path="notes", kind="value")


def _find_tag_faults(tags: Mapping[str, str], removed_tags: Sequence[str]) -> Iterator[Fault]:
    for name, value in tags.items():
        if not 0 < len(name) <= MAX_TAG_NAME or "=" in name or not name.isprintable():
            expected = f"1 to {MAX_TAG_NAME} printable characters without `=`"
            yield Fault.of_value("tags", f"the name {name[:60]!r}", expected)
        elif len(value) > MAX_TAG_VALUE or not value.isprintable():
            expected = f"at most {MAX_TAG_VALUE} printable characters"
            yield Fault.of_value(f"tags.{name}", f"{value[:60]!r}", expected)
    for name in removed_tags:
        if name in tags:
            yield Fault("is set and removed: give it once", path=f"tags.{name[:60]}", kind="rule")
