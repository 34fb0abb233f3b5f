"""The background process that makes staged checkpoints durable. Started by `CheckpointWriterClient`; imports no torch.

It does one save at a time, finishes it even if the trainer exits, and ignores signals.
"""

import os
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

import msgspec

from gen_worker.contract import failpoints
from gen_worker.errors import CheckpointError
from gen_worker.trainer.attempt.failure import find_cause
from gen_worker.trainer.checkpoints.files.staging import StagingBuffer
from gen_worker.trainer.checkpoints.writing.commit import Save
from gen_worker.trainer.checkpoints.writing.folder import CheckpointFolder
from gen_worker.trainer.checkpoints.writing.messages import (
    Done,
    Durable,
    Failed,
    Inbox,
    SaveRequest,
    WriterConfig,
    send,
)

NICENESS = 3  # training has priority; with much more, a busy machine would never finish a save
_RECEIVE_BYTES = 1 << 20


class CheckpointWriter:
    """Serves SaveRequests from one connection until it ends."""

    def __init__(self, config: WriterConfig, connection: socket.socket, staging: StagingBuffer) -> None:
        self._token = config.writer_token
        self._connection = connection
        self._staging = staging
        self._folder = CheckpointFolder(
            Path(config.checkpoints_dir), keep_last=config.keep_last, keep_best=config.keep_best
        )
        try:
            self._folder.clean_up(config.token)
        except OSError as error:
            print(f"checkpoint writer: leftovers were not removed: {error}", file=sys.stderr)  # noqa: T201

    def serve(self, inbox: Inbox) -> None:
        """Until the connection ends. `inbox` may hold bytes that were received before."""
        decoder = msgspec.json.Decoder(SaveRequest)
        while True:
            while (content := inbox.pop()) is not None:
                self._answer(self._save(decoder.decode(content)))
            data = self._connection.recv(_RECEIVE_BYTES)
            if not data:
                return
            inbox.feed(data)

    def _save(self, request: SaveRequest) -> Done | Failed:
        image = self._staging.view(request.size_bytes)
        try:
            save = Save(self._folder, request, image, self._token)
            return save.run(lambda: self._answer(Durable(at_s=time.monotonic())))
        except CheckpointError as error:
            return Failed(message=str(error), cause=find_cause(error))
        except Exception as error:
            traceback.print_exc()
            return Failed(message=f"saving {request.stem} failed in the checkpoint writer: {error!r}")

    def _answer(self, report: Durable | Done | Failed) -> None:
        with suppress(ConnectionError):  # the trainer has exited
            send(self._connection, report)


def serve_connection(config: WriterConfig, connection: socket.socket, inbox: Inbox) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to the whole group; the trainer handles them
    os.nice(NICENESS)
    failpoints.arm_from_env()
    CheckpointWriter(config, connection, StagingBuffer(config.staging_fd)).serve(inbox)


def main(argument: str) -> None:
    config = msgspec.json.decode(argument, type=WriterConfig)
    with socket.socket(fileno=config.socket_fd) as connection:
        serve_connection(config, connection, Inbox())


if __name__ == "__main__":
    main(sys.argv[1])
