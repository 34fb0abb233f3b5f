"""`trn run` and what follows runs, as people and programs use them: in a pipe, at a terminal, with Ctrl-C and kill -9."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import (
    DEADLINE_S,
    WITNESSED,
    Terminal,
    losses,
    read_lines,
    read_rest,
    read_until,
    seqs,
    start,
    trn,
    write_job,
)
from daemon_process import end_everything

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from sealed_meta import edit_meta

pytestmark = pytest.mark.usefixtures("warm_launchers")
EXAMPLES = Path(__file__).parents[2] / "examples"


ENVY = """
import os, time
from gen_worker.trainer import StepResult

class Envy:
    def setup(self, ctx):
        secrets = [len(os.environ[name]) for name in ("HF_TOKEN", "FILE_PASSWORD", "MINE")]
        print("given:", os.environ["PLAIN"], "|", os.environ["FROM_FILE"], "|", *secrets, flush=True)
    def configure(self, ctx): return {"n": 0}
    def prepare_batch(self, raw_batch, state, ctx): return raw_batch
    def train_step(self, batch, state, ctx):
        while not os.path.exists(ctx.job.hyperparams["go"]):
            time.sleep(0.01)
        state["n"] += 1
        if ctx.step == 1 and not ctx.job.hyperparams.get("is_sound"):
            raise PermissionError("no access with " + os.environ["HF_TOKEN"])
        return StepResult(metrics={"loss": 1.0})
    def state_dict(self, state): return dict(state)
    def load_state_dict(self, state, payload, ctx): state.update(payload)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Not there yet: the first `trn run` makes it and starts the daemon."""
    home = tmp_path_factory.mktemp("run") / "home"
    yield home
    end_everything(home)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(WITNESSED, tmp_path)
    return tmp_path


def test_in_a_pipe_a_run_is_json_lines_from_its_submit_to_its_end(home: Path, folder: Path) -> None:
    assert not home.exists()
    done = trn(home, "run", "--config", write_job(folder), "--name", "first")
    lines = read_lines(done)
    assert done.returncode == 0, done.stderr
    assert (lines[0]["event"], lines[-1]["event"]) == ("job_submitted", "job_completed")
    assert seqs(lines) == list(range(1, len(lines) - 1))
    assert losses(lines) == {1: 1.0, 2: 3.0, 3: 6.0, 4: 10.0, 5: 15.0}
    assert lines[-1] | {"state": "COMPLETED", "step": 5, "name": "first"} == lines[-1]


def test_why_a_run_was_stopped_early_is_shown_wherever_its_end_is(home: Path, folder: Path) -> None:
    early = {"metric": "train/loss", "mode": "min", "patience": 2}
    lines = read_lines(trn(home, "run", "-c", write_job(folder, 9, early_stopping=early)))
    words = "train/loss did not fall below 1 (step 1) in 2 reports"
    run_id, reason = lines[-1]["run_id"], f"completed at step 3; stopped early: {words}"
    assert lines[-1] | {"event": "job_completed", "stop_reason": words, "reason": reason} == lines[-1]
    assert lines[-2] | {"event": "completed", "reason": words} == lines[-2]
    [status] = read_lines(trn(home, "status", run_id))
    assert (status["stop_reason"], words in status["why"]["sentence"]) == (words, True)
    listed = read_lines(trn(home, "list"))
    assert next(run["reason"] for run in listed if run["run_id"] == run_id) == reason
    [told] = read_lines(trn(home, "why", run_id))
    assert words in told["sentence"]
    [waited] = read_lines(trn(home, "wait", run_id))
    assert waited["stop_reason"] == words
    reasons: list[str] = []
    deadline = time.monotonic() + DEADLINE_S
    while not reasons and time.monotonic() < deadline:  # it is written beside, not before the answer
        index = (home / "logs" / "jobs" / "index.jsonl").read_text().splitlines()
        ends = [line for line in map(json.loads, index) if line.get("state") == "COMPLETED"]
        reasons = [line["stop_reason"] for line in ends if line["run_id"] == run_id]
    assert reasons == [words]
    terminal = Terminal(home, "watch", run_id)
    terminal.wait_for("stopped early: train/loss did not fall below 1")
    assert terminal.process.wait(DEADLINE_S) == 0


def test_the_callers_variables_reach_the_worker_and_secrets_nothing_else(
    home: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "envy.py").write_text(ENVY)
    variables = folder / "variables.txt"
    variables.write_text("export FROM_FILE='a b'  # comment\nFILE_PASSWORD=hunter2-file\n")
    job = folder / "job.json"
    given = {"trainer": "envy:Envy", "mock_batches": [1, 2, 3], "checkpoint_every": 1}
    job.write_text(json.dumps({**given, "hyperparams": {"go": str(folder / "go")}}))
    for name, value in {
        "HF_TOKEN": "hunter2-token",
        "PLAIN": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HOME": "/x",
    }.items():
        monkeypatch.setenv(name, value)
    words = [
        "--env",
        "HF_TOKEN",
        "--env",
        "PLAIN",
        "--env-file",
        variables,
        "--secret-env",
        "MINE=hunter2-mine",
    ]

    def kept() -> list[Path]:
        return [path for path in home.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()]

    process = start(home, "run", "-c", job, *words, "--json")
    lines = read_until(process, "started")
    run_id = lines[0]["run_id"]
    differing = {item["name"]: item["value"] for item in lines[0]["env_differences"]}
    assert (differing["OMP_NUM_THREADS"], differing["HF_HOME"], "HF_TOKEN" in differing) == ("1", "/x", False)
    assert kept() == [], "while it runs"
    (folder / "go").touch()
    lines += read_rest(process)
    assert lines[-1]["event"] == "job_failed"
    assert "no access with ***" in lines[-1]["reason"], "what it says is masked"
    [status] = read_lines(trn(home, "status", run_id))
    assert status["secret_env"] == ["FILE_PASSWORD", "HF_TOKEN", "MINE"]
    assert status["config"]["env"] == {"FROM_FILE": "a b", "PLAIN": "1"}
    log = (home / "runs" / run_id / "worker.log").read_text()
    assert "given: 1 | a b | 13 12 12" in log
    assert kept() == [], "after a failure with a traceback"
    variables.rename(folder / "my.env")  # a name that is never frozen, whoever gives it

    done = trn(home, "resume", run_id, "--set", "hyperparams.is_sound=true")
    assert read_lines(done)[-1]["event"] == "job_completed", "this daemon still has them"
    assert "not passed to the worker: HF_HOME=/x, HF_TOKEN, OMP_NUM_THREADS=1" not in done.stderr
    assert kept() == []
    monkeypatch.delenv("PLAIN")
    done = trn(home, "run", "-c", job, "--env", "PLAIN", "--env", "=hunter2")
    (line,) = read_lines(done)
    assert (done.returncode, len(line["faults"]), "hunter2" in done.stderr) == (3, 2, False)


def test_an_equal_run_is_followed_and_another_made_on_request(home: Path, folder: Path) -> None:
    job = write_job(folder)
    first = read_lines(trn(home, "run", "-c", job))
    done = trn(home, "run", "-c", job)
    again = read_lines(done)
    assert (first[0]["existed"], again[0]["existed"]) == (False, True)
    assert first[0]["run_id"] == again[0]["run_id"]
    assert "--another" in done.stderr
    assert seqs(again) == seqs(first)
    assert again[-1]["event"] == "job_completed"
    other = read_lines(trn(home, "run", "-c", job, "--another"))
    assert other[0]["run_id"] != first[0]["run_id"]
    assert other[-1]["event"] == "job_completed"


def test_a_refused_job_is_told_with_every_fault_and_nothing_is_started(folder: Path, tmp_path: Path) -> None:
    fresh = tmp_path / "fresh"
    job = write_job(folder, max_stps=3, seed=-1)
    done = trn(fresh, "run", "-c", job, "--set", "oops")
    (line,) = read_lines(done)
    assert (done.returncode, line["event"], len(line["faults"])) == (3, "job_rejected", 3)
    for part in ("max_steps", "seed", "oops"):
        assert any(part in fault for fault in line["faults"]), part
        assert part in done.stderr
    assert not fresh.exists()


def test_code_that_cannot_be_loaded_is_refused_before_anything_is_queued(home: Path, folder: Path) -> None:
    before = read_lines(trn(home, "list"))
    (folder / "broken.py").write_text("import math\nimport nowhere_to_be_found\n")
    data = [
        "--set",
        'dataset={"parquet_paths": ["gone.parquet"]}',
        "--set",
        "mock_batches=null",
        "--set",
        "max_steps=1",
    ]
    for trainer, further, told in (
        ("broken:Mine", [], ["broken.py:2", "nowhere_to_be_found"]),
        ("witnessed:Missing", [], ["has no 'Missing'"]),
        ("witnesed:Witnessed", [], ["did you mean 'witnessed'?"]),
        ("broken:Mine", ["--dry-run"], ["nowhere_to_be_found"]),
        ("broken:Mine", data, ["gone.parquet", "nowhere_to_be_found"]),  # what each side finds, at once
    ):
        done = trn(home, "run", "-c", write_job(folder), "--set", f"trainer={trainer}", *further)
        (line,) = read_lines(done)
        assert (done.returncode, line["event"]) == (3, "job_rejected"), done
        assert len(line["faults"]) == (2 if further == data else 1), line["faults"]
        for part in told:
            assert any(part in fault for fault in line["faults"]), line["faults"]
            assert part in done.stderr
        assert "Traceback" not in done.stderr
    assert read_lines(trn(home, "list")) == before


def test_a_job_that_no_machine_could_hold_is_refused_by_the_daemon(home: Path, folder: Path) -> None:
    done = trn(home, "run", "-c", write_job(folder), "--devices", "cuda:97")
    (line,) = read_lines(done)
    assert (done.returncode, line["event"], line["code"]) == (3, "job_rejected", "infeasible")
    assert "cuda:97" in line["faults"][0]


def test_a_config_that_cannot_be_read_is_refused(home: Path, folder: Path) -> None:
    (folder / "bad.yaml").write_bytes(b"a: [1\n\xff")
    for path in (folder / "absent.yaml", folder, folder / "bad.yaml"):
        done = trn(home, "run", "-c", path)
        assert (done.returncode, read_lines(done)[0]["event"]) == (3, "job_rejected")
        assert "Traceback" not in done.stderr


def test_profile_set_and_devices_reach_the_run(home: Path, folder: Path) -> None:
    job = write_job(folder, profiles={"short": {"max_steps": 2}})
    words = ["--profile", "short", "--set", "hyperparams.extra.deep=1e-3", "--cpu-only", "--priority", "3"]
    (line,) = read_lines(trn(home, "run", "-c", job, "--dry-run", *words))
    assert line["event"] == "job_checked"
    assert line["job"]["hyperparams"]["extra"] == {"deep": 0.001}
    assert (line["job"]["max_steps"], line["job"]["resources"]) == (2, {"devices": ["cpu"]})
    lines = read_lines(trn(home, "run", "-c", job, *words))
    assert (lines[-1]["event"], lines[-1]["step"]) == ("job_completed", 2)


def test_the_shipped_configs_of_the_runner_are_jobs_as_they_are(home: Path, tmp_path: Path) -> None:
    for name in ("images_by_config", "language_model"):
        shutil.copytree(EXAMPLES / name, tmp_path / name)
        subprocess.run([sys.executable, "make_data.py"], cwd=tmp_path / name, check=True, timeout=DEADLINE_S)
    checked = trn(home, "run", "--config", tmp_path / "language_model" / "config.yaml", "--dry-run")
    assert checked.returncode == 0, checked.stderr
    done = trn(home, "run", "--config", tmp_path / "images_by_config" / "config.yaml")
    lines = read_lines(done)
    assert done.returncode == 0, done.stderr
    assert (lines[0]["run_id"], lines[-1]["event"], lines[-1]["step"]) == ("digits", "job_completed", 160)
    assert lines[-1]["metrics"]["val/accuracy"] > 0.9


def test_a_failed_run_ends_the_command_with_its_own_code(home: Path, folder: Path) -> None:
    done = trn(home, "run", "-c", write_job(folder, hyperparams={"fail_at": 3}))
    line = read_lines(done)[-1]
    assert (done.returncode, line["event"]) == (1, "job_failed")
    assert "this step always fails" in line["reason"]
    assert trn(home, "wait", line["run_id"]).returncode == 1


def test_detached_waited_for_followed_and_cancelled(home: Path, folder: Path) -> None:
    done = trn(home, "run", "-c", write_job(folder, 3000, step_ms=20, name="long"), "--detach")
    run_id = done.stdout.strip()
    assert re.fullmatch(r"long-[0-9a-f]+", run_id), done
    prefix = run_id[:-1]
    late = trn(home, "wait", prefix, "--timeout", 0.01)
    assert (late.returncode, "has not ended" in late.stderr) == (5, True)
    logs = start(home, "logs", "-f", prefix)
    watcher = start(home, "watch", prefix)
    read_until(watcher, "metric")
    asked = trn(home, "cancel", prefix, "--reason", "enough of it")
    assert (asked.returncode, read_lines(asked)[0]["was_live"]) == (0, True)
    assert trn(home, "wait", prefix).returncode == 8
    (end,) = read_lines(trn(home, "wait", run_id))
    assert read_rest(watcher)[-1] == end
    assert (end["event"], end["run_id"], "enough of it" in end["reason"]) == ("job_cancelled", run_id, True)
    out, _ = logs.communicate(timeout=DEADLINE_S)
    assert logs.returncode == 0
    assert out == trn(home, "logs", run_id).stdout
    assert out.splitlines()[-1:] == trn(home, "logs", run_id, "--tail", 1).stdout.splitlines()
    assert trn(home, "cancel", run_id).returncode == 6
    waits = trn(home, "run", "-c", write_job(folder, 3000, step_ms=20, name="two"), "--detach").stdout.strip()
    assert trn(home, "cancel", waits, "nothing").returncode == 4
    both = trn(home, "cancel", run_id, waits)
    assert both.returncode == 6
    assert [(line["run_id"], line["was_live"]) for line in read_lines(both)] == [
        (run_id, False),
        (waits, True),
    ]
    assert trn(home, "wait", waits).returncode == 8


def test_a_run_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    for verb in ("wait", "logs", "cancel", "resume", "watch"):
        done = trn(tmp_path / "empty", verb, "nothing")
        assert done.returncode == 4, (verb, done)
        assert not (tmp_path / "empty").exists()


def test_ctrl_c_in_a_pipe_cancels_the_run_and_waits_for_its_end(home: Path, folder: Path) -> None:
    process = start(home, "run", "-c", write_job(folder, 3000, step_ms=20))
    read_until(process, "metric")
    process.send_signal(signal.SIGINT)
    assert read_rest(process)[-1]["event"] == "job_cancelled"
    assert process.returncode == 8


def test_sigterm_and_a_reader_that_leaves_detach(home: Path, folder: Path) -> None:
    process = start(home, "run", "-c", write_job(folder, 3000, step_ms=20))
    run_id = read_until(process, "metric")[0]["run_id"]
    process.send_signal(signal.SIGTERM)
    assert not any(line["event"].startswith("job_") for line in read_rest(process))
    assert process.returncode == 0

    reader = start(home, "run", "-c", folder / "job.json")
    assert read_until(reader, "metric")[0]["run_id"] == run_id
    assert reader.stdout is not None
    reader.stdout.close()
    assert reader.wait(DEADLINE_S) == 0
    assert reader.stderr is not None
    assert "Traceback" not in reader.stderr.read()
    reader.stderr.close()
    (line,) = read_lines(trn(home, "cancel", run_id))
    assert (line["was_live"], line["state"]) == (True, "RUNNING")
    assert trn(home, "wait", run_id).returncode == 8


def test_kill_9_of_the_daemon_is_invisible_to_whoever_follows(home: Path, folder: Path) -> None:
    process = start(home, "run", "-c", write_job(folder, 60, step_ms=50))
    begun = read_until(process, "metric")
    os.kill(json.loads((home / "daemon.json").read_text())["pid"], signal.SIGKILL)
    lines = begun + read_rest(process)
    assert process.returncode == 0
    assert seqs(lines) == list(range(1, len(lines) - 1))
    assert losses(lines)[60] == sum(range(61))
    assert lines[-1] | {"event": "job_completed", "attempt": 1, "step": 60} == lines[-1]


def test_a_resumed_run_ends_as_one_that_was_never_stopped(home: Path, folder: Path) -> None:
    straight = losses(read_lines(trn(home, "run", "-c", write_job(folder, 40))))
    process = start(home, "run", "-c", write_job(folder, 40, step_ms=100))
    begun = read_until(process, "metric")
    process.send_signal(signal.SIGINT)
    stopped = begun + read_rest(process)
    assert process.returncode == 8
    run_id, step = stopped[-1]["run_id"], stopped[-1]["step"]
    assert 0 < step < 40
    resumed = read_lines(trn(home, "resume", run_id, "--set", "hyperparams.step_ms=0"))
    assert resumed[-1]["parent_run_id"] == run_id
    assert min(losses(resumed)) == step + 1
    assert losses(stopped) | losses(resumed) == straight

    (meta,) = (home / "runs" / run_id / "checkpoints").glob("*.meta.json")
    words = ["resume", "--checkpoint", meta, "--set", "hyperparams.step_ms=1"]
    found = read_lines(trn(home, *words))
    assert (found[-1]["event"], found[-1]["parent_run_id"]) == ("job_completed", run_id)
    assert losses(found) == losses(resumed)
    told = read_lines(trn(home, *words, "--config", folder / "job.json"))
    assert losses(told) == losses(resumed)
    assert told[-1]["parent_run_id"] == run_id  # as the checkpoint's meta says
    edit_meta(meta.parent, meta.name.removesuffix(".meta.json"), run_id="of-another-home")
    stray = read_lines(trn(home, *words, "--config", folder / "job.json"))
    assert stray[-1]["parent_run_id"] == ""
    done = trn(home, "resume", found[0]["run_id"])
    assert (done.returncode, read_lines(done)[0]["event"]) == (3, "job_rejected")
    assert "complete" in done.stderr


def test_a_run_is_resumed_from_the_step_that_is_named(home: Path, folder: Path) -> None:
    ended = read_lines(trn(home, "run", "-c", write_job(folder, 6, checkpoint_every=2)))[-1]
    run_id = ended["run_id"]
    forked = read_lines(trn(home, "resume", f"{run_id}@4"))[-1]
    assert (forked["state"], forked["start_step"], forked["step"]) == ("COMPLETED", 4, 6)
    assert (forked["parent_run_id"], forked["metrics"]) == (run_id, ended["metrics"])
    absent = trn(home, "resume", f"{run_id}.1@5")
    assert absent.returncode == 4
    assert "has no checkpoint of step 5: it has 2, 4, 6" in absent.stderr
    of_parent = trn(home, "resume", f"{forked['run_id']}@2")  # the fork has later ones only
    assert f"has no checkpoint of step 2: it has 6; {run_id}.1@2 is the one of {run_id}" in of_parent.stderr
    other = trn(home, "resume", f"{run_id}.1@4", "--set", "resume_checkpoint_path=/x.meta.json")
    assert (other.returncode, "given, but a resume starts from" in other.stderr) == (3, True)
    for wrong in (("x@best",), ("x@4", "--checkpoint", "step.meta.json")):
        assert trn(home, "resume", *wrong).returncode == 2


def test_mended_code_is_trained_by_the_next_submit_and_by_a_resume_that_asks_for_it(
    home: Path, folder: Path
) -> None:
    """In a folder that git knows nothing of."""
    sound = (folder / "witnessed.py").read_text()
    (folder / "witnessed.py").write_text(
        sound.replace("step = ctx.step + 1", "step = ctx.step + 1; 1 // (step - 3)")
    )
    job = write_job(folder, 5, checkpoint_every=1)
    broken = read_lines(trn(home, "run", "-c", job))
    assert broken[-1]["event"] == "job_failed"
    run_id = broken[0]["run_id"]

    (folder / "witnessed.py").write_text(sound)
    done = trn(home, "resume", run_id)
    assert (done.returncode, f"--code {folder} uses the new ones" in done.stderr) == (1, True), done
    resumed = read_lines(trn(home, "resume", run_id, "--code", folder))
    assert (resumed[-1]["event"], resumed[-1]["step"]) == ("job_completed", 5)
    assert losses(broken) | losses(resumed) == {1: 1.0, 2: 3.0, 3: 6.0, 4: 10.0, 5: 15.0}

    again = read_lines(trn(home, "run", "-c", job))
    assert (again[0]["existed"], again[-1]["event"]) == (False, "job_completed")
    assert read_lines(trn(home, "run", "-c", job))[0]["existed"]


def test_a_retry_trains_the_frozen_code_of_a_source_folder_that_was_edited_meanwhile(
    home: Path, folder: Path
) -> None:
    """The import path leads to the live folder, as an editable install would have it."""
    package = folder / "src" / "shapes"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    die = "os.kill(os.getpid(), signal.SIGKILL)"
    edit = f"Path({str(package / 'train.py')!r}).write_text('raise SystemExit()')"
    source = (folder / "witnessed.py").read_text()
    (package / "train.py").write_text(source.replace(die, f"{edit}; {die}", 1))
    job = write_job(
        folder,
        5,
        trainer="shapes.train:Witnessed",
        checkpoint_every=1,
        retry={"max_attempts": 2, "backoff_s": 0.01},
        env={"PYTHONPATH": str(folder / "src")},
        hyperparams={"die_at": 3},
    )
    done = trn(home, "run", "-c", job, "--code", folder)
    lines = read_lines(done)
    assert (lines[-1]["event"], lines[-1]["attempt"]) == ("job_completed", 2), done
    assert losses(lines) == {1: 1.0, 2: 3.0, 3: 6.0, 4: 10.0, 5: 15.0}
    assert (package / "train.py").read_text() == "raise SystemExit()"


def test_a_folder_that_holds_far_more_than_code_is_not_frozen_unless_it_is_named(
    home: Path, folder: Path
) -> None:
    for number in range(2_001):
        (folder / f"{number}.txt").touch()
    job = write_job(folder, 1, seed=5)
    done = trn(home, "run", "-c", job)
    assert (done.returncode, "code: no snapshot: " in done.stderr) == (0, True), done
    assert not (home / "runs" / read_lines(done)[0]["run_id"] / "code").exists()
    done = trn(home, "run", "-c", job, "--code", folder)
    assert (done.returncode, "code: 2,004 files" in done.stderr) == (0, True), done
    done = trn(home, "run", "-c", job, "--code", folder / "nowhere")
    assert (done.returncode, "there is no such folder" in done.stderr) == (3, True), done


def test_a_run_goes_on_from_a_state_that_somebody_wrote_by_hand(home: Path, folder: Path) -> None:
    (folder / "plain.json").write_text('{"state": {"sum": 100}}')
    words = ["resume", "--checkpoint", folder / "plain.json", "--config", write_job(folder, 2)]
    lines = read_lines(trn(home, *words))
    assert (losses(lines), lines[-1]["parent_run_id"]) == ({1: 101.0, 2: 103.0}, "")
    assert (home / "runs" / lines[0]["run_id"] / "code" / "witnessed.py").exists(), "its code is frozen, too"
    for given in (folder / "job.json", folder, folder / "nothing.meta.json"):
        done = trn(home, "resume", "--checkpoint", given, "--config", folder / "job.json")
        assert (done.returncode in (3, 4), str(given) in done.stderr) == (True, True), done


def test_the_parent_is_the_run_that_saved_the_checkpoint_whoever_lends_the_job(
    home: Path, folder: Path
) -> None:
    saver = read_lines(trn(home, "run", "-c", write_job(folder, name="saver", max_steps=3)))[0]["run_id"]
    lender = read_lines(trn(home, "run", "-c", write_job(folder, name="lender")))[0]["run_id"]
    meta = home / "runs" / saver / "checkpoints" / "final.meta.json"
    lines = read_lines(trn(home, "resume", lender, "--checkpoint", meta))
    assert (lines[-1]["event"], lines[-1]["parent_run_id"]) == ("job_completed", saver)


def test_a_name_that_is_taken_names_the_next_of_its_family(home: Path, folder: Path) -> None:
    failing = {"hyperparams": {"fail_at": 1}}
    for num_steps, more, run_id in (
        (1, {}, "taken"),
        (2, {}, "taken.2"),
        (2, failing, "taken.3"),
        (2, failing, "taken.4"),  # a failure never answers
        (2, {}, "taken.2"),
    ):
        done = trn(home, "run", "-c", write_job(folder, num_steps, run_id="taken", **more))
        lines = read_lines(done)
        assert (lines[0]["run_id"], lines[0]["family"]) == (run_id, "taken")
        is_said = done.stderr.startswith("not trained again: taken.2 has the same config")
        assert is_said == lines[0]["existed"], "before all else"
    assert lines[0]["existed"]
    assert lines[0]["notes"][0] in done.stderr
    for name, meant in (
        ("taken", "taken.4"),
        ("tak", "taken.4"),
        ("taken.2", "taken.2"),
        ("taken.1", "taken"),
    ):
        assert read_lines(trn(home, "status", name))[0]["run_id"] == meant


@pytest.mark.parametrize("settings", ["heartbeat_timeout_s = -1", '[pools.lab]\nexecutor = "of nobody"'])
def test_a_home_that_is_set_up_wrongly_is_no_refusal(settings: str, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "settings.toml").write_text(f"{settings}\n")
    done = trn(other, "run", "-c", write_job(folder, 1))
    (line,) = read_lines(done)
    assert (done.returncode, line["event"], "settings.toml" in done.stderr) == (5, "error", True), done


def test_a_damaged_checkpoint_is_passed_over_and_said_so_and_refused_where_it_is_named(
    home: Path, folder: Path
) -> None:
    straight = losses(read_lines(trn(home, "run", "-c", write_job(folder, 8))))
    job = write_job(folder, 8, checkpoint_every=2, hyperparams={"fail_at": 7})
    run_id = read_lines(trn(home, "run", "-c", job))[-1]["run_id"]
    checkpoints = home / "runs" / run_id / "checkpoints"
    data = checkpoints / "step-00000006.pt"
    data.write_bytes(data.read_bytes()[::-1])  # as long as it was

    done = trn(home, "resume", run_id, "--set", "hyperparams.fail_at=0")
    assert "passed over step-00000006.meta.json: hash mismatch: step-00000006.pt is " in done.stdout
    resumed = losses(read_lines(done))
    assert (min(resumed), resumed[8]) == (5, straight[8])
    assert read_lines(done)[-1]["start_step"] == 4, (
        "where it really began, not the checkpoint that was chosen"
    )

    done = trn(home, "resume", "--checkpoint", checkpoints / "step-00000006.meta.json")
    *_, failed, last = read_lines(done)
    assert (done.returncode, last["state"], failed["category"]) == (1, "FAILED", "input"), (
        "and no other is taken"
    )
    assert "step-00000006.meta.json cannot be resumed: hash mismatch: step-00000006.pt is " in failed["error"]

    # As a release before the digest would have written it.
    meta = checkpoints / "step-00000004.meta.json"
    document = json.loads(meta.read_text()) | {"verified": False, "reason": "non-finite values in w"}
    del document["digest"]
    meta.write_text(json.dumps(document))
    words = ["resume", "--checkpoint", meta, "--set", "hyperparams.fail_at=0"]
    done = trn(home, *words)
    assert (done.returncode, "non-finite values in w" in done.stderr, "--force" in done.stderr) == (
        3,
        True,
        True,
    )
    done = trn(home, *words, "--force")
    assert "at step 4, although it holds non-finite values in w" in done.stderr
    assert losses(read_lines(done)) == resumed
    done = trn(home, "resume", f"{run_id}.1", "--set", "hyperparams.fail_at=0", "--another")
    assert "passed over step-00000004.meta.json: not verified: non-finite values in w" in done.stdout
    assert min(losses(read_lines(done))) == 3


def test_code_in_a_git_work_tree_is_frozen_and_what_is_left_out_is_said(home: Path, folder: Path) -> None:
    subprocess.run(["git", "init", "-q", str(folder)], check=True, timeout=DEADLINE_S)
    (folder / ".env").write_text("SECRET=1")
    done = trn(home, "run", "-c", write_job(folder))
    line = read_lines(done)[-1]
    assert (done.returncode, "without .env" in done.stderr) == (0, True), done
    code = home / "runs" / line["run_id"] / "code"
    assert sorted(path.name for path in code.iterdir() if path.suffix) == ["job.json", "witnessed.py"]
    plain = trn(home, "run", "-c", folder / "job.json", "--no-snapshot")
    assert read_lines(plain)[0]["existed"] is False
    assert not (home / "runs" / read_lines(plain)[0]["run_id"] / "code").exists()


def test_a_watch_of_all_runs_tells_what_becomes_of_them(home: Path, folder: Path) -> None:
    watcher = start(home, "watch")
    read_until(watcher, "watch_started")
    ended = read_lines(trn(home, "run", "-c", write_job(folder)))[-1]
    changes = []
    assert watcher.stdout is not None
    for line in watcher.stdout:
        changes.append(json.loads(line))
        if (changes[-1]["run_id"], changes[-1]["state"]) == (ended["run_id"], "COMPLETED"):
            break
    assert {change["event"] for change in changes} == {"run_changed"}
    watcher.send_signal(signal.SIGINT)
    read_rest(watcher)
    assert watcher.returncode == 130


def test_at_a_terminal_a_person_sees_a_bar_the_log_and_the_end(home: Path, folder: Path) -> None:
    terminal = Terminal(home, "run", "-c", write_job(folder, 25, step_ms=60, name="seen"))
    terminal.wait_for("training from step 0 to 25")
    terminal.wait_for("running on cpu")
    terminal.wait_for("/25  loss ")
    code, seen = terminal.end()
    assert code == 0
    last = seen.strip().splitlines()[-1]
    assert re.match(r"seen-[0-9a-f]+  completed at step 25 of 25, after \d:\d\d, loss 325$", last), seen
    assert "{" not in seen


def test_at_a_terminal_a_failure_is_told_by_the_authors_frames(home: Path, folder: Path) -> None:
    terminal = Terminal(home, "run", "-c", write_job(folder, hyperparams={"fail_at": 3}))
    code, seen = terminal.end()
    assert (code, "witnessed.py" in seen, "gen_worker" in seen) == (1, True, False), seen
    # Below the traceback, and in the line about the end.
    assert seen.count("RuntimeError: this step always fails") == 2, seen
    run_id = re.findall(r"trn logs (\S+)", seen)[-1]
    assert "gen_worker/trainer/loop.py" in trn(home, "logs", run_id).stdout


def test_at_a_terminal_every_attempt_is_told_in_its_order_also_afterwards(home: Path, folder: Path) -> None:
    job = write_job(
        folder, hyperparams={"die_at": 3}, retry={"max_attempts": 2, "backoff_s": 0.01}, name="retried"
    )
    code, seen = Terminal(home, "run", "-c", job).end()
    afterwards = Terminal(home, "watch", re.findall(r"(retried-\w+)  completed", seen)[-1]).end()[1]
    expected = [
        "training from step 0 to 5",
        "attempt 1 ended: killed by SIGKILL",
        "attempt 2 begins",
        "training from step 0 to 5",
        "completed at step 5 of 5",
    ]
    for text in (seen, afterwards):
        at = -1
        for words in expected:
            assert (at := text.find(words, at + 1)) >= 0, (words, text)
    assert code == 0


def test_ctrl_c_at_a_terminal_asks_and_each_answer_is_obeyed(home: Path, folder: Path) -> None:
    job = write_job(folder, 3000, step_ms=20)
    terminal = Terminal(home, "run", "-c", job)
    terminal.wait_for("/3,000  loss ")
    terminal.press(b"\x03")
    terminal.wait_for("detach (d), cancel it (c) or keep following (Enter)?")
    terminal.press(b"x\n")  # the first is no answer, the second goes on
    terminal.wait_for("/3,000  loss ")
    terminal.press(b"\x03")
    terminal.wait_for("(Enter)?")
    terminal.press(b"d")
    code, seen = terminal.end()
    found = re.search(r"(\S+) continues; to follow it again: trn watch", seen)
    assert code == 0
    assert found, seen

    watcher = Terminal(home, "watch", found[1])
    watcher.wait_for("/3,000  loss ")
    watcher.press(b"\x03")  # only ends the watching
    assert watcher.end()[0] == 130

    terminal = Terminal(home, "run", "-c", job)
    terminal.wait_for("not trained again: ")
    terminal.wait_for("/3,000  loss ")
    terminal.press(b"\x03")
    terminal.wait_for("(Enter)?")
    terminal.press(b"c")
    code, seen = terminal.end()
    assert (code, "cancelled at step" in seen, f"trn resume {found[1]}" in seen) == (8, True, True), seen


def test_ctrl_c_twice_at_a_terminal_cancels(home: Path, folder: Path) -> None:
    terminal = Terminal(home, "run", "-c", write_job(folder, 3000, step_ms=20))
    terminal.wait_for("/3,000  loss ")
    terminal.press(b"\x03")
    terminal.wait_for("(Enter)?")
    terminal.press(b"\x03")
    code, seen = terminal.end()
    assert (code, "  cancelled with Ctrl-C; stopped at step " in seen) == (8, True), seen


def test_with_json_a_terminal_gets_nothing_but_json_lines(home: Path, folder: Path) -> None:
    terminal = Terminal(home, "run", "-c", write_job(folder), "--json")
    code, seen = terminal.end()
    assert code == 0
    assert json.loads(seen.strip().splitlines()[-1])["event"] == "job_completed"
