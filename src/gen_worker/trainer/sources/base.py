"""Base of all own data: the position of a pass, its random streams, and their part of a checkpoint.

Batches are fetched in the loop's thread, one at a time, without readahead. So the data's position and random state
always belong to the last batch. (Workers of a DataLoader read ahead; their seeds follow from the batch number.)
"""

import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gen_worker.errors import InputError
from gen_worker.trainer.contracts import StopSignal
from gen_worker.trainer.feed.content import cursor_error
from gen_worker.trainer.job_lifecycle import raise_stop
from gen_worker.trainer.sources.random_streams import DataStreams, States

CURSOR_VERSION = 1
END = object()

Place = tuple[int, int]  # epoch and batch


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """How to read the data. Held-out data is read in the same order in every pass."""

    batch_size: int = 32
    shuffle: bool = False
    drop_last: bool = False
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    is_held_out: bool = False


class OwnSource:
    """A `BatchSource` over the author's data. It can be used again after `close`.

    A subclass defines `_begin` (an iterator at a place), `_facts` (what a place depends on) and `_inside_at`.
    """

    kind = "data"
    batches_per_epoch: int | None = None
    fingerprint: str | None = None
    note = ""  # logged at the start of a run

    def __init__(self, options: SourceOptions, streams: DataStreams) -> None:
        self._options = options
        self._streams = streams
        self._stop: StopSignal | None = None
        self._log: Callable[[str], object] = lambda _message: None
        self._lengths: dict[int, int] = {}  # of completed epochs
        # The two newest places with the state of the owned generators. The older one is that of the last committed
        # step while a batch is fetched and not yet trained on.
        self._marks: deque[tuple[Place, States]] = deque([((0, 0), streams.initial)], maxlen=2)
        self._epoch_start: tuple[int, States] = (0, streams.initial)
        self._saved: Mapping[str, Any] = {}  # the cursor of the checkpoint that is resumed
        self._at: Place | None = None
        self._is_fetching = False
        self._global_rows: dict[int, int] = {}  # of batches that the processes share, by number
        self._newest: tuple[Any, int] | None = None  # the last of these, with its rows
        _open_sources.add(self)

    def attach(self, *, log: Callable[[str], object], stop: StopSignal) -> None:
        """Log messages with `log`; end when `stop` is requested."""
        self._log, self._stop = log, stop
        if self.note:
            log(self.note)

    # For subclasses.

    def _begin(self, epoch: int, batch: int) -> Iterator[Any]:
        """The batches of one pass from that place on. Called inside `streams.swapped_in`."""
        raise NotImplementedError

    def _facts(self) -> dict[str, Any]:
        """What must not change between a checkpoint and its resume."""
        raise NotImplementedError

    def _inside_at(self, start: States, now: States) -> States:  # noqa: ARG002
        """State of the owned generators to resume with: of the epoch's start, or of the place itself."""
        return now

    def _end(self, iterator: Iterator[Any], *, is_whole: bool) -> None:
        """A pass ended, complete or not."""

    def _more_state(self, place: Place) -> dict[str, Any]:  # noqa: ARG002
        """More fields of the cursor."""
        return {}

    # For the loop.

    def batches(self, *, epoch: int = 0, batch: int = 0) -> Generator[Any, None, None]:
        """Endless if the length of an epoch is known; else one pass."""
        if batch and batch == self.batches_per_epoch:
            epoch, batch = epoch + 1, 0
        return self._generate(epoch, batch)

    def _generate(self, epoch: int, batch: int) -> Generator[Any, None, None]:
        is_endless = self.batches_per_epoch is not None and not self._options.is_held_out
        yield from self._pass(epoch, batch)
        while is_endless:
            epoch += 1
            yield from self._pass(epoch, 0)

    def _pass(self, epoch: int, batch: int) -> Generator[Any, None, None]:
        if self._at != (epoch, batch) or self._options.is_held_out:
            self._jump(epoch, batch)
        else:
            self._epoch_start = (epoch, self._streams.inside)
        self._take_place(epoch, batch)
        with self._streams.swapped_in():
            self._streams.seed("epoch", epoch)
            iterator = self._begin(epoch, batch)
        number, is_whole = batch, False
        try:
            while number != self.batches_per_epoch:
                item = self._fetch(iterator, epoch, number)
                if item is END:
                    break
                number += 1
                yield item
            is_whole = True
        finally:
            self._end(iterator, is_whole=is_whole)
        if number == 0:
            raise InputError(f"the data has no batch in epoch {epoch}")
        self._lengths[epoch] = number
        self._take_place(epoch, number)

    def _fetch(self, iterator: Iterator[Any], epoch: int, number: int) -> Any:
        per_epoch = self.batches_per_epoch
        self._is_fetching = True
        with self._streams.swapped_in():
            self._streams.seed(epoch, number, self._stream_rank)
            item = next(iterator, END)
            if per_epoch is not None and (item is END) != (number == per_epoch):
                self._refuse_length(f"ended after {number} batches")
            # Read past the last batch: random numbers drawn there belong to this epoch.
            if number + 1 == per_epoch and next(iterator, END) is not END:
                self._refuse_length(f"has more than {per_epoch} batches")
        self._is_fetching = False
        if item is not END:
            self._take_place(epoch, number + 1)
            rows = self._global_rows.pop(number, None)
            self._newest = None if rows is None else (item, rows)
        return item

    def global_rows_of(self, batch: object) -> int | None:
        """Rows over all processes if `batch` is the last one; None for any other."""
        return self._newest[1] if self._newest is not None and self._newest[0] is batch else None

    @property
    def _stream_rank(self) -> int:
        """0 where all processes must draw the same order."""
        return 0

    def _refuse_length(self, found: str) -> None:
        raise InputError(
            f"the length of the data is {self.batches_per_epoch} batches per epoch, but it {found}: correct its"
            " `__len__`, or remove it"
        )

    def _take_place(self, epoch: int, batch: int) -> None:
        place = self.locate(epoch, batch)
        if self._at != place:
            self._at = place
            self._marks.append((place, self._streams.inside))

    def _jump(self, epoch: int, batch: int) -> None:
        """Set the generators for a place that does not follow the last one."""
        states = self._streams.initial
        start, now = states, states
        saved = self._saved
        if saved and (saved["epoch"], saved["batch"]) == (epoch, batch):
            start, now = saved.get("epoch_generators", {}), saved.get("generators", {})
        elif self._streams.names and (epoch or batch) and not self._options.is_held_out:
            raise InputError(
                f"the checkpoint has no state of {', '.join(self._streams.names)} at epoch {epoch}, batch {batch}:"
                " start a new run"
            )
        self._epoch_start = (epoch, {**states, **start})
        self._streams.set_inside(self._inside_at(start, now))

    def locate(self, epoch: int, batch: int) -> Place:
        """The same place counted from the start of its epoch, as far as epoch lengths are known."""
        while True:
            length = self._lengths.get(epoch) if self.batches_per_epoch is None else self.batches_per_epoch
            if not length or batch < length:
                return epoch, batch
            epoch, batch = epoch + 1, batch - length

    def state(self, *, epoch: int, batch: int) -> dict[str, Any]:
        """The cursor, with the state of the data's own generators."""
        state = {"version": CURSOR_VERSION, "kind": self.kind, "epoch": epoch, "batch": batch}
        state |= self._facts()
        if self.fingerprint is not None:
            state["fingerprint"] = self.fingerprint
        place = self.locate(epoch, batch)
        if self._streams.names:
            now = next((states for at, states in reversed(self._marks) if at == place), None)
            if now is None:
                now = self._streams.initial
                assert place == (0, 0), f"no place {place} in {[at for at, _ in self._marks]}"
            start_epoch, start = self._epoch_start
            state["generators"] = dict(now)
            state["epoch_generators"] = dict(start if place[1] and start_epoch == place[0] else now)
        return state | self._more_state(place)

    def position(self, state: Mapping[str, Any], *, manifest: bytes | None = None) -> Place:  # noqa: ARG002
        if "kind" not in state and "num_batches" in state and not state.get("batch"):
            # Of an earlier release, which drew the order within an epoch differently.
            return int(state["epoch"]), 0
        if state.get("version") != CURSOR_VERSION or state.get("kind") != self.kind:
            was = state.get("kind") or "parquet files, or made by an earlier release"
            raise InputError(
                f"the checkpoint was made with other data: its data was {was}, it is now {self.kind}. Restore what"
                " changed, or start a new run"
            )
        now = {**self._facts(), "fingerprint": self.fingerprint}
        changes = [
            f"{name} was {state.get(name)}, is now {value}"
            for name, value in now.items()
            if state.get(name) != value
        ]
        if changes:
            raise cursor_error(changes)
        epoch, batch = int(state["epoch"]), int(state["batch"])
        self._saved, self._at = dict(state), None  # the next batch does not follow the last one
        place = self.locate(epoch, batch)
        self._marks.append((place, {**self._streams.initial, **state.get("generators", {})}))
        self._epoch_start = (epoch, {**self._streams.initial, **state.get("epoch_generators", {})})
        return epoch, batch

    def rows_before(self, *, epoch: int, batch: int) -> int | None:  # noqa: ARG002
        return None

    def signature(self) -> dict[str, Any]:
        """Must be equal in all processes."""
        return {
            **self._facts(),
            "batches_per_epoch": self.batches_per_epoch,
            "fingerprint": self.fingerprint,
            "generators": repr(self._streams.initial),
        }

    def close(self) -> None: ...

    def _check_stop(self) -> None:
        if self._stop is not None and self._stop.reason is not None:
            raise_stop(self._stop)


def rows_over_all(batch: object) -> int | None:
    """Rows of a batch that several processes share; None if its rows are this process's alone."""
    found = (source.global_rows_of(batch) for source in list(_open_sources))
    return next((rows for rows in found if rows is not None), None)


_open_sources: "weakref.WeakSet[OwnSource]" = weakref.WeakSet()


def find_fingerprint(data: object) -> str | None:
    """The data's `fingerprint()`, or its `__fingerprint__`, as text or a method."""
    for name in ("fingerprint", "__fingerprint__"):
        found = getattr(data, name, None)
        if callable(found):
            found = found()
        if isinstance(found, str | int) and not isinstance(found, bool):
            return str(found)
        if found is not None:
            raise InputError(f"{name} of the data is {found!r:.60}, expected text")
    return None


def share_of(length: int, rank: int, world_size: int) -> slice:
    """The rows of one process, as even as possible; may be empty."""
    return slice(length * rank // world_size, length * (rank + 1) // world_size)


def check_batch_size(batch_size: int, world_size: int) -> None:
    if batch_size % world_size:
        raise InputError(
            f"batch_size={batch_size} is not a multiple of world_size={world_size}. Every rank needs the same number"
            f" of rows: choose a batch_size that is a multiple of {world_size}"
        )
