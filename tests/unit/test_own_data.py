"""People's own data: what an object gives, in which order, and that a resume goes on with the very next batch."""

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, WeightedRandomSampler

from gen_worker.errors import InputError, PluginError, SpecError
from gen_worker.trainer.contracts import StopSignal
from gen_worker.trainer.sources.base import OwnSource, SourceOptions
from gen_worker.trainer.sources.opening import find_source, load_source, open_own_data

NUM_ROWS = 23


class Rows(Dataset[torch.Tensor]):
    """Each row has its number and what the three global generators gave."""

    def __init__(self, num_rows: int = NUM_ROWS) -> None:
        self.num_rows = num_rows
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read.append(index)
        return torch.tensor([float(index), torch.rand(()).item(), random.random(), np.random.rand()])


class OwnRandom(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.augment = {"rng": np.random.default_rng(3), "old": np.random.RandomState(4)}
        self.python, self.torch = random.Random(5), torch.Generator().manual_seed(6)

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [self.augment["rng"].random(), self.augment["old"].rand(), self.python.random()]
        return torch.tensor([float(index), *drawn, torch.rand((), generator=self.torch).item()])


class Plain:
    """No torch, no base class."""

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": np.full(2, index), "noise": np.random.rand(), "name": f"row {index}"}


class Stream(IterableDataset[torch.Tensor]):
    """Rows without a length, through a shuffle buffer that draws from the global generator."""

    def __init__(self, num_rows: int = 11) -> None:
        self.num_rows = num_rows

    def __iter__(self) -> Iterator[torch.Tensor]:
        buffer: list[int] = []
        for number in range(self.num_rows):
            buffer.append(number)
            if len(buffer) == 4:
                yield torch.tensor([buffer.pop(random.randrange(4)), torch.rand(()).item()])
        yield from (torch.tensor([number, 0.0]) for number in buffer)


class Batches:
    """An iterable that is no Dataset: what it gives are batches."""

    def __init__(self, num_batches: int = 5) -> None:
        self.num_batches = num_batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([number, torch.rand(()).item()]) for number in range(self.num_batches))


class Stateful(IterableDataset[torch.Tensor]):
    """Keeps its place, as torchdata's loaders and datasets of Hugging Face do, and counts what it reads."""

    def __init__(self) -> None:
        self.place, self.num_read = 0, 0
        self.resumed: int | None = None

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.place, self.resumed = self.resumed or 0, None
        while self.place < 11:
            self.place += 1
            self.num_read += 1
            yield torch.tensor([self.place, torch.rand(()).item()])

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "note": torch.tensor([self.place])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.resumed = state["place"]


class BeginsAnew(Stateful):
    """Its state at an epoch's end begins the next epoch."""

    is_over = False

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.is_over = False
        yield from super().__iter__()
        self.is_over = True

    def __len__(self) -> int:
        return 11

    def state_dict(self) -> dict[str, Any]:
        return {"place": 0 if self.is_over else self.place}


class BufferShuffledExamplesIterable:
    """Named as in `datasets` of Hugging Face, which is how it is known."""

    ex_iterable = object()


class MappedExamplesIterable:
    ex_iterable = BufferShuffledExamplesIterable()


class ShuffledInBuffer(Stream):
    """As a shuffled IterableDataset of Hugging Face: its state has no buffer."""

    _ex_iterable = MappedExamplesIterable()
    num_skipped = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        first, self.num_skipped = self.num_skipped, 0
        rest = Stream(self.num_rows - first)
        return (row + torch.tensor([first, 0]) for row in rest)

    def state_dict(self) -> dict[str, int]:
        return {"num_read": 4}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_skipped = state["num_read"]


class StatefulLoader(DataLoader[torch.Tensor]):
    """As torchdata has it: a DataLoader with a state."""

    num_given = 0
    _resumed = 0

    def __iter__(self) -> Any:
        first, self._resumed = self._resumed, 0
        for number, batch in enumerate(super().__iter__()):
            self.num_given = number + 1
            if number >= first:
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"num_given": self.num_given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._resumed = state["num_given"] % len(self)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def weighted() -> WeightedRandomSampler:
    return WeightedRandomSampler(list(range(1, 1 + NUM_ROWS)), 30, generator=generator())


KINDS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "rows": (Rows, {"batch_size": 5}),
    "rows shuffled": (Rows, {"batch_size": 5, "shuffle": True}),
    "rows without the last": (Rows, {"batch_size": 5, "shuffle": True, "drop_last": True}),
    "rows with generators": (OwnRandom, {"batch_size": 5, "shuffle": True}),
    "plain rows": (Plain, {"batch_size": 5, "shuffle": True}),
    "iterable rows": (Stream, {"batch_size": 4}),
    "iterable rows without the last": (Stream, {"batch_size": 4, "drop_last": True}),
    "stateful rows": (Stateful, {"batch_size": 4}),
    "stateful rows that begin anew": (BeginsAnew, {"batch_size": 4}),
    "stateful rows without their buffer": (ShuffledInBuffer, {"batch_size": 4}),
    "stateful loader of rows without their buffer": (
        lambda: StatefulLoader(ShuffledInBuffer(), batch_size=4),
        {},
    ),
    "batches": (Batches, {}),
    "loader": (lambda: DataLoader(Rows(), batch_size=5), {}),
    "loader shuffled": (lambda: DataLoader(Rows(), batch_size=5, shuffle=True), {}),
    "loader with a generator": (
        lambda: DataLoader(Rows(), batch_size=5, shuffle=True, generator=generator()),
        {},
    ),
    "loader with generators": (lambda: DataLoader(OwnRandom(), batch_size=5, shuffle=True), {}),
    "loader with a sampler": (lambda: DataLoader(Rows(), batch_size=5, sampler=weighted()), {}),
    "loader of single rows": (lambda: DataLoader(Rows(), batch_size=None, shuffle=True), {}),
    "loader of an iterable": (lambda: DataLoader(Stream(), batch_size=3), {}),
    "loader with a state": (lambda: StatefulLoader(range(NUM_ROWS), batch_size=5), {}),
}
# With worker processes: slower, so they are resumed at fewer places.
WORKER_KINDS: dict[str, Callable[[], Any]] = {
    "two workers": lambda: DataLoader(
        Rows(), batch_size=5, shuffle=True, num_workers=2, generator=generator()
    ),
    "persistent workers": lambda: DataLoader(
        Rows(), batch_size=5, shuffle=True, num_workers=2, persistent_workers=True, generator=generator()
    ),
    "persistent worker of an iterable": lambda: DataLoader(
        Stream(), batch_size=3, num_workers=1, persistent_workers=True
    ),
}


def open_(make: Callable[[], Any], **options: Any) -> OwnSource:
    return open_own_data(make(), SourceOptions(**{"seed": 3, **options}))


def as_list(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: as_list(value) for name, value in batch.items()}
    return batch.tolist() if hasattr(batch, "tolist") else batch


def batches_of(source: OwnSource, epoch: int = 0, batch: int = 0) -> Iterator[Any]:
    """Without end, as a loop goes through them: where the length is not known, one pass after the other."""
    while True:
        iterator = source.batches(epoch=epoch, batch=batch)
        try:
            for item in iterator:
                batch += 1
                yield item
        finally:
            iterator.close()
        epoch, batch = source.locate(epoch, batch)


def go_through(source: OwnSource, num_batches: int) -> tuple[list[Any], list[dict[str, Any]]]:
    """What it gives, and its cursor before each batch and at the end, as a loop would save it."""
    place = (0, 0)
    batches, cursors = [], [source.state(epoch=0, batch=0)]
    iterator = batches_of(source)
    for batch in islice(iterator, num_batches):
        place = source.locate(place[0], place[1] + 1)
        batches.append(as_list(batch))
        random.random(), np.random.rand(3), torch.rand(2)  # training draws, too
        cursors.append(source.state(epoch=place[0], batch=place[1]))
    iterator.close()  # type: ignore[attr-defined]
    source.close()
    return batches, cursors


def check_resumes(make: Callable[[], Any], options: dict[str, Any], num_batches: int, every: int = 1) -> None:
    whole, cursors = go_through(open_(make, **options), num_batches)
    for at in range(0, num_batches, every):
        source = open_(make, **options)
        epoch, batch = source.position(cursors[at])
        iterator = batches_of(source, epoch, batch)
        rest = [as_list(item) for item in islice(iterator, num_batches - at)]
        iterator.close()  # type: ignore[attr-defined]
        source.close()
        assert rest == whole[at:], f"resumed at batch {at}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_at_any_batch_goes_on_to_the_bit(kind: str) -> None:
    make, options = KINDS[kind]
    check_resumes(make, options, num_batches=17)


@pytest.mark.parametrize("kind", WORKER_KINDS)
def test_a_resume_of_a_loader_with_worker_processes_goes_on_to_the_bit(kind: str) -> None:
    check_resumes(WORKER_KINDS[kind], {}, num_batches=9, every=3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_place_that_was_resumed_and_not_left_is_saved_as_it_was(kind: str) -> None:
    make, options = KINDS[kind]
    _, cursors = go_through(open_(make, **options), 7)
    source = open_(make, **options)
    epoch, batch = source.position(cursors[7])
    assert repr(source.state(epoch=epoch, batch=batch)) == repr(cursors[7])


@pytest.mark.parametrize("kind", ["rows with generators", "loader with generators", "stateful rows"])
def test_a_batch_that_was_taken_and_not_trained_on_is_given_again(kind: str) -> None:
    """A callback fails between the batch and its step: the step before it is what is saved."""
    make, options = KINDS[kind]
    whole, _ = go_through(open_(make, **options), 12)
    source = open_(make, **options)
    iterator = batches_of(source)
    taken = [as_list(next(iterator)) for _ in range(7)]
    place = source.locate(0, 6)
    cursor = source.state(epoch=place[0], batch=place[1])
    iterator.close()  # type: ignore[attr-defined]
    again = open_(make, **options)
    epoch, batch = again.position(cursor)
    rest = [as_list(item) for item in islice(batches_of(again, epoch, batch), 6)]
    assert taken[:6] + rest == whole


@pytest.mark.parametrize(
    "wrap", [lambda rows: rows, lambda rows: DataLoader(rows, batch_size=5, shuffle=True)]
)
def test_no_row_before_the_place_of_a_resume_is_read(wrap: Callable[[Rows], Any]) -> None:
    rows = Rows()
    size = {"batch_size": 5} if wrap(rows) is rows else {}
    source = open_own_data(wrap(rows), SourceOptions(seed=3, **size))
    iterator = source.batches(epoch=6, batch=3)
    next(iterator)
    assert len(rows.read) == 5


def test_many_rows_are_asked_for_at_once_where_the_dataset_can_give_them() -> None:
    asked = []

    class Many(Rows):
        def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
            asked.append(indices)
            return [torch.tensor(index) for index in indices]

    next(open_(Many, batch_size=4).batches())
    assert asked == [[0, 1, 2, 3]]


def test_a_state_is_used_instead_of_reading_again() -> None:
    _, cursors = go_through(open_(Stateful, batch_size=4), 2)
    data = Stateful()
    source = open_own_data(data, SourceOptions(seed=3, batch_size=4))
    assert source.position(cursors[2]) == (0, 2)
    next(source.batches(epoch=0, batch=2))
    assert data.num_read == 3


def test_reading_again_is_said_and_keeps_one_batch_in_memory() -> None:
    class Large(Batches):
        def __iter__(self) -> Iterator[torch.Tensor]:
            for _ in range(500):
                batch = torch.zeros(1000)
                alive.append(weakref.ref(batch))
                gc.collect(0)
                assert sum(ref() is not None for ref in alive[-10:]) <= 2
                yield batch
                del batch

    alive: list[weakref.ref[torch.Tensor]] = []
    said: list[str] = []
    source = open_(Large)
    source.attach(log=said.append, stop=StopSignal())
    next(source.batches(epoch=0, batch=490))
    assert said == [
        "the data cannot seek: reading 490 batches of epoch 0 again, up to batch 490",
    ]
    assert sum(ref() is not None for ref in alive) <= 1


def test_a_stop_ends_the_reading_again() -> None:
    from gen_worker.errors import TrainingCanceled

    stop = StopSignal()
    stop.request("enough")
    source = open_(Batches)
    source.attach(log=lambda _message: None, stop=stop)
    with pytest.raises(TrainingCanceled, match="enough"):
        next(source.batches(epoch=0, batch=2))


@pytest.mark.parametrize("kind", [*KINDS, "two workers"])
def test_training_and_its_callers_generators_do_not_notice_the_data(kind: str) -> None:
    make, options = KINDS.get(kind) or (WORKER_KINDS[kind], {})
    data = make()
    before = random.getstate(), repr(np.random.get_state()), torch.get_rng_state()
    own = getattr(data, "generator", None)
    own_before = None if own is None else own.get_state()
    source = open_own_data(data, SourceOptions(seed=3, **options))
    iterator = source.batches()
    for _ in islice(iterator, 7):
        pass
    iterator.close()
    source.close()
    assert (random.getstate(), repr(np.random.get_state())) == before[:2]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert own_before is None or torch.equal(own.get_state(), own_before)


@pytest.mark.parametrize("kind", [*KINDS, "persistent workers"])
def test_every_pass_over_held_out_data_is_the_same_and_one_pass_long(kind: str) -> None:
    make, options = KINDS.get(kind) or (WORKER_KINDS[kind], {})
    source = open_own_data(make(), SourceOptions(**{**options, "shuffle": False}, is_held_out=True))
    first, second = ([as_list(batch) for batch in source.batches()] for _ in range(2))
    source.close()
    assert first == second
    assert source.batches_per_epoch in (None, len(first))


def test_rows_of_all_epochs_are_whole_and_in_a_new_order_each() -> None:
    source = open_(Rows, batch_size=5, shuffle=True)
    assert source.batches_per_epoch == 5
    assert source.rows_before(epoch=1, batch=2) == NUM_ROWS + 10
    numbers = [row[0] for batch in islice(source.batches(), 10) for row in batch.tolist()]
    one, other = numbers[:NUM_ROWS], numbers[NUM_ROWS:]
    assert sorted(one) == sorted(other) == list(range(NUM_ROWS))
    assert one != other


def test_a_loader_with_a_generator_has_the_order_that_it_has_without_us() -> None:
    def make() -> DataLoader[torch.Tensor]:
        return DataLoader(Rows(), batch_size=5, shuffle=True, generator=generator())

    plain = make()
    expected = [batch[:, 0].tolist() for _ in range(3) for batch in plain]
    assert [batch[:, 0].tolist() for batch in islice(open_(make).batches(), 15)] == expected


def test_every_row_of_an_epoch_can_be_in_the_batch_that_is_dropped() -> None:
    source = open_(Rows, batch_size=5, shuffle=True, drop_last=True)
    seen = {row[0] for batch in islice(source.batches(), 8 * 4) for row in batch.tolist()}
    assert len(seen) == NUM_ROWS


@pytest.mark.parametrize("kind", ["rows shuffled", "loader shuffled", "iterable rows", "two workers"])
def test_the_processes_share_each_batch_and_lose_no_row(kind: str) -> None:
    make, options = KINDS.get(kind) or (WORKER_KINDS[kind], {})
    if "batch_size" in options:
        options = {**options, "batch_size": 4}
    else:
        make = lambda: DataLoader(Rows(20), batch_size=4, shuffle=True, generator=generator())  # noqa: E731
    whole = open_(make, **options)
    parts = [open_(make, **options, rank=rank, world_size=2) for rank in range(2)]
    assert parts[0].signature() == parts[1].signature()
    iterators: list[Any] = [batches_of(source) for source in (whole, *parts)]
    for _ in range(8):
        all_rows, *shares = (next(iterator)[:, 0].tolist() for iterator in iterators)
        assert [row for share in shares for row in share] == all_rows
    for iterator in iterators:
        iterator.close()


def test_a_process_without_a_share_of_the_last_batch_gets_one_without_rows() -> None:
    source = open_(Plain, batch_size=11, rank=0, world_size=11)
    *_, last = islice(source.batches(), 3)
    assert {name: len(value) for name, value in last.items()} == {"x": 0, "noise": 0, "name": 0}
    assert last["x"].shape == (0, 2)


def test_batches_of_an_iterable_are_dealt_to_the_processes_in_turn() -> None:
    given = [
        [batch[0].item() for batch in islice(batches_of(open_(Batches, rank=rank, world_size=2)), 4)]
        for rank in range(2)
    ]
    assert given == [[0, 2, 0, 2], [1, 3, 1, 3]]


def test_data_that_can_cut_itself_gives_each_process_its_own() -> None:
    class Cut(Batches):
        def __init__(self, first: int = 0, step: int = 1) -> None:
            self.first, self.step = first, step

        def __iter__(self) -> Iterator[int]:
            return iter(range(self.first, 6, self.step))

        def shard(self, rank: int, world_size: int) -> "Cut":
            return Cut(rank, world_size)

    class Hub(Cut):
        shard = lambda self, num_shards, index, contiguous=True: Cut(index, num_shards)  # type: ignore[assignment]  # noqa: E731

    class Other(Cut):
        def shard(self, part: int) -> "Cut":  # type: ignore[override]
            return self

    for kind in (Cut, Hub):
        assert list(islice(open_(kind, rank=1, world_size=2).batches(), 3)) == [1, 3, 5]
    with pytest.raises(InputError, match="the shard of process 1 ended after 3 batches of epoch 0"):
        list(islice(open_(Cut, rank=1, world_size=2).batches(), 4))
    with pytest.raises(InputError, match=r"takes \(part\), expected \(rank, world_size\)"):
        open_(Other, rank=1, world_size=2)


def test_a_distributed_sampler_is_used_as_it_is_and_hears_of_each_epoch() -> None:
    def make(rank: int, num_replicas: int = 2) -> DataLoader[torch.Tensor]:
        rows = Rows(20)
        sampler = DistributedSampler(rows, num_replicas=num_replicas, rank=rank, seed=1)
        return DataLoader(rows, batch_size=5, sampler=sampler)

    shares = []
    for rank in range(2):
        source = open_own_data(make(rank), SourceOptions(rank=rank, world_size=2))
        shares.append([row[0].item() for batch in islice(source.batches(), 4) for row in batch])
    assert sorted(shares[0][:10] + shares[1][:10]) == list(range(20))
    assert shares[0][:10] != shares[0][10:]
    with pytest.raises(InputError, match="is for process 1 of 2, but this is process 0 of 2"):
        open_own_data(make(1), SourceOptions(rank=0, world_size=2))
    with pytest.raises(InputError, match="is for process 0 of 2, but this is process 0 of 1"):
        open_own_data(make(0), SourceOptions())


def test_without_a_length_an_epoch_ends_where_the_data_does() -> None:
    source = open_(Stream, batch_size=4)
    assert source.batches_per_epoch is None
    assert len(list(source.batches())) == 3
    assert source.locate(0, 3) == (1, 0)
    assert source.locate(0, 4) == (1, 1)
    assert len(list(source.batches(epoch=2, batch=1))) == 2


class Lies(Batches):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def __len__(self) -> int:
        return self.length


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Lies(4), "is 4 batches per epoch, but it has more than 4"),
        (lambda: Lies(6), "is 6 batches per epoch, but it ended after 5"),
        (lambda: Batches(0), "the data has no batch in epoch 0"),
    ],
)
def test_data_that_is_not_what_it_says_is_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        list(islice(open_(make).batches(), 8))


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (lambda: 5, {}, "expected a map-style or iterable Dataset, a DataLoader"),
        (lambda: {"a": 1}, {}, "expected a map-style or iterable Dataset, a DataLoader"),
        (lambda: iter([1]), {}, "can be iterated only once"),
        (Batches, {"shuffle": True}, "shuffle is True, but the data is an iterable"),
        (Batches, {"batch_size": 8}, "batch_size is 8, but the data is an iterable"),
        (Stream, {"shuffle": True}, "the data is an IterableDataset"),
        (KINDS["loader"][0], {"batch_size": 8}, "batch_size is 8, but the data is a DataLoader"),
        (KINDS["loader"][0], {"drop_last": True}, "drop_last is True, but the data is a DataLoader"),
        (Rows, {"batch_size": 3, "world_size": 2}, "choose a batch_size that is a multiple of 2"),
        (Rows, {"batch_size": 64, "drop_last": True}, "23 rows are less than one batch of 64 with drop_last"),
        (KINDS["loader"][0], {"world_size": 2}, "is not a multiple of the 2 processes"),
        (KINDS["loader of an iterable"][0], {"world_size": 2}, "cannot be split over 2 processes"),
        (
            lambda: DataLoader(OwnRandom(), num_workers=1),
            {},
            "the dataset has its own random generator .*which cannot be resumed",
        ),
        (lambda: DataLoader(Rows(), num_workers=1, in_order=False), {}, "in_order=False"),
    ],
)
def test_what_cannot_be_obeyed_is_refused(
    make: Callable[[], Any], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        open_(make, **options)


def test_a_cursor_of_other_data_or_settings_is_refused() -> None:
    cursor = open_(Rows, batch_size=5, shuffle=True).state(epoch=0, batch=2)
    with pytest.raises(InputError, match="batch_size was 5, is now 4"):
        open_(Rows, batch_size=4, shuffle=True).position(cursor)
    with pytest.raises(InputError, match="num_rows was 23, is now 24"):
        open_(lambda: Rows(24), batch_size=5, shuffle=True).position(cursor)
    with pytest.raises(InputError, match="its data was rows, it is now DataLoader"):
        open_(KINDS["loader"][0]).position(cursor)
    older = {"version": 1, "epoch": 2, "batch": 0, "num_batches": 5}
    assert open_(KINDS["loader"][0]).position(older) == (2, 0)
    with pytest.raises(InputError, match="made by an earlier release"):
        open_(KINDS["loader"][0]).position({**older, "batch": 1})


def test_a_fingerprint_tells_that_the_data_changed() -> None:
    class Versioned(Rows):
        version = "one"

        def fingerprint(self) -> str:
            return self.version

    class Newer(Versioned):
        version = "two"

    cursor = open_(Versioned).state(epoch=0, batch=0)
    with pytest.raises(InputError, match="fingerprint was one, is now two"):
        open_(Newer).position(cursor)


def test_rows_become_batches_as_torch_does_it_and_without_torch_as_numpy_would() -> None:
    batch = next(open_(Plain, batch_size=3).batches())
    assert batch["x"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert batch["noise"].dtype == np.float64
    assert batch["name"] == ["row 0", "row 1", "row 2"]
    pairs = open_(lambda: [(1, 2.0), (3, 4.0)], batch_size=2)
    assert [column.tolist() for column in next(pairs.batches())] == [[1, 3], [2.0, 4.0]]
    tensors = open_(lambda: [(torch.tensor(1), 2.0), (torch.tensor(3), 4.0)], batch_size=2)
    assert [column.tolist() for column in next(tensors.batches())] == [[1, 3], [2.0, 4.0]]

    class Own(Rows):
        collate_fn = staticmethod(len)

    assert next(open_(Own, batch_size=3).batches()) == 3


MODULE = """
class Rows:
    def __init__(self, size, name="x"):
        self.size = size
    def __len__(self):
        return self.size
    def __getitem__(self, index):
        return index

def make(size):
    return Rows(size)

def split(size):
    import random, numpy, torch
    return [random.random(), numpy.random.rand(), torch.rand(()).item()]

rows = Rows(3)
"""


def test_a_source_is_named_by_module_and_symbol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_rows.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert len(load_source("my_own_rows:Rows", {"size": 4})) == 4
    assert len(load_source("my_own_rows:make", {"size": 5})) == 5
    assert len(load_source("my_own_rows:rows", {})) == 3
    drawn = [load_source("my_own_rows:split", {"size": 1}, seed=seed) for seed in (1, 2, 1)]
    assert drawn[0] == drawn[2] != drawn[1]
    for ref, args, said in [
        ("my_own_rows:rows", {"size": 1}, "dataset.args: found size, but my_own_rows:rows is an object"),
        ("my_own_rows:Rows", {"sise": 1}, r"dataset.args: .*cannot be called with \(sise\)"),
        ("my_own_rows:Rowz", {}, "dataset.source: .*did you mean 'Rows'"),
    ]:
        with pytest.raises(PluginError, match=said):
            find_source(ref, args)


def test_settings_that_the_data_would_pass_over_are_refused_in_a_notebook(tmp_path: Path) -> None:
    from test_trainer import BATCHES, make

    for config, said in [
        ({"batch_size": 8}, "batch_size: found 8, but the data is already batches"),
        ({"shuffle": True}, "shuffle: found true, but the data is already batches"),
        ({"shuffle": True, "train_data": DataLoader(Rows())}, "the data is a DataLoader"),
        ({"batch_size": 8, "train_data": DataLoader(Rows())}, "batch_size: found 8"),
    ]:
        with pytest.raises(SpecError, match=said):
            make(tmp_path, **config)
    make(tmp_path, batch_size=8, train_data=BATCHES, validation_data=Rows())


def test_the_import_trial_loads_the_source_and_checks_its_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gen_worker.launcher.import_check import find_import_faults

    trainer = "from test_trainer import Drift\n"
    (tmp_path / "my_trial_rows.py").write_text(trainer + MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    good = {"source": "my_trial_rows:Rows", "args": {"size": 3}}
    job = {"run_id": "r", "trainer": "my_trial_rows:Drift", "max_steps": 3, "validate_every": 1}
    assert find_import_faults({**job, "dataset": good, "validation": {"dataset": good}}) == []
    bad = {"source": "my_trial_rows:Rows", "args": {}}
    faults = find_import_faults(
        {**job, "dataset": {"source": "my_trial_rows:rowz"}, "validation": {"dataset": bad}}
    )
    assert [fault.partition(":")[0] for fault in faults] == ["dataset.source", "validation.dataset.args"]


def test_a_notebooks_run_ends_its_loaders_workers_and_can_go_on(tmp_path: Path) -> None:
    import psutil
    from test_trainer import Drift, make

    class Sums(Drift):
        def prepare_batch(self, raw_batch: Any, state: Any, ctx: Any) -> Any:
            return raw_batch[:, 0].numpy()

    loader = WORKER_KINDS["persistent workers"]()
    before = set(psutil.Process().children(recursive=True))
    data = {"plugin": Sums, "train_data": loader, "validation_data": loader, "checkpoint_every": 4}
    straight = make(tmp_path / "straight", **data, max_steps=9)
    straight.train()
    assert set(psutil.Process().children(recursive=True)) <= before
    make(tmp_path / "parts", **data, max_steps=3).train()
    parts = make(tmp_path / "parts", **data, max_steps=9)
    assert parts.train().step == 9
    assert (parts.model_state["weight"] == straight.model_state["weight"]).all()
    assert parts.validate().rows == NUM_ROWS
    assert set(psutil.Process().children(recursive=True)) <= before


def test_epochs_of_data_without_a_length_are_closed_where_it_ends(tmp_path: Path) -> None:
    """Callbacks, validation and `ctx.epoch` as if the length were known; the same after every resume."""
    from test_trainer import BATCHES, Drift, events, make

    from gen_worker.trainer import Callback, RunHandle

    class Epochs(Callback):
        """Saved and restored with the run, as any callback."""

        def __init__(self) -> None:
            self.seen: list[tuple[str, int, int]] = []

        def on_epoch_begin(self, run: RunHandle) -> None:
            self.seen.append(("begin", run.state.epoch, run.state.step))

        def on_epoch_end(self, run: RunHandle) -> None:
            self.seen.append(("end", run.state.epoch, run.state.step))

    class Sums(Drift):
        def prepare_batch(self, raw_batch: Any, state: Any, ctx: Any) -> Any:
            return np.asarray(raw_batch) + ctx.epoch  # what the epoch is takes part in the weights

    data = {"plugin": Sums, "train_data": Batches(5), "validation_data": BATCHES, "validate_every": "epoch"}
    for every in (1, 3, 5):
        data |= {"metric_every": every, "checkpoint_every": every}
        straight = make(tmp_path / f"straight-{every}", callbacks := Epochs(), **data, epochs=3)
        assert straight.train().step == 15
        assert callbacks.seen == [
            *[("begin", 0, 0), ("end", 1, 5), ("begin", 1, 5)],
            *[("end", 2, 10), ("begin", 2, 10), ("end", 3, 15)],
        ]
        assert [event["step"] for event in events(tmp_path / f"straight-{every}", "validation")] == [
            5,
            10,
            15,
        ]
        parts = tmp_path / f"parts-{every}"
        for max_steps in (2, 5, 6, 10, 15):  # 5, 10 and 15: stopped before the end of the pass was seen
            trainer = make(parts, again := Epochs(), **data, epochs=3, max_steps=max_steps)
            trainer.train()
        trainer = make(parts, again := Epochs(), **data, epochs=3)
        trainer.train()
        assert (trainer.model_state["weight"] == straight.model_state["weight"]).all()
        assert again.seen[-1] == ("end", 3, 15)
        assert make(parts, **data, epochs=3).train().step == 15  # it is finished


def test_more_batches_to_overfit_than_there_are_is_refused(tmp_path: Path) -> None:
    from test_trainer import make

    with pytest.raises(InputError, match="overfit_batches is 9, and a pass over the data has only 5 batches"):
        make(tmp_path, train_data=Batches(5), overfit_batches=9, epochs=2).train()


def test_a_batch_size_that_a_loader_does_not_take_is_told() -> None:
    """A job's own 32 cannot be told from the default, so it cannot be refused."""
    for make, notes in (
        (
            lambda: DataLoader(Rows(), batch_size=5),
            ["the batch_size of the DataLoader is used, 5; that of the job is not (32, the default)"],
        ),
        (lambda: DataLoader(Rows(), batch_size=32), []),
        (lambda: DataLoader(Rows(), batch_size=None), []),
        (Rows, []),
    ):
        told: list[str] = []
        source = open_(make)
        source.attach(log=told.append, stop=StopSignal())
        assert told == notes
        source.close()
