"""EpisodeRecorder: whole videos with even sides, one event each, nothing overwritten, and no training lost for a video."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
from numpy.typing import NDArray

from gen_worker.contract.job.spec import ArtifactsSpec, TrainingJobSpec
from gen_worker.errors import TrainStepError
from gen_worker.trainer import EpisodeRecorder, RunArtifacts, StepContext
from gen_worker.trainer.contracts import Progress
from gen_worker.trainer.recording.poster import encode_png, pad_to_even
from gen_worker.trainer.recording.run_artifacts import ReportedArtifacts

DEADLINE_S = 100


class Pictures(gym.Env[int, int]):
    """Shows one colour a step, on a picture with odd sides."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 10}
    render_mode = "rgb_array"
    observation_space = gym.spaces.Discrete(2)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, shape: tuple[int, ...] = (33, 47, 3), length: int = 5) -> None:
        self.shape, self.length, self.time = shape, length, 0

    def reset(self, **_options: Any) -> tuple[int, dict[str, Any]]:
        self.time = 0
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.time += 1
        return 0, 0.0, self.time >= self.length, False, {}

    def render(self) -> NDArray[np.uint8]:  # type: ignore[override]
        return np.full(self.shape, 10 * self.time + 5, np.uint8)


class Reporter:
    """Remembers what it was told."""

    def __init__(self, attempt: int = 1) -> None:
        self.attempt = attempt
        self.videos: list[dict[str, Any]] = []
        self.files: list[dict[str, Any]] = []
        self.warnings: list[str] = []

    def video(self, path: Path | str, step: int, **fields: Any) -> None:
        self.videos.append({"path": Path(path), "step": step, **fields})

    def artifact(self, path: Path | str, step: int, **fields: Any) -> None:
        self.files.append({"path": Path(path), "step": step, **fields})

    def log(self, message: str, **_fields: Any) -> None:
        self.warnings.append(message)


class Run:
    """A run's folder and the context of its attempts."""

    def __init__(self, folder: Path, attempt: int = 1, **retention: int) -> None:
        self.folder = folder
        self.progress = Progress()
        self.reporter = Reporter(attempt)
        self.artifacts = ReportedArtifacts(
            folder=folder,
            checkpoints_dir=folder / "checkpoints",
            samples_dir=folder / "samples",
            reporter=self.reporter,
            uploader=None,
            progress=self.progress,
            retention=ArtifactsSpec(**retention),
        )
        self.ctx = StepContext(
            job=TrainingJobSpec(run_id="r", max_steps=9), progress=self.progress, artifacts=self.artifacts
        )

    def record(self, step: int = 0, num_episodes: int = 1, **options: Any) -> list[dict[str, Any]]:
        self.progress.step = step
        options = {"episode_trigger": lambda _episode: True, **options}
        env = EpisodeRecorder(options.pop("env", None) or Pictures(), self.ctx, **options)
        for _ in range(num_episodes):
            play(env)
        env.close()
        return self.reporter.videos


def play(env: Any) -> None:
    env.reset()
    is_over = False
    while not is_over:
        _, _, is_over, _, _ = env.step(0)


def frames_of(path: Path, height: int, width: int) -> NDArray[np.uint8]:
    """All frames in grey; ffmpeg fails where it cannot play the file."""
    import imageio_ffmpeg

    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(path)]
    command += ["-f", "rawvideo", "-pix_fmt", "gray", "-"]
    done = subprocess.run(command, capture_output=True, timeout=DEADLINE_S, check=True)
    return np.frombuffer(done.stdout, np.uint8).reshape(-1, height, width)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    assert not [path for path in tmp_path.rglob(".*") if path.is_dir()], "nothing unfinished is left"


def test_an_episode_becomes_a_playable_video_with_even_sides_and_a_poster(run: Run) -> None:
    (event,) = run.record(step=10)
    path = run.folder / "videos" / "attempt-1" / "step-00000010-recording-episode-0.mp4"
    assert event == {
        "path": path,
        "step": 10,
        "size_bytes": path.stat().st_size,
        "poster": str(path.with_suffix(".png")),
    }
    frames = frames_of(path, 34, 48)
    assert len(frames) == 6  # the first one, and one a step
    assert abs(int(frames[0].mean()) - 5) < 4
    assert abs(int(frames[-1].mean()) - 55) < 4
    poster = frames_of(Path(event["poster"]), 34, 48)
    assert poster.shape == (1, 34, 48)
    assert set(np.unique(poster)) == {5}


def test_the_codec_is_one_that_every_browser_plays(run: Run) -> None:
    import imageio_ffmpeg

    (event,) = run.record()
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-i", str(event["path"])]
    said = subprocess.run(command, capture_output=True, timeout=DEADLINE_S, check=False, text=True).stderr
    assert "h264" in said
    assert "yuv420p" in said


def test_each_whole_episode_is_one_event_and_names_are_never_used_twice(run: Run) -> None:
    run.record(step=10, num_episodes=2)
    run.record(step=10)  # another recorder begins to count again
    run.record(step=20)
    names = [event["path"].name for event in run.reporter.videos]
    assert names == [
        "step-00000010-recording-episode-0.mp4",
        "step-00000010-recording-episode-1.mp4",
        "step-00000010-recording-episode-0-2.mp4",
        "step-00000020-recording-episode-0.mp4",
    ]
    assert run.artifacts.num_reported == 4


def test_a_later_attempt_has_a_folder_of_its_own_also_where_the_count_of_attempts_was_lost(
    run: Run, tmp_path: Path
) -> None:
    (first,) = run.record(step=10)
    before = first["path"].read_bytes()
    (second,) = Run(tmp_path, attempt=2).record(step=10)
    assert second["path"].parent.name == "attempt-2"
    (again,) = Run(tmp_path, attempt=1).record(step=10, env=Pictures(length=9))
    assert again["path"].name == "step-00000010-recording-episode-0-2.mp4"
    assert first["path"].read_bytes() == before


def test_the_step_is_that_of_the_beginning_and_choosing_episodes_is_gymnasiums(run: Run) -> None:
    env = EpisodeRecorder(Pictures(), run.ctx, name_prefix="play")
    for step in range(9):
        run.progress.step = step
        play(env)
    env.close()
    assert [(event["step"], event["path"].name) for event in run.reporter.videos] == [
        (0, "step-00000000-play-episode-0.mp4"),
        (1, "step-00000001-play-episode-1.mp4"),
        (8, "step-00000008-play-episode-8.mp4"),
    ]


def test_a_recording_ends_at_the_limit_of_frames(run: Run) -> None:
    (event,) = run.record(env=Pictures(length=50), max_frames=7)
    assert len(frames_of(event["path"], 34, 48)) == 7


def test_closing_writes_the_last_episode_and_closing_twice_writes_nothing_more(run: Run) -> None:
    env = EpisodeRecorder(Pictures(), run.ctx, episode_trigger=lambda _episode: True)
    env.reset()
    env.step(0)
    assert run.reporter.videos == []
    env.close()
    env.close()
    assert len(run.reporter.videos) == 1


def test_a_recorder_that_never_recorded_leaves_nothing(run: Run) -> None:
    env = EpisodeRecorder(Pictures(), run.ctx, episode_trigger=lambda _episode: False)
    play(env)
    env.close()
    assert run.reporter.videos == []
    assert not [path for path in run.folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("content", [b"", b"\0" * 100])
def test_what_the_encoder_did_not_finish_is_a_warning_and_no_event(
    run: Run, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    from moviepy.video.io.ImageSequenceClip import ImageSequenceClip

    def write(_clip: Any, path: str, **_options: Any) -> None:
        Path(path).write_bytes(content)

    monkeypatch.setattr(ImageSequenceClip, "write_videofile", write)
    run.record()
    assert run.reporter.videos == []
    (warning,) = run.reporter.warnings
    assert "could not be written" in warning
    assert not [path for path in run.folder.rglob("*") if path.is_file()]


def test_an_encoder_that_fails_loses_the_video_and_not_the_training(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moviepy.video.io.ImageSequenceClip import ImageSequenceClip

    def fail(*_args: Any, **_options: Any) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ImageSequenceClip, "write_videofile", fail)
        run.record(step=1)
    assert "No space left on device" in run.reporter.warnings[0]
    (event,) = run.record(step=2)  # and the next one is recorded
    assert event["step"] == 2


def test_other_processes_and_contexts_without_a_run_record_nothing(tmp_path: Path) -> None:
    job = TrainingJobSpec(run_id="r", max_steps=1)
    for ctx in (
        StepContext(job=job),
        StepContext(job=job, rank=1, world_size=2, artifacts=Run(tmp_path).artifacts),
    ):
        env = EpisodeRecorder(Pictures(), ctx, episode_trigger=lambda _episode: True)
        play(env)
        env.close()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_without_a_run_a_folder_can_be_given(tmp_path: Path) -> None:
    ctx = StepContext(job=TrainingJobSpec(run_id="r", max_steps=1))
    env = EpisodeRecorder(Pictures(), ctx, episode_trigger=lambda _episode: True, folder=tmp_path / "a")
    play(env)
    env.close()
    assert [path.suffix for path in sorted((tmp_path / "a").iterdir())] == [".mp4", ".png"]


def test_what_makes_no_sense_is_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_frames is 0"):
        EpisodeRecorder(Pictures(), run.ctx, max_frames=0)
    with pytest.raises(ValueError, match="without a folder"):
        EpisodeRecorder(Pictures(), run.ctx, name_prefix="../x")
    with pytest.raises(ValueError, match="in a run leave it out"):
        EpisodeRecorder(Pictures(), run.ctx, folder=tmp_path)


def test_unfinished_folders_of_killed_attempts_are_removed(tmp_path: Path) -> None:
    left = tmp_path / "videos" / "attempt-1" / ".recording-abc"
    left.mkdir(parents=True)
    (left / "half.mp4").write_bytes(b"half")
    Run(tmp_path, attempt=2)
    assert not left.exists()


@pytest.mark.parametrize("shape", [(3, 4, 3), (1, 1, 3), (5, 7), (2, 2, 1), (2, 3, 2), (4, 4, 4)])
def test_a_png_of_any_picture_can_be_read(tmp_path: Path, shape: tuple[int, ...]) -> None:
    from PIL import Image

    frame = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    (tmp_path / "a.png").write_bytes(encode_png(frame))
    with Image.open(tmp_path / "a.png") as image:
        assert (np.asarray(image).reshape(shape) == frame).all()


def test_what_is_no_picture_has_no_png() -> None:
    for frame in (np.zeros((2, 2, 5), np.uint8), np.zeros((2, 2, 3)), np.zeros((0, 4, 3), np.uint8)):
        with pytest.raises(ValueError, match="is no picture"):
            encode_png(frame)  # type: ignore[arg-type]
    assert pad_to_even(np.zeros((3, 4, 3), np.uint8)).shape == (4, 4, 3)


def test_the_authors_own_files_are_reported_and_those_that_would_be_refused_are_errors(
    run: Run, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run.progress.step = 7
    (run.folder / "report.txt").write_text("text")
    run.artifacts.file("report.txt")
    run.artifacts.file(run.folder / "report.txt", kind="sample", step=3)
    assert run.reporter.files == [
        {"path": run.folder / "report.txt", "step": 7, "kind": "file", "size_bytes": 4},
        {"path": run.folder / "report.txt", "step": 3, "kind": "sample", "size_bytes": 4},
    ]
    (run.folder / "empty").touch()
    (run.folder / "link").symlink_to(run.folder / "report.txt")
    outside = tmp_path_factory.mktemp("outside") / "a.txt"
    outside.write_text("text")
    for path in ("empty", "link", "missing", ".", outside):
        with pytest.raises(TrainStepError, match="the artifact"):
            run.artifacts.file(path)
    RunArtifacts().file("anything")  # a context without a run reports nothing


def step_dirs(folder: Path) -> set[int]:
    return {int(path.name[5:13]) for path in (folder / "samples").glob("step-*")}


def video_steps(folder: Path) -> set[int]:
    return {int(path.name[5:13]) for path in (folder / "videos").glob("attempt-*/*")}


def show(run: Run, step: int, loss: float | None = None, saved_step: int = -1) -> None:
    """A sample and a video with its poster at that step."""
    folder = run.folder / "samples" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "a.txt").write_text("sample")
    run.artifacts.videos_dir.mkdir(parents=True, exist_ok=True)
    for suffix in (".mp4", ".png"):
        (run.artifacts.videos_dir / f"step-{step:08d}-a{suffix}").write_text("video")
    metric = None if loss is None else ("val/loss", loss, "min")
    run.artifacts.keep(step, metric=metric, saved_step=saved_step)


def save(run: Run, step: int) -> None:
    (run.folder / "checkpoints").mkdir(exist_ok=True)
    (run.folder / "checkpoints" / f"step-{step:08d}.meta.json").touch()


def test_by_default_everything_is_kept(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for step in range(1, 9):
        show(run, step, loss=1.0)
    assert step_dirs(tmp_path) == video_steps(tmp_path) == set(range(1, 9))


def test_retention_keeps_the_last_the_best_and_what_kept_checkpoints_show(tmp_path: Path) -> None:
    run = Run(tmp_path, keep_last=2, keep_best=1)
    losses = {1: 5.0, 2: 4.0, 3: 0.5, 4: 3.0, 5: 2.0, 6: float("nan"), 7: 1.0, 8: 2.0}
    save(run, 2)
    for step, loss in losses.items():
        show(run, step, loss)
    assert step_dirs(tmp_path) == video_steps(tmp_path) == {2, 3, 7, 8}
    (tmp_path / "checkpoints" / "step-00000002.meta.json").unlink()  # the retention of checkpoints was here
    run.artifacts.keep(8)
    assert step_dirs(tmp_path) == video_steps(tmp_path) == {3, 7, 8}


def test_the_next_attempt_still_knows_which_step_was_the_best(tmp_path: Path) -> None:
    first = Run(tmp_path, keep_last=1, keep_best=1)
    show(first, 1, loss=0.1)
    show(first, 2, loss=float("nan"))
    second = Run(tmp_path, attempt=2, keep_last=1, keep_best=1)
    show(second, 3, loss=0.8)
    show(second, 4, loss=0.7)
    assert step_dirs(tmp_path) == video_steps(tmp_path) == {1, 4}
    (tmp_path / "samples" / ".metrics.json").write_text("{damaged")
    show(Run(tmp_path, attempt=3, keep_last=1, keep_best=1), 5)
    assert step_dirs(tmp_path) == {5}


def test_what_a_checkpoint_shows_that_is_still_being_written_is_kept(tmp_path: Path) -> None:
    run = Run(tmp_path, keep_last=1)
    show(run, 1, saved_step=1)
    show(run, 2, saved_step=1)
    show(run, 3, saved_step=1)
    assert step_dirs(tmp_path) == {1, 3}


def test_retention_removes_nothing_that_it_did_not_make(tmp_path: Path) -> None:
    run = Run(tmp_path, keep_last=1)
    (tmp_path / "samples").mkdir()
    for name in ("notes.txt", "step-00000001.tmp-0a-1", "step-1"):
        (tmp_path / "samples" / name).mkdir()
    (tmp_path / "report-step-00000001.txt").write_text("mine")
    show(run, 1)
    show(run, 2)
    kept = sorted(path.name for path in (tmp_path / "samples").iterdir())
    assert kept == ["notes.txt", "step-00000001.tmp-0a-1", "step-00000002", "step-1"]
    assert (tmp_path / "report-step-00000001.txt").exists()
