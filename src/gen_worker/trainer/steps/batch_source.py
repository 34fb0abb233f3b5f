"""The protocol of the loop's data, and simple sources for smoke runs, debugging and trainers that make their own data.

Real runs use `ArrowFeed` and `sources`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, count, islice, repeat
from typing import Any, Protocol

from gen_worker.errors import InputError
from gen_worker.trainer.feed.content import Note


class BatchSource(Protocol):
    @property
    def batches_per_epoch(self) -> int | None:
        """None where it is unknown before the end."""

    def batches(self, *, epoch: int = 0, batch: int = 0) -> Iterator[Any]:
        """The batches from that position on; ends, or continues into the next epochs."""

    def state(self, *, epoch: int, batch: int) -> dict[str, Any]:
        """The cursor as JSON, for a checkpoint."""

    def position(self, state: Mapping[str, Any], *, manifest: bytes | None = None) -> tuple[int, int]:
        """(epoch, batch) of a saved cursor; InputError where it does not fit this source. `manifest`: of the saved data."""

    def rows_before(self, *, epoch: int, batch: int) -> int | None:
        """Rows in all batches before that position, over all processes; None where batches have no rows."""

    def close(self) -> None: ...


class ListSource:
    """Batches in memory: one pass (the job's `mock_batches`), or endless passes."""

    def __init__(self, items: Sequence[Any], *, is_endless: bool = False) -> None:
        self._items = items
        self._is_endless = is_endless

    @property
    def batches_per_epoch(self) -> int:
        return len(self._items)

    def batches(self, *, epoch: int = 0, batch: int = 0) -> Iterator[Any]:
        if not self._is_endless:
            return iter(()) if epoch else islice(self._items, batch, None)
        return chain(islice(self._items, batch, None), chain.from_iterable(repeat(self._items)))

    def state(self, *, epoch: int, batch: int) -> dict[str, Any]:
        return {"version": 1, "epoch": epoch, "batch": batch, "num_batches": len(self._items)}

    def position(self, state: Mapping[str, Any], *, manifest: bytes | None = None) -> tuple[int, int]:  # noqa: ARG002
        if state.get("num_batches") != len(self._items):
            raise InputError(
                f"the checkpoint was saved with {state.get('num_batches')} batches, there are now"
                f" {len(self._items)}: resume with the same batches"
            )
        return int(state["epoch"]), int(state["batch"])

    def rows_before(self, *, epoch: int, batch: int) -> int | None:  # noqa: ARG002
        return None

    def close(self) -> None:
        pass


class _PlainPosition:
    """For batches without a known end and without rows: the position is two numbers."""

    batches_per_epoch = None

    def state(self, *, epoch: int, batch: int) -> dict[str, Any]:
        return {"version": 1, "epoch": epoch, "batch": batch}

    def position(self, state: Mapping[str, Any], *, manifest: bytes | None = None) -> tuple[int, int]:  # noqa: ARG002
        return int(state["epoch"]), int(state["batch"])

    def rows_before(self, *, epoch: int, batch: int) -> int | None:  # noqa: ARG002
        return None

    def close(self) -> None:
        pass


class IterableSource(_PlainPosition):
    """Batches of a caller, already at the right position."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items

    def batches(self, *, epoch: int = 0, batch: int = 0) -> Iterator[Any]:  # noqa: ARG002  (the caller's promise)
        iter_batches = getattr(self._items, "iter_batches", None)
        return iter(self._items if iter_batches is None else iter_batches())


class StepNumbers(_PlainPosition):
    """For a trainer class that makes its own data: each batch is its step number. Endless."""

    def batches(self, *, epoch: int = 0, batch: int = 0) -> Iterator[int]:  # noqa: ARG002
        return count(batch)


def knows_its_epochs(source: BatchSource) -> bool:
    """True where epochs have a known length, or the source can locate them."""
    return source.batches_per_epoch is not None or hasattr(source, "locate")


class FirstBatches:
    """The first `num_batches` of a source, repeated (`overfit_batches`)."""

    def __init__(self, source: BatchSource, num_batches: int) -> None:
        self._source = source
        per_epoch = source.batches_per_epoch
        self.batches_per_epoch = num_batches if per_epoch is None else min(num_batches, per_epoch)
        self.schema = getattr(source, "schema", None)
        self.dataset = getattr(source, "dataset", None)

    def batches(self, *, epoch: int = 0, batch: int = 0) -> Iterator[Any]:  # noqa: ARG002  (each pass is the first)
        while True:
            iterator = self._source.batches(epoch=0, batch=batch)
            try:
                for item in islice(iterator, self.batches_per_epoch - batch):
                    batch += 1
                    yield item
                if batch < self.batches_per_epoch:
                    raise InputError(
                        f"overfit_batches is {self.batches_per_epoch}, and a pass over the data has only {batch} batches"
                    )
            finally:
                close = getattr(iterator, "close", None)
                if close is not None:
                    close()
            batch = 0

    @property
    def notes(self) -> list[Note]:
        return getattr(self._source, "notes", [])

    def state(self, *, epoch: int, batch: int) -> dict[str, Any]:
        return {**self._source.state(epoch=0, batch=batch), "overfit_epoch": epoch}

    def position(self, state: Mapping[str, Any], *, manifest: bytes | None = None) -> tuple[int, int]:
        if "overfit_epoch" not in state:
            raise InputError(
                "the checkpoint was saved without overfit_batches, and the job has it now: use another folder"
            )
        rest = {name: value for name, value in state.items() if name != "overfit_epoch"}
        _, batch = self._source.position(rest, manifest=manifest)
        return int(state["overfit_epoch"]), batch

    def rows_before(self, *, epoch: int, batch: int) -> int | None:
        per_pass = self._source.rows_before(epoch=0, batch=self.batches_per_epoch)
        rest = self._source.rows_before(epoch=0, batch=batch)
        return None if per_pass is None or rest is None else epoch * per_pass + rest

    def close(self) -> None:
        self._source.close()
