"""Claims about what launcher, worker and daemon share: one owner of an attempt, whatever the order."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from gen_worker.contract.process_identity import boot_id, is_same_process, read_process
from gen_worker.launcher import messages as launcher_protocol
from gen_worker.launcher.attempt_records import (
    AttemptRecord,
    ExitRecord,
    claim,
    exit_path,
    read_exit,
    read_record,
    record_path,
    write_exit,
)
from gen_worker.launcher.messages import (
    Launch,
    Refused,
    WorkerPlan,
    code_stamp,
    encode,
    read_id,
    request_decoder,
)
from trn.executors.base import LaunchPlan

RACE = """
import os, sys
from pathlib import Path
from gen_worker.launcher.attempt_records import AttemptRecord, claim, read_record

folder, num_rounds, num_racers = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
for number in range(num_rounds):
    go_read, go_write = os.pipe()
    pids = []
    for racer in range(num_racers):
        pid = os.fork()
        if pid == 0:
            os.close(go_write)
            os.read(go_read, 1)  # all at once
            path = folder / f"{number}.json"
            record = AttemptRecord(abandoned=True) if racer % 2 else AttemptRecord(pid=os.getpid(), boot_id="b")
            is_winner = claim(path, record)
            seen = read_record(path, "")
            is_told_right = seen is not None and (seen == record) == is_winner
            is_whole = seen is not None and (seen.abandoned or seen.boot_id == "b")
            if racer % 2 and not is_winner and seen is not None and seen.abandoned:
                is_told_right = True  # another gave it up: the same words
            os._exit((10 if is_winner else 0) + (0 if is_told_right and is_whole else 1))
        pids.append(pid)
    os.close(go_write)
    os.close(go_read)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert sorted(codes) == [0] * (num_racers - 1) + [10], (number, codes)
print("one winner each")
"""


def test_of_many_that_want_an_attempt_exactly_one_gets_it_and_all_see_who(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RACE, str(tmp_path), "60", "8"], capture_output=True, text=True, check=False
    )
    assert done.stdout == "one winner each\n", done.stderr
    assert len(list(tmp_path.iterdir())) == 60, "temporary files are left"


def test_a_record_tells_a_process_an_abandoned_attempt_and_nothing_apart(tmp_path: Path) -> None:
    path = record_path(str(tmp_path / "not made yet"), 3)
    assert read_record(path, "") is None
    assert claim(path, AttemptRecord(boot_id="b", pid=7, start_ticks=9))
    assert not claim(path, AttemptRecord(abandoned=True))
    assert read_record(path, "") == AttemptRecord(boot_id="b", pid=7, start_ticks=9)
    assert msgspec.json.decode(path.read_bytes()) == {"boot_id": "b", "pid": 7, "start_ticks": 9}
    path.write_bytes(b"")  # as a power cut may leave it
    emptied = read_record(path, "")
    assert emptied is not None
    assert not emptied.abandoned
    assert emptied.boot_id != boot_id()


def test_a_claim_that_the_disk_refuses_is_an_error_and_not_a_loss(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        claim(record_path(str(tmp_path / "file"), 1), AttemptRecord(abandoned=True))


def test_an_exit_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = exit_path(str(tmp_path), 2)
    assert read_exit(path, "") is None
    record = ExitRecord(exit_code=-9, is_out_of_memory=True, detail="killed")
    write_exit(path, record)
    assert read_exit(path, "") == record
    assert path.name == "2.exit.json"
    assert [entry.name for entry in tmp_path.iterdir()] == ["2.exit.json"]


def test_the_plan_crosses_the_socket_whole() -> None:
    for_other_pools = {"gpus"}  # the launcher is of this machine, where the plan names the devices
    assert {*WorkerPlan.__struct_fields__} == {*LaunchPlan.__struct_fields__} - for_other_pools
    plan = LaunchPlan(
        run_id="r",
        number=2,
        argv=("python", "-m", "x"),
        env={"A": "ä\n"},
        cwd="/",
        code_dir="",
        log_path="/l",
        attempt_dir="/a",
        checkpoints_dir="/c",
        events_path="/e",
        trainer="a:B",
        is_warm=False,
    )
    wanted = msgspec.convert(msgspec.to_builtins(plan), WorkerPlan)
    line = encode(Launch(id=4, plan=wanted))
    assert b"\n" not in line
    assert request_decoder.decode(line) == Launch(id=4, plan=wanted)


def test_a_plan_of_a_daemon_from_before_an_upgrade_is_read() -> None:
    """The first release had these fields and no others; every other one has a default."""
    released = {
        "run_id": "r",
        "number": 1,
        "argv": ["python"],
        "env": {},
        "cwd": "/",
        "code_dir": "",
        "log_path": "/log",
        "attempt_dir": "/runs/r/attempts",
        "contract_path": "/runs/r/contract.json",
        "is_warm": True,
    }
    line = msgspec.json.encode({"type": "launch", "id": 1, "plan": released})
    request = request_decoder.decode(line)
    assert isinstance(request, Launch)
    assert request.plan.attempt_dir == "/runs/r/attempts"


@pytest.mark.parametrize(
    ("line", "expected"), [(b'{"id": 7, "type": "fly"}', 7), (b'{"id": "x"}', 0), (b"\xff", 0), (b"", 0)]
)
def test_a_request_that_is_none_still_tells_its_id_if_it_has_one(line: bytes, expected: int) -> None:
    assert read_id(line) == expected
    assert msgspec.json.decode(encode(Refused(id=0, message="no")))["type"] == "refused"


def test_a_process_is_the_same_only_with_its_start_and_its_boot() -> None:
    state = read_process(os.getpid())
    assert state is not None
    assert is_same_process(os.getpid(), state.start_ticks, boot_id())
    assert not is_same_process(os.getpid(), state.start_ticks + 1, boot_id())
    assert not is_same_process(os.getpid(), state.start_ticks, "another boot")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert not is_same_process(ended.pid, None, boot_id())


def test_the_stamp_is_that_of_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert code_stamp() == code_stamp()
    (tmp_path / "one.py").write_text("a = 1\n")
    monkeypatch.setattr(launcher_protocol, "__file__", str(tmp_path / "launcher" / "messages.py"))
    before = code_stamp()
    (tmp_path / "one.py").write_text("a = 12\n")
    assert code_stamp() != before
