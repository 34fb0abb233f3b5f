"""The sides of the feed benchmark, each sample in a fresh interpreter. All sides deliver all three columns.

A rate counts rows from the first batch of a pass on, over as many passes as the time takes; opening a pass (and
re-opening it) is not counted, for anyone. Page cache warm. Memory is the growth of the peak resident set over the
level after imports.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import feed_data
import feed_peers
import feed_readers
from harness import Prepare, Round, Sample, serve

Pass = Iterator[Any]


# --- measuring -----------------------------------------------------------------------------------------------------


def measure_rate(
    open_pass: Callable[[int], Pass],
    *,
    seconds: float,
    num_rows: int,
    take: Callable[[Any], int] = lambda batch: batch.num_rows,
) -> Sample:
    """Rows per second over passes; `take` uses a batch and says how many rows it had."""
    clock = time.perf_counter
    rows, busy_s, cpu_s, first_batch_s, passes = 0, 0.0, 0.0, 0.0, 0
    base_mb = feed_readers.resident_mb(reset_peak=True)
    while busy_s < seconds:
        opened = clock()
        batches = open_pass(passes)
        seen = take(next(batches))
        started = clock()
        if not passes:
            first_batch_s = started - opened
        deadline = started + seconds - busy_s
        cpu_started = time.process_time()
        uncounted = seen
        for batch in batches:
            seen += take(batch)
            if clock() > deadline:
                break
        else:
            assert seen == num_rows, f"a pass gave {seen} rows of {num_rows}"
        busy_s += clock() - started
        cpu_s += time.process_time() - cpu_started
        rows += seen - uncounted
        _close(batches)
        passes += 1
    return {
        "rows_per_s": rows / busy_s,
        "first_batch_ms": 1e3 * first_batch_s,
        "cpu_us_per_krow": 1e9
        * cpu_s
        / rows,  # all threads; steadier than the rate where the machine is shared
        "memory_mb": feed_readers.peak_mb() - base_mb,
        "passes": passes,
    }


def rate_side(make: Callable[[Mapping[str, Any]], Any]) -> Prepare:
    """A side that is `make(options) -> open_pass`, or `(open_pass, take)`."""

    def prepare(options: Mapping[str, Any]) -> Round:
        if options.get("shuffle"):  # where memory is judged
            # pyarrow loads pandas, if it is there, at the first conversion: an import, on every side.
            with contextlib.suppress(ImportError):
                import pandas  # noqa: F401
        made = make(options)
        open_pass, *take = made if isinstance(made, tuple) else (made,)

        def run_round() -> Sample:
            return measure_rate(
                open_pass,
                seconds=options["seconds"],
                num_rows=feed_data.num_rows(quick=options["quick"]),
                **({"take": take[0]} if take else {}),
            )

        return run_round

    return prepare


def first_batch_side(prepare: Callable[[Mapping[str, Any]], Callable[[float], Pass]]) -> Prepare:
    """A side that is `prepare(options) -> open_at(share of the epoch)`: the time from there to the first batch.

    A first batch at the start is taken beforehand, untimed: what only the very first one pays (imports, opening
    files, starting threads) would make two positions look alike.
    """

    def make(options: Mapping[str, Any]) -> Round:
        open_at = prepare(options)
        _take_first(open_at(0.0))

        def run_round() -> Sample:
            started = time.perf_counter()
            batches = open_at(options["position"])
            next(batches)
            taken_ms = 1e3 * (time.perf_counter() - started)
            _close(batches)
            return {"first_batch_ms": taken_ms}

        return run_round

    return make


def _take_first(batches: Pass) -> None:
    next(batches)
    _close(batches)


def _close(batches: Pass) -> None:
    close = getattr(batches, "close", None)
    if close is not None:
        close()


# --- ours ----------------------------------------------------------------------------------------------------------


def _open_feed(options: Mapping[str, Any]) -> Any:
    from gen_worker.trainer.arrow_feed import ArrowFeed

    return ArrowFeed.open(
        feed_data.parquet_files(quick=options["quick"]),
        batch_size=options["batch_size"],
        shuffle=options.get("shuffle", False),
        seed=1,
        cache_dir=feed_data.own_cache_dir(quick=options["quick"]) if options.get("cached") else None,
    )


def _one_epoch(feed: Any, epoch: int) -> Pass:
    """The feed goes on into the next epoch; a pass of ours ends where the others' do."""
    batches = feed.batches(epoch=epoch)
    try:
        for _ in range(feed.batches_per_epoch):
            yield next(batches)
    finally:
        batches.close()


def ours(options: Mapping[str, Any]) -> Any:
    """ArrowFeed over parquet: record batches, shuffled or not. Every epoch has its own order."""
    feed = _open_feed(options)
    return lambda epoch: _one_epoch(feed, epoch)


def ours_cached(options: Mapping[str, Any]) -> Any:
    """ArrowFeed over the decode-once cache, every value of every batch read. The cache was made before."""
    feed = _open_feed({**options, "cached": True})
    assert feed.wait_cached(120), "the cache could not be made"
    return (lambda epoch: _one_epoch(feed, epoch)), feed_readers.read_record_batch


def ours_torch(options: Mapping[str, Any]) -> Any:
    """x and label as tensors of each batch; with `captions`, the captions as Python strings, as HF gives them."""
    from gen_worker.trainer.arrow_feed import batch_to_torch

    feed = _open_feed(options)
    with_captions = options["captions"]

    def take(batch: Any) -> int:
        tensors = batch_to_torch(batch, ("x", "label"))
        if with_captions:
            batch.column("caption").to_pylist()
        return int(tensors["label"].shape[0])

    return (lambda epoch: _one_epoch(feed, epoch)), take


def ours_first_batch(options: Mapping[str, Any]) -> Callable[[float], Pass]:
    """An open feed is asked for an iterator at a position."""
    feed = _open_feed(options)
    return lambda share: feed.batches(epoch=0, batch=int(share * feed.batches_per_epoch))


def ours_epochs(options: Mapping[str, Any]) -> Round:
    """Peak resident set of the whole process after one epoch, and after five of them in one iterator."""
    feed = _open_feed(options)

    def run_round() -> Sample:
        base_mb = feed_readers.resident_mb(reset_peak=True)
        batches = feed.batches(epoch=0)
        sample: Sample = {}
        for epoch in range(1, 6):
            for _ in range(feed.batches_per_epoch):
                next(batches)
            if epoch in (1, 5):
                sample[f"peak_mb_after_{epoch}"] = feed_readers.peak_mb()
        batches.close()
        sample["ratio"] = sample["peak_mb_after_5"] / sample["peak_mb_after_1"]
        sample["growth_ratio"] = (sample["peak_mb_after_5"] - base_mb) / (sample["peak_mb_after_1"] - base_mb)
        return sample

    return run_round


# --- all together --------------------------------------------------------------------------------------------------


def make_caches(options: Mapping[str, Any]) -> Round:
    """Untimed for the rows: both decode-once copies, made before any cached side runs."""

    def run_round() -> Sample:
        sample: Sample = {}
        started = time.perf_counter()
        with _open_feed({**options, "batch_size": 1024, "cached": True}) as feed:
            assert feed.wait_cached(300), "the cache could not be made"
        sample["own_cache_s"] = time.perf_counter() - started
        try:
            started = time.perf_counter()
            feed_peers.open_hf_mapped(options)
            sample["hf_cache_s"] = time.perf_counter() - started
        except ImportError:
            pass
        return sample

    return run_round


SIDES: dict[str, Prepare] = {
    "ours": rate_side(ours),
    "ours_cached": rate_side(ours_cached),
    "ours_torch": rate_side(ours_torch),
    "ours_first_batch": first_batch_side(ours_first_batch),
    "ours_epochs": ours_epochs,
    "hand_pool": rate_side(feed_peers.hand_pool),
    "hand_mapped": rate_side(feed_peers.hand_mapped),
    "scanner": rate_side(feed_peers.scanner),
    "iter_batches": rate_side(feed_peers.iter_batches),
    "hf_streaming": rate_side(feed_peers.hf_streaming),
    "hf_mapped": rate_side(feed_peers.hf_mapped),
    "hf_torch": rate_side(feed_peers.hf_torch),
    "hf_first_batch": first_batch_side(feed_peers.hf_first_batch),
    "dataloader_first_batch": first_batch_side(feed_peers.dataloader_first_batch),
    "make_caches": make_caches,
}

if __name__ == "__main__":
    serve(SIDES)
