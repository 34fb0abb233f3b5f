"""Writes docs/http-api.md from the routes of the gateway: paths, parameters, types, defaults and meanings are the code's.

`python docs/generate_http_reference.py` rewrites the page; with `--check` it only says whether the page is fresh. The
meaning of a parameter is the comment beside its field.
"""

import ast
import enum
import inspect
import json
import re
import sys
import textwrap
import typing
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from trn.core.causes import Cause
from trn.gateway.answers import ErrorBody, HttpFault
from trn.gateway.app import ENDPOINTS
from trn.gateway.endpoints import Endpoint
from trn.gateway.gate.guard import API
from trn.gateway.openapi import ERRORS

BAR = "\\|"
PAGE = Path(__file__).with_name("http-api.md")

HEAD = """# HTTP API

<!-- Made by docs/generate_http_reference.py; routes and parameters are the code's. A test fails when this page is stale. -->

Other programs can list, follow, submit, cancel and resume runs over HTTP. A monitor can trigger a training and watch it. The
[gateway](cli-registry.md#trn-ui) serves this API and the page. Reads also work while no daemon runs; commands need one.

- `trn ui --json` starts the gateway and prints its address and the bearer. `trn daemon start --http HOST:PORT` keeps it up.
- Every request needs `Authorization: Bearer …`. See [the security model](security.md).
- Requests and answers are JSON. Each request but GET and HEAD needs `Content-Type: application/json`, also `DELETE`, which has no body.
- `GET /api/v1/openapi.json` describes all of it for code generators.
- An unknown parameter or field is an error, and so is a wrong value. `faults` name each of them.
- Run ids are exact: `mnist` is the first run of its family, not the newest.
- Times are milliseconds since 1970. Numbers that JSON does not have are the words `"nan"`, `"inf"` and `"-inf"`.
- Answers are compressed with gzip if the client accepts it. `GET /runs` has an ETag.

## Submit, follow and cancel a run with curl

```python file=slow_trainer.py
import time

from gen_worker.trainer import StepResult


class SlowTrainer:
    def setup(self, ctx): ...

    def configure(self, ctx):
        return {"sum": 0}

    def prepare_batch(self, raw_batch, state, ctx):
        return raw_batch

    def train_step(self, prepared_batch, state, ctx):
        time.sleep(0.05)
        state["sum"] += prepared_batch
        return StepResult(metrics={"loss": 1 / state["sum"]})

    def state_dict(self, state):
        return state

    def load_state_dict(self, state, payload, ctx):
        state.update(payload)
```

The bearer goes into a file of yours: command lines can be read by others.

```sh
umask 077
trn ui --json > access.json
python -c "import json; print('Authorization: Bearer', json.load(open('access.json'))['bearer'])" > bearer.txt
python -c "import json; print(json.load(open('access.json'))['address'] + '/api/v1')" > address.txt
python - <<'END'
import json, os

config = {"run_id": "watched", "trainer": "slow_trainer:SlowTrainer", "metric_every": 1, "mock_batches": list(range(1, 2001))}
json.dump({"config": config, "base_dir": os.getcwd()}, open("submit.json", "w"))
END
```

```console
$ curl -s -H @bearer.txt -H "Content-Type: application/json" -d @submit.json "$(cat address.txt)/runs?dry_run=1"
{"faults":[],…}
$ curl -s -H @bearer.txt -H "Content-Type: application/json" -d @submit.json "$(cat address.txt)/runs"
{"run":{…"run_id":"watched",…},"existed":false,…}
$ grep -m 1 -o '"event":"metrics*"' < <(curl -sN -H @bearer.txt "$(cat address.txt)/stream?events=watched:0")
"event":"metric"
$ curl -s -H @bearer.txt -H "Content-Type: application/json" -d '{"reason": "seen enough"}' "$(cat address.txt)/runs/watched/cancel"
{…"is_cancel_wanted":true,…}
$ grep -m 1 -o 'event: end' < <(curl -sN -H @bearer.txt "$(cat address.txt)/stream?events=watched:0")
event: end
$ curl -s -H @bearer.txt "$(cat address.txt)/runs/watched" | grep -o '"state":"CANCELLED"'
"state":"CANCELLED"
$ trn daemon stop
{"event": "daemon_stopped", …}
```

A submit is safe to repeat: an equal run that is alive or complete is returned, with `"existed": true` and status 200.

## The stream

`GET /api/v1/stream` is one connection of [server-sent events](https://html.spec.whatwg.org/multipage/server-sent-events.html)
for everything that a client follows.

| event | data |
|---|---|
| `run` | a run that changed; with `watch=runs` |
| `removed` | `{"run_id"}`: it was removed |
| `events` | `{"run_id", "events": […]}`: events of a run, in order, each once |
| `log` | `{"run_id", "offset", "next_offset", "text"}`: new output of its worker |
| `end` | `{"run_id"}`: the run has ended, and all its events were sent |
| `health` | as of `GET /health`: at the start, and when it changes |
| `reset` | `{"reason"}`: the client was too slow, or away for too long. Fetch again what you show; the stream continues from now |
| `fault` | `{"message"}`: something that was followed is gone |

- The `id` of a message is the whole position. A client that sends it as `Last-Event-ID` gets what it missed. Browsers do so by
  themselves.
- `events=RUN:SEQ` begins after that event, `log=RUN:OFFSET` at that byte, `after_change=N` after that change of any run. Without
  a number the stream begins now. `GET /runs` answers with `change`, so nothing is missed between the two.
- A daemon that is restarted does not end the stream. A comment every 15 s keeps the connection open.
- At most 64 streams per login and 512 in all.

## Errors

Every answer from status 400 on is `{"error": {…}}`.
"""


OTHERS = (
    "Besides these: 304 where the ETag that a client sent is still right, 206 and 416 for ranges of files, 405 for a method that a",
    "path does not have, 408 for a body that does not come, 500 with a number that is in `gateway.log`. `HEAD` is allowed where `GET`",
    "is, except for the stream.",
)
LINKED: set[Any] = set()


def build_page() -> str:
    shown = [kind for each in ENDPOINTS for kind in (each.answer, *each.also.values())]
    LINKED.update(record for record in find_records(shown) if record not in shown)
    parts = [HEAD, _table(ErrorBody), "", "Each of `faults`:", "", _table(HttpFault), ""]
    parts += [
        "| status | when |",
        "|---|---|",
        *(f"| {status} | {words} |" for status, words in ERRORS.items()),
        "",
        *OTHERS,
        "",
    ]
    parts += ["## Routes", "", f"All paths begin with `{API}`.", ""]
    parts += ["| route | |", "|---|---|"]
    for each in ENDPOINTS:
        summary = " ".join(each.summary.partition("\n\n")[0].split())
        parts.append(f"| [`{each.method} {each.path}`](#{_anchor(each)}) | {summary} |")
    answers = [kind for each in ENDPOINTS for kind in (each.answer, *each.also.values())]
    for each in ENDPOINTS:
        parts += ["", *_describe(each)]
    parts += ["", "## Records", "", "What the answers above are made of."]
    for record in sorted(find_records(answers), key=lambda record: record.__name__):
        if record not in answers:
            parts += [
                "",
                f"### {record.__name__}",
                "",
                *([*_doc(record), ""] if _doc(record) else []),
                _table(record),
            ]
    return "\n".join(parts) + "\n"


def _anchor(each: Endpoint) -> str:
    return re.sub(r"[^\w -]", "", f"{each.method} {each.path}".lower()).replace(" ", "-")


def _describe(each: Endpoint) -> Iterator[str]:
    yield f"### {each.method} {each.path}"
    yield ""
    yield from textwrap.wrap(" ".join(each.summary.split()), 120)
    if each.query_fields:
        yield ""
        names = [field.name for field in each.query_fields]
        yield _table(each.asked, names, what="parameter", has_defaults=True)
    body = each.body_field
    if body is not None:
        yield ""
        yield "Body:"
        yield ""
        yield _table(body.type, has_defaults=True)
    yield ""
    yield f"Answer, status {each.status}: {_answer_words(each.answer, each.media_type, each.status)}"
    for status, kind in each.also.items():
        yield f"Or, status {status}: {_answer_words(kind, each.media_type, status)}"
    for kind in (each.answer, *each.also.values()):
        if _is_record(kind):
            yield ""
            yield _table(kind)


def _doc(record: Any) -> list[str]:
    return textwrap.wrap(" ".join((vars(record).get("__doc__") or "").split()), 120)


def _answer_words(kind: Any, media_type: str, status: int) -> str:
    if status == 204:
        return "nothing."
    if kind is None:
        return f"`{media_type}`."
    if not _is_record(kind):
        return "a JSON object."
    return " ".join(_doc(kind)) or "a JSON object."


def _table(
    record: Any, names: list[str] | None = None, *, what: str = "field", has_defaults: bool = False
) -> str:
    meanings = meanings_of(record)
    head = [what, "type", *(["default"] if has_defaults else []), "meaning"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for field in msgspec.structs.fields(record):
        if names is not None and field.name not in names:
            continue
        cells = [f"`{field.name}`", say_type(field.type)]
        cells += [_default(field)] if has_defaults else []
        cells.append(meanings.get(field.name, ""))
        lines.append(f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |")
    return "\n".join(lines)


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    default = field.default
    if default is msgspec.NODEFAULT:
        default = field.default_factory()  # type: ignore[operator]
    return f"`{json.dumps(msgspec.to_builtins(default))}`"


def find_records(kinds: Iterable[Any]) -> Iterator[Any]:
    """Those that are fields of others, each once."""
    seen: set[Any] = set()
    todo = list(kinds)
    while todo:
        kind = todo.pop(0)
        todo += [part for part in typing.get_args(kind) if part is not Ellipsis and not isinstance(part, str)]
        if not isinstance(kind, type) or kind in seen:
            continue
        seen.add(kind)
        if _is_record(kind):
            todo += [field.type for field in msgspec.structs.fields(kind)]
            yield kind


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def say_type(kind: Any) -> str:
    """In a reader's words."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return say_type(arguments[0])
    if origin is typing.Literal:
        return " or ".join(f"`{json.dumps(value)}`" for value in arguments)
    if origin in (list, tuple):
        return f"list of {say_type(arguments[0])}"
    if origin is dict:
        return f"object of {say_type(arguments[1])}"
    if arguments:  # a union
        return " or ".join(dict.fromkeys(say_type(part) for part in arguments))
    words = {
        str: "text",
        int: "integer",
        float: "number",
        bool: "boolean",
        type(None): "null",
        Any: "anything",
    }
    if kind in words:
        return words[kind]
    if kind is msgspec.Raw:
        return "object"
    if issubclass(kind, enum.Enum):
        return " or ".join(f"`{word.value}`" for word in kind)
    if kind is Cause:
        return "[`Cause`](api.md#cause)"
    if _is_record(kind) and kind in LINKED:
        return f"[`{kind.__name__}`](#{kind.__name__.lower()})"
    return f"`{kind.__name__}`"


@cache
def meanings_of(record: Any) -> dict[str, str]:
    """field -> the comment beside it, also of its bases."""
    found: dict[str, str] = {}
    for each in reversed(record.__mro__):
        if not _is_record(each) or each is msgspec.Struct:
            continue
        source = textwrap.dedent(inspect.getsource(each))
        lines = source.splitlines()
        for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                rest = "\n".join(lines[node.lineno - 1 : node.end_lineno])
                comment = re.search(r"  # (?!type:|noqa)(.*)$", rest, re.MULTILINE)
                if comment:
                    found[node.target.id] = comment[1].partition("  # type:")[0].strip()
    return found


def main() -> int:
    page = build_page()
    if "--check" in sys.argv[1:]:
        return 0 if PAGE.exists() and PAGE.read_text() == page else 1
    PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
