"""The other readers of the feed benchmark: by hand, pyarrow, HF datasets, torchdata. Imports stay in their functions.

A maker gives `open_pass(epoch)`, with the function that uses a batch where counting its rows is not enough.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import feed_data
import feed_readers

Pass = Iterator[Any]


def _files(options: Mapping[str, Any]) -> list[str]:
    return feed_data.parquet_files(quick=options["quick"])


# --- by hand -------------------------------------------------------------------------------------------------------


def hand_pool(options: Mapping[str, Any]) -> Any:
    """The fastest we can write: `decoders` threads decode row groups ahead, in order; batches are slices. It can do
    nothing else: no shuffle, no position, and row groups must be multiples of the batch size."""
    import pyarrow.parquet as pq

    files, batch_size, num_decoders = _files(options), options["batch_size"], options["decoders"]
    groups = [(file, n) for file in files for n in range(pq.ParquetFile(file).num_row_groups)]
    readers = threading.local()

    def decode(place: tuple[str, int]) -> Any:
        file, number = place
        known = readers.__dict__.setdefault("by_file", {})
        if file not in known:
            known[file] = pq.ParquetFile(file)  # one per thread: a reader is not safe to share
        table = known[file].read_row_group(number, use_threads=num_decoders == 1)
        return table.combine_chunks().to_batches()[0]

    def open_pass(_: int) -> Pass:
        with ThreadPoolExecutor(num_decoders) as pool:
            places = iter(groups)
            ahead = deque(pool.submit(decode, place) for place in itertools.islice(places, num_decoders + 1))
            while ahead:
                batch = ahead.popleft().result()
                place = next(places, None)
                if place is not None:
                    ahead.append(pool.submit(decode, place))
                for start in range(0, batch.num_rows, batch_size):
                    yield batch.slice(start, batch_size)

    return open_pass


def hand_mapped(options: Mapping[str, Any]) -> Any:
    """Limit of the later passes: slices of our mapped copy, every value read; nothing but a loop is around them."""
    import pyarrow as pa

    (path,) = feed_data.own_cache_dir(quick=options["quick"]).glob("*.arrow")
    batch_size = options["batch_size"]
    reader = pa.ipc.open_file(pa.memory_map(str(path)))

    def open_pass(_: int) -> Pass:
        for number in range(reader.num_record_batches):
            group = reader.get_batch(number)
            for start in range(0, group.num_rows, batch_size):
                yield group.slice(start, batch_size)

    return open_pass, feed_readers.read_record_batch


# --- peers ---------------------------------------------------------------------------------------------------------


def scanner(options: Mapping[str, Any]) -> Any:
    """pyarrow's dataset scanner, its defaults."""
    import pyarrow.dataset as ds

    dataset = ds.dataset(_files(options))
    return lambda _: iter(dataset.to_batches(batch_size=options["batch_size"]))


def iter_batches(options: Mapping[str, Any]) -> Any:
    """pyarrow ParquetFile.iter_batches, file after file."""
    import pyarrow.parquet as pq

    files = _files(options)

    def open_pass(_: int) -> Pass:
        for file in files:
            yield from pq.ParquetFile(file).iter_batches(batch_size=options["batch_size"])

    return open_pass


def open_hf_streaming(options: Mapping[str, Any]) -> Any:
    import datasets

    dataset = datasets.load_dataset("parquet", data_files=_files(options), split="train", streaming=True)
    return dataset.with_format(options.get("format", "arrow"))


def open_hf_mapped(options: Mapping[str, Any]) -> Any:
    """Its Arrow copy is made by the first call and mapped by the later ones."""
    import datasets

    dataset = datasets.load_dataset(
        "parquet",
        data_files=_files(options),
        split="train",
        cache_dir=str(feed_data.hf_cache_dir(quick=options["quick"])),
    )
    return dataset.with_format(options.get("format", "arrow"))


def hf_streaming(options: Mapping[str, Any]) -> Any:
    """HF datasets, streaming from parquet, Arrow tables; with `shuffle`, its shuffle(10000)."""
    dataset = open_hf_streaming(options)
    if options.get("shuffle"):
        dataset = dataset.shuffle(seed=1, buffer_size=10_000)

    def open_pass(epoch: int) -> Pass:
        dataset.set_epoch(epoch)
        return iter(dataset.iter(batch_size=options["batch_size"]))

    return open_pass


def hf_mapped(options: Mapping[str, Any]) -> Any:
    """HF datasets, memory-mapped, Arrow tables, every value of every batch read."""
    dataset = open_hf_mapped(options)
    return (lambda _: iter(dataset.iter(batch_size=options["batch_size"]))), feed_readers.read_table


def hf_torch(options: Mapping[str, Any]) -> Any:
    """HF datasets with_format("torch"): dicts of tensors, and captions as strings unless they are left out."""
    opened = (open_hf_mapped if options["mapped"] else open_hf_streaming)({**options, "format": "torch"})
    dataset = opened if options["captions"] else opened.select_columns(["x", "label"])
    return (lambda _: iter(dataset.iter(batch_size=options["batch_size"]))), lambda batch: int(
        batch["label"].shape[0]
    )


def hf_first_batch(options: Mapping[str, Any]) -> Callable[[float], Pass]:
    """HF streaming: skip() to a position."""
    dataset = open_hf_streaming(options)

    def open_at(share: float) -> Pass:
        skipped = int(share * feed_data.num_rows(quick=options["quick"]))
        return iter((dataset.skip(skipped) if skipped else dataset).iter(batch_size=options["batch_size"]))

    return open_at


def dataloader_first_batch(options: Mapping[str, Any]) -> Callable[[float], Pass]:
    """torchdata StatefulDataLoader over the hand-written reader, resumed from its own state_dict: it replays."""
    from torch.utils.data import IterableDataset
    from torchdata.stateful_dataloader import StatefulDataLoader

    open_pass = hand_pool({**options, "decoders": 2})
    num_batches = feed_data.num_rows(quick=options["quick"]) // options["batch_size"]

    class Stream(IterableDataset):
        def __iter__(self) -> Pass:
            return open_pass(0)

    def state_at(position: int) -> dict[str, Any]:
        loader = StatefulDataLoader(Stream(), batch_size=None)
        batches = iter(loader)
        for _ in range(position):
            next(batches)
        state: dict[str, Any] = loader.state_dict()
        return state

    state = state_at(int(options["position"] * num_batches))

    def open_at(share: float) -> Pass:
        loader = StatefulDataLoader(Stream(), batch_size=None)
        if share:
            loader.load_state_dict(state)
        return iter(loader)

    return open_at
