"""Pictures without a library: frames padded to even sides, and a PNG of one."""

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

Frame = NDArray[np.uint8]  # (height, width, channels)

_COLOUR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}  # channels -> grey, grey and alpha, RGB, RGBA
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def pad_to_even(frame: Frame) -> Frame:
    """Browsers play only videos whose sides are even: the last row and column are repeated where they are not."""
    height, width = frame.shape[:2]
    if height % 2 == 0 and width % 2 == 0:
        return frame
    padding = [(0, height % 2), (0, width % 2), *[(0, 0)] * (frame.ndim - 2)]
    return np.pad(frame, padding, mode="edge")


def encode_png(frame: Frame) -> bytes:
    """ValueError for anything but 8 bits in 1 to 4 channels."""
    rows = frame[:, :, None] if frame.ndim == 2 else frame
    if rows.ndim != 3 or rows.dtype != np.uint8 or rows.shape[2] not in _COLOUR_TYPES or not rows.size:
        raise ValueError(f"a frame of shape {frame.shape} and {frame.dtype} is no picture")
    height, width, channels = rows.shape
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPES[channels], 0, 0, 0)
    lines = np.zeros((height, 1 + width * channels), np.uint8)  # each line begins with its filter, 0: none
    lines[:, 1:] = rows.reshape(height, width * channels)
    content = zlib.compress(lines.tobytes(), 6)
    return _SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", content) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)
