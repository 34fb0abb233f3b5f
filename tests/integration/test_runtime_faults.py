"""Rarer ways for an attempt to go wrong: each ends with one terminal event, the right code, and sound checkpoints."""

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from worker_process import DEADLINE_S, Run, write_rows

from gen_worker.contract.checkpoints.choice import scan


def last(run: Run) -> dict[str, Any]:
    run.check_invariants()
    return run.events()[-1]


def test_a_sample_hook_that_fails_half_way_spoils_no_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", trainer="counting:EmaSampling", mock_batches=[1, 2, 3], sample_every=2)
    assert run.work().returncode == 14
    assert "sampling went wrong" in last(run)["error"]
    assert scan(run.checkpoints)[0] == []


def test_what_save_checkpoint_returns_comes_back_even_without_files(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", trainer="counting:PayloadOnly", mock_batches=[1, 2, 3], metric_every=1)
    run.job["hyperparams"] = {"do": "sigterm", "at_step": 2}
    assert run.work().returncode == 75
    run.job["hyperparams"] = {}
    assert run.work().returncode == 0
    assert run.losses()[3] == 2000.0 + 6.0


def test_a_child_that_the_author_forked_ends_with_the_worker(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", trainer="counting:Forking", mock_batches=[1, 2])
    process = run.start()
    _, err = process.communicate(timeout=DEADLINE_S)  # would wait for the child's 600 s
    assert process.returncode == 0, err
    assert last(run)["event"] == "completed"


def test_an_isolated_child_that_is_killed_gets_its_terminal_event_from_the_parent(tmp_path: Path) -> None:
    run = Run(
        tmp_path / "run",
        mock_batches=list(range(1, 11)),
        metric_every=1,
        checkpoint_every=2,
        hyperparams={"do": "kill", "at_step": 6},
    )
    done = run.work(TRAINER_ISOLATED="1")
    assert done.returncode == 14, done.stderr
    event = last(run)
    assert (event["event"], event["category"], event["attempt"]) == ("failed", "train-step", 1)
    assert "SIGKILL" in event["error"]
    run.job["hyperparams"] = {}
    assert run.work(TRAINER_ISOLATED="1").returncode == 0
    assert last(run)["attempt"] == 2
    assert run.losses()[10] == 55.0


def test_an_isolated_run_whose_data_is_broken_says_so_in_its_events(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", max_steps=3, dataset={"parquet_paths": ["broken.parquet"], "batch_size": 2})
    (run.folder / "broken.parquet").write_bytes(b"PAR1 this is no parquet PAR1")
    assert run.work(TRAINER_ISOLATED="1").returncode == 11
    assert (last(run)["category"], [event["event"] for event in run.events()]) == (
        "input",
        ["started", "failed"],
    )


def test_a_text_that_utf8_cannot_say_still_reaches_the_terminal_event(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", trainer="counting:Speaking", mock_batches=[1])
    run.job["hyperparams"] = {"text": "caf\\udce9.png"}
    assert run.work().returncode == 14
    assert "caf\\udce9.png" in last(run)["error"]


def test_a_secret_in_an_address_is_in_no_log_and_no_event(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", trainer="counting:Speaking", mock_batches=[1])
    run.job["hyperparams"] = {"text": "GET https://host/x?sig=TOPSECRET failed"}
    done = run.work()
    assert "Traceback" in done.stderr
    assert "TOPSECRET" not in done.stderr.replace(json.dumps(run.job), "")
    assert "TOPSECRET" not in run.events_path.read_text()


@pytest.mark.parametrize(
    ("mistake", "words"), [("sets the context", "read-only"), ("result", "StepResult.metrics is float")]
)
def test_a_mistake_of_the_author_is_not_called_a_fault_of_the_worker(
    tmp_path: Path, mistake: str, words: str
) -> None:
    run = Run(tmp_path / "run", trainer="counting:Careless", mock_batches=[1], metric_every=1)
    run.job["hyperparams"] = {"mistake": mistake}
    done = run.work()
    assert done.returncode == 14
    assert words in last(run)["error"]
    assert "please report" not in done.stderr


def test_a_checkpoint_this_release_cannot_read_is_not_trained_over(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", mock_batches=[1, 2, 3])
    assert run.work().returncode == 0
    meta = run.checkpoints / "final.meta.json"
    meta.write_text(meta.read_text().replace("trainer_checkpoint.v1", "trainer_checkpoint.v9"))
    before = meta.read_bytes()
    done = run.work()
    assert done.returncode == 11
    assert "none of the 1 checkpoints" in done.stderr
    assert meta.read_bytes() == before


def test_a_final_save_that_fails_is_a_fault_of_training_and_what_was_saved_before_stands(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path / "run", mock_batches=[1, 2, 3, 4], checkpoint_every=2, metric_every=1)
    done = run.work(GEN_WORKER_FAILPOINTS="checkpoint.data_written=enospc@3")
    assert done.returncode == 14, done.stderr
    assert last(run)["category"] == "train-step"
    assert run.work().returncode == 0
    assert run.losses()[4] == 10.0


def test_data_named_by_ref_alone_needs_no_dataset_section(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", max_steps=2, inputs={"dataset_parquet_refs": ["rows.parquet"]})
    write_rows(run.folder / "rows.parquet")
    done = run.work()
    assert done.returncode == 0, done.stderr


def test_a_cancel_file_that_cannot_be_looked_for_stops_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", mock_batches=[1, 2])
    done = run.work(TRAINER_CANCEL_FILE="/" + "x" * 300)
    assert done.returncode == 0, done.stderr


def test_folders_that_cannot_be_written_are_named_without_a_traceback(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", mock_batches=[1])
    (run.folder / "a-file").touch()
    (run.folder / "a-folder").mkdir()
    for name, value in (
        ("TRAINER_CHECKPOINTS_DIR", run.folder / "a-file" / "checkpoints"),
        ("TRAINER_EVENTS_PATH", run.folder / "a-folder"),
    ):
        done = run.work(**{name: str(value)})
        assert done.returncode == 10, done.stderr
        assert str(value) in done.stderr
        assert "Traceback" not in done.stderr


def test_a_stop_during_the_imports_is_answered_with_a_terminal_event(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", mock_batches=[1, 2])
    process = run.start()
    _wait_for_handler(process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=DEADLINE_S)
    if process.returncode != 0:  # it may have been done before the signal came
        assert process.returncode == 75, err
        assert last(run)["category"] == "cancelled"


def _wait_for_handler(process: "subprocess.Popen[str]") -> None:
    """Until the process catches SIGTERM: bit 14 of SigCgt."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline and process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        if int(status.partition("SigCgt:")[2].split()[0], 16) >> (signal.SIGTERM - 1) & 1:
            return
        time.sleep(0.001)
