"""Claims about parts of the daemon that work in a thread: a shortage begins them again, a bug is raised."""

import asyncio
import errno
import sqlite3
import threading

import pytest

from trn.daemon.outlets.threaded_part import ThreadedPart


class Part(ThreadedPart):
    thread_name = "part"
    stop_s = 60.0

    def __init__(self, *faults: Exception) -> None:
        super().__init__()
        self.faults = list(faults)
        self.works = threading.Event()
        self.is_stopped = False

    def work(self, stop: threading.Event) -> None:
        if self.faults:
            raise self.faults.pop(0)
        self.works.set()
        stop.wait()
        self.is_stopped = True


def test_a_part_without_descriptors_begins_again_until_it_works() -> None:
    part = Part(
        OSError(errno.EMFILE, "Too many open files"), sqlite3.OperationalError("unable to open database file")
    )

    async def run() -> None:
        task = asyncio.create_task(part.run())
        assert await asyncio.to_thread(part.works.wait, 60)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(run())
    assert part.is_stopped


def test_another_fault_of_a_part_is_raised() -> None:
    with pytest.raises(ValueError, match="a bug"):
        asyncio.run(Part(ValueError("a bug")).run())
