"""Writes web/generated/api.ts: what the HTTP API answers, as TypeScript types, from its OpenAPI document.

`python web/generate_types.py` rewrites the file; with `--check` it only says whether it is fresh. Needs no Node.
"""

import sys
from pathlib import Path
from typing import Any

from trn.gateway.app import ENDPOINTS
from trn.gateway.openapi import build_document

FILE = Path(__file__).parent / "generated" / "api.ts"
HEAD = "/* Made by web/generate_types.py from the records of the gateway. Do not edit: a test fails when it is stale. */\n"
# A record is called in the page what it is, not where it comes from.
NAMES = {
    "Bar": "LaneBar",
    "CheckedJob": "JobCheck",
    "GatewayHealth": "Health",
    "HttpDivergence": "Divergence",
    "HttpFault": "Fault",
    "HttpRun": "Run",
    "HttpSeries": "Series",
    "LanesAnswer": "Lanes",
    "MetricsAnswer": "RunMetrics",
    "OverlayAnswer": "ManyMetrics",
    "Submitted": "SubmitResult",
    "Waiting": "Queued",
}
NUMBER = {"number", '"-inf"', '"inf"', '"nan"'}  # of a metric: docs/decisions/0005


def make_types() -> str:
    schemas: dict[str, dict[str, Any]] = build_document(ENDPOINTS)["components"]["schemas"]
    parts = [HEAD, 'export type Num = number | "-inf" | "inf" | "nan";\n']
    parts += [_declare(name, schemas[name]) for name in sorted(schemas, key=_name)]
    return "\n".join(parts)


def _name(schema: str) -> str:
    return NAMES.get(schema, schema)


def _declare(name: str, schema: dict[str, Any]) -> str:
    about = schema.get("description", "")
    comment = f"/** {about} */\n" if about else ""
    if "properties" not in schema:
        return f"{comment}export type {_name(name)} = {_type(schema)};\n"
    # An answer has every field: those with a default are written, too. A request may leave them out.
    is_request = name.endswith(("Body", "Text"))
    needed = schema.get("required", [])
    fields = [
        f"  {field}{'?' if is_request and field not in needed else ''}: {_type(kind)};"
        for field, kind in schema["properties"].items()
    ]
    return "\n".join([f"{comment}export interface {_name(name)} {{", *fields, "}\n"])


def _type(schema: dict[str, Any] | bool) -> str:
    if isinstance(schema, bool):
        return "unknown"
    if "$ref" in schema:
        return _name(schema["$ref"].rpartition("/")[2])
    if "enum" in schema:
        return " | ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in schema["enum"])
    if "anyOf" in schema:
        kinds = {kind for option in schema["anyOf"] for kind in _type(option).split(" | ")}
        if kinds >= NUMBER:
            kinds = (kinds - NUMBER) | {"Num"}
        return " | ".join(sorted(kinds, key=lambda kind: (kind == "null", kind)))
    kind = schema.get("type")
    if kind == "array" and "prefixItems" in schema:
        return f"[{', '.join(_type(item) for item in schema['prefixItems'])}]"
    if kind == "array":
        inner = _type(schema.get("items", {}))
        return f"({inner})[]" if "|" in inner else f"{inner}[]"
    if kind == "object":
        return f"Record<string, {_type(schema.get('additionalProperties', True))}>"
    simple = {
        "string": "string",
        "integer": "number",
        "number": "number",
        "boolean": "boolean",
        "null": "null",
    }
    return simple.get(str(kind), "unknown")


def main() -> int:
    text = make_types()
    if "--check" in sys.argv[1:]:
        is_fresh = FILE.exists() and FILE.read_text() == text
        if not is_fresh:
            sys.stderr.write(f"{FILE} is stale: run python web/generate_types.py\n")
        return 0 if is_fresh else 1
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
