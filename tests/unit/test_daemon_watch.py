"""Whoever follows runs learns once that no daemon answers, why, and for how long that was borne."""

import asyncio
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from trn.cli.following.daemon_watch import Absence, DaemonWatch
from trn.client.daemon_start import RunningDaemon, is_ending, silence_of
from trn.core.errors import UnavailableError
from trn.core.home import Home


class Daemon:
    """Answers after it was asked so many times."""

    def __init__(self, num_silent: float) -> None:
        self.patience_s = 60.0
        self.num_silent = num_silent

    async def health(self) -> None:
        self.num_silent -= 1
        if self.num_silent >= 0:
            raise UnavailableError("failed to connect to all addresses")


def follow(home: Home, daemon: Any, *, lost_patience_s: float) -> tuple[list[int], list[Absence | None]]:
    told: list[Absence | None] = []
    seen: list[int] = []

    async def numbers() -> AsyncGenerator[int, None]:
        for number in range(len(seen), 3):
            yield number
            if number == 1 and len(seen) == 2 and not told:
                raise UnavailableError("the daemon stops")

    async def main() -> None:
        presence = DaemonWatch(daemon, home, told.append, lost_patience_s=lost_patience_s)
        async for number in presence.following(numbers):
            seen.append(number)

    asyncio.run(main())
    return seen, told


def test_a_daemon_that_was_stopped_is_told_once_and_then_that_it_is_back(tmp_path: Path) -> None:
    stopped = Absence("the daemon was stopped", f"`trn --home {tmp_path} daemon start` starts it again")
    assert follow(Home(tmp_path), Daemon(3), lost_patience_s=60) == ([0, 1, 2], [stopped, None])


def test_what_is_given_up_is_told_with_its_true_time_and_no_innards(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError) as caught:
        follow(Home(tmp_path), Daemon(float("inf")), lost_patience_s=0.1)
    assert str(caught.value) == (
        "no daemon has answered for 0.1 s, the daemon was stopped:"
        f" `trn --home {tmp_path} daemon start` starts it again"
    )


def test_a_process_that_is_no_daemon_is_not_one_that_ends(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert not is_ending(home)
    home.daemon_info.write_text(f'{{"pid": {os.getpid()}}}')  # of a dead one, whose number is another's now
    assert not is_ending(home)


def test_a_silent_daemon_is_named_with_what_helps() -> None:
    daemon = RunningDaemon(pid=os.getpid(), version="1", addresses=(), started_ms=0)
    assert silence_of(daemon) == (
        f"the daemon, pid {os.getpid()}, does not answer",
        "`trn daemon stop`, then `trn daemon start`",
    )
