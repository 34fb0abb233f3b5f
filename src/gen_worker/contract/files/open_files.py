"""The limit on open files. Shells give 1,024, which as many connections use up."""

import contextlib
import resource


def raise_open_files(most: int) -> tuple[int, int]:
    """Raise the limit of this process, at most to so many: (before, now). Processes that it starts inherit it."""
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before == resource.RLIM_INFINITY:
        return before, most
    wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
    if wanted > before:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return before, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
