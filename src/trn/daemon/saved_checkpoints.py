"""The checkpoints of a run for a resume: chosen as its worker chooses, by `gen_worker.trainer.checkpoints.choice`."""

from pathlib import Path

import msgspec

from gen_worker.errors import CheckpointError
from gen_worker.trainer.checkpoints.choice import (
    CheckpointInfo,
    check_sizes,
    choose_named,
    choose_newest,
    find_committed,
    verify_files,
)
from trn.core.errors import InvalidRequestError


class SavedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One that is whole. `passed_over`: newer ones that are not taken, and why. `non_finite`: what is NaN or infinite."""

    path: Path
    step: int
    run_id: str
    passed_over: tuple[str, ...] = ()
    non_finite: str = ""


def read_checkpoint(path: Path, *, is_forced: bool = False) -> SavedCheckpoint:
    """That one, every byte verified; a plain `{"state": …}` document is one, too.

    InvalidRequestError with what is wrong with it; NaN and infinity are wrong unless it is forced. Blocks: reads its
    files.
    """
    try:
        found = choose_named(
            path, verify_files, is_non_finite_taken=is_forced, how_to_force="take it with --force"
        )
    except CheckpointError as fault:
        raise InvalidRequestError("the checkpoint cannot be resumed", [f"{path}: {fault}"]) from fault
    if isinstance(found, dict):
        return SavedCheckpoint(path=path, step=0, run_id="")
    return _as_saved(found)


def find_next_start(folder: Path) -> int:
    """The step that the next attempt would resume from; 0 where nothing can be. Reads no data files, but blocks."""
    choice = choose_newest(folder, check_sizes)
    return 0 if choice.taken is None else choice.taken.step


def newest_checkpoint(folder: Path, *, is_forced: bool = False) -> SavedCheckpoint | None:
    """The newest that a resume takes; None where none was ever saved. InvalidRequestError where none can be taken.

    Blocks.
    """
    choice = choose_newest(folder, verify_files, is_non_finite_taken=is_forced)
    passed_over = tuple(map(str, choice.passed_over))
    if choice.taken is not None:
        return msgspec.structs.replace(_as_saved(choice.taken), passed_over=passed_over)
    if find_committed(folder):
        raise InvalidRequestError(
            f"no checkpoint in {folder} can be resumed: name another with --checkpoint, take one that is not finite"
            " with --force, or submit the job anew",
            list(passed_over),
        )
    return None


def _as_saved(info: CheckpointInfo) -> SavedCheckpoint:
    return SavedCheckpoint(
        path=info.meta_path,
        step=info.step,
        run_id=info.meta.run_id,
        non_finite="" if info.verified else info.reason,
    )
