"""How an attempt ended, and what that makes of its run: one pure decision over the table of failures.

The stronger word wins: the worker's `completed`, then why we ended it, then how the system ended it, then what the
worker's own `failed` says. A terminal event that we wrote for a worker that could not is known by its cause, which
stands first in its text, so the decision is the same if it is made again after a restart.
"""

import hashlib
import signal
from collections.abc import Sequence

import msgspec

from gen_worker.errors import Category, ExitCode
from trn.core.runs import AttemptRecord, RunRecord, RunState
from trn.daemon.event_file import Terminal
from trn.daemon.failures import CONTRACT_CAUSES, FAILURES, Failure
from trn.executors.base import WorkerExit
from trn.registry.sqlite import Ending

MAX_BACKOFF_S = 3600.0
MAX_INTERRUPTIONS = 100
MAX_INTERRUPTION_BACKOFF_S = 60.0
JITTER = 0.1
MAX_CAUSE_CHARS = 2000


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """Why we ended an attempt, or why it never began."""

    cause: str  # "cancel", or a row of FAILURES
    detail: str = ""
    was_killed: bool = False  # it did not stop when it was asked to


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong: a row, and this time's own words."""

    row: Failure
    words: str

    @property
    def error(self) -> str:
        """For a terminal event that we write: `find_failure` knows it again."""
        return f"{self.row.cause}: {self.words}"


def find_failure(
    worker_exit: WorkerExit | None, terminal: Terminal | None, wish: Wish | None, step: int
) -> Finding:
    """Why it did not complete. `worker_exit` is None where no process ever was."""
    if wish is not None and wish.cause in FAILURES:
        return _finding(wish.cause, wish.detail)
    if terminal is not None and terminal.event == "failed":
        ours, _, words = terminal.error.partition(": ")
        if ours in FAILURES and ours not in CONTRACT_CAUSES:
            return Finding(row=FAILURES[ours], words=words)
        if terminal.category in CONTRACT_CAUSES:
            at = f" at step {step}" if step and terminal.category == Category.TRAIN_STEP else ""
            row = FAILURES[terminal.category]
            return Finding(row=row, words=f"{row.words}{at}: {terminal.error}")
    if worker_exit is None:
        return _finding("never-launched")
    if worker_exit.is_reboot:
        return _finding("reboot", worker_exit.detail)
    if worker_exit.is_out_of_memory:
        return _finding("out-of-memory", worker_exit.detail)
    return _find_by_code(worker_exit)


def decide(
    run: RunRecord,
    attempts: Sequence[AttemptRecord],
    worker_exit: WorkerExit | None,
    terminal: Terminal | None,
    wish: Wish | None,
    *,
    now_ms: int,
) -> Ending:
    """The end of the newest attempt. `attempts` are those before it; `run` is as it was while this one ran."""
    exit_code = None if worker_exit is None else worker_exit.exit_code
    step = run.step if terminal is None else terminal.step
    if terminal is not None and terminal.event == "completed":
        stop_reason = _shorten(terminal.stop_reason)
        cause = f"completed at step {step}{f'; stopped early: {stop_reason}' if stop_reason else ''}"
        if exit_code not in (0, None):
            cause = f"{cause}; its process then ended badly: {describe_exit(exit_code)}"
        return Ending(
            state=RunState.COMPLETED, reason=cause, cause=cause, exit_code=exit_code, stop_reason=stop_reason
        )
    if run.is_cancel_wanted or (wish is not None and wish.cause == "cancel"):
        return _cancelled(run, worker_exit, terminal, wish, step)
    finding = find_failure(worker_exit, terminal, wish, step)
    row, words = finding.row, _shorten(finding.words)
    num_failures = run.attempt - run.num_interruptions if row.counts else 0
    state, reason, not_before_ms = RunState.FAILED, f"{words}; {row.why}", 0
    if not row.is_retried:
        pass
    elif row.counts and num_failures >= run.max_attempts:
        tries = (
            "retry.max_attempts is 1" if run.max_attempts == 1 else f"all {run.max_attempts} attempts failed"
        )
        reason = f"{words}; not tried again: {tries}"
    elif row.fault == "job" and _is_repeated(attempts, row, words, step):
        reason = f"{words}; not tried again: it was the same at step {step} the time before"
    elif not row.counts and run.num_interruptions + 1 >= MAX_INTERRUPTIONS:
        reason = f"{words}; not tried again: it was interrupted {MAX_INTERRUPTIONS} times"
    else:
        delay_s = backoff_s(run, num_failures)
        state, not_before_ms = RunState.PENDING, now_ms + round(delay_s * 1000)
        when = f" in {delay_s:.3g} s" if delay_s >= 1 else ""
        reason = f"attempt {run.attempt}: {words}; attempt {run.attempt + 1} follows{when}"
    return Ending(
        state=state,
        reason=reason,
        cause=words,
        category=row.category,
        exit_code=exit_code,
        not_before_ms=not_before_ms,
        is_interruption=not row.counts,
    )


def close_words(run: RunRecord, worker_exit: WorkerExit, wish: Wish | None) -> tuple[str, str]:
    """(category, error) of the terminal event that a worker did not write itself."""
    if run.is_cancel_wanted:
        return Category.CANCELLED, _cancelled(run, worker_exit, None, wish, run.step).reason
    finding = find_failure(worker_exit, None, wish, run.step)
    return finding.row.category, _shorten(finding.error)


def backoff_s(run: RunRecord, num_failures: int) -> float:
    """Twice as long after each failure, at most an hour; with a jitter that is the run's own. 0 failures: interrupted."""
    if num_failures == 0:
        return (
            min(2.0**run.num_interruptions / 2, MAX_INTERRUPTION_BACKOFF_S) if run.num_interruptions else 0.0
        )
    retry = run.config.get("retry")
    first_s = retry.get("backoff_s", 10.0) if isinstance(retry, dict) else 10.0
    seed = hashlib.sha256(f"{run.digest}/{run.run_id}/{num_failures}".encode()).digest()
    jitter = 1 + JITTER * (int.from_bytes(seed[:4], "big") / 2**31 - 1)
    return float(min(first_s * 2.0 ** min(num_failures - 1, 30) * jitter, MAX_BACKOFF_S))


def describe_exit(exit_code: int | None) -> str:
    """An exit code in words."""
    if exit_code is None:
        return "how it ended is not known"
    if exit_code < 0:
        name = _signal_name(-exit_code)
        return FAILURES[name].words if name in FAILURES else f"killed by {name}"
    known = {int(code): code.name.lower().replace("_", "-") for code in ExitCode}
    return f"exit code {exit_code}{f' ({known[exit_code]})' if exit_code in known else ''}"


def _cancelled(
    run: RunRecord, worker_exit: WorkerExit | None, terminal: Terminal | None, wish: Wish | None, step: int
) -> Ending:
    asked = run.cancel_reason or (wish.detail if wish is not None else "") or "cancelled"
    if worker_exit is None:
        reason = f"{asked}; it had not started"
    elif wish is not None and wish.was_killed:
        reason = f"{asked}; at step {step} it did not stop within grace, was killed"
    elif terminal is not None and terminal.category != Category.CANCELLED:
        reason = _shorten(f"{asked}; it ended by itself meanwhile: {terminal.error}")
    else:
        reason = f"{asked}; stopped at step {step}"
    return Ending(
        state=RunState.CANCELLED,
        reason=reason,
        cause=reason,
        category=Category.CANCELLED,
        exit_code=None if worker_exit is None else worker_exit.exit_code,
    )


def _finding(cause: str, detail: str = "") -> Finding:
    row = FAILURES[cause]
    is_said = detail in row.words  # what the launcher says of a signal, the table says better
    return Finding(row=row, words=row.words if is_said else f"{row.words}: {detail}")


def _find_by_code(worker_exit: WorkerExit) -> Finding:
    code, detail = worker_exit.exit_code, worker_exit.detail
    if code is None:
        return _finding("lost", detail)
    if code < 0:
        name = _signal_name(-code)
        if name in FAILURES:
            return _finding(name, detail)
        row = FAILURES["signal"]
        return Finding(
            row=row, words=detail if name in detail else f"killed by {name}: {detail}".rstrip(": ")
        )
    by_code = {int(ExitCode[category.name]): category for category in Category}
    if code in by_code:
        row = FAILURES[by_code[code]]
        return Finding(row=row, words=f"{row.words}: {describe_exit(code)}, without a word: see the log")
    # Python ends with 1 after a traceback; any other code is one that the job's own code chose.
    where = (
        "a traceback, if there was one, is in the log"
        if code == 1
        else "no exception ended it: code of the job did"
    )
    knows_no_more = detail in ("", f"exit code {code}")  # the launcher
    return _finding("bug", f"{describe_exit(code)}: {where}" if knows_no_more else detail)


def _is_repeated(attempts: Sequence[AttemptRecord], row: Failure, words: str, step: int) -> bool:
    """True where the failure before this one was the same, at the same step."""
    before = next((item for item in reversed(attempts) if item.ended_ms is not None), None)
    return before is not None and (before.category, before.cause, before.step) == (row.category, words, step)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_CAUSE_CHARS else text[: MAX_CAUSE_CHARS - 1] + "…"
