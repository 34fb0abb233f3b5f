"""Keeps freed memory in the worker: by default glibc returns it, and each step pays for page faults and zeroed pages."""

import ctypes
import sys
from collections.abc import Mapping

# Of malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
TRIM_THRESHOLD_BYTES = 1 << 30  # what may be free at the top of the heap
MMAP_THRESHOLD_BYTES = 32 << 20  # the largest that glibc accepts
# The user's own settings have priority.
SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


def keep_freed_memory(environ: Mapping[str, str]) -> bool:
    """False where nothing was changed: another C library, or the user's own settings."""
    is_settled = any(environ.get(name) for name in SETTINGS)
    if sys.platform != "linux" or is_settled or "glibc.malloc" in environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl
        return False
    return bool(
        mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES) and mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)
    )
