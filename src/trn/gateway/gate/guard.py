"""The one gate before everything: who may pass, and in which form. It sees a request before anything routes it.

It decides by the path as it was sent, not by a decoded one. A path that could be read in two ways is refused. Without a
credential there are the page's own files, which hold no data, and the login. All answers get the headers that keep a
browser from running or framing what they hold.
"""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

from trn.gateway.answers import refusal
from trn.gateway.gate.credentials import Credentials

logger = logging.getLogger("trn.gateway.access")

API = "/api/v1"
LOGIN = f"{API}/login"
MAX_BODY_BYTES = 8 << 20
BODY_S = 30.0  # for the whole body
MAX_PATH = 1024
METHODS = ("GET", "HEAD", "POST", "PATCH", "DELETE")
READS = ("GET", "HEAD")
STOPPED = "the gateway was stopped before it had the answer; what was asked for may have been done"
# No escapes: no id, name or file of ours needs one, and so nothing is ever decoded twice.
_PATH = re.compile(rb"/(?:[A-Za-z0-9._-]+(?:/[A-Za-z0-9._-]+)*/?)?")
_JSON = re.compile(r"application/json(?:\s*;\s*charset=\"?utf-8\"?)?", re.IGNORECASE)

PAGE_POLICY = (
    "default-src 'self'; img-src 'self' blob: data:; media-src 'self'; object-src 'none'; frame-ancestors 'none';"
    " base-uri 'none'; form-action 'none'"
)
DATA_POLICY = "default-src 'none'; sandbox; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Refused(Exception):  # noqa: N818  (an answer)
    """What the guard answers instead of letting a request pass."""

    def __init__(self, status: int, code: str, message: str, *, is_closed: bool = False) -> None:
        super().__init__(message)
        self.status, self.code, self.is_closed = status, code, is_closed


class Guard:
    """An ASGI application around `api` and `page`. It puts `trn.holder` and `trn.body` into the scope of what passes."""

    def __init__(
        self, *, api: App, page: App, credentials: Credentials, hosts: Collection[str], scheme: str = "http"
    ) -> None:
        self._api = api
        self._page = page
        self._credentials = credentials
        self._hosts = frozenset(hosts)
        self._scheme = scheme

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"no {scope['type']} here")
        begun = time.monotonic()
        status = 0

        async def guarded(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": _with_own(message.get("headers", ()), is_api=is_api)}
            await send(message)

        is_api = True
        try:
            path, headers = _read_path(scope), _read_headers(scope)
            is_api = path == "/api" or path.startswith("/api/")
            self._require_host(headers)
            self._require_own_origin(headers)
            if is_api:
                scope["trn.holder"] = self._admit(scope["method"], path, headers)
                scope["trn.body"] = await read_body(scope["method"], headers, receive)
                await self._api(scope, receive, guarded)
            elif scope["method"] in READS:
                await self._page(scope, receive, guarded)
            else:
                raise Refused(405, "method", f"{scope['method']} is not allowed here")
        except Refused as fault:
            extra = {"connection": "close"} if fault.is_closed else {}
            answer = refusal(fault.status, fault.code, str(fault), headers=extra)
            await answer(scope, receive, guarded)
        except asyncio.CancelledError:
            # The server stops, and has waited. It ends this task, which has nothing more to do than to say so.
            if status == 0:
                await refusal(503, "unavailable", STOPPED)(scope, receive, guarded)
        finally:
            # The query is left out: what a client puts there is its own.
            logger.info(
                "%s %s %d %.0f ms",
                scope["method"],
                scope["raw_path"][:MAX_PATH].decode("ascii", "replace"),
                status,
                1000 * (time.monotonic() - begun),
            )

    def _require_host(self, headers: dict[str, str]) -> None:
        """Exactly one of our names: a name of somebody else's that leads here is DNS rebinding."""
        host = headers.get("host", "")
        if host.lower() not in self._hosts:
            raise Refused(
                403, "forbidden", f"Host is {host[:100]!r}, expected {' or '.join(sorted(self._hosts))}"
            )

    def _require_own_origin(self, headers: dict[str, str]) -> None:
        origin = headers.get("origin")
        if origin is not None and origin.lower() != f"{self._scheme}://{headers['host'].lower()}":
            raise Refused(
                403, "forbidden", f"Origin is {origin[:100]!r}: requests of other sites are refused"
            )

    def _admit(self, method: str, path: str, headers: dict[str, str]) -> str:
        """The holder of the credential; empty for a login."""
        if method not in METHODS:
            raise Refused(405, "method", f"{method[:20]!r} is not allowed")
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            raise Refused(403, "forbidden", "requests of other sites are refused")
        is_login = path == LOGIN and method == "POST"
        holder: str | None = ""
        if not is_login:
            if "authorization" in headers:
                holder = self._credentials.holder_of_bearer(headers["authorization"])
            else:
                holder = self._credentials.holder_of_cookie(headers.get("cookie", ""))
                if holder is not None and method not in READS and "origin" not in headers:
                    raise Refused(
                        403, "forbidden", "Origin is missing: a browser sends it, a program sends a bearer"
                    )
            if holder is None:
                raise Refused(
                    401,
                    "unauthenticated",
                    "no valid credential: a browser logs in with the link of `trn ui`, a program sends"
                    " `Authorization: Bearer …` with the bearer of `trn ui --json`",
                )
        if method not in READS and not _JSON.fullmatch(headers.get("content-type", "").strip()):
            found = headers.get("content-type", "")[:100]
            raise Refused(415, "invalid", f"Content-Type is {found!r}, expected application/json")
        return holder or ""


def _read_path(scope: Scope) -> str:
    raw: bytes = scope["raw_path"]
    if len(raw) > MAX_PATH or not _PATH.fullmatch(raw) or b"/." in raw or b".." in raw:
        raise Refused(404, "not-found", "there is nothing at this path")
    path = raw.decode("ascii")
    if scope["path"] != path:
        raise Refused(404, "not-found", "there is nothing at this path")
    return path


def _read_headers(scope: Scope) -> dict[str, str]:
    """By name. One that decides something must not be there twice."""
    found: dict[str, str] = {}
    for name, value in scope["headers"]:
        text = name.decode("latin-1")
        if text == "cookie" and text in found:  # HTTP/2 splits it
            found[text] += f"; {value.decode('latin-1')}"
            continue
        if text in found and text in ("host", "origin", "authorization", "content-type", "content-length"):
            raise Refused(400, "invalid", f"the header {text} is given twice", is_closed=True)
        found[text] = value.decode("latin-1")
    return found


async def read_body(method: str, headers: dict[str, str], receive: Receive) -> bytes:
    length = headers.get("content-length", "")
    if method in READS:
        if length not in ("", "0") or "transfer-encoding" in headers:
            raise Refused(400, "invalid", f"{method} takes no body", is_closed=True)
        return b""
    too_large = Refused(413, "too-large", f"a body has at most {MAX_BODY_BYTES} bytes", is_closed=True)
    if length.isdigit() and int(length) > MAX_BODY_BYTES:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Refused(400, "invalid", "the connection was closed", is_closed=True)
                body += message.get("body", b"")
                if len(body) > MAX_BODY_BYTES:
                    raise too_large
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise Refused(408, "too-slow", f"no whole body within {BODY_S:g} s", is_closed=True) from None


def _with_own(headers: Any, *, is_api: bool) -> list[tuple[bytes, bytes]]:
    own = list(headers)
    names = {name for name, _ in own}
    own += _HEADERS
    own.append((b"content-security-policy", (DATA_POLICY if is_api else PAGE_POLICY).encode()))
    if b"cache-control" not in names:
        own.append((b"cache-control", b"no-store"))
    return own
