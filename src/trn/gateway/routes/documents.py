"""Documents about the API itself, and about jobs."""

import asyncio
from typing import Annotated, Any

import msgspec
from starlette.responses import Response

from gen_worker.contract.documents import Format, parse_document
from gen_worker.contract.job.rules import name_runner
from gen_worker.errors import SpecError
from trn.core.errors import InvalidRequestError
from trn.gateway.answers import Encoded, json_answer
from trn.gateway.endpoints import Call, Nothing, endpoint
from trn.gateway.openapi import job_schema
from trn.gateway.parts import Parts


@endpoint("GET", "/openapi.json", dict[str, Any])
async def get_openapi(parts: Parts, call: Call[Nothing]) -> Response:
    """This API as an OpenAPI document."""
    return json_answer(parts.openapi, call.accept_encoding)


@endpoint("GET", "/schemas/job", dict[str, Any])
async def get_job_schema(parts: Parts, call: Call[Nothing]) -> Response:  # noqa: ARG001
    """JSON Schema of a job: its fields, types and defaults."""
    return json_answer(Encoded.of(job_schema()), call.accept_encoding)


class JobText(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    text: Annotated[str, msgspec.Meta(max_length=1 << 20)]
    format: Format = "yaml"


class JobTextBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    body: JobText


class JobDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A job as it was written. Its fields are not checked here: a submit with `dry_run=1` does that."""

    config: dict[str, Any]


@endpoint("POST", "/parse-job", JobDocument)
async def parse_job(parts: Parts, call: Call[JobTextBody]) -> Response:  # noqa: ARG001
    """The text of a job file as a job, by the rules of `trn run`."""
    config = await asyncio.to_thread(_read_job_text, call.asked.body)
    return json_answer(JobDocument(config=config), call.accept_encoding)


def _read_job_text(given: JobText) -> dict[str, Any]:
    try:
        document = parse_document(given.text, format_=given.format, source="the text")
    except SpecError as fault:
        raise InvalidRequestError("the text is not a job", fault.faults) from fault
    if not isinstance(document, dict):
        raise InvalidRequestError("the text is not a job", ["it holds no object with the fields of a job"])
    config = name_runner(document)
    return {name: value for name, value in config.items() if name != "profiles"}


ENDPOINTS = [get_openapi, get_job_schema, parse_job]
