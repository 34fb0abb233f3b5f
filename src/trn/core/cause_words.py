"""The only module that makes words from causes. Nothing reads these words to decide something."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from gen_worker.errors import ExitCode
from trn.core.causes import (
    AT_ONCE,
    BACKOFF,
    CPU,
    FAILURES,
    GPU,
    MEMORY,
    NO_PROGRESS,
    NOT_RETRIED,
    REFUSALS,
    REPEATED,
    RETRY_OFF,
    TOO_OFTEN,
    Cause,
)
from trn.core.terminal_text import without_copies


class Words(NamedTuple):
    """Of a row of the table of failures: what happened, and why it is retried or not."""

    what: str
    why: str
    hint: str = ""  # what follows the colon where no detail is known


_SAME_AGAIN = "the same would happen again"
_NOT_THE_JOB = "the job did not cause it"
_AUTHOR = "an exception in the job's own code, and `retry.on_error` is false"
_NO_PROCESS = "no process was started"
_TIME_OVER = "the time limit is over; resume with a larger time_limit_s"

FAILURE_WORDS: dict[str, Words] = {
    "startup": Words("could not start", _SAME_AGAIN),
    "input": Words("invalid input", _SAME_AGAIN),
    "auth": Words("not authorized", _SAME_AGAIN),
    "model-load": Words("loading the model failed", _AUTHOR),
    "train-step": Words("training failed", _AUTHOR),
    "upload": Words("an upload failed", "the endpoint may answer the next time"),
    "stopped": Words("stopped by a signal from outside trn", _NOT_THE_JOB),
    "timeout": Words("time limit reached", _TIME_OVER),
    "connection": Words("connection lost", _NOT_THE_JOB),
    "disk-full": Words("disk full", _NOT_THE_JOB),
    "out-of-memory": Words(
        "out of memory", "more memory may be free the next time", "the system killed the process"
    ),
    "killed": Words("killed", _NOT_THE_JOB),
    "crashed": Words("crashed", "a crash can come from the machine; retries end without progress"),
    "bug": Words(
        "process exited without a terminal event",
        "the job's own code ended the process, and `retry.on_error` is false",
    ),
    "lost": Words("process exited; exit status unknown", _NOT_THE_JOB),
    "reboot": Words("the machine restarted", _NOT_THE_JOB),
    "heartbeat-timeout": Words("no heartbeat; killed", _NOT_THE_JOB),
    "start-timeout": Words(
        "did not start in time; killed", "a slow disk or network may be faster the next time"
    ),
    "time-limit": Words("did not stop at its time limit; killed", _TIME_OVER),
    "launch-failed": Words("could not be launched", _NO_PROCESS),
    "never-launched": Words("the daemon stopped before it launched the worker", _NO_PROCESS),
    "code-missing": Words(
        "code snapshot or Python is missing", "it would be missing again; submit the run again"
    ),
    "secret-missing": Words(
        "the values of secret variables were lost when the daemon stopped", "they are kept in memory only"
    ),
    "trn-fault": Words("internal error of trn, please report it", "the job did not cause it"),
}

_SIGNAL_HINTS = {
    "SIGSEGV": "invalid memory access",
    "SIGBUS": "bus error; a mapped file was truncated, or shared memory is full",
    "SIGABRT": "abort; the log has the last lines",
    "SIGFPE": "arithmetic error in native code",
    "SIGILL": "an instruction that this CPU does not have",
    "SIGXCPU": "the system's limit on CPU time",
    "SIGHUP": "its terminal or session ended",
}
# Causes whose step says nothing: nothing was trained, or the words name the time instead.
_WITHOUT_STEP = frozenset({"startup", "input", "auth", "model-load", "upload", "timeout"})


def say_cause(cause: Cause) -> str:
    """Why a run is in its state, with what follows: `killed by SIGKILL at step 7; retrying at once…`."""
    outlook = say_outlook(cause)
    return f"{say_what(cause)}; {outlook}" if outlook else say_what(cause)


def say_what(cause: Cause) -> str:
    """What happened or is waited for, without what follows."""
    values = cause.values
    if "text" in values:  # recorded by a release that kept words alone
        return without_copies(str(values["text"]))
    if cause.id in FAILURES:
        return _say_failure(cause)
    if cause.id in REFUSALS:
        return _say_refusal(cause)
    if cause.id == "completed":
        return _say_completed(values)
    if cause.id == "cancelled":
        return _say_cancelled(values)
    return _say_waiting(cause)


def say_outlook(cause: Cause) -> str:
    """Whether and when the next attempt follows; empty where no attempt ended."""
    values = cause.values
    outlook = values.get("outlook")
    if not outlook:
        return ""
    if outlook in (AT_ONCE, BACKOFF):
        return _say_retry(values)
    if outlook == NOT_RETRIED:
        why_not = FAILURE_WORDS[cause.id].why if cause.id in FAILURE_WORDS else ""
        return f"not retried: {why_not}" if why_not else "not retried"
    why = {
        RETRY_OFF: "retry.max_attempts is 0",
        REPEATED: f"the same error at step {values.get('step', 0)} twice in a row",
        NO_PROGRESS: f"{_say_stalled(values)} (retry.max_attempts is {values.get('max_attempts')})",
        TOO_OFTEN: f"this happened {values.get('num_times')} times",
    }
    return f"not retried: {why[outlook]}" if outlook in why else ""


def _say_retry(values: Mapping[str, Any]) -> str:
    start, delay_s, stalled = values.get("from_step"), values.get("delay_s", 0), values.get("num_stalled")
    where = "" if start is None else f" from step {start}" if start else " from the start"
    when = f"in {delay_s:.0f} s" if delay_s >= 1 else "at once"
    more = f"; {stalled} of {values.get('max_attempts')} {_without(values)}" if stalled else ""
    return f"retrying {when}{where} (attempt {values.get('next_attempt')}{more})"


def _say_stalled(values: Mapping[str, Any]) -> str:
    number = values.get("num_stalled", 1)
    if number == 1 and "kind" not in values:
        return "this attempt saved no newer checkpoint"
    return f"{number} attempt{'' if number == 1 else 's'} {_without(values)}"


def _without(values: Mapping[str, Any]) -> str:
    """What attempts did not reach that made no progress."""
    by_kind = {"server": "that did not become ready", "prediction": "that wrote nothing"}
    return by_kind.get(str(values.get("kind")), "without a newer checkpoint")


def say_exit(exit_code: int | None) -> str:
    """An exit code as `trn` and `docs/daemon.md` name it."""
    if exit_code is None:
        return "exit status unknown"
    known = {int(code): code.name.lower().replace("_", "-") for code in ExitCode}
    return f"exit code {exit_code}{f' ({known[exit_code]})' if exit_code in known else ''}"


def _say_failure(cause: Cause) -> str:
    values, words = cause.values, FAILURE_WORDS[cause.id]
    what = words.what
    detail = without_copies(str(values.get("error") or values.get("detail") or words.hint))
    if signal := values.get("signal"):
        what = f"{what} by {signal}" if cause.id == "killed" else f"{what} with {signal}"
        detail = detail or _SIGNAL_HINTS.get(str(signal), "")
    if cause.id == "timeout" and detail:  # `the time limit of 2 s was reached`, and a line about the save
        what, detail = detail.partition("\n")[0], ""
    if (silent_s := values.get("silent_s")) is not None:
        what = _say_silence(cause.id, silent_s, values.get("limit_s"))
    elif (limit_s := values.get("limit_s")) is not None:
        detail = f"{limit_s:g} s"
    if names := values.get("names"):
        detail = ", ".join(names)
    if "exit_code" in values and not detail:
        detail = _say_exit_code(cause.id, values["exit_code"])
    step = values.get("step")
    at = f" at step {step}" if step and cause.id not in _WITHOUT_STEP else ""
    return f"{what}{at}: {detail}" if detail else f"{what}{at}"


def _say_silence(id: str, silent_s: float, limit_s: Any) -> str:  # noqa: A002
    what = "no heartbeat" if id == "heartbeat-timeout" else "no event"
    return f"{what} for {silent_s:.0f} s (limit {limit_s:g} s); killed"


def _say_exit_code(id: str, exit_code: int) -> str:  # noqa: A002
    if id != "bug":
        return f"{say_exit(exit_code)}, no terminal event; see the log"
    # Python exits with 1 after a traceback; any other code is one that the job's own code chose.
    where = "see the log for a traceback" if exit_code == 1 else "the job's code ended the process"
    return f"{say_exit(exit_code)}; {where}"


def _say_completed(values: Mapping[str, Any]) -> str:
    parts = [f"completed{_at_step(values)}"]
    if values.get("stop_reason"):
        parts.append(f"stopped early: {values['stop_reason']}")
    if signal := values.get("signal"):
        parts.append(f"the process was then killed by {signal}")
    elif values.get("exit_code"):
        parts.append(f"the process then ended with {say_exit(values['exit_code'])}")
    return "; ".join(parts)


def _say_cancelled(values: Mapping[str, Any]) -> str:
    asked = str(values.get("asked") or "cancelled")
    match values.get("stage"):
        case "not-started":
            return f"{asked}; it had not started"
        case "killed":
            return f"{asked}; killed{_at_step(values)}, it did not stop within its grace period"
        case "failed":
            return f"{asked}; it failed at the same time: {values.get('error', '')}"
        case "stopped":
            return f"{asked}; stopped{_at_step(values)}"
        case _:
            return asked


def _at_step(values: Mapping[str, Any]) -> str:
    """Empty of a server, which has no steps."""
    return f" at step {values['step']}" if "step" in values else ""


def _say_refusal(cause: Cause) -> str:
    values = cause.values
    match cause.id:
        case "artifact-outside":
            return "the path is not inside the run's folder"
        case "artifact-link":
            return f"{values.get('part')!r} in its path is a symbolic link"
        case "artifact-not-file":
            part = f"{values['part']!r} " if "part" in values else ""
            return f"{part}is {values.get('found')}, expected {values.get('expected', 'a regular file')}"
        case "artifact-missing":
            return "the file does not exist"
        case "artifact-empty":
            return "the file is empty"
        case "artifact-incomplete":
            return f"the file has {values.get('size_bytes')} bytes, expected {values.get('expected_bytes')}"
        case "artifact-half-written":
            return "the MP4 file is incomplete: close the recorder before you report the file"
        case "artifact-changing":
            return "the file was written to while it was hashed"
        case "artifact-no-checkpoint":
            return f"not a committed checkpoint: {values.get('error')}"
        case _:
            return f"the file cannot be read: {values.get('error')}"


def _say_waiting(cause: Cause) -> str:
    values = cause.values
    match cause.id:
        case "queued":
            return "queued"
        case "launching":
            return f"attempt {values.get('attempt')} is being launched"
        case "running":
            where = values.get("worker") or f"process {values.get('pid')}"
            return f"attempt {values.get('attempt')} runs as {where}"
        case "cancelling":
            return f"attempt {values.get('attempt')} is being stopped: {values.get('asked') or 'cancelled'}"
        case "waits-for-disk":
            return (
                f"the disk of {values.get('path')} is nearly full"
                f" ({values.get('free')} free, {values.get('min_free')} needed)"
            )
        case "waits-for-process":
            if worker := values.get("worker"):
                return f"waits for the unknown worker {worker} in its folder"
            pid = values.get("pid")
            return f"waits for process {pid}, an unknown worker in its folder (`kill {pid}` ends it)"
        case "waits-for-doctor":
            return f"waits for a check whether {values.get('python')} can use this machine's GPUs"
        case "gpu-not-usable":
            remedy = f": {values['remedy']}" if values.get("remedy") else ""
            return f"cannot use a GPU yet: {values.get('message')}{remedy}"
        case "devices-missing":
            return f"devices are missing or set aside: {values.get('detail')}"
        case "pool-missing":
            pool = values.get("pool")
            return (
                f"the pool {pool!r} is not in settings.toml: add [pools.{pool}] again, and restart the daemon"
            )
        case _:
            lacks = f"waits for {_say_lacks(cause)}"
            kept_for = values.get("kept_for")
            return (
                f"{lacks}; free resources are reserved for {kept_for}, which has waited longer"
                if kept_for
                else lacks
            )


def _say_lacks(cause: Cause) -> str:
    values, parts = cause.values, []
    for what in cause.waits_for:
        if what == GPU:
            parts.append(_count(values.get("gpus", 1), "GPU"))
        elif what == CPU:
            parts.append(_count(values.get("cpus", 1), "CPU"))
        elif what == MEMORY:
            parts.append(f"{values.get('memory_mb')} MB of memory")
        else:
            parts.append(what)
    return ", ".join(parts) or cause.id


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
