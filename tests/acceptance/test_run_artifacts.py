"""Artifacts of real runs: videos that play, also those of an attempt that was killed; bad files are warnings."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from documents import ROOT
from numpy.typing import NDArray

import trn

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
from daemon_process import DEADLINE_S, DaemonProcess, end_everything

pytestmark = pytest.mark.usefixtures("warm_launchers")
HELD = '''
import os
import time
from pathlib import Path

from trainer import CartPoleTrainer


class Held(CartPoleTrainer):
    """Stops before step 15, once, until it is killed."""

    def train_step(self, prepared_batch, state, ctx):
        mark = Path(ctx.job.hyperparams["mark"])
        if ctx.step == 14 and not mark.exists():
            mark.with_suffix(".new").write_text(str(os.getpid()))
            mark.with_suffix(".new").rename(mark)
            time.sleep(600)
        return super().train_step(prepared_batch, state, ctx)
'''


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    home = tmp_path / "home"
    DaemonProcess(home).wait_ready()
    yield home
    end_everything(home)


def read_video(content: bytes) -> NDArray[np.uint8]:
    """All frames in grey; ffmpeg fails where it cannot play them."""
    import imageio_ffmpeg

    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", "-"]
    command += ["-f", "rawvideo", "-pix_fmt", "gray", "-"]
    done = subprocess.run(command, input=content, capture_output=True, timeout=DEADLINE_S, check=True)
    return np.frombuffer(done.stdout, np.uint8).reshape(-1, 400, 600)


def test_videos_of_both_attempts_of_a_killed_run_are_artifacts_that_play(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "example"
    shutil.copytree(
        ROOT / "examples" / "cartpole", folder, ignore=shutil.ignore_patterns("__pycache__", "run")
    )
    (folder / "held.py").write_text(HELD)
    mark = tmp_path / "mark"
    job = yaml.safe_load((folder / "job.yaml").read_text())
    job = {**job, "trainer": "held:Held", "hyperparams": {**job["hyperparams"], "mark": str(mark)}}
    with trn.Client(home) as client:
        run_id = client.submit(job, base_dir=folder).run.run_id
        saved = Path(client.details(run_id).folder) / "checkpoints" / "step-00000010.meta.json"
        deadline = time.monotonic() + 2 * DEADLINE_S
        while not (mark.exists() and saved.exists()):
            assert time.monotonic() < deadline, client.get(run_id)
            time.sleep(0.01)
        os.kill(int(mark.read_text()), signal.SIGKILL)
        run = client.wait(run_id, timeout_s=2 * DEADLINE_S)
        assert (run.state, run.attempt, run.num_refused_artifacts) == ("COMPLETED", 2, 0), run.reason
        videos = list(client.artifacts(run_id, kind="video"))
        assert [(video.step, video.attempt) for video in videos] == [(20, 2), (10, 1)]
        assert run.newest_video == videos[0].artifact_id
        for video in videos:
            assert video.is_present
            assert video.media_type == "video/mp4"
            images = read_video(b"".join(client.read_artifact(video.artifact_id)))
            assert len(images) > 10
            assert images[0].min() < 100, "the cart is black"
            assert (images[0] != images[-1]).any(), "and something moves"
            poster = b"".join(client.read_artifact(video.poster_id))
            assert poster.startswith(b"\x89PNG")
        assert {artifact.kind for artifact in client.artifacts(run_id)} == {"video", "file", "checkpoint"}


HOSTILE = """
import os
from pathlib import Path

from gen_worker.trainer import StepResult


class Hostile:
    def setup(self, ctx): ...

    def configure(self, ctx):
        return {"sum": 0}

    def prepare_batch(self, raw_batch, state, ctx):
        return raw_batch

    def train_step(self, prepared_batch, state, ctx):
        state["sum"] += prepared_batch
        return StepResult(metrics={"loss": state["sum"]})

    def state_dict(self, state):
        return state

    def load_state_dict(self, state, payload, ctx):
        state.update(payload)

    def sample(self, *, state, step, request, output_dir, ctx):
        folder = Path(output_dir)
        (folder / "good.txt").write_text("good")
        (folder / "<script>\\x1b[2J.txt").write_text("odd name")
        (folder / "link.txt").symlink_to("/etc/hostname")
        (folder / "half.mp4").write_bytes(b"\\0\\0\\0\\x20ftypisom")
        (ctx.artifacts.folder / "own.txt").write_text("own")
        ctx.artifacts.file("own.txt")
"""


def test_bad_files_of_a_run_are_warnings_that_status_shows_and_the_run_completes(
    home: Path, tmp_path: Path
) -> None:
    (tmp_path / "hostile.py").write_text(HOSTILE)
    job = {"trainer": "hostile:Hostile", "mock_batches": [1, 2, 3], "sample_every": 3, "run_id": "bad"}
    with trn.Client(home) as client:
        client.submit(job, base_dir=tmp_path)
        run = client.wait("bad", timeout_s=2 * DEADLINE_S)
        assert (run.state, run.num_refused_artifacts) == ("COMPLETED", 2), run.reason
        found = {artifact.name: artifact for artifact in client.artifacts("bad")}
    assert {name: artifact.cause.id for name, artifact in found.items()} == {
        "final.pt": "",
        "good.txt": "",
        "<script>\x1b[2J.txt": "",
        "own.txt": "",
        "link.txt": "artifact-link",
        "half.mp4": "artifact-half-written",
    }
    command = [sys.executable, "-m", "trn.cli.main", "--home", str(home), "status", "bad"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    refused = json.loads(shown.stdout)["refused_artifacts"]
    assert sorted(item["name"] for item in refused) == ["half.mp4", "link.txt"]
    assert all(item["reason"] for item in refused)
