"""A bounded queue and the thread that sends it: one lane per kind of upload, so that none waits for another."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from gen_worker.trainer.transfer.policy import Backoff, FaultKind, TransferFault, TransferOptions
from gen_worker.trainer.transfer.upload_endpoints import Endpoint
from gen_worker.trainer.transfer.upload_parcels import (
    METRICS,
    Parcel,
    RecordUpload,
    Sender,
    Upload,
    UploadFailure,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadLimits:
    """Max size of the queues. Beyond it metrics are thinned and the oldest files skipped, and this is reported."""

    max_points: int = 20_000
    max_point_values: int = 200_000
    max_batch_points: int = 1_000
    linger_s: float = 1.0
    max_files: int = 64
    max_file_bytes: int = 64 << 30


class Backlog(Protocol):
    """The queue of a lane. Called under the lane's lock; never blocks."""

    def has_work(self) -> bool: ...

    def is_full_batch(self) -> bool:
        """Send now, without waiting for more?"""

    def take(self) -> Upload: ...

    def take_losses(self) -> list[UploadFailure]: ...


class FileBacklog:
    """Uploads in order. When full, the oldest is dropped."""

    def __init__(self, limits: UploadLimits) -> None:
        self._limits = limits
        self._uploads: deque[Upload] = deque()
        self._size_bytes = 0
        self._losses: list[UploadFailure] = []

    def add(self, upload: Upload) -> None:
        self._uploads.append(upload)
        self._size_bytes += upload.size_bytes
        while len(self._uploads) > 1 and (
            len(self._uploads) > self._limits.max_files or self._size_bytes > self._limits.max_file_bytes
        ):
            oldest = self.take()
            oldest.release()
            self._losses.append(
                UploadFailure(
                    kind=oldest.kind,
                    path=oldest.path,
                    step=oldest.step,
                    reason="skipped: the upload queue was full and newer uploads were waiting",
                    is_skipped=True,
                )
            )

    def has_work(self) -> bool:
        return bool(self._uploads)

    def is_full_batch(self) -> bool:
        return True

    def take(self) -> Upload:
        upload = self._uploads.popleft()
        self._size_bytes -= upload.size_bytes
        return upload

    def take_losses(self) -> list[UploadFailure]:
        losses, self._losses = self._losses, []
        return losses


@dataclass(slots=True)
class _Point:
    step: int
    timestamp_ms: int
    values: Mapping[str, Any]


class PointBacklog:
    """Metric points, sent in batches. When full, every second one is dropped, so that curves keep their shape."""

    def __init__(self, limits: UploadLimits, sender: Sender) -> None:
        self._limits = limits
        self._sender = sender
        self._points: deque[_Point] = deque()
        self._num_values = 0
        self._num_batches = 0
        self._num_thinned = 0

    def add(self, step: int, timestamp_ms: int, values: Mapping[str, Any]) -> None:
        self._points.append(_Point(step, timestamp_ms, values))
        self._num_values += len(values)
        limits = self._limits
        while len(self._points) > 1 and (
            len(self._points) > limits.max_points or self._num_values > limits.max_point_values
        ):
            # Counted from the newest, which is always kept.
            kept = list(self._points)[::-2][::-1]
            self._num_thinned += len(self._points) - len(kept)
            self._points = deque(kept)
            self._num_values = sum(len(point.values) for point in kept)

    def has_work(self) -> bool:
        return bool(self._points)

    def is_full_batch(self) -> bool:
        return len(self._points) >= self._limits.max_batch_points

    def take(self) -> Upload:
        count = min(len(self._points), self._limits.max_batch_points)
        batch = [self._points.popleft() for _ in range(count)]
        self._num_values -= sum(len(point.values) for point in batch)
        self._num_batches += 1

        def record() -> dict[str, Any]:  # built later, by the lane's thread without the lock
            return {
                "run_id": self._sender.run_id,
                "attempt": self._sender.attempt,
                "points": [
                    {"step": point.step, "timestamp_ms": point.timestamp_ms, "values": point.values}
                    for point in batch
                ],
            }

        name = f"metrics-{self._sender.attempt:04d}-{self._num_batches:08d}.json"
        return RecordUpload(METRICS, batch[-1].step, record, file_name=name, num_points=count)

    def take_losses(self) -> list[UploadFailure]:
        if not self._num_thinned:
            return []
        lost, self._num_thinned = self._num_thinned, 0
        reason = f"{lost} metric points were dropped: the upload queue was full"
        return [
            UploadFailure(kind=METRICS, path=None, step=None, reason=reason, num_lost=lost, is_skipped=True)
        ]


class _Abandoned(Exception):  # noqa: N818  (not an error)
    pass


class Lane:
    """Sends a backlog in order. All lanes of an uploader share `lock`; I/O happens outside of it.

    The lane waits until `may_start` is true. `on_idle` is called under the lock after each upload, `report` without
    it, both from the lane's thread.
    """

    def __init__(
        self,
        kind: str,
        backlog: Backlog,
        *,
        open_endpoint: Callable[[], Endpoint],
        options: TransferOptions,
        linger_s: float,
        lock: threading.RLock,
        on_idle: Callable[[], None],
        report: Callable[[UploadFailure], None],
        may_start: Callable[[], bool] = lambda: True,
    ) -> None:
        self.kind = kind
        self._backlog = backlog
        self._open_endpoint = open_endpoint
        self._options = options
        self._linger_s = linger_s
        self._wake = threading.Condition(lock)
        self._on_idle = on_idle
        self._report = report
        self._may_start = may_start
        self._thread: threading.Thread | None = None
        self._current: Upload | None = None
        self._is_waiting = False
        self._is_hurried = False
        self._refusal: str | None = None
        self._num_refused = 0
        self._stop = threading.Event()

    # Called by the owner, under the lock.

    def notify(self) -> None:
        """Something was added: start or wake the thread."""
        if self._thread is None and not self._stop.is_set():
            self._thread = threading.Thread(target=self._run, name=f"upload-{self.kind}", daemon=True)
            self._thread.start()
        elif self._is_waiting:
            self._wake.notify()

    def hurry(self, *, is_hurried: bool) -> None:
        """Send incomplete batches at once. Also checks `may_start` again."""
        self._is_hurried = is_hurried
        self.wake()

    def wake(self) -> None:
        self._wake.notify()

    def is_idle(self) -> bool:
        is_busy = self._current is not None and not self._current.is_abandoned
        return not is_busy and not self._backlog.has_work()

    def give_up(self, reason: str) -> list[UploadFailure]:
        """Drop everything that waits or is being sent; returns the failures."""
        failures = self.take_losses()
        if self._current is not None and not self._current.is_abandoned:
            self._current.is_abandoned = True
            if not self._current.is_reported:
                failures.append(self._failure(self._current, reason))
        while self._backlog.has_work():
            upload = self._backlog.take()
            failures.append(self._failure(upload, upload.problem or reason))
            upload.release()
        self._wake.notify()
        return failures

    def take_losses(self) -> list[UploadFailure]:
        failures = self._backlog.take_losses()
        if self._num_refused:
            reason = f"{self._num_refused} metric points were not sent: {self._refusal}"
            lost, self._num_refused = self._num_refused, 0
            failures.append(
                UploadFailure(
                    kind=self.kind, path=None, step=None, reason=reason, num_lost=lost, is_auth=True
                )
            )
        return failures

    def stop(self) -> None:
        self._stop.set()
        self._wake.notify()

    def join(self, timeout_s: float) -> None:
        """Not under the lock."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    # The lane's own thread.

    def _run(self) -> None:
        endpoint: Endpoint | None = None
        try:
            while (upload := self._next_upload()) is not None:
                try:
                    if endpoint is None and self._refusal is None and upload.problem is None:
                        endpoint = self._open_endpoint()
                    self._handle(upload, endpoint)
                except Exception as exc:
                    # A bug must not end the lane: later uploads would wait forever.
                    log.exception("upload of %s failed unexpectedly", upload.kind)
                    self._fail(upload, f"unexpected {type(exc).__name__}: {exc}")
                finally:
                    upload.release()
                    with self._wake:
                        self._current = None
                        self._on_idle()
        finally:
            if endpoint is not None:
                endpoint.close()

    def _next_upload(self) -> Upload | None:
        """Wait for work, and `linger_s` for more of it; None if the lane is stopped."""
        losses: list[UploadFailure] = []
        while True:
            with self._wake:
                losses = self._backlog.take_losses()
                if not losses:
                    while not self._stop.is_set() and not (self._backlog.has_work() and self._may_start()):
                        self._is_waiting = True
                        self._wake.wait()
                    self._is_waiting = False
                    until = time.monotonic() + self._linger_s
                    while not (self._stop.is_set() or self._is_hurried or self._backlog.is_full_batch()):
                        remaining_s = until - time.monotonic()
                        if remaining_s <= 0:
                            break
                        self._wake.wait(remaining_s)
                    if self._stop.is_set():
                        return None
                    if self._backlog.has_work():
                        self._current = self._backlog.take()
                        return self._current
            for loss in losses:
                self._report(loss)

    def _handle(self, upload: Upload, endpoint: Endpoint | None) -> None:
        if upload.problem is not None:
            self._fail(upload, upload.problem)
            return
        if self._refusal is not None:
            self._fail_refused(upload)
            return
        assert endpoint is not None
        try:
            for parcel in upload.parcels():
                self._deliver(parcel, upload, endpoint)
        except TransferFault as fault:
            if fault.kind is FaultKind.AUTH:
                self._refusal = fault.reason
            self._fail(upload, fault.reason, is_auth=fault.kind is FaultKind.AUTH)
        except _Abandoned:
            return

    def _deliver(self, parcel: Parcel, upload: Upload, endpoint: Endpoint) -> None:
        """Send one parcel, with retries; raises the last fault."""
        backoff = Backoff(self._options.retry, draw=self._options.draw)

        def check() -> None:
            if upload.is_abandoned or self._stop.is_set():
                raise _Abandoned

        while True:
            check()
            try:
                endpoint.send(parcel, check=check)
            except TransferFault as fault:
                delay_s = None
                if fault.kind is FaultKind.TRANSIENT:
                    delay_s = backoff.next_delay_s(fault.retry_after_s)
                if delay_s is None:
                    tries = "" if backoff.failures < 2 else f" (after {backoff.failures} attempts)"
                    raise TransferFault(fault.kind, f"{parcel.file_name}: {fault.reason}{tries}") from None
            else:
                return
            with self._wake:
                self._wake.wait_for(lambda: upload.is_abandoned or self._stop.is_set(), delay_s)

    def _fail_refused(self, upload: Upload) -> None:
        if upload.kind == METRICS:
            with self._wake:  # one report at the end, not one each second
                self._num_refused += upload.num_points
        else:
            self._fail(upload, f"not sent: {self._refusal}", is_auth=True)

    def _fail(self, upload: Upload, reason: str, *, is_auth: bool = False) -> None:
        with self._wake:
            if upload.is_abandoned:
                return  # already reported
            upload.is_reported = True
        self._report(self._failure(upload, reason, is_auth=is_auth))

    def _failure(self, upload: Upload, reason: str, *, is_auth: bool = False) -> UploadFailure:
        if upload.kind == METRICS:
            reason = f"{upload.num_points} metric points were not sent: {reason}"
        return UploadFailure(
            kind=upload.kind,
            path=upload.path,
            step=upload.step,
            reason=reason,
            num_lost=upload.num_points,
            is_auth=is_auth,
            is_skipped=upload.is_skipped,
        )
