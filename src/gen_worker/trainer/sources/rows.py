"""Data that can be indexed: a map-style Dataset, a list, anything with `__len__` and `__getitem__`.

The rows of a batch are a function of (seed, epoch), as for parquet files, so a resume reads no earlier row.
"""

from collections.abc import Iterator
from typing import Any

from gen_worker.errors import InputError
from gen_worker.trainer.feed.order import permutation
from gen_worker.trainer.sources.base import (
    OwnSource,
    SourceOptions,
    check_batch_size,
    find_fingerprint,
    share_of,
)
from gen_worker.trainer.sources.collate import choose_collate, without_rows
from gen_worker.trainer.sources.random_streams import DataStreams, find_generators


class RowsSource(OwnSource):
    kind = "rows"

    def __init__(self, dataset: Any, options: SourceOptions) -> None:
        super().__init__(options, DataStreams(options.seed, find_generators(dataset=dataset)))
        check_batch_size(options.batch_size, options.world_size)
        self.dataset = dataset
        self._collate = choose_collate(dataset)
        self._num_rows = len(dataset)
        full, tail = divmod(self._num_rows, options.batch_size)
        if options.drop_last:
            tail = 0
        self.batches_per_epoch: int = full + bool(tail)
        self._rows_per_epoch = full * options.batch_size + tail
        self.fingerprint = find_fingerprint(dataset)
        if self._num_rows and not self.batches_per_epoch:
            raise InputError(
                f"{self._num_rows} rows are less than one batch of {options.batch_size} with drop_last: lower"
                " batch_size, or set drop_last to false"
            )

    @property
    def schema(self) -> Any:
        """The Arrow schema of the batches, if the data has one."""
        return getattr(self.dataset, "schema", None)

    @property
    def _stream_rank(self) -> int:
        return self._options.rank

    def _begin(self, epoch: int, batch: int) -> Iterator[Any]:
        options, num_rows = self._options, self._num_rows
        order = permutation(num_rows, options.seed, epoch) if options.shuffle else None
        for number in range(batch, self.batches_per_epoch):
            first = number * options.batch_size
            rows = range(first, min(first + options.batch_size, num_rows))
            if options.world_size > 1:
                self._global_rows[number] = len(rows)
            mine = rows[share_of(len(rows), options.rank, options.world_size)]
            if not mine:
                yield without_rows(self._collate(self._read([0])))
            elif order is None:
                yield self._collate(self._read(list(mine)))
            else:
                yield self._collate(self._read(order[mine.start : mine.stop].tolist()))

    def _read(self, indices: list[int]) -> list[Any]:
        read_many = getattr(self.dataset, "__getitems__", None)
        if callable(read_many):
            return list(read_many(indices))
        dataset = self.dataset
        return [dataset[index] for index in indices]

    def _facts(self) -> dict[str, Any]:
        options = self._options
        facts = {
            "num_rows": self._num_rows,
            "batch_size": options.batch_size,
            "shuffle": options.shuffle,
            "drop_last": options.drop_last,
        }
        return {**facts, "seed": options.seed} if options.shuffle else facts

    def rows_before(self, *, epoch: int, batch: int) -> int:
        return epoch * self._rows_per_epoch + min(batch * self._options.batch_size, self._rows_per_epoch)
