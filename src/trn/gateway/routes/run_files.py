"""What a run was made of, and what happened to it: markers, code, documents."""

from typing import Annotated, Any

import msgspec
from starlette.responses import Response

from trn.core.errors import NotFoundError
from trn.gateway.answers import JSON_TYPE, Encoded, json_answer
from trn.gateway.endpoints import Call, endpoint
from trn.gateway.parts import Parts
from trn.gateway.reading.markers import Marker, read_markers
from trn.gateway.reading.run_files import (
    CodeDifference,
    CodeFiles,
    DocumentName,
    diff_code,
    list_documents,
    read_code,
    read_code_file,
    read_document,
)
from trn.gateway.records import RunId
from trn.gateway.routes.runs import RunPath
from trn.registry.metrics import MetricReader
from trn.registry.reader import RegistryReader

PLAIN_TEXT = "text/plain"
Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]


class CodeFileQuery(RunPath, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sha256: Sha256


class CodeDiffQuery(RunPath, frozen=True, kw_only=True, forbid_unknown_fields=True):
    against: RunId | None = None  # default: the run that it continues


class DocumentQuery(RunPath, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: DocumentName


class MarkersAnswer(msgspec.Struct, frozen=True, kw_only=True):
    markers: list[Marker]


class DocumentsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    documents: list[DocumentName]


@endpoint("GET", "/runs/{run_id}/markers", MarkersAnswer)
async def list_markers(parts: Parts, call: Call[RunPath]) -> Response:
    """Attempts, kills, resumes, checkpoints, validations and the best step, for the axis of a chart."""

    def read(registry: RegistryReader, metrics: MetricReader | None) -> Encoded:
        run = registry.get(call.asked.run_id)
        return Encoded.of(MarkersAnswer(markers=read_markers(run, registry, metrics)))

    return json_answer(await parts.stores.read_both(read), call.accept_encoding)


@endpoint("GET", "/runs/{run_id}/code", CodeFiles)
async def list_code(parts: Parts, call: Call[RunPath]) -> Response:
    """The files of the run's code snapshot."""

    def read(reader: RegistryReader) -> Encoded:
        return Encoded.of(read_code(parts.home, reader.get(call.asked.run_id)))

    return json_answer(await parts.stores.read(read), call.accept_encoding)


@endpoint("GET", "/runs/{run_id}/code/files/{sha256}", media_type=PLAIN_TEXT)
async def get_code_file(parts: Parts, call: Call[CodeFileQuery]) -> Response:
    """A file of the run's code snapshot by its hash, at most 2 MiB of it."""

    def read(reader: RegistryReader) -> bytes:
        return read_code_file(parts.home, reader.get(call.asked.run_id), call.asked.sha256)

    return Response(await parts.stores.read(read), media_type=PLAIN_TEXT)


@endpoint("GET", "/runs/{run_id}/code/diff", CodeDifference)
async def diff_run_code(parts: Parts, call: Call[CodeDiffQuery]) -> Response:
    """What changed in the code since another run: a unified diff for each file."""

    def read(reader: RegistryReader) -> Encoded:
        run = reader.get(call.asked.run_id)
        against = call.asked.against or run.parent_run_id
        if not against:
            raise NotFoundError(f"run {run.run_id} continues no other run: say which one with `against`")
        return Encoded.of(diff_code(parts.home, run, reader.get(against)))

    return json_answer(await parts.stores.read(read), call.accept_encoding)


@endpoint("GET", "/runs/{run_id}/documents", DocumentsAnswer)
async def list_run_documents(parts: Parts, call: Call[RunPath]) -> Response:
    """Which documents there are about the run."""

    def read(reader: RegistryReader) -> DocumentsAnswer:
        run = reader.get(call.asked.run_id)
        trainer = reader.trainers([run.run_id])[run.run_id]
        return DocumentsAnswer(documents=list_documents(parts.home, run, trainer))

    return json_answer(await parts.stores.read(read), call.accept_encoding)


@endpoint("GET", "/runs/{run_id}/documents/{name}", dict[str, Any])
async def get_document(parts: Parts, call: Call[DocumentQuery]) -> Response:
    """A document about the run: its job, environment report, doctor's report, dataset manifest or certificate."""

    def read(reader: RegistryReader) -> bytes:
        run = reader.get(call.asked.run_id)
        trainer = reader.trainers([run.run_id])[run.run_id]
        return read_document(parts.home, run, trainer, call.asked.name)

    return Response(await parts.stores.read(read), media_type=JSON_TYPE)


ENDPOINTS = [list_markers, list_code, get_code_file, diff_run_code, list_run_documents, get_document]
