"""Which columns `predict` reads, and of which types.

The first that applies: the annotations of `predict`; the columns of the training data as the checkpoint's identity has
them, without labels; none, then a request may have any columns.

Labels are what the class names in `label_columns`, or what it leaves out of `input_columns`. Where it has neither, a
column is a label if `predict` gives the same answer without it.
"""

import base64
import logging
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.errors import PluginError
from gen_worker.inference.messages import ColumnType
from gen_worker.inference.model.columns import Answer, column_types, pad_batch
from gen_worker.inference.model.number_types import is_list
from gen_worker.inference.model.predictor import Predictor
from gen_worker.trainer.author.identity import OWN_SCHEMA
from gen_worker.trainer.contracts import TrainerPlugin
from gen_worker.trainer.feed.gather import take_rows

logger = logging.getLogger("gen_worker.inference")

NUM_PROBE_ROWS = 64
_PLAIN_TYPES: dict[Any, pa.DataType] = {
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    bytes: pa.binary(),
}


@dataclass(slots=True, kw_only=True)
class RecordedData:
    """The training data as the checkpoint knows it: `ctx.dataset` of a model that is served."""

    schema: pa.Schema | None = None
    files: tuple[Path, ...] = ()  # they may be gone
    num_rows: int | None = None
    batches_per_epoch: int | None = None

    @classmethod
    def of(cls, identity: Mapping[str, Any], job: TrainingJobSpec, base_dir: Path) -> "RecordedData":
        manifest = identity.get("dataset_manifest") or {}
        message = manifest.get("arrow_schema") or identity.get(OWN_SCHEMA)
        if message is None:
            return cls()
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(message)))
        files = tuple(base_dir / file["path"] for file in manifest.get("files", ()))
        num_rows = sum(sum(file["group_rows"]) for file in manifest.get("files", ())) or None
        dataset = job.dataset
        size = None if dataset is None else dataset.batch_size
        batches = None
        if dataset is not None and size and num_rows:
            batches = num_rows // size if dataset.drop_last else -(-num_rows // size)
        return cls(schema=schema, files=files, num_rows=num_rows, batches_per_epoch=batches)

    def first_rows(self) -> pa.RecordBatch | None:
        """None where no file can be read, or has other columns now."""
        for path in self.files:
            try:
                # No threads: this process may have to be forked.
                with path.open("rb") as opened, pq.ParquetFile(opened, pre_buffer=False) as file:
                    assert self.schema is not None
                    for batch in file.iter_batches(
                        NUM_PROBE_ROWS, columns=self.schema.names, use_threads=False
                    ):
                        if batch.num_rows:
                            found: pa.RecordBatch = batch.select(self.schema.names).cast(self.schema)
                            return found
            except (OSError, pa.ArrowException, ValueError, KeyError) as fault:
                logger.info("no probe rows from %s: %s", path, fault)
        return None

    def columns_with_nulls(self) -> set[str]:
        """As the statistics of the first file say."""
        found: set[str] = set()
        for path in self.files[:1]:
            try:
                footer = pq.read_metadata(path)
            except (OSError, pa.ArrowException):
                continue
            for group in range(footer.num_row_groups):
                for index in range(footer.num_columns):
                    column = footer.row_group(group).column(index)
                    if column.statistics is not None and column.statistics.null_count:
                        found.add(column.path_in_schema.partition(".")[0])
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class InputColumns:
    schema: pa.Schema | None  # None: any columns
    types: tuple[ColumnType, ...] = ()
    rows: pa.RecordBatch | None = None  # to probe with
    are_made_up: bool = False


def find_inputs(
    trainer: TrainerPlugin, predictor: Predictor, data: RecordedData, max_batch_rows: int
) -> InputColumns:
    """PluginError where the class names columns that the data does not have."""
    if predictor.row_type is not None:
        schema, nullable = schema_of_records(predictor.row_type)
        return InputColumns(
            schema=schema,
            types=column_types(schema, nullable=nullable),
            rows=make_rows(schema, max_batch_rows),
            are_made_up=True,
        )
    if data.schema is None:
        return InputColumns(schema=None)
    found = data.first_rows()
    rows = make_rows(data.schema, max_batch_rows) if found is None else found
    names = _named_inputs(trainer, data.schema)
    if names is None:
        names = _find_required(predictor, rows)
    schema = pa.schema([data.schema.field(name) for name in names])
    return InputColumns(
        schema=schema,
        types=column_types(schema, nullable=sorted(data.columns_with_nulls())),
        rows=_enough(rows.select(names), max_batch_rows),
        are_made_up=found is None,
    )


def _named_inputs(trainer: TrainerPlugin, schema: pa.Schema) -> list[str] | None:
    """What the class says of itself."""
    for attribute in ("input_columns", "label_columns"):
        named = getattr(trainer, attribute, None)
        if named is None:
            continue
        if isinstance(named, str) or not all(isinstance(name, str) for name in named):
            raise PluginError(f"{attribute} is {named!r:.60}, expected a list of column names")
        unknown = [name for name in named if name not in schema.names]
        if unknown:
            raise PluginError(
                f"{attribute} names {unknown[0]!r}, but the training data has {', '.join(schema.names)}"
            )
        is_input = attribute == "input_columns"
        return [name for name in schema.names if (name in named) == is_input]
    return None


def _find_required(predictor: Predictor, rows: pa.RecordBatch) -> list[str]:
    """The columns that the answer depends on. All of them where `predict` does not answer, or not twice the same."""
    names = list(rows.schema.names)
    some = rows.slice(0, min(rows.num_rows, 2))

    def answer(chosen: Sequence[str]) -> Answer | None:
        try:
            return predictor.predict(pad_batch(some.select(list(chosen)), some.num_rows))
        except Exception:  # the author's: without a column it needs
            return None

    whole = answer(names)
    if whole is None or not _is_same(whole, answer(names)):
        return names
    for name in list(names):
        rest = [other for other in names if other != name]
        if rest and _is_same(whole, answer(rest)):
            names = rest
    return names


def _is_same(one: Answer, other: Answer | None) -> bool:
    if other is None or list(one.columns) != list(other.columns):
        return False
    for mine, its in zip(one.columns.values(), other.columns.values(), strict=True):
        if isinstance(mine, np.ndarray) and isinstance(its, np.ndarray):
            if mine.dtype != its.dtype or mine.shape != its.shape or mine.tobytes() != its.tobytes():
                return False
        elif isinstance(mine, np.ndarray) or isinstance(its, np.ndarray) or repr(mine) != repr(its):
            return False
    return True


def schema_of_records(row_type: type[msgspec.Struct]) -> tuple[pa.Schema, list[str]]:
    """(columns, those that may be null) of the Struct by which `predict` is annotated."""
    fields, nullable = [], []
    for item in msgspec.structs.fields(row_type):
        data_type, may_be_null = _arrow_type(item.type)
        fields.append(pa.field(item.encode_name, data_type))
        if may_be_null:
            nullable.append(item.encode_name)
    return pa.schema(fields), nullable


def _arrow_type(wanted: Any) -> tuple[pa.DataType, bool]:
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is typing.Annotated:
        return _arrow_type(arguments[0])
    if origin in (typing.Union, types.UnionType):
        others = [argument for argument in arguments if argument is not type(None)]
        if len(others) == 1:
            return _arrow_type(others[0])[0], len(others) < len(arguments)
    if origin in (list, tuple, Sequence) and arguments:
        return pa.list_(_arrow_type(arguments[0])[0]), False
    if isinstance(wanted, type) and issubclass(wanted, msgspec.Struct):
        return pa.struct(list(schema_of_records(wanted)[0])), False
    if wanted in _PLAIN_TYPES:
        return _PLAIN_TYPES[wanted], False
    raise PluginError(
        f"predict is annotated with a field of type {wanted}: expected bool, int, float, str, bytes, a list of them or a"
        " Struct"
    )


def make_rows(schema: pa.Schema, num_rows: int) -> pa.RecordBatch:
    """Zeros, empty texts, lists of one value."""
    arrays = [
        pa.repeat(pa.scalar(_zero(field.type), type=_storage(field.type)), num_rows) for field in schema
    ]
    arrays = [
        pa.ExtensionArray.from_storage(field.type, array) if array.type != field.type else array
        for field, array in zip(schema, arrays, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _storage(data_type: pa.DataType) -> pa.DataType:
    return data_type.storage_type if isinstance(data_type, pa.BaseExtensionType) else data_type


def _zero(data_type: pa.DataType) -> Any:
    data_type = _storage(data_type)
    if is_list(data_type):
        size = data_type.list_size if pa.types.is_fixed_size_list(data_type) else 1
        return [_zero(data_type.value_type)] * size
    if pa.types.is_struct(data_type):
        return {field.name: _zero(field.type) for field in data_type}
    if pa.types.is_dictionary(data_type):
        return _zero(data_type.value_type)
    if pa.types.is_string(data_type) or pa.types.is_large_string(data_type):
        return ""
    if pa.types.is_binary(data_type) or pa.types.is_large_binary(data_type):
        return b""
    if pa.types.is_boolean(data_type):
        return False
    if pa.types.is_floating(data_type):
        return 0.0
    return 0 if pa.types.is_integer(data_type) else None


def _enough(rows: pa.RecordBatch, num_rows: int) -> pa.RecordBatch:
    """So many rows, again from the first where there are fewer."""
    return take_rows(rows, np.arange(num_rows) % rows.num_rows)
