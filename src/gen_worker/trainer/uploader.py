"""Uploads metrics, checkpoints, samples and the terminal record in the background. No call waits for the network."""

import dataclasses
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gen_worker.contract.checkpoints.choice import META_SUFFIX
from gen_worker.contract.redaction import SecretRedactor
from gen_worker.errors import UploadError
from gen_worker.trainer.authz import TrainerAuthContext
from gen_worker.trainer.transfer.policy import TransferOptions
from gen_worker.trainer.transfer.upload_endpoints import check_target, open_endpoint
from gen_worker.trainer.transfer.upload_lane import FileBacklog, Lane, PointBacklog, UploadLimits
from gen_worker.trainer.transfer.upload_parcels import (
    CHECKPOINT,
    METRICS,
    SAMPLE,
    TERMINAL,
    FilesUpload,
    RecordUpload,
    Sender,
    Upload,
    UploadFailure,
)

__all__ = ["ArtifactUploader", "UploadFailure", "UploadLimits", "UploadTargets"]

log = logging.getLogger(__name__)

ASK_EVERY_S = 0.2
TERMINAL_SHARE = 0.25  # of a drain, kept for the terminal record if artifacts are not delivered
MAX_KEPT_FAILURES = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadTargets:
    """An http(s) URL or an s3:// or gs:// prefix per kind; None: that kind is not uploaded."""

    metrics_url: str | None = None
    checkpoint_url: str | None = None
    sample_url: str | None = None
    terminal_url: str | None = None


class ArtifactUploader:
    """Use it in the process that made it, from any thread.

    The `upload_…` methods and `terminal` only queue (a file is opened, so that it may be deleted before it is sent).
    `on_failure` is called for everything that is not delivered, from a background thread or from `drain` and `close`.
    """

    def __init__(
        self,
        *,
        targets: UploadTargets,
        run_id: str,
        owner: str | None = None,
        attempt: int = 1,
        auth: TrainerAuthContext | None = None,
        limits: UploadLimits | None = None,
        options: TransferOptions | None = None,
        on_failure: Callable[[UploadFailure], None] | None = None,
    ) -> None:
        self._sender = Sender(run_id=run_id, owner=owner, attempt=attempt)
        self._on_failure = on_failure
        self._redactor = SecretRedactor([auth.token] if auth else [])
        self._process_id = os.getpid()
        self._lock = threading.RLock()
        self._idle = threading.Condition(self._lock)
        self._failures: deque[UploadFailure] = deque(maxlen=MAX_KEPT_FAILURES)
        self._is_closed = False
        self._is_terminal_released = False
        self._lanes: dict[str, Lane] = {}
        bounds = limits or UploadLimits()
        settings = options or TransferOptions()
        self._points = PointBacklog(bounds, self._sender)
        self._files = {kind: FileBacklog(bounds) for kind in (CHECKPOINT, SAMPLE, TERMINAL)}
        for kind, target in (
            (METRICS, targets.metrics_url),
            (CHECKPOINT, targets.checkpoint_url),
            (SAMPLE, targets.sample_url),
            (TERMINAL, targets.terminal_url),
        ):
            if target is None:
                continue
            check_target(f"upload target {kind}_url", target)
            self._lanes[kind] = Lane(
                kind,
                self._points if kind == METRICS else self._files[kind],
                open_endpoint=lambda target=target: open_endpoint(target, self._sender, auth, settings),  # type: ignore[misc]
                options=settings,
                linger_s=bounds.linger_s if kind == METRICS else 0.0,
                lock=self._lock,
                on_idle=self._lane_became_idle,
                report=self._record,
                may_start=self._may_send_terminal if kind == TERMINAL else lambda: True,
            )

    def upload_metrics(
        self, *, metrics: Mapping[str, float], step: int, timestamp_ms: int | None = None
    ) -> None:
        """Queue one point of plain numbers."""
        lane = self._lane(METRICS)
        if lane is not None:
            moment_ms = int(time.time() * 1000) if timestamp_ms is None else timestamp_ms
            copied = dict(metrics)
            with self._lock:
                self._points.add(step, moment_ms, copied)
                lane.notify()

    def upload_checkpoint(self, *, local_path: Path | str, step: int) -> None:
        """Queue a checkpoint by its data file, with the meta file beside it if there is one."""
        meta_path = Path(local_path).with_suffix(META_SUFFIX)
        self.upload_checkpoint_files(
            local_path=local_path, meta_path=meta_path if meta_path.exists() else None, step=step
        )

    def upload_checkpoint_files(
        self,
        *,
        local_path: Path | str,
        meta_path: Path | str | None,
        step: int,
        final: bool = False,
        digest: str | None = None,
        author_files: Sequence[str] = (),
    ) -> None:
        """Queue a committed checkpoint: data, the author's files, then the meta file, which marks it as complete.

        `digest` of the data (`sha256:<hex>`) is computed in the background if None. `author_files`: as the meta lists them.
        """
        lane = self._lane(CHECKPOINT)
        if lane is not None:
            upload = FilesUpload(CHECKPOINT, step, is_final=final)
            upload.add(Path(local_path), digest)
            for name in author_files:
                upload.add(Path(local_path).parent / name, name=name)
            if meta_path is not None:
                upload.add(Path(meta_path))
            self._queue(lane, upload)

    def upload_sample(self, *, local_path: Path | str, step: int) -> None:
        lane = self._lane(SAMPLE)
        if lane is not None:
            upload = FilesUpload(SAMPLE, step)
            upload.add(Path(local_path))
            self._queue(lane, upload)

    def terminal(
        self,
        status: str,
        step: int | None = None,
        category: str | None = None,
        error: str | None = None,
        final_checkpoint: Path | str | None = None,
    ) -> None:
        """Queue how the attempt ended (`completed` or `failed`). It is sent after everything else."""
        lane = self._lane(TERMINAL)
        if lane is not None:
            record = {
                "run_id": self._sender.run_id,
                "attempt": self._sender.attempt,
                "status": status,
                "step": step,
                "category": None if category is None else str(category),
                "error": None if error is None else self._redactor.redact(error),
                "final_checkpoint": None if final_checkpoint is None else str(final_checkpoint),
            }
            name = f"terminal-{self._sender.attempt:04d}.json"
            self._queue(lane, RecordUpload(TERMINAL, step, lambda: record, file_name=name, num_points=1))

    def drain(self, timeout_s: float, give_up: Callable[[], bool] = lambda: False) -> list[UploadFailure]:
        """Wait until all is sent, at most `timeout_s`; the rest is dropped. Returns all failures of this uploader.

        `give_up` is called a few times a second: true ends the wait.
        """
        if self._is_foreign():
            return []
        deadline = time.monotonic() + timeout_s
        release_at = deadline - timeout_s * TERMINAL_SHARE
        with self._lock:
            self._hurry(is_hurried=True)
            while not self._is_idle() and (now := time.monotonic()) < deadline and not give_up():
                if now >= release_at and not self._is_terminal_released:
                    self._is_terminal_released = True
                    self._hurry(is_hurried=True)
                self._idle.wait(min((release_at if now < release_at else deadline) - now, ASK_EVERY_S))
            self._hurry(is_hurried=False)
            self._is_terminal_released = False
        was_asked = give_up()
        self._give_up(
            "dropped: a stop was requested" if was_asked else f"not delivered within {timeout_s:g} s"
        )
        with self._lock:
            return list(self._failures)

    def close(self, timeout_s: float = 1.0) -> None:
        """Drop what is left and stop the threads; waits at most `timeout_s`. Safe to repeat."""
        if self._is_foreign():
            return
        with self._lock:
            self._is_closed = True
        self._give_up("the uploader was closed before it could be sent", stop=True)
        deadline = time.monotonic() + timeout_s
        for lane in self._lanes.values():
            lane.join(max(0.0, deadline - time.monotonic()))

    def _lane(self, kind: str) -> Lane | None:
        if self._is_foreign():
            raise UploadError(
                f"this uploader was made in process {self._process_id} and has no threads in process {os.getpid()}; "
                "make one there"
            )
        if self._is_closed:
            raise UploadError(f"a {kind} upload was requested after close(); close the uploader last")
        return self._lanes.get(kind)

    def _queue(self, lane: Lane, upload: Upload) -> None:
        with self._lock:
            self._files[lane.kind].add(upload)
            lane.notify()

    def _is_foreign(self) -> bool:
        return os.getpid() != self._process_id

    def _is_idle(self) -> bool:
        return all(lane.is_idle() for lane in self._lanes.values())

    def _may_send_terminal(self) -> bool:
        others = (lane for kind, lane in self._lanes.items() if kind != TERMINAL)
        return self._is_terminal_released or all(lane.is_idle() for lane in others)

    def _hurry(self, *, is_hurried: bool) -> None:
        for lane in self._lanes.values():
            lane.hurry(is_hurried=is_hurried)

    def _lane_became_idle(self) -> None:
        self._idle.notify_all()
        if TERMINAL in self._lanes:
            self._lanes[TERMINAL].wake()

    def _give_up(self, reason: str, *, stop: bool = False) -> None:
        with self._lock:
            failures = [failure for lane in self._lanes.values() for failure in lane.give_up(reason)]
            if stop:
                for lane in self._lanes.values():
                    lane.stop()
        for failure in failures:
            self._record(failure)

    def _record(self, failure: UploadFailure) -> None:
        """Keep a failure and report it. Never under the lock: `on_failure` may be slow."""
        clean = dataclasses.replace(failure, reason=self._redactor.redact(failure.reason))
        with self._lock:
            self._failures.append(clean)
        if self._on_failure is None:
            log.warning("upload of %s (step %s) failed: %s", clean.kind, clean.step, clean.reason)
            return
        try:
            self._on_failure(clean)
        except Exception:
            log.exception("on_failure raised for an upload of %s", clean.kind)
