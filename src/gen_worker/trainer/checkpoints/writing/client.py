"""The trainer's side of the checkpoint writer: starts it, sends saves, receives the reports."""

import contextlib
import logging
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from gen_worker.contract.files.unshared import keep_from_children, no_longer_open
from gen_worker.errors import CheckpointError
from gen_worker.trainer.checkpoints.files.staging import StagingBuffer, open_anonymous_file
from gen_worker.trainer.checkpoints.writing.messages import (
    Done,
    Durable,
    Failed,
    Inbox,
    Report,
    SaveRequest,
    WriterConfig,
    pack,
)
from gen_worker.trainer.checkpoints.writing.stall_timer import StallLimits, StallTimer, describe_state
from gen_worker.trainer.checkpoints.writing.warm_writer import WarmWriter, take
from gen_worker.trainer.checkpoints.writing.writer import CheckpointWriter

_MODULE = "gen_worker.trainer.checkpoints.writing.writer"
_RECEIVE_BYTES = 1 << 16
CLOSE_S = 60.0  # of an idle writer
KILL_S = 5.0
POLL_S = 0.01
_log = logging.getLogger(__name__)


class WriterThread:
    """A writer in this process, with the interface of Popen: for a run that saves only at its end.

    The run waits for that save anyway. The writer ends with its worker.
    """

    def __init__(self, config: WriterConfig) -> None:
        self.pid = os.getpid()
        self.returncode: int | None = None
        self.connection, self._theirs = socket.socketpair()
        self._config = config
        self._thread = threading.Thread(target=self._serve, name="checkpoint-writer", daemon=True)
        self._thread.start()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        self._thread.join(timeout)
        return self.returncode

    def _serve(self) -> None:
        code = 1
        try:
            with self._theirs:
                staging = StagingBuffer(self._config.staging_fd)
                CheckpointWriter(self._config, self._theirs, staging).serve(Inbox())
                code = 0
        finally:
            self.returncode = code
            # Closing is not enough: a forked process may have it open.
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RD)


AnyWriter = subprocess.Popen[bytes] | WarmWriter | WriterThread
_report_decoder: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report)


class CheckpointWriterClient:
    """One writer at a time, one save in flight at a time. Used from one thread."""

    def __init__(
        self,
        checkpoints_dir: Path,
        *,
        token: str,
        keep_last: int,
        keep_best: int,
        inherit_fds: Sequence[int] = (),
        is_in_process: bool = False,
        limits: StallLimits | None = None,
        tell: Callable[[str], None] = _log.warning,
    ) -> None:
        """`tell` gets the warnings of the `StallTimer`."""
        self._stall = StallTimer(limits or StallLimits(), tell)
        self._stuck = ""  # why no other writer may start: one that cannot be killed has the staging buffer
        self.staging = StagingBuffer(open_anonymous_file())
        self._checkpoints_dir = checkpoints_dir
        self._token = token
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._inherit_fds = tuple(inherit_fds)
        self._is_in_process = is_in_process
        self._process: AnyWriter | None = None
        self._connection: socket.socket | None = None
        self._inbox = Inbox()
        self._stem = ""  # of the save in flight

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def is_busy(self) -> bool:
        return bool(self._stem)

    def start(self) -> None:
        """Start the writer if none runs. Does not wait for it."""
        if self._stuck:
            raise CheckpointError(self._stuck)
        if self._process is not None and self._process.poll() is None:
            return
        if self._process is not None:  # it was idle: nothing is lost
            _log.warning(
                "the checkpoint writer %s while idle; starting another", _describe_end(self._process)
            )
            self._forget()
        warm = None if self._is_in_process else take()
        if self._is_in_process:
            self._process = WriterThread(self._config())
            self._connection = self._process.connection
        elif warm is not None:
            self._process, self._connection = warm, warm.connection
            # The lease too: the folder stays leased until this writer has finished.
            with contextlib.suppress(ConnectionError):  # it just died: the first save reports that
                warm.begin(self._config(), (self.staging.fd, *self._inherit_fds))
        else:
            self._start_cold()
        assert self._connection is not None
        keep_from_children(self._connection.fileno())  # its end tells the writer that this process has exited
        self._inbox = Inbox()

    def _start_cold(self) -> None:
        ours, theirs = socket.socketpair()
        config = self._config(socket_fd=theirs.fileno())
        # -P: a file beside the author's code must not replace a library.
        command = [sys.executable, "-P", "-m", _MODULE, msgspec.json.encode(config).decode()]
        with theirs, _blocked_signals():
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), self.staging.fd, *self._inherit_fds),
            )
        self._connection = ours

    def _config(self, *, socket_fd: int = -1) -> WriterConfig:
        return WriterConfig(
            checkpoints_dir=str(self._checkpoints_dir),
            socket_fd=socket_fd,
            staging_fd=self.staging.fd,
            token=self._token,
            writer_token=secrets.token_hex(4),
            keep_last=self._keep_last,
            keep_best=self._keep_best,
        )

    def send(self, request: SaveRequest) -> None:
        assert not self._stem, "one save in flight"
        self.start()
        assert self._connection is not None
        self._stem = request.stem
        self._stall.begin(request.stem, request.size_bytes)
        rest = memoryview(pack(request))
        try:
            while rest:
                if select.select([], [self._connection], [], self._stall.slice_s(None))[1]:
                    with contextlib.suppress(BlockingIOError):
                        rest = rest[self._connection.send(rest, socket.MSG_DONTWAIT) :]
                else:
                    self._look()
        except ConnectionError:
            raise self._death() from None

    def receive(self, timeout_s: float | None) -> Iterator[Durable | Done]:
        """The writer's reports. Waits up to `timeout_s` (None: forever) for the first.

        Raises CheckpointError once if the save failed or the writer died.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._stem:
            content = self._inbox.pop()
            if content is not None:
                self._stall.reset()
                report = _report_decoder.decode(content)
                if not isinstance(report, Durable):
                    self._stem = ""
                if isinstance(report, Failed):
                    error = CheckpointError(report.message)
                    error.cause = report.cause
                    raise error
                yield report
                deadline = 0.0  # do not wait for further reports
                continue
            if not self._read(deadline):
                return

    def close(self) -> None:
        """Blocks until the writer has finished and exited."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_WR)
        if self._process is not None and not _has_ended(self._process, CLOSE_S):
            _log.warning("the checkpoint writer did not exit within %.0f s: killed", CLOSE_S)
            self._kill()
        self._forget()
        self.staging.close()

    def _read(self, deadline: float | None) -> bool:
        assert self._connection is not None
        while True:
            remaining = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            if (
                remaining == 0.0
                or select.select([self._connection], [], [], self._stall.slice_s(remaining))[0]
            ):
                break
            self._look()
            if deadline is not None and time.monotonic() >= deadline:
                return False
        try:
            data = self._connection.recv(_RECEIVE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            self._look()
            return False
        except ConnectionError:
            data = b""
        if not data:
            raise self._death()
        self._inbox.feed(data)
        return True

    def _look(self) -> None:
        """CheckpointError where the writer has stalled for too long."""
        assert self._process is not None
        if not self._stall.is_over(self._process.pid):
            return
        stem, self._stem = self._stem, ""
        words = f"the checkpoint writer {self._stall.words}{describe_state(self._process.pid)} while saving {stem}"
        if self._kill():
            end = "killed; that save is lost. The next save starts another writer"
        else:
            end = "it cannot be killed, so nothing more can be saved"
            self._stuck = f"{words}; {end}"
        self._forget()
        error = CheckpointError(f"{words}: {end}. Older checkpoints are unchanged")
        error.cause = signal.SIGKILL.name
        raise error

    def _kill(self) -> bool:
        """False for what cannot be killed: a thread, or a process in an uninterruptible wait."""
        process = self._process
        if process is None or isinstance(process, WriterThread):
            return process is None
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)  # also kills a stopped process
        return _has_ended(process, KILL_S)

    def _death(self) -> CheckpointError:
        assert self._process is not None
        stem, self._stem = self._stem, ""
        self._process.wait()
        end = _describe_end(self._process)
        code = self._process.returncode
        self._forget()
        error = CheckpointError(
            f"the checkpoint writer {end} while saving {stem}; that save is lost. Older checkpoints are unchanged. "
            "The next save starts another writer"
        )
        if code is not None and code < 0:
            error.cause = signal.Signals(-code).name
        return error

    def _forget(self) -> None:
        if self._connection is not None:
            no_longer_open(self._connection.fileno())
            self._connection.close()
        self._connection = self._process = None
        self._stem = ""


def _has_ended(process: AnyWriter, timeout_s: float) -> bool:
    if isinstance(process, WriterThread):
        return process.wait(timeout_s) is not None
    deadline = time.monotonic() + timeout_s
    try:
        pidfd = os.pidfd_open(process.pid)
    except (OSError, AttributeError):  # it has exited, or this system has no pidfd
        pidfd = -1
    try:
        if pidfd >= 0:
            select.select([pidfd], [], [], timeout_s)
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
    finally:
        if pidfd >= 0:
            os.close(pidfd)
    return process.poll() is not None


def _describe_end(process: AnyWriter) -> str:
    code = process.returncode
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"


@contextlib.contextmanager
def _blocked_signals() -> Iterator[None]:
    """The child inherits the mask: a signal to the group cannot kill it before it ignores signals."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
