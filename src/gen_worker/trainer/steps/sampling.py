"""Calls the author's `sample` hook and reports what it wrote.

Every process calls the hook, since its forward pass may need all; the files of the main process are kept.
"""

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gen_worker.trainer.author.author_state import ask_for_samples
from gen_worker.trainer.model_runtime import capture_rng, restore_rng
from gen_worker.trainer.steps.loop_parts import LoopParts

VIDEO_SUFFIXES = (".mp4", ".webm", ".mkv", ".avi")


@dataclass(slots=True)
class Sampler:
    parts: LoopParts

    def has_sample(self, step: int) -> bool:
        """True in the main process once that step has a sample, also of an earlier attempt."""
        return self.parts.artifacts is not None and self.parts.artifacts.has_sample(step)

    def sample(self, model_state: Any, step: int) -> None:
        """Does nothing without a `sample` hook. RNG states are restored."""
        rng = capture_rng()
        try:
            if self.parts.artifacts is None:
                self._sample_for_others(model_state, step)
            else:
                self._report(
                    self.parts.artifacts.write_samples(step=step, state=model_state, ctx=self.parts.ctx), step
                )
        finally:
            restore_rng(rng)

    def _sample_for_others(self, model_state: Any, step: int) -> None:
        folder = Path(tempfile.mkdtemp(prefix="gen_worker-sample-"))
        try:
            ask_for_samples(self.parts.trainer, model_state, self.parts.ctx, step=step, folder=folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _report(self, paths: Sequence[Path | str], step: int) -> None:
        for path in paths:
            is_video = Path(path).suffix.lower() in VIDEO_SUFFIXES
            report = self.parts.reporter.video if is_video else self.parts.reporter.sample
            report(path=path, step=step, **_size_of(path))
            if self.parts.uploader is not None:
                self.parts.uploader.upload_sample(local_path=path, step=step)


def _size_of(path: Path | str) -> dict[str, int]:
    try:
        return {"size_bytes": Path(path).stat().st_size}
    except OSError:  # a caller's writer may return what is no local file
        return {}
