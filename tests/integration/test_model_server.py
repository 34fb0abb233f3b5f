"""A model server as an operator and its clients see it: start, answers, stop, restart."""

import json
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from model_server import Server, train_versions, version_of, wait_until, with_settings
from worker_process import DEADLINE_S, TRAINERS, Run, WarmParent

from gen_worker.contract.job.model_version import ModelVersion
from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.contract.process_identity import list_pids, read_process
from gen_worker.trainer.checkpoints.store import CheckpointStore
from gen_worker.trainer.contracts import StepContext

sys.path.insert(0, str(TRAINERS))


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[int, ModelVersion]:
    return train_versions(tmp_path_factory.mktemp("trained"), steps=3)


def stopped(server: Server) -> Server:
    """With SIGTERM, as every end of a server is."""
    assert server.stop() == 75, server.log
    return server


def test_it_answers_with_the_bits_that_predict_gives_and_names_the_version_that_did(
    tmp_path: Path, versions: dict[int, ModelVersion]
) -> None:
    server = Server(tmp_path, versions[2]).start()
    rows = [[float(row), -1.5, 0.25, 3.0] for row in range(5)]
    reply = server.predict(*rows)
    assert reply.status == 200
    assert reply.version == ("trained", 2, versions[2].weights_hash)
    assert reply.headers["X-Trn-Batch-Shape"] == "8"
    assert [row["y"] for row in reply.data["rows"]] == answers_in_process(versions[2], rows, shape=8)
    stopped(server)
    events = server.events()
    kinds = [event["event"] for event in events]
    assert (kinds[0], kinds.count("ready"), kinds[-1]) == ("started", 1, "failed")
    assert events[0]["mode"] == "inference"
    assert (events[-1]["category"], events[-1]["error"]) == ("cancelled", "cancelled by SIGTERM")
    ready = server.events("ready")[0]
    assert ready["version"] == {
        "run_id": "trained",
        "step": 2,
        "weights_hash": versions[2].weights_hash,
        "code_hash": "",
    }


def answers_in_process(version: ModelVersion, rows: list[list[float]], *, shape: int) -> list[float]:
    """The author's `predict`, called here, with the rows padded to that shape."""
    import torch
    from served import Served

    path = Path(version.checkpoint)
    ctx = StepContext(job=TrainingJobSpec(run_id="here"))
    trainer = Served()
    trainer.setup(ctx)
    state = trainer.configure(ctx)
    trainer.load_state_dict(state, dict(CheckpointStore(path.parent).load(path).state), ctx)
    padded = rows + [rows[-1]] * (shape - len(rows))
    batch = pa.record_batch({"x": pa.array(padded, pa.list_(pa.float32(), 4))})
    with torch.inference_mode():
        return [float(value) for value in trainer.predict(batch, state, ctx)["y"]][: len(rows)]


def test_a_checkpoint_alone_is_served_from_a_cold_start(
    tmp_path: Path, versions: dict[int, ModelVersion]
) -> None:
    """Two variables, no job: the checkpoint knows its class and its config."""
    server = Server(tmp_path, versions[1])
    run = Run(tmp_path)
    command, environ = run.command(
        WORKER_MODE="inference",
        INFERENCE_CHECKPOINT_PATH=versions[3].checkpoint,
        INFERENCE_ADDRESS=f"unix:{tmp_path}/s",
    )
    del environ["TRAINER_JOB_SPEC_PATH"]
    with subprocess.Popen(command, env=environ, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        server.pid = process.pid
        ready = server.wait_event("ready")
        assert (ready["url"], ready["bearer_file"]) == (f"unix:{tmp_path}/s", "")
        assert ready["version"]["weights_hash"] == versions[3].weights_hash
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert not (tmp_path / "s").exists()


def test_a_model_whose_data_had_no_columns_is_served_with_a_warning(
    tmp_path: Path, versions: dict[int, ModelVersion]
) -> None:
    trained = Run(tmp_path / "trained", trainer="serving:OfNoColumns", mock_batches=[1, 2])
    assert trained.work().returncode == 0
    server = Server(tmp_path, version_of(trained.checkpoints / "final.meta.json", trained.job)).start()
    reply = server.post("/v1/predict", {"rows": [{"x": 1}]})
    assert reply.data["rows"] == [{"type": "int64"}]
    stopped(server)
    warnings = [event["message"] for event in server.events("log") if event["level"] == "warning"]
    assert len(warnings) == 1
    assert "annotate `predict`" in warnings[0]
    columned = stopped(Server(tmp_path / "columned", versions[1]).start())
    assert not any("annotate" in event["message"] for event in columned.events("log"))


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({}, "neither INFERENCE_CHECKPOINT_PATH nor TRAINER_JOB_SPEC_PATH is set"),
        ({"INFERENCE_CHECKPOINT_PATH": "/none.meta.json"}, "/none.meta.json cannot be read"),
        (
            {"INFERENCE_CHECKPOINT_PATH": "/c.meta.json", "INFERENCE_ADDRESS": "here"},
            "serving.address: found",
        ),
        ({"TRAINER_JOB_SPEC_PATH": "train.json"}, 'mode: found "trainer"'),
    ],
)
def test_what_cannot_be_served_is_refused_with_what_to_do(
    tmp_path: Path, environ: dict[str, str], says: str
) -> None:
    run = Run(tmp_path, mock_batches=[1])
    run.command()
    (tmp_path / "job.json").rename(tmp_path / "train.json")
    given = {
        name: str(tmp_path / value) if value == "train.json" else value for name, value in environ.items()
    }
    done = run.work(**{"WORKER_MODE": "inference", "TRAINER_JOB_SPEC_PATH": "", **given})
    assert done.returncode in (10, 11), done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_that_cannot_be_loaded_is_a_failure_of_its_category(
    tmp_path: Path, versions: dict[int, ModelVersion]
) -> None:
    server = Server(tmp_path, with_settings(versions[1], ballast=10))  # the checkpoint has no such tensor
    server.launch()
    assert server.wait() == 13, server.log
    failed = server.events("failed")[0]
    assert failed["category"] == "model-load"
    assert "ballast" in failed["error"]
    assert server.events("ready") == []


def test_a_model_that_cannot_be_loaded_says_so_also_where_feedback_is_taken(
    tmp_path: Path, versions: dict[int, ModelVersion]
) -> None:
    server = Server(tmp_path, with_settings(versions[1], ballast=10), feedback={"rows": 1}, request_log=1.0)
    server.launch()
    assert server.wait() == 13, server.log
    assert "ballast" in server.events("failed")[0]["error"]


def test_a_stop_while_it_starts_ends_it(tmp_path: Path, versions: dict[int, ModelVersion]) -> None:
    fault = tmp_path / "fault"
    fault.write_text("slow")
    server = Server(tmp_path / "run", with_settings(versions[1], fault_file=str(fault)), feedback={"rows": 1})
    server.launch()
    server.wait_event("started")
    stopped(server)
    assert server.events("failed")[0]["category"] == "cancelled"


def test_a_time_limit_ends_it_like_a_cancel(tmp_path: Path, versions: dict[int, ModelVersion]) -> None:
    server = Server(tmp_path, versions[1])
    server.job["time_limit_s"] = 1.0
    server.launch()
    assert server.wait() == 76, server.log
    assert server.events("failed")[0]["category"] == "timeout"


def test_without_its_model_parent_the_attempt_fails_as_the_machines_fault(
    tmp_path: Path, versions: dict[int, ModelVersion]
) -> None:
    server = Server(tmp_path, versions[1], replicas=2)
    server.job["resources"] = {"devices": ["cpu", "cpu"]}
    server.start()
    (parent,) = [pid for pid in list_pids() if (state := read_process(pid)) and state.parent == server.pid]
    os.kill(parent, signal.SIGKILL)
    assert server.wait() == 13, server.log
    failed = server.events("failed")[0]
    assert (failed["cause"], failed["fault"]) == ("killed", "machine")
    server.start()
    assert server.predict().status == 200
    stopped(server)


def test_a_kill_of_what_loads_the_model_is_the_machines_fault(
    tmp_path: Path, versions: dict[int, ModelVersion]
) -> None:
    """As when memory is short for a moment: the server is started again, and not given up as the author's fault."""
    fault = tmp_path / "fault"
    fault.write_text("kill")
    server = Server(tmp_path / "run", with_settings(versions[1], fault_file=str(fault)))
    server.launch()
    assert server.wait() == 13, server.log
    failed = server.events("failed")[0]
    assert (failed["category"], failed["cause"], failed["fault"]) == ("model-load", "killed", "machine")
    assert "was killed by SIGKILL" in failed["error"]


def test_it_drains_what_was_asked_before_it_ends(tmp_path: Path, versions: dict[int, ModelVersion]) -> None:
    fault = tmp_path / "fault"
    fault.write_text("slow")
    server = Server(tmp_path / "run", with_settings(versions[1], fault_file=str(fault))).start()
    connection = server.connect()
    body = json.dumps({"rows": [{"x": [1.0, 2.0, 3.0, 4.0]}]})
    connection.request("POST", "/v1/predict", body, {"Content-Type": "application/json", **server.bearer})
    stopped(server)
    assert connection.getresponse().status == 200
    connection.close()


def test_a_restart_answers_at_the_same_address_with_the_same_secret_and_its_clock_goes_on(
    tmp_path: Path, versions: dict[int, ModelVersion]
) -> None:
    server = Server(tmp_path, versions[1]).start()
    url, bearer, started_ms = server.url, server.bearer, server.live.started_ms
    assert stat.S_IMODE((server.serving / "bearer").stat().st_mode) == 0o600
    server.stop(signal.SIGKILL)
    server.start()
    assert (server.url, server.bearer, server.live.started_ms) == (url, bearer, started_ms)
    assert server.predict().status == 200
    stopped(server)
    steps = [event["step"] for event in server.events("heartbeat", "failed")]
    assert steps == sorted(steps)
    events: list[dict[str, Any]] = server.events()
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert [event["attempt"] for event in server.events("ready")] == [1, 2]


def test_a_job_that_names_another_version_is_obeyed_and_not_the_document_of_the_old_one(
    tmp_path: Path, versions: dict[int, ModelVersion]
) -> None:
    server = Server(tmp_path, versions[1]).start()
    assert server.ask("promote", versions[2])["event"] == "promoted"
    stopped(server)
    server.start()
    assert server.predict().version[1] == 2
    stopped(server)
    server.job = Server(tmp_path, versions[3]).job
    server.start()
    assert server.predict().version[1] == 3
    assert server.live.previous is None
    stopped(server)


def test_no_process_outlives_its_server(tmp_path: Path, versions: dict[int, ModelVersion]) -> None:

    def family(pid: int) -> set[int]:
        found, waiting = set(), {pid}
        states = {each: state for each in list_pids() if (state := read_process(each)) is not None}
        while waiting:
            found |= waiting
            waiting = {
                each for each, state in states.items() if state.parent in waiting and not state.is_ended
            } - found
        return found

    server = Server(tmp_path, versions[1], replicas=2).start()
    pids = family(server.pid)
    assert len(pids) >= 4  # itself, the model parent, two workers
    server.stop(signal.SIGKILL)
    wait_until(lambda: not any(_is_running(pid) for pid in pids), "a process is left")


def _is_running(pid: int) -> bool:
    state = read_process(pid)
    return state is not None and not state.is_ended


def test_connections_without_the_secret_use_up_no_files(
    tmp_path: Path, versions: dict[int, ModelVersion]
) -> None:
    """Shells give 1,024 open files, which as many idle connections use up: then nobody could ask, and no model be promoted."""
    pid = WarmParent.shared().pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    server = Server(tmp_path / "run", versions[1])
    idle: list[socket.socket] = []
    try:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (100, before[1]))
        server.start()
        host, _, port = server.url.removeprefix("http://").rpartition(":")
        idle += [socket.create_connection((host, int(port)), DEADLINE_S) for _ in range(200)]
        assert server.predict().status == 200
        assert server.ask("promote", versions[2])["event"] == "promoted"
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        for connection in idle:
            connection.close()
        server.stop(signal.SIGKILL)


@pytest.mark.parametrize("content", [b"", b"short\n", b"\xff\x00\n"])
def test_a_secret_that_was_cut_is_replaced(
    tmp_path: Path, versions: dict[int, ModelVersion], content: bytes
) -> None:
    server = Server(tmp_path / "run", versions[1])
    server.serving.mkdir(parents=True)
    (server.serving / "bearer").write_bytes(content)
    try:
        server.start()
        assert len((server.serving / "bearer").read_text().strip()) == 43
        assert server.predict().status == 200
    finally:
        server.stop(signal.SIGKILL)
