"""An attempt of a run whose worker does not train: lease, events, heartbeat, cancel and the one terminal event."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gen_worker.contract.job.spec import InputsSpec
from gen_worker.contract.lease import RunLease
from gen_worker.errors import LeaseHeldError, TrainingCanceled
from gen_worker.trainer.attempt.runtime_env import WorkerEnvironment, read_library_environment
from gen_worker.trainer.attempt.session import AttemptSession, fetch_inputs
from gen_worker.trainer.job_lifecycle import raise_stop

DEADLINE_S = 60.0


class Server:
    """Answers requests until it is cancelled or has no more of them. It has no loop, no model and no checkpoint."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        environment = read_library_environment(folder)
        self.environment = msgspec.structs.replace(environment, attempt=3, **options)

    def serve(self, *requests: Callable[[], object]) -> int:
        session = AttemptSession(environment=self.environment, run_id="served", heartbeat_s=0.01)
        with session:
            session.start(mode="inference", checkpoint="step-00000007")
            session.authorize()
            for answered, request in enumerate(requests, start=1):
                request()
                if session.stop:
                    raise_stop(session.stop)
                session.progress.step = answered
            session.complete(num_requests=len(requests))
        return session.progress.step

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.environment.events_path.read_text().splitlines()]

    def wait_for_heartbeat(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not any(event["event"] == "heartbeat" for event in self.events()):
            assert time.monotonic() < deadline, "there was no heartbeat"
            time.sleep(0.01)


def test_a_worker_that_does_not_train_has_a_lease_heartbeats_and_one_terminal_event(tmp_path: Path) -> None:
    server = Server(tmp_path)

    def is_leased() -> None:
        with pytest.raises(LeaseHeldError):
            RunLease.acquire(server.environment.checkpoints_dir, run_id="served")

    assert server.serve(is_leased, server.wait_for_heartbeat) == 2
    events = server.events()
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    first, *between, last = events
    assert (first["event"], first["attempt"], first["mode"], first["pid"]) == (
        *("started", 3, "inference"),
        os.getpid(),
    )
    assert {event["event"] for event in between} == {"heartbeat"}
    assert (last["event"], last["step"], last["num_requests"]) == ("completed", 2, 2)
    RunLease.acquire(server.environment.checkpoints_dir, run_id="served").release()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_obeys_a_signal_and_says_so(tmp_path: Path, number: signal.Signals) -> None:
    server, before = Server(tmp_path), signal.getsignal(number)
    with pytest.raises(TrainingCanceled, match=number.name):
        server.serve(lambda: None, lambda: os.kill(os.getpid(), number))
    last = server.events()[-1]
    assert (last["event"], last["step"], last["category"]) == ("failed", 1, "cancelled")
    assert signal.getsignal(number) == before


def test_it_obeys_the_cancel_file(tmp_path: Path) -> None:
    (tmp_path / "cancel").touch()
    server = Server(tmp_path, cancel_file=tmp_path / "cancel")
    with pytest.raises(TrainingCanceled, match="cancel was found"):
        server.serve(lambda: None)
    assert server.events()[-1]["category"] == "cancelled"


def test_an_error_of_its_own_and_an_end_without_a_result_are_failures(tmp_path: Path) -> None:
    server = Server(tmp_path)
    with pytest.raises(ZeroDivisionError):
        server.serve(lambda: 1 // 0)
    assert server.events()[-1]["error"].startswith("ZeroDivisionError")
    again = msgspec.structs.replace(server.environment, attempt=4)
    with AttemptSession(environment=again, run_id="served") as session:
        session.start()
    assert server.events()[-1]["event"] == "failed"


def test_it_fetches_its_inputs_without_a_job_to_train(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"1234")
    environment: WorkerEnvironment = Server(tmp_path, base_dir=tmp_path).environment
    with AttemptSession(environment=environment, run_id="served") as session:
        session.start()
        inputs = fetch_inputs(
            environment,
            InputsSpec(base_model_ref="weights.bin"),
            auth=session.authorize(),
            reporter=session.reporter,
            stop=session.stop,
        )
        session.complete()
    assert inputs.base_model_path == tmp_path / "weights.bin"
