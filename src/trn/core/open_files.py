"""How many files a process may have open: shells give 1,024, which a few hundred connections use up."""

import contextlib

MAX_OPEN_FILES = 65_536  # more would only slow down programs that close every number there could be


def raise_open_files(most: int = MAX_OPEN_FILES) -> tuple[int, int]:
    """Let this process open as many files as the system lets it, up to `most`. (the limit before, the limit now)"""
    import resource

    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before == resource.RLIM_INFINITY:
        return before, most
    wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
    if wanted > before:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return before, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
