"""Resuming an ended run: the config of the new run, and the checkpoint it starts from."""

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from gen_worker.contract.checkpoints.choice import say_no_checkpoint
from gen_worker.contract.job.rules import lay_over
from gen_worker.contract.redaction import Secret
from gen_worker.errors import Fault
from trn.core.errors import ConflictError, InvalidRequestError, NotFoundError
from trn.core.home import Home
from trn.core.runs import PREDICTION, SERVER, RunRecord, RunState
from trn.daemon.api.secret_values import SecretValues, how_to_pass
from trn.daemon.intake.saved_checkpoints import SavedCheckpoint, newest_checkpoint, read_checkpoint
from trn.daemon.intake.submission import Submission, read_config
from trn.registry.base import ReadableRegistry

# A run of its own; the profile was laid over before; what was forced once is not forced again.
_NOT_INHERITED = ("run_id", "profiles", "resume_non_finite", "resume_older")


class ResumeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The message `ResumeRunRequest` of the proto: an ended run, or a checkpoint, and what to submit."""

    submission: Submission
    run_id: str = ""
    checkpoint_path: str = ""
    overrides_json: bytes = b""
    is_forced: bool = False  # also take a checkpoint with NaN or infinite weights
    is_exact: bool = False


class ResumePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to submit, and where it starts, in words."""

    config: dict[str, Any]
    note: str


class Resumption:
    """Turns a resume into a submission."""

    def __init__(
        self, registry: ReadableRegistry, home: Home, *, secrets: SecretValues, max_config_bytes: int
    ) -> None:
        self._registry = registry
        self._secrets = secrets
        self._home = home
        self._max_config_bytes = max_config_bytes

    async def read(self, request: ResumeRequest) -> tuple[Submission, list[str]]:
        """(what to submit, notes for the caller). Of the checkpoint, only the meta is read."""
        given = request.submission
        overrides = self._read_config(request.overrides_json) if request.overrides_json else {}
        _require_no_start(overrides)
        checkpoint = None
        if request.checkpoint_path:
            path = Path(request.checkpoint_path)
            if not path.is_absolute():
                raise InvalidRequestError(
                    f"checkpoint_path is {request.checkpoint_path!r}, expected an absolute path"
                )
            if not await asyncio.to_thread(path.is_file):
                raise NotFoundError(say_no_checkpoint(path))
            checkpoint = await asyncio.to_thread(read_checkpoint, path, is_forced=request.is_forced)
        if request.run_id:
            return await self._resume_run(request, overrides, checkpoint)
        if checkpoint is None or not given.config_json:
            raise InvalidRequestError("resume needs a run_id, or a checkpoint_path with a config")
        config = lay_over(self._read_config(given.config_json), overrides)
        saver = self._find_saver(checkpoint)
        resumed = msgspec.structs.replace(
            given,
            config_json=msgspec.json.encode(with_checkpoint(config, checkpoint)),
            parent_run_id="" if saver is None else saver.run_id,
            family="" if saver is None else saver.family,
            start_step=checkpoint.step,
        )
        return resumed, [describe(checkpoint)]

    async def _resume_run(
        self,
        request: ResumeRequest,
        overrides: Mapping[str, Any],
        checkpoint: SavedCheckpoint | None,
    ) -> tuple[Submission, list[str]]:
        given = request.submission
        if given.config_json:
            raise InvalidRequestError("a run is resumed with its own config: use overrides_json to change it")
        self._home.run(request.run_id)  # what could be no id is refused before anything is looked up
        parent = self._registry.find(request.run_id, is_exact=request.is_exact)
        _require_training(parent)
        if checkpoint is None:
            checkpoint = await asyncio.to_thread(
                newest_checkpoint,
                self._home.run(parent.run_id).checkpoints,
                parent.run_id,
                parent.nonce,
                is_forced=request.is_forced,
            )
        plan = plan_resume(parent, overrides=overrides, checkpoint=checkpoint)
        saver = self._find_saver(checkpoint)
        resumed = msgspec.structs.replace(
            given,
            config_json=msgspec.json.encode(plan.config),
            snapshot=given.snapshot or parent.snapshot,
            frozen_from=given.frozen_from if given.snapshot else parent.frozen_from,
            base_dir=given.base_dir or parent.base_dir,
            interpreter=given.interpreter or parent.interpreter,
            parent_run_id=parent.run_id if saver is None else saver.run_id,
            family=parent.family,
            # Without a checkpoint of its own it begins where its parent did.
            start_step=parent.start_step if checkpoint is None else checkpoint.step,
            secret_env=self._find_secrets(parent, plan.config, given.secret_env),
        )
        passed_over = () if checkpoint is None else checkpoint.passed_over
        return resumed, [*(f"passed over {words}" for words in passed_over), plan.note]

    def _find_secrets(
        self, parent: RunRecord, config: Mapping[str, Any], given: Mapping[str, Secret]
    ) -> dict[str, Secret]:
        """Those that are given, and those of its parent. InvalidRequestError if a value is not known."""
        env = config.get("env") or {}
        wanted = [name for name in parent.secret_env if name not in given and name not in env]
        found, missing = self._secrets.find(parent.submission_id, wanted)
        if missing:
            raise InvalidRequestError(
                f"run {parent.run_id} had secret variables whose values this daemon does not have:"
                f" {', '.join(missing)}. Pass them again: `trn resume {parent.run_id} {how_to_pass(missing)}`"
            )
        return {**found, **given}

    def _find_saver(self, checkpoint: SavedCheckpoint | None) -> RunRecord | None:
        """The run that saved it, if it is one of ours: it may be of another home, or of another submission of that id."""
        with contextlib.suppress(NotFoundError):
            run = None if checkpoint is None else self._registry.get(checkpoint.run_id)
            if run is not None and checkpoint is not None and run.nonce == checkpoint.nonce:
                return run
        return None

    def _read_config(self, text: bytes) -> dict[str, Any]:
        return read_config(text, max_config_bytes=self._max_config_bytes)


def _require_training(parent: RunRecord) -> None:
    """InvalidRequestError for a run that trains nothing: what there is to do instead."""
    remedy = {
        SERVER: "`trn serve` starts another server",
        PREDICTION: "`trn predict` with the same options keeps what it has written, and writes the rest",
    }.get(parent.kind)
    if remedy:
        raise InvalidRequestError(f"run {parent.run_id} is a {parent.kind} and cannot be resumed: {remedy}")


def plan_resume(
    parent: RunRecord, *, overrides: Mapping[str, Any], checkpoint: SavedCheckpoint | None
) -> ResumePlan:
    """The config that resumes an ended run from that checkpoint; None: it never saved one."""
    if not parent.state.is_terminal:
        raise ConflictError(
            f"run {parent.run_id} is {parent.state}: it has not ended; cancel it first, or wait for its end"
        )
    config = lay_over(
        {name: value for name, value in parent.config.items() if name not in _NOT_INHERITED}, overrides
    )
    # From an earlier step of its own, or from another run's, there is something left to do.
    if checkpoint is None or (checkpoint.run_id == parent.run_id and checkpoint.step >= parent.step):
        _require_more(parent, config, overrides)
    _require_room(parent, overrides, checkpoint)
    if checkpoint is None:
        begins = config.get("resume_checkpoint_path")
        where = f"starts from {begins}, as it did" if begins else "starts from step 0"
        return ResumePlan(config=config, note=f"run {parent.run_id} saved no checkpoint: this one {where}")
    return ResumePlan(config=with_checkpoint(config, checkpoint), note=describe(checkpoint))


def describe(checkpoint: SavedCheckpoint) -> str:
    of = f" of run {checkpoint.run_id}" if checkpoint.run_id else ""
    forced = f", although it holds {checkpoint.non_finite}" if checkpoint.non_finite else ""
    unverifiable = "" if checkpoint.is_verifiable else "; its meta has no digest, so it cannot be verified"
    return f"resumes from {checkpoint.path.name}{of} at step {checkpoint.step}{forced}{unverifiable}"


def with_checkpoint(config: Mapping[str, Any], checkpoint: SavedCheckpoint) -> dict[str, Any]:
    """The config, starting from that checkpoint instead of the one before."""
    resumed = {**config, "resume_checkpoint_path": str(checkpoint.path)}
    if checkpoint.non_finite:
        resumed["resume_non_finite"] = True
    resumed.pop("resume_older", None)
    if checkpoint.is_chosen:
        resumed["resume_older"] = True
    inputs = resumed.get("inputs")
    if isinstance(inputs, dict):
        resumed["inputs"] = {name: ref for name, ref in inputs.items() if name != "resume_checkpoint_ref"}
    return resumed


def _require_no_start(overrides: Mapping[str, Any]) -> None:
    """InvalidRequestError for changes that name a checkpoint: the one of the resume would replace it."""
    inputs = overrides.get("inputs")
    given = {
        "resume_checkpoint_path": overrides.get("resume_checkpoint_path"),
        "inputs.resume_checkpoint_ref": inputs.get("resume_checkpoint_ref")
        if isinstance(inputs, dict)
        else None,
    }
    message = "given, but a resume starts from the checkpoint of its run, of RUN@STEP or of --checkpoint: use one of these"
    if faults := [
        Fault(message, path=name, kind="rule") for name, value in given.items() if value is not None
    ]:
        raise InvalidRequestError("the changes are not valid", faults)


def _require_room(
    parent: RunRecord, overrides: Mapping[str, Any], checkpoint: SavedCheckpoint | None
) -> None:
    """InvalidRequestError for a new `max_steps` that the checkpoint has reached."""
    wanted, step = overrides.get("max_steps"), 0 if checkpoint is None else checkpoint.step
    if isinstance(wanted, int) and wanted <= step and wanted != parent.config.get("max_steps"):
        raise InvalidRequestError(
            f"max_steps is {wanted}, but the checkpoint is of step {step}: there is nothing left to do; raise max_steps"
        )


def _require_more(parent: RunRecord, config: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """InvalidRequestError if the run is complete: its worker would load the checkpoint and exit."""
    if parent.state is not RunState.COMPLETED:
        return
    batches = config.get("mock_batches")
    if isinstance(batches, list) and len(batches) <= parent.step:
        raise InvalidRequestError(
            f"run {parent.run_id} is complete at step {parent.step}, and its {len(batches)} mock_batches are one pass:"
            " there is nothing left to do"
        )
    if batches != parent.config.get("mock_batches"):
        return
    wanted = config.get("max_steps")
    is_enough = isinstance(wanted, int) and wanted <= parent.step
    is_early = parent.end_step is not None and parent.step < parent.end_step
    is_same = not is_early and all(
        config.get(name) == parent.config.get(name) for name in ("max_steps", "epochs")
    )
    if is_enough or is_same:
        given = f" (max_steps is {wanted})" if "max_steps" in overrides else ""
        raise InvalidRequestError(
            f"run {parent.run_id} is complete at step {parent.step}: there is nothing left to do{given}; raise max_steps"
            " or epochs to continue"
        )
