"""Documents about the API itself."""

from typing import Any

from starlette.responses import Response

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


ENDPOINTS = [get_openapi, get_job_schema]
