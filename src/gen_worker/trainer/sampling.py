"""Samples: the author's hook is asked for some, and what it wrote is kept and told.

Every process calls the hook, since its forward pass may be one that all take part in; what the main one wrote counts.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gen_worker.trainer.artifacts import ArtifactWriter
from gen_worker.trainer.contracts import SampleRequest, StepContext, TrainerPlugin
from gen_worker.trainer.model_runtime import capture_rng, restore_rng
from gen_worker.trainer.reporting import TrainingReporter
from gen_worker.trainer.uploader import ArtifactUploader

VIDEO_SUFFIXES = (".mp4", ".webm", ".mkv", ".avi")


@dataclass(slots=True, kw_only=True)
class Sampler:
    ctx: StepContext
    trainer: TrainerPlugin
    reporter: TrainingReporter
    artifacts: ArtifactWriter | None
    uploader: ArtifactUploader | None = None

    def has_sample(self, step: int) -> bool:
        """True in the main process once the sample of that step was kept, by this attempt or an earlier one."""
        return self.artifacts is not None and self.artifacts.has_sample(step)

    def sample(self, model_state: Any, step: int) -> None:
        """Nothing where the class has no `sample` hook. The random streams are as they were afterwards."""
        hook = getattr(self.trainer, "sample", None)
        if hook is None:
            return
        job = self.ctx.job
        request = SampleRequest(prompts=tuple(job.sample_prompts), seed=job.sample_seed)
        rng = capture_rng()
        try:
            with self._folder(step) as folder:
                hook(state=model_state, step=step, request=request, output_dir=str(folder), ctx=self.ctx)
                if self.artifacts is not None:
                    self._keep(self.artifacts, step, folder)
        finally:
            restore_rng(rng)

    @contextmanager
    def _folder(self, step: int) -> Iterator[Path]:
        if self.artifacts is not None:
            yield self.artifacts.sample_dir(step)
            return
        folder = Path(tempfile.mkdtemp(prefix="gen_worker-sample-"))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _keep(self, artifacts: ArtifactWriter, step: int, folder: Path) -> None:
        for sample in artifacts.write_sample(step, folder):
            is_video = sample.path.suffix.lower() in VIDEO_SUFFIXES
            report = self.reporter.video if is_video else self.reporter.sample
            report(sample.path, step, size_bytes=sample.size_bytes)
            if self.uploader is not None:
                self.uploader.sample(sample.path, step)
