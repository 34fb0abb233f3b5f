"""What a registry is: the truth about runs, as the daemon, clients and commands program against it.

Reads never wait for a writer. Changes return a future that is done once they are durable. `trn.registry.sqlite` has the
one that is used; with `path=None` it is in memory, which is the fake of this interface.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from trn.core.artifacts.records import ArtifactRecord, CheckedFile, NamedFile
from trn.core.causes import Cause
from trn.core.runs import (
    TRAINING,
    AttemptRecord,
    LineagePart,
    Needs,
    QueuedRun,
    RunOptions,
    RunRecord,
    RunState,
)
from trn.core.serving.records import DueFeedback, Promotion, ServedModel, WantedPromotion

if TYPE_CHECKING:
    from gen_worker.contract.job.model_version import ModelVersion
    from gen_worker.contract.serving import WantedModel
    from trn.registry.cursors import BusCancels, LogPlaces, OutboxTable
    from trn.registry.serving.served import ServerEvent


class NewRun(RunOptions, frozen=True, kw_only=True):
    """A run as it is submitted. `run_id` names its family: it gets that id, or the next of the family. `config` is as
    it was asked for, with a `run_id` only where one was given.
    """

    run_id: str
    digest: str
    config: dict[str, Any]
    name: str = ""
    secret_env: tuple[str, ...] = ()  # names alone
    max_attempts: int = 1
    needs: Needs = Needs()
    tags: dict[str, str] = msgspec.field(default_factory=dict)
    nonce: str = ""  # drawn anew by each submit, unlike `submission_id`
    kind: str = TRAINING
    served_name: str = ""  # of a server


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt ended, and what that makes of the run. A retry goes back to PENDING."""

    state: RunState
    cause: Cause  # of the attempt's end, and so of the run's new state
    category: str = ""
    exit_code: int | None = None
    delay_ms: int = 0  # before the next attempt
    is_interruption: bool = False  # no process was started
    stop_reason: str = ""  # of one that completed before its last step
    saved_step: int = 0  # the step that the next attempt would resume from


class ReadableRegistry(Protocol):
    """Not for several threads at once. `changed` and `last_change` answer in any process that can open the file."""

    def close(self) -> None: ...

    def get(self, run_id: str) -> RunRecord:
        """By its id, exactly. NotFoundError."""

    def find(self, text: str, *, is_exact: bool = False) -> RunRecord:
        """By what a person or a program calls it: see `trn.registry.families`. NotFoundError, AmbiguousError."""

    def family_of(self, name: str) -> str:
        """The family of the run with that id; empty where there is none."""

    def next_id(self, family: str) -> str:
        """The id that the next run of a family would get."""

    def submission(self, submission_id: str) -> RunRecord | None:
        """The run that this submission made."""

    def answers_to(self, digest: str) -> list[RunRecord]:
        """Runs that ask for the same and are alive or complete, the newest first. One that is to be cancelled is not
        among them."""

    def lineage(self, run: RunRecord) -> list[LineagePart]:
        """Its line of descent, the oldest first, as one curve."""

    def page(
        self,
        *,
        states: Sequence[RunState] = (),
        name: str = "",
        tags: Mapping[str, str] = MappingProxyType({}),
        before: tuple[int, str] | None = None,
        limit: int = 100,
        with_config: bool = False,
    ) -> list[RunRecord]:
        """The newest first, with all of `tags`; `before` is (submitted_ms, run_id) of the last one of the page before."""

    def attempts(self, run_id: str) -> list[AttemptRecord]: ...

    def artifact(self, artifact_id: str) -> ArtifactRecord:
        """NotFoundError."""

    def artifacts(
        self,
        run_id: str,
        *,
        kind: str = "",
        state: str = "",
        before: tuple[int, str] | None = None,
        limit: int = 100,
    ) -> list[ArtifactRecord]:
        """The newest first; `before` is (seq, artifact_id) of the last one of the page before."""

    def unchecked_artifacts(self, run_id: str, limit: int = 100) -> list[ArtifactRecord]:
        """Files that events named and that were not looked at yet, in the order of the events."""

    def runs_with_unchecked_artifacts(self) -> list[str]: ...

    def present_files(self, run_id: str, kind: str = "") -> list[tuple[str, str, str]]:
        """(artifact_id, kind, path) of all artifacts that are present."""

    def queue(self, now_ms: int, limit: int, *, without: Sequence[str] = ()) -> list[QueuedRun]:
        """Pending runs whose backoff is over, in the order in which they are to start: of each kind of needs the first
        `limit`. Where the first of a kind cannot start, none of that kind can; so no kind hides another. Runs of the
        interpreters `without` are passed over."""

    def next_backoff_ms(self, now_ms: int) -> int | None:
        """When the next backoff is over."""

    def event_place(self, run_id: str, seq: int) -> tuple[int, int]:
        """(seq, offset): up to that offset of the run's file lie its events up to that seq, which is at most `seq`."""

    def live(self) -> list[RunRecord]: ...

    def ended_before(self, before_ms: int) -> list[RunRecord]:
        """Runs that ended before then, the oldest first; with their configs."""

    def children(self, run_ids: Sequence[str]) -> list[tuple[str, str]]:
        """(run, the one of `run_ids` that it began from), of runs that are not among them."""

    def has(self, run_id: str) -> bool:
        """Whether there is a run of that very id."""

    def unknown_ids(self, run_ids: Sequence[str]) -> list[str]:
        """Those of them that no run has, in their order."""

    def was_removed(self, run_id: str) -> bool:
        """Whether there was a run of that very id, which somebody removed."""

    def resume_paths(self) -> list[str]:
        """The checkpoints that runs began from, as their jobs name them."""

    def unfinished_configs(self) -> dict[str, str]:
        """What runs ask for that wait or run, as JSON texts."""

    def not_told(self, run_id: str, consumers: Sequence[str]) -> list[str]:
        """Which of these consumers have not got all of the run's news yet."""

    def has_unfinished(self) -> bool:
        """Whether any run still waits or runs."""

    def snapshots(self, *, without: Sequence[str] = ()) -> set[str]:
        """The code snapshots that runs name; `without`: other runs than these."""

    def changed(self, after: int, limit: int = 500) -> list[RunRecord]:
        """Runs whose last change is after that one, in the order of the changes."""

    def last_change(self) -> int: ...

    def counts(self) -> dict[str, int]: ...

    def slots(self) -> list[dict[str, Any]]: ...

    def holdings(self) -> list[dict[str, Any]]:
        """The CPUs and the memory of each run that lives."""

    def num_ahead(self, run: RunRecord, now_ms: int) -> int:
        """How many runs wait that are to start before it. Reads all that wait."""

    def held(self) -> tuple[int, int]:
        """(cpus, memory_mb) that live attempts hold."""

    def served(self, name: str) -> ServedModel:
        """What a person means: the served name, else the id of its server. NotFoundError."""

    def served_as(self, name: str) -> ServedModel:
        """By the served name alone. NotFoundError."""

    def served_by(self, run_id: str) -> ServedModel:
        """By the id of the server alone. NotFoundError, also where another server has its name by now."""

    def all_served(self) -> list[ServedModel]: ...

    def versions_of(self, name: str) -> "tuple[ModelVersion | None, ModelVersion | None]":
        """(live, previous) of a served name, whole; None where it is not known."""

    def promotions(self, name: str, limit: int = 100) -> list[Promotion]:
        """The newest first."""

    def promotion(self, name: str, number: int) -> Promotion:
        """NotFoundError."""

    def wanted(self) -> "list[tuple[str, WantedModel]]":
        """(server's run, its newest promotion that has not ended), as the server reads it."""

    def due_feedback(self) -> list[DueFeedback]:
        """What servers asked the next training run with, until that has ended."""

    def feedback_files(self, run_id: str, number: int) -> list[tuple[int, list[str]]]:
        """(rows, parquet files) of each feedback of that server up to this one, the newest last."""

    def models_in_use(self) -> list[str]:
        """What runs serve, predict or were promoted to, as JSON texts that have the paths of the models."""


class Registry(ReadableRegistry, Protocol):
    """There is one of these for a home, in one process."""

    def reader(self) -> ReadableRegistry:
        """Of its own, for another thread. Closed by its caller, as the three below."""

    def outbox(self, consumer: str) -> "OutboxTable": ...

    def log_places(self) -> "LogPlaces": ...

    def bus_cancels(self) -> "BusCancels": ...

    async def settled(self) -> None:
        """Returns as soon as no commit is under way."""

    def submit(
        self,
        new: NewRun,
        *,
        force_new: bool = False,
        stale: Collection[str] = (),
        draw_id: Callable[[], str] | None = None,
    ) -> "Future[tuple[RunRecord, bool]]":
        """(the run, whether an equal one that was there before answers). Safe to repeat with its `submission_id`.

        `draw_id`: the run's id was drawn, not asked for. Where a run has or had it, another one is drawn.
        """

    async def add(
        self,
        new: NewRun,
        *,
        force_new: bool = False,
        stale: Collection[str] = (),
        draw_id: Callable[[], str] | None = None,
    ) -> tuple[RunRecord, bool]:
        """`submit`, and wait for it in a loop."""

    def want_cancel(self, run_id: str, reason: str) -> "Future[tuple[RunRecord, bool]]":
        """Record that it is to end; a run that waits ends at once. (the run, whether it was still live)."""

    def set_labels(
        self,
        run_id: str,
        *,
        name: str | None = None,
        notes: str | None = None,
        tags: Mapping[str, str] = MappingProxyType({}),
        removed_tags: Sequence[str] = (),
    ) -> "Future[RunRecord]":
        """Change its name and notes (None: as they are) and lay `tags` over its own; in any state."""

    def claim(self, run_id: str, device_ids: Sequence[str]) -> "Future[AttemptRecord]":
        """Take a pending run and its slots together, or neither: ConflictError."""

    def launched(self, run_id: str, number: int, *, worker: str, pid: int = 0) -> "Future[RunRecord]":
        """The attempt has a worker."""

    def follow(
        self,
        run_id: str,
        number: int,
        *,
        offset: int,
        last_seq: int,
        step: int,
        heartbeat_ms: int,
        metrics: Mapping[str, float],
        start_step: int | None = None,
        end_step: int | None = None,
        named_files: Sequence[NamedFile] = (),
        server_events: "Sequence[tuple[int, ServerEvent]]" = (),
    ) -> "Future[RunRecord]":
        """Events up to `offset` bytes of the run's file are taken in, exactly once, with the files that they name, and
        what a server said, each with its time."""

    def want_promotion(self, wanted: WantedPromotion) -> "Future[Promotion]":
        """Record what a served name is to answer with. ConflictError where its server has ended. Safe to repeat with its
        `promotion_id`."""

    def settle_feedback(self, due: DueFeedback) -> "Future[None]":
        """What became of it: its run, or why there is none, and whether that is all."""

    def settle_artifacts(
        self, run_id: str, checked: Sequence[CheckedFile] = (), gone: Sequence[str] = ()
    ) -> "Future[None]":
        """What was found of files that were named, in their order; and ids of present ones whose file is gone."""

    def rewind(self, run_id: str, offset: int) -> "Future[None]":
        """The run's file was cut back to there. Known seqs stay known."""

    def set_cause(self, run_id: str, cause: Cause) -> "Future[None]":
        """Say why a run still waits."""

    def end(self, run_id: str, number: int, ending: Ending) -> "Future[RunRecord]":
        """End an attempt: its slots are freed and the run moves on, in one transaction. Safe to repeat."""

    def set_slots(self, device_ids: Sequence[str]) -> "Future[None]":
        """Make sure that each of these devices has a slot."""

    def quarantine(self, device_id: str, reason: str) -> "Future[None]":
        """Keep a slot from being handed out; an empty reason hands it out again."""

    def remove(self, run_ids: Sequence[str]) -> "Future[None]":
        """Forget ended runs, all or none: ConflictError."""
