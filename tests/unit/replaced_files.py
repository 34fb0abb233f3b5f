"""What an author's code may put in the place of a file."""

import os
import shutil
import socket
from pathlib import Path

KINDS = ("fifo", "folder", "socket", "link to /dev/zero", "link to nothing", "link to a file")


def put_in_place(path: Path, kind: str) -> None:
    """Replace that file, if there is one, by something of that kind."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "socket":
            old = Path.cwd()
            os.chdir(path.parent)  # so that no path is too long
            try:
                with socket.socket(socket.AF_UNIX) as one:
                    one.bind(path.name)
            finally:
                os.chdir(old)
        case "link to /dev/zero":
            path.symlink_to("/dev/zero")
        case "link to nothing":
            path.symlink_to(path.with_name("nothing"))
        case "link to a file":
            target = path.with_name(f"{path.name}.target")
            target.write_bytes(b"{}\n")
            path.symlink_to(target)
        case _:
            raise AssertionError(kind)
