"""Copies a run's events to another file descriptor while it runs."""

import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from gen_worker.trainer.events.event_tail import line_end_before

LOOK_EVERY_S = 0.1
_CHUNK_BYTES = 1 << 16


class EventMirror:
    """Copies whole lines that are appended from now on, in a thread. Its exit copies the rest."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd
        self._position = _end_of_last_line(path)
        self._is_broken = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="event-mirror", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._stop.wait(LOOK_EVERY_S):
            self._copy()
        self._copy()

    def _copy(self) -> None:
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                while not self._is_broken:
                    lines = file.read(_CHUNK_BYTES)
                    if b"\n" not in lines:
                        rest = file.readline() if len(lines) == _CHUNK_BYTES else b""
                        if not rest.endswith(b"\n"):
                            return  # an incomplete line
                        lines += rest
                    lines = lines[: lines.rindex(b"\n") + 1]
                    self._write(lines)
                    self._position += len(lines)
                    file.seek(self._position)
        except FileNotFoundError:
            return  # the worker has not opened it yet

    def _write(self, content: bytes) -> None:
        try:
            write_all(self._fd, content)
        except OSError:
            self._is_broken = True  # the reader is closed; the run continues


def write_all(fd: int, content: bytes) -> None:
    """Write everything; one `os.write` to a pipe may write less."""
    while content:
        content = content[os.write(fd, content) :]


def _end_of_last_line(path: Path) -> int:
    """Offset after the last newline. The worker drops an incomplete line when it starts."""
    try:
        with path.open("rb") as file:
            return line_end_before(file, file.seek(0, os.SEEK_END))
    except FileNotFoundError:
        return 0
