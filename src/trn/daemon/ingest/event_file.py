"""Reads a run's events file while its worker writes it.

- A line counts once it has its newline.
- A whole line that is not an event of this run is set aside: damaged, over 1 MiB, with a number out of order, or with the
  `nonce` of another submission.
- The worker that continues the file accepts the same lines as events, so it never cuts one off.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

import msgspec

from gen_worker.contract.sizes import MAX_COUNT, MAX_EVENT_BYTES, Count
from trn.core.artifacts.files import MAX_PATH
from trn.core.artifacts.records import ArtifactKind, NamedFile, make_artifact_id
from trn.executors.base import RunFile

MAX_LINE_BYTES = MAX_EVENT_BYTES
CHUNK_BYTES = 256 << 10  # what is parsed at a time, and sent in a message
SHOWN_BYTES = 4 << 10  # of a damaged line
PLAUSIBLE_GAP = 1 << 20
BLOCK_BYTES = 64 << 10

_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_METRIC_EVENTS = frozenset({"metric", "metrics", "validation"})
# Events that name a file; of an `artifact` its own `kind` counts.
_FILE_EVENTS: dict[str, ArtifactKind] = {
    "checkpoint": "checkpoint",
    "sample": "sample",
    "video": "video",
    "artifact": "file",
}
_KINDS_OF_FILES: dict[object, ArtifactKind] = {"sample": "sample", "video": "video", "file": "file"}
_Seq = Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)]


class Head(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What every event has."""

    event: str
    seq: _Seq
    run_id: str
    attempt: Count
    timestamp_ms: Count
    nonce: str = ""  # of the submission; older workers and workers without a daemon write none


class Event(Head, frozen=True, kw_only=True, gc=False):
    """An event, as far as the registry needs it."""

    step: Count | None = None
    name: str | None = None
    value: float | str | None = None
    values: dict[str, float | str] | None = None
    end_step: Count | None = None
    start_step: Count | None = None  # of the checkpoint of another run that it continues
    max_steps: Count | None = None
    # Of a file. An author's own events may use these names for anything.
    path: Any = None
    poster: Any = None
    kind: Any = None
    size_bytes: Any = None

    def named_files(self) -> list[NamedFile]:
        """The files that it names; a video's poster comes before it."""
        kind = _FILE_EVENTS.get(self.event)
        if kind is None or not isinstance(self.path, str):
            return []
        if self.event == "artifact":
            kind = _KINDS_OF_FILES.get(self.kind, kind)
        files, poster_id = [], ""
        if kind == "video" and isinstance(self.poster, str):
            files.append(self._name_file(self.poster, "file"))
            poster_id = files[0].artifact_id
        size = self.size_bytes
        is_size = kind != "checkpoint" and type(size) is int and 0 < size <= MAX_COUNT
        files.append(self._name_file(self.path, kind, size if is_size else None, poster_id))
        return files

    def _name_file(
        self, path: str, kind: ArtifactKind, size_bytes: int | None = None, poster_id: str = ""
    ) -> NamedFile:
        path = path[: MAX_PATH + 1]  # one that is longer is refused
        return NamedFile(
            artifact_id=make_artifact_id(
                run_id=self.run_id, nonce=self.nonce, attempt=self.attempt, seq=self.seq, path=path
            ),
            seq=self.seq,
            attempt=self.attempt,
            step=self.step or 0,
            kind=kind,
            path=path,
            created_ms=self.timestamp_ms,
            size_bytes=size_bytes,
            poster_id=poster_id,
        )

    def step_after(self, step: int) -> int:
        """The run's step after this event. A checkpoint event may name an earlier step, because it comes later."""
        if self.step is None:
            return step
        return max(step, self.step) if self.event == "checkpoint" else self.step

    def points(self) -> Iterable[tuple[str, float]]:
        """(name, value) of its metrics."""
        if self.event not in _METRIC_EVENTS or self.step is None:
            return ()
        values = self.values
        if values is None:
            if self.name is None or self.value is None:
                return ()
            values = {self.name: self.value}
        return [(name, number) for name, value in values.items() if (number := _number(value)) is not None]


class Terminal(msgspec.Struct, frozen=True, kw_only=True, rename={"stop_reason": "reason"}):
    """The terminal event of an attempt."""

    event: str  # completed or failed
    step: int = 0
    category: str = ""
    error: str = ""
    cause: str = ""  # a row of the table of failures
    fault: str = ""
    values: dict[str, Any] = {}
    closed_by: str = ""  # who wrote it instead of the worker
    final_checkpoint: str = ""
    stop_reason: str = ""  # of `completed`: why a callback stopped it before its last step


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """A whole line that is not an event."""

    offset: int
    size_bytes: int
    reason: str
    line: bytes  # at least its beginning


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Whole lines from an offset on."""

    offset: int
    lines: bytes = b""
    next_offset: int
    size_bytes: int  # of the file, before it was read
    is_end: bool = True  # those bytes hold no other whole line
    is_cut: bool = False  # no line begins at the offset any more
    damaged: tuple[Damage, ...] = ()


class EventBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Events for watchers: JSON objects, one a line, in order."""

    first_seq: int
    last_seq: int
    lines: bytes

    def after(self, seq: int) -> "EventBatch | None":
        """Those after `seq`; None if there are none."""
        if self.first_seq > seq:
            return self
        if self.last_seq <= seq:
            return None
        for start, line in split(self.lines, 1):
            first_seq = _decode_head(line).seq
            if first_seq > seq:
                return EventBatch(first_seq=first_seq, last_seq=self.last_seq, lines=self.lines[start:])
        return None


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """Parsed lines: `lines` are those of `events`, one for one."""

    events: Sequence[Event]
    lines: bytes
    ends: Sequence[int]  # where in the file each event ends, or only the end of the last one
    damaged: Sequence[Damage] = ()
    num_missing: int = 0  # numbers that were skipped

    @property
    def batch(self) -> EventBatch:
        return EventBatch(first_seq=self.events[0].seq, last_seq=self.events[-1].seq, lines=self.lines)

    def end_of(self, seq: int) -> int | None:
        """Where in the file the last event up to `seq` ends; None if there is none."""
        if not self.events:
            return None
        ends = self.ends
        if len(ends) < len(self.events):  # there is nothing between them
            begin = ends[-1] - len(self.lines)
            ends = [begin + start + len(line) for start, line in split(self.lines, 1)]
        known = [end for event, end in zip(self.events, ends, strict=True) if event.seq <= seq]
        return known[-1] if known else None


_decoder = msgspec.json.Decoder(Event)
_decode_head = msgspec.json.Decoder(Head).decode
_decode_any = msgspec.json.Decoder().decode
_NO_EVENT = (msgspec.MsgspecError, ValueError, RecursionError)


def read_batch(file: RunFile, offset: int, max_bytes: int = MAX_LINE_BYTES) -> Batch:
    """The whole lines from `offset` on, at most `max_bytes` of them (at least the maximum of one line)."""
    assert max_bytes >= MAX_LINE_BYTES
    size = file.size()
    before = min(offset, 1)
    data = file.read(offset - before, max_bytes + before)
    if offset and data[:1] != b"\n":
        return Batch(offset=offset, next_offset=offset, size_bytes=size, is_cut=True)
    lines = data[before : data.rfind(b"\n", before) + 1]
    is_end = offset + len(data) - before >= size
    if not lines and not is_end:
        return _skip_long_line(file, offset, size)
    return Batch(offset=offset, lines=lines, next_offset=offset + len(lines), size_bytes=size, is_end=is_end)


def _skip_long_line(file: RunFile, offset: int, size: int) -> Batch:
    at = offset
    while block := file.read(at, MAX_LINE_BYTES):
        newline = block.find(b"\n")
        if newline >= 0:
            at += newline + 1
            reason = f"has more than {MAX_LINE_BYTES} bytes"
            shown = file.read(offset, SHOWN_BYTES)
            damage = Damage(offset=offset, size_bytes=at - offset, reason=reason, line=shown)
            return Batch(offset=offset, next_offset=at, size_bytes=size, is_end=at >= size, damaged=(damage,))
        at += len(block)
    return Batch(offset=offset, next_offset=offset, size_bytes=size)


def split(lines: bytes, max_bytes: int = CHUNK_BYTES) -> Iterator[tuple[int, bytes]]:
    """(start, whole lines), each of at most `max_bytes` or of one line."""
    start = 0
    while start < len(lines):
        end = lines.rfind(b"\n", start, start + max_bytes) + 1 or lines.find(b"\n", start) + 1
        yield start, lines[start:end]
        start = end


def parse(lines: bytes, offset: int, after_seq: int | None, nonce: str = "") -> Chunk:
    """The events of one submission in whole lines. They follow the number `after_seq` (None: any)."""
    try:
        _require_utf8(lines)
        events = _decoder.decode_lines(lines)
    except _NO_EVENT:
        return _parse_each(lines, offset, after_seq, nonce)
    first = after_seq + 1 if after_seq is not None else events[0].seq if events else 0
    if len(events) == lines.count(b"\n") and all(
        event.seq == seq and event.nonce == nonce for seq, event in enumerate(events, first)
    ):
        return Chunk(events=events, lines=lines, ends=(offset + len(lines),))
    return _parse_each(lines, offset, after_seq, nonce)


def _parse_each(lines: bytes, offset: int, after_seq: int | None, nonce: str) -> Chunk:
    found: list[tuple[int, bytes, Event]] = []
    damaged: list[Damage] = []

    def set_aside(at: int, line: bytes, reason: str) -> None:
        damaged.append(Damage(offset=offset + at, size_bytes=len(line), reason=reason, line=line))

    for at, line in split(lines, 1):
        try:
            event = _decode_event(line)
        except _NO_EVENT as fault:
            set_aside(at, line, f"is not an event: {fault}")
            continue
        if event.nonce == nonce:
            found.append((at, line, event))
        else:
            set_aside(at, line, "belongs to another submission")
    events: list[Event] = []
    kept: list[bytes] = []
    ends: list[int] = []
    num_missing = 0
    last = after_seq
    next_seqs = [*(event.seq for _, _, event in found), None][1:]
    for (at, line, event), next_seq in zip(found, next_seqs, strict=True):
        if last is not None and not _follows(event.seq, last, next_seq):
            set_aside(at, line, f"has number {event.seq} and comes after {last}")
            continue
        num_missing += 0 if last is None else event.seq - last - 1
        last = event.seq
        events.append(event)
        kept.append(line)
        ends.append(offset + at + len(line))
    return Chunk(events=events, lines=b"".join(kept), ends=ends, damaged=damaged, num_missing=num_missing)


def _follows(seq: int, last: int, next_seq: int | None) -> bool:
    """A number may skip some, where lines are damaged. It is refused if the events after it would then be out of order."""
    if seq <= last + 1:
        return seq == last + 1
    if next_seq is None or next_seq <= last:  # no help to decide
        return seq - last <= PLAUSIBLE_GAP
    return next_seq > seq


def _require_utf8(lines: bytes) -> None:
    """The decoder checks only the fields that it knows."""
    if not lines.isascii():
        lines.decode()


def _decode_event(line: bytes) -> Event:
    _require_utf8(line)
    try:
        return _decoder.decode(line)
    except _NO_EVENT:
        _decode_any(line)  # an author's own field may have any type, but the line must be JSON
        head: dict[str, Any] = msgspec.structs.asdict(_decode_head(line))
        return Event(**head)


def _number(value: float | str) -> float | None:
    return _WORDS.get(value) if isinstance(value, str) else value


def last_seq_before(file: RunFile, offset: int, nonce: str = "") -> int:
    """The number of the last event that ends at or before the offset; 0 if there is none."""
    for line in _lines_backwards(file, offset):
        try:
            event = _decode_event(line)
        except _NO_EVENT:
            continue
        if event.nonce == nonce:
            return event.seq
    return 0


def is_line_start(file: RunFile, offset: int) -> bool:
    """Whether a line begins at the offset: at the start of the file, or after a newline."""
    return offset == 0 or file.read(offset - 1, 1) == b"\n"


def read_terminal(file: RunFile, attempt: int, nonce: str = "") -> Terminal | None:
    """The terminal event of an attempt, searched from the end: it is the last event of the attempt."""
    for line in _lines_backwards(file, None):
        try:
            head = _decode_head(line)
            if head.attempt > attempt or head.nonce != nonce:
                continue
            if head.attempt < attempt or head.event not in ("completed", "failed"):
                return None
            fields = {name: value for name, value in _decode_any(line).items() if value is not None}
            if head.event == "failed":
                fields.pop("reason", None)
            return msgspec.convert(fields, Terminal)
        except _NO_EVENT:
            continue
    return None


def _lines_backwards(file: RunFile, end: int | None) -> Iterator[bytes]:
    """Whole lines before `end`, the last one first, without lines that are too long for an event."""
    start = file.size() if end is None else end
    rest, is_ended = b"", False  # is_ended: the line that `rest` is part of has its newline
    while start > 0:
        size = min(BLOCK_BYTES, start)
        start -= size
        rest, *lines = (file.read(start, size) + rest).split(b"\n")
        if lines and not is_ended:
            lines.pop()
            is_ended = True
        yield from (line for line in reversed(lines) if len(line) < MAX_LINE_BYTES)
        if len(rest) > MAX_LINE_BYTES:
            start, rest = _end_of_line_before(file, start), b""
            is_ended = False  # from there on backwards: a newline, then a line
    if is_ended and len(rest) < MAX_LINE_BYTES:
        yield rest


def _end_of_line_before(file: RunFile, at: int) -> int:
    """The offset after the last newline before `at`; 0 if there is none."""
    while at > 0:
        start = max(at - MAX_LINE_BYTES, 0)
        found = file.read(start, at - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        at = start
    return 0


def read_chunks(
    file: RunFile, offset: int, until_offset: int, after_seq: int | None, nonce: str = ""
) -> Iterator[Chunk]:
    """Parsed events between two offsets. Reads as it is iterated; from the beginning if the file was cut meanwhile."""
    seq = after_seq
    while offset < until_offset:
        batch = read_batch(file, offset)
        if batch.is_cut and batch.size_bytes:
            offset, seq = 0, None
            continue
        lines = batch.lines[: until_offset - offset]
        for start, part in split(lines[: lines.rfind(b"\n") + 1]):
            chunk = parse(part, offset + start, seq, nonce)
            if chunk.events:
                seq = chunk.events[-1].seq
                yield chunk
        if batch.next_offset == offset:
            return
        offset = batch.next_offset


def replay(
    file: RunFile, after_seq: int, from_offset: int, until_offset: int, nonce: str = ""
) -> Iterator[EventBatch]:
    """Events after `after_seq` between two offsets. Reads as it is iterated."""
    for chunk in read_chunks(file, from_offset, until_offset, None, nonce):
        wanted = chunk.batch.after(after_seq)
        if wanted is not None:
            after_seq = wanted.last_seq
            yield wanted
