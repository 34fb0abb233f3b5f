"""What is uploaded: records and open files, and the requests (parcels) for them."""

import hashlib
import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gen_worker.trainer.transfer.policy import CHUNK_BYTES, FaultKind, TransferFault

METRICS, CHECKPOINT, SAMPLE, TERMINAL = KINDS = ("metrics", "checkpoint", "sample", "terminal")


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadFailure:
    """An upload that failed. The local file is kept, unless `reason` says otherwise.

    `num_lost` counts metric points, or is 1. `is_auth`: the credential was rejected. `is_skipped`: it was never tried,
    because newer uploads took its place or the file was removed.
    """

    kind: str
    path: str | None
    step: int | None
    reason: str
    num_lost: int = 1
    is_auth: bool = False
    is_skipped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """The run of an upload, named in every request."""

    run_id: str
    owner: str | None
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """One request or object. `body` starts from the beginning at each call, for retries."""

    kind: str
    step: int | None
    file_name: str
    object_name: str
    content_type: str
    size_bytes: int
    digest: str
    is_final: bool
    body: Callable[[], Iterator[bytes]]

    def idempotency_key(self, sender: Sender) -> str:
        """Equal for every retry, different for any other parcel."""
        step = "-" if self.step is None else self.step
        name = quote(self.file_name, safe="")
        return f"{quote(sender.run_id, safe='')}/{sender.attempt}/{self.kind}/{step}/{name}/{self.digest}"


class OpenFile:
    """A file that is opened when it is queued, so that retention may delete it meanwhile."""

    def __init__(self, path: Path, digest: str | None = None, name: str | None = None) -> None:
        self.path = path
        self.name = name or path.name
        self.digest = digest
        # Non-blocking: a FIFO must not block the caller; it is rejected below.
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        status = os.fstat(self._descriptor)
        self.size_bytes = status.st_size
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise OSError(f"{path} is not a file")

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def chunks(self) -> Iterator[bytes]:
        offset = 0
        while offset < self.size_bytes:
            try:
                chunk = os.pread(self._descriptor, CHUNK_BYTES, offset)
            except OSError as exc:
                raise TransferFault(
                    FaultKind.PERMANENT, f"{self.path} cannot be read: {exc.strerror}"
                ) from None
            if not chunk:
                raise TransferFault(FaultKind.PERMANENT, f"{self.path} became shorter during the upload")
            offset += len(chunk)
            yield chunk

    def sha256(self) -> str:
        """64 hex digits; the caller's digest if that is a SHA-256."""
        algorithm, _, digits = (self.digest or "").rpartition(":")
        if algorithm in ("", "sha256") and len(digits) == 64:
            return digits.lower()
        hasher = hashlib.sha256()
        for chunk in self.chunks():
            hasher.update(chunk)
        return hasher.hexdigest()


class _Upload:
    """An entry of an upload queue."""

    path: str | None = None
    problem: str | None = None  # why it cannot be sent
    is_skipped = False
    is_abandoned = False  # dropped by the owner, perhaps while it is sent
    is_reported = False  # its failure was reported

    def __init__(self, kind: str, step: int | None, *, num_points: int = 1) -> None:
        self.kind = kind
        self.step = step
        self.num_points = num_points

    def parcel(
        self,
        name: str,
        *,
        object_name: str,
        size_bytes: int,
        digest: str,
        body: Callable[[], Iterator[bytes]],
        is_final: bool = False,
    ) -> Parcel:
        return Parcel(
            kind=self.kind,
            step=self.step,
            file_name=name,
            object_name=object_name,
            content_type="application/json" if name.endswith(".json") else "application/octet-stream",
            size_bytes=size_bytes,
            digest=digest,
            is_final=is_final,
            body=body,
        )


class FilesUpload(_Upload):
    """Files of one step, sent in order; the last one commits them."""

    def __init__(self, kind: str, step: int, *, is_final: bool = False) -> None:
        super().__init__(kind, step)
        self.is_final = is_final
        self._files: list[OpenFile] = []

    def add(self, path: Path, digest: str | None = None, name: str | None = None) -> None:
        """Open `path`; `name` defaults to its own. An error is kept in `problem` and reported by the upload thread."""
        self.path = self.path or str(path)
        try:
            self._files.append(OpenFile(path, digest, name))
        except FileNotFoundError:
            self.is_skipped = True
            self.problem = f"skipped: {path} was removed before the upload"
        except OSError as exc:
            self.problem = f"{path} cannot be opened: {exc.strerror or exc}"

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self._files)

    def parcels(self) -> Iterator[Parcel]:
        for file in self._files:
            # Samples of two steps may have the same name.
            object_name = f"step-{self.step:08d}/{file.name}" if self.kind == SAMPLE else file.name
            yield self.parcel(
                file.name,
                object_name=object_name,
                size_bytes=file.size_bytes,
                digest=file.sha256(),
                body=file.chunks,
                is_final=self.is_final,
            )

    def release(self) -> None:
        for file in self._files:
            file.close()


class RecordUpload(_Upload):
    """A JSON document: a batch of metric points, or the status of the attempt."""

    size_bytes = 0

    def __init__(
        self,
        kind: str,
        step: int | None,
        record: Callable[[], Mapping[str, Any]],
        *,
        file_name: str,
        num_points: int,
    ) -> None:
        super().__init__(kind, step, num_points=num_points)
        self._record = record
        self._file_name = file_name

    def parcels(self) -> Iterator[Parcel]:
        body = json.dumps(_plain(self._record()), allow_nan=False, separators=(",", ":")).encode()
        name, digest = self._file_name, hashlib.sha256(body).hexdigest()
        yield self.parcel(
            name, object_name=name, size_bytes=len(body), digest=digest, body=lambda: iter((body,))
        )

    def release(self) -> None:
        """Nothing is open."""


Upload = FilesUpload | RecordUpload


def _plain(value: Any) -> Any:
    """NaN and infinity as text, as in protobuf's JSON."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    number = float(value)
    if math.isnan(number):
        return "NaN"
    return number if math.isfinite(number) else ("Infinity" if number > 0 else "-Infinity")
