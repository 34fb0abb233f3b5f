"""The data files are what torch, zip tools and safetensors expect, and hold every kind of tensor."""

import shutil
import subprocess
import sys
import threading
import warnings
import zipfile

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from gen_worker.contract.checkpoints.meta import CheckpointMeta, FileEntry
from gen_worker.contract.files.hashes import hash_file
from gen_worker.errors import CheckpointError
from gen_worker.trainer.checkpoints.files import archive as checkpoint_archive
from gen_worker.trainer.checkpoints.files import image as checkpoint_image
from gen_worker.trainer.checkpoints.files.archive import CrcRecord
from gen_worker.trainer.checkpoints.files.dtypes import FLOAT_DTYPES, STORAGE_CLASSES, UNTYPED
from gen_worker.trainer.checkpoints.files.finite_scan import find_non_finite
from gen_worker.trainer.checkpoints.files.format import FloatRange, build_layout
from gen_worker.trainer.checkpoints.files.image import ImageFile, compare_with_disk
from gen_worker.trainer.checkpoints.files.staging import StagingBuffer, open_anonymous_file
from gen_worker.trainer.checkpoints.files.tensors import StorageBuffers, TensorTable

# A busy machine is slow; that is no fault of the code.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

TORCH_DTYPES = [*STORAGE_CLASSES, *sorted(UNTYPED)]


def write(path, tensors, file_format="pt"):
    """What a save does to the data file, in one process. Returns (layout, meta for reading it back)."""
    table = TensorTable()
    for name, tensor in tensors.items():
        (table.add_torch if isinstance(tensor, torch.Tensor) else table.add_numpy)(tensor, name)
    layout = build_layout(file_format, *table.finish())
    staging = StagingBuffer(open_anonymous_file())
    image = staging.view(layout.size_bytes)
    for offset, constant in layout.constants:
        image[offset : offset + len(constant)] = np.frombuffer(constant, np.uint8)
    table.copy_into(image, layout.storage_offsets)
    writer = ImageFile(image, layout.size_bytes, path, layout.crcs)
    digest = writer.hash()
    writer.finish()
    writer.close()
    staging.close()
    assert path.stat().st_size == layout.size_bytes
    assert hash_file(path) == digest
    entry = FileEntry(name=path.name, size_bytes=layout.size_bytes, hash=digest)
    meta = CheckpointMeta(
        run_id="r",
        attempt=1,
        step=1,
        epoch=0,
        final=False,
        files=(entry,),
        storages=layout.storages,
        tensors=layout.tensors,
    )
    return layout, meta


def read(path, meta):
    """Tensors by name, as the store builds them."""
    buffers = StorageBuffers(meta, path.name)
    content = path.read_bytes()
    for memory, storage in zip(buffers.bytes, meta.storages, strict=True):
        memory[:] = np.frombuffer(content, np.uint8, storage.size_bytes, storage.offset)
    return dict(zip([entry.name for entry in meta.tensors], buffers.build(), strict=True))


def make(dtype):
    """12 elements of any dtype from random bytes, which are all values it has."""
    itemsize = getattr(torch, dtype).itemsize
    bits = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 256, 12 * itemsize, np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # complex32 calls itself experimental
        return torch.from_numpy(bits).view(getattr(torch, dtype)).view(3, 4)


def raw(tensor):
    """The bytes of the elements in order."""
    if isinstance(tensor, np.ndarray):
        return tensor.tobytes()
    flat = tensor.detach().resolve_conj().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def assert_same(a, b):
    assert type(a) is type(b) or isinstance(b, torch.nn.Parameter)
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert raw(a) == raw(b)


def odd_shapes():
    base = torch.arange(40.0)
    wide = np.arange(24, dtype=np.int16).reshape(4, 6)
    return {
        "transposed": base[:12].view(3, 4).t(),
        "sliced": base[13:31:3],
        "expanded": torch.tensor([7.0]).expand(3, 2),
        "empty": torch.empty(0, 5),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "reversed": wide[::-1, ::2],
        "fortran": np.asfortranarray(wide),
        "big_endian": np.arange(4, dtype=">f8"),
        "long_double": np.array([1, 2], np.longdouble) / 3,
        "time": np.array(["2024-01-01"], "datetime64[ns]"),
        "no_rows": np.empty((0, 3), np.float32),
        "zero_dim": np.array(5, np.uint32),
        "broadcast": np.broadcast_to(np.float32(2), (2, 2)),
        "flags": np.array([True, False]),
    }


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_torch_reads_every_dtype_from_the_archive_and_so_do_we(tmp_path, dtype):
    path = tmp_path / "x.pt"
    tensor = make(dtype)
    _, meta = write(path, {"x": tensor})
    for mmap in (False, True):
        assert_same(torch.load(path, weights_only=True, mmap=mmap)["x"], tensor)
    assert_same(read(path, meta)["x"], tensor)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_safetensors_reads_every_dtype_it_has_and_the_bytes_of_the_others(tmp_path, dtype):
    path = tmp_path / "x.safetensors"
    tensor = make(dtype)
    _, meta = write(path, {"x": tensor, "one_byte": torch.tensor([True])}, "safetensors")
    loaded = load_file(path)["x"]
    assert raw(loaded) == raw(tensor)
    assert loaded.dtype in (tensor.dtype, torch.uint8)
    assert_same(read(path, meta)["x"], tensor)


@pytest.mark.parametrize("file_format", ["pt", "safetensors"])
def test_odd_tensors_and_arrays_come_back_as_they_were(tmp_path, file_format):
    path = tmp_path / f"x.{file_format}"
    tensors = odd_shapes()
    _, meta = write(path, tensors, file_format)
    restored = read(path, meta)
    for name, tensor in tensors.items():
        assert_same(restored[name], tensor)
        if isinstance(tensor, np.ndarray):
            assert restored[name].flags.writeable
        else:
            assert restored[name].stride() == tensor.stride()
            assert restored[name].requires_grad == tensor.requires_grad


def test_odd_tensors_are_readable_with_plain_torch_and_safetensors(tmp_path):
    tensors = odd_shapes()
    write(tmp_path / "x.pt", tensors)
    loaded = torch.load(tmp_path / "x.pt", weights_only=True)
    assert list(loaded) == list(tensors)
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):
            assert_same(loaded[name], tensor)
    assert loaded["fortran"].tolist() == tensors["fortran"].tolist()
    assert loaded["long_double"].dtype == torch.uint8  # torch has no such type: its bytes
    write(tmp_path / "x.safetensors", tensors, "safetensors")
    names = set(load_file(tmp_path / "x.safetensors"))
    assert {"parameter", "scalar", "empty"} <= names


@pytest.mark.parametrize("file_format", ["pt", "safetensors"])
def test_shared_storages_are_stored_once_and_shared_again(tmp_path, file_format):
    path = tmp_path / f"x.{file_format}"
    base = torch.arange(1000.0)
    array = np.arange(100)
    tensors = {"a": base[10:20], "b": base[15:25].view(2, 5), "bits": base.view(torch.int32)[10:12]}
    _, meta = write(path, {**tensors, "n": array[5:], "m": array[::-1]}, file_format)
    assert [storage.size_bytes for storage in meta.storages] == [
        15 * 4,
        100 * 8,
    ]  # only the span that is used
    restored = read(path, meta)
    restored["a"][5] = -1.0
    assert restored["b"][0, 0] == -1.0
    restored["n"][0] = -7
    assert restored["m"][94] == -7
    assert restored["bits"].tolist() == tensors["bits"].tolist()
    if file_format == "pt":
        loaded = torch.load(path, weights_only=True)
        loaded["a"][5] = -2.0
        assert loaded["b"][0, 0] == -2.0


def test_two_views_of_one_address_with_different_sizes_do_not_mix(tmp_path):
    array = np.arange(8.0)
    tensors = {"head": torch.from_numpy(array[:2]), "whole": torch.from_numpy(array)}
    _, meta = write(tmp_path / "x.pt", tensors)
    assert read(tmp_path / "x.pt", meta)["whole"].tolist() == array.tolist()
    assert tensors["head"].untyped_storage().nbytes() == 16


def test_the_same_tensor_under_two_names_is_stored_once_and_found_under_both(tmp_path):
    tensor = torch.ones(2)
    layout, _ = write(tmp_path / "x.pt", {"a": tensor, "b": tensor})
    assert len(layout.storages) == 1
    assert list(torch.load(tmp_path / "x.pt", weights_only=True)) == ["a", "b"]


def test_equal_names_are_kept_apart():
    table = TensorTable()
    for _ in range(3):
        table.add_torch(torch.ones(1), "a.b")
    assert [spec.name for spec in table.finish()[0]] == ["a.b", "a.b~2", "a.b~3"]


@pytest.mark.parametrize("limit", [0xFFFFFFFF, 1, 300])
def test_zip_tools_find_no_fault_also_with_64_bit_fields(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(checkpoint_archive, "ZIP64_LIMIT", limit)
    path = tmp_path / "x.pt"
    tensors = {f"t{number}": torch.full((number,), float(number)) for number in range(20)}
    write(path, tensors)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert all(info.compress_type == zipfile.ZIP_STORED for info in archive.infolist())
    if shutil.which("unzip"):
        assert subprocess.run(["unzip", "-tq", path], capture_output=True, check=False).returncode == 0
    loaded = torch.load(path, weights_only=True)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_a_flipped_bit_is_found_by_zip_tools(tmp_path):
    path = tmp_path / "x.pt"
    layout, _ = write(path, {"x": torch.ones(100)})
    content = bytearray(path.read_bytes())
    content[layout.storage_offsets[0] + 7] ^= 1
    path.write_bytes(content)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() == "archive/data/0"


def test_records_are_aligned_and_equal_states_make_equal_files(tmp_path):
    tensors = {"a": torch.ones(3, dtype=torch.int8), "b": torch.ones(5), "": torch.ones(1)}
    layout, _ = write(tmp_path / "1.pt", tensors)
    write(tmp_path / "2.pt", {name: tensor.clone() for name, tensor in tensors.items()})
    assert all(offset % 64 == 0 for offset in layout.storage_offsets)
    assert (tmp_path / "1.pt").read_bytes() == (tmp_path / "2.pt").read_bytes()


def test_an_image_of_many_chunks_is_hashed_and_written_whole(tmp_path):
    size = 9 * (1 << 20) + 123
    staging = StagingBuffer(open_anonymous_file())
    image = staging.view(size + 4096)
    image[:size] = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    writer = ImageFile(image, size, tmp_path / "x", (CrcRecord(100, 5 * (1 << 20), size - 8, size - 4),))
    digest = writer.hash()
    writer.finish()
    writer.close()
    assert hash_file(tmp_path / "x", from_disk=True) == digest
    assert (tmp_path / "x").read_bytes() == image[:size].tobytes()
    staging.close()


@pytest.mark.parametrize("has_records", [False, True])
def test_a_bit_that_is_not_as_written_is_found_wherever_it_is(tmp_path, has_records):
    size = 9 * (1 << 20) + 123
    records = (
        CrcRecord(100, 5 * (1 << 20), size - 8, size - 4),
        CrcRecord(100 + 5 * (1 << 20), 0, size - 16, size - 12),
    )
    image = np.random.default_rng(1).integers(0, 256, size + 4096, np.uint8)
    path = tmp_path / "x"
    writer = ImageFile(image, size, path, records if has_records else ())
    writer.hash()
    writer.finish()
    writer.close()
    compare_with_disk(path, writer.stretches)
    for at in (0, 99, 100, 5 * (1 << 20) + 99, 5 * (1 << 20) + 100, size - 1):
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes([image[at] ^ 4]))
            file.flush()
            with pytest.raises(CheckpointError, match=r"x: bytes \d+ to \d+ have the checksum"):
                compare_with_disk(path, writer.stretches)
            file.seek(at)
            file.write(bytes([image[at]]))
    compare_with_disk(path, writer.stretches)


def test_a_fault_while_checking_is_raised_and_leaves_no_thread(tmp_path, monkeypatch):
    def fail(*_):
        raise MemoryError("no room for a block")

    monkeypatch.setattr(checkpoint_image, "find_non_finite", fail)
    writer = ImageFile(np.zeros(8192, np.uint8), 5000, tmp_path / "x")
    writer.hash()
    with pytest.raises(MemoryError, match="no room"):
        writer.finish()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint-")]


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.empty(2, device="meta"), "meta device"),
        (type("Sub", (torch.Tensor,), {})(), "subclass"),
    ],
)
def test_tensors_that_could_not_be_restored_are_refused(tensor, words):
    with pytest.raises(CheckpointError, match=words):
        TensorTable().add_torch(tensor, "x")


@unhurried
@given(st.data())
def test_any_numpy_view_comes_back(tmp_path_factory, data):
    dtype = data.draw(st.sampled_from(["<f4", ">i2", "|u1", "<c16", "|b1"]))
    shape = data.draw(st.lists(st.integers(0, 4), max_size=3))
    array = np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape)
    index = tuple(
        slice(data.draw(st.integers(0, 2)), None, data.draw(st.sampled_from([-2, -1, 1, 2]))) for _ in shape
    )
    view = array[index] if shape else array
    path = tmp_path_factory.getbasetemp() / f"view-{np.random.default_rng().integers(1 << 60)}.pt"
    _, meta = write(path, {"view": view, "whole": array})
    restored = read(path, meta)
    torch.load(path, weights_only=True)
    path.unlink()
    assert_same(restored["view"], view)
    assert_same(restored["whole"], array)


def gate(tensor, *, may_be_infinite=False):
    table = TensorTable()
    (table.add_torch if isinstance(tensor, torch.Tensor) else table.add_numpy)(tensor, "x")
    layout = build_layout("pt", *table.finish())
    image = np.zeros(layout.size_bytes, np.uint8)
    table.copy_into(image, layout.storage_offsets)
    floats = [msgspec.structs.replace(item, may_be_infinite=may_be_infinite) for item in layout.floats]
    return find_non_finite(image, floats)


FLOATS = [name for name in TORCH_DTYPES if name.startswith(("float", "bfloat", "complex"))]


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_gate_agrees_with_torch_on_every_pattern_of_every_float(dtype):
    assert dtype in FLOAT_DTYPES
    target = getattr(torch, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        # Every exponent and the ends of every mantissa: all 1- and 2-byte patterns, a sample of the others.
        bits = (
            np.arange(65536, dtype=np.uint16) if target.itemsize <= 4 else np.arange(0, 65536, 7, np.uint16)
        )
        for value in bits[:: 1 if target.itemsize == 1 else 97] if target.itemsize > 1 else range(256):
            pattern = int(value) << (8 * (target.itemsize - 2)) if target.itemsize > 1 else value
            tensor = torch.frombuffer(
                bytearray(pattern.to_bytes(target.itemsize, "little")), dtype=torch.uint8
            )
            tensor = tensor.view(target)
            if dtype == "complex32":
                wide = tensor.view(torch.float16)
            else:
                wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
            assert gate(tensor) == ([] if bool(torch.isfinite(wide).all()) else ["x"]), hex(pattern)
            is_nan = bool(torch.isnan(wide).any())
            assert gate(tensor, may_be_infinite=True) == (["x"] if is_nan else []), hex(pattern)


def test_large_finite_values_whose_sum_overflows_are_finite():
    assert gate(torch.full((1000,), 3e38)) == []
    assert gate(np.full(1000, 1e308)) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_one_bad_value_at_the_very_end_is_found(dtype):
    tensor = torch.ones(300_001, dtype=getattr(torch, dtype))
    assert gate(tensor) == []
    tensor[-1] = float("-inf")
    assert gate(tensor) == ["x"]


def test_values_beside_a_view_do_not_count():
    base = torch.tensor([1.0, float("nan"), 2.0, float("nan"), 3.0])
    assert gate(base[::2]) == []
    assert gate(base[::1]) == ["x"]


def test_integers_and_arrays_torch_lacks_are_judged_rightly():
    assert gate(torch.full((4,), -1)) == []
    assert gate(np.array([np.inf], np.longdouble)) == ["x"]
    assert gate(np.array([np.nan], ">f4")) == ["x"]
    assert gate(np.array([1.0], ">f4")) == []


def test_float_ranges_cross_the_process_line_unchanged():
    import msgspec

    item = FloatRange("x", "float32", 64, (2, 3), (12, 4))
    assert msgspec.json.decode(msgspec.json.encode(item), type=FloatRange) == item


def test_the_formats_need_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import gen_worker.trainer.checkpoints.writing.writer, gen_worker.trainer.artifacts\n"
        "assert 'pyarrow' not in sys.modules and 'httpx' not in sys.modules\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
