"""A writer that was forked ahead of time does what one that was started does, and ends with its worker."""

import json
import subprocess
import sys
from pathlib import Path

SAVE = """
import json, os, signal, subprocess, sys
from pathlib import Path
from gen_worker.trainer.checkpoints.writing import warm_writer
warm_writer.prepare()
from gen_worker.trainer.checkpoints.writing.client import CheckpointWriterClient

def refuse(*arguments, **options):
    raise AssertionError("a writer was started though one was there")

how = sys.argv[2]
if how == "killed":
    os.kill(warm_writer._prepared[0].pid, signal.SIGKILL)
    os.waitid(os.P_PID, warm_writer._prepared[0].pid, os.WEXITED | os.WNOWAIT)
else:
    subprocess.Popen = refuse
client = CheckpointWriterClient(Path(sys.argv[1]), token="t", keep_last=3, keep_best=0)
client.start()
print(json.dumps({"pid": client.pid, "warm": isinstance(client._process, warm_writer.WarmWriter)}), flush=True)
if how == "orphan":
    os.kill(os.getpid(), signal.SIGKILL)
client.close()
"""


def start(folder: Path, how: str) -> tuple[dict[str, object], int]:
    done = subprocess.run(
        [sys.executable, "-c", SAVE, str(folder), how],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout), done.returncode


def test_the_prepared_writer_is_taken_and_ends_when_it_is_let_go(tmp_path: Path) -> None:
    said, code = start(tmp_path, "normal")
    assert (said["warm"], code) == (True, 0)
    assert not Path(f"/proc/{said['pid']}").exists()


def test_one_that_died_meanwhile_is_replaced_by_a_cold_one(tmp_path: Path) -> None:
    said, code = start(tmp_path, "killed")
    assert (said["warm"], code) == (False, 0)


def test_it_ends_when_its_worker_is_killed(tmp_path: Path) -> None:
    # run() returns when the pipe's last writer is gone; the writer has stderr open until it ends.
    said, code = start(tmp_path, "orphan")
    assert (said["warm"], code) == (True, -9)
