"""One save: gathers the state of all processes, passes it to the artifact writer, and reports it once it is durable.

Every process takes part, since a state may be sharded; the main one writes. RNG states are restored after the author's
hooks: a save must not change the run.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gen_worker.contract.screen_repr import name_some
from gen_worker.errors import CheckpointError, InputError, TrainStepError
from gen_worker.trainer.artifacts import CheckpointContent, SavedCheckpoint
from gen_worker.trainer.author.identity import DATA_READ
from gen_worker.trainer.feed.content import CONTENT, merge_content
from gen_worker.trainer.model_runtime import capture_rng, restore_rng
from gen_worker.trainer.processes.group import Processes
from gen_worker.trainer.steps.held_out import HELD_OUT, contents_of, describe_held_out
from gen_worker.trainer.steps.loop_parts import LoopParts


def _split_content(
    cursors: Sequence[Mapping[str, Any]],
) -> tuple[list[Mapping[str, Any]], dict[str, str] | None]:
    """(the cursors, checksums of the data that any process has read)."""
    places = [{name: cursor[name] for name in cursor if name != CONTENT} for cursor in cursors]
    return list(places), merge_content([cursor[CONTENT] for cursor in cursors if CONTENT in cursor])


def _cursor_of_all(cursors: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """One cursor for all processes; with `ranks` where they differ."""
    first = cursors[0]
    is_shared = all(_is_same(cursor, first) for cursor in cursors[1:])
    return first if is_shared else {**first, "ranks": [dict(cursor) for cursor in cursors]}


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if hasattr(one, "shape") and hasattr(other, "shape"):
        return bool(one.shape == other.shape and (one == other).all())
    return type(one) is type(other) and bool(one == other)


def own_cursor(cursor: Mapping[str, Any], processes: Processes) -> Mapping[str, Any]:
    """The cursor of this process; InputError where the number of processes must not change."""
    ranks: Any = cursor.get("ranks")
    if ranks is None:
        return cursor
    if len(ranks) != processes.world_size:
        raise InputError(
            f"the checkpoint has a data position for each of {len(ranks)} processes, and there are now"
            f" {processes.world_size}: resume with {len(ranks)} processes"
        )
    return ranks[processes.rank]  # type: ignore[no-any-return]


@dataclass(slots=True)
class StateSaver:
    """Of one attempt."""

    parts: LoopParts
    _is_compared: bool = field(default=False, init=False)

    @property
    def is_saving(self) -> bool:
        return self.parts.artifacts is not None and self.parts.artifacts.is_saving

    def save(
        self,
        model_state: Any,
        *,
        step: int,
        epoch: int,
        final: bool,
        cursor: Mapping[str, Any],
        loop: Mapping[str, Any],
        metric: tuple[str, float, str] | None,
    ) -> None:
        """Copy the state; the writer does the rest. TrainStepError where it cannot be saved."""
        with contextlib.suppress(OSError):  # the save itself reports a full disk
            self.parts.reporter.flush()  # events come before the checkpoint: a resume does not repeat them
        rng = capture_rng()
        payload: Mapping[str, Any] = self.parts.trainer.state_dict(model_state)
        if not isinstance(payload, Mapping):
            raise TrainStepError(f"state_dict returned {type(payload).__name__}, expected a dict")
        if self.parts.processes.world_size > 1 and not self._is_compared:
            if self.parts.processes.rank == 0 and not self.parts.processes.has_loaded:
                self._warn_of_shards(payload)
            self._compare(payload)
        payload = self.parts.processes.whole(payload)
        all_rng = self.parts.processes.gather(rng)
        gathered = self.parts.processes.gather((cursor, contents_of(self.parts.evaluators)))
        cursors, content_read = _split_content([cursor for cursor, _ in gathered])
        cursor = _cursor_of_all(cursors)
        if self.parts.artifacts is None:
            restore_rng(rng)
            return
        content = CheckpointContent(
            step=step,
            epoch=epoch,
            final=final,
            state=payload,
            loop=loop,
            cursor=cursor,
            rng=rng if len(all_rng) == 1 else {**rng, "ranks": list(all_rng)},
            identity={
                **self.parts.restorer.identity,
                DATA_READ: content_read,
                HELD_OUT: describe_held_out(self.parts.evaluators, [contents for _, contents in gathered]),
            },
            metric=metric,
        )
        try:
            self.parts.artifacts.begin_checkpoint(
                content, trainer=self.parts.trainer, state=model_state, ctx=self.parts.ctx
            )
        except CheckpointError as fault:
            raise TrainStepError(f"the checkpoint of step {step} could not be saved: {fault}") from fault
        restore_rng(rng)

    def _warn_of_shards(self, payload: Mapping[str, Any]) -> None:
        """Once a run: a class that saves shards may have a `load_state_dict` that takes only shards."""
        from gen_worker.trainer.processes.distributed import sharded_places

        if getattr(self.parts.trainer, "shards_when_loading", False):
            return
        places = sharded_places(payload)
        if places:
            self.parts.reporter.log(
                f"state_dict returned tensors that are sharded over {self.parts.processes.world_size} processes:"
                f" {name_some(places)}. They are saved whole. A plain load_state_dict of a module or optimizer cannot shard"
                " them again: a resume with several processes will fail, with one process it works. Use"
                " set_model_state_dict and set_optimizer_state_dict of torch.distributed.checkpoint.state_dict (see"
                " docs/distributed.md), and set `shards_when_loading = True` in the class",
                level="warning",
            )

    def _compare(self, payload: Mapping[str, Any]) -> None:
        """Once an attempt: warn if the processes train different models, of which only one is saved."""
        from gen_worker.trainer.processes.distributed import digest_tensors

        self._is_compared = True
        first, *others = self.parts.processes.gather(digest_tensors(payload))
        # A part that only the main process has is allowed: torch's own functions do that.
        differing = [
            name for name in first if any(name in other and other[name] != first[name] for other in others)
        ]
        if differing:
            self.parts.reporter.log(
                f"the processes have different values in {name_some(differing)}; those of process 0 are saved."
                " If these are weights, the trainer class does not exchange gradients: wrap its module with"
                " gen_worker.trainer.distribute_module",
                level="warning",
            )

    def poll(self) -> list[SavedCheckpoint]:
        """Report what became durable. Never waits."""
        return [] if self.parts.artifacts is None else self._report(self.parts.artifacts.poll)

    def wait(self) -> list[SavedCheckpoint]:
        """Wait for the save in progress until it is durable and verified, and report it."""
        return [] if self.parts.artifacts is None else self._report(self.parts.artifacts.wait)

    def _report(self, ask: Callable[[], list[SavedCheckpoint]]) -> list[SavedCheckpoint]:
        try:
            saved = ask()
        except CheckpointError as fault:  # a failure of training, not of an input
            raise TrainStepError(str(fault)) from fault
        for checkpoint in saved:
            self.parts.reporter.checkpoint(
                path=checkpoint.path,
                step=checkpoint.step,
                then=self._upload(checkpoint),
                final=checkpoint.final,
                verified=checkpoint.verified,
                size_bytes=checkpoint.size_bytes,
                duration_s=round(checkpoint.duration_s, 3),
            )
            if not checkpoint.verified:
                is_taken = self.parts.ctx.job.resume_non_finite
                resumes = "uses it: resume_non_finite is true" if is_taken else "takes an older one"
                self.parts.reporter.log(
                    f"the checkpoint of step {checkpoint.step} has {checkpoint.reason}. It is kept; a resume {resumes}",
                    level="warning",
                )
        return saved

    def _upload(self, checkpoint: SavedCheckpoint) -> Callable[[], None] | None:
        uploader = self.parts.uploader
        if uploader is None:
            return None
        return lambda: uploader.upload_checkpoint_files(
            local_path=checkpoint.path,
            meta_path=checkpoint.meta_path,
            step=checkpoint.step,
            final=checkpoint.final,
            digest=checkpoint.files[0].hash if checkpoint.files else None,
            author_files=[entry.name for entry in checkpoint.files[1:]],
        )
