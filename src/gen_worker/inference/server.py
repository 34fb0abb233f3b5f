"""A model server: one attempt of a run that answers requests until it is cancelled.

```text
main thread, one event loop        front ── frames ──> model workers (processes)
├── wait for a stop: drain, then end as cancelled
├── wanted: SIGUSR1, and a look every 0.2 s: `promotion`
├── figures every 5 s: `request_stats`, metric points
└── feedback: `feedback`
threads: lifecycle (heartbeat, cancel file, limits), event writer, files that are synced
```
"""

import asyncio
import contextlib
import logging
import re
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Never

import msgspec

from gen_worker.contract.files.durable import make_folder, remove_leftovers, replace_file
from gen_worker.contract.files.open_files import raise_open_files
from gen_worker.contract.files.regular import read_regular
from gen_worker.contract.job.model_version import ModelVersion
from gen_worker.contract.job.spec import ServingSpec, TrainingJobSpec
from gen_worker.contract.serving import (
    FOLDER,
    FeedbackDueEvent,
    LiveModel,
    PromotedEvent,
    PromotionRefusedEvent,
    ReadyEvent,
    RequestStatsEvent,
    read_live,
)
from gen_worker.errors import NEWS_LOGGER, ModelLoadError, StartupError
from gen_worker.inference.feedback.loop import FeedbackLoop
from gen_worker.inference.front.front import AnsweredRequest, Front, FrontOptions
from gen_worker.inference.front.http.reception import MAX_CONNECTIONS
from gen_worker.inference.front.pool import ReplicaPool
from gen_worker.inference.front.queries import QueueLimits
from gen_worker.inference.front.workers.model_processes import ModelProcesses
from gen_worker.inference.model.parent import ModelParent
from gen_worker.inference.promotion import Promotions
from gen_worker.inference.request_log import RequestLog
from gen_worker.inference.versions import model_options
from gen_worker.trainer.attempt.session import AttemptSession
from gen_worker.trainer.job_lifecycle import raise_stop

logger, news = logging.getLogger("gen_worker.inference"), logging.getLogger(NEWS_LOGGER)

LOOK_EVERY_S = 0.2
# How long a thread waits for the interpreter. A loop that answers requests all the time would let each file operation of
# a promotion wait for Python's own 5 ms.
SWITCH_S = 0.0005
STATS_EVERY_S = 5.0
IDLE_STATS_EVERY_S = 60.0
DRAIN_SHARE = 0.8  # of the grace period
MAX_OPEN_FILES = 8192
BEARER = "bearer"
BEARER_BYTES, MAX_BEARER_BYTES = 32, 1024
WHOLE_BEARER = re.compile(r"[A-Za-z0-9_-]{43}")  # of which a part could be guessed


class Clock:
    """Seconds since the run first served, over all its attempts. They never go back."""

    def __init__(self, started_ms: int, reached: int) -> None:
        self._base = max((time.time_ns() // 1_000_000 - started_ms) / 1000, reached)
        self._since = time.monotonic()

    @property
    def step(self) -> int:
        return int(self._base + time.monotonic() - self._since)


@dataclass(slots=True, kw_only=True)
class ModelServer:
    """`serve` ends by a stop of the session, or by an error."""

    session: AttemptSession
    job: TrainingJobSpec
    version: ModelVersion  # which the job names
    parent: ModelParent
    folder: Path = field(init=False)
    _front: Front = field(init=False)
    _promotions: Promotions = field(init=False)
    _feedback: FeedbackLoop | None = field(default=None, init=False)
    _request_log: RequestLog | None = field(default=None, init=False)
    _clock: Clock = field(init=False)

    def __post_init__(self) -> None:
        self.folder = self.session.environment.checkpoints_dir.parent / FOLDER

    @property
    def _spec(self) -> ServingSpec:
        assert self.job.serving is not None, "a rule of the job"
        return self.job.serving

    async def serve(self) -> Never:
        """TrainingCanceled or TrainingTimeout, when the last request is answered."""
        loop = asyncio.get_running_loop()
        sys.setswitchinterval(SWITCH_S)
        live = self._read_live()
        stopped = self._watch_stop(loop)
        lost: asyncio.Future[None] = loop.create_future()
        wake = asyncio.Event()
        loop.add_signal_handler(signal.SIGUSR1, wake.set)
        processes = ModelProcesses(self.parent, log=logger, gone=_fail(lost))
        self._front = self._make_front()
        self._make_hooks(live)
        self._promotions = Promotions(
            folder=self.folder,
            live=live,
            gate=self._spec.gate,
            front=self._front,
            make_pool=lambda version: self._make_pool(version, processes),
            retire=self.parent.retire,
            tell=self._tell_outcome,
            compare=None if self._feedback is None else self._feedback.compare,
            switched=self._note_switch,
        )
        work = [
            loop.create_task(self._work(wake), name="server"),
            loop.create_task(_wait(stopped), name="stop"),
        ]
        try:
            futures: list[asyncio.Future[None]] = [*work, lost]
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            for done in (lost, work[0]):
                if done.done():
                    done.result()
            await self._drain(work[0])
        finally:
            loop.remove_signal_handler(signal.SIGUSR1)
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            await self._promotions.close()
            processes.close()
            for part in (self._feedback, self._request_log):
                if part is not None:
                    await part.close()
        raise_stop(self.session.stop)

    async def _work(self, wake: asyncio.Event) -> None:
        """Open, say that it is ready, then do what comes. Ends only by an error."""
        await self._promotions.open()
        if self._feedback is not None:
            await self._feedback.open(self._promotions.pool)
        url = await self._open_front()
        await self._promotions.note_url(url)
        self._report_ready(url)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._obey(wake))
            group.create_task(self._report_figures())
            if self._feedback is not None:
                group.create_task(self._feedback.watch())
            if self._request_log is not None:
                group.create_task(self._request_log.write_now_and_then())

    async def _drain(self, work: "asyncio.Task[None]") -> None:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        logger.info("%s; answering what is there", self.session.stop.reason)
        await self._front.drain(DRAIN_SHARE * self.session.grace_s)

    # Its start.

    def _read_live(self) -> LiveModel:
        """What the run served last, unless its job names another version now."""
        make_folder(self.folder)
        remove_leftovers(self.folder)
        live = read_live(self.folder)
        reached = self.session.reporter.reached_step
        if live is None or live.origin != self.version.facts:
            live = LiveModel(
                number=0 if live is None else live.number,
                version=self.version,
                origin=self.version.facts,
                started_ms=time.time_ns() // 1_000_000 if live is None else live.started_ms,
                url="" if live is None else live.url,
            )
        self._clock = Clock(live.started_ms, reached)
        self.session.lifecycle.on_look.append(self._note_progress)
        return live

    def _note_progress(self) -> None:
        self.session.progress.step = self._clock.step

    def _watch_stop(self, loop: asyncio.AbstractEventLoop) -> asyncio.Event:
        stopped = asyncio.Event()

        def look() -> None:
            if self.session.stop.reason is not None and not loop.is_closed():
                loop.call_soon_threadsafe(stopped.set)

        self.session.lifecycle.on_look.append(look)
        return stopped

    def _make_front(self) -> Front:
        spec = self._spec
        _, max_open_files = raise_open_files(
            MAX_OPEN_FILES
        )  # not of model processes: they are forked already
        options = FrontOptions(
            max_connections=min(MAX_CONNECTIONS, max_open_files // 2),
            max_body_bytes=spec.max_body_bytes,
            deadline_ms=spec.deadline_ms,
            bearer=None if self._is_local else self._read_bearer(),
        )
        return Front(options, name=self.job.name or self.job.run_id, log=logger)

    def _make_hooks(self, live: LiveModel) -> None:
        """What happens to answered requests, before the answer leaves."""
        spec = self._spec
        hooks: list[Callable[[AnsweredRequest], None]] = []
        if spec.feedback is not None:
            self._feedback = FeedbackLoop(
                self.folder,
                spec.feedback,
                live.version,
                tell=self._tell_due,
                has_daemon=self.session.environment.attempt is not None,
            )
            self._front.on_feedback = self._feedback.take
            hooks.append(self._feedback.keep)
        if spec.request_log:
            self._request_log = RequestLog(self.folder, spec.request_log)
            hooks.append(self._request_log.note)
        if len(hooks) == 1:
            self._front.on_answered = hooks[0]
        elif hooks:

            def call_all(request: AnsweredRequest) -> None:
                for hook in hooks:
                    hook(request)

            self._front.on_answered = call_all

    def _note_switch(self, version: ModelVersion) -> None:
        if self._feedback is not None:
            self._feedback.note_live(version)

    @property
    def _is_local(self) -> bool:
        return self._spec.address.startswith("unix:")

    def _read_bearer(self) -> str:
        """The secret of this run: the same in all its attempts."""
        path = self.folder / BEARER
        try:
            found = read_regular(path, MAX_BEARER_BYTES).decode(errors="replace").strip()
        except FileNotFoundError:
            found = ""
        except OSError as fault:
            raise StartupError(f"the secret of the server cannot be read: {fault}") from fault
        if not WHOLE_BEARER.fullmatch(found):
            if found:
                logger.warning("%s is not what was written: it is replaced by another secret", path)
            found = secrets.token_urlsafe(BEARER_BYTES)
            replace_file(
                path, found.encode() + b"\n", mode=0o600, sync="file"
            )  # the folder: with `live.json`
        return found

    def _make_pool(self, version: ModelVersion, processes: ModelProcesses) -> ReplicaPool:
        spec = self._spec
        limits = QueueLimits(max_delay_ms=spec.max_delay_ms, max_queue_rows=spec.max_queue_rows)
        return ReplicaPool(
            version,
            processes,
            model_options(self.job),
            spec.replicas,
            limits=limits,
            log=logger,
        )

    async def _open_front(self) -> str:
        """At the address of the job. Where that leaves the port open: at that of the attempt before, if it is free."""
        address = self._spec.address
        before = self._promotions.live.url
        if address.endswith(":0") and before.startswith("http://"):
            try:
                return await self._front.open(before.removeprefix("http://"))
            except (OSError, StartupError) as fault:
                logger.info("%s cannot be used again: %s", before, fault)
        return await self._front.open(address)

    def _report_ready(self, url: str) -> None:
        live = self._promotions.live
        bearer_file = "" if self._is_local else str(self.folder / BEARER)
        ready = ReadyEvent(url=url, version=live.version.facts, number=live.number, bearer_file=bearer_file)
        self.session.reporter.event("ready", msgspec.to_builtins(ready))
        news.info("%s answers at %s", live.version.label, url)
        if not self._promotions.pool.inputs:
            self.session.reporter.log(
                "the training data has no columns, so requests are not checked, and numbers in JSON become int64 or float64:"
                " annotate `predict` with the fields of a row (docs/authoring.md#predict), or send Arrow",
                level="warning",
            )

    # What comes.

    async def _obey(self, wake: asyncio.Event) -> None:
        while True:
            wake.clear()
            await self._promotions.look()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(wake.wait(), LOOK_EVERY_S)

    async def _tell_outcome(self, outcome: PromotedEvent | PromotionRefusedEvent) -> None:
        fields: dict[str, Any] = msgspec.to_builtins(outcome)
        await self._tell(fields.pop("event"), fields)

    async def _tell_due(self, due: FeedbackDueEvent) -> None:
        await self._tell("feedback_due", msgspec.to_builtins(due))

    async def _tell(self, event: str, fields: dict[str, Any]) -> None:
        """Returns once the event is durable."""
        loop = asyncio.get_running_loop()
        told = asyncio.Event()

        def then() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(told.set)

        self.session.reporter.event(event, fields, then=then)
        await told.wait()

    async def _report_figures(self) -> None:
        """Also while nothing comes, but less often."""
        quiet_s = 0.0
        while True:
            await asyncio.sleep(STATS_EVERY_S)
            values = {**self._front.stats(), **self._own_figures()}
            is_idle = not values.get("serve/requests_per_s")
            quiet_s = quiet_s + STATS_EVERY_S if is_idle else 0.0
            if not is_idle or quiet_s <= STATS_EVERY_S or quiet_s % IDLE_STATS_EVERY_S < STATS_EVERY_S:
                self._say_figures(values)

    def _own_figures(self) -> dict[str, float]:
        feedback, log = self._feedback, self._request_log
        values: dict[str, float] = {}
        if feedback is not None:
            values |= {
                "serve/feedback_rows": feedback.num_accepted,
                "serve/unkept_requests": feedback.num_lost,
                **feedback.take_error(),
            }
        if log is not None:
            values["serve/unlogged_requests"] = log.num_dropped
        return values

    def _say_figures(self, values: Mapping[str, float]) -> None:
        reporter, step = self.session.reporter, self._clock.step
        stats = RequestStatsEvent(step=step, values=dict(values))
        reporter.event("request_stats", msgspec.to_builtins(stats), is_synced=False)
        reporter.metrics(step, values)


def _fail(future: "asyncio.Future[None]") -> Callable[[ModelLoadError], None]:
    def fail(fault: ModelLoadError) -> None:
        if not future.done():
            future.set_exception(fault)

    return fail


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
