"""The uploads of one attempt: opened if the job asks for them, waited for at the end."""

import threading
from collections import Counter
from pathlib import Path

from gen_worker.contract.checkpoints.choice import META_SUFFIX
from gen_worker.contract.job.spec import TrainingJobSpec, UploadsSpec
from gen_worker.errors import Category, UploadError
from gen_worker.trainer.attempt.runtime_env import WorkerEnvironment
from gen_worker.trainer.authz import TrainerAuthContext
from gen_worker.trainer.checkpoints.store import Checkpoint
from gen_worker.trainer.contracts import StopSignal
from gen_worker.trainer.events.event_points import read_undelivered
from gen_worker.trainer.reporting import TrainingReporter
from gen_worker.trainer.uploader import ArtifactUploader, UploadFailure, UploadTargets

DRAIN_S = 60.0
STOPPED_DRAIN_S = 5.0  # after a stop request
NUM_LISTED = 3
NUM_LOGGED = 20  # failures of a kind that are each logged; after them at every doubling


class UploadSession:
    """`uploader` is None where nothing is uploaded; the methods then do nothing."""

    def __init__(
        self,
        environment: WorkerEnvironment,
        job: TrainingJobSpec,
        auth: TrainerAuthContext | None,
        reporter: TrainingReporter,
        stop: StopSignal,
    ) -> None:
        self._lock = threading.Lock()
        self._reporter = reporter
        self._stop = stop
        self._num_failed: Counter[str] = Counter()
        self._num_lost = 0
        self._first_failures: list[UploadFailure] = []
        self.uploader: ArtifactUploader | None = None
        wanted = _merge(job.uploads, environment.uploads)
        if wanted != UploadsSpec():
            self.uploader = ArtifactUploader(
                targets=UploadTargets(
                    metrics_url=wanted.metrics_url,
                    checkpoint_url=wanted.checkpoint_url,
                    sample_url=wanted.sample_url,
                    terminal_url=wanted.terminal_url,
                ),
                run_id=job.run_id,
                owner=job.owner,
                attempt=reporter.attempt,
                auth=auth,
                on_failure=self._on_failure,
                options=environment.transfer_options(),
            )

    def _on_failure(self, failure: UploadFailure) -> None:
        """Called by a lane's thread. Logs are bounded: a target may be wrong for weeks."""
        with self._lock:
            if not failure.is_skipped:  # replaced by something newer: logged, but not a failure of the run
                self._num_lost += 1
                if len(self._first_failures) < NUM_LISTED:
                    self._first_failures.append(failure)
            self._num_failed[failure.kind] += 1
            number = self._num_failed[failure.kind]
        if number > NUM_LOGGED and number & (number - 1):
            return
        so_far = f" ({number} so far)" if number > NUM_LOGGED else ""
        self._reporter.log(
            f"upload of {failure.kind} at step {failure.step} failed{so_far}: {failure.reason}",
            level="warning",
        )

    def settle(self) -> None:
        """Wait for uploads in progress, unless a stop is requested; UploadError for what was not delivered."""
        if self.uploader is None:
            return
        self._reporter.flush()  # a checkpoint is uploaded once its event is on disk
        self.uploader.drain(DRAIN_S, give_up=self._stop)
        if self._num_lost:
            listed = [f"{item.kind} of step {item.step}: {item.reason}" for item in self._first_failures]
            if self._num_lost > NUM_LISTED:
                listed.append(f"and {self._num_lost - NUM_LISTED} more")
            raise UploadError(
                f"{_count(self._num_lost)} ({'; '.join(listed)}). Training is complete and all files are in the run's"
                " folder. Run the job again to upload the final checkpoint"
            )

    def send_completed(self, step: int, final_checkpoint: Path | None) -> None:
        if self.uploader is not None:
            self.uploader.terminal("completed", step, final_checkpoint=final_checkpoint)
            self.uploader.drain(DRAIN_S)

    def send_failed(self, step: int, category: Category, error: str) -> None:
        if self.uploader is not None:
            self.uploader.terminal("failed", step, category=category.value, error=error)
            self.uploader.drain(STOPPED_DRAIN_S if self._stop else DRAIN_S)

    def close(self) -> None:
        if self.uploader is not None:
            self.uploader.close()


def upload_again(uploader: ArtifactUploader, final: Checkpoint, reporter: TrainingReporter) -> None:
    """Of a finished run: queue its final checkpoint, and the points of earlier attempts if their uploads failed."""
    uploader.upload_checkpoint_files(
        local_path=final.path,
        meta_path=final.path.with_name(final.path.stem + META_SUFFIX),
        step=final.step,
        final=final.final,
        author_files=[entry.name for entry in (() if final.meta is None else final.meta.files[1:])],
    )
    for point in read_undelivered(reporter.events_path, before_attempt=reporter.attempt):
        uploader.upload_metrics(metrics=point.values, step=point.step, timestamp_ms=point.timestamp_ms)


def _count(number: int) -> str:
    return "1 upload failed" if number == 1 else f"{number} uploads failed"


def _merge(job: UploadsSpec, environment: UploadsSpec) -> UploadsSpec:
    """The environment wins, target by target."""
    return UploadsSpec(
        **{name: getattr(environment, name) or getattr(job, name) for name in UploadsSpec.__struct_fields__}
    )
