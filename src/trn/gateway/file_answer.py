"""Answers with the bytes of an open file: whole or one range of it, in pieces, without following any path."""

import asyncio
import os
import re
from typing import Any
from urllib.parse import quote

from starlette.responses import Response

from trn.gateway.answers import refusal

PIECE_BYTES = 256 << 10
SEND_S = 120.0  # for one piece; then the reader counts as gone
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


class FileAnswer(Response):
    """Owns the descriptor. Several ranges at once are answered with the whole file."""

    def __init__(
        self,
        fd: int,
        *,
        size: int,
        media_type: str,
        range_header: str = "",
        headers: dict[str, str] | None = None,
        file_name: str = "",
    ) -> None:
        """With a `file_name` a browser saves it instead of showing it."""
        self._fd = fd
        found = read_range(range_header, size)
        more = {"accept-ranges": "bytes", **(headers or {})}
        if file_name:
            more["content-disposition"] = f"attachment; filename*=UTF-8''{quote(file_name, safe='')}"
        status = 200
        self._size = size
        self._begin, self._end = 0, size
        if found is not None:  # also all of it: Safari plays no video whose ranges are answered with 200
            self._begin, self._end = found
            status = 206 if self._begin < self._end else 416
            more["content-range"] = f"bytes {self._begin}-{self._end - 1}/{size}"
        super().__init__(status_code=status, headers=more)
        self.raw_headers = [
            pair for pair in self.raw_headers if pair[0] not in (b"content-length", b"content-type")
        ]
        self.raw_headers += [
            (b"content-length", str(self._end - self._begin).encode()),
            (b"content-type", media_type.encode()),
        ]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            if self.status_code == 416:
                headers = {"accept-ranges": "bytes", "content-range": f"bytes */{self._size}"}
                message = f"the file has {self._size} bytes, and none of them is in that range"
                await refusal(416, "range", message, headers=headers)(scope, receive, send)
                return
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            at = self._begin
            is_head = scope["method"] == "HEAD"
            while at < self._end and not is_head:
                piece = await asyncio.to_thread(os.pread, self._fd, min(PIECE_BYTES, self._end - at), at)
                if not piece:
                    raise OSError("the file became shorter while it was sent")
                at += len(piece)
                async with asyncio.timeout(SEND_S):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            os.close(self._fd)


def read_range(header: str, size: int) -> tuple[int, int] | None:
    """(begin, end) of what is wanted, (0, 0) where nothing is there; None where the header is none that we serve."""
    found = _RANGE.fullmatch(header.strip())
    if found is None or found.groups() == ("", ""):
        return None
    first, last = found.groups()
    begin = int(first) if first else max(0, size - int(last))  # without a first one: the last so many
    end = min(int(last) + 1, size) if first and last else size
    return (begin, end) if begin < end else (0, 0)
