"""Memory that a step frees stays with the worker, since the next step asks for as much again.

glibc gives the top of its heap back to the system when more than a few MB of it are free, and maps larger blocks afresh
each time. A training step frees its gradients and activations, so each step pays for page faults and zeroed pages.
"""

import ctypes
import sys
from collections.abc import Mapping

# Of malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
TRIM_THRESHOLD_BYTES = 1 << 30  # what may be free at the top of the heap
MMAP_THRESHOLD_BYTES = 32 << 20  # the largest that glibc takes; larger blocks are mapped as ever
# Where one of these is set, somebody has decided it.
SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


def keep_freed_memory(environ: Mapping[str, str]) -> bool:
    """False where nothing was changed: another C library, or settings of the user's own."""
    is_settled = any(environ.get(name) for name in SETTINGS)
    if sys.platform != "linux" or is_settled or "glibc.malloc" in environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl
        return False
    return bool(
        mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES) and mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)
    )
