"""Requests and answers of the Open Inference Protocol, version 2 (KServe, Triton, MLServer), in JSON."""

import types
from collections.abc import Sequence
from typing import Any

import msgspec

from gen_worker.contract.job.model_version import VersionFacts
from gen_worker.inference.frames import Buffer
from gen_worker.inference.front.formats.json_rows import NOT_JSON, RowReader, refuse_body, scalar_type
from gen_worker.inference.front.refusals import Refusal, RowFault
from gen_worker.inference.front.rows import Answer, Rows, count_values, nest
from gen_worker.inference.messages import ColumnType

_DATATYPES = {
    "bool": "BOOL",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
}
_KNOWN = frozenset({*_DATATYPES.values(), "BYTES"})
# datatype -> the type of a list of its values
_VALUES: dict[str, Any] = {
    datatype: types.GenericAlias(list, (scalar_type(dtype),)) for dtype, datatype in _DATATYPES.items()
}
_VALUES["BYTES"] = list[str]
_PLAIN_TYPES = {bool: "BOOL", int: "INT64", float: "FP64", str: "BYTES"}
MAX_DIMS = 16


class Tensor(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    data: list[Any] | None = None
    parameters: dict[str, Any] = {}


class WantedOutput(msgspec.Struct):
    name: str
    parameters: dict[str, Any] = {}


class InferRequest(msgspec.Struct):
    inputs: list[Tensor]
    id: str = ""
    outputs: list[WantedOutput] = []
    parameters: dict[str, Any] = {}

    @property
    def is_binary(self) -> bool:
        """Whether tensors are sent, or wanted, as bytes after the JSON: an extension of the protocol."""
        return (
            any("binary_data_size" in tensor.parameters for tensor in self.inputs)
            or any(output.parameters.get("binary_data") for output in self.outputs)
            or bool(self.parameters.get("binary_data_output"))
        )


_decode = msgspec.json.Decoder(InferRequest).decode


def read_request(body: Buffer, reader: RowReader) -> tuple[InferRequest, Rows]:
    """Refusal where it cannot be read, or does not fit the model's columns. The first dimension is the rows."""
    try:
        request = _decode(body)
    except NOT_JSON as fault:
        raise refuse_body("an inference request", fault) from None
    if request.is_binary:
        raise refuse_binary()
    if not request.inputs:
        raise Refusal("input", "inputs is empty, expected a tensor for each column")
    known = {column.name: column for column in reader.inputs}
    columns: dict[str, list[Any]] = {}
    for tensor in request.inputs:
        if tensor.name in columns:
            raise Refusal("input", f"the input {tensor.name[:100]} is given twice")
        columns[tensor.name] = _read_tensor(tensor, known.get(tensor.name), max_rows=reader.max_rows)
    counts = {len(values) for values in columns.values()}
    if len(counts) > 1:
        raise Refusal(
            "input", f"the inputs have {' and '.join(map(str, sorted(counts)))} rows, expected the same"
        )
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    if not rows:
        raise Refusal("input", "the inputs have no rows, expected at least one")
    return request, reader.convert(rows)


def refuse_binary() -> Refusal:
    return Refusal("input", "binary tensors are not supported: send and ask for `data` in JSON")


def _read_tensor(tensor: Tensor, column: ColumnType | None, *, max_rows: int) -> list[Any]:
    """Its values by row. Whether they fit the column is found out by the reader of rows; without a column, here."""

    def refuse(found: str, expected: str) -> Refusal:
        name = tensor.name[:100]
        fault = RowFault(column=name, found=found, expected=expected)
        return Refusal("input", f"input {name}: found {found}, expected {expected}", faults=[fault])

    shape = tensor.shape
    if tensor.datatype not in _KNOWN:
        raise refuse(f"the datatype {tensor.datatype[:100]}", f"one of {', '.join(sorted(_KNOWN))}")
    if column is not None and column.dtype != "any" and tensor.datatype != _datatype_of(column):
        raise refuse(f"the datatype {tensor.datatype}", _datatype_of(column))
    if tensor.data is None:
        raise refuse("no data", "a list of values")
    if not 1 <= len(shape) <= MAX_DIMS or min(shape) < 0:
        raise refuse(f"the shape {shape[:MAX_DIMS]}", "the number of rows, then the dimensions of a row")
    if 0 in shape[1:] and len(shape) > 2:  # a few bytes must not become many lists
        raise refuse(f"the shape {shape}", "no dimension of 0")
    flat = tensor.data
    for size in shape[1:]:  # nested, or flat already
        if not flat or not all(isinstance(part, list) and len(part) == size for part in flat):
            break
        flat = [value for part in flat for value in part]
    if len(flat) != count_values(shape):
        raise refuse(f"{len(flat)} values", f"{count_values(shape)}, as the shape says")
    if shape[0] > max_rows:
        raise Refusal("too_large", f"the request has {shape[0]} rows, and at most {max_rows} can wait")
    if column is None:
        try:
            flat = msgspec.convert(flat, _VALUES[tensor.datatype])
        except (msgspec.ValidationError, OverflowError) as fault:
            raise refuse(f"other values ({fault})", f"values of the datatype {tensor.datatype}") from None
    elif column.dims == () and shape[1:] == [1]:
        shape = shape[:1]
    return nest(flat, shape)


def encode_answer(answer: Answer, request: InferRequest, name: str) -> bytes:
    """Refusal where it asks for an output that the model does not have."""
    columns = answer.columns()
    dtypes = {column.name: column.dtype for column in answer.pieces[0][0].part.columns}
    wanted = [output.name for output in request.outputs] or list(columns)
    unknown = [each for each in wanted if each not in columns]
    if unknown:
        raise Refusal("input", f"there is no output {unknown[0][:100]}, only {', '.join(columns)}")
    document: dict[str, Any] = {"model_name": name, "model_version": answer.facts.label}
    if request.id:
        document["id"] = request.id
    document["outputs"] = [_write_tensor(each, columns[each], dtypes[each]) for each in wanted]
    return msgspec.json.encode(document)


def _write_tensor(name: str, values: list[Any], dtype: str) -> dict[str, Any]:
    shape = _shape_of(values)
    flat = values
    for _ in shape[1:]:
        flat = [value for part in flat for value in part]
    datatype = _DATATYPES.get(dtype) or _PLAIN_TYPES.get(type(flat[0]) if flat else str)
    if datatype is None or any(type(value) is not type(flat[0]) for value in flat):
        datatype, flat = "BYTES", [msgspec.json.encode(value).decode() for value in flat]
    return {"name": name, "shape": shape, "datatype": datatype, "data": flat}


def _shape_of(values: list[Any]) -> list[int]:
    """Of nested lists, as far as all lists of a level have the same length."""
    shape = [len(values)]
    level = values
    while level and all(isinstance(value, list) for value in level):
        sizes = {len(value) for value in level}
        if len(sizes) > 1 or sizes == {0}:
            break
        shape.append(sizes.pop())
        level = [value for part in level for value in part]
    return shape


def describe_model(
    name: str, facts: VersionFacts, inputs: Sequence[ColumnType], outputs: Sequence[ColumnType]
) -> dict[str, Any]:
    """The model metadata."""
    return {
        "name": name,
        "versions": [facts.label],
        "platform": "trn",
        "inputs": [_describe_column(column) for column in inputs],
        "outputs": [_describe_column(column) for column in outputs],
    }


def _describe_column(column: ColumnType) -> dict[str, Any]:
    shape = [-1, *(-1 if size is None else size for size in column.dims)]
    return {"name": column.name, "datatype": _datatype_of(column), "shape": shape}


def _datatype_of(column: ColumnType) -> str:
    return _DATATYPES.get(column.dtype, "BYTES")
