"""`trn logs`: the output of a run's worker, byte for byte; with `--json` as JSON lines."""

import os
import sys
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gen_worker.contract.files.regular import NotRegularFileError, open_regular
from trn.cli.exit_codes import ExitCode
from trn.cli.output import json_option
from trn.cli.reading.registry_view import run_id_argument
from trn.core.errors import UnavailableError
from trn.core.home import Home
from trn.core.terminal_text import LogShield, shield_json

if TYPE_CHECKING:
    from trn.proto.records import LogChunk

EPILOG = """\b
Examples:
  trn logs mnist-2b53
  trn logs mnist-2b53 --tail 20 -f
  trn logs mnist-2b53 --json | jq -r .line
"""
PIECE_BYTES = 1 << 16
Sink = Callable[[bytes], None]


@click.command("logs", epilog=EPILOG)
@run_id_argument
@click.option("--follow", "-f", "is_followed", is_flag=True, help="Continue until the run has ended.")
@click.option("--tail", "num_lines", type=click.IntRange(min=0), metavar="N", help="Only the last N lines.")
@json_option
@click.pass_obj
def command(
    home: Home, /, *, run_id: str, is_followed: bool, num_lines: int | None, is_json: bool | None
) -> ExitCode:
    """Print the stdout and stderr of a run's worker, of all attempts.

    At a terminal without control sequences, in a pipe byte for byte. With --json: an object for each line, with its
    offset. Needs no daemon, except to follow a run that has not ended.
    """
    from trn.cli.following.follow import resolve

    run = resolve(home, run_id)
    path = home.run(run.run_id).log
    try:
        begin = 0 if num_lines is None else find_tail(path, num_lines)
        sink: Sink = LineSink(begin) if is_json else LogShield(_print) if sys.stdout.isatty() else _print
        at = _print_from(path, begin, sink)
        if is_followed and not run.state.is_terminal:
            import asyncio

            asyncio.run(_follow(home, run.run_id, at, sink))
        if isinstance(sink, LineSink | LogShield):
            sink.end()
    except BrokenPipeError:  # `trn logs RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except NotRegularFileError as fault:
        raise UnavailableError(f"the log {path} cannot be read: {fault.strerror}") from fault
    return ExitCode.OK


def find_tail(path: Path, num_lines: int) -> int:
    """The offset of the last lines of a file. A last line without a line end counts."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            at = file.seek(0, os.SEEK_END)
            if num_lines == 0:
                return at
            is_last = True
            while at > 0:
                begin = max(0, at - PIECE_BYTES)
                file.seek(begin)
                piece = file.read(at - begin)
                end = len(piece) - 1 if is_last and piece.endswith(b"\n") else len(piece)
                is_last = False
                while (found := piece.rfind(b"\n", 0, end)) >= 0:
                    num_lines -= 1
                    if num_lines == 0:
                        return begin + found + 1
                    end = found
                at = begin
    except FileNotFoundError:
        pass  # the worker has not started
    return 0


class LineSink:
    """Bytes in, `{"event": "log", "offset": …, "line": …}` out, for each complete line."""

    def __init__(self, at: int) -> None:
        self._at = at
        self._pieces: list[bytes] = []  # of an incomplete line

    def __call__(self, data: bytes) -> None:
        first, *others = data.split(b"\n")
        self._pieces.append(first)
        if others:
            lines = [b"".join(self._pieces), *others[:-1]]
            self._pieces = [others[-1]]
            _print(b"".join(map(self._take, lines)))

    def end(self) -> None:
        """Also print a last line without a line end."""
        rest = b"".join(self._pieces)
        if rest:
            _print(self._take(rest))

    def _take(self, line: bytes) -> bytes:
        import json

        record = {"event": "log", "offset": self._at, "line": line.decode(errors="replace")}
        self._at += len(line) + 1
        return shield_json(json.dumps(record, ensure_ascii=False)).encode() + b"\n"


def _print(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _print_from(path: Path, begin: int, sink: Sink) -> int:
    """Send the rest of the file to the sink; returns the offset of its end."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            file.seek(begin)
            while piece := file.read(PIECE_BYTES):
                sink(piece)
            return file.tell()
    except FileNotFoundError:
        return 0


async def _follow(home: Home, run_id: str, at: int, sink: Sink) -> None:
    from trn.cli.following.daemon_watch import DaemonWatch
    from trn.cli.following.follow import connected

    async with connected(home) as client:

        def again() -> "AsyncGenerator[LogChunk, None]":
            return client.logs(run_id, offset=at, is_followed=True, is_exact=True)

        async for chunk in DaemonWatch(client, home).following(again):
            sink(chunk.data)
            at = chunk.offset + len(chunk.data)
