"""Open files that no forked child keeps: a lock, or the end of a connection, would live on with it.

A DataLoader's workers are forks and may outlive the run. In a child these descriptors lead to /dev/null: their numbers
stay taken, so that nothing else gets one that somebody here may still close.
"""

import os

_kept: set[int] = set()


def keep_from_children(fd: int) -> None:
    """From now on. What is handed over on purpose (`pass_fds`, a socket) is not touched."""
    _kept.add(fd)


def no_longer_open(fd: int) -> None:
    """Call it before closing: the number may be given to another file at once."""
    _kept.discard(fd)


def _let_go() -> None:
    if not _kept:
        return
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in _kept:
        os.dup2(null, fd, inheritable=False)
    os.close(null)
    _kept.clear()


os.register_at_fork(after_in_child=_let_go)
