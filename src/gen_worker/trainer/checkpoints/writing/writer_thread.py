"""A checkpoint writer inside of the trainer's process: for a run that saves nothing before its end.

Then nothing trains beside the save, the run waits for it, and a process for it would cost more than the save. It is
the same writer with the same talk; only what a process of its own gives is not there: it ends with its worker.
"""

import contextlib
import os
import socket
import threading

from gen_worker.trainer.checkpoints.files.staging import StagingBuffer
from gen_worker.trainer.checkpoints.writing.messages import Inbox, WriterConfig
from gen_worker.trainer.checkpoints.writing.writer import CheckpointWriter


class WriterThread:
    """Like a Popen, as far as its client knows one, with the connection beside it."""

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
            # Closing is not enough: a process that the author forked may have it open, too.
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RD)
