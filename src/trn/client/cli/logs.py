"""`trn logs`: what a run's worker wrote, byte by byte."""

import os
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trn.client.cli.exit_codes import ExitCode
from trn.client.cli.registry_view import run_id_argument
from trn.core.home import Home

if TYPE_CHECKING:
    from trn.proto.records import LogChunk

EPILOG = """\b
Examples:
  trn logs mnist-2b53
  trn logs mnist-2b53 --tail 20 -f
"""
PIECE_BYTES = 1 << 16


@click.command("logs", epilog=EPILOG, short_help="Print what a run's worker wrote.")
@run_id_argument
@click.option("--follow", "-f", "is_followed", is_flag=True, help="Go on until the run has ended.")
@click.option("--tail", "num_lines", type=click.IntRange(min=0), metavar="N", help="Only the last N lines.")
@click.pass_obj
def command(home: Home, /, *, run_id: str, is_followed: bool, num_lines: int | None) -> ExitCode:
    """Print the log of a run's worker as it is: its stdout and stderr, of all attempts.

    Needs no daemon, except to follow a run that has not ended.
    """
    from trn.client.cli.follow import resolve

    run = resolve(home, run_id)
    path = home.run(run.run_id).log
    begin = 0 if num_lines is None else find_tail(path, num_lines)
    try:
        at = _print_from(path, begin)
        if is_followed and not run.state.is_terminal:
            import asyncio

            asyncio.run(_follow(home, run.run_id, at))
    except BrokenPipeError:  # `trn logs RUN | head`: whoever read us has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return ExitCode.OK


def find_tail(path: Path, num_lines: int) -> int:
    """Where the last lines of a file begin. A last line without its end is one, too."""
    try:
        with path.open("rb") as file:
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
        pass  # it has not begun yet
    return 0


def _print_from(path: Path, begin: int) -> int:
    """What there is, to stdout; where it ends."""
    try:
        with path.open("rb") as file:
            file.seek(begin)
            while piece := file.read(PIECE_BYTES):
                sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
            return file.tell()
    except FileNotFoundError:
        return 0


async def _follow(home: Home, run_id: str, at: int) -> None:
    from trn.client.cli.follow import connected
    from trn.client.cli.presence import Presence

    async with connected(home) as client:

        def again() -> "AsyncGenerator[LogChunk, None]":
            return client.logs(run_id, offset=at, is_followed=True)

        async for chunk in Presence(client, home).following(again):
            sys.stdout.buffer.write(chunk.data)
            sys.stdout.buffer.flush()
            at = chunk.offset + len(chunk.data)
