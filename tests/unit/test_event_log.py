"""Claims about the event file: ordered, whole, bounded, recovered."""

import contextlib
import errno
import json
import os
import socket
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gen_worker.contract import failpoints
from gen_worker.errors import LeaseHeldError, StartupError
from gen_worker.trainer.events import event_log
from gen_worker.trainer.events.event_log import EventLog
from gen_worker.trainer.events.event_tail import read_tail


def line(seq: int, run_id: str = "r", attempt: int = 1, **fields: object) -> bytes:
    return json.dumps({"seq": seq, "run_id": run_id, "attempt": attempt, **fields}).encode() + b"\n"


def seqs(path: Path) -> list[int]:
    return [json.loads(text)["seq"] for text in path.read_bytes().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics" / "events.jsonl"


def test_numbers_are_gapless_across_attempts(path: Path) -> None:
    for attempt in (1, 2, 3):
        log = EventLog(path, run_id="r")
        assert log.attempt == attempt
        for _ in range(5):
            log.append(lambda seq, attempt=attempt: line(seq, attempt=attempt))
        log.close()
    assert seqs(path) == list(range(1, 16))


@settings(max_examples=60, deadline=None)
@given(
    num_events=st.integers(0, 30),
    cut=st.integers(0, 400),
    garbage=st.binary(max_size=60),
    pad=st.integers(0, 200),
)
def test_a_file_cut_anywhere_is_continued_after_its_last_whole_event(
    tmp_path_factory: pytest.TempPathFactory, num_events: int, cut: int, garbage: bytes, pad: int
) -> None:
    path = tmp_path_factory.mktemp("events") / "events.jsonl"
    whole = [line(seq, text="x" * pad) for seq in range(1, num_events + 1)]
    content = b"".join(whole)
    content = content[: max(0, len(content) - cut)] + garbage
    path.write_bytes(content)
    survivors = 0
    for text in content.split(b"\n")[:-1]:
        try:
            survivors = max(survivors, json.loads(text)["seq"])
        except (ValueError, KeyError, TypeError):
            continue
    log = EventLog(path, run_id="r")
    log.append(lambda seq: line(seq, attempt=2))
    log.close()
    events = [json.loads(text) for text in path.read_bytes().splitlines() if text.startswith(b"{")]
    assert events[-1]["seq"] == survivors + 1
    assert path.read_bytes().endswith(b"\n")


def test_a_tail_longer_than_one_block_is_found(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(line(1) + line(2, text="y" * 300_000) + b'{"seq": 3, "half')
    tail = read_tail(path)
    assert (tail.last_seq, tail.damaged_bytes) == (2, len(b'{"seq": 3, "half'))


def test_whole_lines_that_are_not_events_are_set_aside_not_lost(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(line(1) + b"\0" * 100 + b"\n")
    EventLog(path, run_id="r").close()
    assert seqs(path) == [1]
    assert path.with_name("events.jsonl.damaged-after-1").read_bytes() == b"\0" * 100 + b"\n"


def test_a_second_writer_is_refused(path: Path) -> None:
    log = EventLog(path, run_id="r")
    with pytest.raises(LeaseHeldError, match="another worker"):
        EventLog(path, run_id="r")
    log.close()


def test_the_file_of_another_run_is_refused_and_untouched(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(line(1, run_id="other"))
    with pytest.raises(StartupError, match="'other'"):
        EventLog(path, run_id="r")
    assert path.read_bytes() == line(1, run_id="other")


def test_a_reader_never_sees_half_a_line_as_an_event(path: Path) -> None:
    log = EventLog(path, run_id="r", write_every_s=0.001)
    seen = 0
    for _ in range(2000):
        log.append(lambda seq: line(seq, text="z" * 100))
        if path.exists():
            whole = path.read_bytes().rpartition(b"\n")[0]
            seen = max(seen, len(whole.splitlines()))
    log.close()
    assert seqs(path) == list(range(1, 2001))
    assert seen <= 2000


def test_a_disk_that_does_not_keep_up_costs_counted_metric_events_and_nothing_else(path: Path) -> None:
    log = EventLog(path, run_id="r", max_pending_bytes=1000, write_every_s=3600)
    kept = [log.append(lambda seq: line(seq, text="m" * 50), may_drop=True) for _ in range(200)]
    important = log.append(line)
    assert log.take_num_dropped() == kept.count(None) > 0
    assert important is not None
    log.close()
    assert seqs(path) == list(range(1, important + 1))


def test_a_full_disk_gives_up_the_reserve_for_the_terminal_event(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog(path, run_id="r", write_every_s=3600)
    reserve = path.with_name(".events.jsonl.reserve")
    assert reserve.stat().st_size > 10_000
    real_write = os.write

    def write(fd: int, data: bytes) -> int:
        if reserve.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(fd, data)

    monkeypatch.setattr(os, "write", write)
    log.append(line)
    log.append_last(line)
    monkeypatch.undo()
    log.close()
    assert seqs(path) == [1, 2]


def test_a_limit_that_is_set_during_a_write_leaves_no_half_line_before_the_last_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of the line never fits: only what is cut off makes room for the terminal event."""
    log = EventLog(path, run_id="r", write_every_s=3600)
    log.append(line)
    log.flush()
    real_write, limit = os.write, path.stat().st_size + 300

    def write(fd: int, data: bytes) -> int:
        room = limit - os.fstat(fd).st_size
        if room <= 0:
            raise OSError(errno.EFBIG, "File too large")
        return real_write(fd, data[:room])

    monkeypatch.setattr(os, "write", write)
    log.append(lambda seq: line(seq, text="m" * 400))
    log.append_last(lambda seq, **_: line(seq, last=True))
    log.close()
    monkeypatch.undo()
    events = [json.loads(text) for text in path.read_bytes().splitlines()]
    assert [event["seq"] for event in events] == [1, 2]
    assert events[-1]["last"] is True


def test_after_sync_runs_only_once_the_line_is_on_disk(path: Path) -> None:
    log = EventLog(path, run_id="r", write_every_s=3600)
    failpoints.arm("events.write=enospc")
    told: list[int] = []
    try:
        log.append_synced(line, then=lambda: told.append(len(path.read_bytes())))
        log.close()  # the first try fails, closing tries again
    finally:
        failpoints.arm("")
    assert told == [len(line(1))]


def test_a_backlog_larger_than_the_reserve_gives_way_to_the_terminal_event(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog(path, run_id="r", write_every_s=3600)
    log.append(line)
    log.flush()
    reserve = path.with_name(".events.jsonl.reserve")
    real_write = os.write
    room = {"bytes": 250}  # what the disk still takes once the reserve is gone
    for _ in range(50):
        log.append(lambda seq: line(seq, text="m" * 60), may_drop=True)

    def write(fd: int, data: bytes) -> int:
        if reserve.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        if len(data) > 2000:
            if room["bytes"] > 0:
                taken, room["bytes"] = room["bytes"], 0
                return real_write(fd, data[:taken])
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(fd, data)

    monkeypatch.setattr(os, "write", write)
    log.append_last(lambda seq, **_: line(seq, last=True))
    assert log.append(line) is None, "nothing follows the terminal event"
    monkeypatch.undo()
    log.close()
    events = [json.loads(text) for text in path.read_bytes().splitlines()]
    assert events[-1]["last"] is True
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert len(events) < 52


@pytest.mark.parametrize("num_begun", [0, 20])
def test_a_disk_with_room_again_for_a_moment_gets_the_terminal_event_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, num_begun: int
) -> None:
    """The log's own thread may write, wholly or in part, while `append_last` decides to give up the backlog."""
    log = EventLog(path, run_id="r", write_every_s=3600)
    log.append(line)
    log.flush()
    real_write, room = os.write, [0]

    def write(fd: int, data: bytes) -> int:
        if not room:
            return real_write(fd, data)
        taken = data[: room[0]]
        room[0] = 0
        if not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(fd, taken)

    def in_between() -> None:
        room[0] = num_begun or len(line(2))
        log._flush_and_note()
        room.clear()

    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(event_log, "_lift_size_limit", in_between)
    log.append_last(lambda seq, **_: line(seq))
    monkeypatch.undo()
    log.close()
    assert seqs(path) == [1, 2]


def test_the_last_step_is_that_of_the_last_event_that_has_one(tmp_path: Path) -> None:
    lines = [
        b'{"seq":1,"attempt":1,"event":"started","run_id":"r"}',
        b'{"seq":2,"attempt":1,"event":"metric","run_id":"r","step":40}',
        b'{"seq":3,"attempt":1,"event":"log","run_id":"r","message":"m"}',
    ]
    (tmp_path / "events.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    tail = read_tail(tmp_path / "events.jsonl")
    assert (tail.last_event, tail.last_step) == ("log", 40)


def test_the_daemon_is_woken_only_after_a_sync(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it reads it tells others, who may count on it after a power cut."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bell:
        address = f"{folder}/bell"
        bell.bind(address)
        bell.setblocking(False)
        rung_before_sync: list[bytes] = []
        sync = os.fsync

        def sync_and_look(fd: int) -> None:
            with contextlib.suppress(BlockingIOError):
                rung_before_sync.append(bell.recv(100))
            sync(fd)

        log = EventLog(path, run_id="r", doorbell=address)
        monkeypatch.setattr(event_log.os, "fsync", sync_and_look)
        told = threading.Event()
        log.append_synced(line, then=told.set)
        assert told.wait(60)
        assert bell.recv(100) == b"r"
        assert rung_before_sync == []
        log.close()
