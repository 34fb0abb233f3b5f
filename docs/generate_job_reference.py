"""Writes docs/job-reference.md from the code: names, types, defaults and meanings.

`python docs/generate_job_reference.py` rewrites the page; with `--check` it only says whether the page is fresh.
A field without a meaning, or a meaning without a field, is an error.
"""

import json
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from gen_worker.contract.job.meanings import MEANINGS
from gen_worker.contract.job.spec import TrainingJobSpec

PAGE = Path(__file__).with_name("job-reference.md")

HEAD = """# The job, field by field

<!-- Made by docs/generate_job_reference.py; the meanings are in src/gen_worker/contract/job/meanings.py. A test fails when this
page is stale. -->

A job is a JSON, YAML or TOML file (`.yaml`, `.yml` and `.toml` by their suffix, anything else is read as JSON).
A job that is not valid is refused before anything is spent, with every fault at once: the path in the document,
the value found, what was expected, and the nearest valid name for a misspelt field.

- Paths are relative to the folder of the job file, or to `TRAINER_BASE_DIR`, which the daemon sets to the folder that
  the run was submitted from.
- A cadence of 0 is off. Steps are optimizer steps.
- `max_steps` or `epochs` (or both: whichever ends first) is needed, unless `mock_batches` is given.
- Exactly one source of data is needed: `dataset.parquet_paths`, `dataset.source`, `inputs.dataset_parquet_refs`,
  `dataset.generated` or `mock_batches`.
- `validate_every` needs `validation.dataset`; `early_stopping` needs `validate_every`, or a metric that starts with `train/`.
- A job of `mode: inference` needs none of these. It has exactly one of `serving` and `prediction`, and in it a `checkpoint`.
  Fields about training are refused.

The last column says who reads a field: the **worker**, the **daemon** (ignored by a worker without a daemon), or
**later** (valid and kept, but nothing reads it yet).
"""

LATER = {"profiles", "release_ref"}
OF_DAEMON = {
    "resources.cpus",
    "resources.gpus",
    "resources.pool",
    "resources.memory_mb",
    "retry",
    "tags",
    "group",
}


def fields_of(record: type[msgspec.Struct], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(path, type, default) of every field, depth first. A default that is not JSON is shown as `{}`."""
    hints = typing.get_type_hints(record, include_extras=True)
    for field in msgspec.structs.fields(record):
        path = prefix + field.name
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        yield path, hints[field.name], default
        inner = next((item for item in _union(hints[field.name]) if _is_record(item)), None)
        is_repeated = path in ("validation.dataset", "test.dataset", "prediction.version")
        if inner is not None and not is_repeated:
            yield from fields_of(inner, f"{path}.")


def type_in_words(hint: Any) -> str:
    """A type as an author would say it."""
    words = []
    for item in _union(hint):
        origin, arguments = typing.get_origin(item), typing.get_args(item)
        if item is type(None):
            words.append("null")
        elif origin is typing.Annotated:
            words.append(_bounded(arguments[0], arguments[1:]))
        elif origin is typing.Literal:
            words += [f"`{json.dumps(value)}`" for value in arguments]
        elif origin is list:
            words.append("list" if arguments[0] is Any else f"list of {type_in_words(arguments[0])}")
        elif origin is dict or _is_record(item):
            words.append("object")
        else:
            words.append(_PLAIN[item])
    return " or ".join(dict.fromkeys(words))


_PLAIN = {int: "int", float: "number", str: "text", bool: "bool", Any: "any", list: "list", dict: "object"}


def _bounded(hint: Any, annotations: tuple[Any, ...]) -> str:
    word = _PLAIN[hint]
    for meta in annotations:
        if meta.ge is not None:
            word += f" ≥ {meta.ge}"
        if meta.gt is not None:
            word += f" > {meta.gt}"
    return word


def _union(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def _is_record(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, msgspec.Struct)


def _reader(path: str) -> str:
    for reader, names in (("later", LATER), ("daemon", OF_DAEMON)):
        if any(path == name or path.startswith(f"{name}.") for name in names):
            return reader
    return "worker"


def build_page() -> str:
    fields = list(fields_of(TrainingJobSpec))
    paths = {path for path, _, _ in fields}
    if paths != MEANINGS.keys():
        raise SystemExit(
            f"meanings missing for {sorted(paths - MEANINGS.keys())}, meanings of no field {sorted(MEANINGS.keys() - paths)}"
        )
    lines = ["", "| field | type | default | meaning | read by |", "|---|---|---|---|---|"]
    for path, hint, default in fields:
        if default is msgspec.NODEFAULT:
            shown = "required"
        elif isinstance(default, msgspec.Struct):
            shown = ""
        else:
            shown = f"`{json.dumps(default)}`"
        words = type_in_words(hint).replace("|", "\\|")
        lines.append(f"| `{path}` | {words} | {shown} | {MEANINGS[path]} | {_reader(path)} |")
    return HEAD + "\n".join(lines) + "\n"


def main() -> int:
    page = build_page()
    if "--check" in sys.argv[1:]:
        return 0 if PAGE.exists() and PAGE.read_text() == page else 1
    PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
