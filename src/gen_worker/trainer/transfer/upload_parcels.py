"""What is uploaded, made ready to send: records, open files, and the parcels they become."""

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
    """Something that will not be delivered. A local file it names is still in its place, unless `reason` says so.

    `num_lost` counts metric points, or 1. `is_auth`: the credential was refused. `is_skipped`: it was never tried,
    because newer ones came first or the file was gone.
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
    """Who uploads: in every request."""

    run_id: str
    owner: str | None
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """One request or object. `body` starts anew at each call, so that a retry sends all of it."""

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
        """Equal for every retry, different for everything else."""
        step = "-" if self.step is None else self.step
        name = quote(self.file_name, safe="")
        return f"{quote(sender.run_id, safe='')}/{sender.attempt}/{self.kind}/{step}/{name}/{self.digest}"


class OpenFile:
    """A file held open from the moment it is queued, so that retention may unlink it meanwhile."""

    def __init__(self, path: Path, digest: str | None = None, name: str | None = None) -> None:
        self.path = path
        self.name = name or path.name
        self.digest = digest
        # Not blocking: a FIFO must not stop the caller, it is refused below.
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
                raise TransferFault(
                    FaultKind.PERMANENT, f"{self.path} became shorter while it was being sent"
                )
            offset += len(chunk)
            yield chunk

    def sha256(self) -> str:
        """64 hex digits; taken from the caller's digest where that is a SHA-256."""
        algorithm, _, digits = (self.digest or "").rpartition(":")
        if algorithm in ("", "sha256") and len(digits) == 64:
            return digits.lower()
        hasher = hashlib.sha256()
        for chunk in self.chunks():
            hasher.update(chunk)
        return hasher.hexdigest()


class FilesJob:
    """Files of one step that go in order; the last one commits them."""

    def __init__(self, kind: str, step: int, *, is_final: bool = False) -> None:
        self.kind = kind
        self.step = step
        self.num_points = 1
        self.is_final = is_final
        self.is_abandoned = False  # given up by the owner, perhaps while it is being sent
        self.is_reported = False  # its failure is known
        self.problem: str | None = None
        self.is_skipped = False
        self._files: list[OpenFile] = []
        self.path: str | None = None

    def add(self, path: Path, digest: str | None = None, name: str | None = None) -> None:
        """Open `path`; it is sent as `name` (else its own). A failure is kept for the thread that reports: the caller is never stopped."""
        self.path = self.path or str(path)
        try:
            self._files.append(OpenFile(path, digest, name))
        except FileNotFoundError:
            self.is_skipped = True
            self.problem = f"skipped: {path} was removed before it could be sent"
        except OSError as exc:
            self.problem = f"{path} cannot be opened: {exc.strerror or exc}"

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self._files)

    def parcels(self) -> Iterator[Parcel]:
        for file in self._files:
            name = file.name
            is_json = name.endswith(".json")
            yield Parcel(
                kind=self.kind,
                step=self.step,
                file_name=name,
                # Samples of two steps may well have one name.
                object_name=f"step-{self.step:08d}/{name}" if self.kind == SAMPLE else name,
                content_type="application/json" if is_json else "application/octet-stream",
                size_bytes=file.size_bytes,
                digest=file.sha256(),
                is_final=self.is_final,
                body=file.chunks,
            )

    def release(self) -> None:
        for file in self._files:
            file.close()


class RecordJob:
    """A JSON document: a batch of metric points, or how the attempt ended."""

    path = None
    problem = None
    is_skipped = False
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
        self.kind = kind
        self.step = step
        self.num_points = num_points
        self.is_abandoned = False  # given up by the owner, perhaps while it is being sent
        self.is_reported = False  # its failure is known
        self._record = record
        self._file_name = file_name

    def parcels(self) -> Iterator[Parcel]:
        body = json.dumps(_plain(self._record()), allow_nan=False, separators=(",", ":")).encode()
        yield Parcel(
            kind=self.kind,
            step=self.step,
            file_name=self._file_name,
            object_name=self._file_name,
            content_type="application/json",
            size_bytes=len(body),
            digest=hashlib.sha256(body).hexdigest(),
            is_final=False,
            body=lambda: iter((body,)),
        )

    def release(self) -> None:
        """Holds nothing."""


Job = FilesJob | RecordJob


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinities; they travel as the words that protobuf's JSON uses."""
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
