"""AsyncClient: the daemon's API in Python. It reconnects and replays across restarts of the daemon."""

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, Unpack

import msgspec

from gen_worker.errors import Fault
from trn.client.caller_environment import find_passed
from trn.client.connection import Connection
from trn.client.run_reader import RunReader, as_names
from trn.client.wire_requests import (
    ResumeOptions,
    SubmitOptions,
    draw_submission_id,
    encode,
    make_resume_request,
    make_submit_request,
)
from trn.core.errors import AmbiguousError, InvalidRequestError, NotFoundError, UnavailableError
from trn.core.serving.records import Promotion
from trn.core.settings import read_settings
from trn.proto import trainer_pb2 as pb
from trn.proto.convert import from_message, read_faults, read_refusal
from trn.proto.records import (
    Freed,
    Health,
    JobCheck,
    Machine,
    Pruned,
    Run,
    SubmitResult,
)

logger = logging.getLogger("trn.client")

# The launcher may have to import torch first, and the author's code may import anything.
LOOK_PATIENCE_S = 300.0


class AsyncClient(RunReader):
    """A daemon by its home (through its socket), or by address, token and certificate.

    Belongs to one event loop. Opens nothing before the first call. Calls raise TrnErrors; UnavailableError if no daemon
    answers for `patience_s` (0: one try).
    """

    def __init__(
        self,
        home: Path | str | None = None,
        *,
        address: str = "",
        token: str = "",
        ca_certificate: Path | str = "",
        is_insecure: bool = False,
        patience_s: float = 60.0,
        timeout_s: float = 30.0,
    ) -> None:
        self._connection = Connection(
            home,
            address=address,
            token=token,
            ca_certificate=ca_certificate,
            is_insecure=is_insecure,
            patience_s=patience_s,
            timeout_s=timeout_s,
        )

    @property
    def patience_s(self) -> float:
        """For calls and streams that start from now on."""
        return self._connection.patience_s

    @patience_s.setter
    def patience_s(self, patience_s: float) -> None:
        self._connection.patience_s = patience_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection and end the streams of this client."""
        await self._connection.close()

    async def submit(
        self, config: Mapping[str, Any] | Path | str, **options: Unpack[SubmitOptions]
    ) -> SubmitResult:
        """Queue a run; durable when it returns. `config` is a job or its file, `options` are `SubmitOptions`.

        An equal run that is alive or complete is returned instead; `existed` and the first of `notes` say so.
        """
        return await self._submit("SubmitRun", await self._make_request(config, options))

    async def check(
        self, config: Mapping[str, Any] | Path | str, **options: Unpack[SubmitOptions]
    ) -> JobCheck:
        """Check a job as `submit` would, with every fault as data. Queues nothing."""
        request = await self._make_request(config, options)
        timeout_s = LOOK_PATIENCE_S if request.is_import_tried else None
        answer = await self._connection.call("CheckRun", request, timeout_s=timeout_s)
        check = from_message(answer, JobCheck)
        faults = read_faults(answer.refusal) or map(Fault, check.faults)  # an older daemon has texts alone
        return msgspec.structs.replace(check, faults=tuple(faults))

    async def resume(self, run_id: str = "", **options: Unpack[ResumeOptions]) -> SubmitResult:
        """A new run that continues an ended one, or a checkpoint with a `config`: see `ResumeOptions`.

        It is the next run of the family, unless `overrides` give it a `run_id`. An equal run answers, as for `submit`.
        Secret variables of the old run are given to the new one while the daemon still has their values.
        """
        passed = find_passed(self._pass_env())
        if options.get("config") is None and passed:  # the old run's own variables come before the settings
            own = ((await self.get(run_id)).config or {}).get("env") or {}
            passed = {name: value for name, value in passed.items() if name not in own}
        frozen: ResumeOptions = {**options, **await self._freeze(options)}
        return await self._submit("ResumeRun", make_resume_request(run_id, frozen, passed=passed))

    async def cancel(self, run_id: str, reason: str = "", *, is_exact: bool = False) -> tuple[Run, bool]:
        """Cancel a run; recorded when this returns. (the run, whether it was still live)."""
        answer = await self._connection.call(
            "CancelRun", pb.CancelRunRequest(run_id=run_id, reason=reason, is_exact=is_exact)
        )
        return from_message(answer.run, Run), answer.was_live

    async def update(
        self,
        run_id: str,
        *,
        name: str | None = None,
        notes: str | None = None,
        tags: Mapping[str, str | None] = MappingProxyType({}),
        is_exact: bool = False,
    ) -> Run:
        """Change a run's name and notes (empty: remove them) and lay `tags` over its own (None: remove it); in any state."""
        request = pb.UpdateRunRequest(
            run_id=run_id if is_exact else await self._pin(run_id),  # a repeat must mean the same run
            name=name,
            notes=notes,
            tags={tag: value for tag, value in tags.items() if value is not None},
            removed_tags=[tag for tag, value in tags.items() if value is None],
            is_exact=True,
        )
        return from_message((await self._connection.call("UpdateRun", request)).run, Run)

    async def remove(
        self, run_ids: str | Sequence[str], *, is_dry_run: bool = False, is_exact: bool = False
    ) -> tuple[Freed, ...]:
        """Remove ended runs with their folders and metrics: all of them, or none and a ConflictError.

        AmbiguousError for a name that is the id of a run and means a newer one, unless `is_exact`: then it is that run.
        """
        given = as_names(run_ids)
        pinned = list(given) if is_exact else [await self._pin_to_remove(run_id) for run_id in given]
        request = pb.RemoveRunsRequest(run_ids=pinned, is_dry_run=is_dry_run, is_exact=True)
        answer = await self._connection.call("RemoveRuns", request, timeout_s=LOOK_PATIENCE_S)
        return from_message(answer, Pruned).freed

    async def _pin_to_remove(self, run_id: str) -> str:
        try:
            pinned = await self._pin(run_id)
        except NotFoundError:
            return run_id  # perhaps it was already removed: the daemon knows
        if pinned != run_id:
            with contextlib.suppress(NotFoundError):
                await self.get(run_id, is_exact=True)
                raise AmbiguousError(
                    f"{run_id!r} is the id of the first run of its family, and as a name it means the newest,"
                    f" {pinned!r}: give {run_id}.1 or {pinned}"
                )
        return pinned

    async def prune(
        self,
        *,
        ended_before_ms: int,
        keep_best: int = 0,
        metric: str = "",
        is_max_best: bool = False,
        is_dry_run: bool = False,
    ) -> Pruned:
        """Remove runs that ended before then and are not needed, superseded checkpoints, code and caches."""
        request = pb.PruneRequest(
            ended_before_ms=ended_before_ms,
            keep_best=keep_best,
            metric=metric,
            is_max_best=is_max_best,
            is_dry_run=is_dry_run,
        )
        answer = await self._connection.call("Prune", request, timeout_s=LOOK_PATIENCE_S)
        return from_message(answer, Pruned)

    async def promote(
        self,
        name: str,
        model: str,
        *,
        action: str = "promote",
        percent: float = 0.0,
        gate: Mapping[str, Any] = MappingProxyType({}),
        by: str = "",
        promotion_id: str = "",
    ) -> Promotion:
        """Change the model that a served name answers with; recorded when it returns. `wait_promotion` has the outcome.

        `model` is RUN, RUN@best, RUN@latest or RUN@STEP, or @STEP of the run that is served. `action`: promote; shadow:
        the model's answers are compared and not sent; split: it answers `percent` of the requests. `gate`
        is laid over the gate of the server's job.
        """
        request = pb.PromoteRequest(
            name=name,
            model=model,
            action=action,
            percent=percent,
            gate_json=encode(gate, "gate") if gate else b"",
            by=by,
            promotion_id=promotion_id or draw_submission_id(),
        )
        # A checkpoint that is chosen is verified first, and may be large.
        answer = await self._connection.call("Promote", request, timeout_s=LOOK_PATIENCE_S)
        return from_message(answer.promotion, Promotion)

    async def rollback(self, name: str, *, by: str = "", promotion_id: str = "") -> Promotion:
        """End a shadow or a split, else go back to the model that answered before. As `promote`."""
        request = pb.RollbackRequest(name=name, by=by, promotion_id=promotion_id or draw_submission_id())
        return from_message((await self._connection.call("Rollback", request)).promotion, Promotion)

    async def wait_promotion(self, promotion: Promotion) -> Promotion:
        """What became of it: done, refused, or replaced by a later one. Endless while its server does not answer."""
        watch = self.watch(run_ids=[promotion.run_id], is_exact=True)
        async with aclosing(watch) as changes:
            async for _ in changes:
                details = await self.get_served(promotion.name)
                found = next((item for item in details.promotions if item.number == promotion.number), None)
                if found is None:
                    raise NotFoundError(f"promotion {promotion.number} of {promotion.name} was removed")
                if found.ended_ms is not None:
                    return found
        raise UnavailableError("the daemon ended the watch")

    async def make_promote_token(self, name: str) -> str:
        """A token that is good for promotions of one served name, and nothing else."""
        request = pb.MakePromoteTokenRequest(name=name)
        return str((await self._connection.call("MakePromoteToken", request)).token)

    async def devices(self) -> Machine:
        """The resources of the daemon's machine."""
        answer = await self._connection.call("ListDevices", pb.ListDevicesRequest())
        return from_message(answer, Machine)

    async def health(self) -> Health:
        """The state of the daemon."""
        answer = await self._connection.call("GetHealth", pb.GetHealthRequest())
        return from_message(answer, Health)

    async def _make_request(
        self, config: Mapping[str, Any] | Path | str, options: SubmitOptions
    ) -> pb.Submission:
        frozen: SubmitOptions = {**options, **await self._freeze(options)}
        return make_submit_request(config, frozen, pass_env=self._pass_env())

    def _pass_env(self) -> Sequence[str]:
        """`pass_env` of the settings, if this client has the home."""
        home = self._connection.home
        return [] if home is None else read_settings(home.settings).pass_env

    async def _freeze(self, options: SubmitOptions) -> SubmitOptions:
        """The snapshot of `code_dir`, where that is given."""
        folder, home = options.get("code_dir"), self._connection.home
        if folder is None:
            return {}
        if home is None:
            raise InvalidRequestError(
                "code_dir needs the daemon's home on this machine, and this client knows only its address"
            )
        from trn.client.code.snapshot import take_snapshot

        max_bytes = read_settings(home.settings).max_snapshot_bytes
        taken = await asyncio.to_thread(take_snapshot, Path(folder), home, max_bytes=max_bytes)
        return {"snapshot": taken.digest, "frozen_from": taken.folder}

    async def _submit(self, name: str, request: Any) -> SubmitResult:
        timeout_s = LOOK_PATIENCE_S if name == "ResumeRun" or request.is_import_tried else None
        answer = await self._connection.call(name, request, timeout_s=timeout_s)
        if answer.HasField("refusal"):
            raise read_refusal(answer.refusal)
        return from_message(answer, SubmitResult)
