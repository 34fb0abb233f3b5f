"""The requests that were answered, kept until feedback to them may come.

A request is written before its answer leaves: a client that has an answer can send feedback to it, also after the server was
killed. It is not synced: after a power cut the last requests are unknown. The oldest ones are forgotten first.
"""

import hashlib
import logging
import threading
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from concurrent.futures import Executor
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec

from gen_worker.contract.files.durable import replace_file
from gen_worker.contract.files.regular import NotRegularFileError, read_regular
from gen_worker.inference.feedback.journal import SUFFIX, JournalFile, list_numbers, numbered, set_aside
from gen_worker.inference.frames import Buffer
from gen_worker.inference.messages import Part

logger = logging.getLogger("gen_worker.inference")

INDEX_SUFFIX = ".index"
MIN_FILE_BYTES, MAX_FILE_BYTES = 1 << 20, 64 << 20
NUM_FILES = 16  # that the requests are spread over: so much is forgotten at once
_HASH_BYTES = 8


class AnsweredRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The head of a frame. The payload of the rows follows, then that of each answer."""

    request_id: str
    answered_ms: int
    weights_hash: str  # of the version that answered
    rows: Part
    answers: tuple[Part, ...]


class Place(NamedTuple):
    """Where a request is."""

    file: int
    offset: int


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(AnsweredRecord)
_LENGTH_BYTES = 4


class RequestJournal:
    """`append` and `locate` are of the loop's thread; `read` is of any. Open it in a thread: it reads files."""

    def __init__(self, folder: Path, *, max_bytes: int, executor: Executor) -> None:
        self._folder = folder
        self._file_bytes = min(max(max_bytes // NUM_FILES, MIN_FILE_BYTES), MAX_FILE_BYTES)
        self._max_files = max(max_bytes // self._file_bytes, 2)
        self._executor = executor
        self._lock = threading.Lock()  # of `_files`, while one is closed or read
        self._files: dict[int, JournalFile] = {}
        self._sealed: dict[int, _Index] = {}
        self._open: dict[int, dict[int, int]] = {}  # not sealed yet: hash -> offset
        folder.mkdir(parents=True, exist_ok=True)
        numbers = list_numbers(folder)
        for number in numbers:
            try:
                file = self._files[number] = JournalFile(numbered(folder, number))
            except NotRegularFileError as fault:
                logger.warning("requests are forgotten, %s; it is kept as %s", fault, set_aside(fault.path))
                continue
            index = _Index.read(numbered(folder, number, INDEX_SUFFIX))
            if index is not None:
                self._sealed[number] = index
                continue
            file.cut_tail()
            self._open[number] = {
                hash_id(_read_head(body)[0].request_id): offset for offset, body in file.frames()
            }
            if number != numbers[-1]:
                self._seal(number)
        self.oldest = min(self._files, default=1)  # what was in older files is unknown
        self._newest = max(numbers, default=0)
        if self._newest not in self._open:
            self._begin(self._newest + 1)

    def append(self, record: AnsweredRecord, payload: Sequence[Buffer]) -> None:
        """OSError where the disk refuses."""
        number = self._newest
        head = _encode(record)
        offset = self._files[number].append([len(head).to_bytes(_LENGTH_BYTES, "little") + head, *payload])
        self._open[number][hash_id(record.request_id)] = offset
        if self._files[number].size >= self._file_bytes:
            self._begin(number + 1)
            self._executor.submit(self._seal, number)
            while len(self._files) > self._max_files:
                self._forget(self.oldest)

    def locate(self, request_id: str) -> Place | None:
        """The newest request with that id."""
        wanted = hash_id(request_id)
        for number in sorted(self._files, reverse=True):
            found = self._open.get(number)
            offset = self._sealed[number].find(wanted) if found is None else found.get(wanted)
            if offset is not None:
                return Place(number, offset)
        return None

    def read(self, place: Place) -> tuple[AnsweredRecord, memoryview] | None:
        """Its head and payload; None where it is forgotten by now. Blocks."""
        with self._lock:
            file = self._files.get(place.file)
            body = None if file is None else file.read(place.offset)
        return None if body is None else _read_head(body)

    def close(self) -> None:
        with self._lock:
            for file in self._files.values():
                file.close()

    def _begin(self, number: int) -> None:
        self._files[number] = JournalFile(numbered(self._folder, number))
        self._open[number] = {}
        self._newest = number

    def _seal(self, number: int) -> None:
        """From now on its index needs little memory, and no scan at the next start. Blocks; of any thread."""
        index = _Index.of(self._open[number])
        try:
            index.write(numbered(self._folder, number, INDEX_SUFFIX))
        except OSError as fault:
            logger.warning("the index of answered requests cannot be written: %s", fault)
        self._sealed[number] = index
        self._open.pop(number, None)

    def _forget(self, number: int) -> None:
        self.oldest = number + 1
        with self._lock:
            self._files.pop(number).close()
        self._sealed.pop(number, None)
        self._open.pop(number, None)
        for suffix in (INDEX_SUFFIX, SUFFIX):
            numbered(self._folder, number, suffix).unlink(missing_ok=True)


class _Index:
    """Hashes in their order, and the offset of each."""

    def __init__(self, hashes: "array[int]", offsets: "array[int]") -> None:
        self._hashes = hashes
        self._offsets = offsets

    @classmethod
    def of(cls, offsets: dict[int, int]) -> "_Index":
        pairs = sorted(offsets.items())
        return cls(array("Q", [pair[0] for pair in pairs]), array("Q", [pair[1] for pair in pairs]))

    @classmethod
    def read(cls, path: Path) -> "_Index | None":
        """None where there is none that is whole."""
        try:
            content = read_regular(path)
        except OSError:
            return None
        half = len(content) // 2
        index = cls(array("Q"), array("Q"))
        if half % _HASH_BYTES or len(content) % 2:
            return None
        index._hashes.frombytes(content[:half])
        index._offsets.frombytes(content[half:])
        pairs = pairwise(index._hashes)
        return index if all(one < other for one, other in pairs) else None

    def write(self, path: Path) -> None:
        replace_file(path, self._hashes.tobytes() + self._offsets.tobytes(), sync="file")

    def find(self, wanted: int) -> int | None:
        place = bisect_left(self._hashes, wanted)
        is_there = place < len(self._hashes) and self._hashes[place] == wanted
        return self._offsets[place] if is_there else None


def hash_id(request_id: str) -> int:
    digest = hashlib.blake2b(request_id.encode("utf-8", "surrogatepass"), digest_size=_HASH_BYTES).digest()
    return int.from_bytes(digest, "little")


def _read_head(body: memoryview) -> tuple[AnsweredRecord, memoryview]:
    end = _LENGTH_BYTES + int.from_bytes(body[:_LENGTH_BYTES], "little")
    return _decoder.decode(body[_LENGTH_BYTES:end]), body[end:]
