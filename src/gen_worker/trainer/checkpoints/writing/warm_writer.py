"""A checkpoint writer that a warm worker forks at its start, while it has one thread: ten times faster than a new Python.

The launcher's child calls `prepare`; the client takes that writer with `take`. The writer receives its descriptors (the
staging buffer, the lease) through the socket.
"""

import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import NoReturn

import msgspec

from gen_worker.trainer.checkpoints.writing.messages import Inbox, WriterConfig, send

_MAX_FDS = 16


class WarmWriter:
    """The writer's process, with the interface of Popen."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self.connection = connection
        self.returncode: int | None = None

    def begin(self, config: WriterConfig, fds: Sequence[int]) -> None:
        """Give it its folder. `fds`: the staging buffer, then what it keeps open."""
        socket.send_fds(self.connection, [b"\0"], list(fds))
        send(self.connection, config)

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        return self._wait(0)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:
                self.returncode = 0  # another call reaped it; its exit status is unknown
            else:
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


_prepared: list[WarmWriter] = []


def prepare() -> None:
    """Fork a writer. Only in a process with one thread, before the author's code is imported."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _become_writer(theirs)
    theirs.close()
    _prepared.append(WarmWriter(pid, ours))


def take() -> WarmWriter | None:
    """The prepared writer, once; None where there is none or it has died."""
    while _prepared:
        writer = _prepared.pop()
        if writer.poll() is None:
            return writer
        writer.connection.close()
    return None


def _become_writer(connection: socket.socket) -> NoReturn:
    code = 1
    try:
        from gen_worker.trainer.checkpoints.writing.writer import serve_connection

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        marker, fds, _flags, _address = socket.recv_fds(connection, 1, _MAX_FDS)
        if marker:  # else the worker exited before its first save
            inbox = Inbox()
            while (content := inbox.pop()) is None:
                data = connection.recv(1 << 16)
                if not data:
                    os._exit(0)
                inbox.feed(data)
            config = msgspec.json.decode(content, type=WriterConfig)
            serve_connection(msgspec.structs.replace(config, staging_fd=fds[0]), connection, inbox)
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
