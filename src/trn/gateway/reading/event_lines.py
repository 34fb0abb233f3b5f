"""Events of a run from its file, as far as the daemon has taken them in; also while no daemon runs."""

import os

import msgspec

from gen_worker.contract.files.regular import open_regular
from trn.core.home import Home
from trn.core.runs import RunRecord
from trn.registry.reader import RegistryReader

READ_BYTES = 1 << 20
MAX_LINE = 2 << 20


class EventHead(msgspec.Struct):
    seq: int = 0
    nonce: str = ""


class EventPage(msgspec.Struct, frozen=True, kw_only=True):
    """Events in order, as in the run's file. Continue after `last_seq`."""

    events: list[msgspec.Raw]
    last_seq: int
    is_end: bool  # no more are known now


def read_events(home: Home, reader: RegistryReader, run: RunRecord, after_seq: int, limit: int) -> EventPage:
    """Blocks. A line of another submission is not believed."""
    _, offset = reader.event_place(run.run_id, after_seq)
    events: list[msgspec.Raw] = []
    try:
        fd = open_regular(home.run(run.run_id).events)
    except FileNotFoundError:
        return EventPage(events=[], last_seq=after_seq, is_end=True)
    try:
        rest = b""
        while offset < run.event_offset and len(events) < limit:
            data = os.pread(fd, min(READ_BYTES, run.event_offset - offset), offset)
            if not data:
                break
            offset += len(data)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                head = _read_head(line)
                if (
                    head is not None
                    and head.seq > after_seq
                    and head.nonce == run.nonce
                    and len(events) < limit
                ):
                    after_seq = head.seq
                    events.append(msgspec.Raw(line))
            if len(rest) > MAX_LINE:
                rest = b""
    finally:
        os.close(fd)
    return EventPage(events=events, last_seq=after_seq, is_end=len(events) < limit)


def _read_head(line: bytes) -> EventHead | None:
    try:
        return msgspec.json.decode(line, type=EventHead)
    except msgspec.MsgspecError:
        return None
