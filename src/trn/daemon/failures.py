"""The table of failures: what can end an attempt, whose fault that is, and whether it is worth another one."""

import signal
from typing import Literal

import msgspec

from gen_worker.errors import Category

Fault = Literal["job", "machine", "trn"]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table."""

    cause: str
    category: str  # in the attempt's record, and in the terminal event if we have to write it
    is_retried: bool
    counts: bool  # False: an interruption, which does not use up one of the run's attempts
    fault: Fault
    words: str  # what happened
    why: str  # why it is worth another attempt, or not


def _row(
    cause: str, category: Category, fault: Fault, words: str, why: str, *, retried: bool, counts: bool = True
) -> Failure:
    return Failure(
        cause=cause,
        category=category,
        is_retried=retried,
        counts=counts,
        fault=fault,
        words=words,
        why=why,
    )


_SAME_AGAIN = "the same would happen again"
_GOES_ON = "goes on from the newest checkpoint"
_NOT_ITS_DOING = "the run did nothing wrong; it goes on from the newest checkpoint and this does not count"
_STEP = Category.TRAIN_STEP

# Signals that say something of their own; any other is "ended by a signal".
_SIGNALS: dict[signal.Signals, tuple[Fault, str, bool]] = {
    signal.SIGSEGV: ("job", "invalid memory access", True),
    signal.SIGBUS: ("job", "a bus error: a mapped file was cut short, or shared memory is full", True),
    signal.SIGABRT: ("job", "it aborted itself: its last words are in the log", True),
    signal.SIGFPE: ("job", "an arithmetic error in native code", True),
    signal.SIGILL: ("job", "an instruction that this CPU does not have", True),
    signal.SIGKILL: (
        "machine",
        "somebody killed it; often the system, for memory: ask for less, or for more memory_mb",
        True,
    ),
    signal.SIGXCPU: ("machine", "the system's limit on CPU time", True),
    signal.SIGTERM: ("machine", "somebody asked it to stop, and not through us", False),
    signal.SIGINT: ("machine", "somebody interrupted it, and not through us", False),
    signal.SIGHUP: ("machine", "its terminal or session went away", False),
}


def _rows() -> list[Failure]:
    contract = [
        _row("startup", Category.STARTUP, "job", "could not start", _SAME_AGAIN, retried=False),
        _row("input", Category.INPUT, "job", "an input is not right", _SAME_AGAIN, retried=False),
        _row("auth", Category.AUTH, "job", "is not allowed to", _SAME_AGAIN, retried=False),
        _row("model-load", Category.MODEL_LOAD, "job", "the model did not load", _SAME_AGAIN, retried=False),
        _row(
            "train-step",
            _STEP,
            "job",
            "failed while training",
            f"{_GOES_ON}; not after the same failure at the same step twice in a row",
            retried=True,
        ),
        _row(
            "upload", Category.UPLOAD, "machine", "an upload failed", "the far side may be back", retried=True
        ),
        _row(
            "cancelled",
            Category.CANCELLED,
            "machine",
            "was stopped by somebody else",
            _NOT_ITS_DOING,
            retried=True,
            counts=False,
        ),
        _row(
            "timeout",
            Category.TIMEOUT,
            "job",
            "reached its time limit",
            "its time is over: resume it with a larger time_limit_s",
            retried=False,
        ),
    ]
    signals = [
        _row(
            number.name,
            _STEP if counts else Category.CANCELLED,
            fault,
            f"killed by {number.name} ({words})",
            _GOES_ON if counts else _NOT_ITS_DOING,
            retried=True,
            counts=counts,
        )
        for number, (fault, words, counts) in _SIGNALS.items()
    ]
    ours = [
        _row("signal", _STEP, "machine", "killed by a signal", _GOES_ON, retried=True),
        _row(
            "out-of-memory",
            _STEP,
            "machine",
            "out of memory: the system killed it; use a smaller batch or model, or give the run more memory_mb",
            "there may be more memory the next time",
            retried=True,
        ),
        _row(
            "bug",
            _STEP,
            "job",
            "ended without saying how",
            _GOES_ON,
            retried=True,
        ),
        _row("lost", _STEP, "machine", "ended, and nobody saw how", _GOES_ON, retried=True),
        _row(
            "reboot",
            Category.CANCELLED,
            "machine",
            "the machine went down under it",
            _NOT_ITS_DOING,
            retried=True,
            counts=False,
        ),
        _row(
            "heartbeat-timeout",
            _STEP,
            "machine",
            "gave no sign of life for too long and was ended",
            _GOES_ON,
            retried=True,
        ),
        _row(
            "start-timeout",
            Category.STARTUP,
            "machine",
            "did not begin in time and was ended",
            "a slow disk or network may be quicker the next time",
            retried=True,
        ),
        _row(
            "time-limit",
            Category.TIMEOUT,
            "job",
            "did not stop at its time limit and was ended",
            "its time is over: resume it with a larger time_limit_s",
            retried=False,
        ),
        _row(
            "launch-failed",
            Category.STARTUP,
            "trn",
            "could not be launched",
            "no process was started: it is tried again and this does not count",
            retried=True,
            counts=False,
        ),
        _row(
            "never-launched",
            Category.STARTUP,
            "trn",
            "the daemon ended before it launched it",
            "no process was started: it is tried again and this does not count",
            retried=True,
            counts=False,
        ),
        _row(
            "code-missing",
            Category.STARTUP,
            "trn",
            "its code snapshot or its Python is not there any more",
            "it would not be there the next time either: submit it again",
            retried=False,
        ),
        _row(
            "trn-fault",
            Category.STARTUP,
            "trn",
            "a fault of trn itself, please report it",
            "no fault of the run: it is tried again and this does not count",
            retried=True,
            counts=False,
        ),
    ]
    return contract + signals + ours


FAILURES: dict[str, Failure] = {row.cause: row for row in _rows()}
CONTRACT_CAUSES = frozenset(Category)


def rows() -> list[Failure]:
    """The table, for the documentation."""
    return list(FAILURES.values())
