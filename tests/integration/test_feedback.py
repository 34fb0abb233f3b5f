"""Feedback to a model server becomes parquet for the next run: each row once, whatever is killed when."""

import http.client
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from model_server import Reply, Server, train_versions, wait_until
from worker_process import Run

from gen_worker.contract import failpoints
from gen_worker.contract.job.model_version import ModelVersion
from gen_worker.contract.process_identity import is_process_alive
from gen_worker.contract.serving import SETTLED, SettledFeedback, write_document

ROW = [1.0, 2.0, 3.0, 4.0]
STEPS = [name for name in failpoints.MODEL_SERVER if name.startswith("feedback.")]


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[int, ModelVersion]:
    return train_versions(tmp_path_factory.mktemp("trained"), steps=4)


@pytest.fixture
def server(tmp_path: Path, versions: dict[int, ModelVersion]) -> Iterator[Server]:
    server = Server(tmp_path / "run", versions[1], feedback={"rows": 4})
    yield server
    server.stop(signal.SIGKILL)


def answered(server: Server, *rows: list[float]) -> str:
    """The id of a request that was answered."""
    reply = server.predict(*rows)
    assert reply.status == 200
    return reply.headers["X-Request-Id"]


def feed(server: Server, *rows: tuple[str, int, float]) -> Reply:
    body = [{"request_id": request_id, "row": row, "y": y} for request_id, row, y in rows]
    return server.post("/v1/feedback", {"rows": body})


def parquet_rows(server: Server) -> list[dict[str, Any]]:
    paths = sorted((server.serving / "feedback").glob("*.parquet"))
    return [row for path in paths for row in pq.read_table(path).to_pylist()]


def test_feedback_is_joined_to_what_was_asked_in_the_training_schema_and_each_row_counts_once(
    server: Server, versions: dict[int, ModelVersion]
) -> None:
    server.start()
    request_id = answered(server, ROW, [5.0, 6.0, 7.0, 8.0])
    reply = feed(server, (request_id, 1, 0.5), ("nobody", 0, 1.0))
    assert (reply.status, reply.data["rows"]) == (200, ["accepted", "unknown"])
    reply = feed(server, (request_id, 1, 9.5), (request_id, 0, 1.5), (request_id, 0, 2.5))
    assert reply.data["rows"] == ["repeated", "accepted", "repeated"]
    server.stop(signal.SIGKILL)
    server.start()
    assert feed(server, (request_id, 0, 3.5)).data["rows"] == ["repeated"]
    assert server.stop() == 75
    found = sorted(parquet_rows(server), key=lambda row: row["y"])
    assert found == [{"x": [5.0, 6.0, 7.0, 8.0], "y": 0.5}, {"x": ROW, "y": 1.5}]
    (path,) = (server.serving / "feedback").glob("*.parquet")
    trained = versions[1].config["dataset"]["parquet_paths"][0]
    assert pq.read_schema(path).remove_metadata() == pq.read_schema(trained).remove_metadata()


def test_the_next_run_trains_on_the_files_as_they_are(server: Server, tmp_path: Path) -> None:
    server.start()
    request_id = answered(server, *[[float(row), 0.0, 0.0, 1.0] for row in range(4)])
    feed(server, *[(request_id, row, float(row)) for row in range(4)])
    due = server.wait_event("feedback_due")
    assert (due["number"], due["rows"], due["reason"], due["version"]["step"]) == (1, 4, "rows", 1)
    assert [Path(path).parent for path in due["files"]] == [Path(due["folder"])]
    config = server.live.version.config
    dataset = {"parquet_paths": [*config["dataset"]["parquet_paths"], *due["files"]], "batch_size": 104}
    job = {name: value for name, value in config.items() if name not in ("run_id", "dataset", "max_steps")}
    done = Run(tmp_path / "next", run_id="next", epochs=1, dataset=dataset, **job).work()
    assert done.returncode == 0, done.stderr


def test_faults_are_named_at_once_and_nothing_is_accepted(server: Server) -> None:
    server.start()
    request_id = answered(server, ROW)
    rows = [
        {"request_id": request_id, "y": 1.0},
        {"request_id": request_id, "row": 3, "y": 1.0},
        {"request_id": answered(server, ROW), "z": 1.0},
        {"request_id": answered(server, ROW), "y": "much"},
        {"request_id": answered(server, ROW), "y": None},
    ]
    reply = server.post("/v1/feedback", {"rows": rows})
    assert (reply.status, reply.data["error"]["kind"]) == (400, "input")
    faults = reply.data["error"]["faults"]
    assert [(fault["row"], fault.get("column")) for fault in faults] == [
        (1, "row"),
        (2, "z"),
        (2, "y"),
        (3, "y"),
        (4, "y"),
    ]
    assert [(fault["found"], fault["expected"]) for fault in faults[3:]] == [
        ("'much'", "float"),
        ("null", "float"),
    ]
    reply = server.post(
        "/v1/feedback", {"rows": [{"y": 1.0}, {"request_id": request_id, "row": -1, "y": 1.0}]}
    )
    assert [fault["column"] for fault in reply.data["error"]["faults"]] == ["request_id", "row"]
    assert feed(server, (request_id, 0, 1.0)).data["rows"] == ["accepted"]


def test_arrow_requests_take_feedback_too(server: Server) -> None:
    import pyarrow as pa

    server.start()
    rows = pa.table({"x": pa.array([ROW, ROW], pa.list_(pa.float32(), 4))})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_table(rows)
    connection = server.connect()
    headers = {**server.bearer, "Content-Type": "application/vnd.apache.arrow.stream"}
    connection.request("POST", "/v1/predict", bytes(sink.getvalue()), headers)
    reply = Reply(connection.getresponse())
    connection.close()
    assert reply.status == 200
    assert feed(server, (reply.headers["X-Request-Id"], 1, 4.0)).data["rows"] == ["accepted"]
    server.stop()
    assert parquet_rows(server) == [{"x": ROW, "y": 4.0}]


def test_without_feedback_in_the_job_there_is_no_such_route(
    tmp_path: Path, versions: dict[int, ModelVersion]
) -> None:
    server = Server(tmp_path, versions[1]).start()
    assert feed(server, (answered(server, ROW), 0, 1.0)).status == 404
    server.stop()
    assert not (server.serving / "requests").exists()


def test_an_error_that_is_too_large_makes_a_run_due_and_a_worse_version_is_not_promoted(
    tmp_path: Path, versions: dict[int, ModelVersion]
) -> None:
    worse = versions[1]
    server = Server(tmp_path, versions[4], feedback={"metric": "mse", "above": 50.0}).start()
    try:
        right = [row["y"] for row in server.predict(*[ROW] * 32).data["rows"]]
        request_id = answered(server, *[ROW] * 32)
        feed(server, *[(request_id, row, right[row] + 2.0) for row in range(32)])
        event = server.ask("promote", worse)
        assert (event["event"], event["cause"]) == ("promotion_refused", "feedback")
        figures = event["gate"]["feedback"]
        assert figures["live"] == pytest.approx(4.0)
        assert figures["value"] > figures["live"]
        assert figures["rows"] == 32
        assert server.events("feedback_due") == []
        request_id = answered(server, *[ROW] * 32)
        feed(server, *[(request_id, row, right[row] + 20.0) for row in range(32)])
        due = server.wait_event("feedback_due")
        assert (due["reason"], due["rows"]) == ("metric", 64)
        assert due["figures"]["mse"] == pytest.approx((4.0 + 400.0) / 2)
        assert server.ask("promote", versions[3], gate=None)["event"] in ("promoted", "promotion_refused")
    finally:
        server.stop()


def test_a_metric_that_cannot_be_computed_is_refused_at_the_start(
    tmp_path: Path, versions: dict[int, ModelVersion]
) -> None:
    server = Server(tmp_path, versions[1], feedback={"metric": "mse:score=y", "above": 1.0})
    server.launch()
    assert server.wait() == 13
    assert (
        "serving.feedback.metric: mse:score=y: the answers have no column 'score'"
        in server.events("failed")[0]["error"]
    )


def test_the_age_of_the_oldest_row_makes_a_run_due(tmp_path: Path, versions: dict[int, ModelVersion]) -> None:
    server = Server(tmp_path, versions[1], feedback={"max_age_s": 0.2}).start()
    try:
        feed(server, (answered(server, ROW), 0, 1.0))
        assert server.wait_event("feedback_due")["reason"] == "max_age_s"
    finally:
        server.stop()


def test_under_a_daemon_no_run_is_due_while_it_is_not_known_what_became_of_the_one_before(
    tmp_path: Path, versions: dict[int, ModelVersion]
) -> None:
    server = Server(tmp_path, versions[1], feedback={"rows": 2}).start(TRAINER_ATTEMPT="1")
    try:
        for _ in range(3):
            request_id = answered(server, ROW, ROW)
            feed(server, (request_id, 0, 1.0), (request_id, 1, 1.0))
            server.wait_event("feedback_due")  # the first
        write_document(server.serving / SETTLED, SettledFeedback(number=1))
        due = server.wait_event("feedback_due", that=lambda event: event["number"] == 2)
        assert due["rows"] == 4, "those of the second and the third time"
    finally:
        server.stop()


def test_killed_at_every_step_no_acknowledged_row_is_lost_and_none_is_there_twice(
    server: Server,
) -> None:
    """A client that repeats until it is told. Every second time half a frame is left at the end, as after a power cut."""
    server.job["serving"]["feedback"] = {"rows": 2}  # as many as the client sends at once
    acknowledged: list[float] = []
    for number, step in enumerate(STEPS):
        is_torn = number % 2 == 1
        server.launch(GEN_WORKER_FAILPOINTS=f"{step}=kill")
        was_killed = not server.wait_ready()  # on what the attempt before it left
        if was_killed:
            after_kill(server, is_torn=is_torn)
        request_id = ""
        pending = [(row, float(len(acknowledged) + row)) for row in range(4)]
        while pending:
            try:
                request_id = request_id or answered(
                    server, *[[float(row), 0.0, 0.0, 0.0] for row in range(4)]
                )
                outcomes = feed(server, *[(request_id, *each) for each in pending[:2]]).data["rows"]
            except (OSError, http.client.HTTPException):
                after_kill(server, is_torn=is_torn)
                was_killed = True
                continue
            assert set(outcomes) <= {"accepted", "repeated"}
            acknowledged += [y for _, y in pending[:2]]
            pending = pending[2:]
        if not was_killed:
            wait_until(lambda: is_dead(server), "it is on its way to parquet, and was not killed there")
            after_kill(server, is_torn=is_torn)
        server.stop(signal.SIGKILL)
    server.start()
    assert server.stop() == 75  # what was accepted becomes parquet at the latest now
    assert sorted(row["y"] for row in parquet_rows(server)) == acknowledged
    assert all(row["x"][0] == row["y"] % 4 for row in parquet_rows(server))
    check_dues(server, len(acknowledged))


def after_kill(server: Server, *, is_torn: bool) -> None:
    assert server.wait() == -signal.SIGKILL
    if is_torn:
        tear(server)
    server.start()


def is_dead(server: Server) -> bool:
    return not is_process_alive(server.pid)


def tear(server: Server) -> None:
    """Half a frame, as a power cut leaves it."""
    for folder in ("feedback", "requests"):
        for path in (server.serving / folder).glob("*.log"):
            with path.open("ab") as file:
                file.write(b"\xff\x00\x00\x00half")


def check_dues(server: Server, total: int) -> None:
    """Every row is in the files of one number; a number that is told again has the same fields."""
    by_number: dict[int, dict[str, Any]] = {}
    for event in server.events("feedback_due"):
        fields = {
            name: value for name, value in event.items() if name not in ("seq", "attempt", "timestamp_ms")
        }
        assert by_number.setdefault(event["number"], fields) == fields
    assert sorted(by_number) == list(range(1, len(by_number) + 1))
    files = [path for event in by_number.values() for path in event["files"]]
    assert len(files) == len(set(files))
    assert sum(event["rows"] for event in by_number.values()) == sum(
        pq.read_metadata(path).num_rows for path in files
    )
    assert sum(event["rows"] for event in by_number.values()) <= total


def test_a_request_log_has_the_share_of_the_requests_whole(
    tmp_path: Path, versions: dict[int, ModelVersion]
) -> None:
    server = Server(tmp_path, versions[2], request_log=0.5).start()
    ids = [f"request-{number}" for number in range(40)]
    for request_id in ids:
        server.predict(ROW, [0.0, 1.0, 2.0, 3.0], X_Request_Id=request_id)
    assert server.stop() == 75
    (path,) = (server.serving / "request_log").glob("*.parquet")
    rows = pq.read_table(path).to_pylist()
    logged = {row["request_id"] for row in rows}
    assert 8 <= len(logged) <= 32  # of 40, by their ids
    assert len(rows) == 2 * len(logged)
    first = next(row for row in rows if row["row"] == 0)
    assert (first["input.x"], first["step"], first["batch_shape"]) == (ROW, 2, 8)
    assert isinstance(first["answer.y"], float)


def test_a_full_disk_stops_no_answers(tmp_path: Path, versions: dict[int, ModelVersion]) -> None:
    server = Server(tmp_path, versions[1], feedback={"rows": 100})
    server.start(GEN_WORKER_FAILPOINTS="feedback.written=enospc")
    try:
        request_id = answered(server, ROW)
        reply = feed(server, (request_id, 0, 1.0))
        assert (reply.status, reply.data["error"]["kind"]) == (503, "unavailable")
        assert server.predict(ROW).status == 200
        assert feed(server, (request_id, 0, 1.0)).data["rows"] == ["accepted"]
    finally:
        server.stop()
    assert [row["y"] for row in parquet_rows(server)] == [1.0]


def test_a_server_answers_whatever_happened_to_the_files_of_feedback(server: Server) -> None:
    server.start()
    request_id = answered(server, *[ROW] * 4)
    feed(server, *[(request_id, row, 1.0) for row in range(4)])
    server.wait_event("feedback_due")
    wait_until(lambda: any((server.serving / "feedback").glob("*.keys")), "no part")
    server.stop(signal.SIGKILL)
    due = server.serving / "feedback" / "due.json"
    written = due.read_bytes()
    due.write_bytes(written[:20])
    server.start()
    request_id = answered(server, *[ROW] * 4)
    assert feed(server, *[(request_id, row, 1.0) for row in range(4)]).status == 200
    assert "no further run is asked for: " in server.log
    due.write_bytes(written)  # mended: the rules apply again
    # The first one may come again: the server was perhaps killed before it wrote down that it was told.
    server.wait_event("feedback_due", that=lambda event: event["number"] == 2)
    server.stop(signal.SIGKILL)

    for name in (
        ".live.json.1-ab.tmp",
        "feedback/.1.log.1-ab.tmp",
    ):  # as of a process that was killed, but folders
        (server.serving / name).mkdir()
        (server.serving / name / "kept").touch()
    requests = server.serving / "requests"
    requests.rename(server.serving / "kept")
    requests.touch()
    server.start()
    reply = feed(server, (answered(server, ROW), 0, 1.0))
    assert (reply.status, reply.data["error"]["kind"]) == (503, "unavailable")
    requests.unlink()
    wait_until(lambda: feed(server, (answered(server, ROW), 0, 1.0)).status == 200, "it is not opened again")


def test_damaged_feedback_costs_a_promotion_its_comparison_and_never_the_server(
    tmp_path: Path, versions: dict[int, ModelVersion]
) -> None:
    server = Server(tmp_path / "run", versions[1], feedback={"rows": 40, "metric": "mse", "above": 1e9})
    try:
        server.start()
        request_id = answered(server, *[ROW] * 40)
        feed(server, *[(request_id, row, 1.0) for row in range(40)])
        wait_until(lambda: any((server.serving / "feedback").glob("*.keys")), "no part")
        (part,) = (server.serving / "feedback").glob("*.parquet")
        part.write_bytes(part.read_bytes()[:100])
        assert server.ask("promote", versions[2])["event"] == "promoted"
        part.unlink()
        os.mkfifo(part)
        assert server.ask("promote", versions[3])["event"] == "promoted"
        assert server.predict(ROW).version[1] == 3
    finally:
        server.stop(signal.SIGKILL)
