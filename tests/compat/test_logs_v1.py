"""Lines of the logs as they were first released: fields may be added, none may go or mean something else."""

import json
from pathlib import Path
from typing import Any

from trn.core.runs import RunRecord, RunState
from trn.daemon.outlets.log_lines import Mark, job_ended, job_submitted, output_line, read_mark

SHIPPED = Path(__file__).with_name("logs_v1.jsonl")

RUN = RunRecord(
    run_id="compat",
    digest="d1",
    state=RunState.COMPLETED,
    reason="completed",
    config={},
    name="a name",
    priority=3,
    parent_run_id="before",
    submitted_ms=1794790800000,
    updated_ms=1794790900000,
    ended_ms=1794790900000,
    attempt=2,
    step=10,
    end_step=10,
    metrics={"train/loss": 0.5},
    devices=("cuda:0",),
    tags={"team": "x"},
)


def test_what_is_written_today_has_the_shape_that_was_shipped() -> None:
    today = [
        job_submitted(RUN, "/home/runs/compat"),
        output_line("compat", (2, 40, 17, False, "saved \\xff to disk"), 1794790850000),
        output_line("compat", (2, 57, 16384, True, "an endless line"), 1794790850000),
        job_ended(RUN, "/home/runs/compat", "/home/runs/compat/checkpoints/final.meta.json"),
    ]
    shipped = SHIPPED.read_bytes().splitlines(keepends=True)
    for new, old in zip(today, shipped, strict=True):
        fields: dict[str, Any] = json.loads(new)
        known: dict[str, Any] = json.loads(old)
        assert {name: fields[name] for name in known} == known
        assert (
            list(fields)[-1] == "timestamp_ms"
        )  # the rest of a half line can be told from what is before it


def test_lines_of_the_first_release_are_known_again() -> None:
    marks = [read_mark(line) for line in SHIPPED.read_bytes().splitlines()]
    assert marks == [
        Mark("compat", "job", 1),
        Mark("compat", "output", 57),
        Mark("compat", "output", 57 + 16384),
        Mark("compat", "job", 2),
    ]
