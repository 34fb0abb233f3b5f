"""Files of runs: listed, and sent by their id. No request names a path."""

import os
from typing import Annotated, Literal

import msgspec
from starlette.responses import Response

from trn.core.artifacts.files import open_artifact
from trn.core.artifacts.records import BYTES, ArtifactKind, ArtifactRecord
from trn.gateway.answers import json_answer
from trn.gateway.endpoints import Call, endpoint
from trn.gateway.file_answer import FileAnswer
from trn.gateway.parts import Parts
from trn.gateway.records import RunId
from trn.proto.page_tokens import make_page_token, read_page_token
from trn.proto.records import Artifact, ArtifactPage
from trn.registry.reader import RegistryReader

FOREVER = "private, max-age=31536000, immutable"  # an id means these very bytes
# What a browser may show. Everything else is saved: a page of somebody's job must not run as ours.
SHOWN = frozenset(
    {
        "image/png",
        "image/jpeg",
        "image/gif",
        "image/webp",
        "video/mp4",
        "video/webm",
        "audio/wav",
        "audio/mpeg",
    }
)
PLAIN = frozenset({"text/plain", "text/markdown", "text/csv", "application/json"})  # shown as plain text

ArtifactId = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9]{1,64}$")]


class ArtifactsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    run_id: RunId
    kind: ArtifactKind | None = None
    state: Literal["checking", "present", "removed", "refused"] | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100
    page_token: Annotated[str, msgspec.Meta(max_length=300)] = ""


class ArtifactQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    artifact_id: ArtifactId
    download: bool = False  # save it under its name


@endpoint("GET", "/runs/{run_id}/artifacts", ArtifactPage)
async def list_artifacts(parts: Parts, call: Call[ArtifactsQuery]) -> Response:
    """Checkpoints, samples, videos and files of a run, the newest first."""
    asked = call.asked
    before = read_page_token(asked.page_token)

    def read(reader: RegistryReader) -> ArtifactPage:
        reader.get(asked.run_id)
        found = reader.artifacts(
            asked.run_id, kind=asked.kind or "", state=asked.state or "", before=before, limit=asked.limit
        )
        is_more = len(found) == asked.limit
        return ArtifactPage(
            artifacts=tuple(map(show_artifact, found)),
            next_page_token=make_page_token(found[-1].seq, found[-1].artifact_id) if is_more else "",
        )

    return json_answer(await parts.stores.read(read), call.accept_encoding)


@endpoint("GET", "/artifacts/{artifact_id}", media_type=BYTES)
async def read_artifact(parts: Parts, call: Call[ArtifactQuery]) -> Response:
    """The bytes of one file; ranges are served. What a browser could run (HTML, SVG) is only saved, never shown."""
    artifact = await parts.stores.read(lambda reader: reader.artifact(call.asked.artifact_id))
    headers = {"etag": f'"{artifact.sha256}"', "cache-control": FOREVER}
    fd = await parts.stores.run(lambda: open_artifact(parts.home, artifact))
    if call.headers.get("if-none-match") == headers["etag"]:
        os.close(fd)
        return Response(status_code=304, headers=headers)
    is_same = call.headers.get("if-range", headers["etag"]) == headers["etag"]
    is_shown = artifact.media_type in SHOWN | PLAIN and not call.asked.download
    return FileAnswer(
        fd,
        size=artifact.size_bytes,
        media_type=_media_type(artifact),
        range_header=call.headers.get("range", "") if is_same else "",
        headers=headers,
        file_name="" if is_shown else artifact.name,
    )


def show_artifact(artifact: ArtifactRecord) -> Artifact:
    found = {name: getattr(artifact, name) for name in Artifact.__struct_fields__ if name != "state"}
    return Artifact(**found, state=artifact.state.value)


def _media_type(artifact: ArtifactRecord) -> str:
    if artifact.media_type in PLAIN:
        return "text/plain; charset=utf-8"
    return artifact.media_type if artifact.media_type in SHOWN else BYTES


ENDPOINTS = [list_artifacts, read_artifact]
