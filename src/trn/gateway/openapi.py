"""The OpenAPI document, made of the endpoints and their records."""

import functools
from collections.abc import Sequence
from typing import Any

import msgspec

from trn.core.version import VERSION
from trn.gateway.answers import JSON_TYPE, ErrorAnswer
from trn.gateway.endpoints import Endpoint
from trn.gateway.gate.guard import API, LOGIN

REFS = "#/components/schemas/{name}"
# status -> when; what a route can answer besides its own
ERRORS = {
    "400": "The request is not valid; `faults` say what.",
    "401": "No valid credential.",
    "403": "Another Host or Origin than ours.",
    "404": "There is no such thing.",
    "409": "Not in a state in which that can be done.",
    "413": "Too large.",
    "415": "Another content type than JSON.",
    "422": "The job is not valid; `faults` name each field.",
    "429": "Too many at once.",
    "503": "No daemon answers, or the home cannot be read.",
}


def build_document(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """OpenAPI 3.1."""
    kinds: list[Any] = [ErrorAnswer]
    for each in endpoints:
        kinds += [field.type for field in msgspec.structs.fields(each.asked)]
        kinds += [kind for kind in (each.answer, *each.also.values()) if kind is not None]
    schemas, components = msgspec.json.schema_components(kinds, schema_hook=_hook, ref_template=REFS)
    found = iter(schemas[1:])
    paths: dict[str, dict[str, Any]] = {}
    for each in endpoints:
        fields = {field.name: next(found) for field in msgspec.structs.fields(each.asked)}
        answers = [next(found) for kind in (each.answer, *each.also.values()) if kind is not None]
        operation = _operation(each, fields, answers)
        paths.setdefault(f"{API}{each.path}", {})[each.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "trn",
            "version": VERSION,
            "description": "Runs of a home: list, follow, submit, cancel, resume. `trn ui --json` prints the bearer.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"bearer": []}],
    }


def _operation(each: Endpoint, fields: dict[str, Any], answers: list[Any]) -> dict[str, Any]:
    summary, _, rest = each.summary.partition("\n\n")
    operation: dict[str, Any] = {
        "operationId": each.name,
        "summary": " ".join(summary.split()),
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": fields[name]} for name in each.path_names
        ],
        "responses": _responses(each, answers),
    }
    if rest:
        operation["description"] = " ".join(rest.split())
    for field in each.query_fields:
        operation["parameters"].append(
            {
                "name": field.name,
                "in": "query",
                "required": field.required,
                "schema": _with_default(fields[field.name], field),
            }
        )
    body = each.body_field
    if body is not None:
        content = {JSON_TYPE: {"schema": fields[body.name]}}
        operation["requestBody"] = {"required": True, "content": content}
    elif each.method != "GET":
        content = {JSON_TYPE: {"schema": {"type": "object", "maxProperties": 0}}}
        operation["requestBody"] = {"required": True, "content": content}
    if f"{API}{each.path}" == LOGIN:
        operation["security"] = []
    return operation


def _responses(each: Endpoint, answers: list[Any]) -> dict[str, Any]:
    own: dict[str, Any] = {}
    left = iter(answers)
    for status, kind in ((each.status, each.answer), *each.also.items()):
        own[str(status)] = {"description": "Done."}
        if kind is not None:
            own[str(status)]["content"] = {JSON_TYPE: {"schema": next(left)}}
        elif status != 204:
            own[str(status)]["content"] = {each.media_type: {"schema": {"type": "string"}}}
    error = {JSON_TYPE: {"schema": {"$ref": REFS.format(name=ErrorAnswer.__name__)}}}
    return own | {
        status: {"description": words, "content": error}
        for status, words in ERRORS.items()
        if status not in own
    }


def _with_default(schema: Any, field: msgspec.structs.FieldInfo) -> Any:
    default = field.default if field.default is not msgspec.NODEFAULT else None
    if default in (None, "", ()) or "$ref" in schema:
        return schema
    return {**schema, "default": msgspec.to_builtins(default)}


def _hook(kind: type) -> dict[str, Any]:
    if kind is msgspec.Raw:
        return {"type": "object"}
    raise NotImplementedError(f"no schema for {kind}")


@functools.cache
def job_schema() -> dict[str, Any]:
    """JSON Schema of a job as it is submitted: its `run_id` may be left out."""
    from gen_worker.contract.job.spec import TrainingJobSpec

    schema = msgspec.json.schema(TrainingJobSpec)
    job = schema["$defs"][TrainingJobSpec.__name__]
    job["required"] = [name for name in job.get("required", []) if name != "run_id"]
    _describe(job, dict(schema["$defs"]), "")
    found: dict[str, Any] = _in_plain_patterns(schema)
    return found


def _describe(record: dict[str, Any], records: dict[str, Any], prefix: str) -> None:
    """Gives each field its meaning, down to fields of the records inside: `records` has those that have none yet."""
    from gen_worker.contract.job.meanings import MEANINGS, say_plainly

    for name, field in record["properties"].items():
        path = f"{prefix}{name}"
        if path in MEANINGS:
            field["description"] = say_plainly(MEANINGS[path])
        for option in field.get("anyOf", [field]):
            inner = records.pop(option.get("$ref", "").rpartition("/")[2], None)
            if inner is not None:
                _describe(inner, records, f"{path}.")


def _in_plain_patterns(schema: Any) -> Any:
    """Patterns as other languages read them: they know no `\\Z`."""
    if isinstance(schema, list):
        return [_in_plain_patterns(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: value.replace("\\Z", "$")
        if name == "pattern" and isinstance(value, str)
        else _in_plain_patterns(value)
        for name, value in schema.items()
    }
