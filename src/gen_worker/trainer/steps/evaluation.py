"""A pass over validation or test data. A run is bit-identical with and without it.

Modules are in eval mode, gradients are off, RNG state and data cursor are restored. The data's reader stays open between
two passes and reads ahead into the next one.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

from gen_worker.errors import PluginError, TrainStepError
from gen_worker.trainer.attempt.state import MetricsRecord
from gen_worker.trainer.compute.repro import to_float_scalar
from gen_worker.trainer.contracts import StepContext, StepResult, TrainerPlugin
from gen_worker.trainer.model_runtime import capture_rng, restore_rng
from gen_worker.trainer.processes.group import OneProcess, Processes
from gen_worker.trainer.steps.batch_source import BatchSource

Kind = Literal["validation", "test"]
HOOK_BY_KIND: dict[Kind, str] = {"validation": "validate_step", "test": "test_step"}
NUM_UNREAD = 256  # batches whose values are read together
SMALL_BYTES = 1024
MAX_DEPTH = 6  # of nested holders in which modules are searched
PREFIX_BY_KIND: dict[Kind, str] = {"validation": "val/", "test": "test/"}


def require_hook(trainer: TrainerPlugin, kind: Kind) -> None:
    """PluginError where a trainer class has no hook for such data."""
    hook = HOOK_BY_KIND[kind]
    if getattr(trainer, hook, None) is None:
        raise PluginError(
            f"the job has {kind} data, but {type(trainer).__qualname__} has no `{hook}(self, batch, state, ctx)`: add"
            f" it, or leave `{kind}` out of the job"
        )


@dataclass(slots=True, kw_only=True)
class Evaluator:
    """Runs `validate_step` or `test_step` over a data source and averages what it returns over the rows."""

    kind: Kind
    source: BatchSource
    trainer: TrainerPlugin
    ctx: StepContext
    processes: Processes = field(default_factory=OneProcess)
    max_batches: int | None = None
    _iterator: Iterator[Any] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        require_hook(self.trainer, self.kind)

    def run(self, state: Any, *, may_leave: bool = True) -> MetricsRecord | None:
        """One pass; None where a stop request ended it (only with `may_leave`, see `_pass`).

        Raises what the author's hook raises.
        """
        started_s = time.monotonic()
        rng = capture_rng()
        try:
            with evaluation_mode(self.trainer, state):
                found = self._pass(state, may_leave=may_leave)
        except BaseException:
            self.close()  # the next pass must start at the beginning
            raise
        finally:
            restore_rng(rng)
        if found is None:
            self.close()
            return None
        metrics, total_rows = self._reduce(*found)
        return MetricsRecord(
            kind=self.kind,
            step=self.ctx.step,
            epoch=self.ctx.epoch,
            metrics=metrics,
            rows=total_rows,
            duration_s=time.monotonic() - started_s,
        )

    def close(self) -> None:
        """Stop reading ahead."""
        iterator, self._iterator = self._iterator, None
        close = getattr(iterator, "close", None)
        if close is not None:
            close()

    def _pass(self, state: Any, *, may_leave: bool) -> tuple[dict[str, float], int, Mapping[str, Any]] | None:
        trainer, ctx, stop = self.trainer, self.ctx, self.ctx.is_canceled
        hook: Callable[..., Any] = getattr(trainer, HOOK_BY_KIND[self.kind])
        begin, end = getattr(trainer, "begin_evaluation", None), getattr(trainer, "end_evaluation", None)
        if begin is not None:
            begin(self.kind, state, ctx)
        # Several processes meet at the end of the pass, and `end_evaluation` needs a whole pass: it may have to restore
        # the training weights.
        may_leave = may_leave and self.processes.world_size == 1 and end is None
        sums = RowSums()
        for raw_batch in self._batches():
            if may_leave and stop.reason is not None:
                return None
            try:
                found = hook(trainer.prepare_batch(raw_batch, state, ctx), state, ctx)
            except Exception as cause:
                from gen_worker.trainer.processes.empty_shares import note_empty_share

                note_empty_share(cause, raw_batch, ctx)
                raise
            rows = count_rows(raw_batch)
            if rows == 0:
                continue  # an empty share; the hook was called, since other processes may wait in it
            sums.add(self._values(found), rows)
        extra = {} if end is None else end(self.kind, state, ctx) or {}
        return sums.totals(), sums.num_rows, extra

    def _batches(self) -> Iterator[Any]:
        """The batches of one pass, from a reader that stays open."""
        limit = self.source.batches_per_epoch
        if self.max_batches is not None:
            limit = self.max_batches if limit is None else min(limit, self.max_batches)
        if self._iterator is not None:
            first = next(self._iterator, None)
            if first is not None:
                yield first
                yield from islice(self._iterator, None if limit is None else limit - 1)
                self._keep_only_whole_passes(limit)
                return
        self._iterator = self.source.batches(epoch=0, batch=0)
        yield from islice(self._iterator, limit)
        self._keep_only_whole_passes(limit)

    def _keep_only_whole_passes(self, limit: int | None) -> None:
        if limit is None or limit != self.source.batches_per_epoch:
            self.close()

    def _values(self, found: Any) -> Mapping[str, Any]:
        if isinstance(found, StepResult):
            found = found.metrics
        if not isinstance(found, Mapping):
            raise TrainStepError(
                f"{HOOK_BY_KIND[self.kind]} returned {type(found).__name__}, expected a dict of numbers:"
                " return {'loss': loss}"
            )
        return found

    def _reduce(
        self, sums: dict[str, float], rows: int, extra: Mapping[str, Any]
    ) -> tuple[dict[str, float], int]:
        shares = self.processes.gather((sums, rows))
        total_rows = sum(share_rows for _, share_rows in shares)
        totals: dict[str, float] = {}
        for share, _ in shares:
            for name, value in share.items():
                totals[name] = totals.get(name, 0.0) + value
        prefix = PREFIX_BY_KIND[self.kind]
        metrics = {prefix + name: value / max(total_rows, 1) for name, value in totals.items()}
        # From the main process: what follows must be the same in all processes.
        whole_pass = self.processes.from_main({name: _as_float(name, extra[name]) for name in extra})
        metrics |= {prefix + name: value for name, value in whole_pass.items()}
        return metrics, total_rows


class RowSums:
    """Sums of values times rows, by name, in double precision.

    Tensors of many batches are read together: each read waits for the device.
    """

    def __init__(self) -> None:
        self.num_rows = 0
        self._sums: dict[str, float] = {}
        self._unread: list[tuple[Mapping[str, Any], int]] = []

    def add(self, values: Mapping[str, Any], rows: int) -> None:
        self.num_rows += rows
        self._unread.append(({name: _own_memory(value) for name, value in values.items()}, rows))
        if len(self._unread) == NUM_UNREAD:
            self._read()

    def totals(self) -> dict[str, float]:
        self._read()
        return self._sums

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        for name in dict.fromkeys(name for values, _ in unread for name in values):
            having = [(values[name], rows) for values, rows in unread if name in values]
            numbers = _read_all(name, [value for value, _ in having])
            total = self._sums.get(name, 0.0)
            for number, (_, rows) in zip(numbers, having, strict=True):
                total += number * rows
            self._sums[name] = total


def count_rows(raw_batch: Any) -> int:
    """The rows of a batch from the source; 1 where it has no rows."""
    rows = getattr(raw_batch, "num_rows", None)
    if rows is not None:
        return int(rows)
    if isinstance(raw_batch, Mapping):
        raw_batch = list(raw_batch.values())
    first = raw_batch[0] if isinstance(raw_batch, list | tuple) and raw_batch else raw_batch
    shape = getattr(first, "shape", None)
    if shape:  # columns of arrays, as a DataLoader gives them
        return int(shape[0])
    return len(raw_batch) if isinstance(raw_batch, list | tuple) and raw_batch else 1


@contextlib.contextmanager
def evaluation_mode(*holders: Any) -> Iterator[None]:
    """All torch modules of the holders in eval mode, without gradients; restored afterwards."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    flags = [(module, module.training) for root in modules_of(torch, holders) for module in root.modules()]
    try:
        for module, _ in flags:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module, is_training in flags:
            module.training = is_training


def modules_of(torch: Any, holders: tuple[Any, ...]) -> list[Any]:
    """The torch modules in the holders, a few levels deep; without their submodules."""
    found: dict[int, Any] = {}
    seen: set[int] = set()

    def look(item: Any, depth: int) -> None:
        if item is None or isinstance(item, str | bytes | int | float | type) or id(item) in seen:
            return
        seen.add(id(item))
        if isinstance(item, torch.nn.Module):
            found[id(item)] = item
        elif isinstance(item, torch.Tensor) or not depth:
            return
        elif isinstance(item, Mapping):
            for value in item.values():
                look(value, depth - 1)
        elif isinstance(item, list | tuple | set):
            for value in item:
                look(value, depth - 1)
        else:
            for name in (*_slots(type(item)), *getattr(item, "__dict__", ())):
                look(getattr(item, name, None), depth - 1)

    for holder in holders:
        look(holder, MAX_DEPTH)
    return list(found.values())


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots


def _own_memory(value: Any) -> Any:
    """A copy of a number that is part of a large tensor, which could not be freed otherwise."""
    if hasattr(value, "untyped_storage") and value.untyped_storage().nbytes() > SMALL_BYTES:
        return value.detach().clone()
    return value


def _read_all(name: str, values: list[Any]) -> list[float]:
    torch = sys.modules.get("torch")
    are_tensors = torch is not None and all(
        isinstance(value, torch.Tensor) and value.ndim == 0 for value in values
    )
    if torch is not None and are_tensors and len({(value.device, value.dtype) for value in values}) == 1:
        numbers: list[float] = torch.stack(values).detach().tolist()
        return numbers
    return [_as_float(name, value) for value in values]


def _as_float(name: str, value: Any) -> float:
    try:
        return to_float_scalar(value)
    except (TypeError, ValueError) as fault:
        raise TrainStepError(f"the value of {name!r} is not a number: {fault}") from fault
