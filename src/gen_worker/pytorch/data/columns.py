"""Matches the columns of a config with those of the data: faults, and how each column is read."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa
import torch

from gen_worker.contract.document_schema import nearest_name
from gen_worker.errors import InputError
from gen_worker.pytorch.config import AugmentSpec, ColumnSpec, ColumnsSpec, with_column
from gen_worker.pytorch.data.augmentation import Augmentation
from gen_worker.pytorch.data.column_readers import Finish, Read, dense_lists, padded_lists, read_images
from gen_worker.pytorch.image_folder import NUM_CHANNELS
from gen_worker.trainer.feed.tensors import batch_to_torch

Shape = tuple[int, ...]

INPUTS, TARGET = "hyperparams.columns.inputs", "hyperparams.columns.target"
_FLOATS = ("float32", "float64", "float16", "bfloat16")
_EXCLUSIVE = (
    ("image", "sequence_length"),
    ("image", "one_hot"),
    ("image", "shape"),
    ("sequence_length", "shape"),
    ("sequence_length", "one_hot"),
    ("augment", "one_hot"),
    ("augment", "sequence_length"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column as the model sees it. `row_shape` is that of one row; without `read` a view of the batch is used."""

    path: str
    name: str
    row_shape: Shape
    dtype: torch.dtype
    may_pad: bool
    read: Read | None
    finish: Finish
    augment: Augmentation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """All columns of a config, for data of one schema."""

    inputs: Mapping[str, Column]
    target: Column | None
    views: tuple[str, ...]
    is_augmented: bool = False

    @property
    def every(self) -> list[Column]:
        return [*self.inputs.values(), *([] if self.target is None else [self.target])]

    def read(self, batch: pa.RecordBatch, generator: torch.Generator | None = None) -> tuple[Any, Any]:
        """(inputs, target) on the device: one tensor, or several by name. With `generator`, images are augmented."""
        views = batch_to_torch(batch, self.views) if self.views else {}

        def tensor(column: Column) -> torch.Tensor:
            found = views[column.name] if column.read is None else column.read(batch.column(column.name))
            if generator is not None and column.augment is not None:
                found = column.augment(found.view(len(found), *column.row_shape), generator)
            return column.finish(found)

        target = None if self.target is None else tensor(self.target)
        if len(self.inputs) == 1:
            (column,) = self.inputs.values()
            return tensor(column), target
        return {name: tensor(column) for name, column in self.inputs.items()}, target


def column_rule_faults(spec: ColumnsSpec) -> list[str]:
    """Faults of the columns that do not depend on the data."""
    named = {f"{INPUTS}.{name}": item for name, item in spec.inputs.items()}
    if spec.target is not None:
        named[TARGET] = spec.target
    faults = []
    if isinstance(spec.target, ColumnSpec) and spec.target.column is None:
        faults.append(f"{TARGET}.column: missing, expected the name of a column")
    for path, item in named.items():
        if not isinstance(item, ColumnSpec):
            continue
        faults += [
            f"{path}.{one}: given together with `{other}`, expected at most one of the two"
            for one, other in _EXCLUSIVE
            if getattr(item, one) is not None and getattr(item, other) is not None
        ]
        if item.augment == AugmentSpec():
            choices = ", ".join(AugmentSpec.__struct_fields__)
            faults.append(f"{path}.augment: everything is off, expected at least one of {choices}")
        if item.augment is not None and path == TARGET:
            faults.append(f"{path}.augment: given for the target, expected only for inputs")
        is_scaled = item.scale is not None or item.normalize is not None
        if is_scaled and item.dtype is not None and item.dtype not in _FLOATS:
            faults.append(f'{path}.dtype: found "{item.dtype}", expected a float type: the column is scaled')
        if is_scaled and item.one_hot is not None:
            faults.append(f"{path}.one_hot: given together with `scale` or `normalize`, expected only one")
    return faults


def fit_columns(
    spec: ColumnsSpec,
    schema: pa.Schema,
    *,
    device: str,
    channels_last: bool = False,
    like: Columns | None = None,
) -> Columns:
    """How to read the columns from data of this schema; InputError with all faults.

    `like` are those of the training data: their dtypes are the default for other data.
    """
    faults: list[str] = []
    known = {} if like is None else {column.path: column.dtype for column in like.every}

    def fit(path: str, item: str | ColumnSpec, name: str) -> Column | None:
        named = with_column(item, name)
        if named.dtype is None and path in known:
            dtype: Any = str(known[path]).removeprefix("torch.")
            named = msgspec.structs.replace(named, dtype=dtype)
        found, fault = _fit(path, named, schema, device=device, channels_last=channels_last)
        faults.extend(fault)
        return found

    inputs = {name: fit(f"{INPUTS}.{name}", item, name) for name, item in spec.inputs.items()}
    target = None if spec.target is None else fit(TARGET, spec.target, "target")
    if faults:
        raise columns_error(faults)
    found = {name: column for name, column in inputs.items() if column is not None}
    every = [*found.values(), *([] if target is None else [target])]
    views = dict.fromkeys(column.name for column in every if column.read is None)
    return Columns(
        inputs=found,
        target=target,
        views=tuple(views),
        is_augmented=any(column.augment is not None for column in found.values()),
    )


def columns_error(faults: list[str]) -> InputError:
    lines = ["the columns do not match the data", *(f"  - {fault}" for fault in faults)]
    return InputError("\n".join(lines), faults=faults)


def type_in_words(data_type: pa.DataType) -> str:
    """An Arrow type for people."""
    types = pa.types
    if isinstance(data_type, pa.FixedShapeTensorType):
        return f"tensors of shape {list(data_type.shape)} ({data_type.value_type})"
    if types.is_fixed_size_list(data_type):
        return f"lists of {data_type.list_size} of {type_in_words(data_type.value_type)}"
    if types.is_list(data_type) or types.is_large_list(data_type):
        return f"lists of any length of {type_in_words(data_type.value_type)}"
    for check, word in (
        (types.is_integer, "integers"),
        (types.is_floating, "numbers"),
        (types.is_boolean, "booleans"),
        (_is_text, "text"),
        (_is_binary, "bytes"),
        (types.is_dictionary, "dictionary codes"),
        (types.is_temporal, "times"),
        (types.is_struct, "records"),
    ):
        if check(data_type):
            return f"{word} ({data_type})"
    return str(data_type)


def _is_text(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_string(data_type) or pa.types.is_large_string(data_type))


def _is_binary(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_binary(data_type) or pa.types.is_large_binary(data_type))


def _is_number(data_type: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_integer(data_type) or types.is_floating(data_type) or types.is_boolean(data_type))


def _fit(
    path: str, spec: ColumnSpec, schema: pa.Schema, *, device: str, channels_last: bool
) -> tuple[Column | None, list[str]]:
    name = spec.column
    assert name is not None
    index = schema.get_field_index(name)
    if index < 0:
        nearest = nearest_name(name, list(schema.names))
        hint = f"did you mean `{nearest}`?" if nearest else f"it has {', '.join(schema.names)}"
        return None, [f"{path}: the data has no column `{name}`: {hint}"]
    data_type = schema.field(index).type
    layout, fault = _image_layout(spec, data_type) if spec.image is not None else _layout(spec, data_type)
    if layout is None:
        return None, [f"{path}: column `{name}` holds {type_in_words(data_type)}, {fault}"]
    faults = []
    shape = layout.shape
    if spec.shape is not None:
        if math.prod(spec.shape) != math.prod(shape):
            faults.append(
                f"{path}.shape: {list(spec.shape)} has {math.prod(spec.shape)} values, but a row of column `{name}` has"
                f" {math.prod(shape)}"
            )
        shape = tuple(spec.shape)
    if spec.one_hot is not None and not pa.types.is_integer(layout.value_type):
        faults.append(f"{path}.one_hot: column `{name}` holds {type_in_words(data_type)}, expected integers")
    faults += _normalize_faults(path, spec, shape)
    faults += _augment_faults(path, spec, shape, layout.value_type)
    if faults:
        return None, faults
    is_float = any(value is not None for value in (spec.image, spec.scale, spec.normalize, spec.one_hot))
    dtype = _dtype(spec, layout.value_type, is_float=is_float)
    scale = spec.scale
    if spec.image is not None and scale is None and dtype.is_floating_point:
        scale = 1 / 255  # most models expect pixels from 0 to 1
    factor, offset = _affine(spec, scale, shape)
    finish = Finish(
        device=device,
        dtype=dtype,
        source_dtype=_torch_dtype(layout.value_type),
        shape=shape if spec.shape is not None else None,
        one_hot=spec.one_hot,
        crop=layout.crop,
        channels_last=channels_last and len(shape) == 3,
        factor=factor,
        offset=offset,
    )
    return Column(
        path=path,
        name=name,
        row_shape=shape if spec.one_hot is None else (*shape, spec.one_hot),
        dtype=dtype,
        may_pad=layout.may_pad,
        read=layout.read,
        finish=finish,
        augment=None if spec.augment is None else Augmentation(spec.augment),
    ), []


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    shape: Shape
    value_type: pa.DataType
    read: Read | None = None
    may_pad: bool = False
    crop: int | None = None


def _layout(spec: ColumnSpec, data_type: pa.DataType) -> tuple[_Layout | None, str]:
    """The layout of a row in the column, or what is expected instead."""
    types = pa.types
    column = spec.column or ""
    if isinstance(data_type, pa.FixedShapeTensorType) and spec.sequence_length is None:
        return _Layout(shape=tuple(data_type.shape), value_type=data_type.value_type), ""
    sizes: list[int] = []
    value_type, is_dense = data_type, True
    while (
        types.is_fixed_size_list(value_type) or types.is_list(value_type) or types.is_large_list(value_type)
    ):
        is_fixed = types.is_fixed_size_list(value_type)
        is_dense = is_dense and is_fixed
        sizes.append(value_type.list_size if is_fixed else -1)
        value_type = value_type.value_type
    if not _is_number(value_type):
        hint = " (for images, give `image`)" if _is_binary(value_type) or types.is_struct(value_type) else ""
        return None, f"expected numbers or lists of numbers{hint}"
    length = spec.sequence_length
    if length is not None:
        if len(sizes) != 1 or not types.is_integer(value_type):
            return None, "but `sequence_length` needs lists of integers"
        if not is_dense:
            read = padded_lists(column, length, spec.pad_id)
            return _Layout(shape=(length,), value_type=pa.int64(), read=read, may_pad=True), ""
        if sizes[0] < length:
            return None, f"but `sequence_length` is {length}, expected at most {sizes[0]}"
        crop = None if sizes[0] == length else length
        return _Layout(shape=(length,), value_type=value_type, crop=crop), ""
    if is_dense:
        return _Layout(shape=tuple(sizes), value_type=value_type), ""
    if spec.shape is None:
        return None, "but the model needs rows of one length: set `shape` or `sequence_length`"
    read = dense_lists(column, math.prod(spec.shape))
    return _Layout(shape=tuple(spec.shape), value_type=value_type, read=read), ""


def _image_layout(spec: ColumnSpec, data_type: pa.DataType) -> tuple[_Layout | None, str]:
    image, name = spec.image, spec.column
    assert image is not None
    assert name is not None
    is_record = pa.types.is_struct(data_type) and data_type.get_field_index("bytes") >= 0
    if not is_record and not _is_binary(data_type):
        return None, "expected bytes of PNG or JPEG files"
    read = read_images(name, image, is_record=is_record)
    return _Layout(shape=(NUM_CHANNELS[image.mode], *image.size), value_type=pa.uint8(), read=read), ""


def _dtype(spec: ColumnSpec, value_type: pa.DataType, *, is_float: bool) -> torch.dtype:
    if spec.dtype is not None:
        return _named_dtype(spec.dtype)
    if is_float or not pa.types.is_integer(value_type):
        return torch.float32
    return torch.int64


def _named_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def _torch_dtype(value_type: pa.DataType) -> torch.dtype:
    names = {"halffloat": "float16", "float": "float32", "double": "float64"}
    return _named_dtype(names.get(str(value_type), str(value_type)))


def _normalize_faults(path: str, spec: ColumnSpec, shape: Shape) -> list[str]:
    if spec.normalize is None:
        return []
    values = msgspec.structs.asdict(spec.normalize)
    return [
        f"{path}.normalize.{name}: found a list of {len(value)}, expected one number, or one for each of the"
        f" {shape[0] if shape else 0} channels"
        for name, value in values.items()
        if isinstance(value, list) and (not shape or len(value) != shape[0])
    ]


def _augment_faults(path: str, spec: ColumnSpec, shape: Shape, value_type: pa.DataType) -> list[str]:
    if spec.augment is None:
        return []
    faults = []
    if len(shape) != 3:
        faults.append(
            f"{path}.augment: a row of column `{spec.column}` has shape {list(shape)}, expected [channels, height, width]:"
            " set `shape`"
        )
    if (spec.augment.brightness or spec.augment.contrast) and not pa.types.is_uint8(value_type):
        faults.append(
            f"{path}.augment: brightness and contrast need uint8 pixels, but column `{spec.column}` holds {value_type}:"
            " remove them, or write the column as uint8"
        )
    return faults


def _affine(
    spec: ColumnSpec, scale: float | None, shape: Shape
) -> tuple[torch.Tensor | float | None, torch.Tensor | None]:
    """`scale`, then `normalize`, as one factor and one offset."""
    if spec.normalize is None:
        return scale, None

    def spread(value: float | list[float]) -> torch.Tensor:
        tensor = torch.tensor(value, dtype=torch.float64)
        return tensor.view(-1, *(1,) * (len(shape) - 1)) if tensor.ndim else tensor

    mean, std = spread(spec.normalize.mean), spread(spec.normalize.std)
    factor = (1.0 if scale is None else scale) / std
    return factor, -mean / std
