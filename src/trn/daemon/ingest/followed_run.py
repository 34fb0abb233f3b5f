"""What ingest remembers of a run that it follows. All of it can be found again in the stores and the file."""

import asyncio
import stat
from pathlib import Path

from trn.core.home import Home
from trn.daemon.ingest.event_file import Batch, DamagedLines
from trn.registry.metrics import Place


class FollowedRun:
    """One followed run. Everything before `offset` of its file is in both stores.

    The event `read_seq` is the last before it and ends at `event_end`; between the two is only what was put aside.
    """

    def __init__(self, run_id: str, home: Home, number: int, now: float) -> None:
        folder = home.run(run_id)
        self.run_id = run_id
        self.path: Path = folder.events
        self.number = number
        self.is_open = False  # its place and nonce were read from the stores
        self.nonce = ""
        self.offset = 0
        self.event_end = 0
        self.read_seq = 0
        self.registry_seq = 0  # the last event that the registry has, by the numbers that are in the file
        self.metrics_seq = 0
        self.stored_seq = 0  # the registry's number; ahead of the file's where that has lost some
        self.step = 0
        self.is_returning = False  # reads again what is known, to find where it ends
        self.size_bytes = -1
        self.grown_at = now
        self.is_queued = False
        self.is_busy = False
        self.is_rung = False
        self.fault = ""
        self.is_store_behind = False  # the metric store refused; it is caught up later
        self.store_again_at = 0.0
        self.num_reads = 0
        self.drains: list[Drain] = []
        self.damaged = DamagedLines(folder.damaged_events)
        self.num_damaged_told = 0

    def move_to(self, place: Place) -> None:
        """Read on from the end of another event."""
        self.offset = self.event_end = place.offset
        self.read_seq = place.last_seq


class Drain:
    """Somebody waits until all that was in the file when they asked is committed and published."""

    def __init__(self, tail: FollowedRun, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.num_reads = tail.num_reads
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def is_over(self, tail: FollowedRun, batch: Batch) -> bool:
        # A read that began before may be of a file that was longer then.
        return tail.num_reads > self.num_reads and (batch.is_end or tail.offset >= self.size_bytes)


def file_size(path: Path) -> int:
    """In bytes; 0 where it is not there or cannot be looked at (whoever reads it then will say so)."""
    try:
        found = path.lstat()
    except OSError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0
