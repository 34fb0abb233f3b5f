"""ListArtifacts and ReadArtifact. A file is opened by its artifact's id, never by a path that a caller gives."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence

import msgspec

from trn.core.artifacts.files import changed_error, open_artifact, stamp_of
from trn.core.artifacts.records import KINDS, ArtifactRecord
from trn.core.errors import InvalidRequestError
from trn.core.home import Home
from trn.proto.page_tokens import make_page_token, read_page_token
from trn.proto.records import ArtifactChunk
from trn.registry.base import ReadableRegistry

DEFAULT_PAGE, MAX_PAGE = 100, 1000
CHUNK_BYTES = 1 << 20


class ArtifactList(msgspec.Struct, frozen=True, kw_only=True):
    artifacts: Sequence[ArtifactRecord] = ()
    next_page_token: str = ""


class ArtifactCalls:
    """From the loop's thread."""

    def __init__(self, *, registry: ReadableRegistry, home: Home) -> None:
        self._registry = registry
        self._home = home

    async def list_artifacts(
        self,
        run_id: str,
        *,
        kind: str = "",
        page_size: int = 0,
        page_token: str = "",
        is_exact: bool = False,
    ) -> ArtifactList:
        self._home.run(run_id)  # what could be no id is refused
        if kind and kind not in KINDS:
            raise InvalidRequestError(f"kind is {kind[:60]!r}, expected one of {', '.join(KINDS)}")
        before = read_page_token(page_token)
        run = self._registry.find(run_id, is_exact=is_exact)
        size = min(page_size or DEFAULT_PAGE, MAX_PAGE)
        found = self._registry.artifacts(run.run_id, kind=kind, before=before, limit=size)
        is_more = len(found) == size
        token = make_page_token(found[-1].seq, found[-1].artifact_id) if is_more else ""
        return ArtifactList(artifacts=found, next_page_token=token)

    async def read_artifact(
        self,
        artifact_id: str,
        *,
        offset: int = 0,
        length: int = 0,
        watcher: str = "",  # noqa: ARG002  (every stream is given it)
    ) -> AsyncIterator[ArtifactChunk]:
        """ConflictError where the file is not the recorded one, also if it changes while it is read."""
        artifact = self._registry.artifact(artifact_id)
        if offset > artifact.size_bytes:
            raise InvalidRequestError(
                f"offset is {offset}, and artifact {artifact_id} has {artifact.size_bytes} bytes"
            )
        end = min(offset + length, artifact.size_bytes) if length else artifact.size_bytes
        with os.fdopen(
            await asyncio.to_thread(open_artifact, self._home, artifact), "rb", buffering=0
        ) as file:
            fd = file.fileno()
            stamp = stamp_of(os.fstat(fd))
            while offset < end:
                num_bytes = min(CHUNK_BYTES, end - offset)
                data = await asyncio.to_thread(_read, fd, offset, num_bytes, stamp, artifact)
                yield ArtifactChunk(offset=offset, data=data)
                offset += len(data)
        yield ArtifactChunk(offset=offset, data=b"", is_end=True)


def _read(fd: int, offset: int, num_bytes: int, stamp: str, artifact: ArtifactRecord) -> bytes:
    data = os.pread(fd, num_bytes, offset)
    if not data or stamp_of(os.fstat(fd)) != stamp:
        raise changed_error(artifact)
    return data
