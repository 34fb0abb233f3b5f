"""Downloads as events: one `log` line for every tenth of a file."""

from gen_worker.trainer.contracts import StopSignal
from gen_worker.trainer.job_lifecycle import raise_stop
from gen_worker.trainer.reporting import TrainingReporter


class DownloadProgress:
    """Turns bytes received into a `log` event for every tenth of a file; ends the download on a stop request."""

    def __init__(self, reporter: TrainingReporter, stop: StopSignal) -> None:
        self._reporter = reporter
        self._stop = stop
        self._told: dict[str, int] = {}

    def __call__(self, name: str, received_bytes: int, total_bytes: int | None) -> None:
        if self._stop:
            raise_stop(self._stop)
        tenth = 10 * received_bytes // total_bytes if total_bytes else received_bytes >> 28
        if tenth > self._told.get(name, 0):
            self._told[name] = tenth
            self._reporter.log(
                f"fetching {name}: {received_bytes} of {total_bytes or 'an unknown number of'} bytes",
                received_bytes=received_bytes,
                total_bytes=total_bytes,
            )
