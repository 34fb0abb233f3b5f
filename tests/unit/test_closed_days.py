"""Days that are over are compressed, and at no moment is a line in neither file."""

import gzip
import json
import os
from pathlib import Path

import pytest
from logged_runs import DAY_MS, NOON_MS, LoggedRuns, read_whole_lines

from gen_worker.contract import failpoints
from trn.core.home import LogFolder
from trn.daemon.outlets.closed_days import ClosedDays, compress


def closed_days(*folders: Path, now_ms: int = NOON_MS) -> ClosedDays:
    return ClosedDays(
        folders=lambda: [LogFolder(folder) for folder in folders],
        min_free_bytes=0,
        clock_ms=lambda: now_ms,
    )


def write(root: Path, run_id: str, *, days_ago: int, text: str = "line\n") -> Path:
    path = LogFolder(root).run(run_id, NOON_MS - days_ago * DAY_MS)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*") if path.is_file())


def test_files_of_closed_days_are_compressed_and_no_others(tmp_path: Path) -> None:
    for days_ago in range(5):
        write(tmp_path / "home", f"day-{days_ago}", days_ago=days_ago)
    write(tmp_path / "home", "day-4.7", days_ago=4)
    write(tmp_path / "other", "elsewhere", days_ago=40)
    write(tmp_path / "home", "full", days_ago=9).with_name("full~1.log.jsonl").write_text("line\n")
    (tmp_path / "home" / "notes").mkdir()
    (tmp_path / "home" / "notes" / "a.log.jsonl").write_text("not ours\n")
    days = closed_days(tmp_path / "home", tmp_path / "other", tmp_path / "gone")
    while days.step():
        pass
    assert names(tmp_path) == [
        "a.log.jsonl",
        "day-0.log.jsonl",
        "day-1.log.jsonl",
        "day-2.log.jsonl.gz",
        "day-3.log.jsonl.gz",
        "day-4.7.log.jsonl.gz",
        "day-4.log.jsonl.gz",
        "elsewhere.log.jsonl.gz",
        "full.log.jsonl.gz",
        "full~1.log.jsonl.gz",
    ]
    [packed] = (tmp_path / "other").rglob("*.gz")
    assert gzip.decompress(packed.read_bytes()) == b"line\n"


@pytest.mark.parametrize("name", ["logs.zip_written", "logs.zip_renamed"])
def test_a_kill_while_a_file_is_compressed_loses_and_doubles_nothing(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, "a", days_ago=3, text="one\ntwo\n")
    pid = os.fork()
    if pid == 0:
        failpoints.arm(f"{name}=kill")
        compress(path)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status)
    assert path.read_text() == "one\ntwo\n"
    days = closed_days(tmp_path)
    while days.step():
        pass
    assert names(tmp_path) == ["a.log.jsonl.gz"]
    assert gzip.decompress(path.with_name("a.log.jsonl.gz").read_bytes()) == b"one\ntwo\n"


def test_a_compressed_file_is_not_replaced_by_one_that_a_clock_set_back_has_begun(tmp_path: Path) -> None:
    path = write(tmp_path, "a", days_ago=3)
    compress(path)
    path.write_text("another line\n")
    days = closed_days(tmp_path)
    while days.step():
        pass
    assert path.read_text() == "another line\n"
    assert gzip.decompress(path.with_name("a.log.jsonl.gz").read_bytes()) == b"line\n"


def test_a_full_disk_leaves_the_plain_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, "a", days_ago=3)
    failpoints.arm("logs.zip_written=enospc")
    try:
        assert not closed_days(tmp_path).step()
    finally:
        failpoints.arm("")
    assert path.read_text() == "line\n"
    assert "cannot be compressed" in caplog.text


def test_lines_of_a_run_are_all_there_after_its_days_were_closed(tmp_path: Path) -> None:
    runs = LoggedRuns(tmp_path / "home")
    runs.submit("a")
    runs.start("a")
    for _ in range(4):
        runs.say("a", "metric")
        runs.copy()
        runs.now_ms += DAY_MS
    days = closed_days(runs.home.logs.root, now_ms=runs.now_ms)
    while days.step():
        pass
    runs.say("a", "completed")
    runs.copy()  # the next daemon: it does not take the closed ones for missing
    lines: list[bytes] = []
    for day in range(5):
        path = runs.home.logs.run("a", NOON_MS + day * DAY_MS)
        packed = path.with_name(f"{path.name}.gz")
        assert path.exists() != packed.exists()
        lines += (
            gzip.decompress(packed.read_bytes()).splitlines() if packed.exists() else read_whole_lines(path)
        )
    assert [json.loads(line)["seq"] for line in lines] == [1, 2, 3, 4, 5]
    runs.close()
