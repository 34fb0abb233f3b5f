"""Names of element types in torch, numpy, the torch archive and safetensors. Needs no torch."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gen_worker.trainer.checkpoints.files.tensors import TensorSpec

TORCH_BY_NUMPY = {
    "|b1": "bool",
    "|i1": "int8",
    "|u1": "uint8",
    "<i2": "int16",
    "<i4": "int32",
    "<i8": "int64",
    "<u2": "uint16",
    "<u4": "uint32",
    "<u8": "uint64",
    "<f2": "float16",
    "<f4": "float32",
    "<f8": "float64",
    "<c8": "complex64",
    "<c16": "complex128",
}

# The classes a torch archive names for a storage of one element type.
STORAGE_CLASSES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}

# Element types without such a class: the archive has an untyped storage and names the dtype beside it.
UNTYPED = frozenset(
    {
        "uint16",
        "uint32",
        "uint64",
        "complex32",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    }
)

SAFETENSORS_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}

# numpy dtypes to look at the values of native floats with.
NUMPY_FLOATS = {
    "float64": "<f8",
    "float32": "<f4",
    "complex64": "<f4",
    "complex128": "<f8",
}

# (unsigned type to look at it with, bits to keep, smallest value of these that is not finite)
FLOAT_PATTERNS = {
    "float16": ("<u2", 0x7FFF, 0x7C00),
    "complex32": ("<u2", 0x7FFF, 0x7C00),
    "bfloat16": ("<u2", 0x7FFF, 0x7F80),
    "float8_e4m3fn": ("|u1", 0x7F, 0x7F),
    "float8_e5m2": ("|u1", 0x7F, 0x7C),
}

# These have one NaN and no infinity.
FLOAT_NANS = {"float8_e4m3fnuz": 0x80, "float8_e5m2fnuz": 0x80, "float8_e8m0fnu": 0xFF}

# Floats that torch does not have; numpy can judge them itself.
OTHER_NUMPY_FLOATS = frozenset(
    {">f2", ">f4", ">f8", ">c8", ">c16", "<f16", ">f16", "<c32", ">c32", "<f12", ">f12", "<c24", ">c24"}
)

FLOAT_DTYPES = (
    frozenset(NUMPY_FLOATS) | frozenset(FLOAT_PATTERNS) | frozenset(FLOAT_NANS) | OTHER_NUMPY_FLOATS
)


def torch_name(spec: "TensorSpec") -> str | None:
    """The torch dtype of these elements, or None where torch has none."""
    return spec.dtype if spec.kind == "torch" else TORCH_BY_NUMPY.get(spec.dtype)
