"""The run's one event file: recovered at start, appended in order, without blocking the caller.

Invariants
- `seq` is 1, 2, 3… over all attempts of the run, without a gap: it is assigned under the lock that queues the line.
- A line counts once its newline is written. Half a line is cut off: at once where the disk refused the rest, at the next
  start where a crash left it.
- `append` does no I/O. One thread writes the queue; memory is bounded by `max_pending_bytes`, and lines dropped because
  of a slow disk are counted and reported in a `log` event.
- `append_last` returns after fsync, also on a full disk or at a file-size limit: a reserve file is deleted for it, and
  other lines stay that far below the limit. Nothing follows it.
"""

import contextlib
import errno
import fcntl
import logging
import os
import resource
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from gen_worker.contract.failpoints import failpoint
from gen_worker.contract.files.regular import open_regular
from gen_worker.contract.files.unshared import keep_from_children, no_longer_open
from gen_worker.errors import LeaseHeldError, StartupError
from gen_worker.trainer.events.event_tail import COPY_BYTES, EventHead, EventTail, read_tail

logger = logging.getLogger("gen_worker.events")

WRITE_EVERY_S = 0.02  # how old the file may be; the loop does not wake the writer
MAX_PENDING_BYTES = 32 << 20
RESERVE_BYTES = 64 << 10
MIN_LINE_BYTES = 512  # a terminal line is not cut below that
LAST_LINE_BYTES = RESERVE_BYTES // 2  # of a terminal line that has only the reserve


class EventLog:
    """Appends event lines. Any thread may append; its own thread writes.

    `is_continued` continues the last attempt, to report on a worker that died. `attempt` is this attempt's number; None:
    the one after the last. With a `nonce`, a file of another submission is refused. `doorbell` gets the run's id after
    each write.
    """

    def __init__(
        self,
        path: Path,
        *,
        run_id: str,
        is_continued: bool = False,
        attempt: int | None = None,
        nonce: str = "",
        doorbell: str | None = None,
        max_pending_bytes: int = MAX_PENDING_BYTES,
        write_every_s: float = WRITE_EVERY_S,
    ) -> None:
        self.path = path
        self.run_id = run_id
        self.nonce = nonce
        self._is_continued = is_continued
        self._wanted_attempt = attempt
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, follow=True)
        except OSError as fault:
            raise StartupError(f"the events file {path} cannot be written: {fault.strerror}") from fault
        try:
            self._take_over()
        except BaseException:
            os.close(self._fd)
            raise
        keep_from_children(self._fd)
        self._doorbell = Doorbell(doorbell, run_id) if doorbell else None
        self._max_pending_bytes = max_pending_bytes
        self._write_every_s = write_every_s
        self._lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._unwritten = b""
        self._is_sealed = False
        self._needs_sync = False
        self._after_sync: list[Callable[[], None]] = []
        self.num_dropped = 0  # lines, since `take_num_dropped`
        self._wake = threading.Event()
        self._closing = False
        self._write_fault: OSError | None = None
        self._thread = threading.Thread(target=self._write_forever, name="event-writer", daemon=True)
        self._thread.start()

    def _take_over(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LeaseHeldError(
                f"{self.path} is in use by another worker: wait for it to end, or give this run its own folder"
            ) from None
        tail = read_tail(self.path)
        if tail.run_id not in (None, self.run_id):
            raise StartupError(
                f"{self.path} holds the events of run {tail.run_id!r}, not of {self.run_id!r}:"
                " set TRAINER_ARTIFACTS_DIR (or TRAINER_EVENTS_PATH) to another folder"
            )
        if self.nonce and tail.run_id is not None and tail.nonce != self.nonce:
            raise StartupError(
                f"{self.path} holds the events of another submission of run {self.run_id!r}: move it away"
            )
        self.attempt = self._choose_attempt(tail)
        if tail.damaged_bytes:
            self._set_aside(tail)
        self.damaged_bytes = tail.damaged_bytes
        is_ours = self.attempt == tail.last_attempt
        self.last_event = tail.last_event if is_ours else None  # of this attempt
        self.last_step = tail.last_step if is_ours else 0
        self.reached_step = tail.last_step
        self._seq = tail.last_seq
        self._reserve = self.path.with_name(f".{self.path.name}.reserve")
        try:
            self._reserve.write_bytes(b"\0" * RESERVE_BYTES)
        except OSError as fault:
            logger.warning("no room for the %d byte reserve of %s: %s", RESERVE_BYTES, self.path, fault)

    def _choose_attempt(self, tail: EventTail) -> int:
        wanted = self._wanted_attempt
        if wanted is None:
            return tail.last_attempt if self._is_continued else tail.last_attempt + 1
        if wanted < tail.last_attempt or (wanted == tail.last_attempt and not self._is_continued):
            raise StartupError(
                f"{self.path} holds events of attempt {tail.last_attempt}, but this is attempt {wanted}:"
                f" use a number above {tail.last_attempt}"
            )
        return wanted

    def _set_aside(self, tail: EventTail) -> None:
        blocks = range(tail.good_bytes, tail.good_bytes + tail.damaged_bytes, COPY_BYTES)
        if any(b"\n" in os.pread(self._fd, COPY_BYTES, at) for at in blocks):
            # More than the half line that a crash leaves: keep it.
            aside = self.path.with_name(f"{self.path.name}.damaged-after-{tail.last_seq}")
            with aside.open("wb") as file:
                for at in blocks:
                    file.write(os.pread(self._fd, COPY_BYTES, at))
            logger.warning(
                "%s: %d bytes are not events; moved to %s", self.path, tail.damaged_bytes, aside.name
            )
        os.ftruncate(self._fd, tail.good_bytes)
        os.fsync(self._fd)

    def append(self, encode: Callable[..., bytes], *, may_drop: bool = False) -> int | None:
        """Queue the line `encode(seq)`; its `seq`, or None where it was dropped (and counted)."""
        with self._lock:
            if may_drop and self._pending_bytes > self._max_pending_bytes:
                self.num_dropped += 1
                return None
            return self._queue(encode)

    def append_synced(self, encode: Callable[..., bytes], then: Callable[[], None] | None = None) -> None:
        """Queue a line that is synced at once; `then` runs after its fsync, in the thread that did it."""
        with self._lock:
            if self._queue(encode) is None:
                return
            self._needs_sync = True
            if then is not None:
                self._after_sync.append(then)
        self._wake.set()

    def append_last(self, encode: Callable[..., bytes]) -> None:
        """Append the terminal line; returns when it is on disk. Nothing can follow it.

        On a full disk the reserve is deleted for it, then queued lines are dropped.
        """
        with self._lock:
            self._queue(encode)
            self._is_sealed = True
            self._needs_sync = True
        try:
            self.flush()
        except OSError as fault:
            logger.warning("%s: %s; using the reserve", self.path, fault)
            self._reserve.unlink(missing_ok=True)
            try:
                self.flush()
            except OSError:
                _lift_size_limit()
                self._give_up_backlog(encode)
                self.flush()

    def _queue(self, encode: Callable[..., bytes]) -> int | None:
        """Under the lock."""
        if self._is_sealed:
            return None
        line = encode(self._seq + 1)
        self._seq += 1
        self._pending.append(line)
        self._pending_bytes += len(line)
        return self._seq

    def _give_up_backlog(self, encode: Callable[..., bytes]) -> None:
        """Drop every line that is not written, and queue the last one again with the free number.

        Nothing where the last one is written by now: there was room again for a moment.
        """
        with self._write_lock, self._lock:
            lost = (self._unwritten + b"".join(self._pending)).splitlines()
            if not lost:
                return
            logger.warning("%s: %d events are lost to the full disk", self.path, len(lost) - 1)
            self._seq = msgspec.json.decode(lost[0], type=EventHead).seq
            self._unwritten = b""
            self._pending = [
                encode(self._seq, max_bytes=int(max(min(LAST_LINE_BYTES, self._room()), MIN_LINE_BYTES)))
            ]
            self._after_sync.clear()

    def take_num_dropped(self) -> int:
        with self._lock:
            count, self.num_dropped = self.num_dropped, 0
            return count

    @property
    def is_behind(self) -> bool:
        return self._pending_bytes > self._max_pending_bytes

    def flush(self) -> None:
        """Write everything that is queued, and sync where requested. OSError where the disk refuses."""
        with self._write_lock:
            with self._lock:
                queued = self._pending
                self._pending = []
                needs_sync, self._needs_sync = self._needs_sync, False
                after_sync, self._after_sync = self._after_sync, []
            self._unwritten += b"".join(queued)
            has_news = bool(self._unwritten)
            begun = b""  # of a line whose end is not written yet
            try:
                self._require_room()
                while self._unwritten:
                    failpoint("events.write")
                    written = os.write(self._fd, self._unwritten)
                    begun = (begun + self._unwritten[:written]).rpartition(b"\n")[2]
                    self._unwritten = self._unwritten[written:]
                if needs_sync:
                    failpoint("events.written")
                    os.fsync(self._fd)
                    failpoint("events.synced")
            except OSError:
                if begun:
                    self._cut_off(begun)
                with self._lock:
                    self._needs_sync = self._needs_sync or needs_sync
                    self._after_sync = after_sync + self._after_sync
                raise
            finally:
                with self._lock:
                    self._pending_bytes = len(self._unwritten) + sum(map(len, self._pending))
            if self._doorbell is not None and has_news:  # not before the sync: who reads it tells others
                self._doorbell.ring()
            for then in after_sync:  # under the lock: done before the next flush
                then()

    def _cut_off(self, begun: bytes) -> None:
        """A line that cannot be finished would swallow the next one, and the last line may be all that fits."""
        os.ftruncate(self._fd, os.fstat(self._fd).st_size - len(begun))
        self._unwritten = begun + self._unwritten

    def _require_room(self) -> None:
        """OSError where these lines would exceed the file-size limit, less the reserve.

        Read each time: the author's code may set the limit, also between this look and the write.
        """
        if self._unwritten and len(self._unwritten) > self._room() - (
            0 if self._is_sealed else RESERVE_BYTES
        ):
            raise OSError(errno.EFBIG, "the file-size limit (RLIMIT_FSIZE) is reached", str(self.path))

    def _room(self) -> float:
        """Bytes below the file-size limit."""
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        return float("inf") if limit == resource.RLIM_INFINITY else limit - os.fstat(self._fd).st_size

    def _write_forever(self) -> None:
        while not self._closing:
            self._wake.wait(self._write_every_s)
            self._wake.clear()
            if self._pending or self._unwritten:
                self._flush_and_note()

    def _flush_and_note(self) -> None:
        try:
            self.flush()
        except OSError as fault:
            if self._write_fault is None:
                logger.warning("%s cannot be written: %s; will try again", self.path, fault)
            self._write_fault = fault
        else:
            self._write_fault = None

    def close(self) -> None:
        """Write what is left and close the file. Safe to call twice."""
        if self._closing:
            return
        self._closing = True
        self._wake.set()
        self._thread.join()
        self._flush_and_note()
        self._reserve.unlink(missing_ok=True)
        no_longer_open(self._fd)
        os.close(self._fd)
        if self._doorbell is not None:
            self._doorbell.close()


def _lift_size_limit() -> None:
    """Up to the hard limit: only the last line is written after it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


class DiscardedEvents:
    """Replaces `EventLog` in processes that write no events."""

    attempt = 0
    nonce = ""
    reached_step = 0
    damaged_bytes = 0
    num_dropped = 0
    is_behind = False
    path = Path()

    def append(self, encode: Callable[..., bytes], *, may_drop: bool = False) -> int | None:  # noqa: ARG002
        return 0

    def append_synced(self, encode: Callable[..., bytes], then: Callable[[], None] | None = None) -> None: ...

    def append_last(self, encode: Callable[..., bytes]) -> None: ...

    def take_num_dropped(self) -> int:
        return 0

    def flush(self) -> None: ...

    def close(self) -> None: ...


class Doorbell:
    """Sends a datagram when there are new events. Works without a listener."""

    def __init__(self, address: str, run_id: str) -> None:
        self._address = address
        self._message = run_id.encode()
        self._socket: socket.socket | None = None
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)
        except (OSError, AttributeError):
            self.close()

    def ring(self) -> None:
        if self._socket is not None:
            # By name each time: the listener may have restarted.
            with contextlib.suppress(OSError, ValueError):
                self._socket.sendto(self._message, self._address)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
