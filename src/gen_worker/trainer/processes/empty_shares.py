"""Empty shares: a batch with fewer rows than processes leaves some process without rows.

Its hooks are still called, because the others wait in a collective. A mean over no rows is NaN, and a batch norm may
fail. The run is warned before the first step, and a failure over an empty share says so.
"""

import math
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gen_worker.trainer.attempt.failure import add_note
from gen_worker.trainer.callbacks.state_copy import nonfinite_names
from gen_worker.trainer.compute.repro import to_float_scalar
from gen_worker.trainer.contracts import StepContext, StepResult, TrainerPlugin
from gen_worker.trainer.processes.group import Processes
from gen_worker.trainer.steps.batch_source import BatchSource
from gen_worker.trainer.steps.evaluation import HOOK_BY_KIND, count_rows, modules_of
from gen_worker.trainer.steps.parts import LoopReporter

if TYPE_CHECKING:
    from gen_worker.trainer.loop import TrainingLoop

REMEDIES = (
    "set dataset.drop_last: true, or let the loss be a sum divided by global_rows(raw_batch, ctx), as in"
    " docs/distributed.md"
)


def find_empty_shares(source: BatchSource, world_size: int) -> int | None:
    """The rows of the last batch of an epoch, if they are fewer than the processes."""
    rows = None if world_size == 1 else rows_of_last_batch(source)
    return rows if rows is not None and rows < world_size else None


def empty_share_warnings(loop: "TrainingLoop") -> Iterator[str]:
    """Warnings before the first step; none where the class sets `handles_empty_shares = True`."""
    if getattr(loop.parts.trainer, "handles_empty_shares", False):
        return
    world_size, start, end = loop.parts.ctx.world_size, loop.start, loop.end_step()
    rows = find_empty_shares(loop.parts.source, world_size)
    per_epoch = loop.parts.source.batches_per_epoch or 0
    if rows is not None and (end is None or start.batch + end - start.step >= per_epoch):
        yield (
            f"the last batch of an epoch has {_rows(rows)} for {world_size} processes, so some process gets a share"
            " without rows. There a mean is NaN, a batch norm may fail, and the gradients of the other processes are"
            f" scaled down: {REMEDIES}. A class that handles this sets handles_empty_shares = True"
        )
    for evaluator in (loop.parts.validation, loop.parts.test):
        rows = None if evaluator is None else find_empty_shares(evaluator.source, world_size)
        if evaluator is not None and rows is not None:
            hook = HOOK_BY_KIND[evaluator.kind]
            yield (
                f"the last batch of the {evaluator.kind} data has {_rows(rows)} for {world_size} processes, so"
                f" {hook} is called with a share without rows in some process. Its result there is ignored."
                f" If it fails there, set {evaluator.kind}.dataset.drop_last: true"
            )


class EmptyShareWatch:
    """Wraps the two hooks of a step, where the training data can leave a process without rows.

    An exception over an empty share says so. A loss that became NaN there is reported once: as a warning if the weights
    are not finite after it, else as a note. After a short batch, all processes exchange what they found.
    """

    def __init__(self, trainer: TrainerPlugin, processes: Processes, reporter: LoopReporter) -> None:
        self._trainer = trainer
        self._processes = processes
        self._reporter = reporter
        self._raw_batch: Any = None
        self._is_warned = self._is_noted = False

    def prepare_batch(self, raw_batch: Any, state: Any, ctx: StepContext) -> Any:
        self._raw_batch = raw_batch
        try:
            return self._trainer.prepare_batch(raw_batch, state, ctx)
        except Exception as cause:
            note_empty_share(cause, raw_batch, ctx)
            raise

    def train_step(self, prepared_batch: Any, state: Any, ctx: StepContext) -> StepResult:
        try:
            result = self._trainer.train_step(prepared_batch, state, ctx)
        except Exception as cause:
            note_empty_share(cause, self._raw_batch, ctx)
            raise
        if not self._is_warned and count_rows(self._raw_batch) <= 1:
            rows = _global_rows(self._raw_batch, ctx)
            if rows is not None and rows < ctx.world_size:
                self._look(result, state, ctx, rows)
        return result

    def _look(self, result: StepResult, state: Any, ctx: StepContext, rows: int) -> None:
        is_nan = count_rows(self._raw_batch) == 0 and _has_nan(result)
        ranks = [rank for rank, found in enumerate(self._processes.gather(is_nan)) if found]
        if not ranks:
            return
        message = (
            f"the loss of process {', '.join(map(str, ranks))} became NaN in step {ctx.step + 1}: its share of that"
            f" batch has no rows ({_rows(rows)} for {ctx.world_size} processes)."
        )
        self._is_warned = self._processes.any_of(not _are_weights_finite(self._trainer, state))
        if self._is_warned:
            self._reporter.log(f"{message} The weights are not finite after it: {REMEDIES}", level="warning")
        elif not self._is_noted and not getattr(self._trainer, "handles_empty_shares", False):
            self._is_noted = True
            self._reporter.log(f"{message} It is left out of the mean over the processes", level="info")


def _has_nan(result: Any) -> bool:
    for value in (getattr(result, "metrics", None) or {}).values():
        try:
            if math.isnan(to_float_scalar(value)):
                return True
        except (TypeError, ValueError):
            continue  # the loop reports it
    return False


def _are_weights_finite(trainer: TrainerPlugin, state: Any) -> bool:
    """Parameters, gradients and buffers of the modules that the trainer class has."""
    torch = sys.modules.get("torch")
    modules = [] if torch is None else modules_of(torch, (trainer, state))
    weights = [weight for module in modules for weight in module.parameters()]
    buffers = [buffer for module in modules for buffer in module.buffers()]
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    return not nonfinite_names([*weights, *gradients, *buffers])


def rows_of_last_batch(source: BatchSource) -> int | None:
    """Over all processes; None where it is unknown."""
    per_epoch = source.batches_per_epoch
    if per_epoch is None:
        return None
    before, after = source.rows_before(epoch=0, batch=per_epoch - 1), source.rows_before(epoch=1, batch=0)
    return None if before is None or after is None else after - before


def share_in_words(raw_batch: Any, ctx: StepContext) -> str | None:
    """A message that this process's share of a batch is empty; None where it has rows."""
    if ctx.world_size == 1 or count_rows(raw_batch) > 0:
        return None
    rows = _global_rows(raw_batch, ctx)
    of = "" if rows is None else f" ({_rows(rows)} for {ctx.world_size} processes)"
    return f"the share of process {ctx.rank} of this batch has no rows{of}: {REMEDIES}"


def short_batch_in_words(raw_batch: Any, ctx: StepContext) -> str | None:
    """A message that some process's share of a batch is empty; None where all have rows."""
    rows = None if ctx.world_size == 1 else _global_rows(raw_batch, ctx)
    if rows is None or rows >= ctx.world_size:
        return share_in_words(raw_batch, ctx)
    return f"this batch has {_rows(rows)} for {ctx.world_size} processes, so a share has no rows: {REMEDIES}"


def note_empty_share(cause: BaseException, raw_batch: Any, ctx: StepContext) -> None:
    """Add a note to an exception of a hook that got no rows."""
    words = share_in_words(raw_batch, ctx)
    if words is not None:
        add_note(cause, words)


def _global_rows(raw_batch: Any, ctx: StepContext) -> int | None:
    from gen_worker.trainer.processes.distributed import global_rows
    from gen_worker.trainer.sources.base import rows_over_all

    return global_rows(raw_batch, ctx) if hasattr(raw_batch, "schema") else rows_over_all(raw_batch)


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"
