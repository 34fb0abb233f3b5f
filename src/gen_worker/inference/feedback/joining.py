"""An answered request and its feedback -> a row of the training data. Imports pyarrow."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa

from gen_worker.contract.checkpoints.choice import CheckpointInfo
from gen_worker.inference.feedback.requests import AnsweredRecord
from gen_worker.inference.messages import ColumnData, Part
from gen_worker.inference.model.columns import RowsError, read_parts

_encode = msgspec.msgpack.Encoder().encode


class FeedbackFault(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong with a row of feedback. The words are for the client."""

    row: int
    column: str | None = None
    found: str = ""
    expected: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedbackRow:
    position: int  # in its request to us
    request_id: str
    row: int  # of the request that was answered
    values: Mapping[str, Any]


class Answered:
    """A request that was answered, as it was kept. Decoded once for all its rows."""

    def __init__(self, record: AnsweredRecord, payload: memoryview) -> None:
        self.record = record
        self._rows_payload = payload[: record.rows.payload_bytes]
        self._answers_payload = payload[record.rows.payload_bytes :]
        self._rows: dict[tuple[str, ...], pa.RecordBatch] = {}
        if record.rows.encoding == "ipc":
            self.names = tuple(pa.ipc.open_stream(pa.py_buffer(self._rows_payload)).schema.names)
        else:
            self.names = tuple(column.name for column in record.rows.columns)

    def rows(self, schema: pa.Schema | None) -> pa.RecordBatch:
        """What was asked, in these types; of one training schema in all calls."""
        key = ("",) if schema is None else tuple(schema.names)
        if key not in self._rows:
            part = self.record.rows
            self._rows[key] = read_parts([part], self._rows_payload, schema=schema, shape=part.num_rows)
        return self._rows[key]

    def answers(self) -> pa.RecordBatch:
        """What was answered."""
        return read_parts(
            self.record.answers, self._answers_payload, schema=None, shape=self.record.rows.num_rows
        )


def training_schema(info: CheckpointInfo) -> pa.Schema | None:
    """Of the data that the checkpoint was trained on; None where it does not know it."""
    identity: dict[str, Any] = msgspec.json.decode(info.meta.identity)
    message = (identity.get("dataset_manifest") or {}).get("arrow_schema")
    return None if message is None else pa.ipc.read_schema(pa.py_buffer(base64.b64decode(message)))


def infer_schema(answered: Answered, values: Mapping[str, Any]) -> pa.Schema:
    """Where nothing is known of the training data: as the first row shows it."""
    features = answered.rows(None).schema
    labels = [
        pa.field(name, pa.array([value]).type) for name, value in values.items() if name not in features.names
    ]
    return pa.schema([*features, *labels])


def find_faults(
    row: FeedbackRow, answered: Answered, schema: pa.Schema, columns: Sequence[str]
) -> list[FeedbackFault]:
    """Of the names and the place of a row. `columns`: those that feedback may have; empty: all that requests lack."""
    num_rows = answered.record.rows.num_rows
    if row.row >= num_rows:
        return [
            FeedbackFault(
                row=row.position, column="row", found=str(row.row), expected=f"less than {num_rows}, its rows"
            )
        ]
    allowed = columns or [name for name in schema.names if name not in answered.names]
    faults = [
        FeedbackFault(
            row=row.position, column=name, found="a column", expected=f"one of {', '.join(allowed)}"
        )
        for name in row.values
        if name not in allowed
    ]
    faults += [
        FeedbackFault(row=row.position, column=name, found="nothing", expected=str(schema.field(name).type))
        for name in allowed
        if name not in row.values
    ]
    return faults


def join(row: FeedbackRow, answered: Answered, schema: pa.Schema) -> pa.RecordBatch:
    """One row of training data. RowsError where a value does not have its type. What neither has is null."""
    names = [name for name in answered.names if name in schema.names and name not in row.values]
    features = answered.rows(pa.schema([schema.field(name) for name in names])).slice(row.row, 1)
    labels = _read_values(row.values, schema)
    arrays = [
        labels.column(field.name)
        if field.name in row.values
        else features.column(field.name)
        if field.name in names
        else pa.nulls(1, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _read_values(values: Mapping[str, Any], schema: pa.Schema) -> pa.RecordBatch:
    encoded = {name: _encode([value]) for name, value in values.items()}
    part = Part(
        num_rows=1,
        columns=tuple(
            ColumnData(name=name, encoding="values", size_bytes=len(content))
            for name, content in encoded.items()
        ),
    )
    for name, value in values.items():
        if value is None:
            expected = str(schema.field(name).type)
            words = f"column {name!r}: found null, expected {expected}"
            raise RowsError(words, column=name, found="null", expected=expected)
    types = pa.schema([schema.field(name) for name in values])
    return read_parts([part], memoryview(b"".join(encoded.values())), schema=types, shape=1)
