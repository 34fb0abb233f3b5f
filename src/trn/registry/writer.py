"""One connection that writes. Changes that come while the disk is busy share the next commit, and so one fsync.

A change is applied by its caller, as soon as no commit is under way; a thread does nothing but wait for the
disk. So a group of changes costs two changes of threads, and none for each statement: where two threads both want the
interpreter, a statement costs more by waiting than by its work. Where changes are heavy, the thread applies them, too.

Invariant: a future is resolved only after the commit that holds its change. A change that raises is taken back alone;
the others of its group are not touched. If the commit fails, every one of the group fails, and none of it happened.
Where the file is not at its path any more, every one of the group fails, too, and so do all after it: what was
committed is in a file that is lost (see `connection`).
While a commit is under way, only the thread uses the connection.
"""

import asyncio
import contextlib
import logging
import queue
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from gen_worker.contract.failpoints import failpoint
from trn.core.errors import RegistryError, RegistryGoneError, UnavailableError
from trn.registry.connection import OpenFile

logger = logging.getLogger("trn.registry")

T = TypeVar("T")
Change = Callable[[sqlite3.Connection], T]

MAX_GROUP = 512
GATHER_S = 0.001  # where changes come together, a commit waits for so long for more of them


class _LoopFuture:
    """A future of a loop in the place of one of threads, which costs several times as much."""

    __slots__ = ("_thread", "loop", "waiter")

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self.waiter: asyncio.Future[Any] = self.loop.create_future()

    def set_running_or_notify_cancel(self) -> bool:
        """Never cancelled: a caller that is takes nothing back."""
        return True

    def set_result(self, result: Any) -> None:
        self._settle(self.waiter.set_result, result)

    def set_exception(self, fault: BaseException) -> None:
        self._settle(self.waiter.set_exception, fault)

    def _settle(self, how: Callable[[Any], None], what: Any) -> None:
        def settle() -> None:
            if not self.waiter.done():  # else its caller was cancelled
                how(what)

        # Most commits are settled in the loop's own thread.
        if threading.get_ident() == self._thread:
            settle()
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(settle)


class _Item(NamedTuple):
    change: Change[Any]
    future: "Future[Any] | _LoopFuture"
    is_one_write: bool


class _Applied(NamedTuple):
    future: "Future[Any] | _LoopFuture"
    result: Any


_Ended = tuple[list[_Applied], Exception | None]  # what a commit held, and why it failed


class RegistryWriter:
    """Takes changes from any thread, in order. `close` finishes what was handed in."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        *,
        name: str = "registry-writer",
        is_applied_by_caller: bool = True,
        file: OpenFile | None = None,
    ) -> None:
        self._connection = connection
        self._file = file
        self._gone = ""  # why nothing can be written any more
        self._is_applied_by_caller = is_applied_by_caller
        self._lock = threading.RLock()  # of all that follows
        self._waiting: deque[_Item] = deque()
        self._group: list[_Applied] = []  # what the open transaction holds
        self._is_busy = False  # the thread has the connection, or what it did is not settled yet
        self._is_asked = False  # the thread is to commit
        self._ended: _Ended | None = None  # a commit to settle
        self._waiting_for_settled: list[_LoopFuture] = []
        self._is_closed = False
        self._num_together = 0  # in the commit before, without those of a turn
        self._has_turn = False  # the open transaction has changes that a loop waits for
        self._settle_in: Callable[[Callable[[], None]], object] | None = None
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.num_commits = 0
        self.on_commit: Callable[[], None] | None = None  # called where commits are settled
        self._thread.start()

    def settle_in(self, call_soon: Callable[[Callable[[], None]], object]) -> None:
        """From now on futures are resolved, and what waited is applied, by what `call_soon` calls: a loop, say.

        Code that runs there must not block on a future. Without this, the thread does it.
        """
        self._settle_in = call_soon

    def submit(self, change: Change[T], *, is_one_write: bool = False) -> "Future[T]":
        """Apply a change, now or after the commit that is under way; the future has its result once it is committed.

        `is_one_write`: at most one of its statements writes, so there is nothing to take back where it raises.
        """
        future: Future[T] = Future()
        self._take(_Item(change, future, is_one_write))
        return future

    async def apply(self, change: Change[T], *, is_one_write: bool = False) -> T:
        """`submit`, and wait for it in a loop: for changes that come after `settled`, and so together.

        One that is cancelled takes nothing back.
        """
        future = _LoopFuture()
        self._take(_Item(change, future, is_one_write), future.loop)
        result: T = await future.waiter
        return result

    def _take(self, item: _Item, loop: asyncio.AbstractEventLoop | None = None) -> None:
        with self._lock:
            self._require_open()
            self._waiting.append(item)
            if not self._is_busy:
                self._go_on(loop)

    async def settled(self) -> None:
        """Returns once what is applied by now is committed. All who wait for that go on in one turn of the loop, and
        what they `apply` there shares the next commit.
        """
        with self._lock:
            if not self._is_busy and not self._has_turn:
                return
            future = _LoopFuture()
            self._waiting_for_settled.append(future)
        await future.waiter

    def write(self, change: Change[T]) -> T:
        """`submit`, and wait."""
        return self.submit(change).result()

    def between(self, task: Callable[[], T]) -> "Future[T]":
        """Run `task` in the writer's thread, outside of any transaction."""
        future: Future[T] = Future()
        with self._lock:
            self._require_open()
            self._orders.put(lambda: self._perform(task, future))
        return future

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._settle_in = None  # the caller may be the loop that would have settled
        self._orders.put(None)
        self._thread.join()
        if not self._gone:  # closing it would bring the log into a file that is not its own
            self._connection.close()

    def _require_open(self) -> None:
        if self._is_closed:
            raise UnavailableError("the registry is closed")

    # With the lock held, by the thread that has the connection

    def _go_on(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Apply what waits, and have it committed: in a loop after this turn, since its other tasks may apply more."""
        if self._is_applied_by_caller:
            self._apply_waiting()
        if (self._group or self._waiting) and not self._is_asked:
            self._is_asked = True
            if loop is None:
                self._orders.put(self._commit)
            else:
                loop.call_soon(self._orders.put, self._commit)

    def _apply_waiting(self) -> None:
        while self._waiting and len(self._group) < MAX_GROUP:
            item = self._waiting.popleft()
            if item.future.set_running_or_notify_cancel():  # else it was cancelled
                self._apply(item)

    def _apply(self, item: _Item) -> None:
        connection, is_first = self._connection, not self._group
        if is_first and not self._begin(item):
            return
        has_savepoint = not is_first and not item.is_one_write
        try:
            if has_savepoint:
                connection.execute("SAVEPOINT change")
            result = item.change(connection)
            if has_savepoint:
                connection.execute("RELEASE change")
        except BaseException as fault:
            # Also after Ctrl-C: the next commit must not hold half a change.
            self._take_back(item, fault, is_first=is_first, has_savepoint=has_savepoint)
            if not isinstance(fault, Exception) and threading.current_thread() is not self._thread:
                raise
        else:
            self._group.append(_Applied(item.future, result))
            self._has_turn = self._has_turn or isinstance(item.future, _LoopFuture)

    def _begin(self, item: _Item) -> bool:
        """Where that fails, all that waits fails, too: a stranger's lock would be waited for once for each of them."""
        try:
            if self._gone:
                self.require_file()
            self._connection.execute("BEGIN IMMEDIATE")
        except (sqlite3.Error, RegistryGoneError) as fault:
            self._roll_back("ROLLBACK")  # one that could not be taken back before
            item.future.set_exception(_explain(fault))
            while self._waiting:
                future = self._waiting.popleft().future
                if future.set_running_or_notify_cancel():
                    future.set_exception(_explain(fault))
            return False
        return True

    def require_file(self) -> None:
        """RegistryGoneError where the path does not name the open file. One that comes back is used again."""
        self._gone = "" if self._file is None else self._file.find_problem()
        if self._gone:
            raise RegistryGoneError(
                f"{self._gone}: nothing can be recorded. Stop the daemon (workers keep running), put the file or a backup in its"
                " place, and start the daemon again: see `Backup and check` in docs/daemon.md"
            )

    def _take_back(self, item: _Item, fault: BaseException, *, is_first: bool, has_savepoint: bool) -> None:
        """One change raised: it alone did not happen, unless SQLite itself took back everything (a full disk, say)."""
        if is_first:
            self._roll_back("ROLLBACK")
        elif has_savepoint:
            self._roll_back("ROLLBACK TO change", "RELEASE change")
        failed = [item.future]
        if not is_first and not self._connection.in_transaction:
            group, self._group = self._group, []  # before a callback submits more
            self._has_turn = False
            failed += [applied.future for applied in group]
        for future in failed:
            future.set_exception(_explain(fault))

    def _roll_back(self, *statements: str) -> None:
        try:
            for statement in statements:
                if self._connection.in_transaction:
                    self._connection.execute(statement)
        except sqlite3.Error:
            logger.exception("what failed could not be taken back")

    # In the thread

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            order()
        self._settle()  # closed: nothing else is submitted
        while self._waiting or self._group:
            self._commit()

    def _commit(self) -> None:
        if self._num_together > 1:
            time.sleep(GATHER_S)
        with self._lock:
            self._is_asked = False
            if self._is_busy:
                return  # it is asked again once that is settled
            self._is_busy = True
        self._ended = self._end_group()
        self._settle_soon()

    def _perform(self, task: Callable[[], T], future: "Future[T]") -> None:
        with self._lock:
            self._settle()
            self._is_busy = True
        ended = self._end_group()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(task())
            except Exception as fault:
                future.set_exception(fault)
        self._ended = ended  # only now: settling it takes the connection
        self._settle_soon()

    def _end_group(self) -> _Ended:
        if not self._is_applied_by_caller:
            self._apply_waiting()
        group, self._group = self._group, []
        self._has_turn = False
        self._num_together = sum(isinstance(applied.future, Future) for applied in group)
        return group, self._end_transaction() if group else None

    def _end_transaction(self) -> Exception | None:
        try:
            failpoint("registry.before_commit")
            self.require_file()  # else what is refused now would be found in a file that is put back
            self._connection.execute("COMMIT")
            failpoint("registry.committed")
            self.require_file()
        except Exception as fault:  # whatever it is, every future is resolved
            self._roll_back("ROLLBACK")
            return _explain(fault)
        self.num_commits += 1
        return None

    def _settle_soon(self) -> None:
        settle_in = self._settle_in
        if settle_in is not None:
            try:
                settle_in(self._settle)
            except RuntimeError:
                pass  # that loop is closed
            else:
                return
        self._settle()

    # Where commits are settled

    def _settle(self) -> None:
        """Resolve the futures of the commit that ended, release the connection, and continue. Safe to call again."""
        with self._lock:
            if self._ended is None:
                return
            (group, fault), self._ended = self._ended, None
            for applied in group:
                if fault is None:
                    applied.future.set_result(applied.result)
                else:
                    applied.future.set_exception(fault)
            self._is_busy = False
            self._go_on()
            waiting, self._waiting_for_settled = self._waiting_for_settled, []
        for future in waiting:
            future.set_result(None)
        if not group:
            return
        failpoint("registry.told")
        if self.on_commit is not None:
            try:
                self.on_commit()
            except Exception:
                logger.exception("the callback of a commit failed")


def _explain(fault: BaseException) -> Exception:
    if not isinstance(fault, Exception):
        return UnavailableError("the registry's change was interrupted, and taken back")
    if not isinstance(fault, sqlite3.Error):
        return fault
    text = str(fault)
    if "full" in text or "disk I/O" in text:
        return UnavailableError(f"the registry could not be written: {text}; free some space and try again")
    return RegistryError(f"the registry could not be written: {text}")


async def committed(future: "Future[T]") -> T:
    """Its result, in a loop. A caller that is cancelled takes nothing back: the change is committed all the same."""
    if not future.done():
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        thread = threading.get_ident()

        def wake() -> None:
            if not waiter.done():
                waiter.set_result(None)

        def tell(_future: object) -> None:
            # Most commits are settled in the loop's own thread.
            if threading.get_ident() == thread:
                wake()
            else:
                loop.call_soon_threadsafe(wake)

        future.add_done_callback(tell)
        await waiter
    return future.result()
