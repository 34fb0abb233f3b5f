"""Calls the author's `predict` and `predict_stream`, and checks that the answer has one value a row and name."""

import contextlib
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin

import msgspec
import numpy as np
import pyarrow as pa

from gen_worker.errors import PluginError
from gen_worker.inference.model.columns import Answer, RowsError, Values
from gen_worker.inference.model.number_types import number_type_of
from gen_worker.trainer.contracts import StepContext, TrainerPlugin

Kind = typing.Literal["error", "row_count", "output", "input"]


class OutputError(ValueError):
    """What the author's code returned is not one value a row and name."""

    def __init__(self, words: str, kind: Kind = "output") -> None:
        super().__init__(words)
        self.kind = kind


class Predictor:
    """One thread. A batch has `shape` rows; the answer is that of all of them."""

    def __init__(self, trainer: TrainerPlugin, state: Any, ctx: StepContext) -> None:
        self._hook: Callable[..., Any] = trainer.predict  # type: ignore[attr-defined]
        self._stream_hook: Callable[..., Any] | None = getattr(trainer, "predict_stream", None)
        self._state = state
        self._ctx = ctx
        self.row_type = find_row_type(self._hook, is_many=True)
        self._stream_row_type = None if self._stream_hook is None else find_row_type(self._stream_hook)

    @property
    def can_stream(self) -> bool:
        return self._stream_hook is not None

    def predict(self, batch: pa.RecordBatch) -> Answer:
        """OutputError, RowsError, or whatever the author's code raises."""
        rows = batch if self.row_type is None else to_records(batch, self.row_type)
        with inference_mode():
            found = self._hook(rows, self._state, self._ctx)
            return read_answer(found, batch.num_rows)

    def stream(self, row: pa.RecordBatch) -> Iterator[Any]:
        """What `predict_stream` yields. Each `next` runs the author's code."""
        assert self._stream_hook is not None
        given = row if self._stream_row_type is None else to_records(row, self._stream_row_type)[0]
        with inference_mode():
            items = self._stream_hook(given, self._state, self._ctx)
            if not isinstance(items, Iterator):
                try:
                    items = iter(items)
                except TypeError:
                    raise OutputError(
                        f"predict_stream returned {type(items).__name__}, expected an iterator: use `yield`"
                    ) from None
        return _Stream(items)


class _Stream(Iterator[Any]):
    """Without gradients while the author's code runs, and only then."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items

    def __next__(self) -> Any:
        with inference_mode():
            return next(self._items)

    def close(self) -> None:
        close = getattr(self._items, "close", None)
        if close is not None:
            with inference_mode():
                close()


def inference_mode() -> contextlib.AbstractContextManager[Any]:
    torch = sys.modules.get("torch")
    return contextlib.nullcontext() if torch is None else torch.inference_mode()


def find_row_type(hook: Callable[..., Any], *, is_many: bool = False) -> type[msgspec.Struct] | None:
    """The Struct by which its first parameter is annotated: `list[In]`, or `In` of a stream. None: an Arrow batch."""
    try:
        hints = typing.get_type_hints(hook)
    except Exception as fault:  # a name that only exists for type checkers
        raise PluginError(f"the annotations of `{hook.__name__}` cannot be read: {fault}") from fault
    names = (
        [name for name in hook.__code__.co_varnames if name != "self"] if hasattr(hook, "__code__") else []
    )
    wanted = hints.get(names[0]) if names else None
    if is_many:
        arguments = get_args(wanted) if get_origin(wanted) in (list, Sequence) else ()
        wanted = arguments[0] if arguments else None
    return wanted if isinstance(wanted, type) and issubclass(wanted, msgspec.Struct) else None


def to_records(batch: pa.RecordBatch, row_type: type[msgspec.Struct]) -> list[Any]:
    """RowsError names the first row that does not fit."""
    rows = batch.to_pylist()
    try:
        return msgspec.convert(rows, list[row_type], strict=False)  # type: ignore[valid-type]
    except msgspec.ValidationError as fault:
        raise RowsError(f"the rows are not {row_type.__name__}: {fault}") from fault


def read_answer(found: Any, num_rows: int) -> Answer:
    """OutputError says which name, and what was expected."""
    if isinstance(found, pa.RecordBatch | pa.Table):
        found = {name: found.column(name) for name in found.schema.names}
    elif isinstance(found, list | tuple):
        found = _columns_of_records(found)
    if not isinstance(found, Mapping):
        raise OutputError(
            f"predict returned {type(found).__name__}, expected a dict of columns: return {{'name': values}}"
        )
    if not found:
        raise OutputError("predict returned no columns")
    columns: dict[str, Values] = {}
    for name, values in found.items():
        if not isinstance(name, str):
            raise OutputError(f"predict returned a column named {name!r}, expected text")
        columns[name] = column = _read_column(name, values)
        if len(column) != num_rows:
            raise OutputError(
                f"predict returned {len(column)} values of {name!r} for {num_rows} rows", "row_count"
            )
    return Answer(columns=columns, num_rows=num_rows)


def _columns_of_records(found: Sequence[Any]) -> dict[str, list[Any]]:
    for item in found:
        if not isinstance(item, Mapping | msgspec.Struct):
            raise OutputError(
                f"predict returned a list of {type(item).__name__}, expected records or a dict of columns"
            )
    rows = [msgspec.to_builtins(item, builtin_types=(bytes,), enc_hook=lambda value: value) for item in found]
    names = list(rows[0]) if rows else []
    for number, row in enumerate(rows):
        if list(row) != names:
            raise OutputError(
                f"predict returned a record {number} with the names {', '.join(row)}, but the first has {', '.join(names)}"
            )
    return {name: [row[name] for row in rows] for name in names}


def _read_column(name: str, values: Any) -> Values:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(values, torch.Tensor):
        tensor = values.detach()
        if tensor.dtype == torch.bfloat16:
            tensor = tensor.float()
        values = tensor.cpu().numpy()
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
        values = pa.concat_arrays(values.chunks) if isinstance(values, pa.ChunkedArray) else values
    if isinstance(values, pa.Array):
        is_number = pa.types.is_integer(values.type) or pa.types.is_floating(values.type)
        numbers = number_type_of(values.type) if is_number else None
        view = None if numbers is None else numbers.view(values)
        values = values.to_pylist() if view is None else view
    if isinstance(values, np.ndarray):
        if values.ndim == 0:
            raise OutputError(f"predict returned one value of {name!r}, expected one a row", "row_count")
        return _plain_numbers(values) if values.dtype.kind in "biuf" else values.tolist()
    if isinstance(values, list | tuple):
        return _from_list(name, list(values))
    raise OutputError(
        f"predict returned a {type(values).__name__} as {name!r}, expected an array, a tensor or a list"
    )


def _plain_numbers(values: Values) -> Values:
    """As a frame has them: in the byte order of the machine, of at most 64 bits."""
    dtype: np.dtype[Any] = values.dtype  # type: ignore[union-attr]
    plain = np.dtype(np.float64) if dtype.itemsize > 8 else dtype.newbyteorder("=")
    return values if dtype == plain and dtype.isnative else values.astype(plain)  # type: ignore[union-attr]


def _from_list(name: str, values: list[Any]) -> Values:
    """As an array where all are numbers of one kind: so that they are written the same way in every batch."""
    kinds = {type(value) for value in values}
    for kind, dtype in ((bool, np.bool_), (int, np.int64), (float, np.float64)):
        if kinds == {kind}:
            try:
                return np.array(values, dtype=dtype)
            except OverflowError:
                return values
    torch = sys.modules.get("torch")
    if torch is not None and kinds == {torch.Tensor}:
        values = [_read_column(name, value[None])[0] for value in values]
        kinds = {np.ndarray}
    if values and kinds == {np.ndarray} and len({(value.shape, value.dtype) for value in values}) == 1:
        stacked: Values = np.stack(values)
        return stacked
    return values
