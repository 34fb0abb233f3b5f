"""One thread that writes. What is waiting when it is free shares one transaction, and so one fsync.

Invariant: a future is resolved only after the commit that holds its change. A change that raises is taken back alone;
the others of its group are not touched. If the commit fails, every one of the group fails, and none of it happened.
A change may be applied twice before it is committed, so it does nothing but use the connection.
"""

import logging
import queue
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from gen_worker.failpoints import failpoint
from trn.core.errors import RegistryError, UnavailableError

logger = logging.getLogger("trn.registry")

T = TypeVar("T")
Change = Callable[[sqlite3.Connection], T]

_Outcome = tuple[Any, BaseException | None]

MAX_GROUP = 512


class _Item(NamedTuple):
    function: Callable[..., Any]
    future: "Future[Any]"
    is_change: bool


class RegistryWriter:
    """Takes changes from any thread, in order. `close` finishes what was handed in."""

    def __init__(self, connection: sqlite3.Connection, *, name: str = "registry-writer") -> None:
        self._connection = connection
        self._waiting: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._is_closed = False
        self.num_commits = 0
        self.on_commit: Callable[[], None] | None = None  # called in the writer's thread
        self._thread.start()

    def submit(self, change: Change[T]) -> "Future[T]":
        """Queue a change; the future has its result once it is committed."""
        return self._put(change, is_change=True)

    def write(self, change: Change[T]) -> T:
        """`submit`, and wait."""
        return self.submit(change).result()

    def between(self, task: Callable[[], T]) -> "Future[T]":
        """Run `task` in the writer's thread, outside of any transaction."""
        return self._put(task, is_change=False)

    def _put(self, function: Callable[..., T], *, is_change: bool) -> "Future[T]":
        if self._is_closed:
            raise UnavailableError("the registry is closed")
        future: Future[T] = Future()
        self._waiting.put(_Item(function, future, is_change))
        return future

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._waiting.put(None)
            self._thread.join()
            self._connection.close()

    def _run(self) -> None:
        is_open = True
        while is_open:
            changes: list[_Item] = []
            task: _Item | None = None
            item = self._waiting.get()
            while item is not None and item.is_change:
                if item.future.set_running_or_notify_cancel():  # else nobody wants it any more
                    changes.append(item)
                if len(changes) == MAX_GROUP or self._waiting.empty():
                    break
                item = self._waiting.get()
            else:
                is_open, task = item is not None, item
            if changes:
                self._commit(changes)
            if task is not None:
                _settle(task)

    def _commit(self, changes: list[_Item]) -> None:
        try:
            outcomes = self._apply_together(changes) or self._apply_apart(changes)
        except Exception as fault:  # whatever it is, this thread goes on and nobody waits in vain
            self._take_back()
            outcomes = [(None, _explain(fault))] * len(changes)
        for item, (result, error) in zip(changes, outcomes, strict=True):
            if error is None:
                item.future.set_result(result)
            else:
                item.future.set_exception(error)
        failpoint("registry.told")
        if self.on_commit is not None:
            try:
                self.on_commit()
            except Exception:
                logger.exception("who was to hear of a commit failed")

    def _take_back(self) -> None:
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error:
            logger.exception("a transaction could not be taken back")

    def _apply_together(self, changes: list[_Item]) -> list[_Outcome] | None:
        """All in one transaction; None where one of them raises, and nothing of it happened. The usual way."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            outcomes: list[_Outcome] = [(item.function(self._connection), None) for item in changes]
        except Exception as fault:
            if not self._connection.in_transaction:
                raise  # SQLite itself took everything back: the disk is full, say
            self._connection.execute("ROLLBACK")
            is_database = isinstance(fault, sqlite3.Error)
            return [(None, _explain(fault) if is_database else fault)] if len(changes) == 1 else None
        self._end_transaction()
        return outcomes

    def _apply_apart(self, changes: list[_Item]) -> list[_Outcome]:
        """One transaction again, but each change can be taken back alone."""
        self._connection.execute("BEGIN IMMEDIATE")
        outcomes = [self._apply(item) for item in changes]
        self._end_transaction()
        return outcomes

    def _end_transaction(self) -> None:
        failpoint("registry.before_commit")
        self._connection.execute("COMMIT")
        failpoint("registry.committed")
        self.num_commits += 1

    def _apply(self, item: _Item) -> _Outcome:
        connection = self._connection
        connection.execute("SAVEPOINT change")
        try:
            result = item.function(connection)
        except Exception as fault:
            if not connection.in_transaction:
                raise
            connection.execute("ROLLBACK TO change")
            connection.execute("RELEASE change")
            return None, _explain(fault) if isinstance(fault, sqlite3.Error) else fault
        connection.execute("RELEASE change")
        return result, None


def _settle(task: _Item) -> None:
    if not task.future.set_running_or_notify_cancel():
        return
    try:
        task.future.set_result(task.function())
    except Exception as fault:
        task.future.set_exception(fault)


def _explain(fault: Exception) -> Exception:
    text = str(fault)
    if "full" in text or "disk I/O" in text:
        return UnavailableError(f"the registry could not be written: {text}; free some space and try again")
    return RegistryError(f"the registry could not be written: {text}")
