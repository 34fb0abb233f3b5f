"""One definition per route: method, path, what it takes and what it answers. Routing, checks and OpenAPI come from it.

What a route takes is one record. A field named in the path comes from there, `body` is the request's JSON, every other
field is a parameter of the query. Whatever is not in the record is refused.
"""

import inspect
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Generic, NamedTuple, TypeVar, get_args, get_origin, get_type_hints
from urllib.parse import parse_qsl

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from gen_worker.contract.document_schema import convert_document
from gen_worker.contract.documents import parse_document
from gen_worker.errors import Fault, SpecError
from trn.core.errors import InvalidRequestError
from trn.gateway.answers import error_answer, refusal
from trn.gateway.gate.guard import API
from trn.gateway.parts import Parts

logger = logging.getLogger("trn.gateway")

MAX_QUERY_FIELDS = 400
MAX_QUERY_BYTES = 16 << 10
BODY = "body"

T = TypeVar("T", bound=msgspec.Struct)


class Nothing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Takes no parameters."""


class Call(NamedTuple, Generic[T]):
    """One request, checked."""

    asked: T
    headers: Mapping[str, str]
    holder: str  # of the credential

    @property
    def accept_encoding(self) -> str:
        return self.headers.get("accept-encoding", "")


Handle = Callable[[Parts, Call[Any]], Awaitable[Response]]


class Endpoint(NamedTuple):
    """`answer` is the record of a JSON answer, None where the answer is of `media_type` instead."""

    method: str
    path: str
    handle: Handle
    asked: type[msgspec.Struct]
    answer: Any
    media_type: str
    status: int
    is_stream: bool
    also: Mapping[int, Any]  # other good answers

    @property
    def name(self) -> str:
        return self.handle.__name__

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.handle) or "").strip()

    @property
    def path_names(self) -> list[str]:
        return re.findall(r"\{(\w+)\}", self.path)

    @property
    def query_fields(self) -> list[msgspec.structs.FieldInfo]:
        return [
            field
            for field in msgspec.structs.fields(self.asked)
            if field.name not in self.path_names and field.name != BODY
        ]

    @property
    def body_field(self) -> msgspec.structs.FieldInfo | None:
        return next((field for field in msgspec.structs.fields(self.asked) if field.name == BODY), None)


def endpoint(
    method: str,
    path: str,
    answer: Any = None,
    *,
    media_type: str = "application/json",
    status: int = 200,
    is_stream: bool = False,
    also: Mapping[int, Any] = MappingProxyType({}),
) -> Callable[[Callable[[Parts, Call[T]], Awaitable[Response]]], Endpoint]:
    """Makes an Endpoint of a handler; what it takes is in the annotation of its `call`."""

    def make(handle: Callable[[Parts, Call[T]], Awaitable[Response]]) -> Endpoint:
        (asked,) = get_args(get_type_hints(handle)["call"])
        return Endpoint(method, path, handle, asked, answer, media_type, status, is_stream, also)

    return make


class _Route(Route):
    """A method that its path does not have is refused as everything else is: with JSON."""

    allowed: str

    async def handle(self, scope: Any, receive: Any, send: Any) -> None:
        if self.methods is not None and scope["method"] not in self.methods:
            message = f"{scope['method']} is not allowed here, but {self.allowed}"
            await refusal(405, "method", message, headers={"allow": self.allowed})(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def build_router(endpoints: list[Endpoint], parts: Parts) -> Router:
    routes = [_route(each, parts) for each in endpoints]
    for route in routes:  # a path may have several
        methods = {method for one in routes if one.path == route.path for method in one.methods or ()}
        route.allowed = ", ".join(sorted(methods))
    return Router(routes, redirect_slashes=False, default=_not_found)


async def _not_found(scope: Any, receive: Any, send: Any) -> None:
    await refusal(404, "not-found", f"there is nothing at {scope['path']}: see {API}/openapi.json")(
        scope, receive, send
    )


def _route(each: Endpoint, parts: Parts) -> _Route:
    async def serve(request: Request) -> Response:
        if each.is_stream and request.method == "HEAD":
            return refusal(405, "method", "HEAD is not allowed here")
        try:
            call = Call(
                asked=read_asked(
                    each, request.path_params, request.scope["query_string"], request.scope["trn.body"]
                ),
                headers=request.headers,
                holder=request.scope["trn.holder"],
            )
            return await each.handle(parts, call)
        except Exception as fault:
            return error_answer(fault, f"{each.method} {each.path}")

    return _Route(f"{API}{each.path}", serve, methods=[each.method], name=each.name)


def read_asked(each: Endpoint, path: Mapping[str, str], query: bytes, body: bytes) -> Any:
    """InvalidRequestError with every fault."""
    faults: list[Fault] = []
    values: dict[str, Any] = dict(path)
    _read_query(each, query, values, faults)
    field = each.body_field
    is_body_read = True
    if field is not None:
        is_body_read = _read_body(field.type, body, values, faults)
    elif body.strip() not in (b"", b"{}"):
        faults.append(Fault("this request takes none: leave it empty", path=BODY, kind="value"))
    if is_body_read:
        try:
            asked = msgspec.convert(values, each.asked, strict=False)
        except msgspec.ValidationError as fault:
            faults.append(_explain(fault, values))
        else:
            if not faults:
                return asked
    raise InvalidRequestError(f"{each.method} {each.path}: the request is not valid", faults)


def _read_query(each: Endpoint, query: bytes, values: dict[str, Any], faults: list[Fault]) -> None:
    known = {field.name: field for field in each.query_fields}
    if len(query) > MAX_QUERY_BYTES:
        faults.append(Fault(f"the query has {len(query)} bytes, at most {MAX_QUERY_BYTES} are allowed"))
        return
    try:
        pairs = parse_qsl(
            query.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=MAX_QUERY_FIELDS
        )
    except (ValueError, UnicodeError):
        faults.append(Fault("the query cannot be read: expected name=value&… in UTF-8, with % escapes"))
        return
    for name, text in pairs:
        field = known.get(name)
        if field is None:
            names = ", ".join(known) or "none"
            faults.append(
                Fault(f"no such parameter; there are: {names}", path=name[:100], kind="unknown-field")
            )
        elif _is_list(field.type):
            values.setdefault(name, []).append(text)
        elif name in values:
            faults.append(Fault("given twice, expected once", path=name, kind="value"))
        else:
            values[name] = text


def _read_body(kind: Any, body: bytes, values: dict[str, Any], faults: list[Fault]) -> bool:
    """As a job's file is read: a name that is given twice, or a number that would lose a digit, is a fault."""
    try:
        values[BODY] = msgspec.json.decode(body or b"{}", type=kind)
        parse_document((body or b"{}").decode(), format_="json", source=BODY)
    except SpecError as fault:
        faults += [Fault.of(item) for item in fault.faults]
        return False
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as fault:
        faults += _explain_body(kind, body) or [_explain(fault, {})]
        return False
    return True


def _explain_body(kind: Any, body: bytes) -> list[Fault]:
    """Every fault of its fields, with the nearest name, as of a job; none where it is no JSON."""
    try:
        convert_document(parse_document(body.decode(), format_="json", source=BODY), kind, source=BODY)
    except SpecError as fault:
        return [Fault.of(item) for item in fault.faults]
    except (RecursionError, UnicodeError):
        pass
    return []


def _explain(fault: Exception, values: Mapping[str, Any]) -> Fault:
    """msgspec's words with the field's name: "Expected `int`, got `str` - at `$.limit`"."""
    text, _, place = str(fault).partition(" - at `$")
    path = place.rstrip("`").lstrip(".")
    found = values.get(path)
    shown = f", found {found[:100]!r}" if isinstance(found, str) else ""
    return Fault(f"{text}{shown}", path=path, kind="value")


def _is_list(kind: Any) -> bool:
    plain = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    return get_origin(plain) in (list, tuple)
