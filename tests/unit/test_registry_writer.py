"""RegistryWriter: what is told is committed, what fails fails alone, and nobody waits in vain."""

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trn.core.errors import ConflictError, RegistryError, UnavailableError
from trn.registry.connection import open_reader, open_writer
from trn.registry.writer import RegistryWriter

NUM_THREADS, NUM_EACH = 8, 100


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "numbers.db"
    connection = open_writer(path)
    connection.execute("CREATE TABLE numbers (n INTEGER PRIMARY KEY, x BLOB)")
    connection.execute(
        "CREATE TABLE friends (n INTEGER REFERENCES numbers (n) DEFERRABLE INITIALLY DEFERRED)"
    )
    connection.close()
    return path


@pytest.fixture(params=[True, False], ids=["applied-by-caller", "applied-by-thread"])
def writer(path: Path, request: pytest.FixtureRequest) -> Iterator[RegistryWriter]:
    writer = RegistryWriter(open_writer(path), is_applied_by_caller=request.param)
    yield writer
    writer.close()


def add(number: int) -> Callable[[sqlite3.Connection], int]:
    def change(connection: sqlite3.Connection) -> int:
        connection.execute("INSERT INTO numbers (n) VALUES (?)", (number,))
        return number

    return change


def found(path: Path) -> list[int]:
    reader = open_reader(path)
    try:
        return [row["n"] for row in reader.execute("SELECT n FROM numbers ORDER BY n")]
    finally:
        reader.close()


def hold(writer: RegistryWriter) -> Callable[[], None]:
    """Keep the writer's thread busy; what is handed in meanwhile waits for the returned call."""
    begun, gate = threading.Event(), threading.Event()
    writer.between(lambda: begun.set() or gate.wait())
    begun.wait()
    return gate.set


def test_what_is_told_is_committed(writer: RegistryWriter, path: Path) -> None:
    seen: list[bool] = []
    for number in range(20):
        future = writer.submit(add(number))
        future.add_done_callback(lambda done: seen.append(done.result() in found(path)))
        future.result()
    writer.between(lambda: None).result()
    assert seen == [True] * 20


def test_a_change_that_raises_takes_no_other_with_it_wherever_in_the_group_it_stands(
    writer: RegistryWriter, path: Path
) -> None:
    def refuse(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO numbers (n) VALUES (1000)")
        raise ConflictError("after it had written something")

    for place in range(4):
        let_go = hold(writer)
        changes = [add(10 * place + number) for number in range(3)]
        futures = [writer.submit(change) for change in [*changes[:place], refuse, *changes[place:]]]
        let_go()
        assert isinstance(futures[place].exception(), ConflictError)
        assert all(future.exception() is None for future in futures if future is not futures[place])
    assert found(path) == [10 * place + number for place in range(4) for number in range(3)]


def test_where_the_commit_fails_all_of_it_fails_and_the_next_group_does_not(
    writer: RegistryWriter, path: Path
) -> None:
    let_go = hold(writer)
    futures = [
        writer.submit(add(1)),
        writer.submit(lambda connection: connection.execute("INSERT INTO friends VALUES (99)")),
        writer.submit(add(2)),
    ]
    let_go()
    assert all(isinstance(future.exception(), RegistryError) for future in futures)
    assert writer.write(add(3)) == 3
    assert found(path) == [3]


def test_where_sqlite_takes_back_everything_nobody_is_told_otherwise(
    writer: RegistryWriter, path: Path
) -> None:
    def fill(connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA max_page_count = 8")
        connection.execute("INSERT OR ROLLBACK INTO numbers VALUES (50, zeroblob(1000000))")

    let_go = hold(writer)
    first, filled, last = (writer.submit(change) for change in (add(1), fill, add(2)))
    let_go()
    assert isinstance(filled.exception(), UnavailableError)
    outcomes = {number: future.exception() is None for number, future in ((1, first), (2, last))}
    assert found(path) == [number for number, is_told in outcomes.items() if is_told]
    assert writer.write(add(3)) == 3


def test_an_interrupted_change_leaves_no_half_of_itself(writer: RegistryWriter, path: Path) -> None:
    def interrupt(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO numbers (n) VALUES (1000)")
        raise KeyboardInterrupt

    for first in (10, 20):
        let_go = hold(writer)
        futures = [writer.submit(change) for change in (add(first), interrupt, add(first + 1))]
        let_go()
        assert isinstance(futures[1].exception(), UnavailableError)
        assert [future.result() for future in (futures[0], futures[2])] == [first, first + 1]
    assert found(path) == [10, 11, 20, 21]


def test_a_strangers_lock_is_waited_for_once_and_not_for_each_change(
    writer: RegistryWriter, path: Path
) -> None:
    writer.between(lambda: writer._connection.execute("PRAGMA busy_timeout = 1")).result()
    begins: list[str] = []
    writer._connection.set_trace_callback(lambda text: begins.append(text) if "BEGIN" in text else None)
    stranger = open_writer(path)
    stranger.execute("BEGIN IMMEDIATE")
    let_go = hold(writer)
    futures = [writer.submit(add(number)) for number in range(20)]
    let_go()
    assert all(isinstance(future.exception(), RegistryError) for future in futures)
    assert len(begins) <= 2
    stranger.execute("ROLLBACK")
    stranger.close()
    assert writer.write(add(1)) == 1


def test_a_task_between_two_commits_has_the_connection_to_itself(path: Path) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        writer = RegistryWriter(open_writer(path))
        posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        writer.settle_in(posted.put)  # a loop that is slow to come
        first = writer.submit(add(0))
        settle = await asyncio.to_thread(posted.get)
        seen: list[bool] = []

        def task() -> None:
            loop.call_soon_threadsafe(settle)  # of the commit before
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01), loop).result()
            seen.append(writer._connection.in_transaction)

        done = writer.between(task)
        waiting = [writer.submit(add(number)) for number in range(1, 4)]
        await asyncio.wrap_future(done)
        assert (seen, first.result()) == ([False], 0)
        writer.close()
        assert [future.result() for future in waiting] == [1, 2, 3]

    asyncio.run(main())


def test_changes_of_many_threads_are_settled_in_the_loop_and_none_is_lost(
    writer: RegistryWriter, path: Path
) -> None:
    threads_that_settled: set[int] = set()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        writer.settle_in(loop.call_soon_threadsafe)

        def hand_in(start: int) -> None:
            for number in range(start, start + NUM_EACH):
                future = writer.submit(add(number))
                future.add_done_callback(lambda _done: threads_that_settled.add(threading.get_ident()))
                if number % 7 == 0:
                    future.result()  # another thread may wait; the loop goes on

        hands = [asyncio.to_thread(hand_in, NUM_EACH * index) for index in range(NUM_THREADS)]
        await asyncio.gather(*hands)
        await asyncio.wrap_future(writer.submit(add(NUM_THREADS * NUM_EACH)))

    asyncio.run(main())
    assert found(path) == list(range(NUM_THREADS * NUM_EACH + 1))
    assert threads_that_settled == {threading.get_ident()}


def test_closing_in_the_loop_finishes_what_the_loop_had_not_come_to(path: Path) -> None:
    async def main() -> None:
        writer = RegistryWriter(open_writer(path))
        writer.settle_in(asyncio.get_running_loop().call_soon_threadsafe)
        first = writer.submit(add(0))
        while writer.num_commits == 0:
            pass  # the loop must not run: the commit's end waits in its queue
        futures = [first, *(writer.submit(add(number)) for number in range(1, 50))]
        writer.close()
        assert [future.result(timeout=0) for future in futures] == list(range(50))
        await asyncio.sleep(0)  # what was queued finds nothing to do
        with pytest.raises(UnavailableError, match="closed"):
            writer.submit(add(1))

    asyncio.run(main())
    assert found(path) == list(range(50))


def test_a_loop_that_is_gone_keeps_nobody_waiting(writer: RegistryWriter, path: Path) -> None:
    async def main() -> None:
        writer.settle_in(asyncio.get_running_loop().call_soon_threadsafe)

    asyncio.run(main())
    assert [writer.write(add(number)) for number in range(3)] == found(path)


def test_settled_waits_for_the_commit_that_is_under_way_and_no_longer(writer: RegistryWriter) -> None:
    async def main() -> None:
        await writer.settled()  # nothing is under way
        let_go = hold(writer)
        waits, told = asyncio.ensure_future(writer.settled()), writer.submit(add(1))
        await asyncio.sleep(0)
        assert not waits.done()
        let_go()
        await waits
        told.result()
        writer.between(lambda: None).result()
        await writer.settled()

    asyncio.run(main())


def test_what_is_applied_in_a_loop_is_committed_when_it_returns(writer: RegistryWriter, path: Path) -> None:
    async def main() -> None:
        async def one(number: int) -> None:
            await writer.apply(add(number), is_one_write=True)
            assert number in found(path)

        await asyncio.gather(*map(one, range(20)))
        with pytest.raises(ValueError, match="no such"):
            await writer.apply(refuse)
        let_go = hold(writer)
        cancelled = asyncio.ensure_future(writer.apply(add(20)))
        await asyncio.sleep(0)
        cancelled.cancel()
        let_go()
        await writer.apply(add(21))

    def refuse(_rows: sqlite3.Connection) -> None:
        raise ValueError("no such thing")

    asyncio.run(main())
    assert found(path) == list(range(22)), "a caller that is cancelled takes nothing back"


def test_what_is_applied_in_one_turn_of_a_loop_shares_a_commit(path: Path) -> None:
    writer = RegistryWriter(open_writer(path))

    async def main() -> None:
        writer.settle_in(asyncio.get_running_loop().call_soon_threadsafe)
        for begin in range(0, 300, 30):
            before = writer.num_commits
            await asyncio.gather(
                *(writer.apply(add(begin + number), is_one_write=True) for number in range(30))
            )
            assert writer.num_commits == before + 1

    asyncio.run(main())
    writer.close()
    assert found(path) == list(range(300))


def test_a_change_of_one_write_that_raises_harms_no_other_of_its_group(
    writer: RegistryWriter, path: Path
) -> None:
    def refuse(rows: sqlite3.Connection) -> None:
        add(1)(rows)

    let_go = hold(writer)
    first, twice, last = (writer.submit(change, is_one_write=True) for change in (add(1), refuse, add(2)))
    let_go()
    first.result()
    last.result()
    with pytest.raises(RegistryError, match="UNIQUE"):
        twice.result()
    assert found(path) == [1, 2]
