"""CRC-32 of large data, without what isal's leaves behind.

isal returns with the upper halves of the vector registers in use. Until they are cleared, instructions of older kinds
are slow in this thread: SHA-256 takes a third longer (AMD EPYC, OpenSSL 3). A vector loop of numpy clears them.
"""

from typing import Any

import numpy as np
from isal import isal_zlib

_ZEROS = np.zeros(64, np.float32)
_UNUSED = np.zeros(64, np.float32)  # several threads may write to it: always the same


def crc32(data: Any, value: int = 0) -> int:
    """As `zlib.crc32`, of any buffer."""
    checksum: int = isal_zlib.crc32(data, value)
    np.add(_ZEROS, _ZEROS, out=_UNUSED)
    return checksum
