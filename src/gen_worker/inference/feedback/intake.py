"""From feedback of a client to rows that are durable: joined to what was asked, each once. One thread uses it.

pyarrow is imported when the first feedback comes.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from gen_worker.contract.job.model_version import ModelVersion
from gen_worker.contract.job.spec import FeedbackSpec
from gen_worker.errors import CheckpointError
from gen_worker.inference.feedback.requests import Place, RequestJournal
from gen_worker.inference.feedback.rules import mean_error
from gen_worker.inference.front.refusals import Refusal, RowFault
from gen_worker.inference.versions import read_checkpoint

if TYPE_CHECKING:
    import pyarrow as pa

    from gen_worker.inference.feedback.joining import Answered, FeedbackRow
    from gen_worker.inference.feedback.metric import FeedbackMetric
    from gen_worker.inference.feedback.store import FeedbackStore

logger = logging.getLogger("gen_worker.inference")

MAX_FAULTS = 100


class AskedRow(NamedTuple):
    """A row of feedback as the client sent it."""

    position: int
    request_id: str
    row: int
    values: Mapping[str, Any]


class FeedbackIntake:
    """`live` is the version that answers; the server keeps it current."""

    def __init__(
        self, folder: Path, spec: FeedbackSpec, requests: RequestJournal, live: ModelVersion
    ) -> None:
        self.live = live
        self.num_accepted = 0
        self._new_errors: SimpleQueue[list[float]] = SimpleQueue()  # since `take_error`
        self._folder = folder
        self._spec = spec
        self._requests = requests
        self._opened_store: FeedbackStore | None = None
        self._schema_of: tuple[ModelVersion, pa.Schema | None] | None = None

    @property
    def has_rows(self) -> bool:
        """Whether any row ever came. Opens nothing."""
        return self._opened_store is not None or any(self._folder.iterdir())

    @property
    def store(self) -> "FeedbackStore":
        if self._opened_store is None:
            from gen_worker.inference.feedback.store import FeedbackStore

            self._opened_store = FeedbackStore(self._folder)
        return self._opened_store

    def take_error(self) -> float | None:
        """The job's metric over the rows that came since the last call; None where there are none. For any thread."""
        errors: list[float] = []
        while not self._new_errors.empty():
            errors += self._new_errors.get()
        return mean_error(self._spec.metric or "", errors) if errors else None

    def find_metric(self, answers: list[str], labels: list[str]) -> "FeedbackMetric":
        """MetricError where it is not clear what is compared."""
        from gen_worker.inference.feedback.metric import FeedbackMetric

        return FeedbackMetric.find(self._spec.metric or "", answers, labels)

    def find_labels(self, inputs: list[str]) -> list[str] | None:
        """The columns that feedback has; None where the training data is not known."""
        schema = self._training_schema()
        if schema is None:
            return None
        return self._spec.columns or [name for name in schema.names if name not in inputs]

    def _training_schema(self) -> "pa.Schema | None":
        """Of the version that answers; else of the rows so far."""
        from gen_worker.inference.feedback.joining import training_schema

        live = self.live
        if self._schema_of is None or self._schema_of[0] is not live:
            try:
                self._schema_of = live, training_schema(read_checkpoint(live))
            except CheckpointError as fault:  # removed since
                logger.warning("the schema of the training data is not known: %s", fault)
                self._schema_of = live, None
        return self._schema_of[1] or self.store.schema

    def take(self, asked: list[AskedRow], places: Mapping[str, Place | None]) -> dict[str, Any]:
        """What became of each row. Refusal, and nothing is accepted, where one has a fault."""
        from gen_worker.inference.feedback.joining import Answered, FeedbackRow
        from gen_worker.inference.feedback.store import row_key

        store = self.store
        found: dict[str, Answered] = {}
        for request_id, place in places.items():
            kept = None if place is None else self._requests.read(place)
            if kept is not None and kept[0].request_id == request_id and kept[0].answered_ms > store.lost_ms:
                found[request_id] = Answered(*kept)
        outcomes = ["unknown"] * len(asked)
        new: list[tuple[bytes, FeedbackRow]] = []
        taken: set[bytes] = set()
        for position, request_id, row, values in asked:
            key = row_key(request_id, row)
            if key in taken or store.is_known(key):
                outcomes[position] = "repeated"
            elif request_id in found:
                outcomes[position] = "accepted"
                taken.add(key)
                new.append(
                    (key, FeedbackRow(position=position, request_id=request_id, row=row, values=values))
                )
        if new:
            self._accept(new, found, places)
            self.num_accepted += len(new)
        counts = {name: outcomes.count(name) for name in ("accepted", "repeated", "unknown")}
        return {**counts, "rows": outcomes}

    def _accept(
        self,
        new: "list[tuple[bytes, FeedbackRow]]",
        found: "Mapping[str, Answered]",
        places: Mapping[str, Place | None],
    ) -> None:
        """Join them and make them durable. Refusal with every fault, and nothing is written."""
        import pyarrow as pa

        from gen_worker.inference.feedback.joining import find_faults, infer_schema, join
        from gen_worker.inference.feedback.store import AcceptedHead, now_ms
        from gen_worker.inference.model.columns import RowsError

        first = new[0][1]
        schema = self._training_schema() or infer_schema(found[first.request_id], first.values)
        faults: list[RowFault] = []
        batches: list[pa.RecordBatch] = []
        for _, row in new:
            answered = found[row.request_id]
            of_names = find_faults(row, answered, schema, self._spec.columns)
            faults += (RowFault(**msgspec.structs.asdict(fault)) for fault in of_names)
            if of_names or len(faults) > MAX_FAULTS:
                continue
            try:
                batches.append(join(row, answered, schema))
            except RowsError as fault:
                faults.append(
                    RowFault(
                        row=row.position,
                        column=fault.column or None,
                        found=fault.found or str(fault),
                        expected=fault.expected,
                    )
                )
        if faults:
            raise Refusal(
                "input", "feedback has faults; none of its rows was accepted", faults=faults[:MAX_FAULTS]
            )
        joined = pa.Table.from_batches(batches).combine_chunks().to_batches()[0]
        head = AcceptedHead(
            keys=b"".join(key for key, _ in new),
            received_ms=now_ms(),
            newest_request=max(place.file for place in places.values() if place is not None),
            errors=(errors := self._row_errors([row for _, row in new], found, joined)),
            weights_hashes=[found[row.request_id].record.weights_hash for _, row in new] if errors else [],
        )
        try:
            self.store.accept(joined, head)
        except OSError as fault:
            raise Refusal(
                "unavailable", f"feedback cannot be stored: {fault.strerror}", retry_after_s=1
            ) from fault
        self._new_errors.put(errors)

    def _row_errors(
        self, rows: "list[FeedbackRow]", found: "Mapping[str, Answered]", joined: "pa.RecordBatch"
    ) -> list[float]:
        """Of each row's answer; empty where no metric is given, or it cannot be computed."""
        if self._spec.metric is None:
            return []
        import pyarrow as pa

        try:
            answers = (
                pa.Table.from_batches([found[row.request_id].answers().slice(row.row, 1) for row in rows])
                .combine_chunks()
                .to_batches()[0]
            )
            metric = self.find_metric(answers.schema.names, list(rows[0].values))
            return [float(error) for error in metric.row_errors(answers, joined)]
        except (ValueError, pa.ArrowException) as fault:
            logger.warning("the error of answers cannot be computed: %s", fault)
            return []

    def measure(self, answers: "pa.RecordBatch", table: "pa.Table", inputs: list[str]) -> float:
        """The metric over rows of feedback and the answers to them. MetricError."""
        labels = table.combine_chunks().to_batches()[0]
        names = self._spec.columns or [name for name in labels.schema.names if name not in inputs]
        metric = self.find_metric(answers.schema.names, names)
        return metric.over(list(metric.row_errors(answers, labels)))

    def close(self) -> None:
        """What was accepted becomes parquet. OSError where it cannot: then the next attempt does it."""
        if self._opened_store is not None:
            self._opened_store.seal()
            self._opened_store.close()


def read_rows(rows: list[dict[str, Any]]) -> list[AskedRow]:
    """Refusal with every fault."""
    found: list[AskedRow] = []
    faults: list[RowFault] = []
    for position, given in enumerate(rows):
        if len(faults) >= MAX_FAULTS:
            break
        values = dict(given)
        request_id, row = values.pop("request_id", None), values.pop("row", 0)
        if not isinstance(request_id, str) or not request_id:
            faults.append(
                RowFault(
                    row=position,
                    column="request_id",
                    found="nothing" if request_id is None else repr(request_id)[:60],
                    expected="the X-Request-Id of an answer",
                )
            )
        elif not isinstance(row, int) or isinstance(row, bool) or row < 0:
            faults.append(
                RowFault(
                    row=position, column="row", found=repr(row)[:60], expected="a row of that request, from 0"
                )
            )
        else:
            found.append(AskedRow(position, request_id, row, values))
    if faults:
        raise Refusal(
            "input", "feedback has faults; none of its rows was accepted", faults=faults[:MAX_FAULTS]
        )
    return found
