"""The wire: generated code is fresh, records survive the way there and back, and what is unknown is carried."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from trn.core.causes import Cause
from trn.core.runs import AttemptRecord, Needs, RunRecord, RunState
from trn.daemon.intake.submission import Submission
from trn.proto import trainer_pb2 as pb
from trn.proto.convert import from_message, read_flat, run_message, state_number, state_word, to_message
from trn.proto.methods import METHODS
from trn.proto.records import Attempt, MetricSeries, Run

ROOT = Path(__file__).parent.parent.parent

RECORD = RunRecord(
    run_id="demo-1",
    digest="sha256:ab",
    state=RunState.RUNNING,
    cause=Cause(id="killed", fault="machine", waits_for=("gpu",), next_attempt_ms=9, values={"step": 5}),
    config={"run_id": "demo-1", "max_steps": 3, "hyperparams": {"lr": 0.1}},
    name="demo",
    priority=-7,
    parent_run_id="demo-0",
    snapshot="cd",
    frozen_from="/home/u/project",
    secret_env=("HF_TOKEN",),
    stop_reason="val/loss did not fall",
    base_dir="/jobs",
    interpreter="/usr/bin/python3",
    is_cancel_wanted=True,
    cancel_reason="enough",
    submitted_ms=1,
    updated_ms=2,
    ended_ms=None,
    not_before_ms=3,
    attempt=2,
    max_attempts=4,
    step=5,
    end_step=6,
    last_seq=7,
    metrics={"train/loss": 0.25},
    devices=("cuda:0",),
    needs=Needs(devices=("cuda:0",), gpus=1, cpus=2, memory_mb=3, pool="lab"),
    tags={"team": "a"},
    change=8,
    log_dir="/logs",
    event_log="/events.jsonl",
    family="shapes",
    submission_id="s-1",
    start_step=7,
    newest_video="a1",
    newest_sample="a2",
    num_refused_artifacts=3,
    notes="better than demo-0",
)


def test_the_generated_code_is_what_the_proto_generates(tmp_path: Path) -> None:
    """If this fails, run `make proto`."""
    command = next(
        line.strip().replace("$(BIN)/python", sys.executable).replace("=src", f"={tmp_path}")
        for line in (ROOT / "Makefile").read_text().splitlines()
        if "grpc_tools.protoc" in line
    )
    subprocess.run(command.split(), cwd=ROOT, check=True, timeout=120)
    for name in ("trainer_pb2.py", "trainer_pb2.pyi"):
        fresh = (tmp_path / "trn" / "proto" / name).read_text()
        assert (ROOT / "src" / "trn" / "proto" / name).read_text() == fresh


def test_every_call_of_the_contract_is_on_the_wire() -> None:
    streams = {"WatchRuns", "StreamEvents", "StreamLogs", "ReadArtifact"}
    assert set(METHODS) == streams | {
        "SubmitRun",
        "Promote",
        "Rollback",
        "ListServed",
        "GetServed",
        "MakePromoteToken",
        "CheckRun",
        "CancelRun",
        "UpdateRun",
        "ResumeRun",
        "GetRun",
        "ListRuns",
        "GetMetrics",
        "RemoveRuns",
        "Prune",
        "ListDevices",
        "ListArtifacts",
        "GetHealth",
    }
    assert {name for name, method in METHODS.items() if method.is_stream} == streams


def test_metrics_of_a_daemon_without_buckets_are_read() -> None:
    old = pb.MetricSeries(name="loss", steps=[1, 9], values=[2.0, 1.0], timestamps_ms=[1, 2], num_points=9)
    series = from_message(old, MetricSeries)
    assert (series.steps, series.counts, series.width) == ((1, 9), (), 0)
    assert not pb.GetMetricsResponse(series=[old]).discarded


def test_a_run_loses_nothing_on_the_wire() -> None:
    sent = run_message(RECORD, with_config=True).SerializeToString()
    came = from_message(pb.Run.FromString(sent), Run)
    # What only the daemon needs stays with it.
    own = ("event_offset", "num_interruptions", "member", "nonce")
    kept = {name for name in RunRecord.__struct_fields__ if name not in own} | {"reason"}
    assert kept == set(Run.__struct_fields__)
    assert {name: getattr(came, name) for name in kept} == {name: getattr(RECORD, name) for name in kept}


def test_the_config_travels_only_where_it_is_asked_for() -> None:
    assert from_message(run_message(RECORD), Run).config is None


def test_an_attempt_loses_nothing_on_the_wire() -> None:
    record = AttemptRecord(
        run_id="demo-1",
        number=2,
        launched_ms=1,
        ended_ms=9,
        pid=77,
        exit_code=-9,
        category="train-step",
        cause=Cause(id="killed", fault="machine", values={"signal": "SIGKILL"}),
        last_heartbeat_ms=5,
        step=4,
        devices=("cuda:1",),
    )
    came = from_message(to_message(record, pb.Attempt), Attempt)
    assert {name: getattr(came, name) for name in Attempt.__struct_fields__} == {
        name: getattr(record, name) for name in Attempt.__struct_fields__
    }
    for exit_code in (0, None):
        ended = msgspec.structs.replace(record, exit_code=exit_code)
        assert from_message(to_message(ended, pb.Attempt), Attempt).exit_code == exit_code


@pytest.mark.parametrize("state", list(RunState))
def test_every_state_has_a_number_and_comes_back_from_it(state: RunState) -> None:
    number = state_number(state)
    assert number > 0
    assert state_word(number) == state


def test_a_state_of_a_newer_peer_is_carried_and_crashes_nobody() -> None:
    message = run_message(RECORD)
    message.state = 17  # type: ignore[assignment]
    came = from_message(pb.Run.FromString(message.SerializeToString()), Run)
    assert came.state == "UNKNOWN_17"
    assert not came.is_terminal
    assert state_number(came.state) == 17
    assert state_number("NONSENSE") == 0


def test_a_resume_of_an_older_client_gives_the_fields_of_a_submission_one_by_one() -> None:
    old = pb.ResumeRunRequest(
        run_id="one", priority=3, force_new=True, snapshot="cd", secret_env={"HF_TOKEN": "x"}, is_exact=True
    )
    assert read_flat(old) == pb.Submission(
        priority=3, force_new=True, snapshot="cd", secret_env={"HF_TOKEN": "x"}
    )


def test_every_option_of_a_submission_reaches_the_daemon_by_its_name() -> None:
    own = {"parent_run_id", "family", "start_step"}  # the daemon finds these for a resume
    assert set(Submission.__struct_fields__) - own == set(pb.Submission.DESCRIPTOR.fields_by_name)
    sent = pb.Submission(config_json=b"{}", priority=-2, secret_env={"HF_TOKEN": "x"}, is_dry_run=True)
    came = from_message(sent, Submission)
    assert (came.config_json, came.priority, came.is_dry_run) == (b"{}", -2, True)
    assert came.secret_env["HF_TOKEN"].reveal() == "x"
    assert "x" not in repr(came.secret_env)


def test_a_field_of_a_newer_peer_is_no_error() -> None:
    newer = run_message(RECORD).SerializeToString() + b"\xf2\x7f\x03new"  # field 2046, three bytes
    assert from_message(pb.Run.FromString(newer), Run).run_id == "demo-1"


def test_an_ended_run_is_terminal_also_in_a_state_that_nobody_knows() -> None:
    message = run_message(msgspec.structs.replace(RECORD, ended_ms=4))
    message.state = 17  # type: ignore[assignment]
    assert from_message(message, Run).is_terminal


def loaded_after(code: str) -> set[str]:
    code += "; import sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.split())


def test_importing_trn_and_making_a_client_loads_no_grpc() -> None:
    assert not loaded_after("import trn") & {"grpc", "google.protobuf", "msgspec"}
    assert "grpc" not in loaded_after("import trn; trn.Client(); trn.AsyncClient()")
