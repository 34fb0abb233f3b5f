"""How an attempt ended, and what that makes of its run: one pure decision over the table of failures.

The stronger source wins: the worker's `completed`, then why we ended it, then how the system ended it, then what the
worker's own `failed` says. A terminal event that the daemon
wrote for a dead worker has our cause in it, so the decision is the same if it is made again after a restart.

Retry, by progress. An attempt's mark is the step that the next one would resume from, once it has ended. It made
progress if its mark is beyond those of all earlier attempts. So the marks of attempts with progress grow, and between
two of them there are fewer than `retry.max_attempts` others: no run is tried for ever.
A run that saves nothing makes no progress, however many steps it trains. An attempt of a server made progress if it
became ready, and one of a prediction if it wrote something.
"""

import hashlib
import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import msgspec

from gen_worker.contract.job.spec import RetrySpec
from gen_worker.errors import Category, ExitCode, FaultSide, cause_of_signal, read_cause
from trn.core.cause_words import say_what
from trn.core.causes import (
    AT_ONCE,
    BACKOFF,
    CANCEL_SIGNALS,
    FAILURES,
    NO_PROGRESS,
    NOT_RETRIED,
    REPEATED,
    RETRY_OFF,
    TOO_OFTEN,
    Cause,
    failure,
)
from trn.core.runs import SERVER, TRAINING, AttemptRecord, RunRecord, RunState
from trn.daemon.ingest.event_file import Terminal
from trn.executors.base import WorkerExit
from trn.registry.base import Ending

MAX_BACKOFF_S = 300.0
MAX_INTERRUPTIONS = 100
MAX_INTERRUPTION_BACKOFF_S = 60.0
# A server that ended so soon after its start, so often in a row, waits before the next start.
SHORT_LIFE_MS, NUM_SHORT_LIVES, MAX_RESTART_BACKOFF_S = 20_000, 3, 60.0
JITTER = 0.1
MAX_ERROR_CHARS = 2000
CANCEL = "cancel"

# The failure that a category means where nothing else is known. `cancelled` without a cancel of ours came from outside.
_BY_CATEGORY = {category.value: category.value for category in Category} | {"cancelled": "stopped"}

_VALUE_TYPES: dict[str, tuple[type, ...]] = {
    "signal": (str,),
    "detail": (str,),
    "place": (str,),
    "step": (int,),
    "exit_code": (int,),
    "silent_s": (int,),
    "limit_s": (int, float),
}


class StopReason(msgspec.Struct, frozen=True, kw_only=True):
    """Why we ended an attempt, or why it never began."""

    cause: str  # CANCEL, or a row of FAILURES
    values: dict[str, Any] = {}
    was_killed: bool = False  # it did not stop when it was asked to


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong."""

    cause: Cause
    category: str
    is_reported: bool = False  # by the worker itself, which knows the step exactly


def find_failure(
    worker_exit: WorkerExit | None, terminal: Terminal | None, stop_reason: StopReason | None, step: int
) -> Finding:
    """Why it did not complete. `worker_exit` is None where no process ever was."""
    if terminal is not None and terminal.closed_by:
        cause_id, values = read_cause(terminal.cause, terminal.category)
        if cause_id in FAILURES:  # found before, by this same function
            known = _read_values(terminal.values) or {**values, "text": terminal.error}
            return Finding(cause=failure(cause_id, **known), category=terminal.category)
    if stop_reason is not None and stop_reason.cause in FAILURES:
        return _finding(stop_reason.cause, step, **stop_reason.values)
    if terminal is not None and terminal.event == "failed":
        reported = _find_reported(terminal, worker_exit, step)
        if reported is not None:
            return reported
    if worker_exit is None:
        return _finding("never-launched", 0)
    if worker_exit.is_reboot:
        return _finding("reboot", step, detail=worker_exit.detail)
    if worker_exit.is_out_of_memory:
        return _finding("out-of-memory", step, detail=worker_exit.detail)
    return _find_by_code(worker_exit, step)


def decide(
    run: RunRecord,
    attempts: Sequence[AttemptRecord],
    worker_exit: WorkerExit | None,
    terminal: Terminal | None,
    stop_reason: StopReason | None,
    *,
    saved_step: int,
    lived_ms: int = 0,
) -> Ending:
    """The end of the newest attempt. `attempts` are those before it; `run` is as it was while this one ran.

    `saved_step`: where the next attempt would begin, 0 where nothing was saved. `lived_ms`: since its launch.
    """
    exit_code = None if worker_exit is None else worker_exit.exit_code
    step = run.step if terminal is None else terminal.step
    if terminal is not None and terminal.event == "completed":
        early = _shorten(terminal.stop_reason)
        values = _present(step=step, stop_reason=early, **_exit_values(exit_code))
        return Ending(
            state=RunState.COMPLETED,
            cause=_without_step(run, Cause(id="completed", values=values)),
            exit_code=exit_code,
            stop_reason=early,
            saved_step=saved_step,
        )
    if run.is_cancel_wanted or (stop_reason is not None and stop_reason.cause == CANCEL):
        return Ending(
            state=RunState.CANCELLED,
            cause=_cancelled(run, worker_exit, terminal, stop_reason, step),
            category=Category.CANCELLED,
            exit_code=exit_code,
            saved_step=saved_step,
        )
    finding = find_failure(worker_exit, terminal, stop_reason, step)
    state, outlook = _retry(run, attempts, finding, step, saved_step, lived_ms)
    cause = _without_step(run, finding.cause)
    return Ending(
        state=state,
        cause=replace(cause, values={**cause.values, **outlook}),
        category=finding.category,
        exit_code=exit_code,
        delay_ms=round(outlook.get("delay_s", 0) * 1000),
        is_interruption=FAILURES[cause.id].retry == "not counted",
        saved_step=saved_step,
    )


def _retry(
    run: RunRecord,
    attempts: Sequence[AttemptRecord],
    finding: Finding,
    step: int,
    saved_step: int,
    lived_ms: int,
) -> tuple[RunState, dict[str, Any]]:
    """What becomes of the run, and the values that say why and when."""
    row, retry = FAILURES[finding.cause.id], read_retry(run)
    was_ready = (
        run.kind == SERVER and saved_step > 0
    )  # it answered: an error later is no reason to stop for good
    follows = {"next_attempt": run.attempt + 1}
    if row.retry == "not counted":
        if run.num_interruptions + 1 >= MAX_INTERRUPTIONS:
            return RunState.FAILED, {"outlook": TOO_OFTEN, "num_times": MAX_INTERRUPTIONS}
        delay_s = interruption_backoff_s(run)
        return RunState.PENDING, {"outlook": BACKOFF if delay_s else AT_ONCE, "delay_s": delay_s, **follows}
    if row.retry == "no" or (row.retry == "on error" and not retry.on_error and not was_ready):
        return RunState.FAILED, {"outlook": NOT_RETRIED}
    if run.max_attempts == 0:
        return RunState.FAILED, {"outlook": RETRY_OFF}
    if was_ready:
        delay_s = 0.0 if lived_ms > SHORT_LIFE_MS else restart_backoff_s(attempts)
        return RunState.PENDING, {"outlook": BACKOFF if delay_s else AT_ONCE, "delay_s": delay_s, **follows}
    if finding.is_reported and row.is_final_if_repeated and _is_repeated(attempts, finding, step):
        return RunState.FAILED, {"outlook": REPEATED, "step": step}
    follows |= _next_start(run, saved_step)
    num_stalled = count_stalled(attempts, saved_step)
    if num_stalled == 0:
        return RunState.PENDING, {"outlook": AT_ONCE, **follows}
    stalled: dict[str, Any] = {"num_stalled": num_stalled, "max_attempts": run.max_attempts}
    if run.kind != TRAINING:
        stalled["kind"] = run.kind
    if num_stalled >= run.max_attempts:
        return RunState.FAILED, {"outlook": NO_PROGRESS, **stalled}
    return RunState.PENDING, {
        "outlook": BACKOFF,
        "delay_s": round(backoff_s(run, num_stalled), 3),
        **follows,
        **stalled,
    }


def count_stalled(attempts: Sequence[AttemptRecord], saved_step: int) -> int:
    """How many attempts in a row, up to the one that ends with `saved_step`, made no progress."""
    reached = num_stalled = 0
    for mark in (*(item.saved_step for item in attempts if is_counted(item)), saved_step):
        num_stalled = 0 if mark > reached else num_stalled + 1
        reached = max(reached, mark)
    return num_stalled


def is_counted(attempt: AttemptRecord) -> bool:
    """False where it never had a process."""
    row = FAILURES.get(attempt.cause.id)
    return row is None or row.retry != "not counted"


def read_retry(run: RunRecord) -> RetrySpec:
    try:
        return msgspec.convert(run.config.get("retry", {}), RetrySpec)
    except msgspec.ValidationError:  # never submitted so
        return RetrySpec()


def _next_start(run: RunRecord, saved_step: int) -> dict[str, int]:
    """Where the next attempt begins; nothing where a checkpoint of another run decides it, or nothing is trained."""
    if run.kind != TRAINING:
        return {}
    inputs = run.config.get("inputs") or {}
    is_resumed = run.config.get("resume_checkpoint_path") or inputs.get("resume_checkpoint_ref")
    return {"from_step": saved_step} if saved_step or not is_resumed else {}


def close_fields(run: RunRecord, worker_exit: WorkerExit, stop_reason: StopReason | None) -> dict[str, Any]:
    """Category, error and cause of the terminal event that a worker did not write itself."""
    if run.is_cancel_wanted:
        cause = _cancelled(run, worker_exit, None, stop_reason, run.step)
        return {"category": Category.CANCELLED.value, "error": say_what(cause), "cause": cause}
    finding = find_failure(worker_exit, None, stop_reason, run.step)
    cause = _without_step(run, finding.cause)
    return {"category": finding.category, "error": say_what(cause), "cause": cause}


def backoff_s(run: RunRecord, num_stalled: int) -> float:
    """Twice as long after each attempt without progress; with a jitter that is the run's own."""
    seed = hashlib.sha256(f"{run.digest}/{run.run_id}/{num_stalled}".encode()).digest()
    jitter = 1 + JITTER * (int.from_bytes(seed[:4], "big") / 2**31 - 1)
    return float(min(read_retry(run).backoff_s * 2.0 ** min(num_stalled - 1, 30) * jitter, MAX_BACKOFF_S))


def interruption_backoff_s(run: RunRecord) -> float:
    """At once the first time: nothing was started."""
    return min(2.0**run.num_interruptions / 2, MAX_INTERRUPTION_BACKOFF_S) if run.num_interruptions else 0.0


def restart_backoff_s(attempts: Sequence[AttemptRecord]) -> float:
    """Of a server that answered: it is started again at once, unless it fell again and again soon after its start."""
    num_short = 0
    for attempt in reversed(attempts):
        if attempt.ended_ms is None or attempt.ended_ms - attempt.launched_ms > SHORT_LIFE_MS:
            break
        num_short += 1
    return (
        float(min(2.0 ** (num_short - NUM_SHORT_LIVES), MAX_RESTART_BACKOFF_S))
        if num_short >= NUM_SHORT_LIVES
        else 0.0
    )


def _cancelled(
    run: RunRecord,
    worker_exit: WorkerExit | None,
    terminal: Terminal | None,
    stop_reason: StopReason | None,
    step: int,
) -> Cause:
    values: dict[str, Any] = {"asked": run.cancel_reason, "stage": "stopped", "step": step}
    if worker_exit is None:
        values["stage"] = "not-started"
    elif stop_reason is not None and stop_reason.was_killed:
        values["stage"] = "killed"
    elif terminal is not None and terminal.category != Category.CANCELLED:
        values |= {"stage": "failed", "error": _shorten(terminal.error)}
    return _without_step(run, Cause(id="cancelled", values=values))


def _without_step(run: RunRecord, cause: Cause) -> Cause:
    """A server trains nothing: its step numbers the points of its metrics."""
    if run.kind != SERVER:
        return cause
    return replace(cause, values={name: value for name, value in cause.values.items() if name != "step"})


def _finding(cause_id: str, step: int, **values: Any) -> Finding:
    row = FAILURES[cause_id]
    category = row.category
    if values.get("signal") in CANCEL_SIGNALS:
        category = Category.CANCELLED
    return Finding(cause=failure(cause_id, **_present(step=step, **values)), category=category)


def _find_reported(terminal: Terminal, worker_exit: WorkerExit | None, step: int) -> Finding | None:
    category = terminal.category if terminal.category in _BY_CATEGORY else ""
    cause_id, values = read_cause(terminal.cause, category)
    cause_id = _BY_CATEGORY.get(cause_id, cause_id)
    if values.get("signal") == "SIGKILL" and worker_exit is not None and worker_exit.is_out_of_memory:
        cause_id, values = "out-of-memory", {}
    if cause_id not in FAILURES:
        cause_id, values = _BY_CATEGORY.get(category, ""), {}
    if not cause_id:
        return None
    known = {**_read_values(terminal.values), **values, "step": step, "error": _shorten(terminal.error)}
    cause = failure(cause_id, **_present(**known))
    if terminal.fault in get_args(FaultSide):
        cause = replace(cause, fault=terminal.fault)
    return Finding(
        cause=cause,
        category=category or FAILURES[cause_id].category,
        is_reported=True,
    )


def _find_by_code(worker_exit: WorkerExit, step: int) -> Finding:
    code, detail = worker_exit.exit_code, worker_exit.detail
    if code is None:
        return _finding("lost", step, detail=detail)
    if code < 0:
        name = _signal_name(-code)
        return _finding(cause_of_signal(name), step, signal=name, detail=detail)
    by_code = {int(ExitCode[category.name]): _BY_CATEGORY[category] for category in Category}
    by_code[int(ExitCode.DISK_FULL)] = "disk-full"
    return _finding(by_code.get(code, "bug"), step, exit_code=code, detail=detail)


def _is_repeated(attempts: Sequence[AttemptRecord], finding: Finding, step: int) -> bool:
    """True where the failure before this one was the same, at the same step."""
    before = next((item for item in reversed(attempts) if item.ended_ms is not None), None)
    if before is None or before.cause.id != finding.cause.id or before.step != step:
        return False
    return before.cause.values.get("error") == finding.cause.values.get("error")


def _exit_values(exit_code: int | None) -> dict[str, Any]:
    """How the process of a completed run ended, where that was not well."""
    if not exit_code:
        return {}
    return {"signal": _signal_name(-exit_code)} if exit_code < 0 else {"exit_code": exit_code}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _read_values(values: dict[str, Any]) -> dict[str, Any]:
    """Of an event's values those that we know. The file is the worker's: it may hold anything."""
    return {
        name: _shorten(value) if isinstance(value, str) else value
        for name, value in values.items()
        if isinstance(value, _VALUE_TYPES.get(name, ())) and not isinstance(value, bool)
    }


def _present(**values: Any) -> dict[str, Any]:
    """Those that say something."""
    return {name: value for name, value in values.items() if value not in ("", None)}


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_ERROR_CHARS else text[: MAX_ERROR_CHARS - 1] + "…"
