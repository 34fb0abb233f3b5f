"""The loop from answers to the next training run, for one server.

Answers are kept as they leave, in the loop's thread. All else is done by one thread: it joins feedback to what was asked,
makes it durable, and looks at the rules. pyarrow is imported there, when the first feedback comes.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from gen_worker.contract.failpoints import failpoint
from gen_worker.contract.job.model_version import ModelVersion
from gen_worker.contract.job.spec import FeedbackSpec
from gen_worker.contract.serving import FeedbackDueEvent, read_settled
from gen_worker.errors import ModelLoadError, StartupError
from gen_worker.inference.feedback.intake import FeedbackIntake, read_rows
from gen_worker.inference.feedback.requests import AnsweredRecord, RequestJournal
from gen_worker.inference.feedback.rules import (
    MAX_ERRORS,
    MIN_ERRORS,
    FeedbackDue,
    find_reason,
    mean_error,
    newest_errors,
    read_due,
    write_due,
)
from gen_worker.inference.frames import Buffer
from gen_worker.inference.front.front import AnsweredRequest
from gen_worker.inference.front.pool import ReplicaPool
from gen_worker.inference.front.refusals import Refusal
from gen_worker.inference.gate import RefusedError, require_errors
from gen_worker.inference.messages import Part

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger("gen_worker.inference")

LOOK_EVERY_S = 1.0
SEAL_AFTER_S = 300.0  # where there is no rule
REQUESTS, ROWS = "requests", "feedback"

R = TypeVar("R")


class FeedbackLoop:
    """`keep` and `take` are the front's hooks.

    Under a daemon, the next run is due only when what became of the one before it is settled: else every few rows would ask
    for a run while the first one still trains.
    """

    def __init__(
        self,
        folder: Path,
        spec: FeedbackSpec,
        live: ModelVersion,
        *,
        tell: Callable[[FeedbackDueEvent], Awaitable[None]],
        has_daemon: bool,
    ) -> None:
        self._live = live
        self._folder = folder
        self._spec = spec
        self._tell = tell
        self._has_daemon = has_daemon
        self._settled = 0  # the last due run whose outcome is known
        self._is_settled_unreadable = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="feedback")
        self._wake = asyncio.Event()
        self._opened_requests: RequestJournal | None = None
        self._opened_intake: FeedbackIntake | None = None
        self._due: FeedbackDue | None = None  # None: it cannot be read, so no run is asked for
        self._is_broken = False  # the last request could not be kept
        self._faults: dict[str, str] = {}  # what does not work -> why; each is logged once
        self.num_lost = 0  # requests that could not be kept

    @property
    def num_accepted(self) -> int:
        return 0 if self._opened_intake is None else self._opened_intake.num_accepted

    def take_error(self) -> dict[str, float]:
        """The figure of the rows that came since the last call, by its name."""
        error = None if self._opened_intake is None else self._opened_intake.take_error()
        return (
            {} if error is None else {f"serve/feedback_{(self._spec.metric or '').partition(':')[0]}": error}
        )

    def note_live(self, version: ModelVersion) -> None:
        """It answers from now on."""
        self._live = version
        if self._opened_intake is not None:
            self._opened_intake.live = version

    async def open(self, pool: ReplicaPool) -> None:
        """Read what there is. ModelLoadError where the job's metric cannot be computed from what the model answers.

        Whatever is wrong with the files: requests are answered, without feedback until that is mended.
        """
        if await self._try("feedback is not taken", self._open):
            await self._in_thread(self._check_metric, pool)

    # The front's hooks.

    def keep(self, request: AnsweredRequest) -> None:
        """Before the answer leaves. A full disk does not stop the answers: feedback to them is then unknown."""
        if self._opened_requests is None:
            self.num_lost += 1
            return
        part, payload = request.rows.encode()
        answers: list[Part] = []
        pieces: list[Buffer] = [*payload]
        for block, start, stop in request.answer.pieces:
            answer, content = block.slice(start, stop)
            answers.append(answer)
            pieces.append(content)
        record = AnsweredRecord(
            request_id=request.request_id,
            answered_ms=time.time_ns() // 1_000_000,
            weights_hash=request.facts.weights_hash,
            rows=part,
            answers=tuple(answers),
        )
        try:
            self._requests.append(record, pieces)
        except OSError as fault:
            self.num_lost += 1
            if not self._is_broken:
                logger.warning("answered requests cannot be kept for feedback: %s", fault)
            self._is_broken = True
        else:
            self._is_broken = False

    async def take(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Durable when it returns. Refusal, and nothing is accepted, where a row has a fault."""
        asked = read_rows(rows)
        if self._opened_intake is None:
            raise Refusal("unavailable", "feedback cannot be stored now", retry_after_s=1)
        places = {each.request_id: self._requests.locate(each.request_id) for each in asked}
        answer = await self._in_thread(self._intake.take, asked, places)
        self._wake.set()
        return answer

    # What the server does beside.

    async def watch(self) -> None:
        """Until it is cancelled: rules, and files that are due."""
        while True:
            self._wake.clear()
            if self._opened_intake is None:
                await self._try("feedback is not taken", self._open)
            if self._due is None:
                await self._try("no further run is asked for", self._read_due)
            if self._opened_intake is not None:
                await self._tell_due()
                await self._try("feedback cannot be written as parquet", self._find_due)
                await self._tell_due()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), LOOK_EVERY_S)

    async def compare(self, new: ReplicaPool, live: ReplicaPool, figures: dict[str, Any]) -> None:
        """RefusedError where the new version is worse on the newest rows than the live one."""
        if self._spec.metric is None:
            return
        tables: list[pa.Table | None] = []
        if self._opened_intake is not None:
            await self._try(
                "versions are not compared on feedback",
                lambda: tables.append(self._intake.store.newest_rows(MAX_ERRORS)),
            )
        table = tables[0] if tables else None
        if table is None or table.num_rows < MIN_ERRORS:
            return
        values: dict[str, float] = {}
        for name, pool in (("new", new), ("live", live)):
            try:
                answers = await self._predict(pool, table)
                inputs = [column.name for column in pool.inputs]
                values[name] = await self._in_thread(self._intake.measure, answers, table, inputs)
            except Refusal as why:
                if name == "new":
                    raise RefusedError(
                        "feedback", f"it does not answer the newest feedback: {why.message}"
                    ) from None
                logger.warning("the served version does not answer the newest feedback: %s", why.message)
                return
            except ValueError as fault:  # of the metric
                raise RefusedError("feedback", str(fault)) from None
        require_errors(self._spec.metric, values["new"], values["live"], table.num_rows, figures)

    async def close(self) -> None:
        """What was accepted becomes parquet. What was answered is on disk already."""
        try:
            await self._in_thread(self._close)
        except OSError as fault:
            logger.warning("feedback cannot be written as parquet: %s; the next attempt does it", fault)
        except Exception:
            logger.exception("feedback cannot be written as parquet; the next attempt does it")
        self._thread.shutdown()

    # In the thread.

    async def _in_thread(self, work: Callable[..., R], *arguments: Any) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def _try(self, words: str, work: Callable[[], Any]) -> bool:
        """Do it in the thread. False where it fails, whatever the fault: requests are answered all the same."""
        try:
            await self._in_thread(work)
        except Exception as fault:
            text = f"{type(fault).__name__}: {fault}"
            if self._faults.get(words) != text:
                is_known = isinstance(fault, OSError | StartupError)
                logger.warning("%s: %s", words, fault, exc_info=None if is_known else fault)
            self._faults[words] = text
            return False
        self._faults.pop(words, None)
        return True

    @property
    def _requests(self) -> RequestJournal:
        assert self._opened_requests is not None, "it is opened before the front is"
        return self._opened_requests

    @property
    def _intake(self) -> FeedbackIntake:
        assert self._opened_intake is not None, "it is opened before the front is"
        return self._opened_intake

    def _open(self) -> None:
        if self._opened_requests is None:
            self._opened_requests = RequestJournal(
                self._folder / REQUESTS, max_bytes=self._spec.keep_mb << 20, executor=self._thread
            )
        folder = self._folder / ROWS
        folder.mkdir(exist_ok=True)
        self._opened_intake = FeedbackIntake(folder, self._spec, self._requests, self._live)

    def _read_due(self) -> None:
        self._due = read_due(self._folder / ROWS)

    def _check_metric(self, pool: ReplicaPool) -> None:
        labels = self._intake.find_labels([column.name for column in pool.inputs])
        if self._spec.metric is not None and labels is not None:
            try:
                self._intake.find_metric([column.name for column in pool.outputs], labels)
            except ValueError as fault:
                raise ModelLoadError(f"serving.feedback.metric: {fault}") from fault

    def _find_due(self) -> None:
        """Whether a run is due: then it is written down. Also ends files that are full or old enough."""
        if not self._intake.has_rows:
            return
        store, spec, due = self._intake.store, self._spec, self._due
        if due is None:
            if store.is_full:
                store.seal()
            return
        from gen_worker.inference.feedback.store import now_ms

        since = [store.parts[number] for number in store.parts if number > due.last_part]
        rows = sum(part.num_rows for part in since) + store.num_open_rows
        oldest_ms = min([part.oldest_ms for part in since] + [store.open_since_ms or now_ms()])
        age_s = (now_ms() - oldest_ms) / 1000
        errors = newest_errors(store.errors, self._live.weights_hash)
        metric = None
        if spec.metric is not None and len(errors) >= MIN_ERRORS:
            metric = mean_error(spec.metric, errors)
        has_rule = spec.rows is not None or spec.max_age_s is not None or spec.above is not None
        reason = find_reason(spec, rows=rows, age_s=age_s, metric=metric)
        if reason is None or not self._is_settled(due):
            if store.is_full or (not has_rule and store.num_open_rows and age_s >= SEAL_AFTER_S):
                store.seal()
            store.forget_keys(self._requests.oldest, due.last_part if has_rule else store.number)
            return
        store.seal()
        found = FeedbackDue(
            number=due.number + 1,
            first_part=due.last_part + 1,
            last_part=store.number - 1,
            rows=rows,
            reason=reason[0],
            figures=reason[1],
            version=self._live.facts,
            is_told=False,
        )
        write_due(self._folder / ROWS, found)
        self._due = found
        failpoint("feedback.due_written")

    def _is_settled(self, due: FeedbackDue) -> bool:
        """Whether it is known what became of that run."""
        if self._has_daemon and self._settled < due.number:
            try:
                self._settled = read_settled(self._folder)
            except StartupError as fault:
                if not self._is_settled_unreadable:
                    logger.warning("no further run is asked for: %s", fault)
                self._is_settled_unreadable = True
            else:
                self._is_settled_unreadable = False
        return not self._has_daemon or self._settled >= due.number

    async def _tell_due(self) -> None:
        due = self._due
        if due is None or due.is_told:
            return
        assert due.version is not None
        folder = self._folder / ROWS
        numbers = range(due.first_part, due.last_part + 1)
        paths = [folder / f"{number:08d}.parquet" for number in numbers]
        event = FeedbackDueEvent(
            number=due.number,
            rows=due.rows,
            files=[str(path) for path in paths if path.exists()],
            folder=str(folder),
            reason=due.reason,
            version=due.version,
            figures=due.figures,
        )
        await self._tell(event)
        failpoint("feedback.due_told")
        self._due = told = msgspec.structs.replace(due, is_told=True)
        await self._try("a feedback_due event may be written again", lambda: write_due(folder, told))

    async def _predict(self, pool: ReplicaPool, table: "pa.Table") -> "pa.RecordBatch":
        """The answers of that pool, in batches of the largest shape, beside its other work."""
        import pyarrow as pa

        from gen_worker.inference.model.columns import read_parts

        features = table.select([column.name for column in pool.inputs] or table.schema.names)
        size = pool.options.max_batch_rows
        found: list[pa.RecordBatch] = []
        for start in range(0, features.num_rows, size):
            rows = features.slice(start, size)
            content = await self._in_thread(_to_stream, rows)
            part = Part(num_rows=rows.num_rows, encoding="ipc", size_bytes=len(content), answer="ipc")
            answer = await pool.predict(part, [content])
            for block, first, last in answer.pieces:
                piece, payload = block.slice(first, last)
                found.append(read_parts([piece], memoryview(payload), schema=None, shape=piece.num_rows))
        return pa.Table.from_batches(found).combine_chunks().to_batches()[0]

    def _close(self) -> None:
        if self._opened_intake is not None:
            self._opened_intake.close()
        if self._opened_requests is not None:
            self._opened_requests.close()


def _to_stream(table: "pa.Table") -> bytes:
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table.combine_chunks())
    return bytes(sink.getvalue())
