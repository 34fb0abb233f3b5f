"""A file is written whole or not at all, and of several writers one succeeds."""

import os
import stat
import threading

import pytest

from gen_worker.contract.files.durable import (
    create_file,
    make_folder,
    remove_leftovers,
    replace_file,
    replacing,
    sync_path,
    temporary_path,
)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "record.json"
    path.write_text("old")
    replace_file(path, b"new", mode=0o600)
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert names(tmp_path) == ["record.json"]


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "record.json"
    path.write_text("old")
    with pytest.raises(TypeError), replacing(path) as file:
        file.writelines([b"half", None])
    assert path.read_text() == "old"
    assert names(tmp_path) == ["record.json"]


def test_a_full_disk_at_the_sync_leaves_the_old_file(tmp_path, monkeypatch):
    def full_disk(fd):
        raise OSError(28, "No space left on device")

    path = tmp_path / "record.json"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"new", sync="file")
    assert path.read_text() == "old"
    replace_file(path, b"unsynced", sync="none")
    assert path.read_bytes() == b"unsynced"
    assert names(tmp_path) == ["record.json"]


def test_of_several_who_create_a_file_one_succeeds(tmp_path):
    path = tmp_path / "claim"
    results = []
    threads = [
        threading.Thread(target=lambda one=one: results.append((create_file(path, b"%d" % one), one)))
        for one in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = [one for is_first, one in results if is_first]
    assert path.read_bytes() == b"%d" % winner
    assert names(tmp_path) == ["claim"]


def test_folders_are_made_with_their_parents(tmp_path):
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    sync_path(tmp_path / "a")
    assert (tmp_path / "a" / "b").is_dir()


def test_leftovers_of_killed_processes_are_removed_and_what_is_no_file_is_left_alone(tmp_path):
    left = temporary_path(tmp_path / "live.json")
    other = temporary_path(tmp_path / "other.json")
    folder = temporary_path(tmp_path / "live.json")
    link = temporary_path(tmp_path / "live.json")
    target = tmp_path / "target"
    for path in (left, other, target):
        path.touch()
    folder.mkdir()
    link.symlink_to(target)
    remove_leftovers(tmp_path, "live.json")
    assert sorted(tmp_path.iterdir()) == sorted([other, folder, target])
    remove_leftovers(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([folder, target])
