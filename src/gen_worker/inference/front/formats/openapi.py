"""The OpenAPI document of a front, made from the columns of the model that it serves."""

from collections.abc import Sequence
from typing import Any

from gen_worker.contract.job.model_version import VersionFacts
from gen_worker.inference.front.refusals import STATUS_BY_KIND
from gen_worker.inference.messages import ColumnType

ARROW = "application/vnd.apache.arrow.stream"


def describe_api(
    name: str,
    facts: VersionFacts,
    inputs: Sequence[ColumnType],
    outputs: Sequence[ColumnType],
    *,
    can_stream: bool,
    takes_feedback: bool,
    needs_bearer: bool,
) -> dict[str, Any]:
    row, answer = _row_schema(inputs), _row_schema(outputs)
    paths: dict[str, Any] = {
        "/v1/predict": _post(
            "predict",
            "One answer for each row, in the same order.",
            {"application/json": _rows("Row"), ARROW: {"type": "string", "format": "binary"}},
            {"application/json": _rows("Answer"), ARROW: {"type": "string", "format": "binary"}},
        ),
        f"/v2/models/{name}/infer": _post(
            "infer",
            "Open Inference Protocol, version 2.",
            {"application/json": _reference("InferRequest")},
            {"application/json": _reference("InferResponse")},
        ),
    }
    if can_stream:
        paths["/v1/stream"] = _post(
            "stream",
            "What `predict_stream` yields for one row: events, or lines of JSON where Accept says so.",
            {"application/json": _object({"row": _reference("Row")}, ["row"])},
            {"text/event-stream": {"type": "string"}, "application/x-ndjson": {"type": "string"}},
        )
    if takes_feedback:
        paths["/v1/feedback"] = _post(
            "feedback",
            "What turned out to be right, by the id of the request and the number of its row.",
            {"application/json": _object({"rows": {"type": "array", "items": {"type": "object"}}}, ["rows"])},
            {"application/json": {"type": "object"}},
        )
    for path, what in {
        "/health": "Whether requests are answered, and by which version.",
        "/v2": "Server metadata.",
        "/v2/health/live": "Whether the server runs.",
        "/v2/health/ready": "Whether requests are answered.",
        f"/v2/models/{name}": "Model metadata.",
        f"/v2/models/{name}/ready": "Whether the model answers.",
        "/metrics": "Figures for Prometheus.",
        "/openapi.json": "This document.",
    }.items():
        paths[path] = {
            "get": _operation(path.strip("/").replace("/", "_") or "root", what, {"application/json": {}})
        }
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": name, "version": facts.label},
        "paths": paths,
        "components": {
            "schemas": {
                "Row": row,
                "Answer": answer,
                "InferRequest": _object(
                    {"id": {"type": "string"}, "inputs": {"type": "array", "items": _reference("Tensor")}},
                    ["inputs"],
                ),
                "InferResponse": _object(
                    {
                        "model_name": {"type": "string"},
                        "model_version": {"type": "string"},
                        "id": {"type": "string"},
                        "outputs": {"type": "array", "items": _reference("Tensor")},
                    },
                    ["model_name", "outputs"],
                ),
                "Tensor": _object(
                    {
                        "name": {"type": "string"},
                        "shape": {"type": "array", "items": {"type": "integer"}},
                        "datatype": {"type": "string"},
                        "data": {"type": "array"},
                    },
                    ["name", "shape", "datatype", "data"],
                ),
                "Error": _error_schema(),
            }
        },
    }
    if needs_bearer:
        document["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"bearer": []}]
    return document


def _post(name: str, what: str, takes: dict[str, Any], gives: dict[str, Any]) -> dict[str, Any]:
    content = {kind: {"schema": schema} for kind, schema in takes.items()}
    body = {"required": True, "content": content}
    return {"post": {**_operation(name, what, gives), "requestBody": body}}


def _operation(name: str, what: str, gives: dict[str, Any]) -> dict[str, Any]:
    error = {"content": {"application/json": {"schema": _reference("Error")}}}
    return {
        "operationId": name,
        "summary": what,
        "responses": {
            "200": {
                "description": "the answer",
                "content": {kind: {"schema": schema} for kind, schema in gives.items()},
            },
            **{
                str(status): {"description": "an error", **error}
                for status in sorted(set(STATUS_BY_KIND.values()))
            },
        },
    }


def _rows(name: str) -> dict[str, Any]:
    items = {"type": "array", "items": _reference(name), "minItems": 1}
    return _object({"rows": items}, ["rows"])


def _row_schema(columns: Sequence[ColumnType]) -> dict[str, Any]:
    """Of a model without known columns: any object."""
    if not columns:
        return {"type": "object"}
    return {
        **_object(
            {column.name: _value_schema(column) for column in columns},
            [column.name for column in columns if not column.is_nullable],
        ),
        "additionalProperties": False,
    }


def _value_schema(column: ColumnType) -> dict[str, Any]:
    dtype = column.dtype
    if dtype == "bool":
        schema: dict[str, Any] = {"type": "boolean"}
    elif dtype == "string":
        schema = {"type": "string"}
    elif dtype == "binary":
        schema = {"type": "string", "contentEncoding": "base64"}
    elif dtype.startswith(("int", "uint")):
        schema = {"type": "integer", "format": dtype}
    elif dtype.startswith("float"):
        schema = {"type": "number", "format": dtype}
    else:
        schema = {}
    for size in reversed(column.dims):
        schema = {"type": "array", "items": schema}
        if size is not None:
            schema |= {"minItems": size, "maxItems": size}
    return {"anyOf": [schema, {"type": "null"}]} if column.is_nullable else schema


def _error_schema() -> dict[str, Any]:
    fault = _object(
        {
            "row": {"type": "integer"},
            "column": {"type": "string"},
            "found": {"type": "string"},
            "expected": {"type": "string"},
        },
        [],
    )
    error = _object(
        {
            "kind": {"type": "string", "enum": sorted(STATUS_BY_KIND)},
            "id": {"type": "string"},
            "message": {"type": "string"},
            "faults": {"type": "array", "items": fault},
        },
        ["kind", "id", "message"],
    )
    return _object({"error": error}, ["error"])


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


def _reference(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}
