"""Notices a checkpoint writer that makes no progress: stopped (SIGSTOP), frozen, or waiting for a disk.

Only time in which this process ran is counted, so that a suspended machine is no stall.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from gen_worker.contract.process_identity import read_process

MAX_SLICE_S = 5.0  # between two checks
MAX_COUNTED_S = 30.0  # between two checks, of a loop that checks once a step


@dataclass(frozen=True, slots=True, kw_only=True)
class StallLimits:
    """A fixed time, and more for each byte of the save."""

    warn_s: float = 60.0
    give_up_s: float = 600.0
    warn_bytes_per_s: float = 50e6
    give_up_bytes_per_s: float = 10e6


class StallTimer:
    """`begin` at a request, `reset` at each message of the writer."""

    def __init__(
        self,
        limits: StallLimits,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._tell = tell
        self._clock = clock
        self._stem = ""
        self._warn_s = self._give_up_s = float("inf")
        self._quiet_s = 0.0
        self._looked_s = 0.0
        self._is_warned = False

    def begin(self, stem: str, size_bytes: int) -> None:
        limits = self._limits
        self._stem = stem
        self._warn_s = limits.warn_s + size_bytes / limits.warn_bytes_per_s
        self._give_up_s = limits.give_up_s + size_bytes / limits.give_up_bytes_per_s
        self._start_count()

    def reset(self) -> None:
        if self._is_warned:
            self._tell(f"the checkpoint writer answers again, after {self._quiet_s:.0f} s")
        self._start_count()

    def _start_count(self) -> None:
        self._quiet_s, self._looked_s, self._is_warned = 0.0, self._clock(), False

    def slice_s(self, remaining_s: float | None) -> float:
        """How long to wait until the next check."""
        return min(
            MAX_SLICE_S,
            self._limits.warn_s,
            self._limits.give_up_s,
            float("inf") if remaining_s is None else remaining_s,
        )

    def is_over(self, pid: int) -> bool:
        """Check once: warns after `warn_s`, True after `give_up_s`."""
        now = self._clock()
        self._quiet_s += min(now - self._looked_s, MAX_COUNTED_S)
        self._looked_s = now
        if self._quiet_s >= self._warn_s and not self._is_warned:
            self._is_warned = True
            self._tell(
                f"the checkpoint writer (process {pid}{describe_state(pid)}) has not answered for {self._quiet_s:.0f} s"
                f" while saving {self._stem}; it is killed after {self._give_up_s:.0f} s"
            )
        return self._quiet_s >= self._give_up_s

    @property
    def words(self) -> str:
        return f"has not answered for {self._quiet_s:.0f} s"


_STATES = {"T": ", stopped by a signal", "t": ", stopped by a debugger", "D": ", waiting for a disk"}


def describe_state(pid: int) -> str:
    """Why a process does not run; empty where it does."""
    with contextlib.suppress(OSError):
        state = read_process(pid)
        return _STATES.get(state.letter, "") if state else ""
    return ""
