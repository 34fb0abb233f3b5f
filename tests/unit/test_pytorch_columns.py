"""Columns become the tensors that a config describes, whatever their Arrow type, and never change the batch."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.errors import InputError
from gen_worker.pytorch.config import ColumnSpec, ColumnsSpec, ImageSpec, NormalizeSpec
from gen_worker.pytorch.data.columns import Columns, fit_columns, type_in_words
from gen_worker.pytorch.data.preparation import Preparation, to_record_batch
from gen_worker.trainer.contracts import StepContext

ROWS = 6


def fixed(values: Any, size: int) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(np.asarray(values).reshape(-1)), size)


def png(pixels: Any, mode: str = "L") -> bytes:
    content = io.BytesIO()
    Image.fromarray(np.asarray(pixels, np.uint8), mode=None).convert(mode).save(content, format="PNG")
    return content.getvalue()


def read(batch: pa.RecordBatch, spec: ColumnSpec | str, **options: Any) -> torch.Tensor:
    columns = fit_columns(ColumnsSpec(inputs={"x": spec}), batch.schema, device="cpu", **options)
    inputs, target = columns.read(batch)
    assert target is None
    assert isinstance(inputs, torch.Tensor)
    (column,) = columns.inputs.values()
    assert (tuple(inputs.shape[1:]), inputs.dtype) == (column.row_shape, column.dtype)
    return inputs


def test_numbers_keep_their_meaning_in_the_types_that_models_expect() -> None:
    batch = pa.record_batch(
        {
            "double": pa.array(np.arange(ROWS, dtype="float64")),
            "half": pa.array(np.arange(ROWS, dtype="float16")),
            "short": pa.array(np.arange(ROWS, dtype="int16")),
            "flag": pa.array([True, False] * 3),
        }
    )
    expected = {"double": torch.float32, "half": torch.float32, "short": torch.int64, "flag": torch.float32}
    for name, dtype in expected.items():
        found = read(batch, name)
        assert found.dtype == dtype
        values = [float(value.as_py()) for value in batch.column(name)]
        assert found.tolist() == values
    assert read(batch, ColumnSpec(column="short", dtype="int32")).dtype == torch.int32


def test_scale_normalize_and_shape_are_applied_in_that_order_and_leave_the_data_alone() -> None:
    pixels = np.arange(ROWS * 12, dtype="float32").reshape(ROWS, 12)
    batch = pa.record_batch({"x": fixed(pixels, 12)})
    before = pixels.copy()
    spec = ColumnSpec(
        column="x",
        shape=[3, 2, 2],
        scale=0.5,
        normalize=NormalizeSpec(mean=[1.0, 2.0, 3.0], std=[1.0, 2.0, 4.0]),
    )
    found = read(batch, spec)
    image = pixels.reshape(ROWS, 3, 2, 2) * 0.5
    mean, std = (np.array(v, "float32").reshape(3, 1, 1) for v in ([1, 2, 3], [1, 2, 4]))
    np.testing.assert_allclose(found.numpy(), (image - mean) / std, rtol=1e-5)
    for other in (
        ColumnSpec(column="x", scale=2.0),
        ColumnSpec(column="x", normalize=NormalizeSpec(mean=1, std=2)),
    ):
        read(batch, other)
    np.testing.assert_array_equal(batch.column("x").flatten().to_numpy().reshape(ROWS, 12), before)
    assert read(batch, ColumnSpec(column="x", shape=[3, 2, 2]), channels_last=True).is_contiguous(
        memory_format=torch.channels_last
    )


def test_lists_are_cut_and_filled_up_to_one_length() -> None:
    lists = [[1, 2, 3, 4, 5], [6], [], [7, 8, 9]]
    whole = pa.record_batch({"t": pa.array([[0, 0], *lists, [0]], pa.list_(pa.int32()))})
    spec = ColumnSpec(column="t", sequence_length=3, pad_id=-1)
    for batch in (whole.slice(1, 4), pa.record_batch({"t": pa.array(lists, pa.large_list(pa.uint8()))})):
        found = read(batch, spec)
        assert found.tolist() == [[1, 2, 3], [6, -1, -1], [-1, -1, -1], [7, 8, 9]]
    empty = pa.record_batch({"t": pa.array([[], []], pa.list_(pa.int64()))})
    assert read(empty, spec).tolist() == [[-1] * 3] * 2
    equal = pa.record_batch({"t": fixed(np.arange(12, dtype="int32").reshape(3, 4), 4)})
    assert read(equal, spec).tolist() == [[0, 1, 2], [4, 5, 6], [8, 9, 10]]


def test_whether_rows_may_hold_padding_is_known_from_the_types() -> None:
    spec = ColumnsSpec(inputs={"t": ColumnSpec(column="t", sequence_length=3)})
    open_ended = pa.schema({"t": pa.list_(pa.int64())})
    closed = pa.schema({"t": pa.list_(pa.int64(), 4)})
    assert fit_columns(spec, open_ended, device="cpu").inputs["t"].may_pad
    assert not fit_columns(spec, closed, device="cpu").inputs["t"].may_pad


def test_lists_of_open_type_and_one_length_need_a_shape_and_keep_it() -> None:
    nested = [[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]]
    batch = pa.record_batch({"x": pa.array(nested, pa.list_(pa.list_(pa.float64())))})
    assert read(batch, ColumnSpec(column="x", shape=[2, 2])).tolist() == nested
    with pytest.raises(InputError, match="a row has 4 values, but `shape` needs 3"):
        read(batch, ColumnSpec(column="x", shape=[3]))
    ragged = pa.record_batch({"x": pa.array([[1.0, 2.0], [3.0]])})
    with pytest.raises(InputError, match="a batch has lists of 2 and 1 elements"):
        read(ragged, ColumnSpec(column="x", shape=[2]))


def test_one_hot_classes_and_tensors_of_fixed_shape() -> None:
    batch = pa.record_batch({"c": pa.array([2, 0, 1])})
    assert read(batch, ColumnSpec(column="c", one_hot=3)).tolist() == [[0, 0, 1], [1, 0, 0], [0, 1, 0]]
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12, dtype="float32").reshape(2, 2, 3))
    assert read(pa.record_batch({"x": tensors}), "x").shape == (2, 2, 3)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("is_record", [False, True])
def test_pictures_are_decoded_resized_and_scaled(threads: int, is_record: bool) -> None:
    random = np.random.default_rng(0)
    grey = random.integers(0, 256, (4, 6, 5), dtype=np.uint8)
    contents = [png(picture) for picture in grey]
    column = (
        pa.array([{"bytes": content, "path": "a.png"} for content in contents])
        if is_record
        else pa.array(contents, pa.binary())
    )
    batch = pa.record_batch({"image": column})
    found = read(batch, ColumnSpec(column="image", image=ImageSpec(size=[6, 5], mode="L", threads=threads)))
    np.testing.assert_allclose(found.numpy()[:, 0], grey / 255, rtol=1e-6)
    assert found.is_contiguous()
    raw = read(batch, ColumnSpec(column="image", image=ImageSpec(size=[6, 5], mode="L"), dtype="uint8"))
    np.testing.assert_array_equal(raw.numpy()[:, 0], grey)
    large = read(batch, ColumnSpec(column="image", image=ImageSpec(size=[12, 10])))
    assert large.shape == (4, 3, 12, 10)
    assert large.is_contiguous()
    assert torch.equal(large[:, 0], large[:, 1])
    last = read(batch, ColumnSpec(column="image", image=ImageSpec(size=[6, 5])), channels_last=True)
    assert last.is_contiguous(memory_format=torch.channels_last)


def test_a_picture_that_cannot_be_read_is_named() -> None:
    batch = pa.record_batch({"image": pa.array([png([[0, 1]]), b"not a picture"], pa.binary())})
    spec = ColumnSpec(column="image", image=ImageSpec(size=[1, 2], mode="L"))
    with pytest.raises(InputError, match="column 'image': row 1 of a batch cannot be decoded as an image"):
        read(batch, spec)


@pytest.mark.parametrize(
    ("column", "spec"),
    [
        (pa.array([1.0, None]), ColumnSpec(column="x")),
        (pa.array([[1, 2], None]), ColumnSpec(column="x", sequence_length=2)),
        (pa.array([[1, None], [1, 2]]), ColumnSpec(column="x", sequence_length=2)),
        (pa.array([[1.0, 2.0], [None, 1.0]]), ColumnSpec(column="x", shape=[2])),
        (pa.array([png([[0]]), None], pa.binary()), ColumnSpec(column="x", image=ImageSpec(size=[1, 1]))),
    ],
)
def test_nulls_are_refused_by_name(column: pa.Array, spec: ColumnSpec) -> None:
    with pytest.raises(InputError, match=r"column 'x'.* has nulls"):
        read(pa.record_batch({"x": column}), spec)


def test_everything_that_does_not_fit_is_told_at_once_in_words() -> None:
    schema = pa.schema(
        {"a": pa.string(), "b": pa.list_(pa.float32()), "c": pa.timestamp("s"), "d": pa.int64()}
    )
    spec = ColumnsSpec(inputs={"a": "a", "b": "b", "c": "c", "dd": "dd"}, target="e")
    with pytest.raises(InputError) as found:
        fit_columns(spec, schema, device="cpu")
    text = str(found.value)
    assert "column `a` holds text (string)" in text
    assert "column `b` holds lists of any length of numbers (float)" in text
    assert "column `c` holds times (timestamp[s])" in text
    assert "inputs.dd: the data has no column `dd`" in text
    assert "target: the data has no column `e`" in text
    assert type_in_words(pa.list_(pa.uint8(), 4)) == "lists of 4 of integers (uint8)"


def context(**job: Any) -> StepContext:
    return StepContext(job=TrainingJobSpec(run_id="r", max_steps=1, **job))


def test_several_inputs_go_by_name_and_one_goes_alone() -> None:
    batch = pa.record_batch({"a": pa.array([1.0, 2.0]), "b": pa.array([3, 4])})
    columns: Columns = fit_columns(
        ColumnsSpec(inputs={"one": "a", "other": "b"}, target="b"), batch.schema, device="cpu"
    )
    inputs, target = columns.read(batch)
    assert sorted(inputs) == ["one", "other"]
    assert inputs["other"].tolist() == target.tolist() == [3, 4]


def test_batches_in_the_job_itself_are_columns_or_rows() -> None:
    as_columns = {"x": [[1.0, 2.0], [3.0, 4.0]], "y": [0, 1]}
    as_rows = [{"x": [1.0, 2.0], "y": 0}, {"x": [3.0, 4.0], "y": 1}]
    spec = ColumnsSpec(inputs={"x": ColumnSpec(column="x", shape=[2])}, target="y")
    for raw in (as_columns, as_rows):
        prepare = Preparation(spec, context(mock_batches=[raw]), is_next_token=False)
        inputs, target, rows, all_rows = prepare(raw)
        assert inputs.tolist() == as_columns["x"]
        assert target.tolist() == [0, 1]
        assert (rows, all_rows) == (2, 2)
    with pytest.raises(InputError, match="a batch is a str"):
        to_record_batch("text")


def test_held_out_data_may_have_types_of_its_own(tmp_path: Path) -> None:
    spec = ColumnsSpec(inputs={"x": ColumnSpec(column="x", shape=[2])}, target="y")
    prepare = Preparation(spec, context(), is_next_token=False)
    train = pa.record_batch({"x": fixed([[1, 2], [3, 4]], 2), "y": pa.array([0, 1])})
    held_out = pa.record_batch({"x": pa.array([[1.0, 2.0]]), "y": pa.array([1], pa.int8())})
    assert prepare(train)[0].tolist() == [[1, 2], [3, 4]]
    assert prepare(held_out)[0].tolist() == [[1, 2]]
    assert prepare(held_out)[0].dtype == prepare(train)[0].dtype  # the model is the same
    assert prepare(train)[1].tolist() == [0, 1]
    with pytest.raises(InputError, match="the data has no column `y`"):
        prepare.require(pa.schema({"x": pa.list_(pa.int64(), 2)}))


def test_the_next_tokens_are_the_tokens_one_on() -> None:
    spec = ColumnsSpec(inputs={"t": ColumnSpec(column="t", sequence_length=4, pad_id=9)})
    prepare = Preparation(spec, context(), is_next_token=True)
    inputs, target, _, _ = prepare(pa.record_batch({"t": pa.array([[1, 2, 3], [4, 5, 6, 7, 8]])}))
    assert inputs.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert target.tolist() == [[2, 3, 9], [5, 6, 7]]
    with pytest.raises(InputError, match="next_token needs token ids"):
        Preparation(ColumnsSpec(inputs={"t": "t"}), context(), is_next_token=True).require(
            pa.schema({"t": pa.float32()})
        )


def test_tensors_by_name_are_columns_as_a_dataset_of_dicts_gives_them() -> None:
    pixels = torch.arange(2 * 3 * 4 * 5, dtype=torch.uint8).view(2, 3, 4, 5)
    batch = to_record_batch({"x": pixels, "y": np.asarray([1, 2]), "name": ["a", "b"]})
    assert torch.equal(read(batch, ColumnSpec(column="x", dtype="uint8")), pixels)
    assert read(batch, "y").tolist() == [1, 2]
    with pytest.raises(InputError, match="cannot be read as columns"):
        to_record_batch({"x": torch.zeros(2, 2), "y": torch.zeros(3)})
