"""A bounded queue and the daemon thread that empties it: one lane per kind of upload, so none waits for another."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from gen_worker.trainer.transfer.policy import Backoff, FaultKind, TransferFault, TransferOptions
from gen_worker.trainer.transfer.upload_endpoints import Endpoint
from gen_worker.trainer.transfer.upload_parcels import METRICS, Job, Parcel, RecordJob, Sender, UploadFailure

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadLimits:
    """What may wait at once. Beyond it metrics are thinned and the oldest files skipped: reported, never silent."""

    max_points: int = 20_000
    max_point_values: int = 200_000
    max_batch_points: int = 1_000
    linger_s: float = 1.0
    max_files: int = 64
    max_file_bytes: int = 64 << 30


class Backlog(Protocol):
    """What waits in a lane. Called under the lane's lock; never blocks."""

    def has_work(self) -> bool: ...

    def is_full_batch(self) -> bool:
        """Is there no reason to wait for more?"""

    def take(self) -> Job: ...

    def take_losses(self) -> list[UploadFailure]: ...


class FileBacklog:
    """Jobs in order; over its bounds the oldest goes, for the newest is worth most."""

    def __init__(self, limits: UploadLimits) -> None:
        self._limits = limits
        self._jobs: deque[Job] = deque()
        self._size_bytes = 0
        self._losses: list[UploadFailure] = []

    def add(self, job: Job) -> None:
        self._jobs.append(job)
        self._size_bytes += job.size_bytes
        while len(self._jobs) > 1 and (
            len(self._jobs) > self._limits.max_files or self._size_bytes > self._limits.max_file_bytes
        ):
            oldest = self.take()
            oldest.release()
            self._losses.append(
                UploadFailure(
                    kind=oldest.kind,
                    path=oldest.path,
                    step=oldest.step,
                    reason="skipped: newer ones were waiting and the upload queue was full",
                    is_skipped=True,
                )
            )

    def has_work(self) -> bool:
        return bool(self._jobs)

    def is_full_batch(self) -> bool:
        return True

    def take(self) -> Job:
        job = self._jobs.popleft()
        self._size_bytes -= job.size_bytes
        return job

    def take_losses(self) -> list[UploadFailure]:
        losses, self._losses = self._losses, []
        return losses


@dataclass(slots=True)
class _Point:
    step: int
    timestamp_ms: int
    values: Mapping[str, Any]


class PointBacklog:
    """Metric points, sent in batches; when full, every second one goes, so the curve keeps its shape."""

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
            # Counted from the newest, which always stays.
            kept = list(self._points)[::-2][::-1]
            self._num_thinned += len(self._points) - len(kept)
            self._points = deque(kept)
            self._num_values = sum(len(point.values) for point in kept)

    def has_work(self) -> bool:
        return bool(self._points)

    def is_full_batch(self) -> bool:
        return len(self._points) >= self._limits.max_batch_points

    def take(self) -> Job:
        count = min(len(self._points), self._limits.max_batch_points)
        batch = [self._points.popleft() for _ in range(count)]
        self._num_values -= sum(len(point.values) for point in batch)
        self._num_batches += 1

        def record() -> dict[str, Any]:  # built by the lane's thread: the lock is held here
            return {
                "run_id": self._sender.run_id,
                "attempt": self._sender.attempt,
                "points": [
                    {"step": point.step, "timestamp_ms": point.timestamp_ms, "values": point.values}
                    for point in batch
                ],
            }

        name = f"metrics-{self._sender.attempt:04d}-{self._num_batches:08d}.json"
        return RecordJob(METRICS, batch[-1].step, record, file_name=name, num_points=count)

    def take_losses(self) -> list[UploadFailure]:
        if not self._num_thinned:
            return []
        lost, self._num_thinned = self._num_thinned, 0
        reason = f"{lost} metric points were thinned out: the upload queue was full"
        return [
            UploadFailure(kind=METRICS, path=None, step=None, reason=reason, num_lost=lost, is_skipped=True)
        ]


class _Abandoned(Exception):  # noqa: N818  (a way out of a body, not an error)
    pass


class Lane:
    """Delivers a backlog in order. `lock` is shared by all lanes of one uploader; I/O happens outside it.

    `may_start` holds the lane back while False. `on_idle` is called under the lock after each job, `report` from
    the lane's thread without it.
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
        self._current: Job | None = None
        self._is_waiting = False
        self._is_hurried = False
        self._refusal: str | None = None
        self._num_refused = 0
        self._stop = threading.Event()

    # Called by the owner, under the lock.

    def notify(self) -> None:
        """Something was added: start the thread, or wake it if it waits for work."""
        if self._thread is None and not self._stop.is_set():
            self._thread = threading.Thread(target=self._run, name=f"upload-{self.kind}", daemon=True)
            self._thread.start()
        elif self._is_waiting:
            self._wake.notify()

    def hurry(self, *, is_hurried: bool) -> None:
        """Do not wait for company. Also makes the lane ask `may_start` again."""
        self._is_hurried = is_hurried
        self.wake()

    def wake(self) -> None:
        self._wake.notify()

    def is_idle(self) -> bool:
        is_busy = self._current is not None and not self._current.is_abandoned
        return not is_busy and not self._backlog.has_work()

    def give_up(self, reason: str) -> list[UploadFailure]:
        """Drop everything that waits or is under way, and say what that was."""
        failures = self.take_losses()
        if self._current is not None and not self._current.is_abandoned:
            self._current.is_abandoned = True
            if not self._current.is_reported:
                failures.append(self._failure(self._current, reason))
        while self._backlog.has_work():
            job = self._backlog.take()
            failures.append(self._failure(job, job.problem or reason))
            job.release()
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
            while (job := self._next_job()) is not None:
                try:
                    if endpoint is None and self._refusal is None and job.problem is None:
                        endpoint = self._open_endpoint()
                    self._handle(job, endpoint)
                except Exception as exc:
                    # A fault of ours must not end the lane: later uploads would wait for ever.
                    log.exception("upload of %s failed unexpectedly", job.kind)
                    self._fail(job, f"unexpected {type(exc).__name__}: {exc}")
                finally:
                    job.release()
                    with self._wake:
                        self._current = None
                        self._on_idle()
        finally:
            if endpoint is not None:
                endpoint.close()

    def _next_job(self) -> Job | None:
        """Wait for work, and a little longer for company; None when the lane is to end."""
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

    def _handle(self, job: Job, endpoint: Endpoint | None) -> None:
        if job.problem is not None:
            self._fail(job, job.problem)
            return
        if self._refusal is not None:
            self._fail_refused(job)
            return
        assert endpoint is not None
        try:
            for parcel in job.parcels():
                self._deliver(parcel, job, endpoint)
        except TransferFault as fault:
            if fault.kind is FaultKind.AUTH:
                self._refusal = fault.reason
            self._fail(job, fault.reason, is_auth=fault.kind is FaultKind.AUTH)
        except _Abandoned:
            return

    def _deliver(self, parcel: Parcel, job: Job, endpoint: Endpoint) -> None:
        """Send one parcel, again and again within the policy; the last fault is raised."""
        backoff = Backoff(self._options.retry, draw=self._options.draw)

        def check() -> None:
            if job.is_abandoned or self._stop.is_set():
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
                self._wake.wait_for(lambda: job.is_abandoned or self._stop.is_set(), delay_s)

    def _fail_refused(self, job: Job) -> None:
        if job.kind == METRICS:
            with self._wake:  # one report at the end instead of one each second
                self._num_refused += job.num_points
        else:
            self._fail(job, f"not sent: {self._refusal}", is_auth=True)

    def _fail(self, job: Job, reason: str, *, is_auth: bool = False) -> None:
        with self._wake:
            if job.is_abandoned:
                return  # whoever gave it up has reported it
            job.is_reported = True
        self._report(self._failure(job, reason, is_auth=is_auth))

    def _failure(self, job: Job, reason: str, *, is_auth: bool = False) -> UploadFailure:
        if job.kind == METRICS:
            reason = f"{job.num_points} metric points were not sent: {reason}"
        return UploadFailure(
            kind=job.kind,
            path=job.path,
            step=job.step,
            reason=reason,
            num_lost=job.num_points,
            is_auth=is_auth,
            is_skipped=job.is_skipped,
        )
