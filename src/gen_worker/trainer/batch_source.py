"""Where the loop's batches come from: anything that can be opened at a position and says where it stands.

`ArrowFeed` is the source of real runs. The two here serve smoke runs and library use.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

from gen_worker.errors import InputError


class BatchSource(Protocol):
    @property
    def batches_per_epoch(self) -> int | None:
        """None where it is not known before the end."""

    def batches(self, *, epoch: int = 0, batch: int = 0) -> Iterator[Any]:
        """The batches from that position on; ends, or goes on into the next epochs."""

    def state(self, *, epoch: int, batch: int) -> dict[str, Any]:
        """The cursor as JSON, for a checkpoint."""

    def position(self, state: Mapping[str, Any], *, manifest: bytes | None = None) -> tuple[int, int]:
        """(epoch, batch) of a saved cursor; InputError where it does not fit this source.

        The saved `manifest` of the data, where there is one, lets the error name what changed.
        """

    def close(self) -> None: ...


class ListSource:
    """One pass over batches that are in memory: the job's `mock_batches`."""

    def __init__(self, items: Sequence[Any]) -> None:
        self._items = items

    @property
    def batches_per_epoch(self) -> int:
        return len(self._items)

    def batches(self, *, epoch: int = 0, batch: int = 0) -> Iterator[Any]:
        return iter(()) if epoch else islice(self._items, batch, None)

    def state(self, *, epoch: int, batch: int) -> dict[str, Any]:
        return {"version": 1, "epoch": epoch, "batch": batch, "num_batches": len(self._items)}

    def position(self, state: Mapping[str, Any], *, manifest: bytes | None = None) -> tuple[int, int]:  # noqa: ARG002
        if state.get("num_batches") != len(self._items):
            raise InputError(
                f"the checkpoint was made with {state.get('num_batches')} mock batches, the job now has"
                f" {len(self._items)}: resume with the same ones"
            )
        return int(state["epoch"]), int(state["batch"])

    def close(self) -> None:
        pass


class IterableSource:
    """Batches handed in by a caller who has already placed them at the right position."""

    batches_per_epoch = None

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items

    def batches(self, *, epoch: int = 0, batch: int = 0) -> Iterator[Any]:  # noqa: ARG002  (the caller's promise)
        return iter(self._items)

    def state(self, *, epoch: int, batch: int) -> dict[str, Any]:
        return {"version": 1, "epoch": epoch, "batch": batch}

    def position(self, state: Mapping[str, Any], *, manifest: bytes | None = None) -> tuple[int, int]:  # noqa: ARG002
        return int(state["epoch"]), int(state["batch"])

    def close(self) -> None:
        pass
