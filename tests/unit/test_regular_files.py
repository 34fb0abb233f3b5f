"""Claims about files that others can replace: whatever is in their place, nobody waits and nobody is misled."""

import os
import socket
from pathlib import Path

import pytest
from replaced_files import KINDS, put_in_place

from gen_worker.contract.files.regular import NotRegularFileError, open_regular, read_regular


def test_a_file_is_read_whole_or_as_far_as_wanted(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    assert read_regular(path) == b"0123456789"
    assert read_regular(path, 4) == b"0123"
    assert read_regular(path, 100) == b"0123456789"
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "nowhere")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR | os.O_APPEND | os.O_CREAT])
def test_whatever_else_is_there_is_an_error_at_once(tmp_path: Path, kind: str, flags: int) -> None:
    path = tmp_path / "file"
    put_in_place(path, kind)
    num_open = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with pytest.raises(NotRegularFileError, match="expected a regular file"):
        open_regular(path, flags)
    assert len(os.listdir("/proc/self/fd")) == num_open  # noqa: PTH208


def test_a_link_is_followed_only_to_a_regular_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link", follow=True) == b"content"
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "to a fifo").symlink_to("fifo")
    with pytest.raises(NotRegularFileError, match="FIFO"):
        read_regular(tmp_path / "to a fifo", follow=True)
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(tmp_path / "socket"))
        with pytest.raises(NotRegularFileError, match="socket"):
            read_regular(tmp_path / "socket")
