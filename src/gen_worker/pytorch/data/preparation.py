"""From raw batches to the inputs of a step."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import torch

from gen_worker.errors import InputError
from gen_worker.pytorch.config import ColumnsSpec
from gen_worker.pytorch.data.augmentation import step_generator
from gen_worker.pytorch.data.columns import Column, Columns, columns_error, fit_columns
from gen_worker.pytorch.step import Prepared
from gen_worker.trainer.contracts import StepContext

_NUM_TRIAL_ROWS = 2


class Preparation:
    """Reads batches by the config's columns. Held-out data with other types is matched on its first batch."""

    def __init__(
        self, spec: ColumnsSpec, ctx: StepContext, *, is_next_token: bool, channels_last: bool = False
    ) -> None:
        self._spec = spec
        self._device = str(ctx.device)
        self._is_next_token = is_next_token
        self._channels_last = channels_last
        self._seed, self._rank = ctx.seed, ctx.rank
        self._all_rows = _all_rows(ctx)
        self._fitted: list[tuple[pa.Schema, Columns]] = []
        self._unlabelled: list[tuple[pa.Schema, Columns]] = []  # of rows to predict
        schema = _schema_of(ctx)
        self.columns = None if schema is None else self._fit(schema)

    def __call__(self, raw_batch: Any, *, step: int | None = None) -> Prepared:
        """`step` is the training step; without it images are not augmented."""
        batch = raw_batch if isinstance(raw_batch, pa.RecordBatch) else to_record_batch(raw_batch)
        columns = self._columns_for(batch.schema)
        generator = None
        if step is not None and columns.is_augmented:
            generator = step_generator(self._seed, step=step, rank=self._rank)
        inputs, target = columns.read(batch, generator)
        rows = batch.num_rows
        all_rows = rows if self._all_rows is None else self._all_rows(raw_batch)
        if self._is_next_token:
            return inputs[:, :-1], inputs[:, 1:], rows, all_rows
        return inputs, target, rows, all_rows

    def read_inputs(self, rows: pa.RecordBatch) -> Any:
        """The inputs alone, of rows without a target."""
        found = next((columns for schema, columns in self._unlabelled if schema.equals(rows.schema)), None)
        if found is None:
            found = fit_columns(
                msgspec.structs.replace(self._spec, target=None),
                rows.schema,
                device=self._device,
                channels_last=self._channels_last,
                like=self.columns,
            )
            self._unlabelled.append((rows.schema, found))
        inputs, _ = found.read(rows)
        return inputs

    def require(self, schema: Any) -> None:
        """InputError if data of this schema does not have the columns. Own data may have no schema."""
        if isinstance(schema, pa.Schema):
            self._columns_for(schema)

    @property
    def row_shape(self) -> tuple[int, ...] | None:
        """Shape of the input as the model sees it; for several inputs, their total number of values. None if unknown."""
        if self.columns is None:
            return None
        if len(self.columns.inputs) > 1:
            return (sum(math.prod(column.row_shape) for column in self.columns.inputs.values()),)
        (column,) = self.columns.inputs.values()
        shape = column.row_shape
        return (shape[0] - 1, *shape[1:]) if self._is_next_token and shape else shape

    @property
    def pad_id(self) -> int | None:
        """The padding token, if the data may need one."""
        (item,) = self._spec.inputs.values() if self._is_next_token else (None,)
        if item is None or isinstance(item, str):
            return None
        may_pad = self.columns is None or any(column.may_pad for column in self.columns.inputs.values())
        return item.pad_id if item.sequence_length is not None and may_pad else None

    def trial(self) -> tuple[Any, Any] | None:
        """(inputs, target) of zeros; None if the shapes are unknown."""
        if self.columns is None:
            return None

        def zeros(column: Column) -> torch.Tensor:
            return torch.zeros((_NUM_TRIAL_ROWS, *column.row_shape), dtype=column.dtype, device=self._device)

        if self._is_next_token:
            (column,) = self.columns.inputs.values()
            tokens = zeros(column) + int(self.pad_id == 0)  # not only padding
            return tokens[:, :-1], tokens[:, 1:]
        named = {name: zeros(column) for name, column in self.columns.inputs.items()}
        inputs: Any = next(iter(named.values())) if len(named) == 1 else named
        return inputs, None if self.columns.target is None else zeros(self.columns.target)

    def _columns_for(self, schema: pa.Schema) -> Columns:
        for known, columns in self._fitted:
            if schema.equals(known):
                return columns
        return self._fit(schema)

    def _fit(self, schema: pa.Schema) -> Columns:
        columns = fit_columns(
            self._spec,
            schema,
            device=self._device,
            channels_last=self._channels_last,
            like=self._fitted[0][1] if self._fitted else None,
        )
        if self._is_next_token:
            _require_tokens(columns)
        self._fitted.append((schema, columns))
        return columns


def to_record_batch(raw_batch: Any) -> pa.RecordBatch:
    """A record batch from columns by name or a list of rows, as in `mock_batches` or a Dataset of dicts."""
    try:
        if isinstance(raw_batch, Mapping):
            return pa.RecordBatch.from_pydict({name: _to_column(value) for name, value in raw_batch.items()})
        if isinstance(raw_batch, list) and raw_batch and all(isinstance(row, dict) for row in raw_batch):
            return pa.RecordBatch.from_pylist(raw_batch)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise InputError(f"a batch cannot be read as columns: {error}") from error
    raise InputError(
        f"a batch is a {type(raw_batch).__name__}, expected a record batch, columns by name, or a list of rows"
    )


def _to_column(values: Any) -> Any:
    """Tensors and arrays of several dimensions as Arrow tensors; anything else unchanged."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    if not isinstance(values, np.ndarray) or values.ndim < 2:
        return values
    kind = pa.fixed_shape_tensor(pa.from_numpy_dtype(values.dtype), values.shape[1:])
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    storage = pa.FixedSizeListArray.from_arrays(flat, math.prod(values.shape[1:]))
    return pa.ExtensionArray.from_storage(kind, storage)


def _require_tokens(columns: Columns) -> None:
    for column in columns.inputs.values():
        is_sequence = len(column.row_shape) == 1 and column.row_shape[0] >= 2
        if not is_sequence or column.dtype.is_floating_point:
            found = f"{str(column.dtype).removeprefix('torch.')} {list(column.row_shape)}"
            expected = "token ids: lists of at least 2 integers"
            raise columns_error([f"{column.path}: found rows of {found}, but next_token needs {expected}"])


def _schema_of(ctx: StepContext) -> pa.Schema | None:
    schema = getattr(ctx.dataset, "schema", None)
    if schema is None and ctx.job.mock_batches:
        return to_record_batch(ctx.job.mock_batches[0]).schema
    return schema if isinstance(schema, pa.Schema) else None


def _all_rows(ctx: StepContext) -> Callable[[Any], int] | None:
    if ctx.world_size == 1:
        return None
    from gen_worker.trainer.processes.distributed import global_rows

    return lambda batch: int(global_rows(batch, ctx))
