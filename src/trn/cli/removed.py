"""What `trn rm` and `trn prune` say of what they removed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gen_worker.contract.sizes import show_bytes
from trn.cli.output import Output
from trn.core.terminal_text import plain

if TYPE_CHECKING:
    from trn.proto.records import Freed


def report_freed(output: Output, freed: "Sequence[Freed]", *, is_dry_run: bool) -> int:
    """A line for each, then the sum; how many bytes."""
    for item in freed:
        output.record(
            {
                "event": "would_remove" if is_dry_run else "removed",
                "kind": item.kind,
                "name": item.name,
                "size_bytes": item.size_bytes,
            }
        )
        if item.kind == "gone":
            output.show(f"{plain(item.name)} was removed before")
        else:
            output.show(f"{item.kind:<10}  {show_bytes(item.size_bytes):>10}  {plain(item.name)}")
    size_bytes = sum(item.size_bytes for item in freed)
    verb = "would be freed; nothing was removed" if is_dry_run else "freed"
    output.show(f"{show_bytes(size_bytes)} {verb}")
    return size_bytes
