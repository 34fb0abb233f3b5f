"""Data that can only be iterated: an IterableDataset yields rows, any other iterable yields batches.

A resume uses the data's own `state_dict` if it is complete. Otherwise the earlier batches of the epoch are read again
and dropped.
"""

import copy
import inspect
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from gen_worker.errors import InputError
from gen_worker.trainer.sources.base import (
    END,
    OwnSource,
    Place,
    SourceOptions,
    check_batch_size,
    find_fingerprint,
    share_of,
)
from gen_worker.trainer.sources.collate import choose_collate, without_rows
from gen_worker.trainer.sources.random_streams import DataStreams, States, find_generators


class ReplayedSource(OwnSource):
    """Passes that begin with `iter(data)`."""

    kind = "batches"
    _shard_refusal = (
        "the shard of process {rank} ended after {number} batches of epoch {epoch}. Every process needs the same number"
        " of batches: give the shards an equal `__len__`, or remove `shard`. Then every process reads all data and"
        " takes its own part"
    )

    def __init__(self, data: Any, options: SourceOptions) -> None:
        super().__init__(options, DataStreams(options.seed, find_generators(data=data)))
        self.fingerprint = find_fingerprint(data)
        shard = _find_shard(data, options)
        self._data = data if shard is None else shard
        self._is_shard = shard is not None
        self._anchor: tuple[Place, Any] | None = None  # a place, and what `state_dict` gave there
        length = _length_of(self._data)
        self.batches_per_epoch = None if length is None else self._num_batches(length)

    @property
    def _items_per_batch(self) -> int:
        """Items that one step takes, for all processes that read the same data."""
        return 1 if self._is_shard else self._options.world_size

    def _num_batches(self, length: int) -> int:
        return length // self._items_per_batch

    def _take(self, iterator: Iterator[Any], number: int) -> Any:  # noqa: ARG002
        """The item of this process. An incomplete last group is dropped."""
        items = list(islice(iterator, self._items_per_batch))
        if len(items) < self._items_per_batch:
            return END
        return items[0 if self._is_shard else self._options.rank]

    def _pass_over(self, iterator: Iterator[Any]) -> bool:
        return sum(1 for _ in islice(iterator, self._items_per_batch)) == self._items_per_batch

    @property
    def _stream_rank(self) -> int:
        return self._options.rank if self._is_shard else 0

    def _begin(self, epoch: int, batch: int) -> Iterator[Any]:
        data, first = self._data, 0
        call_set_epoch(data, epoch=epoch)
        is_between_epochs = False
        if self._anchor is not None and self._at == self._saved_place:
            (_, first), state = self._anchor
            data.load_state_dict(copy.deepcopy(state))
            if first:
                self._log(f"the data resumes at batch {first} of epoch {epoch} with its own load_state_dict")
            is_between_epochs = batch == 0
        iterator = iter(data)
        if is_between_epochs:
            # The state is that of an epoch's end. Some data then starts the next epoch, other data ends once more.
            iterator = _or_else(iterator, data)
        self._replay(iterator, epoch, first, batch)
        return self._take_all(iterator, epoch, batch)

    @property
    def _saved_place(self) -> Place | None:
        return self.locate(self._saved["epoch"], self._saved["batch"]) if self._saved else None

    def _replay(self, iterator: Iterator[Any], epoch: int, first: int, batch: int) -> None:
        if batch > first:
            self._log(
                f"the data cannot seek: reading {batch - first} batches of epoch {epoch} again, up to batch {batch}"
            )
        for number in range(first, batch):
            self._check_stop()
            self._streams.seed(epoch, number, self._stream_rank)
            if not self._pass_over(iterator):
                raise InputError(
                    f"the data ended after {number} batches of epoch {epoch}, but the checkpoint is at batch {batch}:"
                    " the data is shorter than before"
                )

    def _take_all(self, iterator: Iterator[Any], epoch: int, number: int) -> Iterator[Any]:
        options = self._options
        while (item := self._take(iterator, number)) is not END:
            yield item
            number += 1
        if self._is_shard and self.batches_per_epoch is None and not options.is_held_out:
            raise InputError(self._shard_refusal.format(rank=options.rank, number=number, epoch=epoch))

    def _inside_at(self, start: States, now: States) -> States:
        return now if self._anchor is not None else start

    def _more_state(self, place: Place) -> dict[str, Any]:
        if not has_state(self._data):
            return {}
        if self._at == place and not self._is_fetching:
            with self._streams.swapped_in():
                self._anchor = (place, copy.deepcopy(self._data.state_dict()))
        if self._anchor is None:
            return {}
        (epoch, batch), state = self._anchor
        # A state of an earlier batch works too, unless there are generators: their state there is unknown.
        is_of_use = epoch == place[0] and batch <= place[1] and not self._streams.names
        if not is_of_use and (epoch, batch) != place:
            return {}
        return {"source": {"epoch": epoch, "batch": batch, "state": state}}

    def position(self, state: Mapping[str, Any], *, manifest: bytes | None = None) -> Place:
        place = super().position(state, manifest=manifest)
        source = state.get("source") if has_state(self._data) else None
        self._anchor = None if source is None else ((source["epoch"], source["batch"]), source["state"])
        return place

    def _facts(self) -> dict[str, Any]:
        return {"num_batches": self.batches_per_epoch}


class IterableRowsSource(ReplayedSource):
    """Rows of an IterableDataset, batched and collated like a DataLoader does."""

    kind = "iterable rows"

    def __init__(self, dataset: Any, options: SourceOptions) -> None:
        check_batch_size(options.batch_size, options.world_size)
        self._collate = choose_collate(dataset)
        super().__init__(dataset, options)

    @property
    def _items_per_batch(self) -> int:
        size = self._options.batch_size
        return size // self._options.world_size if self._is_shard else size

    def _num_batches(self, length: int) -> int:
        full, tail = divmod(length, self._items_per_batch)
        return full + bool(tail and not self._options.drop_last)

    def _take(self, iterator: Iterator[Any], number: int) -> Any:
        rows = list(islice(iterator, self._items_per_batch))
        if not rows or (self._options.drop_last and len(rows) < self._items_per_batch):
            return END
        if self._is_shard:
            return self._collate(rows)
        if self._options.world_size > 1:
            self._global_rows[number] = len(rows)
        mine = rows[share_of(len(rows), self._options.rank, self._options.world_size)]
        return self._collate(mine) if mine else without_rows(self._collate(rows[:1]))

    def _pass_over(self, iterator: Iterator[Any]) -> bool:
        num_rows = sum(1 for _ in islice(iterator, self._items_per_batch))
        return num_rows == self._items_per_batch or (num_rows > 0 and not self._options.drop_last)

    def _facts(self) -> dict[str, Any]:
        options = self._options
        return {**super()._facts(), "batch_size": options.batch_size, "drop_last": options.drop_last}


def call_set_epoch(*holders: object, epoch: int) -> None:
    """Tell samplers and datasets that shuffle which epoch begins."""
    for holder in holders:
        set_epoch = getattr(holder, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


def _find_shard(data: Any, options: SourceOptions) -> Any:
    """The shard of this process if the data has `shard`; None for one process."""
    shard = getattr(data, "shard", None)
    if options.world_size == 1 or not callable(shard):
        return None
    try:
        names = inspect.signature(shard).parameters
    except (TypeError, ValueError):
        return None
    if {"rank", "world_size"} <= names.keys():
        return shard(rank=options.rank, world_size=options.world_size)
    if {"num_shards", "index"} <= names.keys():
        return shard(num_shards=options.world_size, index=options.rank)
    raise InputError(
        f"`shard` of {type(data).__name__} takes ({', '.join(names)}), expected (rank, world_size) or (num_shards, index)"
    )


def has_state(data: Any) -> bool:
    """Can its `state_dict` restore its position?"""
    if not all(callable(getattr(data, name, None)) for name in ("state_dict", "load_state_dict")):
        return False
    return not any(map(_has_shuffle_buffer, (data, getattr(data, "dataset", None))))


def _has_shuffle_buffer(data: Any) -> bool:
    """Is it a shuffled IterableDataset of Hugging Face? Its `state_dict` omits the buffer, so a resume would differ."""
    parts = [getattr(data, "_ex_iterable", None)]
    while parts:
        part = parts.pop()
        if type(part).__name__.startswith("BufferShuffled"):
            return True
        parts += [inner for inner in [getattr(part, "ex_iterable", None)] if inner is not None]
        parts += getattr(part, "ex_iterables", None) or []
    return False


def _length_of(data: Any) -> int | None:
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def _or_else(iterator: Iterator[Any], data: Any) -> Iterator[Any]:
    """The iterator; if it is empty, a new one."""
    is_empty = True
    for item in iterator:
        is_empty = False
        yield item
    if is_empty:
        yield from data
