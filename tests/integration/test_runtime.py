"""A worker process as an operator sees it: exit codes, events, messages, what is left in the folder."""

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from worker_process import DEADLINE_S, Run, write_rows

TERMINAL = ("completed", "failed")


def terminal(run: Run) -> dict[str, Any]:
    """The last attempt's terminal event; there is exactly one."""
    last = run.events()[-1]["attempt"]
    (event,) = [event for event in run.events(*TERMINAL) if event["attempt"] == last]
    assert event == run.events()[-1]
    return event


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run", mock_batches=list(range(1, 21)), metric_every=1, checkpoint_every=5)


def test_a_run_from_a_cold_start_tells_its_story_in_order(run: Run) -> None:
    process = run.start()
    out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out) == (0, ""), err
    kinds = [event["event"] for event in run.events()]
    assert kinds[0] == "started"
    assert kinds[-1] == "completed"
    assert kinds.count("metric") == 20
    assert terminal(run)["step"] == 20
    assert Path(terminal(run)["final_checkpoint"]).name == "final.pt"
    assert (run.checkpoints / "final.meta.json").exists()
    run.check_invariants()


def test_without_a_mode_the_worker_names_both(run: Run) -> None:
    for mode in ("", "training"):
        done = run.work(WORKER_MODE=mode)
        assert done.returncode == 10
        assert "trainer" in done.stderr
        assert "inference" in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_every_fault_of_a_job_is_told_at_once_and_nothing_is_written(run: Run) -> None:
    run.job |= {"max_step": 5, "metric_every": -1, "precision": "fp8"}
    done = run.work()
    assert done.returncode == 10
    for word in ("max_step", "max_steps", "metric_every", "-1", "precision", "fp8"):
        assert word in done.stderr
    assert "Traceback" not in done.stderr
    assert not run.checkpoints.exists()


def test_a_job_for_the_other_mode_is_refused_with_the_mode_to_start(run: Run) -> None:
    run.job = {"run_id": "run-1", "mode": "inference", "serving": {"checkpoint": "final.meta.json"}}
    done = run.work()
    assert (done.returncode, "WORKER_MODE=inference" in done.stderr) == (10, True)
    assert not run.checkpoints.exists()


def test_a_missing_job_names_the_variable_to_set(run: Run) -> None:
    done = run.work(TRAINER_JOB_SPEC_PATH=str(run.folder / "none.json"))
    assert done.returncode == 10
    assert "none.json" in done.stderr


@pytest.mark.parametrize(
    ("hook", "category", "code"),
    [
        ("setup", "model-load", 13),
        ("configure", "model-load", 13),
        ("prepare_batch", "train-step", 14),
        ("train_step", "train-step", 14),
        ("state_dict", "train-step", 14),
    ],
)
def test_a_hook_that_raises_gives_one_readable_terminal_event(
    run: Run, hook: str, category: str, code: int
) -> None:
    run.job["hyperparams"] = {"fail_in": hook, "at_step": 8}
    done = run.work()
    assert done.returncode == code, done.stderr
    event = terminal(run)
    assert event["category"] == category
    assert f"{hook} went wrong" in event["error"]
    assert "counting.py:" in event["error"]
    assert "Traceback" not in event["error"]
    assert "Traceback" in done.stderr
    if hook == "train_step":
        assert sorted(path.name for path in run.checkpoints.glob("*.pt")) == ["step-00000005.pt"]


def test_a_crash_in_native_code_leaves_the_line_of_the_author_in_the_log(run: Run) -> None:
    run.job["hyperparams"] = {"do": "crash", "at_step": 8}
    done = run.work()
    assert done.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in done.stderr
    assert re.search(r'counting\.py", line \d+ in train_step', done.stderr)


def test_a_failing_load_leaves_the_checkpoints_alone(run: Run) -> None:
    run.job["hyperparams"] = {"do": "kill", "at_step": 8}
    assert run.work().returncode == -9
    run.wait_for_writer()
    run.job["hyperparams"] = {"fail_in": "load_state_dict"}
    before = {path.name: path.read_bytes() for path in run.checkpoints.glob("step*")}
    assert run.work().returncode == 13
    assert {path.name: path.read_bytes() for path in run.checkpoints.glob("step*")} == before
    run.job["hyperparams"] = {}
    assert run.work().returncode == 0
    assert run.losses()[20] == sum(range(1, 21))
    run.check_invariants()


def test_a_result_of_the_wrong_type_says_what_to_return(run: Run) -> None:
    run.job["hyperparams"] = {"do": "wrong result", "at_step": 3}
    done = run.work()
    assert done.returncode == 14
    assert "train_step returned dict, expected StepResult" in terminal(run)["error"]


def test_sigterm_finishes_the_step_saves_and_leaves_with_the_resumable_code(run: Run) -> None:
    run.job["hyperparams"] = {"do": "sigterm", "at_step": 7}
    done = run.work()
    assert done.returncode == 75
    assert terminal(run)["category"] == "cancelled"
    assert terminal(run)["step"] == 7
    assert (run.checkpoints / "step-00000007.meta.json").exists()
    run.job["hyperparams"] = {}
    assert run.work().returncode == 0
    assert run.losses()[20] == sum(range(1, 21))


def test_sigterm_in_the_middle_of_a_save_harms_neither_save(run: Run) -> None:
    run.job |= {"checkpoint_every": 1, "hyperparams": {"do": "sigterm", "at_step": 2, "size": 200_000}}
    assert run.work().returncode == 75  # the save of step 1 was under way when the signal came
    assert terminal(run)["step"] == 2
    assert {event["step"]: event["verified"] for event in run.events("checkpoint")} == {1: True, 2: True}
    run.job["hyperparams"] = {"size": 200_000}
    assert run.work().returncode == 0
    assert run.losses()[20] == sum(range(1, 21))


def test_a_step_that_hangs_is_left_after_the_grace_with_its_terminal_event(run: Run) -> None:
    run.job |= {"hyperparams": {"do": "hang", "at_step": 7}, "grace_s": 0.5}
    done = run.work()
    assert done.returncode == 75
    assert "grace of 0.5 s" in terminal(run)["error"]
    run.check_invariants()


def test_a_cancel_file_and_the_environment_stop_a_run(run: Run) -> None:
    (run.folder / "cancel").touch()
    assert run.work(TRAINER_CANCEL_FILE=str(run.folder / "cancel")).returncode == 75
    assert "cancel" in terminal(run)["error"]
    assert run.work(TRAINER_CANCELLED="1").returncode == 75
    assert "TRAINER_CANCELLED" in terminal(run)["error"]


def test_the_time_limit_is_a_timeout_that_can_be_resumed(run: Run) -> None:
    run.job |= {"time_limit_s": 0.1, "hyperparams": {"do": "wait for the stop", "at_step": 3}}
    assert run.work().returncode == 76
    assert terminal(run)["category"] == "timeout"
    assert "grace" not in terminal(run)["error"], "a hook that looks at ctx.is_canceled sees the stop"
    del run.job["time_limit_s"]
    run.job["hyperparams"]["at_step"] = 8
    assert run.work(TRAINER_MAX_RUNTIME_SECONDS="0.1").returncode == 76
    assert "grace" not in terminal(run)["error"]
    run.job["hyperparams"] = {}
    assert run.work().returncode == 0
    assert run.losses()[20] == sum(range(1, 21))


def test_a_second_worker_on_the_same_run_is_refused_and_harms_nothing(run: Run) -> None:
    run.job |= {"hyperparams": {"do": "hang", "at_step": 3}, "grace_s": 300}
    first = run.start()
    deadline = time.monotonic() + DEADLINE_S
    while not any(event["step"] == 2 for event in run.events("metric")) and time.monotonic() < deadline:
        assert first.poll() is None, first.communicate()
        time.sleep(0.02)
    events_before = len(run.events("started"))
    second = run.work()
    assert second.returncode == 10
    assert str(first.pid) in second.stderr
    assert len(run.events("started")) == events_before
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    run.check_invariants()


def test_weights_that_are_not_finite_are_saved_but_never_resumed(run: Run) -> None:
    run.job["hyperparams"] = {"do": "nan", "at_step": 9}
    assert run.work().returncode == 0
    checkpoints = {event["step"]: event["verified"] for event in run.events("checkpoint")}
    assert checkpoints[5] is True
    assert checkpoints[10] is False
    run.job |= {"hyperparams": {}, "mock_batches": list(range(1, 21))}
    assert run.work().returncode == 0
    messages = [event["message"] for event in run.events("log")]
    assert any("resumed at step 5" in message for message in messages)
    assert any("passed over final" in message and "finite" in message for message in messages), messages


def test_samples_are_written_whole_and_do_not_move_the_training_stream(tmp_path: Path) -> None:
    plain = Run(tmp_path / "plain", mock_batches=[1, 2, 3, 4])
    sampled = Run(
        tmp_path / "sampled",
        trainer="counting:Sampling",
        mock_batches=[1, 2, 3, 4],
        sample_every=2,
        sample_prompts=["a cat", {"text": "a dog", "size": [8, 8]}],
        sample_seed=3,
    )
    for run in (plain, sampled):
        assert run.work().returncode == 0
    finals = [(run.checkpoints / "final.pt").read_bytes() for run in (plain, sampled)]
    assert finals[0] == finals[1]
    samples = sampled.events("sample")
    assert [event["step"] for event in samples] == [2, 4]
    assert Path(samples[0]["path"]).read_text() == "('a cat', {'text': 'a dog', 'size': [8, 8]}) 3"


def test_a_sample_that_a_kill_prevented_is_made_up_for(tmp_path: Path) -> None:
    run = Run(
        tmp_path / "run",
        trainer="counting:Sampling",
        mock_batches=[1, 2, 3, 4],
        sample_every=2,
        checkpoint_every=2,
    )
    run.job["hyperparams"] = {"do": "kill in sample"}
    assert run.work().returncode == -9
    run.wait_for_writer()
    run.job["hyperparams"] = {}
    assert run.work().returncode == 0
    assert [event["step"] for event in run.events("sample")] == [2, 4]


def test_an_empty_sample_is_an_error(tmp_path: Path) -> None:
    run = Run(
        tmp_path / "run",
        trainer="counting:Sampling",
        mock_batches=[1, 2],
        sample_every=1,
        hyperparams={"empty_sample": True},
    )
    assert run.work().returncode == 14
    assert "empty" in terminal(run)["error"]


def test_the_authors_own_files_travel_with_the_checkpoint(tmp_path: Path) -> None:
    run = Run(
        tmp_path / "run",
        trainer="counting:OwnFiles",
        mock_batches=[1, 2, 3, 4],
        checkpoint_every=2,
        hyperparams={"do": "kill", "at_step": 4},
    )
    assert run.work().returncode == -9
    run.job["hyperparams"] = {}
    done = run.work()
    assert done.returncode == 0, done.stderr
    meta = json.loads((run.checkpoints / "final.meta.json").read_text())
    assert any(entry["name"].endswith("own.txt") for entry in meta["files"])


def test_a_hook_that_draws_random_numbers_while_saving_does_not_move_the_training_stream(
    tmp_path: Path,
) -> None:
    job: dict[str, Any] = {
        "trainer": "counting:OwnFiles",
        "mock_batches": [1, 2, 3, 4, 5],
        "checkpoint_every": 0,
    }
    straight, stopped = Run(tmp_path / "straight", **job), Run(tmp_path / "stopped", **job)
    assert straight.work().returncode == 0
    stopped.job["hyperparams"] = {"do": "sigterm", "at_step": 2}
    assert stopped.work().returncode == 75
    stopped.job["hyperparams"] = {}
    assert stopped.work().returncode == 0
    finals = [(run.checkpoints / "final.pt").read_bytes() for run in (straight, stopped)]
    assert finals[0] == finals[1]


def test_quiet_steps_emit_nothing(run: Run) -> None:
    run.job["hyperparams"] = {"quiet": True}
    assert run.work().returncode == 0
    assert run.events("metric") == []


def test_a_plain_state_file_is_a_resume_source(run: Run) -> None:
    source = run.folder / "state.json"
    source.write_text(json.dumps({"state": {"sum": 1000.0}}))
    run.job["resume_checkpoint_path"] = str(source)
    assert run.work().returncode == 0
    assert run.losses()[1] == 1001.0


def test_orchestrated_mode_demands_a_token_and_never_shows_it(run: Run) -> None:
    missing = run.work(TRAINER_ORCHESTRATED="1")
    assert missing.returncode == 12
    assert terminal(run)["category"] == "auth"
    assert "TRAINER_CAPABILITY_TOKEN" in missing.stderr
    run.job["hyperparams"] = {"fail_in": "train_step", "at_step": 2}
    failed = run.work(TRAINER_ORCHESTRATED="1", TRAINER_CAPABILITY_TOKEN="s3cret-token-value")
    assert failed.returncode == 14
    for text in (failed.stdout, failed.stderr, run.events_path.read_text()):
        assert "s3cret-token-value" not in text


def test_data_that_is_not_there_is_named_before_the_first_step(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", max_steps=5, dataset={"parquet_paths": ["nowhere.parquet"], "batch_size": 2})
    done = run.work()
    assert done.returncode == 11
    assert "nowhere.parquet" in terminal(run)["error"]


def test_relative_paths_are_relative_to_the_job(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", max_steps=5, dataset={"parquet_paths": ["data/*.parquet"], "batch_size": 2})
    write_rows(run.folder / "data" / "rows.parquet")
    done = run.work()
    assert done.returncode == 0, done.stderr


def test_a_full_disk_ends_in_one_clear_terminal_event(run: Run) -> None:
    done = run.work(GEN_WORKER_FAILPOINTS="checkpoint.data_written=enospc@2")
    assert done.returncode == 14, done.stderr
    assert "no space" in terminal(run)["error"].lower()
    assert (run.checkpoints / "step-00000005.meta.json").exists()
    assert run.work().returncode == 0
    assert run.losses()[20] == sum(range(1, 21))
    run.check_invariants()


def test_a_run_on_several_machines_is_refused_where_nobody_started_the_others(run: Run) -> None:
    run.job |= {"resources": {"processes": 2, "nodes": 2}}
    done = run.work()
    assert done.returncode == 10
    assert "resources.nodes: found 2" in done.stderr
    assert "torchrun --nnodes 2 --nproc-per-node 2" in done.stderr
