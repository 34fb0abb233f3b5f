"""Artifacts: checkpoints, samples, videos and other files that an event of a run named."""

import hashlib
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Literal

import msgspec

from trn.core.cause_words import say_what
from trn.core.causes import NO_CAUSE, Cause

ArtifactKind = Literal["checkpoint", "sample", "video", "file"]
KINDS: tuple[ArtifactKind, ...] = ("checkpoint", "sample", "video", "file")

# Of what a page or a player can show. Everything else is bytes.
MEDIA_TYPES = {
    ".mp4": "video/mp4",
    ".webm": "video/webm",
    ".mkv": "video/x-matroska",
    ".avi": "video/x-msvideo",
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".gif": "image/gif",
    ".webp": "image/webp",
    ".svg": "image/svg+xml",
    ".wav": "audio/wav",
    ".mp3": "audio/mpeg",
    ".txt": "text/plain",
    ".log": "text/plain",
    ".md": "text/markdown",
    ".csv": "text/csv",
    ".html": "text/html",
    ".json": "application/json",
}
BYTES = "application/octet-stream"


class ArtifactState(StrEnum):
    CHECKING = "checking"  # an event named it; its file was not looked at yet
    PRESENT = "present"
    REMOVED = "removed"  # by retention, by `trn prune`, or because a later file took its place
    REFUSED = "refused"  # `cause` says why


class NamedFile(msgspec.Struct, frozen=True, kw_only=True):
    """What an event says of a file, before anyone has looked at it."""

    artifact_id: str
    seq: int
    attempt: int
    step: int
    kind: ArtifactKind
    path: str
    created_ms: int
    size_bytes: int | None = None
    poster_id: str = ""


class ArtifactRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`path` is relative to the run's folder once the file was checked; no client is shown it."""

    artifact_id: str
    run_id: str
    seq: int
    attempt: int
    step: int
    kind: ArtifactKind
    name: str
    path: str
    media_type: str = BYTES
    size_bytes: int = 0  # while it is checked: what the event says
    sha256: str = ""
    stamp: str = ""  # of the file that was hashed
    created_ms: int = 0
    poster_id: str = ""  # of a video: the picture to show before it plays
    state: ArtifactState = ArtifactState.CHECKING
    cause: Cause = NO_CAUSE  # why it was refused

    @property
    def is_present(self) -> bool:
        return self.state is ArtifactState.PRESENT

    @property
    def reason(self) -> str:
        """Why it was refused, in words."""
        return say_what(self.cause) if self.cause.id else ""


class CheckedFile(msgspec.Struct, frozen=True, kw_only=True):
    """What was found out about a named file."""

    artifact_id: str
    state: ArtifactState
    path: str
    size_bytes: int = 0
    sha256: str = ""
    stamp: str = ""
    cause: Cause = NO_CAUSE


def make_artifact_id(*, run_id: str, nonce: str, attempt: int, seq: int, path: str) -> str:
    """The same for the same event, whenever it is read; another for a later run of the same id."""
    text = "\0".join((run_id, nonce, str(attempt), str(seq), path))
    return "a" + hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:23]


def name_of(path: str) -> str:
    return PurePosixPath(path).name or "file"


def media_type_of(path: str) -> str:
    return MEDIA_TYPES.get(PurePosixPath(path).suffix.lower(), BYTES)
