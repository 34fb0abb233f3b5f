"""How an attempt ended, and what that makes of its run: one pure decision over the table of failures.

The stronger word wins: the worker's `completed`, then why we ended it, then how the system ended it, then what the
worker's own `failed` says. A terminal event that we wrote for a worker that could not has our cause in its `cause`, so
the decision is the same if it is made again after a restart.

Retry, by progress. An attempt's mark is the step that the next one would resume from, once it has ended. It made
progress if its mark is beyond those of all earlier attempts. So the marks of attempts with progress grow, and between
two of them there are fewer than `retry.max_attempts` others: no run is tried for ever.
A run that saves nothing makes no progress, however many steps it trains.
"""

import hashlib
import signal
from collections.abc import Sequence

import msgspec

from gen_worker.contract.job.spec import RetrySpec
from gen_worker.errors import Category, ExitCode
from trn.core.runs import AttemptRecord, RunRecord, RunState
from trn.daemon.dispatch.failures import CONTRACT_CAUSES, FAILURES, Failure
from trn.daemon.ingest.event_file import Terminal
from trn.executors.base import WorkerExit
from trn.registry.sqlite import Ending

MAX_BACKOFF_S = 300.0
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
    category: str
    is_reported: bool = False  # by the worker itself, which knows the step exactly


def find_failure(
    worker_exit: WorkerExit | None, terminal: Terminal | None, wish: Wish | None, step: int
) -> Finding:
    """Why it did not complete. `worker_exit` is None where no process ever was."""
    if terminal is not None and terminal.closed_by and terminal.cause in FAILURES:
        row = FAILURES[terminal.cause]  # found before, by this same function
        return Finding(row=row, words=terminal.error, category=terminal.category)
    if wish is not None and wish.cause in FAILURES:
        return _finding(wish.cause, step, wish.detail)
    if terminal is not None and terminal.event == "failed":
        reported = _find_reported(terminal, worker_exit, step)
        if reported is not None:
            return reported
    if worker_exit is None:
        return _finding("never-launched", 0)
    if worker_exit.is_reboot:
        return _finding("reboot", step, worker_exit.detail)
    if worker_exit.is_out_of_memory:
        return _finding("out-of-memory", step, worker_exit.detail)
    return _find_by_code(worker_exit, step)


def decide(
    run: RunRecord,
    attempts: Sequence[AttemptRecord],
    worker_exit: WorkerExit | None,
    terminal: Terminal | None,
    wish: Wish | None,
    *,
    saved_step: int,
) -> Ending:
    """The end of the newest attempt. `attempts` are those before it; `run` is as it was while this one ran.

    `saved_step`: where the next attempt would begin, 0 where nothing was saved.
    """
    exit_code = None if worker_exit is None else worker_exit.exit_code
    step = run.step if terminal is None else terminal.step
    if terminal is not None and terminal.event == "completed":
        stop_reason = _shorten(terminal.stop_reason)
        cause = f"completed at step {step}{f'; stopped early: {stop_reason}' if stop_reason else ''}"
        if exit_code not in (0, None):
            cause = f"{cause}; its process then ended badly: {describe_exit(exit_code)}"
        return Ending(
            state=RunState.COMPLETED,
            reason=cause,
            cause=cause,
            exit_code=exit_code,
            stop_reason=stop_reason,
            saved_step=saved_step,
        )
    if run.is_cancel_wanted or (wish is not None and wish.cause == "cancel"):
        ending = _cancelled(run, worker_exit, terminal, wish, step)
        return msgspec.structs.replace(ending, saved_step=saved_step)
    finding = find_failure(worker_exit, terminal, wish, step)
    state, outlook, delay_s = _retry(run, attempts, finding, step, saved_step)
    return Ending(
        state=state,
        reason=f"{finding.words}; {outlook}",
        cause=finding.words,
        cause_id=finding.row.cause,
        category=finding.category,
        exit_code=exit_code,
        delay_ms=round(delay_s * 1000),
        is_interruption=finding.row.retry == "not counted",
        saved_step=saved_step,
    )


def _retry(
    run: RunRecord, attempts: Sequence[AttemptRecord], finding: Finding, step: int, saved_step: int
) -> tuple[RunState, str, float]:
    """(what becomes of the run, in words, after how many seconds)."""
    row, retry = finding.row, read_retry(run)
    follows = f"attempt {run.attempt + 1}"
    if row.retry == "not counted":
        if run.num_interruptions + 1 >= MAX_INTERRUPTIONS:
            return RunState.FAILED, f"not tried again: this happened {MAX_INTERRUPTIONS} times", 0
        delay_s = interruption_backoff_s(run)
        return RunState.PENDING, f"retrying {_when(delay_s)} ({follows})", delay_s
    if row.retry == "no" or (row.retry == "on error" and not retry.on_error):
        return RunState.FAILED, row.why, 0
    if run.max_attempts == 0:
        return RunState.FAILED, "not tried again: retry.max_attempts is 0", 0
    if finding.is_reported and row.is_final_if_repeated and _is_repeated(attempts, finding, step):
        return RunState.FAILED, f"not tried again: the same error at step {step} twice in a row", 0
    whence = _whence(run, saved_step)
    num_stalled = count_stalled(attempts, saved_step)
    if num_stalled == 0:
        return RunState.PENDING, f"retrying at once{whence} ({follows})", 0
    if num_stalled >= run.max_attempts:
        stalled = (
            "this attempt saved no newer checkpoint"
            if num_stalled == 1
            else f"{num_stalled} attempts without a newer checkpoint"
        )
        return (
            RunState.FAILED,
            f"not tried again: {stalled} (retry.max_attempts is {run.max_attempts})",
            0,
        )
    delay_s = backoff_s(run, num_stalled)
    progress = f"{num_stalled} of {run.max_attempts} without a newer checkpoint"
    return RunState.PENDING, f"retrying {_when(delay_s)}{whence} ({follows}; {progress})", delay_s


def count_stalled(attempts: Sequence[AttemptRecord], saved_step: int) -> int:
    """How many attempts in a row, up to the one that ends with `saved_step`, made no progress."""
    reached = num_stalled = 0
    for mark in (*(item.saved_step for item in attempts if is_counted(item)), saved_step):
        num_stalled = 0 if mark > reached else num_stalled + 1
        reached = max(reached, mark)
    return num_stalled


def is_counted(attempt: AttemptRecord) -> bool:
    """False where no process stood for it."""
    return attempt.cause_id not in FAILURES or FAILURES[attempt.cause_id].retry != "not counted"


def read_retry(run: RunRecord) -> RetrySpec:
    try:
        return msgspec.convert(run.config.get("retry", {}), RetrySpec)
    except msgspec.ValidationError:  # never submitted so
        return RetrySpec()


def _whence(run: RunRecord, saved_step: int) -> str:
    if saved_step:
        return f" from step {saved_step}"
    inputs = run.config.get("inputs") or {}
    is_resumed = run.config.get("resume_checkpoint_path") or inputs.get("resume_checkpoint_ref")
    return "" if is_resumed else " from the start"


def _when(delay_s: float) -> str:
    return f"in {delay_s:.3g} s" if delay_s >= 1 else "at once"


def close_words(run: RunRecord, worker_exit: WorkerExit, wish: Wish | None) -> tuple[str, str, str]:
    """(category, error, cause) of the terminal event that a worker did not write itself."""
    if run.is_cancel_wanted:
        return Category.CANCELLED, _cancelled(run, worker_exit, None, wish, run.step).reason, ""
    finding = find_failure(worker_exit, None, wish, run.step)
    return finding.category, finding.words, finding.row.cause


def backoff_s(run: RunRecord, num_stalled: int) -> float:
    """Twice as long after each attempt without progress; with a jitter that is the run's own."""
    seed = hashlib.sha256(f"{run.digest}/{run.run_id}/{num_stalled}".encode()).digest()
    jitter = 1 + JITTER * (int.from_bytes(seed[:4], "big") / 2**31 - 1)
    return float(min(read_retry(run).backoff_s * 2.0 ** min(num_stalled - 1, 30) * jitter, MAX_BACKOFF_S))


def interruption_backoff_s(run: RunRecord) -> float:
    """At once the first time: nothing was started."""
    return min(2.0**run.num_interruptions / 2, MAX_INTERRUPTION_BACKOFF_S) if run.num_interruptions else 0.0


def describe_exit(exit_code: int | None) -> str:
    """An exit code in words."""
    if exit_code is None:
        return "how it ended is not known"
    if exit_code < 0:
        return f"killed by {_signal_name(-exit_code)}"
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


def _finding(cause: str, step: int, detail: str = "") -> Finding:
    row = FAILURES[cause]
    # What the launcher says of a signal, the table says better.
    return _make(row, step, row.hint if detail in f"{row.words}: {row.hint}" else detail)


def _make(row: Failure, step: int, detail: str, *, category: str = "", is_reported: bool = False) -> Finding:
    at = f" at step {step}" if step else ""
    words = f"{row.words}{at}: {detail}" if detail else f"{row.words}{at}"
    return Finding(row=row, words=_shorten(words), category=category or row.category, is_reported=is_reported)


def _find_reported(terminal: Terminal, worker_exit: WorkerExit | None, step: int) -> Finding | None:
    category = terminal.category if terminal.category in CONTRACT_CAUSES else ""
    cause = terminal.cause
    if cause == "SIGKILL" and worker_exit is not None and worker_exit.is_out_of_memory:
        cause = "out-of-memory"
    row = FAILURES.get(cause) or FAILURES.get(category)
    if row is None:
        return None
    at = step if row.category in (Category.TRAIN_STEP, Category.CANCELLED) else 0
    return _make(row, at, terminal.error, category=category, is_reported=True)


def _find_by_code(worker_exit: WorkerExit, step: int) -> Finding:
    code, detail = worker_exit.exit_code, worker_exit.detail
    if code is None:
        return _finding("lost", step, detail)
    if code < 0:
        name = _signal_name(-code)
        if name in FAILURES:
            return _finding(name, step, detail)
        known = "" if name in detail else f" {detail}".rstrip()
        row = msgspec.structs.replace(FAILURES["signal"], words=f"killed by {name}")
        return _make(row, step, known)
    by_code = {int(ExitCode[category.name]): category for category in Category}
    if code in by_code:
        return _finding(by_code[code], 0, f"{describe_exit(code)}, and no terminal event: see the log")
    # Python ends with 1 after a traceback; any other code is one that the job's own code chose.
    where = "see the log for a traceback" if code == 1 else "no exception ended it, the job's code did"
    knows_no_more = detail in ("", f"exit code {code}")  # the launcher
    return _finding("bug", step, f"{describe_exit(code)}: {where}" if knows_no_more else detail)


def _is_repeated(attempts: Sequence[AttemptRecord], finding: Finding, step: int) -> bool:
    """True where the failure before this one was the same, at the same step."""
    before = next((item for item in reversed(attempts) if item.ended_ms is not None), None)
    same = (finding.row.cause, finding.words, step)
    return before is not None and (before.cause_id, before.cause, before.step) == same


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_CAUSE_CHARS else text[: MAX_CAUSE_CHARS - 1] + "…"
