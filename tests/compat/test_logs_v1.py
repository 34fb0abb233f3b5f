"""Lines of the logs as they were first released: fields may be added, none may go or mean something else."""

import json
from pathlib import Path
from typing import Any

from trn.core.causes import Cause
from trn.core.runs import RunRecord, RunState
from trn.daemon.outlets.log_lines import OutputLine, encode_lines, job_ended, job_submitted

SHIPPED = Path(__file__).with_name("logs_v1.jsonl")

RUN = RunRecord(
    run_id="compat",
    digest="d1",
    state=RunState.COMPLETED,
    cause=Cause(values={"text": "completed"}),  # the words of that release
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


def output_line(*, offset: int, size_bytes: int, message: str, is_partial: bool = False) -> OutputLine:
    return OutputLine(
        run_id="compat",
        attempt=2,
        offset=offset,
        size_bytes=size_bytes,
        is_partial=is_partial,
        message=message,
        timestamp_ms=1794790850000,
    )


def test_what_is_written_today_has_the_shape_that_was_shipped() -> None:
    today = [
        job_submitted(RUN, "/home/runs/compat"),
        encode_lines([output_line(offset=40, size_bytes=17, message="saved \\xff to disk")]),
        encode_lines([output_line(offset=57, size_bytes=16384, message="an endless line", is_partial=True)]),
        job_ended(RUN, "/home/runs/compat", "/home/runs/compat/checkpoints/final.meta.json"),
    ]
    shipped = SHIPPED.read_bytes().splitlines(keepends=True)
    for new, old in zip(today, shipped, strict=True):
        fields: dict[str, Any] = json.loads(new)
        known: dict[str, Any] = json.loads(old)
        assert {name: fields[name] for name in known} == known
