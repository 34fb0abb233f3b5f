"""Killed means retried: the job of the quickstart, with no setting for it, ends bit for bit like one that nobody killed."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from documents import ROOT, read_blocks

import trn

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
from daemon_process import DEADLINE_S, DaemonProcess, end_everything

pytestmark = pytest.mark.usefixtures("warm_launchers")
HELD = '''
import os
import time
from pathlib import Path

from my_trainer import MyTrainer


class Held(MyTrainer):
    """Stops before some steps, once each, until it is killed."""

    def train_step(self, prepared_batch, state, ctx):
        mark = Path(ctx.job.hyperparams["marks"]) / str(ctx.step)
        if ctx.step in (120, 220, 250) and not mark.exists():
            mark.with_suffix(".new").write_text(str(os.getpid()))
            mark.with_suffix(".new").rename(mark)
            time.sleep(600)
        return super().train_step(prepared_batch, state, ctx)
'''


@pytest.fixture
def client(tmp_path: Path) -> Iterator[trn.Client]:
    home = tmp_path / "home"
    DaemonProcess(home).wait_ready()
    with trn.Client(home) as client:
        yield client
    end_everything(home)


@pytest.fixture
def job(tmp_path: Path) -> dict[str, Any]:
    """The quickstart's files, and its job."""
    blocks = read_blocks(ROOT / "docs" / "quickstart.md")
    for block in blocks:
        if block.file_name is not None:
            (tmp_path / block.file_name).write_text(block.text)
    (tmp_path / "held.py").write_text(HELD)
    [data] = [block.text for block in blocks if "write_table" in block.text]
    subprocess.run([sys.executable, "-c", data], cwd=tmp_path, check=True)
    config: dict[str, Any] = yaml.safe_load((tmp_path / "job.yaml").read_text())
    assert "retry" not in config
    return {**config, "trainer": "held:Held"}


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_job_of_the_quickstart_survives_kill_9_three_times_and_ends_with_the_same_bits(
    client: trn.Client, job: dict[str, Any], tmp_path: Path
) -> None:
    folders = {}
    for name in ("calm", "killed"):
        marks = tmp_path / name
        marks.mkdir()
        for step in (120, 220, 250) if name == "calm" else ():
            (marks / str(step)).touch()
        hyperparams = {**job["hyperparams"], "marks": str(marks)}
        config = {**job, "run_id": name, "hyperparams": hyperparams}
        submission = client.submit(config, base_dir=tmp_path)
        folders[name] = Path(client.details(submission.run.run_id).folder)
    for step, saved_step in ((120, 100), (220, 200), (250, 200)):
        mark = tmp_path / "killed" / str(step)
        saved = folders["killed"] / "checkpoints" / f"step-{saved_step:08d}.meta.json"
        wait_until(lambda mark=mark, saved=saved: mark.exists() and saved.exists())  # type: ignore[misc]
        os.kill(int(mark.read_text()), signal.SIGKILL)
    runs = {name: client.wait(name, timeout_s=DEADLINE_S) for name in folders}
    assert {run.state for run in runs.values()} == {"COMPLETED"}, runs
    finals = [(folder / "checkpoints" / "final.pt").read_bytes() for folder in folders.values()]
    assert finals[0] == finals[1]
    log = (tmp_path / "home" / "daemon.log").read_text()
    told = re.findall(r"killed#(\d): PENDING: killed by SIGKILL at step \d+; (retrying .*)", log)
    assert told[:2] == [
        ("1", "retrying at once from step 100 (attempt 2)"),
        ("2", "retrying at once from step 200 (attempt 3)"),
    ]
    number, outlook = told[2]  # which saved nothing new
    assert number == "3"
    assert re.fullmatch(
        r"retrying in \S+ s from step 200 \(attempt 4; 1 of 3 without a newer checkpoint\)", outlook
    )
