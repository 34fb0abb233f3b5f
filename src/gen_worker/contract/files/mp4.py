"""Whether an MP4 file is whole, by its boxes. Nothing is decoded."""

import os


def is_whole_mp4(fd: int, size_bytes: int) -> bool:
    """Whether its boxes fill the file and one of them is the index: an encoder that was cut short leaves none."""
    position, has_index = 0, False
    while position < size_bytes:
        head = os.pread(fd, 16, position)
        if len(head) < 8:
            return False
        length, kind = int.from_bytes(head[:4], "big"), head[4:8]
        if length == 1 and len(head) == 16:
            length = int.from_bytes(head[8:16], "big")
        elif length == 0:  # up to the end of the file
            length = size_bytes - position
        if length < 8:
            return False
        has_index |= kind == b"moov"
        position += length
    return has_index and position == size_bytes
