"""Descriptors that no forked child keeps: a child would keep a lock or a connection open.

A DataLoader's workers are forks and may outlive the run. In a child these descriptors become /dev/null, so that their
numbers stay in use.
"""

import os

_kept: set[int] = set()


def keep_from_children(fd: int) -> None:
    """From now on. Descriptors passed with `pass_fds` or a socket are not affected."""
    _kept.add(fd)


def no_longer_open(fd: int) -> None:
    """Call it before closing: the number may be reused at once."""
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
