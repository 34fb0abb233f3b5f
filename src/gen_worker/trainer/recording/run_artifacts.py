"""Files that the author's code reports, and retention of what steps show."""

import shutil
from pathlib import Path
from typing import Literal, Protocol

from gen_worker.contract.job.spec import ArtifactsSpec
from gen_worker.errors import TrainStepError
from gen_worker.trainer.contracts import Progress, RunArtifacts
from gen_worker.trainer.recording.shown_steps import ShownSteps

UNFINISHED = ".recording-"  # how a folder begins in which a video is being encoded


class FileReporter(Protocol):
    @property
    def attempt(self) -> int: ...
    def artifact(self, path: Path | str, step: int, *, kind: str, size_bytes: int) -> None: ...
    def video(self, path: Path | str, step: int, **fields: object) -> None: ...
    def log(self, message: str, *, level: Literal["info", "warning", "error"] = "info") -> None: ...


class FileUploader(Protocol):
    def upload_sample(self, *, local_path: Path | str, step: int) -> object: ...


class ReportedArtifacts(RunArtifacts):
    """Of the main process of an attempt, which holds the run's lease. From the loop's thread."""

    folder: Path
    videos_dir: Path

    def __init__(
        self,
        *,
        folder: Path,
        checkpoints_dir: Path,
        samples_dir: Path,
        reporter: FileReporter,
        uploader: FileUploader | None,
        progress: Progress,
        retention: ArtifactsSpec,
    ) -> None:
        videos = folder / "videos"
        self.folder = folder
        self.videos_dir = videos / f"attempt-{reporter.attempt}"
        self.num_reported = 0
        self._reporter = reporter
        self._uploader = uploader
        self._progress = progress
        self._shown = ShownSteps(
            checkpoints_dir=checkpoints_dir, samples_dir=samples_dir, videos_dir=videos, retention=retention
        )
        for left in videos.glob(f"attempt-*/{UNFINISHED}*") if videos.exists() else ():  # of killed attempts
            shutil.rmtree(left, ignore_errors=True)

    def file(
        self, path: Path | str, *, kind: Literal["file", "sample"] = "file", step: int | None = None
    ) -> None:
        found, size_bytes = self._require(path)
        at = self._progress.step if step is None else step
        self._reporter.artifact(found, at, kind=kind, size_bytes=size_bytes)
        self._upload(found, at)

    def video(self, path: Path | str, *, poster: Path | str | None = None, step: int | None = None) -> None:
        found, size_bytes = self._require(path)
        at = self._progress.step if step is None else step
        fields: dict[str, object] = {"size_bytes": size_bytes}
        if poster is not None:
            fields["poster"] = str(self._require(poster)[0])
        self._reporter.video(found, at, **fields)
        self._upload(found, at)

    def warn(self, message: str) -> None:
        self._reporter.log(message, level="warning")

    def keep(self, step: int, *, metric: tuple[str, float, str] | None = None, saved_step: int = -1) -> None:
        for fault in self._shown.keep(step, metric=metric, saved_step=saved_step):
            self.warn(fault)

    def _upload(self, path: Path, step: int) -> None:
        self.num_reported += 1
        if self._uploader is not None:
            self._uploader.upload_sample(local_path=path, step=step)

    def _require(self, path: Path | str) -> tuple[Path, int]:
        """(the file, its size). TrainStepError where the daemon would refuse it."""
        found = self.folder / path
        try:
            size_bytes = found.stat().st_size
        except OSError as fault:
            raise TrainStepError(f"the artifact {found} cannot be read: {fault.strerror}") from fault
        if found.is_symlink() or not found.is_file() or not size_bytes:
            raise TrainStepError(
                f"the artifact {found} is not a regular file with content: close the file first"
            )
        if not found.resolve().is_relative_to(self.folder.resolve()):
            raise TrainStepError(
                f"the artifact {found} is not inside the run's folder: write it below `ctx.artifacts.folder`"
            )
        return found, size_bytes
