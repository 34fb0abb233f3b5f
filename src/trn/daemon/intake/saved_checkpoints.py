"""The checkpoints of a run for a resume: chosen as its worker chooses, by `gen_worker.contract.checkpoints.choice`.

A call must answer soon, so only what is quick is checked here: the digest of the meta, whose it is, whether its state is
finite, and the sizes of its files. The worker verifies every byte before its first step.
"""

from pathlib import Path

import msgspec

from gen_worker.contract.checkpoints.choice import (
    CheckpointInfo,
    check_quickly,
    choose_named,
    choose_newest,
    find_committed,
)
from gen_worker.errors import CheckpointError
from trn.core.errors import InvalidRequestError


class SavedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One that looks whole. `passed_over`: newer ones that are not taken, and why. `non_finite`: what is NaN or infinite.

    `is_verifiable`: its meta has a digest. `is_chosen`: the daemon chose it, so its worker may take an older one instead.
    """

    path: Path
    step: int
    run_id: str
    nonce: str = ""
    passed_over: tuple[str, ...] = ()
    non_finite: str = ""
    is_verifiable: bool = True
    is_chosen: bool = False


def read_checkpoint(path: Path, *, is_forced: bool = False) -> SavedCheckpoint:
    """That one; a plain `{"state": …}` document is one, too.

    InvalidRequestError with what is wrong with it; NaN and infinity are wrong unless it is forced. Blocks: reads its
    meta.
    """
    try:
        found = choose_named(
            path, check_quickly, is_non_finite_taken=is_forced, how_to_force="take it with --force"
        )
    except CheckpointError as fault:
        raise InvalidRequestError("the checkpoint cannot be resumed", [str(fault)]) from fault
    if isinstance(found, dict):
        return SavedCheckpoint(path=path, step=0, run_id="")
    return _as_saved(found)


def find_next_start(folder: Path, run_id: str, nonce: str = "") -> int:
    """The step that the next attempt would resume from; 0 where nothing can be. Reads no data files, but blocks."""
    choice = choose_newest(folder, check_quickly, of_run=run_id, nonce=nonce)
    return 0 if choice.taken is None else choice.taken.step


def newest_checkpoint(
    folder: Path, run_id: str, nonce: str = "", *, is_forced: bool = False
) -> SavedCheckpoint | None:
    """The newest that a resume takes; None where none was ever saved. InvalidRequestError where none can be taken.

    Blocks.
    """
    choice = choose_newest(folder, check_quickly, is_non_finite_taken=is_forced, of_run=run_id, nonce=nonce)
    passed_over = tuple(map(str, choice.passed_over))
    if choice.taken is not None:
        return msgspec.structs.replace(_as_saved(choice.taken), passed_over=passed_over, is_chosen=True)
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
        nonce=info.meta.nonce,
        non_finite="" if info.verified else info.reason,
        is_verifiable=bool(info.meta.digest),
    )
