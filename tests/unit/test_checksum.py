"""CRC-32 with what isal leaves behind cleared."""

import re
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import gen_worker
from gen_worker.trainer.compute.checksum import crc32


@pytest.mark.parametrize("size_bytes", [0, 1, 63, 4096, (1 << 20) + 5])
def test_it_is_the_checksum_of_zip_files_in_any_number_of_pieces(size_bytes: int) -> None:
    content = np.random.default_rng(1).integers(0, 256, size_bytes, np.uint8)
    expected = zlib.crc32(content)
    assert crc32(memoryview(content)) == expected
    assert crc32(pa.py_buffer(content.tobytes())) == expected
    middle = size_bytes // 3
    assert crc32(content[middle:], crc32(content[:middle])) == expected


def test_nothing_else_calls_isal_directly() -> None:
    """Whoever does is right and slow: so is all that follows in that thread."""
    root = Path(gen_worker.__file__).parent
    uses = [
        path.relative_to(root).as_posix()
        for path in sorted(root.rglob("*.py"))
        if re.search(r"^\s*(from|import) isal", path.read_text(), re.MULTILINE)
    ]
    assert uses == ["trainer/compute/checksum.py"]
