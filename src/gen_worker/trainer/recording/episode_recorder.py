"""EpisodeRecorder: Gymnasium's RecordVideo whose videos become artifacts of the run.

A video is encoded in a hidden folder. Once it is whole, it gets its name and one `video` event. Frames wait in memory, and
encoding blocks the caller. Imports gymnasium; moviepy is needed, too.
"""

import itertools
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsFloat

from gen_worker.contract.files.durable import replace_file, sync_path
from gen_worker.contract.files.mp4 import is_whole_mp4
from gen_worker.contract.files.regular import open_regular
from gen_worker.trainer.contracts import StepContext
from gen_worker.trainer.recording.poster import encode_png, pad_to_even
from gen_worker.trainer.recording.run_artifacts import UNFINISHED

if TYPE_CHECKING:
    from gymnasium.wrappers import RecordVideo
else:
    try:
        from gymnasium.wrappers import RecordVideo
    except ImportError:

        class RecordVideo:
            """There is no gymnasium."""

            def __init__(self, *_args: Any, **_options: Any) -> None:
                raise ImportError(
                    "EpisodeRecorder needs gymnasium and moviepy: `pip install gymnasium moviepy`"
                )


_log = logging.getLogger(__name__)

MAX_FRAMES = 2000


class EpisodeRecorder(RecordVideo):
    """Records episodes of an environment to `videos/attempt-<n>/step-<step>-<name>.mp4` in the run's folder.

    Chooses episodes as RecordVideo does. `step` is that of the run when the recording began. After `max_frames` a
    recording ends. Sides of frames become even. The first frame is the poster. No video of an earlier attempt or recorder
    is overwritten. Call `close()`: it writes the last video. A video that cannot be written is a warning.

    A context without a run records only into a `folder`, and reports nothing. Processes other than the first record
    nothing.
    """

    def __init__(
        self,
        env: Any,
        ctx: StepContext,
        *,
        episode_trigger: Callable[[int], bool] | None = None,
        step_trigger: Callable[[int], bool] | None = None,
        video_length: int = 0,
        name_prefix: str = "recording",
        fps: int | None = None,
        max_frames: int = MAX_FRAMES,
        folder: Path | str | None = None,
    ) -> None:
        if max_frames < 1:
            raise ValueError(f"max_frames is {max_frames}, expected 1 or more")
        if Path(name_prefix).name != name_prefix:
            raise ValueError(f"name_prefix is {name_prefix!r}, expected a name without a folder")
        if folder is not None and ctx.artifacts.videos_dir is not None:
            raise ValueError(
                f"folder is {str(folder)!r}: in a run leave it out, the run has a folder for videos"
            )
        target = ctx.artifacts.videos_dir if folder is None else Path(folder).absolute()
        self._ctx = ctx
        self._target = target if ctx.rank == 0 else None
        self._max_frames = max_frames
        self._begun_step = 0
        self._name = ""
        place = Path(tempfile.gettempdir()) if self._target is None else self._target
        self._work_dir = place / f"{UNFINISHED}{secrets.token_hex(6)}"
        super().__init__(
            env,
            str(self._work_dir),
            episode_trigger=episode_trigger,
            step_trigger=step_trigger,
            video_length=video_length,
            name_prefix=name_prefix,
            fps=fps,
        )
        self._work_dir.rmdir()  # it is made again for each video

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        result = super().step(action)
        if self.recording and len(self.recorded_frames) >= self._max_frames:
            self.stop_recording()
        return result

    def start_recording(self, video_name: str) -> None:
        if self._target is None:
            return
        if self.recording:
            self.stop_recording()
        self._begun_step, self._name = self._ctx.step, video_name
        super().start_recording(video_name)

    def stop_recording(self) -> None:
        """Encode and report what was recorded. Blocks. Does nothing where nothing is being recorded."""
        if not self.recording:
            return
        frames: list[Any] = self.recorded_frames
        try:
            if frames:
                for number, frame in enumerate(frames):
                    frames[number] = pad_to_even(frame)
                first = frames[0]
                self._work_dir.mkdir(parents=True)
                super().stop_recording()  # type: ignore[no-untyped-call]
                self._publish(self._work_dir / f"{self._name}.mp4", first)
        except Exception as fault:  # a video is no reason to lose a training
            self._warn(f"the video {self._name!r} of step {self._begun_step} could not be written: {fault}")
        finally:
            self.recorded_frames, self.recording = [], False
            shutil.rmtree(self._work_dir, ignore_errors=True)

    def _publish(self, encoded: Path, first: Any) -> None:
        """Give it its name, then report it."""
        assert self._target is not None
        _require_whole(encoded)
        video = self._free_path(f"step-{self._begun_step:08d}-{self._name}")
        poster = video.with_suffix(".png")
        replace_file(poster, encode_png(first), sync="file")
        sync_path(encoded)
        encoded.rename(video)
        sync_path(self._target)
        self._ctx.artifacts.video(video, poster=poster, step=self._begun_step)

    def _free_path(self, stem: str) -> Path:
        """Another recorder may have recorded at the same step."""
        assert self._target is not None
        names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
        paths = (self._target / f"{name}.mp4" for name in names)
        return next(path for path in paths if not path.exists() and not path.with_suffix(".png").exists())

    def _warn(self, message: str) -> None:
        if self._ctx.artifacts.folder is None:
            _log.warning("%s", message)
        else:
            self._ctx.artifacts.warn(message)


def _require_whole(path: Path) -> None:
    fd = open_regular(path)
    try:
        if not is_whole_mp4(fd, os.fstat(fd).st_size):
            raise OSError(f"the encoder left {os.fstat(fd).st_size} bytes that are no whole MP4")
    finally:
        os.close(fd)
