"""Checks on a resume that the data is unchanged: stamps first, then checksums of rewritten files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gen_worker.trainer.feed.content import ContentChangedError, Note
from gen_worker.trainer.feed.groups import GroupSource
from gen_worker.trainer.feed.manifest import Manifest

# Read before the first step, over all rewritten files. The rest is compared when it is read.
CHECK_BYTES = 256 << 20
MAX_NAMED = 10


@dataclass(slots=True, kw_only=True)
class ComparedContent:
    """`changes` prevent the resume; `notes` are logged."""

    changes: list[str] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)


def compare_content(
    source: GroupSource,
    manifest: Manifest,
    content: Mapping[str, Any],
    saved: Manifest | None,
    *,
    rank: int = 0,
    world_size: int = 1,
) -> ComparedContent:
    """Use the checksums of a checkpoint, and compare them for files that were written, copied or replaced.

    Each process compares its part.
    """
    differing = source.checksums.expect(content)
    if differing is None:
        words = "the checkpoint has checksums of another form of this data: the rows are not compared"
        return ComparedContent(notes=[("info", words)])
    rewritten = manifest.rewritten_since(saved)
    if not rewritten and not differing:
        return ComparedContent()
    groups = _groups_of(manifest)
    all_groups = [group for number in rewritten for group in groups[number]]
    known = [group for group in all_groups if source.checksums.known(group) is not None]
    chosen = _choose(known, _bytes_of_groups(manifest), CHECK_BYTES)
    changes: list[str] = []
    for group in sorted({*differing, *chosen[rank::world_size]}):
        try:
            source.check(group)
        except ContentChangedError as fault:
            changes.append(fault.change)
    more = [f"and {len(changes) - MAX_NAMED} more"] if len(changes) > MAX_NAMED else []
    return ComparedContent(
        changes=changes[:MAX_NAMED] + more,
        notes=[_note(len(rewritten), len(manifest.files), len(all_groups), len(known), len(chosen))],
    )


def _note(num_rewritten: int, num_files: int, num_groups: int, num_known: int, num_compared: int) -> Note:
    text = (
        f"{num_rewritten} of {num_files} data files were written, copied or moved since the checkpoint:"
        f" {num_compared} of their {num_groups} row groups are unchanged"
    )
    if num_known > num_compared:
        text += f", {num_known - num_compared} are compared when they are read"
    if num_groups > num_known:
        text += f", {num_groups - num_known} were not read before and cannot be compared"
    return "warning" if num_groups > num_known else "info", text


def _groups_of(manifest: Manifest) -> list[range]:
    """The numbers of each file's row groups."""
    ranges, start = [], 0
    for file in manifest.files:
        ranges.append(range(start, start + len(file.group_rows)))
        start += len(file.group_rows)
    return ranges


def _bytes_of_groups(manifest: Manifest) -> list[int]:
    """About the bytes that are read to compare each row group."""
    return [
        file.size_bytes * rows // max(file.num_rows, 1) for file in manifest.files for rows in file.group_rows
    ]


def _choose(groups: Sequence[int], size_bytes: Sequence[int], limit: int) -> list[int]:
    """All of them, or a subset within the limit, evenly spread; at least one."""
    total = sum(size_bytes[group] for group in groups)
    if total <= limit:
        return list(groups)
    num_chosen = max(len(groups) * limit // total, 1)
    return [groups[at * len(groups) // num_chosen] for at in range(num_chosen)]
