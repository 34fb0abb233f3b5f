"""Claims about the loggers: what arrives where, and that a back end which does not answer costs no step."""

import contextlib
import json
import math
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from hand_built_run import HandBuiltRun

from gen_worker.errors import StartupError, TrainingCanceled, TrainingTimeout, TrainStepError
from gen_worker.trainer.callbacks.background_logger import (
    Delivery,
    Ending,
    Entry,
    RefusedError,
    job_parameters,
)
from gen_worker.trainer.callbacks.base import Callback
from gen_worker.trainer.callbacks.loggers import JsonlLogger, MLflowLogger, TensorBoardLogger

DEADLINE_S = 60.0
NAN = float("nan")


def wait_until(is_so: Callable[[], bool]) -> None:
    """For what another process or a library's thread does, which wakes nobody."""
    beat = threading.Event()
    for _ in range(int(DEADLINE_S / 0.01)):
        if is_so():
            return
        beat.wait(0.01)
    raise AssertionError("it did not come about")


def wait_for_threads_to_end() -> None:
    wait_until(lambda: not any(thread.name.startswith("log-") for thread in threading.enumerate()))


def train(run: HandBuiltRun, steps: Sequence[int]) -> None:
    for step in steps:
        run.handle.ctx.progress.step = step
        run.emit({"train/loss": 1.0 / step, "train/lr": 0.5})


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def test_the_job_is_logged_flat_and_without_secrets() -> None:
    run = HandBuiltRun(
        [],
        hyperparams={"lr": 0.1, "layers": {"sizes": [1, 2], "bias": True}, "none": None},
        env={"TOKEN": "hunter2"},
        weights="https://user:hunter2@host/w.pt?sig=hunter2",
        inputs={"dataset_parquet_refs": ["https://host/d?sig=hunter2"]},
        profiles={"p": {"env": {"TOKEN": "hunter2"}}},
    )
    found = job_parameters(run.handle.job)
    assert found["hyperparams.lr"] == 0.1
    assert found["hyperparams.layers.sizes"] == "[1,2]"
    assert found["hyperparams.layers.bias"] is True
    assert found["checkpoints.keep_last"] == 3
    assert "hyperparams.none" not in found
    assert "https://***@host/w.pt?***" in found["weights"]
    assert "hunter2" not in json.dumps(found)


def test_a_jsonl_log_holds_parameters_metrics_validations_checkpoints_and_the_end(tmp_path: Path) -> None:
    run = HandBuiltRun([JsonlLogger()], tmp_path, hyperparams={"lr": 0.1}).begin()
    train(run, [1])
    run.emit({"train/loss": NAN, "grad": -math.inf})
    run.validate({"val/loss": 0.25})
    run.saved("step-00000001.pt")
    run.state.stop_reason = "flat"
    run.end()
    begin, *middle, end = lines(tmp_path / "logs" / "metrics.jsonl")
    assert (begin["kind"], begin["run_id"], begin["step"]) == ("begin", "run-1", 0)
    assert begin["parameters"]["hyperparams.lr"] == 0.1
    for line in middle:
        assert line.pop("time_ms") > 0
    assert middle == [
        {"kind": "metrics", "step": 1, "values": {"train/loss": 1.0, "train/lr": 0.5}},
        {"kind": "metrics", "step": 1, "values": {"train/loss": "nan", "grad": "-inf"}},
        {"kind": "validation", "step": 1, "rows": 7, "duration_s": 0.5, "metrics": {"val/loss": 0.25}},
        {"kind": "metrics", "step": 1, "values": {"val/loss": 0.25}},
        {
            "kind": "checkpoint",
            "step": 1,
            "path": "checkpoints/step-00000001.pt",
            "final": False,
            "verified": True,
            "size_bytes": 10,
        },
    ]
    assert (end["kind"], end["status"], end["reason"]) == ("end", "completed", "flat")
    assert run.said == []


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (TrainingCanceled("asked"), "cancelled"),
        (KeyboardInterrupt(), "cancelled"),
        (TrainingTimeout("late"), "timeout"),
        (TrainStepError("see https://h/x?sig=hunter2"), "failed"),
    ],
)
def test_the_log_says_how_the_run_ended(tmp_path: Path, error: BaseException, status: str) -> None:
    path = tmp_path / "own.jsonl"
    run = HandBuiltRun([JsonlLogger(path)]).begin()
    run.end(error)
    run.end(error)  # some other callback failed at the end: this one is asked again
    _, end = lines(path)
    assert end["status"] == status
    assert type(error).__name__ in end["reason"]
    assert "hunter2" not in end["reason"]


def test_a_resumed_jsonl_log_goes_on_in_the_same_file_after_a_half_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    run = HandBuiltRun([JsonlLogger(path)]).begin()
    train(run, [1, 2])
    run.end(TrainingCanceled("asked"))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind": "metr' + b"x" * 5000)
    again = HandBuiltRun([JsonlLogger(path)], step=1).begin()
    train(again, [2])
    again.end()
    assert path.read_bytes().startswith(whole)
    assert [line["kind"] for line in lines(path)[4:]] == ["begin", "metrics", "end"]
    assert (lines(path)[4]["step"], "parameters" in lines(path)[4]) == (1, False)


@pytest.mark.parametrize("logger", [JsonlLogger, TensorBoardLogger])
def test_only_the_main_process_logs(tmp_path: Path, logger: Callable[[], Callback]) -> None:
    run = HandBuiltRun([logger()], tmp_path, rank=1, world_size=2).begin()
    train(run, [1])
    run.validate({"val/loss": 1.0})
    run.saved()
    run.end()
    assert list(tmp_path.iterdir()) == []


def tensorboard(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def text(accumulator: Any, tag: str) -> list[tuple[int, str]]:
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in accumulator.Tensors(tag)]


def test_tensorboard_reads_scalars_and_texts(tmp_path: Path) -> None:
    run = HandBuiltRun([TensorBoardLogger()], tmp_path, hyperparams={"name": "a|b"}).begin()
    train(run, [1, 2])
    run.validate({"val/loss": 0.25})
    run.saved("step-00000002.pt")
    run.end()
    found = tensorboard(tmp_path / "tensorboard")
    assert [(event.step, event.value) for event in found.Scalars("train/loss")] == [(1, 1.0), (2, 0.5)]
    assert [(event.step, event.value) for event in found.Scalars("val/loss")] == [(2, 0.25)]
    assert text(found, "checkpoint") == [(2, "checkpoints/step-00000002.pt")]
    assert text(found, "end") == [(2, "completed")]
    ((_, parameters),) = text(found, "parameters")
    assert "|hyperparams.name|a\\|b|" in parameters


def test_tensorboard_forgets_the_steps_that_a_resume_trains_again(tmp_path: Path) -> None:
    run = HandBuiltRun([TensorBoardLogger(tmp_path)]).begin()
    train(run, [1, 2, 3, 4])
    run.end(TrainingCanceled("asked"))
    again = HandBuiltRun([TensorBoardLogger(tmp_path)], step=2).begin()
    train(again, [3])
    again.end()
    found = tensorboard(tmp_path)
    assert [event.step for event in found.Scalars("train/loss")] == [1, 2, 3]
    assert len(found.Tensors("parameters")) == 1


@pytest.mark.parametrize(
    ("logger", "module", "extra"),
    [
        (TensorBoardLogger, "tensorboard.compat.proto.event_pb2", "tensorboard"),
        (MLflowLogger, "mlflow.tracking.client", "mlflow"),
    ],
)
def test_a_missing_package_is_told_at_the_start_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, logger: Callable[[], Callback], module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(StartupError, match=rf"pip install 'trn\[{extra}\]'"):
        HandBuiltRun([logger()]).begin()


@pytest.fixture
def calm_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the logger sets in the environment is taken back after the test."""
    for name in (
        "MLFLOW_HTTP_REQUEST_TIMEOUT",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES",
        "MLFLOW_DISABLE_TELEMETRY",
    ):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the one store that needs no server


@pytest.fixture
def store(tmp_path: Path, calm_mlflow: None) -> str:
    return (tmp_path / "mlruns").as_uri()


def mlflow_client(uri: str) -> Any:
    from mlflow.tracking.client import MlflowClient

    return MlflowClient(tracking_uri=uri)


def mlflow_runs(uri: str) -> list[Any]:
    client = mlflow_client(uri)
    experiment = client.get_experiment_by_name("trn")
    return list(client.search_runs([experiment.experiment_id]))


def mlflow_steps(uri: str, run_id: str, name: str) -> list[int]:
    return [metric.step for metric in mlflow_client(uri).get_metric_history(run_id, name)]


def test_mlflow_gets_parameters_metrics_checkpoints_and_the_end(store: str) -> None:
    hyperparams = {f"p{number}": number for number in range(250)}  # more than one call takes
    logger = MLflowLogger(store, run_name="mine")
    run = HandBuiltRun([logger], hyperparams=hyperparams, tags={"team": "a"}).begin()
    train(run, [1, 2])
    run.emit({"odd name?": 1.0})
    run.validate({"val/loss": 0.25})
    run.saved("step-00000002.pt")
    run.end()
    assert run.said == []
    (found,) = mlflow_runs(store)
    assert found.info.run_id == logger.mlflow_run_id
    assert (found.info.status, found.info.run_name) == ("FINISHED", "mine")
    assert len([name for name in found.data.params if name.startswith("hyperparams.p")]) == 250
    assert found.data.metrics["train/loss"] == 0.5
    assert found.data.metrics["odd name_"] == 1.0
    assert mlflow_steps(store, found.info.run_id, "train/loss") == [1, 2]
    assert found.data.metrics["val/loss"] == 0.25
    tags = found.data.tags
    assert (tags["trn.checkpoint"], tags["trn.checkpoint_step"]) == ("checkpoints/step-00000002.pt", "2")
    assert (tags["trn.status"], tags["trn.run_id"], tags["team"]) == ("completed", "run-1", "a")


def test_a_resumed_run_goes_on_in_its_mlflow_run(store: str) -> None:
    run = HandBuiltRun([MLflowLogger(store)], hyperparams={"lr": 0.1}).begin()
    train(run, [1])
    run.end(TrainingCanceled("asked"))
    (found,) = mlflow_runs(store)
    assert found.info.status == "KILLED"
    saved = run.callbacks.state_dict()
    assert saved == {"MLflowLogger": {"mlflow_run_id": found.info.run_id}}
    again = HandBuiltRun([MLflowLogger(store)], step=1, hyperparams={"lr": 0.2})
    again.callbacks.load_state_dict(saved)
    again.begin()
    train(again, [2])
    again.end()
    assert again.said == []
    (found,) = mlflow_runs(store)
    assert found.info.status == "FINISHED"
    assert found.data.params["hyperparams.lr"] == "0.1"
    assert mlflow_steps(store, found.info.run_id, "train/loss") == [1, 2]


def test_a_run_killed_before_its_first_checkpoint_goes_on_in_its_mlflow_run(store: str) -> None:
    killed = MLflowLogger(store)
    HandBuiltRun([killed]).begin()
    wait_until(lambda: killed.mlflow_run_id is not None)
    assert killed._delivery is not None
    killed._delivery.abandon()
    run = HandBuiltRun([MLflowLogger(store)]).begin()
    train(run, [1])
    run.end()
    (found,) = mlflow_runs(store)
    assert found.info.status == "FINISHED"


def test_a_run_that_begins_anew_after_its_end_gets_an_mlflow_run_of_its_own(store: str) -> None:
    for _ in range(2):
        run = HandBuiltRun([MLflowLogger(store)]).begin()
        run.end()
    assert len(mlflow_runs(store)) == 2


def test_an_mlflow_run_that_was_deleted_is_replaced(store: str) -> None:
    logger = MLflowLogger(store)
    logger.mlflow_run_id = "0" * 32
    run = HandBuiltRun([logger], step=1).begin()
    run.end()
    (found,) = mlflow_runs(store)
    assert found.info.run_id == logger.mlflow_run_id


def test_a_store_that_mlflow_cannot_use_is_told_at_the_start(calm_mlflow: None) -> None:
    with pytest.raises(StartupError, match="Give MLflowLogger the `tracking_uri` of a server") as found:
        HandBuiltRun([MLflowLogger("nonsense://host?password=hunter2")]).begin()
    assert "hunter2" not in str(found.value)


class MLflowStandIn:
    """As much of a tracking server as the client asks for; everything it was sent is kept."""

    def __init__(self, port: int = 0) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.refusal: dict[str, Any] | None = None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(outer.answer(urlsplit(self.path).path, {}))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._answer(outer.answer(urlsplit(self.path).path, body))

            def _answer(self, answer: tuple[int, dict[str, Any]]) -> None:
                status, document = answer
                payload = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, *args: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        self.uri = f"http://127.0.0.1:{self._server.server_address[1]}"

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        name = path.rpartition("mlflow/")[2]
        answer = self._answer_to(name, body)
        self.calls.append((name, body))  # what is seen here is decided
        return answer

    def _answer_to(self, name: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if name == "experiments/get-by-name":
            return 404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "none"}
        if name == "experiments/create":
            return 200, {"experiment_id": "1"}
        if name == "runs/create":
            return 200, {"run": {"info": {"run_id": "r", "experiment_id": "1", "status": "RUNNING"}}}
        if name == "runs/log-batch" and "metrics" in body and self.refusal is not None:
            return 400, self.refusal
        return 200, {}

    def steps(self) -> list[int]:
        return [
            int(metric["step"])
            for name, body in list(self.calls)
            if name == "runs/log-batch"
            for metric in body.get("metrics", ())
            if metric["key"] == "train/loss"
        ]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(DEADLINE_S)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_an_mlflow_server_that_is_away_costs_the_oldest_records_and_two_sentences(calm_mlflow: None) -> None:
    port = free_port()
    logger = MLflowLogger(f"http://127.0.0.1:{port}", max_pending=5, close_s=DEADLINE_S)
    run = HandBuiltRun([logger]).begin()
    wait_until(lambda: len(run.warnings) == 1)  # nobody listens there
    train(run, range(1, 21))
    server = MLflowStandIn(port)
    try:
        run.end()
    finally:
        server.close()
    assert server.steps() == [16, 17, 18, 19, 20]
    away, back = run.warnings
    assert f"MLflow at http://127.0.0.1:{port} cannot be written" in away
    assert "15 records were dropped" in back
    assert server.calls[-1][0] == "runs/update"
    assert server.calls[-1][1]["status"] == "FINISHED"


def test_an_mlflow_server_that_never_comes_costs_the_end_a_bounded_wait_and_is_told(
    calm_mlflow: None,
) -> None:
    run = HandBuiltRun([MLflowLogger(f"http://127.0.0.1:{free_port()}", close_s=0.05)]).begin()
    train(run, [1, 2, 3])
    run.end()
    assert "Not delivered: 3 records, the status of the run" in run.warnings[-1]
    wait_for_threads_to_end()


def test_an_mlflow_server_that_accepts_and_never_answers_holds_up_nothing(calm_mlflow: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        run = HandBuiltRun([MLflowLogger(f"http://127.0.0.1:{port}", close_s=0.05)]).begin()
        connection, _ = silent.accept()
        with connection:
            train(run, range(1, 1001))
            run.end()
    assert "Not delivered: 1000 records, the status of the run" in run.warnings[-1]
    wait_for_threads_to_end()


def test_what_mlflow_refuses_is_dropped_counted_and_told_once(calm_mlflow: None) -> None:
    server = MLflowStandIn()
    server.refusal = {"error_code": "INVALID_PARAMETER_VALUE", "message": "no such thing"}
    try:
        run = HandBuiltRun([MLflowLogger(server.uri, close_s=DEADLINE_S)]).begin()
        for step in (1, 2):
            train(run, [step])
            wait_until(lambda step=step: step in server.steps())
        server.refusal = None
        train(run, [3])
        run.end()
    finally:
        server.close()
    assert server.steps() == [1, 2, 3]
    refused, back = run.warnings
    assert "it rejected 1 records: INVALID_PARAMETER_VALUE: no such thing" in refused
    assert "2 records were dropped" in back


class Sink:
    """A back end under a test's hand: it takes a batch when it is allowed to."""

    name = "the sink"

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.ending: Ending | None = None
        self.allowed = threading.Event()
        self.asked = threading.Event()

    def open(self) -> None: ...

    def send(self, entries: Sequence[Entry]) -> int:
        self.asked.set()
        assert self.allowed.wait(DEADLINE_S)
        self.steps.append(entries[0].step)
        return 1

    def close(self, ending: Ending) -> None:
        self.ending = ending


@contextlib.contextmanager
def delivery(sink: Any, **settings: Any) -> Iterator[tuple[Delivery, list[str]]]:
    said: list[str] = []
    fast = {"flush_every_s": 0.005, "first_backoff_s": 0.005}
    yield Delivery(sink, lambda message, _level: said.append(message), **fast | settings), said


def entry(step: int) -> Entry:
    return Entry(kind="metrics", step=step, time_ms=1, values={"x": 1.0})


ENDING = Ending(status="completed", step=9, time_ms=2)


def test_a_call_that_takes_too_long_is_told_while_it_is_still_waiting() -> None:
    sink = Sink()
    with delivery(sink, stall_s=0.0) as (made, said):
        made.put(entry(1))
        assert sink.asked.wait(DEADLINE_S)
        made.put(entry(2))
        assert said == [
            "the sink cannot be written: no answer for 0 s. Training continues. Up to 10000 records are kept for"
            " retry, then the oldest are dropped"
        ]
        sink.allowed.set()
        made.close(ENDING, within_s=DEADLINE_S)
        assert said[1:] == ["the sink can be written again: nothing was lost"]
        assert sink.steps == [1, 2]
        assert sink.ending == ENDING


def test_a_back_end_that_does_not_keep_up_loses_the_oldest_and_is_told() -> None:
    sink = Sink()
    with delivery(sink, max_pending=3) as (made, said):
        made.put(entry(1))
        assert sink.asked.wait(DEADLINE_S)
        for step in range(2, 11):
            made.put(entry(step))
        sink.allowed.set()
        made.close(ENDING, within_s=DEADLINE_S)
        assert sink.steps == [1, 8, 9, 10]
        assert len(said) == 2
        assert "it is too slow" in said[0]
        assert "6 records were dropped" in said[1]


def test_what_is_left_at_the_end_is_counted_and_nothing_is_said_later() -> None:
    sink = Sink()
    with delivery(sink, max_pending=3) as (made, said):
        made.put(entry(1))
        assert sink.asked.wait(DEADLINE_S)
        for step in range(2, 6):
            made.put(entry(step))
        made.close(ENDING, within_s=0.0)
        assert said[1:] == [
            "the sink timed out after 0 s. Not delivered: 4 records, 1 records that were dropped before, the status"
            " of the run"
        ]
        sink.allowed.set()
        made._thread.join(DEADLINE_S)
        assert not made._thread.is_alive()
        assert len(said) == 2
        assert sink.ending is None


def test_an_ending_that_is_refused_ends_the_delivery() -> None:
    class Refusing(Sink):
        def close(self, ending: Ending) -> None:
            raise RefusedError("the run is gone")

    sink = Refusing()
    sink.allowed.set()
    with delivery(sink) as (made, said):
        made.put(entry(1))
        made.close(ENDING, within_s=DEADLINE_S)
        assert "it rejected the status of the run: the run is gone" in said[0]


def test_a_full_disk_leaves_whole_lines_and_is_written_again_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is stood in for at the system call: half of a piece is written, then there is no room."""
    import os

    from gen_worker.trainer.callbacks import loggers

    path = tmp_path / "log.jsonl"
    real_write, is_full = os.write, threading.Event()
    told = threading.Event()

    def write(fd: int, data: memoryview) -> int:
        if is_full.is_set():
            if len(data) < 20:
                raise OSError(28, "No space left on device")
            return real_write(fd, data[: len(data) - 10])
        return real_write(fd, data)

    run = HandBuiltRun([JsonlLogger(path, close_s=DEADLINE_S)])
    run.handle.write_log = lambda message, level: (run.said.append((level, message)), told.set())[0]
    run.begin()
    wait_until(lambda: path.exists() and path.read_bytes().endswith(b"\n"))
    monkeypatch.setattr(loggers.os, "write", write)
    is_full.set()
    train(run, [1, 2])
    assert told.wait(DEADLINE_S)
    assert [line["kind"] for line in lines(path)] == ["begin"]
    is_full.clear()
    run.end()
    assert [line["kind"] for line in lines(path)] == ["begin", "metrics", "metrics", "end"]
    away, back = run.said
    assert "No space left on device" in away[1]
    assert "nothing was lost" in back[1]
