"""A torch DataLoader with its own batch size, sampler, workers and generator.

We use a shallow copy of the loader whose sampler counts its batches. So each batch is seeded by its number, also in
worker processes, and a resume skips the indices of earlier batches without reading their rows.
"""

import copy
import signal
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from gen_worker.errors import InputError
from gen_worker.trainer.sources.base import END, OwnSource, SourceOptions, find_fingerprint, share_of
from gen_worker.trainer.sources.iterables import ReplayedSource, call_set_epoch, has_state
from gen_worker.trainer.sources.random_streams import (
    DataStreams,
    States,
    find_generators,
    seed_streams,
    stream_seed,
)


class SentIndices:
    """Indices for a worker process. Unpickling them there seeds its generators."""

    def __init__(self, indices: Any, seed: int) -> None:
        self.indices = indices
        self.seed = seed

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self.indices, self.seed)


def _arrive(indices: Any, seed: int) -> Any:
    seed_streams(seed)
    return indices


class CountedSampler:
    """A loader's sampler that can start at any batch. Iterated only inside `streams.swapped_in`."""

    def __init__(self, sampler: Any, streams: DataStreams, options: SourceOptions, *, is_sent: bool) -> None:
        self.sampler = sampler
        self._streams = streams
        self._options = options
        self._is_sent = is_sent
        self.is_shared = False  # each process takes its part of every batch
        self.global_rows: dict[int, int] = {}
        self.generator: Any = None  # the loader's
        self.epoch = 0
        self.first = 0

    def draw_base_seed(self) -> None:
        """Draw the seed of the workers at every epoch: persistent workers draw it only once, when they start."""
        if self.generator is not None:
            import torch

            torch.empty((), dtype=torch.int64).random_(generator=self.generator)

    def __len__(self) -> int:
        return len(self.sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "sampler":
            raise AttributeError(name)
        return getattr(self.sampler, name)

    def __iter__(self) -> Iterator[Any]:
        options, epoch = self._options, self.epoch
        self._streams.seed("order", epoch, -1)
        inner = iter(self.sampler)
        for number in count():
            self._streams.seed("order", epoch, number)
            try:
                indices = next(inner)
            except StopIteration:
                return
            if number < self.first:
                continue
            if self.is_shared:
                self.global_rows[number] = len(indices)
                indices = self._own_part(indices, number)
            seed = stream_seed(options.seed, epoch, number, options.rank)
            if self._is_sent:
                yield SentIndices(indices, seed)
            else:
                seed_streams(seed)
                yield indices

    def _own_part(self, indices: Any, number: int) -> Any:
        options = self._options
        mine = indices[share_of(len(indices), options.rank, options.world_size)]
        if not mine:
            raise InputError(
                f"batch {number} has {len(indices)} rows, none for process {options.rank}: set drop_last=True in the"
                " DataLoader, or name its dataset instead of the loader"
            )
        return mine


class LoaderSource(OwnSource):
    """A loader over a map-style dataset."""

    kind = "DataLoader"

    def __init__(self, loader: Any, options: SourceOptions) -> None:
        owned = find_generators(dataset=loader.dataset, loader=_without(loader, "dataset", "_iterator"))
        super().__init__(options, DataStreams(options.seed, owned))
        own_to_dataset = [name for name in self._streams.names if name.startswith("dataset")]
        if own_to_dataset and loader.num_workers:
            raise InputError(
                f"the dataset has its own random generator ({', '.join(own_to_dataset)}). The {loader.num_workers}"
                " workers of the DataLoader would use copies of it, which cannot be resumed. Use the global generators"
                " (torch.rand, np.random, random), which are seeded for each batch, or set num_workers=0"
            )
        self._loader, self._sampler = _copy_loader(loader, self._streams, options)
        self._share(loader)
        self.batches_per_epoch = len(self._loader)
        self.fingerprint = find_fingerprint(loader) or find_fingerprint(loader.dataset)

    def _share(self, loader: Any) -> None:
        """Split the data over the processes: by a DistributedSampler, or each batch into parts."""
        options, sampler = self._options, loader.sampler
        if hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"):
            if (sampler.num_replicas, sampler.rank) != (options.world_size, options.rank):
                raise InputError(
                    f"the DistributedSampler is for process {sampler.rank} of {sampler.num_replicas}, but this is process"
                    f" {options.rank} of {options.world_size}: create it with these numbers, or remove it"
                )
            return
        self._sampler.is_shared = options.world_size > 1
        self._global_rows = self._sampler.global_rows
        if not self._sampler.is_shared:
            return
        if loader.batch_sampler is None:
            raise InputError(
                "a DataLoader with batch_size=None cannot be split over several processes: give it a DistributedSampler"
            )
        size: int | None = loader.batch_size
        if size is not None and size % options.world_size:
            raise InputError(
                f"batch_size={size} of the DataLoader, the rows of one step over all processes, is not a multiple of"
                f" the {options.world_size} processes: choose a multiple of {options.world_size}"
            )

    def _begin(self, epoch: int, batch: int) -> Iterator[Any]:
        loader = self._loader
        call_set_epoch(loader.sampler, self._sampler.sampler, loader.dataset, epoch=epoch)
        self._sampler.epoch, self._sampler.first = epoch, batch
        self._sampler.draw_base_seed()
        return iter(loader)

    def _inside_at(self, start: States, now: States) -> States:
        """The sampler draws the whole order again, from the epoch's start; rows are not read again."""
        return {name: state for name, state in start.items() if name.startswith("loader")} | {
            name: state for name, state in now.items() if not name.startswith("loader")
        }

    def _end(self, iterator: Iterator[Any], *, is_whole: bool) -> None:
        if not is_whole:
            end_workers(self._loader, iterator)

    def _facts(self) -> dict[str, Any]:
        return {"num_batches": len(self._loader), "batch_size": self._loader.batch_size}

    def rows_before(self, *, epoch: int, batch: int) -> int | None:
        loader, options = self._loader, self._options
        size: int | None = loader.batch_size
        if size is None:
            return None
        num_rows: int = len(loader.sampler)
        if loader.drop_last:
            num_rows -= num_rows % size
        scale = 1 if self._sampler.is_shared else options.world_size
        return (epoch * num_rows + min(batch * size, num_rows)) * scale

    def close(self) -> None:
        end_workers(self._loader, None)


class IterableLoaderSource(ReplayedSource):
    """A loader over an IterableDataset, or one with its own `state_dict`."""

    kind = "iterable DataLoader"

    def __init__(self, loader: Any, options: SourceOptions) -> None:
        if options.world_size > 1 and not hasattr(loader.sampler, "num_replicas"):
            raise InputError(
                f"a DataLoader over an IterableDataset cannot be split over {options.world_size} processes: name the"
                " IterableDataset itself, or set resources.processes to 1"
            )
        super().__init__(loader, options)
        self.fingerprint = find_fingerprint(loader) or find_fingerprint(loader.dataset)
        self._sampler: CountedSampler | None = None
        if not has_state(loader):  # else its state includes its sampler
            self._data, self._sampler = _copy_loader(loader, self._streams, options)

    @property
    def _items_per_batch(self) -> int:
        return 1

    def _take(self, iterator: Iterator[Any], number: int) -> Any:  # noqa: ARG002
        return next(iterator, END)

    def _begin(self, epoch: int, batch: int) -> Iterator[Any]:
        call_set_epoch(self._data.sampler, self._data.dataset, epoch=epoch)
        if self._sampler is not None:
            self._sampler.epoch = epoch
            self._sampler.draw_base_seed()
        if self._data.persistent_workers and self._sampler is not None:
            # Their random state and position would carry over into the next epoch; no checkpoint can hold these.
            self._log(
                "persistent_workers is ignored with an IterableDataset: workers are restarted each epoch"
            )
            self._data.__dict__["persistent_workers"] = False
        return super()._begin(epoch, batch)

    def _end(self, iterator: Iterator[Any], *, is_whole: bool) -> None:
        if not is_whole:
            iterator.close()  # type: ignore[attr-defined]
            end_workers(self._data, None)

    def close(self) -> None:
        end_workers(self._data, None)


class WorkerStart:
    """First call in a worker process: ignores Ctrl-C, which the run handles."""

    def __init__(self, init: Callable[[int], object] | None) -> None:
        self._init = init

    def __call__(self, worker_id: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self._init is not None:
            self._init(worker_id)


def _copy_loader(loader: Any, streams: DataStreams, options: SourceOptions) -> tuple[Any, CountedSampler]:
    if loader.num_workers and not getattr(loader, "in_order", True):
        raise InputError(
            "the DataLoader has in_order=False: a resume cannot repeat the order of its batches. Set it to True"
        )
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler = CountedSampler(getattr(loader, name), streams, options, is_sent=loader.num_workers > 0)
    copied = copy.copy(loader)
    # A loader does not allow to set these.
    start = WorkerStart(loader.worker_init_fn)
    copied.__dict__.update({name: sampler, "_iterator": None, "generator": None, "worker_init_fn": start})
    sampler.generator = loader.generator
    return copied, sampler


def end_workers(loader: Any, iterator: Any) -> None:
    """End the worker processes of a pass, and persistent ones."""
    for held in (iterator, getattr(loader, "_iterator", None)):
        shut_down = getattr(held, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()
    loader.__dict__["_iterator"] = None


def _without(holder: Any, *names: str) -> dict[str, Any]:
    """Its attributes but these."""
    return {name: value for name, value in vars(holder).items() if name not in names}
