"""Intake: a submit or a resume becomes a queued run, or is answered by an equal one."""

import asyncio
import contextlib
import functools
import secrets as random_values
from collections.abc import Awaitable, Collection, Sequence
from typing import Protocol, Self

import msgspec

from gen_worker.errors import Fault
from gen_worker.trainer.datasets.job_content import find_changed_hyperparams
from trn.core.errors import (
    ConflictError,
    InfeasibleError,
    InvalidRequestError,
    NotFoundError,
    TrnError,
)
from trn.core.home import Home
from trn.core.runs import SERVER, RunRecord
from trn.daemon.api.secret_values import SecretValues
from trn.daemon.dispatch.worker_plan import encode_files
from trn.daemon.intake.resumption import ResumeRequest, Resumption
from trn.daemon.intake.run_identity import (
    find_stale,
    say_already_served,
    say_done_anew,
    say_kept,
    say_not_trained,
)
from trn.daemon.intake.run_judge import Judged, Planner, RunJudge, with_id
from trn.daemon.intake.submission import Submission, make_run_id
from trn.daemon.serving.inference_job import InferenceJobs, read_version, without_version
from trn.proto.records import EnvDifference
from trn.registry.base import NewRun, Registry


class Dispatcher(Planner, Protocol):
    def submitted(self) -> None: ...

    def cancel_wanted(self, run_id: str) -> None: ...


class PlannedRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a run would be: nothing is queued."""

    run_id: str
    digest: str
    name: str
    priority: int


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why a job is not queued."""

    code: str  # invalid, or infeasible: this machine can never run it
    reason: str
    faults: Sequence[Fault]

    @classmethod
    def of(cls, error: InvalidRequestError) -> Self:
        code = "infeasible" if isinstance(error, InfeasibleError) else "invalid"
        return cls(code=code, reason=error.reason, faults=error.faults or [Fault(error.reason)])


class Submitted(msgspec.Struct, frozen=True, kw_only=True):
    """`existed`: an equal run answers. `plan_json`: of a dry run, what would be started."""

    run: RunRecord | PlannedRun | None = None  # None: see `refusal`
    existed: bool = False
    run_token: str = ""
    plan_json: bytes = b""
    notes: Sequence[str] = ()
    env_differences: Sequence[EnvDifference] = ()
    refusal: Refusal | None = None  # only for a caller that takes it so; others get the error


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """What a submit would answer. Without a refusal it would be queued."""

    refusal: Refusal | None = None
    faults: Sequence[str] = ()  # its texts, code and reason, for older clients
    code: str = ""
    reason: str = ""
    notes: Sequence[str] = ()
    run: RunRecord | PlannedRun | None = None
    plan_json: bytes = b""
    env_differences: Sequence[EnvDifference] = ()


class Intake:
    """One for a daemon. Belongs to the loop's thread."""

    def __init__(
        self,
        *,
        registry: Registry,
        judge: RunJudge,
        resumption: Resumption,
        inference: InferenceJobs,
        dispatcher: Dispatcher,
        secrets: SecretValues,
        home: Home,
    ) -> None:
        self._registry = registry
        self._judge = judge
        self._resumption = resumption
        self._inference = inference
        self._dispatcher = dispatcher
        self._secrets = secrets
        self._home = home

    async def check(self, submission: Submission) -> Checked:
        """As `submit`, with a refusal as an answer. Nothing is queued."""
        try:
            found = await self._submit(msgspec.structs.replace(submission, is_dry_run=True))
        except InvalidRequestError as fault:
            refusal = Refusal.of(fault)
            return Checked(refusal=refusal, faults=refusal.faults, code=refusal.code, reason=refusal.reason)
        return Checked(
            run=found.run,
            plan_json=found.plan_json,
            notes=found.notes,
            env_differences=found.env_differences,
        )

    async def submit(self, submission: Submission) -> Submitted:
        """Durable when it returns. InvalidRequestError, InfeasibleError, unless the caller takes a refusal."""
        return await self._or_refusal(submission, self._submit(submission))

    async def resume(self, request: ResumeRequest) -> Submitted:
        """As `submit`."""
        return await self._or_refusal(request.submission, self._resume(request))

    async def _or_refusal(self, submission: Submission, answer: Awaitable[Submitted]) -> Submitted:
        try:
            return await answer
        except InvalidRequestError as fault:
            if not submission.takes_refusal:
                raise
            return Submitted(refusal=Refusal.of(fault))

    async def _resume(self, request: ResumeRequest) -> Submitted:
        made = self._registry.submission(request.submission.submission_id)
        if made is not None:  # since then its parent may have changed, and its checkpoints may be gone
            return Submitted(run=made)
        try:
            resumed, notes = await self._resumption.read(request)
        except (ConflictError, InvalidRequestError):
            answer = None if request.submission.force_new else await self._find_resumed(request)
            if answer is None:
                raise
            return answer
        return await self._submit(resumed, notes)

    async def _find_resumed(self, request: ResumeRequest) -> Submitted | None:
        """The newest run of the family, if this very resume made it and it is alive or complete."""
        with contextlib.suppress(TrnError):  # the caller gets the first refusal, not this one
            newest = self._registry.find(request.run_id, is_exact=request.is_exact)
            if not newest.parent_run_id:
                return None
            again = msgspec.structs.replace(request, run_id=newest.parent_run_id, is_exact=True)
            resumed, _ = await self._resumption.read(again)
            resumed = msgspec.structs.replace(resumed, is_import_tried=False)
            judged = await self._judge.judge(resumed, is_new=_is_never_new)
            equal = await self._find_standing(judged.run.digest)
            if equal is not None:
                return Submitted(run=equal, existed=True, notes=[await self._say_equal(equal, judged)])
        return None

    async def _submit(self, submission: Submission, notes: Sequence[str] = ()) -> Submitted:
        stale: dict[str, str] = {}

        async def is_new(digest: str) -> bool:
            if submission.force_new:
                return True
            equals = self._registry.answers_to(digest)
            if equals:
                stale.update(await asyncio.to_thread(find_stale, equals, self._home))
            return len(stale) == len(equals)

        submission, model_notes = await self._inference.complete(submission)
        if submission.secret_env and not submission.submission_id:
            submission = msgspec.structs.replace(submission, submission_id=random_values.token_hex(16))
        if not submission.is_dry_run:
            await self._registry.settled()  # what comes during a commit is judged together after it
        judged = await self._judge.judge(submission, is_new=is_new)
        new, notes = judged.run, [*notes, *model_notes, *judged.notes]
        if new.kind == SERVER and self._registry.submission(new.submission_id) is None:
            server = self._find_server(new)
            if server is not None:
                return server
            submission = msgspec.structs.replace(
                submission, force_new=True
            )  # one that has ended never answers
        differences = self._judge.find_differences(new, submission)
        if submission.is_dry_run:
            new = with_id(new, self._registry.next_id(new.run_id))
            equal = None if submission.force_new else await self._find_standing(new.digest)
            return Submitted(
                run=PlannedRun(run_id=new.run_id, digest=new.digest, name=new.name, priority=new.priority),
                plan_json=encode_files(self._dispatcher.plan(new)),
                notes=notes if equal is None else [await self._say_equal(equal, judged), *notes],
                env_differences=differences,
            )
        self._secrets.keep(new.submission_id, submission.secret_env)  # before anything can start it
        record, existed = await self._queue(judged, submission, stale)
        if existed and not stale:
            await is_new(new.digest)  # only now: most runs have no equal one
            if record.run_id in stale:
                record, existed = await self._queue(judged, submission, stale)
        if existed:
            # The equal run may wait for a value that was forgotten. The notes are about that run alone.
            self._secrets.keep(record.submission_id, submission.secret_env)
            notes = [await self._say_equal(record, judged), *say_kept(record, new)]
            return Submitted(run=record, existed=True, notes=notes)
        self._dispatcher.submitted()
        return Submitted(
            run=record, notes=[*say_done_anew(stale, new.kind), *notes], env_differences=differences
        )

    def _find_server(self, new: NewRun) -> Submitted | None:
        """The server that lives under that name and serves the same. ConflictError where it does not serve the same."""
        with contextlib.suppress(NotFoundError):
            served = self._registry.served_as(new.served_name)
            run = self._registry.get(served.run_id)
            if run.state.is_terminal:
                return None
            wanted, first = read_version(new.config), read_version(run.config)
            live = served.live or (None if first is None else first.facts)
            if run.is_cancel_wanted:
                raise ConflictError(
                    f"{served.name} is being stopped: `trn wait {run.run_id}`, then serve it again"
                )
            is_same = without_version(new.config) == without_version(run.config)
            if is_same and wanted is not None and wanted.facts == live:
                return Submitted(run=run, existed=True, notes=[say_already_served(run, served)])
            what = "" if live is None else f" with {live.label}"
            change = (
                f"`trn promote {served.name} {wanted.label}` changes the model" if wanted is not None else ""
            )
            if not is_same:
                change = f"other settings need a restart: `trn cancel {run.run_id}` first"
            raise ConflictError(
                f"{served.name} is served by {run.run_id}{what}: {change}; or serve under another --name"
            )
        return None

    async def _queue(
        self, judged: Judged, submission: Submission, stale: Collection[str]
    ) -> tuple[RunRecord, bool]:
        """(the run, whether an equal one that was there before answers), committed."""
        config = judged.run.config
        return await self._registry.add(
            judged.run,
            force_new=submission.force_new,
            stale=stale,
            draw_id=functools.partial(make_run_id, config) if judged.is_id_drawn else None,
        )

    async def _find_standing(self, digest: str) -> RunRecord | None:
        """The newest equal run whose result still stands."""
        equals = self._registry.answers_to(digest)
        stale = await asyncio.to_thread(find_stale, equals, self._home) if equals else {}
        return equals[len(stale)] if len(stale) < len(equals) else None

    async def _say_equal(self, record: RunRecord, judged: Judged) -> str:
        changed = await asyncio.to_thread(
            find_changed_hyperparams, record.config, record.base_dir, record.submitted_ms
        )
        return say_not_trained(record, [*judged.by_name, *(f"{text} of the hyperparams" for text in changed)])


async def _is_never_new(_digest: str) -> bool:
    return False
