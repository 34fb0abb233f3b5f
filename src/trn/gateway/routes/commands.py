"""Commands: they go to the daemon, and need one."""

from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
from starlette.responses import Response

from gen_worker.contract.job.rules import lay_over
from gen_worker.errors import Fault
from trn.client.wire_requests import ResumeOptions, SubmitOptions
from trn.core.artifacts.files import find_checkpoint_meta
from trn.core.errors import InvalidRequestError, NotFoundError
from trn.gateway.answers import HttpFault, RefusedJobError, json_answer
from trn.gateway.endpoints import Call, endpoint
from trn.gateway.parts import Parts
from trn.gateway.records import HttpRun, RunId, show_run
from trn.proto.records import EnvDifference, Freed, Run, SubmitResult
from trn.registry.reader import RegistryReader

Text = Annotated[str, msgspec.Meta(max_length=4096)]
# A path on the gateway's own machine; a relative one would begin at its home.
Folder = Annotated[str, msgspec.Meta(pattern=r"^(/[^\x00]*)?$", max_length=4096)]


class RunOptionsBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of SubmitRun. What is left out has its default."""

    base_dir: Folder | None = None  # where relative paths of the job begin
    code_dir: Folder | None = None  # take a snapshot of the code in there
    snapshot: Text = ""  # one that was taken before, and of which folder
    frozen_from: Folder = ""
    code_identity: Text = ""
    interpreter: Text | None = None  # default: the gateway's
    priority: Annotated[int, msgspec.Meta(ge=-(2**31) + 1, le=2**31 - 1)] = 0
    force_new: bool = False  # also if an equal run exists
    is_import_tried: bool = True  # check data, disk and code too; false: only the fields
    log_dir: Folder = ""
    event_log: Folder = ""
    submission_id: Text = ""  # a repeat with the same one returns the same run
    env: dict[str, str] = {}
    secret_env: dict[str, str] = {}  # reach the worker and no record


class SubmitBody(RunOptionsBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    config: dict[str, Any]  # the job


class ResumeBody(RunOptionsBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    overrides: dict[str, Any] = {}  # laid over the run's config; null takes a field away
    checkpoint: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9]{1,64}$")] | None = (
        None  # the id of an artifact of the run
    )
    is_forced: bool = False  # also from a checkpoint with NaN or infinite weights


class AgainBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    overrides: dict[str, Any] = {}
    priority: Annotated[int, msgspec.Meta(ge=-(2**31) + 1, le=2**31 - 1)] | None = None
    secret_env: dict[str, str] = {}  # of the run's own only the names are known


class CancelBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    reason: Text = ""


class UpdateBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str | None = None  # a title for people; empty removes it. The run's id stays
    notes: str | None = None  # empty removes them
    tags: dict[str, str | None] = {}  # laid over the run's own; null takes one away


class UpdateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    run_id: RunId
    body: UpdateBody


class SubmitRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    body: SubmitBody
    dry_run: bool = False  # only check the job


class ResumeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    run_id: RunId
    body: ResumeBody


class AgainRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    run_id: RunId
    body: AgainBody


class CancelRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    run_id: RunId
    body: CancelBody


class RemoveRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    run_id: RunId
    also: Annotated[
        list[RunId], msgspec.Meta(max_length=100)
    ] = []  # further runs: those that continue it, say
    dry_run: bool = False  # only say what would be freed


class Submitted(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a submit. `existed`: an equal run answers, and nothing is trained again."""

    run: HttpRun
    existed: bool
    notes: tuple[str, ...] = ()
    env_differences: tuple[EnvDifference, ...] = ()  # between the gateway and the worker


class CheckedJob(msgspec.Struct, frozen=True, kw_only=True):
    """What a submit would say. No faults: it would be taken."""

    faults: list[HttpFault]
    code: str
    reason: str
    notes: tuple[str, ...]
    run: HttpRun | None
    plan: dict[str, Any] | None
    env_differences: tuple[EnvDifference, ...] = ()


class FreedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    freed: tuple[Freed, ...]


@endpoint("POST", "/runs", Submitted, status=201, also={200: CheckedJob})
async def submit_run(parts: Parts, call: Call[SubmitRequest]) -> Response:
    """Queue a run, or check it with `dry_run`. Durable when it answers; an equal run that exists is returned instead."""
    body = call.asked.body
    options = _options(body)
    try:
        if call.asked.dry_run:
            return json_answer(await _check(parts, body.config, options), call.accept_encoding)
        made = await parts.daemon.calls.submit(body.config, **options)
    except InvalidRequestError as fault:
        raise RefusedJobError(fault) from fault
    return _answer(made, str(body.config.get("trainer") or ""), call.accept_encoding)


@endpoint("POST", "/runs/{run_id}/resume", Submitted, status=201)
async def resume_run(parts: Parts, call: Call[ResumeRequest]) -> Response:
    """A new run that continues an ended one, or any run from one of its checkpoints. Its parent is recorded."""
    run_id, body = call.asked.run_id, call.asked.body
    run = await parts.stores.read(lambda reader: reader.get(run_id))
    given: dict[str, Any] = {**_options(body), "is_forced": body.is_forced, "is_exact": True}
    if body.base_dir is None:
        del given["base_dir"]  # that of the run
    if body.checkpoint is not None:
        given["checkpoint_path"] = await _find_checkpoint(parts, run_id, body.checkpoint)
    if run.state.is_terminal or body.checkpoint is None:
        given["overrides"] = body.overrides
    else:  # a fork of one that has not ended: its config from that checkpoint on
        own = {name: getattr(run, name) for name in ("base_dir", "snapshot", "frozen_from", "interpreter")}
        config = {name: value for name, value in run.config.items() if name != "run_id"}
        given = {**own, **given, "config": lay_over(config, body.overrides)}
        run_id = ""
    try:
        made = await parts.daemon.calls.resume(run_id, **cast("ResumeOptions", given))
    except InvalidRequestError as fault:
        raise RefusedJobError(fault) from fault
    return _answer(made, await _trainer_of(parts, made.run), call.accept_encoding)


@endpoint("POST", "/runs/{run_id}/again", Submitted, status=201)
async def run_again(parts: Parts, call: Call[AgainRequest]) -> Response:
    """Queue the same job once more, as another run: the same config, code and options."""
    run = await parts.stores.read(lambda reader: reader.get(call.asked.run_id))
    body = call.asked.body
    options: SubmitOptions = {
        "base_dir": run.base_dir,
        "snapshot": run.snapshot,
        "frozen_from": run.frozen_from,
        "interpreter": run.interpreter,
        "priority": run.priority if body.priority is None else body.priority,
        "force_new": True,
        "secret_env": body.secret_env,
    }
    missing = sorted(set(run.secret_env) - set(body.secret_env))
    if missing:
        raise RefusedJobError(
            InvalidRequestError(
                f"run {run.run_id} was given secret variables, whose values are not recorded",
                [Fault(f"give {name} again", path=f"secret_env.{name}", kind="missing") for name in missing],
            )
        )
    try:
        made = await parts.daemon.calls.submit(lay_over(run.config, body.overrides), **options)
    except InvalidRequestError as fault:
        raise RefusedJobError(fault) from fault
    return _answer(made, await _trainer_of(parts, made.run), call.accept_encoding)


@endpoint("POST", "/runs/{run_id}/cancel", HttpRun)
async def cancel_run(parts: Parts, call: Call[CancelRequest]) -> Response:
    """Cancel a run: recorded when it answers. A run that has ended stays as it is."""
    run, _ = await parts.daemon.calls.cancel(call.asked.run_id, call.asked.body.reason, is_exact=True)
    return json_answer(show_run(run, await _trainer_of(parts, run)), call.accept_encoding)


@endpoint("PATCH", "/runs/{run_id}", HttpRun)
async def update_run(parts: Parts, call: Call[UpdateRequest]) -> Response:
    """Change the name, the notes and the tags of a run, in any state."""
    body = call.asked.body
    run = await parts.daemon.calls.update(
        call.asked.run_id, name=body.name, notes=body.notes, tags=body.tags, is_exact=True
    )
    return json_answer(show_run(run, await _trainer_of(parts, run)), call.accept_encoding)


@endpoint("DELETE", "/runs/{run_id}", FreedAnswer)
async def remove_run(parts: Parts, call: Call[RemoveRequest]) -> Response:
    """Remove ended runs with their folders and metrics, all or none; with `dry_run` only say what that frees."""
    run_ids = list(dict.fromkeys([call.asked.run_id, *call.asked.also]))
    await parts.stores.read(lambda reader: [reader.get(run_id) for run_id in run_ids])
    freed = await parts.daemon.calls.remove(run_ids, is_dry_run=call.asked.dry_run, is_exact=True)
    return json_answer(FreedAnswer(freed=freed), call.accept_encoding)


async def _find_checkpoint(parts: Parts, run_id: str, artifact_id: str) -> Path:
    """Its `.meta.json`. NotFoundError where it is none of that run, or not there any more."""

    def find(reader: RegistryReader) -> Path:
        artifact = reader.artifact(artifact_id)
        if artifact.run_id != run_id:
            raise NotFoundError(f"run {run_id} has no artifact {artifact_id}")
        return find_checkpoint_meta(parts.home, artifact)

    return await parts.stores.read(find)


async def _check(parts: Parts, config: dict[str, Any], options: SubmitOptions) -> CheckedJob:
    found = await parts.daemon.calls.check(config, **options)
    return CheckedJob(
        faults=[HttpFault.of(fault) for fault in found.faults],
        code=found.code,
        reason=found.reason,
        notes=found.notes,
        run=None if found.run is None else show_run(found.run, str(config.get("trainer") or "")),
        plan=found.plan,
        env_differences=found.env_differences,
    )


def _options(body: RunOptionsBody) -> SubmitOptions:
    """What is given. Without a `base_dir` there is none: not the folder that the gateway runs in."""
    given = {name: getattr(body, name) for name in RunOptionsBody.__struct_fields__}
    given = {name: value for name, value in given.items() if value}
    return cast("SubmitOptions", {"base_dir": "", **given})


def _answer(made: SubmitResult, trainer: str, accept_encoding: str) -> Response:
    answer = Submitted(
        run=show_run(made.run, trainer),
        existed=made.existed,
        notes=made.notes,
        env_differences=made.env_differences,
    )
    headers = {"location": f"/api/v1/runs/{made.run.run_id}"}
    return json_answer(answer, accept_encoding, status=200 if made.existed else 201, headers=headers)


async def _trainer_of(parts: Parts, run: Run) -> str:
    found = await parts.stores.read(lambda reader: reader.trainers([run.run_id]))
    return found.get(run.run_id, "")


ENDPOINTS = [submit_run, resume_run, run_again, cancel_run, update_run, remove_run]
