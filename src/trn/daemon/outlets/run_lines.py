"""The lines that a log file still lacks of a run: its events, its output and its job lines, each in order."""

import contextlib
from collections.abc import Callable, Iterator

from gen_worker.contract.files.regular import NotRegularFileError
from trn.core.home import Home
from trn.core.runs import RunRecord
from trn.daemon.ingest.event_file import read_terminal
from trn.daemon.outlets.log_file import LogFile
from trn.daemon.outlets.log_lines import (
    NUM_JOB_LINES,
    encode_lines,
    job_ended,
    job_submitted,
    split_output,
)
from trn.daemon.outlets.outbox import Outbox, Place
from trn.executors.base import FilesByPool
from trn.registry.cursors import LogPlace

READ_BYTES = 256 << 10


class RunLines:
    """Reads runs' folders. For one thread."""

    def __init__(self, home: Home, files: FilesByPool, outbox: Outbox, clock_ms: Callable[[], int]) -> None:
        self._runs = home.runs
        self._files = files
        self._outbox = outbox
        self._clock_ms = clock_ms

    def after(self, run: RunRecord, file: LogFile, place: LogPlace) -> Iterator[tuple[bytes, LogPlace]]:
        """(whole lines, the place after them) for this file. Reads as it is iterated."""
        if file.has_job_lines and place.num_job_lines == 0:
            place = place._replace(num_job_lines=1)
            yield job_submitted(run, self._folder(run)), place
        if file.has_events and run.attempt:
            for batch, end in self._outbox.batches(run, Place(place.seq, place.offset)):
                place = place._replace(seq=batch.last_seq, offset=end)
                yield batch.lines, place
        if file.has_output and run.attempt:
            for lines, end in self._output(run, place.output_offset):
                place = place._replace(output_offset=end)
                yield lines, place
        if file.has_job_lines and run.state.is_terminal and place.num_job_lines < NUM_JOB_LINES:
            terminal = None
            with contextlib.suppress(NotRegularFileError):
                events = self._files.of(run.needs.pool).events(run.run_id)
                terminal = read_terminal(events, run.attempt, run.nonce)
            final = terminal.final_checkpoint if terminal else ""
            yield job_ended(run, self._folder(run), final), place._replace(num_job_lines=NUM_JOB_LINES)

    def _folder(self, run: RunRecord) -> str:
        return f"{self._runs}/{run.run_id}"

    def _output(self, run: RunRecord, offset: int) -> Iterator[tuple[bytes, int]]:
        """(lines, where in worker.log they end)."""
        files = self._files.of(run.needs.pool)
        file = files.log(run.run_id)
        try:
            size_bytes = file.size()
        except NotRegularFileError:
            return
        offset = min(offset, size_bytes)  # a power cut may have cut the file
        while offset < size_bytes:
            data = file.read(offset, min(READ_BYTES, size_bytes - offset))
            lines = list(
                split_output(
                    data,
                    offset,
                    run_id=run.run_id,
                    nonce=run.nonce,
                    now_ms=self._clock_ms(),
                    is_all=run.state.is_terminal and offset + len(data) >= size_bytes,
                    # Read after the data: an attempt is recorded before it prints.
                    starts=files.log_starts(run.run_id, offset),
                )
            )
            if not lines:
                return
            offset = lines[-1].offset + lines[-1].size_bytes
            yield encode_lines(lines), offset
