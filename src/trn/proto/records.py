"""What a client is given: frozen records, made from messages by `trn.proto.convert`.

States are words here, not an enum: a newer daemon may know states that this client does not (`UNKNOWN_17`).
"""

from typing import Any

import msgspec

from gen_worker.errors import Fault
from trn.core.causes import NO_CAUSE, Cause
from trn.core.runs import TERMINAL, LineagePart, RunFacts
from trn.core.serving.records import Promotion, ServedModel

TERMINAL_WORDS = frozenset(state.value for state in TERMINAL)


class Run(RunFacts, frozen=True, kw_only=True):
    """A run as the daemon last said it is. `config` is None where it was not asked for."""

    state: str
    reason: str  # `cause` as text
    cause: Cause = NO_CAUSE  # why it is in this state
    config: dict[str, Any] | None = None

    @property
    def is_terminal(self) -> bool:
        """It has ended for good, also in a way that this client has no word for."""
        return self.state in TERMINAL_WORDS or self.ended_ms is not None


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One launch of a run."""

    number: int
    launched_ms: int
    ended_ms: int | None = None
    pid: int = 0
    exit_code: int | None = None
    category: str = ""
    cause: Cause = NO_CAUSE  # how it ended
    reason: str = ""  # `cause` as text
    last_heartbeat_ms: int = 0
    step: int = 0
    devices: tuple[str, ...] = ()


class RunDetails(msgspec.Struct, frozen=True, kw_only=True):
    """A run with its config, its attempts and its folder on the daemon's machine."""

    run: Run
    attempts: tuple[Attempt, ...]
    folder: str


class EnvDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A variable that matters to a training and is not the same here and for the worker."""

    name: str
    is_in_caller: bool
    is_in_worker: bool
    worker_value: str = ""  # empty where its name looks like that of a secret


class SubmitResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a submit."""

    run: Run
    existed: bool  # an equal run answers: nothing is trained again
    run_token: str = ""  # lets its holder see and cancel this run, and nothing else
    plan: dict[str, Any] | None = None  # of a dry run
    notes: tuple[str, ...] = ()  # where it resumes, what was passed over or is not known
    env_differences: tuple[EnvDifference, ...] = ()


class Freed(msgspec.Struct, frozen=True, kw_only=True):
    """Something that was removed, or in a dry run would be. `gone`: a run that was removed before."""

    kind: str  # run, checkpoint, snapshots, cache, gone
    name: str
    size_bytes: int


class Pruned(msgspec.Struct, frozen=True, kw_only=True):
    """What was removed, and which runs are old enough and stay, each with the reason."""

    freed: tuple[Freed, ...]
    kept: tuple[str, ...] = ()


class JobCheck(msgspec.Struct, frozen=True, kw_only=True):
    """What a submit would say. `faults`: why it would be refused; none, and it would be taken."""

    faults: tuple[Fault, ...] = ()  # texts with their data
    code: str = ""  # of a refusal: invalid or infeasible
    reason: str = ""
    notes: tuple[str, ...] = ()
    run: Run | None = None  # its id, digest, name and priority
    plan: dict[str, Any] | None = None
    env_differences: tuple[EnvDifference, ...] = ()


class LogChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a log. `is_end`: the run has ended, or nothing was to be followed, and this was all of it."""

    offset: int
    data: bytes
    is_end: bool = False


class Artifact(msgspec.Struct, frozen=True, kw_only=True):
    """A file that an event of a run named. Its name was written by the job and may contain anything."""

    artifact_id: str
    run_id: str
    attempt: int
    step: int
    kind: str  # checkpoint, sample, video, file
    name: str
    media_type: str
    size_bytes: int
    sha256: str
    created_ms: int
    poster_id: str = ""  # of a video: the artifact to show before it plays
    state: str = ""  # checking, present, removed, refused
    is_present: bool = False  # its bytes can be read
    reason: str = ""  # `cause` as text
    cause: Cause = NO_CAUSE  # why it was refused


class ArtifactPage(msgspec.Struct, frozen=True, kw_only=True):
    artifacts: tuple[Artifact, ...] = ()
    next_page_token: str = ""


class ArtifactChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of an artifact. `is_end`: this was all that was asked for."""

    offset: int
    data: bytes
    is_end: bool = False


class MetricSeries(msgspec.Struct, frozen=True, kw_only=True):
    """Points of one metric. Where merged, each stands for a bucket of `width` steps: min, max and number of its points.

    `width` is 1 where nothing is merged, and 0 in the answer of an older daemon, which has no `counts` either.
    """

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]
    timestamps_ms: tuple[int, ...]
    num_points: int
    lows: tuple[float, ...] = ()
    highs: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    width: int = 0


class DiscardedPoints(msgspec.Struct, frozen=True, kw_only=True):
    """Points of one metric that one attempt reported and a later one took back: it resumed before them."""

    run_id: str
    name: str
    attempt: int
    steps: tuple[int, ...]
    values: tuple[float, ...]
    timestamps_ms: tuple[int, ...]
    num_points: int
    num_dropped: int = 0  # of this metric, all attempts: not kept, because at most 10,000 are


class Lineage(msgspec.Struct, frozen=True, kw_only=True):
    """A line of descent as one curve. `parts` are its runs, the oldest first; where one follows another is a seam."""

    parts: tuple[LineagePart, ...]
    metrics: dict[str, MetricSeries]

    @property
    def seams(self) -> tuple[tuple[int, str], ...]:
        """(step, run): after that step the points are those of that run."""
        return tuple((part.from_step, part.run_id) for part in self.parts[1:])


class ServedDetails(msgspec.Struct, frozen=True, kw_only=True):
    """A served name and its promotions, the newest first."""

    served: ServedModel
    promotions: tuple[Promotion, ...] = ()


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A device of the daemon's machine and who holds it."""

    device_id: str
    kind: str
    name: str = ""
    memory_mb: int = 0
    run_id: str = ""
    attempt: int = 0
    quarantine_reason: str = ""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What the daemon has to give, and how much of it is held."""

    devices: tuple[Device, ...]
    cpus: int
    cpus_held: int
    memory_mb: int
    memory_mb_held: int


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The daemon of itself."""

    version: str
    pid: int
    started_ms: int
    home: str
    address: str
    runs_by_state: dict[str, int]
    launcher: str
    num_watchers: int
    warnings: tuple[str, ...]
    last_change: int
