"""Opens files that others can replace. Everything that reads or appends to a file of a run uses this.

Only regular files are opened, without waiting: a FIFO, device, socket, folder or link is an error at once.
"""

import errno
import os
import stat
from pathlib import Path

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
}


class NotRegularFileError(OSError):
    """The path is not a regular file."""

    def __init__(self, path: Path | str, kind: str) -> None:
        super().__init__(errno.EINVAL, f"it is {kind}, expected a regular file", str(path))
        self.path = Path(path)


def open_regular(
    path: Path | str, flags: int = os.O_RDONLY, mode: int = 0o644, *, follow: bool = False
) -> int:
    """A descriptor. NotRegularFileError; other OSErrors as `os.open`. `follow` follows a link, for files a user named."""
    guarded = flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
    _refuse_other(path, follow=follow)  # opening a device may have an effect
    try:
        fd = os.open(path, guarded, mode)
    except OSError as fault:
        if fault.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):  # replaced since
            raise NotRegularFileError(path, _kind_of(path)) from fault
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotRegularFileError(path, _kind_of(path))
    os.set_blocking(fd, True)  # it may become a stdout
    return fd


def read_regular(path: Path | str, max_bytes: int | None = None, *, follow: bool = False) -> bytes:
    """The content, or its first `max_bytes`. As `open_regular`."""
    with os.fdopen(open_regular(path, follow=follow), "rb", buffering=0) as file:
        return file.readall() if max_bytes is None else _read_up_to(file.fileno(), max_bytes)


def _read_up_to(fd: int, max_bytes: int) -> bytes:
    found = bytearray()
    while len(found) < max_bytes and (piece := os.read(fd, min(1 << 20, max_bytes - len(found)))):
        found += piece
    return bytes(found)


def _refuse_other(path: Path | str, *, follow: bool) -> None:
    try:
        found = Path(path).stat(follow_symlinks=follow)
    except FileNotFoundError:
        return
    if not stat.S_ISREG(found.st_mode):
        raise NotRegularFileError(path, kind_of_mode(found.st_mode))


def kind_of_mode(mode: int) -> str:
    """What is not a regular file, in words."""
    return _KINDS.get(stat.S_IFMT(mode), "something else")


def _kind_of(path: Path | str) -> str:
    try:
        return kind_of_mode(os.lstat(path).st_mode)
    except OSError:
        return "something else"
