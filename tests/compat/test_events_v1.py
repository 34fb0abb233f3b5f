"""The event file of an earlier release is continued, not restarted."""

import json
import shutil
from pathlib import Path

from gen_worker.trainer import TrainingReporter

SHIPPED = Path(__file__).with_name("events_v1.jsonl")


def test_a_v1_file_goes_on_with_the_next_number_and_attempt(tmp_path: Path) -> None:
    path = Path(shutil.copy(SHIPPED, tmp_path / "events.jsonl"))
    reporter = TrainingReporter(path, run_id="compat")
    reporter.completed(2)
    reporter.close()
    lines = path.read_text().splitlines()
    assert lines[:4] == SHIPPED.read_text().splitlines()
    event = json.loads(lines[4])
    assert (event["seq"], event["attempt"], event["schema_version"]) == (5, 2, "trainer_event.v1")


def test_what_is_written_today_has_the_shape_that_was_shipped(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    reporter = TrainingReporter(path, run_id="compat")
    reporter.started(trainer="m:T", name=None, pid=1, host="h", max_steps=2, epochs=None)
    reporter.metric("train/loss", 0.5, 1)
    reporter.metrics(2, {"train/loss": float("nan"), "train/lr": 0.1})
    reporter.failed(step=2, category="cancelled", error="cancelled by SIGTERM")
    reporter.close()
    today = [json.loads(line) for line in path.read_text().splitlines()]
    shipped = [json.loads(line) for line in SHIPPED.read_text().splitlines()]
    for event in [*today, *shipped]:
        event.pop("timestamp_ms")
    for new, old in zip(today, shipped, strict=True):  # fields may be added, none may go
        assert {name: new[name] for name in old} == old
