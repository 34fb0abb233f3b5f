"""What a run has for its copies: its events, its output and its job lines after a place, in their order."""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from gen_worker.contract.regular_files import NotRegularFileError, open_regular, read_regular
from trn.core.home import Home
from trn.core.runs import RunRecord
from trn.daemon.ingest.event_file import read_terminal
from trn.daemon.outlets.log_lines import (
    NUM_JOB_LINES,
    AttemptStart,
    Mark,
    cut_output,
    job_ended,
    job_submitted,
    output_line,
)
from trn.daemon.outlets.outbox import Outbox, Place
from trn.daemon.outlets.run_copies import Copy
from trn.registry.log_places import LogPlace

READ_BYTES = 256 << 10


class Piece(NamedTuple):
    """Whole lines of one source, perhaps none, and the place after them."""

    lines: bytes
    place: LogPlace


class RunLines:
    """Reads runs' folders. For one thread."""

    def __init__(self, home: Home, outbox: Outbox, clock_ms: Callable[[], int]) -> None:
        self._home = home
        self._outbox = outbox
        self._clock_ms = clock_ms
        self._starts: dict[str, dict[int, int | None]] = {}

    def forget(self, run_id: str) -> None:
        self._starts.pop(run_id, None)

    def after(self, run: RunRecord, copy: Copy) -> Iterator[Piece]:
        """All that is there after the copy's place. Reads as it is iterated."""
        place = copy.place
        folder = self._home.run(run.run_id)
        if copy.has_job_lines and place.num_job_lines == 0:
            place = place._replace(num_job_lines=1)
            yield Piece(job_submitted(run, str(folder.root)), place)
        if copy.has_events:
            for batch, end in self._outbox.batches(run, Place(place.seq, place.offset)):
                place = place._replace(seq=batch.last_seq, offset=end)
                yield Piece(batch.lines, place)
        if copy.has_output:
            for lines, end in self._output(run, folder.log, place.output_offset):
                place = place._replace(output_offset=end)
                yield Piece(lines, place)
        if copy.has_job_lines and run.state.is_terminal and place.num_job_lines < NUM_JOB_LINES:
            terminal = None
            with contextlib.suppress(NotRegularFileError):
                terminal = read_terminal(folder.events, run.attempt, run.nonce)
            final = terminal.final_checkpoint if terminal else ""
            place = place._replace(num_job_lines=NUM_JOB_LINES)
            yield Piece(job_ended(run, str(folder.root), final), place)

    def beginnings(self, run: RunRecord, copy: Copy) -> Iterator[Piece]:
        """What may come next in the file: the first piece, and the first of the output, each as if it were alone."""
        yield from itertools.islice(self.after(run, copy), 1)
        if copy.has_output:
            path = self._home.run(run.run_id).log
            for lines, end in itertools.islice(self._output(run, path, copy.place.output_offset), 1):
                yield Piece(lines, copy.place._replace(output_offset=end))

    def place_of(self, run: RunRecord, copy: Copy, marks: list[Mark]) -> LogPlace:
        """The copy's place with these lines, which are in the file already, after it."""
        place = copy.place
        newest = {
            kind: max(mark.value for mark in marks if mark.kind == kind) for kind in {m.kind for m in marks}
        }
        if "output" in newest:
            place = place._replace(output_offset=max(place.output_offset, newest["output"]))
        if "job" in newest:
            place = place._replace(num_job_lines=max(place.num_job_lines, newest["job"]))
        seq = newest.get("event", 0)
        for batch, end in self._outbox.batches(run, Place(place.seq, place.offset)):
            if batch.first_seq > seq:
                break
            rest = batch.after(seq)
            if rest is not None:
                return place._replace(seq=seq, offset=end - len(rest.lines))
            place = place._replace(seq=batch.last_seq, offset=end)
        return place

    def _output(self, run: RunRecord, path: Path, offset: int) -> Iterator[tuple[bytes, int]]:
        """(lines, where in worker.log they end)."""
        try:
            fd = open_regular(path)
        except (FileNotFoundError, NotRegularFileError):
            return
        try:
            size_bytes = os.fstat(fd).st_size
            offset = min(offset, size_bytes)  # a power cut may have taken its end
            while offset < size_bytes:
                data = os.pread(fd, min(READ_BYTES, size_bytes - offset), offset)
                is_all = run.state.is_terminal and offset + len(data) >= size_bytes
                starts = self._attempt_starts(
                    run
                )  # after the read: an attempt makes its record before it prints
                pieces = list(cut_output(data, offset, is_all=is_all, starts=starts))
                if not pieces:
                    return
                now_ms = self._clock_ms()
                offset = pieces[-1][1] + pieces[-1][2]
                yield (
                    b"".join([output_line(run.run_id, piece, now_ms, run.nonce) for piece in pieces]),
                    offset,
                )
        finally:
            os.close(fd)

    def _attempt_starts(self, run: RunRecord) -> list[AttemptStart]:
        known = self._starts.setdefault(run.run_id, {})
        folder = self._home.run(run.run_id).attempts
        # The record that we have may be older than what is in the log.
        number = 1
        while number <= run.attempt + 1 or known.get(number - 1) is not None:
            if number not in known:
                try:
                    known[number] = _decode(read_regular(folder / f"{number}.json")).log_offset
                except (OSError, msgspec.MsgspecError):
                    if number > run.attempt:
                        break
            number += 1
        return [
            AttemptStart(offset, number) for number, offset in sorted(known.items()) if offset is not None
        ]


class _Started(msgspec.Struct):
    log_offset: int | None = None


_decode = msgspec.json.Decoder(_Started).decode
