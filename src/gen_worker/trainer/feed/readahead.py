"""Loads values ahead of their use, in order, in daemon threads, limited in number and bytes."""

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

# A close waits for at most one decode of one row group.
JOIN_TIMEOUT_S = 10.0


class ReadaheadClosedError(RuntimeError):
    """The readahead was closed while its next value was awaited."""


@dataclass(slots=True, kw_only=True)
class _Slot(Generic[V]):
    size_bytes: int
    value: V | None = None
    error: BaseException | None = None
    is_done: bool = False


class Readahead(Generic[K, V]):
    """Values of `load(key)` for each key, in the order of the keys.

    At most `max_items` values and `max_bytes` (by `estimate` until `size_of` is known) are loading or waiting; one value
    is always allowed. `pop` raises the error of a load in place of its value, and nothing is loaded after it. One
    consumer; `close` may be called from any thread.
    """

    def __init__(
        self,
        keys: Iterator[K],
        load: Callable[[K], V],
        *,
        estimate: Callable[[K], int],
        size_of: Callable[[V], int],
        num_threads: int,
        max_items: int,
        max_bytes: int,
        name: str,
    ) -> None:
        self._keys = keys
        self._load = load
        self._estimate = estimate
        self._size_of = size_of
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._slots: deque[_Slot[V]] = deque()
        self._held_bytes = 0
        self._next: tuple[K, int] | None = None  # taken from `keys`, not yet started
        self._is_closed = False
        self._is_finished = False  # no more keys, or a load failed
        self._pid = os.getpid()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{n}", daemon=True)
            for n in range(min(num_threads, max_items))
        ]
        open_at_exit.add(self)
        for thread in self._threads:
            thread.start()

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    def pop(self) -> V:
        """The next value; waits for it."""
        if self._pid != os.getpid():
            raise RuntimeError(
                "this iterator was created before a fork and has no threads here: call batches() in the child"
            )
        with self._changed:
            while not (self._slots and self._slots[0].is_done):
                if self._is_closed:
                    raise ReadaheadClosedError("the feed was closed while a batch was awaited")
                if self._is_finished and not self._slots:
                    raise ReadaheadClosedError("all values were taken")
                self._changed.wait()
            slot = self._slots.popleft()
            self._held_bytes -= slot.size_bytes
            self._changed.notify_all()
        if slot.error is not None:
            raise slot.error
        return slot.value  # type: ignore[return-value]  # a done slot without an error has its value

    def close(self) -> None:
        """Stop the threads and drop their values. Waits for running loads. Safe to repeat."""
        if self._pid != os.getpid():
            return  # the threads and the lock belong to the parent
        with self._changed:
            self._is_closed = True
            self._slots.clear()
            self._held_bytes = 0
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(JOIN_TIMEOUT_S)
        open_at_exit.discard(self)

    def _work(self) -> None:
        while (started := self._start()) is not None:
            key, slot = started
            value: V | None = None
            error: BaseException | None = None
            size_bytes = 0
            try:
                value = self._load(key)
                size_bytes = self._size_of(value)
            except BaseException as caught:  # raised by `pop`
                error = caught
            with self._changed:
                if self._is_closed:
                    return
                self._held_bytes += size_bytes - slot.size_bytes
                slot.size_bytes, slot.value, slot.error, slot.is_done = size_bytes, value, error, True
                self._is_finished = self._is_finished or error is not None
                self._changed.notify_all()
            # A waiting thread must not keep a consumed value alive.
            del value, slot, started, error

    def _start(self) -> tuple[K, _Slot[V]] | None:
        with self._changed:
            while not self._is_closed and not self._is_finished:
                if self._next is None:
                    try:
                        key = next(self._keys)
                        self._next = key, self._estimate(key)
                    except BaseException as caught:  # raised by `pop`
                        self._is_finished = True
                        if not isinstance(caught, StopIteration):
                            self._slots.append(_Slot(size_bytes=0, error=caught, is_done=True))
                        self._changed.notify_all()
                        return None
                key, size_bytes = self._next
                if not self._slots or (
                    len(self._slots) < self._max_items and self._held_bytes + size_bytes <= self._max_bytes
                ):
                    self._next = None
                    slot: _Slot[V] = _Slot(size_bytes=size_bytes)
                    self._slots.append(slot)
                    self._held_bytes += size_bytes
                    return key, slot
                self._changed.wait()
            return None


open_at_exit: "weakref.WeakSet[Any]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # A daemon thread inside Arrow can crash the process when the interpreter exits.
    for owner in list(open_at_exit):
        owner.close()
