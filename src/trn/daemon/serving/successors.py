"""The next models of servers: better checkpoints of a run that a server follows, and runs that its feedback asks for.

Both end in a promotion through the gate. What was tried is in the registry: a checkpoint that was refused, or that somebody
rolled back from, is not promoted by itself again, and a feedback submits one run, however often a daemon dies. A server asks
for the next run when it reads in `settled.json` that the one before it, and its promotion, have ended.
"""

import asyncio
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from gen_worker.contract.checkpoints.choice import find_committed, read_named
from gen_worker.contract.checkpoints.meta import Metric
from gen_worker.contract.failpoints import failpoint
from gen_worker.contract.job.model_version import ModelVersion
from gen_worker.contract.serving import SETTLED, SettledFeedback, write_document
from gen_worker.errors import CheckpointError
from trn.core.errors import ConflictError, NotFoundError, TrnError, UnavailableError
from trn.core.home import Home
from trn.core.runs import RunRecord, RunState
from trn.core.serving.records import DueFeedback, Promotion, PromotionState, ServedModel
from trn.daemon.intake.intake import Intake
from trn.daemon.intake.submission import Submission
from trn.daemon.serving.inference_job import make_next_config
from trn.daemon.serving.model_choice import ChosenModel, ModelChoice
from trn.daemon.serving.promotions import PromotionRequest, Promotions
from trn.registry.base import Registry
from trn.registry.writer import committed

logger = logging.getLogger("trn.daemon.serving.successors")

SWEEP_S = 0.5
FAULT_PAUSE_S = 5.0
Listing = tuple[tuple[str, int], ...]


class Successors:
    """One for a daemon. From the loop's thread."""

    def __init__(
        self, *, registry: Registry, choice: ModelChoice, promotions: Promotions, intake: Intake, home: Home
    ) -> None:
        self._registry = registry
        self._choice = choice
        self._promotions = promotions
        self._intake = intake
        self._home = home
        self._seen: dict[
            str, tuple[str, Listing]
        ] = {}  # served name -> (run, its checkpoints), looked at before

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            pause_s = SWEEP_S
            try:
                await self.look()
            except Exception:
                logger.exception("the next models of servers could not be found; trying again")
                pause_s = FAULT_PAUSE_S
            await asyncio.sleep(pause_s)

    async def look(self) -> None:
        """Once: promote better checkpoints of followed runs, submit due runs, promote what they saved."""
        for served in self._registry.all_served():
            if served.is_ready and served.state == RunState.RUNNING:
                await self._follow(served)
        for due in self._registry.due_feedback():
            await self._answer(due)

    # A run that is followed

    async def _follow(self, served: ServedModel) -> None:
        followed = self._registry.get(served.run_id).config["serving"].get("follow")
        if not followed:
            return
        try:
            run = self._registry.find(followed)
        except TrnError:  # it was removed
            return
        listing = await asyncio.to_thread(_list, self._home.run(run.run_id).checkpoints)
        if not listing or self._seen.get(served.name) == (run.run_id, listing):
            return
        try:
            found = await self._choice.find_best(run)
        except UnavailableError as fault:  # the disk: tried again
            logger.warning("%s: %s", served.name, fault)
            return
        if found is not None and await self._is_next(served, found):
            request = PromotionRequest(name=served.name, by=f"follow {run.run_id}")
            try:
                await self._promotions.promote_version(served, found.version, request)
            except ConflictError as fault:  # it is ending
                logger.info("%s: %s", served.name, fault)
        self._seen[served.name] = run.run_id, listing

    async def _is_next(self, served: ServedModel, found: ChosenModel) -> bool:
        """Whether it was never tried, and is better than what answers now, where both have that metric."""
        facts = found.version.facts
        tried = (
            item.version
            for item in self._registry.promotions(served.name)
            if item.state != PromotionState.REPLACED
        )
        if facts == served.live or facts in tried:
            return False
        live, _ = self._registry.versions_of(served.name)
        return live is None or await asyncio.to_thread(_is_better, found.version, live)

    # Runs that feedback asks for

    async def _answer(self, due: DueFeedback) -> None:
        try:
            server = self._registry.get(due.run_id)
        except NotFoundError:
            return
        if not due.child:
            if server.state.is_terminal:
                due = msgspec.structs.replace(due, fault="the server ended first", is_settled=True)
            else:
                due = await self._submit(server, due)
        else:
            child = self._find(due.child)
            if child is not None and not child.state.is_terminal:
                return
            fault = await self._promote_child(server, due, child)
            if fault is None:
                return
            due = msgspec.structs.replace(due, fault=fault, is_settled=True)
        if due.is_settled and not server.state.is_terminal:
            folder = self._home.run(server.run_id).serving
            await asyncio.to_thread(write_document, folder / SETTLED, SettledFeedback(number=due.number))
            failpoint("feedback.settled_written")
        await committed(self._registry.settle_feedback(due))

    async def _submit(self, server: RunRecord, due: DueFeedback) -> DueFeedback:
        """Its run is there, or why not."""
        made = self._registry.submission(_submission_id(server, due))
        if made is None:
            try:
                submission = self._make_submission(server, due)
                answer = (await self._intake.submit(submission)).run
            except UnavailableError:
                raise
            except TrnError as fault:
                logger.warning("feedback %d of %s: no run was submitted: %s", due.number, due.run_id, fault)
                return msgspec.structs.replace(due, fault=str(fault), is_settled=True)
            assert isinstance(answer, RunRecord), "it is no dry run"
            made = answer
            failpoint("feedback.submitted")
        logger.info("feedback %d of %s: %s: run %s", due.number, due.run_id, due.reason, made.run_id)
        return msgspec.structs.replace(due, child=made.run_id)

    def _make_submission(self, server: RunRecord, due: DueFeedback) -> Submission:
        version = self._find_version(server, due)
        parent = self._registry.get(version.run_id)
        feedback = server.config["serving"].get("feedback") or {}
        known = self._registry.feedback_files(due.run_id, due.number)  # also of runs that were not promoted
        chosen = choose_newest(known, feedback.get("newest_rows"))
        left_out = {path for _, files in known for path in files} - set(chosen)
        config = make_next_config(version, feedback.get("train") or {}, chosen, left_out)
        return Submission(
            config_json=msgspec.json.encode(config),
            snapshot=parent.snapshot,
            frozen_from=parent.frozen_from,
            base_dir=parent.base_dir,
            interpreter=parent.interpreter,
            log_dir=parent.log_dir,
            submission_id=_submission_id(server, due),
            parent_run_id=parent.run_id,
            family=parent.family,
            priority=server.priority,
        )

    def _find_version(self, server: RunRecord, due: DueFeedback) -> ModelVersion:
        """What answered when the feedback was due, whole."""
        served = self._registry.served_by(server.run_id)
        known = self._registry.versions_of(served.name)
        found = next((item for item in known if item is not None and item.facts == due.version), None)
        if found is None:
            raise NotFoundError(f"the model {due.version.label} is not served any more")
        return found

    async def _promote_child(
        self, server: RunRecord, due: DueFeedback, child: RunRecord | None
    ) -> str | None:
        """Empty where its best checkpoint was promoted; else why it was not. None while that is not known."""
        if child is None:
            return f"run {due.child} was removed"
        if child.state is not RunState.COMPLETED:
            return f"run {child.run_id} {child.state.lower()}: {child.reason}"
        promotion_id = f"{_submission_id(server, due)}-promotion"
        try:
            promotion = self._find_promotion(server, promotion_id)
            if promotion is None:
                return await self._promote_best(server, due, child, promotion_id)
        except (ConflictError, NotFoundError) as fault:  # it is ending, or another server has its name
            return str(fault)
        if promotion.state == PromotionState.WANTED:
            return None
        return "" if promotion.state == PromotionState.DONE else promotion.words or promotion.state

    async def _promote_best(
        self, server: RunRecord, due: DueFeedback, child: RunRecord, promotion_id: str
    ) -> str | None:
        """As `_promote_child`, of a run that has no promotion yet."""
        found = await self._choice.find_best(child)
        if found is None:
            return f"run {child.run_id} has no checkpoint that can be served"
        request = PromotionRequest(name=server.run_id, by=f"feedback {due.number}", promotion_id=promotion_id)
        await self._promotions.promote_version(
            self._registry.served_by(server.run_id), found.version, request
        )
        return None

    def _find_promotion(self, server: RunRecord, promotion_id: str) -> Promotion | None:
        name = self._registry.served_by(server.run_id).name
        made = (item for item in self._registry.promotions(name, 10_000) if item.promotion_id == promotion_id)
        return next(made, None)

    def _find(self, run_id: str) -> RunRecord | None:
        try:
            return self._registry.get(run_id)
        except NotFoundError:
            return None


def choose_newest(known: Sequence[tuple[int, list[str]]], num_rows: int | None) -> list[str]:
    """The files that have so many of the newest rows, in the order of the rows; None: all."""
    chosen: list[list[str]] = []
    count = 0
    for rows, files in reversed(known):
        if num_rows is not None and count >= num_rows:
            break
        chosen.append(files)
        count += rows
    return list(dict.fromkeys(path for files in reversed(chosen) for path in files))


def _submission_id(server: RunRecord, due: DueFeedback) -> str:
    return f"feedback-{server.nonce}-{due.number}"


def _list(folder: Path) -> Listing:
    """The checkpoints that are there, by name and time: another one where something was saved or removed."""
    found = []
    for name in find_committed(folder):
        try:
            found.append((name, os.stat(folder / name).st_mtime_ns))  # noqa: PTH116
        except OSError:
            continue
    return tuple(found)


def _is_better(version: ModelVersion, live: ModelVersion) -> bool:
    """By the metric that both checkpoints have; where there is none, the other one is."""
    one, other = _metric(version), _metric(live)
    if one is None or other is None or one.name != other.name or one.value is None or other.value is None:
        return True
    return one.value > other.value if one.mode == "max" else one.value < other.value


def _metric(version: ModelVersion) -> Metric | None:
    try:
        found = read_named(Path(version.checkpoint))
    except CheckpointError:
        return None
    return None if isinstance(found, dict) else found.meta.metric
