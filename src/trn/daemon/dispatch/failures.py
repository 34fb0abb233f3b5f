"""The table of failures: what can end an attempt, whose fault that is, and whether the run is tried again."""

import signal
from typing import Literal

import msgspec

from gen_worker.errors import Category, Cause

Fault = Literal["job", "machine", "trn"]
Retry = Literal["no", "yes", "on error", "not counted"]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table."""

    cause: str
    category: str  # of the attempt's record, where its own terminal event says no other
    fault: Fault
    words: str  # what happened; the step and the details of the time follow
    hint: str = ""  # the details, where the time has none
    retry: Retry  # "on error": with `retry.on_error`; "not counted": no process was started, so nothing is used up
    is_final_if_repeated: bool = False  # the same error at the same step twice in a row
    why: str  # why it is tried again, or not


def _row(
    cause: str,
    category: Category,
    fault: Fault,
    retry: Retry,
    words: str,
    why: str,
    *,
    hint: str = "",
    is_final_if_repeated: bool = False,
) -> Failure:
    return Failure(
        cause=cause,
        category=category,
        fault=fault,
        words=words,
        hint=hint,
        retry=retry,
        is_final_if_repeated=is_final_if_repeated,
        why=why,
    )


_SAME_AGAIN = "the same would happen again"
_NOT_ITS_DOING = "not the job's doing"
_CRASH = "a crash may come from the machine; progress limits the attempts"
_AUTHORS = "an exception of the job's own code; final unless `retry.on_error` is true"
_NO_PROCESS = "no process was started"
_TIME_OVER = "its time is over: resume it with a larger time_limit_s"
_STEP = Category.TRAIN_STEP

# Signals that say something of their own; any other is "killed by a signal".
_SIGNALS: dict[signal.Signals, tuple[Fault, str]] = {
    signal.SIGSEGV: ("job", "invalid memory access"),
    signal.SIGBUS: ("job", "bus error: a mapped file was truncated, or shared memory is full"),
    signal.SIGABRT: ("job", "it aborted; the log has its last lines"),
    signal.SIGFPE: ("job", "arithmetic error in native code"),
    signal.SIGILL: ("job", "an instruction that this CPU does not have"),
    signal.SIGKILL: ("machine", ""),
    signal.SIGXCPU: ("machine", "the system's limit on CPU time"),
    signal.SIGTERM: ("machine", ""),
    signal.SIGINT: ("machine", ""),
    signal.SIGHUP: ("machine", "its terminal or session ended"),
}
_OUTSIDE = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})  # asked to stop, and not through us


def _rows() -> list[Failure]:
    contract = [
        _row("startup", Category.STARTUP, "job", "no", "could not start", _SAME_AGAIN),
        _row("input", Category.INPUT, "job", "no", "an input is not valid", _SAME_AGAIN),
        _row("auth", Category.AUTH, "job", "no", "not authorized", _SAME_AGAIN),
        _row(
            "model-load",
            Category.MODEL_LOAD,
            "job",
            "on error",
            "the model did not load",
            _AUTHORS,
            is_final_if_repeated=True,
        ),
        _row(
            "train-step",
            _STEP,
            "job",
            "on error",
            "failed while training",
            _AUTHORS,
            is_final_if_repeated=True,
        ),
        _row(
            "upload",
            Category.UPLOAD,
            "machine",
            "yes",
            "an upload failed",
            "the endpoint may be back by then",
        ),
        _row("cancelled", Category.CANCELLED, "machine", "yes", "stopped from outside", _NOT_ITS_DOING),
        _row("timeout", Category.TIMEOUT, "job", "no", "reached its time limit", _TIME_OVER),
    ]
    named = [
        _row(Cause.CONNECTION, _STEP, "machine", "yes", "a connection broke", _NOT_ITS_DOING),
        _row(Cause.DISK_FULL, _STEP, "machine", "yes", "the disk is full", _NOT_ITS_DOING),
        _row(
            Cause.OUT_OF_MEMORY,
            _STEP,
            "machine",
            "yes",
            "out of memory",
            "there may be more memory the next time",
            hint="the system killed the process",
            is_final_if_repeated=True,
        ),
    ]
    signals = [
        _row(
            number.name,
            Category.CANCELLED if number in _OUTSIDE else _STEP,
            fault,
            "yes",
            f"killed by {number.name}",
            _CRASH if fault == "job" else _NOT_ITS_DOING,
            hint=hint,
        )
        for number, (fault, hint) in _SIGNALS.items()
    ]
    ours = [
        _row("signal", _STEP, "machine", "yes", "killed by a signal", _NOT_ITS_DOING),
        _row(
            "bug",
            _STEP,
            "job",
            "on error",
            "process exited without a terminal event",
            "the job's own code ended the process; final unless `retry.on_error` is true",
        ),
        _row("lost", _STEP, "machine", "yes", "process exited; exit status unknown", _NOT_ITS_DOING),
        _row("reboot", Category.CANCELLED, "machine", "yes", "the machine went down", _NOT_ITS_DOING),
        _row("heartbeat-timeout", _STEP, "machine", "yes", "no heartbeat; killed", _NOT_ITS_DOING),
        _row(
            "start-timeout",
            Category.STARTUP,
            "machine",
            "yes",
            "did not start in time; killed",
            "a slow disk or network may be faster the next time",
        ),
        _row(
            "time-limit",
            Category.TIMEOUT,
            "job",
            "no",
            "did not stop at its time limit; killed",
            _TIME_OVER,
        ),
        _row("launch-failed", Category.STARTUP, "trn", "not counted", "could not be launched", _NO_PROCESS),
        _row(
            "never-launched",
            Category.STARTUP,
            "trn",
            "not counted",
            "the daemon ended before it launched the worker",
            _NO_PROCESS,
        ),
        _row(
            "code-missing",
            Category.STARTUP,
            "trn",
            "no",
            "its code snapshot or its Python is missing",
            "it would be missing the next time, too: submit it again",
        ),
        _row(
            "secret-missing",
            Category.STARTUP,
            "trn",
            "no",
            "the values of its secret variables went with the daemon that held them",
            "they are kept in memory only",
        ),
        _row(
            "trn-fault",
            Category.STARTUP,
            "trn",
            "not counted",
            "a fault of trn itself, please report it",
            "no fault of the run",
        ),
    ]
    return contract + named + signals + ours


FAILURES: dict[str, Failure] = {row.cause: row for row in _rows()}
CONTRACT_CAUSES = frozenset(Category)


def rows() -> list[Failure]:
    """The table, for the documentation."""
    return list(FAILURES.values())
