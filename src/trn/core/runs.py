"""A run and its attempts: their records, and the one table of how a run's state may change.

    PENDING ──> DISPATCHING ──> RUNNING ──> COMPLETED
       │  ^          │             │  ├───> FAILED
       │  └──────────┴─────────────┤  └───> CANCELLED
       │     another attempt       │
       └──> CANCELLED              └─ every state that is not final has a cause and an owner

Terminal is final: nothing leaves COMPLETED, FAILED or CANCELLED. A run that is resumed after its end is a new run with
this one as its parent.
"""

from enum import StrEnum
from typing import Any

import msgspec

from trn.core.cause_words import say_cause, say_what
from trn.core.causes import NO_CAUSE, Cause
from trn.core.errors import ConflictError


class RunState(StrEnum):
    PENDING = "PENDING"
    DISPATCHING = "DISPATCHING"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def is_terminal(self) -> bool:
        return self in TERMINAL


TERMINAL = frozenset({RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED})

TRANSITIONS: dict[RunState, frozenset[RunState]] = {
    RunState.PENDING: frozenset({RunState.DISPATCHING, RunState.FAILED, RunState.CANCELLED}),
    RunState.DISPATCHING: frozenset(
        {RunState.RUNNING, RunState.PENDING, RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED}
    ),
    RunState.RUNNING: frozenset({RunState.PENDING, RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED}),
    RunState.COMPLETED: frozenset(),
    RunState.FAILED: frozenset(),
    RunState.CANCELLED: frozenset(),
}

# How it is said that an equal run answers a submit.
NOT_TRAINED, NOT_PREDICTED, ALREADY_SERVED = "not trained again:", "not predicted again:", "already served:"

# What a run does.
TRAINING, SERVER, PREDICTION = "training", "server", "prediction"

# Who moves a run on, and what its deadline is, in each state that is not final.
OWNERS: dict[RunState, str] = {
    RunState.PENDING: "the dispatcher: as soon as its resources are free, and not before its backoff is over",
    RunState.DISPATCHING: "the dispatcher: launched within the launch timeout, else back to PENDING",
    RunState.RUNNING: "its worker: a heartbeat within the heartbeat timeout, else it is ended",
}


def require_transition(run_id: str, old: RunState, new: RunState) -> None:
    """ConflictError where the table has no such way."""
    if new not in TRANSITIONS[old]:
        ways = ", ".join(sorted(TRANSITIONS[old])) or "nowhere: it is final"
        raise ConflictError(f"run {run_id} is {old} and cannot become {new}; from there it goes to {ways}")


LOCAL_POOL = "local"  # the daemon's own machine


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """What a run holds while it runs, and where. What it needs in another pool is placed by that pool's executor."""

    devices: tuple[str, ...] = ()  # by name
    gpus: int = 0  # how many, whichever
    cpus: int = 1
    memory_mb: int = 0
    pool: str = LOCAL_POOL

    @property
    def is_local(self) -> bool:
        """It holds devices, CPUs and memory of the daemon's own machine."""
        return self.pool == LOCAL_POOL


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One launch of a run. `worker` is what its executor finds it by, and opaque; `pid` is for people."""

    run_id: str
    number: int
    launched_ms: int
    ended_ms: int | None = None
    worker: str = ""
    pid: int = 0
    exit_code: int | None = None
    category: str = ""
    cause: Cause = NO_CAUSE  # how it ended
    saved_step: int = 0  # once it has ended: the step that the next attempt would resume from
    last_heartbeat_ms: int = 0
    step: int = 0
    devices: tuple[str, ...] = ()

    @property
    def reason(self) -> str:
        """How it ended, in words."""
        return say_what(self.cause) if self.cause.id or self.cause.values else ""


class QueuedRun(msgspec.Struct, frozen=True, kw_only=True):
    """As much of a pending run as it takes to decide whether it starts."""

    run_id: str
    priority: int
    submitted_ms: int
    needs: Needs
    cause: Cause
    attempt: int
    interpreter: str = ""


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is given beside a job and kept with its run. How to add one: docs/contributing.md."""

    priority: int = 0
    snapshot: str = ""
    frozen_from: str = ""  # the folder that the snapshot was taken of
    base_dir: str = ""
    interpreter: str = ""
    log_dir: str = ""  # where its lines are written as well, besides the home's logs
    event_log: str = ""
    submission_id: str = ""  # drawn by the caller, and repeated after a lost reply
    # Set by the daemon for a resume, never by a caller.
    parent_run_id: str = ""
    start_step: int = 0  # of the checkpoint that it began at


class RunFacts(RunOptions, frozen=True, kw_only=True):
    """What the daemon knows of a run and tells its clients."""

    run_id: str
    digest: str
    name: str = ""
    secret_env: tuple[str, ...] = ()  # names of variables whose values its worker gets and no file records
    stop_reason: str = ""  # why a callback, such as early stopping, ended it before its last step
    is_cancel_wanted: bool = False
    cancel_reason: str = ""
    submitted_ms: int = 0
    updated_ms: int = 0
    ended_ms: int | None = None
    not_before_ms: int = 0
    attempt: int = 0
    max_attempts: int = 1
    step: int = 0
    end_step: int | None = None
    last_seq: int = 0
    metrics: dict[str, float] = {}
    devices: tuple[str, ...] = ()
    needs: Needs = Needs()
    tags: dict[str, str] = {}
    change: int = 0
    family: str = (
        ""  # the run_id that was asked for; its first run has it, further ones are `family.2`, `family.3`…
    )
    newest_video: str = ""  # ids of artifacts; empty: none
    newest_sample: str = ""
    num_refused_artifacts: int = 0  # files that an event named and that are not artifacts
    notes: str = ""  # what people wrote about it
    kind: str = TRAINING


class RunRecord(RunFacts, frozen=True, kw_only=True):
    """What was asked for, and what became of it, as the registry has it."""

    state: RunState
    cause: Cause  # why it is in this state
    config: dict[str, Any]
    num_interruptions: int = 0  # attempts that never had a process
    event_offset: int = 0  # bytes of its events file that are taken in
    member: int = 1  # its number in the family
    nonce: str = ""  # drawn when it was submitted; its files carry it. Empty: of before there were any

    @property
    def reason(self) -> str:
        """Why it is in this state, in words."""
        return say_cause(self.cause)


class LineagePart(msgspec.Struct, frozen=True, kw_only=True):
    """A run of a line of descent: its steps after `from_step` count, up to and with `to_step`; None: to its end."""

    run_id: str
    from_step: int = 0
    to_step: int | None = None
