"""Where an attempt starts: the run's newest verified checkpoint, a given one, or step 0."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from gen_worker.contract.checkpoints.choice import PassedOver, find_committed
from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.errors import InputError, StartupError
from gen_worker.trainer.author.identity import DATA_READ
from gen_worker.trainer.checkpoints.store import Checkpoint, CheckpointStore
from gen_worker.trainer.feed.content import CONTENT
from gen_worker.trainer.processes.group import Processes
from gen_worker.trainer.steps.batch_source import BatchSource, FirstBatches
from gen_worker.trainer.steps.saving import own_cursor
from gen_worker.trainer.steps.schedule import Start


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """The checkpoint (None: start at step 0), and those that were passed over."""

    checkpoint: Checkpoint | None = None
    passed_over: tuple[PassedOver, ...] = ()


def choose_resume_point(
    job: TrainingJobSpec, checkpoints_dir: Path, given: Path | None, *, nonce: str = ""
) -> ResumePoint:
    """The run's own checkpoints come before the `given` one. Those of other runs or submissions are passed over."""
    store = CheckpointStore(checkpoints_dir)
    # An unreadable meta file still marks a committed checkpoint; data without one is none.
    existing = find_committed(checkpoints_dir)
    if existing and not job.resume_from_latest:
        raise StartupError(
            f"{checkpoints_dir} already holds checkpoints of this run ({', '.join(existing[-3:])}), and"
            " resume_from_latest is false: set it to true to resume, or use another folder for a new run"
        )
    choice = store.choose(is_non_finite_taken=job.resume_non_finite, of_run=job.run_id, nonce=nonce)
    if choice.taken is not None:
        return ResumePoint(checkpoint=choice.taken, passed_over=choice.passed_over)
    if existing:
        reasons = "\n".join(f"  - {item}" for item in choice.passed_over)
        raise InputError(
            f"none of the {len(existing)} checkpoints in {checkpoints_dir} can be resumed:\n{reasons}\n"
            "nothing was deleted; move them away to start from step 0, or resume from a copy with resume_checkpoint_path"
        )
    if given is not None and job.resume_older:
        older = store.choose_named_or_older(given, is_non_finite_taken=job.resume_non_finite)
        if older.taken is None:
            reasons = "\n".join(f"  - {item}" for item in older.passed_over)
            raise InputError(f"neither {given} nor an older checkpoint beside it can be resumed:\n{reasons}")
        return ResumePoint(checkpoint=older.taken, passed_over=(*choice.passed_over, *older.passed_over))
    if given is not None:
        named = store.choose_named(given, is_non_finite_taken=job.resume_non_finite)
        return ResumePoint(checkpoint=named, passed_over=choice.passed_over)
    return ResumePoint(passed_over=choice.passed_over)


def start_of(checkpoint: Checkpoint | None, source: BatchSource, processes: Processes) -> Start:
    """The step and the position in the data; InputError where the position does not fit the data."""
    if checkpoint is None:
        return Start()
    if "overfit_epoch" in (checkpoint.cursor or {}) and not isinstance(source, FirstBatches):
        raise InputError(
            f"{checkpoint.path} was saved with overfit_batches, and the job has none now: use another folder"
        )
    if checkpoint.cursor is None:
        return Start(step=checkpoint.step, epoch=checkpoint.epoch)
    manifest = checkpoint.identity.get("dataset_manifest")
    cursor, content = own_cursor(checkpoint.cursor, processes), checkpoint.identity.get(DATA_READ)
    epoch, batch = source.position(
        cursor if content is None else {**cursor, CONTENT: content},
        manifest=None if manifest is None else msgspec.json.encode(manifest),
    )
    return Start(
        step=checkpoint.step,
        epoch=epoch,
        batch=batch,
        is_sample_due=bool(checkpoint.loop.get("is_sample_due", False)),
        is_work_due=bool(checkpoint.loop.get("is_work_due", False)),
        work=_mapping_or_none(checkpoint.loop.get("work")),
    )


def _mapping_or_none(value: object) -> Mapping[str, Any] | None:
    return value if isinstance(value, Mapping) else None
