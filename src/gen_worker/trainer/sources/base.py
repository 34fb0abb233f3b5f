"""What all kinds of own data share: where a pass stands, its random streams, what a checkpoint keeps of them.

Batches are fetched in the loop's thread, one at a time: nothing is read ahead here, so what the data drew and where it
stands belong to the last batch given. (A DataLoader's workers read ahead; their random numbers follow from the number
of the batch.)
"""

import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gen_worker.errors import InputError
from gen_worker.trainer.contracts import StopSignal
from gen_worker.trainer.job_lifecycle import raise_stop
from gen_worker.trainer.sources.random_streams import DataStreams, States

CURSOR_VERSION = 1
END = object()

Place = tuple[int, int]  # epoch and batch


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """How to go through the data. Held-out data is gone through in the same way each time."""

    batch_size: int = 32
    shuffle: bool = False
    drop_last: bool = False
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    is_held_out: bool = False


class OwnSource:
    """A `BatchSource` over somebody's data. `close` ends what it started; it can be opened again after it.

    A kind of data gives `_begin` (an iterator at a place), `_facts` (what a place depends on) and `_inside_at`.
    """

    kind = "data"
    batches_per_epoch: int | None = None
    fingerprint: str | None = None
    note = ""  # worth a line at the start of a run

    def __init__(self, options: SourceOptions, streams: DataStreams) -> None:
        self._options = options
        self._streams = streams
        self._stop: StopSignal | None = None
        self._tell: Callable[[str], object] = lambda _message: None
        self._lengths: dict[int, int] = {}  # of epochs that only their end could tell
        # The newest places and what the owned generators held there. The last but one is that of the last committed
        # step while a batch is taken and not yet trained on.
        self._marks: deque[tuple[Place, States]] = deque([((0, 0), streams.initial)], maxlen=2)
        self._epoch_start: tuple[int, States] = (0, streams.initial)
        self._saved: Mapping[str, Any] = {}  # the cursor of the checkpoint that is resumed
        self._at: Place | None = None
        self._is_fetching = False
        self._global_rows: dict[int, int] = {}  # of batches that the processes share, by number
        self._newest: tuple[Any, int] | None = None  # the last of them that was given, with its rows
        _open_sources.add(self)

    def attach(self, *, tell: Callable[[str], object], stop: StopSignal) -> None:
        """Whom to tell what is worth a line, and whom to ask whether to go on."""
        self._tell, self._stop = tell, stop
        if self.note:
            tell(self.note)

    # What a kind of data says.

    def _begin(self, epoch: int, batch: int) -> Iterator[Any]:
        """The batches of one pass from that place on. Called inside `streams.apart`."""
        raise NotImplementedError

    def _facts(self) -> dict[str, Any]:
        """What must not change between a checkpoint and its resume."""
        raise NotImplementedError

    def _inside_at(self, start: States, now: States) -> States:  # noqa: ARG002
        """Of the owned generators: as they were at the epoch's start, or as they were at the place itself."""
        return now

    def _end(self, iterator: Iterator[Any], *, is_whole: bool) -> None:
        """A pass is over, wholly or not."""

    def _more_state(self, place: Place) -> dict[str, Any]:  # noqa: ARG002
        """More fields of the cursor."""
        return {}

    # What the loop asks.

    def batches(self, *, epoch: int = 0, batch: int = 0) -> Generator[Any, None, None]:
        """Endless, where the length of an epoch is known; else one pass, so that its end is noticed."""
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
        with self._streams.apart():
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
            raise InputError(f"the data gave no batch in epoch {epoch}: there is nothing to train on")
        self._lengths[epoch] = number
        self._take_place(epoch, number)

    def _fetch(self, iterator: Iterator[Any], epoch: int, number: int) -> Any:
        per_epoch = self.batches_per_epoch
        self._is_fetching = True
        with self._streams.apart():
            self._streams.seed(epoch, number, self._stream_rank)
            item = next(iterator, END)
            if per_epoch is not None and (item is END) != (number == per_epoch):
                self._refuse_length(f"ended after {number} batches")
            # To the very end: what the end draws belongs to this epoch.
            if number + 1 == per_epoch and next(iterator, END) is not END:
                self._refuse_length(f"has more than {per_epoch} batches")
        self._is_fetching = False
        if item is not END:
            self._take_place(epoch, number + 1)
            rows = self._global_rows.pop(number, None)
            self._newest = None if rows is None else (item, rows)
        return item

    def global_rows_of(self, batch: object) -> int | None:
        """The rows of the batch that was given last over all processes; None of any other."""
        return self._newest[1] if self._newest is not None and self._newest[0] is batch else None

    @property
    def _stream_rank(self) -> int:
        """Processes that go through the same data must draw the same order from it."""
        return 0

    def _refuse_length(self, found: str) -> None:
        raise InputError(
            f"the data says that an epoch has {self.batches_per_epoch} batches, and it {found}: correct its `__len__`,"
            " or leave `__len__` out"
        )

    def _take_place(self, epoch: int, batch: int) -> None:
        place = self.locate(epoch, batch)
        if self._at != place:
            self._at = place
            self._marks.append((place, self._streams.inside))

    def _jump(self, epoch: int, batch: int) -> None:
        """To a place that the data has not just come to."""
        states = self._streams.initial
        start, now = states, states
        saved = self._saved
        if saved and (saved["epoch"], saved["batch"]) == (epoch, batch):
            start, now = saved.get("epoch_generators", {}), saved.get("generators", {})
        elif self._streams.names and (epoch or batch) and not self._options.is_held_out:
            raise InputError(
                f"the checkpoint does not hold the state of {', '.join(self._streams.names)} at epoch {epoch}, batch"
                f" {batch}: start a new run"
            )
        self._epoch_start = (epoch, {**states, **start})
        self._streams.set_inside(self._inside_at(start, now))

    def locate(self, epoch: int, batch: int) -> Place:
        """The same place with the epoch that it is in, as far as the ends of epochs are known."""
        while True:
            length = self._lengths.get(epoch) if self.batches_per_epoch is None else self.batches_per_epoch
            if not length or batch < length:
                return epoch, batch
            epoch, batch = epoch + 1, batch - length

    def state(self, *, epoch: int, batch: int) -> dict[str, Any]:
        """The cursor, with what the data's own generators held there."""
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
            return int(
                state["epoch"]
            ), 0  # of an earlier release, which drew the order within an epoch differently
        if state.get("version") != CURSOR_VERSION or state.get("kind") != self.kind:
            was = state.get("kind") or "parquet files, or made by an earlier release"
            raise InputError(
                f"the checkpoint is at a place in other data: its data was {was}, it is now {self.kind};"
                " put back what changed, or start a new run"
            )
        now = {**self._facts(), "fingerprint": self.fingerprint}
        changes = [
            f"  - {name} was {state.get(name)}, is now {value}"
            for name, value in now.items()
            if state.get(name) != value
        ]
        if changes:
            raise InputError(
                "\n".join(
                    [
                        "the data cursor does not fit this dataset: its position would name other rows",
                        *changes,
                        "  put back what changed; for other data, start a new run",
                    ]
                )
            )
        epoch, batch = int(state["epoch"]), int(state["batch"])
        self._saved, self._at = dict(state), None  # what comes next does not follow what came last
        place = self.locate(epoch, batch)
        self._marks.append((place, {**self._streams.initial, **state.get("generators", {})}))
        self._epoch_start = (epoch, {**self._streams.initial, **state.get("epoch_generators", {})})
        return epoch, batch

    def rows_before(self, *, epoch: int, batch: int) -> int | None:  # noqa: ARG002
        return None

    def signature(self) -> dict[str, Any]:
        """What must be the same in all processes."""
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
    """Of a batch of own data that several processes share; None where its rows are this process's alone."""
    found = (source.global_rows_of(batch) for source in list(_open_sources))
    return next((rows for rows in found if rows is not None), None)


_open_sources: "weakref.WeakSet[OwnSource]" = weakref.WeakSet()


def find_fingerprint(data: object) -> str | None:
    """What the data says of its content: `fingerprint()`, or a `__fingerprint__` that is text or gives it."""
    for name in ("fingerprint", "__fingerprint__"):
        found = getattr(data, name, None)
        if callable(found):
            found = found()
        if isinstance(found, str | int) and not isinstance(found, bool):
            return str(found)
        if found is not None:
            raise InputError(f"{name} of the data gave {found!r:.60}, expected text")
    return None


def share_of(length: int, rank: int, world_size: int) -> slice:
    """What one process takes of so many rows: as even as it can be; may be nothing."""
    return slice(length * rank // world_size, length * (rank + 1) // world_size)


def check_batch_size(batch_size: int, world_size: int) -> None:
    if batch_size % world_size:
        raise InputError(
            f"world_size={world_size} does not divide batch_size={batch_size}; every rank must get "
            f"the same number of rows: choose a batch_size that is a multiple of {world_size}"
        )
