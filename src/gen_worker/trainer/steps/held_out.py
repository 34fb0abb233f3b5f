"""The identity of validation and test data in checkpoints. A resume with other data is allowed, with a warning."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gen_worker.trainer.feed.content import CONTENT, Note, merge_content

if TYPE_CHECKING:
    from gen_worker.trainer.steps.evaluation import Evaluator

HELD_OUT = "held_out"  # its name in the identity of a checkpoint
MAX_NAMED = 3


def contents_of(evaluators: Sequence["Evaluator"]) -> dict[str, Any]:
    """Checksums of what this process has read, by kind of data. Only of parquet data."""
    feeds = {evaluator.kind: evaluator.source for evaluator in evaluators}
    return {kind: feed.state(epoch=0, batch=0)[CONTENT] for kind, feed in feeds.items() if _has_content(feed)}


def describe_held_out(
    evaluators: Sequence["Evaluator"], contents: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """For a checkpoint; `contents` of all processes."""
    return {
        evaluator.kind: {
            "manifest": evaluator.source.manifest.to_builtins(),  # type: ignore[attr-defined]
            CONTENT: merge_content([content[evaluator.kind] for content in contents]),
        }
        for evaluator in evaluators
        if evaluator.kind in contents[0]
    }


def compare_held_out(evaluators: Sequence["Evaluator"], identity: Mapping[str, Any]) -> list[Note]:
    """(level, text) about changed data. Reads what may have changed. Blocks."""
    notes: list[Note] = []
    for evaluator in evaluators:
        saved = (identity.get(HELD_OUT) or {}).get(evaluator.kind)
        if saved is None or not _has_content(evaluator.source):
            continue
        compared = evaluator.source.compare(saved["manifest"], saved[CONTENT])  # type: ignore[attr-defined]
        if compared.changes:
            lines = [*compared.changes[:MAX_NAMED]]
            if len(compared.changes) > MAX_NAMED:
                lines.append(f"and {len(compared.changes) - MAX_NAMED} more")
            head = f"the {evaluator.kind} data changed since the checkpoint: its metrics cannot be compared with earlier ones"
            notes.append(("warning", "\n".join([head, *(f"  - {line}" for line in lines)])))
        else:
            notes += [(level, f"{evaluator.kind}: {text}") for level, text in compared.notes]
    return notes


def _has_content(source: Any) -> bool:
    return hasattr(source, "compare") and hasattr(source, "manifest")
