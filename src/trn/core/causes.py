"""Why a run waits or ended, and why an attempt ended, as data. `trn.core.cause_words` makes words from it.

Nothing reads words to decide something: what a decision needs is an id or a value here.
Standard library only: `trn list` reads causes, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from gen_worker.errors import CRASHED, FAULT_BY_CAUSE, KILLED, FaultSide

Retry = Literal["no", "yes", "on error", "not counted"]

# What `waits_for` may hold besides the ids of devices.
GPU, CPU, MEMORY, DISK, DOCTOR, PROCESS = "gpu", "cpu", "memory", "disk", "doctor", "process"

# What follows the end of an attempt: `outlook` in the values of its cause.
AT_ONCE, BACKOFF = "at-once", "backoff"
NOT_RETRIED, RETRY_OFF, REPEATED, NO_PROGRESS, TOO_OFTEN = (
    "not-retried",
    "retry-off",
    "repeated",
    "no-progress",
    "too-often",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """An id of the tables below, or of a newer release's. `values`: signal, step, error, pid… as the id needs them."""

    id: str = ""
    fault: str = ""  # job, machine, trn; empty: no fault
    waits_for: tuple[str, ...] = ()
    next_attempt_ms: int = 0  # when the next attempt may begin; 0: none was decided on
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_retry(self) -> bool:
        """The cause is of an attempt that ended, and another follows."""
        return self.next_attempt_ms > 0


NO_CAUSE = Cause()
QUEUED = Cause(id="queued")


class Failure(NamedTuple):
    """A row of the table of failures: what can end an attempt, whose fault it is, and whether the run is retried."""

    id: str
    category: str  # of the attempt, where its own terminal event has no other
    fault: FaultSide
    retry: Retry  # "on error": with `retry.on_error`; "not counted": no process was started, so nothing is used up
    is_final_if_repeated: bool = False  # the same error at the same step twice in a row


_FAILURES = (
    Failure("startup", "startup", FAULT_BY_CAUSE["startup"], "no"),
    Failure("input", "input", FAULT_BY_CAUSE["input"], "no"),
    Failure("auth", "auth", FAULT_BY_CAUSE["auth"], "no"),
    Failure("model-load", "model-load", FAULT_BY_CAUSE["model-load"], "on error", is_final_if_repeated=True),
    Failure("train-step", "train-step", FAULT_BY_CAUSE["train-step"], "on error", is_final_if_repeated=True),
    Failure("upload", "upload", FAULT_BY_CAUSE["upload"], "yes"),
    Failure("stopped", "cancelled", "machine", "yes"),
    Failure("timeout", "timeout", FAULT_BY_CAUSE["timeout"], "no"),
    Failure("connection", "train-step", FAULT_BY_CAUSE["connection"], "yes"),
    Failure("disk-full", "train-step", FAULT_BY_CAUSE["disk-full"], "yes"),
    Failure("out-of-memory", "train-step", FAULT_BY_CAUSE["out-of-memory"], "yes", is_final_if_repeated=True),
    Failure(KILLED, "train-step", FAULT_BY_CAUSE[KILLED], "yes"),
    Failure(CRASHED, "train-step", FAULT_BY_CAUSE[CRASHED], "yes"),
    Failure("bug", "train-step", "job", "on error"),
    Failure("lost", "train-step", "machine", "yes"),
    Failure("reboot", "cancelled", "machine", "yes"),
    Failure("heartbeat-timeout", "train-step", "machine", "yes"),
    Failure("start-timeout", "startup", "machine", "yes"),
    Failure("time-limit", "timeout", "job", "no"),
    Failure("launch-failed", "startup", "trn", "not counted"),
    Failure("never-launched", "startup", "trn", "not counted"),
    Failure("code-missing", "startup", "trn", "no"),
    Failure("secret-missing", "startup", "trn", "no"),
    Failure("trn-fault", "startup", "trn", "not counted"),
)
FAILURES: dict[str, Failure] = {row.id: row for row in _FAILURES}
CANCEL_SIGNALS = frozenset({"SIGTERM", "SIGINT", "SIGHUP"})  # a request to stop that did not come through us

# Why a run is where it is, without a failure.
WAITS = frozenset(
    {
        "queued",
        "waits-for-gpu",
        "waits-for-device",
        "waits-for-cpu",
        "waits-for-memory",
        "waits-for-disk",
        "waits-for-process",
        "waits-for-doctor",
        "gpu-not-usable",
        "devices-missing",
        "pool-missing",
    }
)
STAGES = frozenset({"launching", "running", "cancelling", "completed", "cancelled"})
# Why a file that an event named is not an artifact.
REFUSALS = frozenset(
    {
        "artifact-outside",
        "artifact-link",
        "artifact-not-file",
        "artifact-missing",
        "artifact-empty",
        "artifact-incomplete",
        "artifact-half-written",
        "artifact-changing",
        "artifact-no-checkpoint",
        "artifact-unreadable",
    }
)


def failure(id: str, **values: Any) -> Cause:  # noqa: A002
    """The cause of a failed attempt, with the values that are known."""
    return Cause(id=id, fault=FAILURES[id].fault, values=values)
