"""Heads of requests, and those that were read before: a client that keeps its connection sends the same one again."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gen_worker.inference.front.http.exchange import Route

HEAD_END = b"\r\n\r\n"
MAX_KNOWN = 256
MAX_KNOWN_BYTES = 2048  # of one head


@dataclass(slots=True, kw_only=True)
class Head:
    """What a request says before its body. Requests share it: nothing in it changes after it was read."""

    method: bytes = b""
    path: bytes = b""  # without its query
    headers: Mapping[bytes, bytes] = field(
        default_factory=dict
    )  # those that decide something, in small letters
    content_type: bytes = b""
    body_bytes: int = 0  # as the head says; of a body in chunks 0
    route: "Route | None" = None
    keeps_alive: bool = True
    is_chunked: bool = True  # a stream of answers has to be: HTTP/1.1


class KnownHeads:
    """The bytes of whole heads, and what the parser made of them. Only of requests that may ask.

    Equal bytes at the beginning of a request mean the same, so they need not be parsed again. Heads with an id are not
    kept: it is another one in every request.
    """

    def __init__(self) -> None:
        self._heads: dict[bytes, Head] = {}
        self.find = self._heads.get

    def __len__(self) -> int:
        return len(self._heads)

    def keep(self, content: bytes, head: Head) -> None:
        """Of too many, the oldest is forgotten."""
        if b"x-request-id" in head.headers or b"expect" in head.headers or not head.keeps_alive:
            return
        if len(self._heads) >= MAX_KNOWN:
            del self._heads[next(iter(self._heads))]
        self._heads[content] = head
