"""Claims about events v1."""

import errno
import json
import math
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from gen_worker.contract.sizes import MAX_EVENT_BYTES
from gen_worker.errors import Category
from gen_worker.trainer.events.event_lines import EventLine
from gen_worker.trainer.events.event_log import LAST_LINE_BYTES, EventLog
from gen_worker.trainer.reporting import TrainingReporter


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def test_every_event_starts_with_the_fields_of_the_contract(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    reporter = TrainingReporter(path, run_id="r1", clock_ms=lambda: 1234)
    reporter.started(trainer="m:T")
    reporter.heartbeat(3)
    reporter.metric("train/loss", 0.5, 3)
    reporter.metrics(4, {"train/loss": 0.25, "train/lr": 0.1})
    reporter.validation(4, {"val/loss": 1.0}, rows=10)
    reporter.checkpoint("a.pt", 4)
    reporter.sample("s.png", 4)
    reporter.video("v.mp4", 4)
    reporter.log("hello")
    assert reporter.completed(4, "final.pt")
    reporter.close()
    found = events(path)
    assert [event["event"] for event in found] == [
        "started",
        "heartbeat",
        "metric",
        "metrics",
        "validation",
        "checkpoint",
        "sample",
        "video",
        "log",
        "completed",
    ]
    for number, event in enumerate(found, start=1):
        assert list(event)[:6] == ["schema_version", "event", "seq", "run_id", "attempt", "timestamp_ms"]
        assert event["schema_version"] == "trainer_event.v1"
        assert (event["seq"], event["run_id"], event["attempt"], event["timestamp_ms"]) == (
            number,
            "r1",
            1,
            1234,
        )
    assert (found[2]["name"], found[2]["value"], found[2]["step"]) == ("train/loss", 0.5, 3)
    assert found[3]["values"] == {"train/loss": 0.25, "train/lr": 0.1}
    assert found[-1]["final_checkpoint"] == "final.pt"


def test_a_value_json_cannot_say_is_a_word_and_not_null(tmp_path: Path) -> None:
    reporter = TrainingReporter(tmp_path / "e.jsonl", run_id="r")
    reporter.metric("train/loss", math.nan, 1)
    reporter.metrics(2, {"a": math.inf, "b": -math.inf, "c": 1.0})
    reporter.close()
    first, second = events(tmp_path / "e.jsonl")
    assert first["value"] == "nan"
    assert second["values"] == {"a": "inf", "b": "-inf", "c": 1.0}


def test_of_many_that_race_to_end_the_run_exactly_one_succeeds(tmp_path: Path) -> None:
    reporter = TrainingReporter(tmp_path / "e.jsonl", run_id="r")
    barrier = threading.Barrier(8)
    won: list[bool] = []

    def finish(number: int) -> None:
        barrier.wait(timeout=60)
        if number % 2:
            won.append(reporter.completed(1))
        else:
            won.append(reporter.failed(step=1, category=Category.CANCELLED, error="stop"))

    threads = [threading.Thread(target=finish, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reporter.close()
    assert sorted(won) == [False] * 7 + [True]
    assert len(events(tmp_path / "e.jsonl")) == 1


def test_a_burst_loses_nothing_silently_and_keeps_memory_bounded(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    log = EventLog(path, run_id="r", max_pending_bytes=20_000)
    reporter = TrainingReporter(path, run_id="r", log=log)
    most = 0
    for step in range(1, 30_001):
        reporter.metric("train/loss", 0.5, step)
        most = max(most, log._pending_bytes)
    reporter.completed(30_000)
    reporter.close()
    found = events(path)
    dropped = sum(event.get("num_dropped", 0) for event in found)
    assert sum(event["event"] == "metric" for event in found) + dropped == 30_000
    assert [event["seq"] for event in found] == list(range(1, len(found) + 1))
    assert most < 21_000


def test_what_a_person_may_not_read_is_taken_out(tmp_path: Path) -> None:
    reporter = TrainingReporter(
        tmp_path / "e.jsonl", run_id="r", redact=lambda text: text.replace("s3cret", "***")
    )
    reporter.log("using s3cret")
    reporter.failed(step=0, category=Category.AUTH, error="the token s3cret has expired")
    reporter.close()
    assert "s3cret" not in (tmp_path / "e.jsonl").read_text()


@pytest.mark.parametrize("category", list(Category))
def test_each_category_is_written_as_the_contract_spells_it(tmp_path: Path, category: Category) -> None:
    reporter = TrainingReporter(tmp_path / "e.jsonl", run_id="r")
    reporter.failed(step=7, category=category, error="why")
    reporter.close()
    (event,) = events(tmp_path / "e.jsonl")
    assert (event["step"], event["category"], event["error"]) == (7, category.value, "why")


def test_a_text_that_is_no_unicode_is_cut_like_any_other() -> None:
    cut: list[EventLine] = []
    line = EventLine(
        {"event": "failed", "seq": 0}, {"error": "\udc80" * MAX_EVENT_BYTES, "step": 3}, cut.append
    )
    encoded = line.encode(7)
    assert cut == [line]
    assert len(encoded) <= MAX_EVENT_BYTES
    assert (json.loads(encoded)["seq"], json.loads(encoded)["step"]) == (7, 3)


@pytest.mark.parametrize("text", ["x", "\x00", "é", "\U0001f600"], ids=ascii)
def test_no_line_is_longer_than_a_reader_takes_and_the_log_has_what_was_cut(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "events.jsonl"
    reporter = TrainingReporter(path, run_id="r")
    long = text * (MAX_EVENT_BYTES + 100_000)
    reporter.log(long)
    reporter.metric(long, 1.0, step=1)
    reporter.metrics(1, {f"{number}{long[:40_000]}": float(number) for number in range(60)})
    reporter.checkpoint("p", 1, note=long, list=[long], other=long)
    reporter.failed(step=1, error=f"begin {long}", category=Category.TRAIN_STEP)
    reporter.close()
    lines = path.read_bytes().splitlines(keepends=True)
    assert max(map(len, lines)) <= MAX_EVENT_BYTES
    found = events(path)
    assert [event["seq"] for event in found] == list(range(1, len(found) + 1))
    values = [name for event in found for name in event.get("values", {})]
    assert len(values) == 60, "many long names are several events"
    failed = found[-1]
    assert failed["error"].startswith("begin ")
    assert f"[cut: {len(long) + 6} characters in all" in failed["error"]
    assert failed["cut"] == ["error"]
    assert any(record.args and f"begin {long}" in record.args for record in caplog.records)


def test_on_a_full_disk_the_last_line_is_as_short_as_the_reserve_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    reporter = TrainingReporter(path, run_id="r")
    reporter.flush()
    write, room = os.write, path.stat().st_size + LAST_LINE_BYTES

    def write_a_little(fd: int, data: bytes) -> int:
        nonlocal room
        if len(data) > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        room -= len(data)
        return write(fd, data)

    monkeypatch.setattr(os, "write", write_a_little)
    reporter.failed(step=1, error="x" * 500_000)
    reporter.close()
    (event,) = events(path)
    assert "[cut: 500000 characters" in event["error"]
