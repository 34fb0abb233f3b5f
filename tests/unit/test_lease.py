"""Two workers never hold one run's folder."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from gen_worker.contract.lease import FILE_NAME, Holder, RunLease
from gen_worker.contract.process_identity import is_process_alive, start_ticks
from gen_worker.errors import LeaseHeldError, StartupError

HOLD = """
import sys, pathlib
from gen_worker.contract.lease import RunLease
lease = RunLease.acquire(pathlib.Path(sys.argv[1]), run_id="r")
print("held", flush=True)
sys.stdin.read()
"""


def hold_elsewhere(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_a_living_holder_is_named_and_the_second_worker_is_refused_at_once(tmp_path: Path) -> None:
    process = hold_elsewhere(tmp_path)
    try:
        with pytest.raises(LeaseHeldError, match=f"pid {process.pid} "):
            RunLease.acquire(tmp_path, run_id="r", sleep=pytest.fail)
    finally:
        end(process)


def test_the_lease_of_a_killed_worker_is_free_at_once(tmp_path: Path) -> None:
    end(hold_elsewhere(tmp_path))
    lease = RunLease.acquire(tmp_path, run_id="r", sleep=pytest.fail)
    assert Holder.__struct_fields__[0] in lease.path.read_text()
    lease.release()


def test_a_writer_that_outlives_its_worker_is_waited_for(tmp_path: Path) -> None:
    lease = RunLease.acquire(tmp_path, run_id="r")
    heir = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[lease.fd])
    lease.release()
    gone = Holder(run_id="r", pid=2**22 - 1, host=os.uname().nodename, started_ticks=1)
    (tmp_path / FILE_NAME).write_bytes(msgspec.json.encode(gone))
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            heir.communicate()

    RunLease.acquire(tmp_path, run_id="r", sleep=sleep).release()
    assert len(waits) >= 3


def test_a_lock_that_is_never_let_go_ends_in_an_error_not_in_a_hang(tmp_path: Path) -> None:
    lease = RunLease.acquire(tmp_path, run_id="r")
    (tmp_path / FILE_NAME).write_bytes(b"")
    with pytest.raises(LeaseHeldError, match="still locked"):
        RunLease.acquire(tmp_path, run_id="r", wait_s=0.0)
    lease.release()


def test_a_reused_pid_is_not_taken_for_the_holder() -> None:
    ticks = start_ticks(os.getpid())
    assert ticks is not None
    host = os.uname().nodename
    assert Holder(run_id="r", pid=os.getpid(), host=host, started_ticks=ticks).is_alive()
    assert not Holder(run_id="r", pid=os.getpid(), host=host, started_ticks=ticks - 1).is_alive()
    assert Holder(run_id="r", pid=1, host="another-machine", started_ticks=1).is_alive()


def test_the_checkpoints_of_another_run_are_not_taken_over(tmp_path: Path) -> None:
    RunLease.acquire(tmp_path, run_id="first").release()
    RunLease.acquire(tmp_path, run_id="second").release()
    (tmp_path / "step-00000001.meta.json").touch()
    with pytest.raises(StartupError, match="'second'"):
        RunLease.acquire(tmp_path, run_id="third")


def test_a_process_that_ended_and_was_not_asked_about_is_dead() -> None:
    child = subprocess.Popen(["sleep", "0"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is still in the table
    assert start_ticks(child.pid) is not None
    assert not is_process_alive(child.pid, None)
    child.wait()
    assert is_process_alive(os.getpid(), start_ticks(os.getpid()))
    assert not is_process_alive(os.getpid(), 1)
