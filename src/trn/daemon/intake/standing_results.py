"""Does the result of an equal run still stand? What no digest of a submit can know is looked up on the disk.

- The modules that the run imported from outside its frozen code: they are known only once it has run.
- The files that its hyperparams name: the class may write to them, so only a change after its end counts. Folders do not:
  runs often share one to write to.
- Its final checkpoint: whoever deletes a run's files wants it trained again.
"""

from collections.abc import Iterable, Mapping

from gen_worker.trainer.author.code_identity import find_changed_modules
from gen_worker.trainer.datasets.job_content import find_changed_hyperparams
from trn.core.home import Home
from trn.core.runs import RunRecord, RunState

FINAL_MARKER = "final.meta.json"
MAX_NAMED = 3


def find_stale(equals: Iterable[RunRecord], home: Home) -> dict[str, str]:
    """Of equal runs, the newest first, those before the first whose result stands: id -> why it does not. Blocks."""
    stale: dict[str, str] = {}
    for run in equals:
        why = find_why_stale(run, home)
        if not why:
            break
        stale[run.run_id] = why
    return stale


def find_why_stale(run: RunRecord, home: Home) -> str:
    """In words; empty where its result stands. Blocks."""
    folder = home.run(run.run_id)
    changed = find_changed_modules(folder.root)
    if changed:
        return f"code outside its snapshot has changed since: {_listed(changed)}"
    if run.state is not RunState.COMPLETED:
        return ""
    ended_ms = run.ended_ms or run.updated_ms
    changed = find_changed_hyperparams(run.config, run.base_dir, ended_ms, is_file_meant=True)
    if changed:
        return f"files that its hyperparams name have changed since it ended: {_listed(changed)}"
    if not (folder.checkpoints / FINAL_MARKER).exists():
        return f"its final checkpoint is gone from {folder.checkpoints}"
    return ""


def say_trained_anew(stale: Mapping[str, str]) -> list[str]:
    """Why the newest of the equal runs does not answer."""
    return [f"trained anew: {run_id} is equal, but {why}" for run_id, why in list(stale.items())[:1]]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
