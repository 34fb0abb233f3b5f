"""Whatever a trainer class raises and whatever limits it runs under: exactly one terminal event, which every reader takes."""

from pathlib import Path
from typing import Any

import pytest
from worker_process import Run

from trn.daemon.ingest.event_file import MAX_LINE_BYTES, parse, read_batch, read_terminal
from trn.executors.local.files import LocalFile

KINDS = ["NoWords", "OtherWords", "Base", "Liar", "Long", "SystemExit", "GeneratorExit"]


def hostile(folder: Path, **hyperparams: Any) -> Run:
    return Run(
        folder,
        trainer="hostile:Hostile",
        mock_batches=[1, 2, 3, 4],
        metric_every=1,
        checkpoint_every=0,
        hyperparams=hyperparams,
    )


def terminal(run: Run) -> dict[str, Any]:
    run.check_invariants()
    events = run.events()
    assert [event["event"] in ("completed", "failed") for event in events].count(True) == 1
    found = read_terminal(LocalFile(run.events_path), 1)
    assert found is not None, "the daemon sees it, too"
    assert found.event == events[-1]["event"]
    return events[-1]


@pytest.mark.parametrize("place", ["configure", "train_step", "state_dict"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_class_raises_is_reported_whatever_it_is(tmp_path: Path, kind: str, place: str) -> None:
    run = hostile(tmp_path, place=place, kind=kind)
    done = run.work()
    # What lies about its class breaks the interpreter's own way out, after the report.
    assert done.returncode in ((1,) if kind == "Liar" else (13, 14)), done.stderr
    event = terminal(run)
    assert (event["event"], event["category"]) == (
        "failed",
        "model-load" if place == "configure" else "train-step",
    )
    assert kind in event["error"]
    if kind == "Long":
        assert "[cut: 1100" in event["error"]
        assert event["cut"] == ["error"]
        assert "x" * 1_100_000 in done.stderr, "the log has the whole text"


@pytest.mark.parametrize("limit_bytes", [6_000, 80_000, 200_000])
def test_below_a_file_size_limit_the_last_line_is_still_written(tmp_path: Path, limit_bytes: int) -> None:
    """Events that do not fit below it are left out; checkpoints that do not fit fail the run."""
    run = hostile(tmp_path, limit_bytes=limit_bytes, names=3_000, size=100_000)
    done = run.work()
    assert done.returncode == 14, done.stderr
    event = terminal(run)
    assert event["category"] == "train-step"
    assert "too large" in event["error"].lower(), event["error"]
    assert run.events_path.stat().st_size <= limit_bytes


def test_a_million_metrics_kill_nothing_and_no_line_is_too_long(tmp_path: Path) -> None:
    run = hostile(tmp_path, names=300_000)
    done = run.work()
    assert done.returncode == 0, done.stderr[-3000:]
    assert terminal(run)["event"] == "completed"
    names = set()
    offset, seq = 0, 0
    while True:
        batch = read_batch(LocalFile(run.events_path), offset)
        assert not batch.damaged
        chunk = parse(batch.lines, offset, seq)
        assert not chunk.damaged
        assert max(map(len, batch.lines.splitlines()), default=0) < MAX_LINE_BYTES
        for event in chunk.events:
            seq = event.seq
            names.update(name for name, _ in event.points())
        offset = batch.next_offset
        if batch.is_end:
            break
    dropped = sum(event.get("num_dropped", 0) for event in run.events("log"))
    assert dropped or len(names) >= 4 * 300_000, "all of them are there, or it says how many events are not"
