"""What happened to a run, as marks on the axis of its curves: kills, failures, resumes, checkpoints. As on the page."""

import time
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import NamedTuple

from trn.client.client import AsyncClient
from trn.core.terminal_text import plain
from trn.proto.records import Artifact, Run, RunDetails
from trn.qt.call_thread import CallThread, Ticket

READ_EVERY_S = 3.0
MAX_CHECKPOINTS = 500  # the newest


class MarkKind(StrEnum):
    RESUME = "resumed"
    FAILURE = "killed or failed"
    CHECKPOINT = "checkpoint"
    REMOVED = "checkpoint, removed since"


SIGNS = {MarkKind.CHECKPOINT: "◆", MarkKind.REMOVED: "◇", MarkKind.RESUME: "▶", MarkKind.FAILURE: "✕"}
LINES = frozenset({MarkKind.RESUME, MarkKind.FAILURE})  # these have a line over the whole height


class Mark(NamedTuple):
    step: int
    kind: MarkKind
    text: str


def marks_of(details: RunDetails, checkpoints: Iterable[Artifact]) -> list[Mark]:
    """By step. The end of a run is a mark only where it is a failure: a curve that stops says the rest."""
    return sorted([*_of_attempts(details), *_of_checkpoints(checkpoints)])


def say_signs(marks: Iterable[Mark]) -> str:
    """A legend of those that are there."""
    kinds = {mark.kind for mark in marks}
    return "   ".join(f"{sign} {kind}" for kind, sign in SIGNS.items() if kind in kinds)


class MarkReader:
    """Reads the marks of one run, again when it has new events. `show` is given them, and none while another is chosen."""

    def __init__(self, calls: CallThread, show: Callable[[list[Mark]], None]) -> None:
        self._calls = calls
        self._show = show
        self._shown: tuple[str, int] | None = None  # the run, and its event up to which its marks are shown
        self._asked_at = 0.0
        self._ticket: Ticket | None = None

    def choose(self, run_ids: list[str]) -> None:
        """Forget the marks, unless they are of this only run."""
        if self._shown is not None and run_ids == [self._shown[0]]:
            return
        if self._ticket is not None:
            self._ticket.cancel()
            self._ticket = None
        if self._shown is not None:
            self._shown = None
            self._show([])

    def read(self, run: Run) -> None:
        """If there may be new ones. Returns at once."""
        state = (run.run_id, run.last_seq)
        is_early = self._shown is not None and time.monotonic() < self._asked_at + READ_EVERY_S
        if self._ticket is not None or state == self._shown or is_early:
            return
        self._asked_at = time.monotonic()

        async def read(client: AsyncClient) -> list[Mark]:
            details = await client.details(run.run_id, is_exact=True)
            checkpoints = []
            async for each in client.artifacts(run.run_id, kind="checkpoint", is_exact=True):
                checkpoints.append(each)
                if len(checkpoints) == MAX_CHECKPOINTS:
                    break
            return marks_of(details, checkpoints)

        def take(marks: list[Mark]) -> None:
            self._ticket, self._shown = None, state
            self._show(marks)

        def give_up(_fault: Exception) -> None:
            self._ticket = None  # no marks until the next try

        self._ticket = self._calls.ask(read, take, give_up)


def _of_attempts(details: RunDetails) -> list[Mark]:
    run, found = details.run, []
    begin = run.start_step if run.parent_run_id else 0
    for attempt in details.attempts:
        if attempt is not details.attempts[0] or begin:
            text = f"attempt {attempt.number} continues from step {begin:,}"
            found.append(Mark(begin, MarkKind.RESUME, text))
        is_last = attempt is details.attempts[-1] and run.is_terminal
        if attempt.ended_ms is not None and (not is_last or run.state == "FAILED"):
            text = plain(attempt.reason) or "it ended"
            found.append(Mark(attempt.step, MarkKind.FAILURE, f"attempt {attempt.number}: {text}"))
        begin = int((attempt.cause.values or {}).get("from_step", begin))
    return found


def _of_checkpoints(checkpoints: Iterable[Artifact]) -> list[Mark]:
    """One for each step: the final checkpoint is often at the step of another one."""
    is_there: dict[int, bool] = {}
    for each in checkpoints:
        is_there[each.step] = is_there.get(each.step, False) or each.is_present
    return [
        Mark(step, MarkKind.CHECKPOINT if is_present else MarkKind.REMOVED, f"checkpoint of step {step:,}")
        for step, is_present in is_there.items()
    ]
