"""The page's own files, in memory: a path is looked up in a table, and never in a file system.

A path that is no file is a view of the page: its `index.html` answers.
"""

import gzip
import hashlib
import mimetypes
from pathlib import Path
from typing import Any, NamedTuple

from starlette.datastructures import Headers
from starlette.responses import Response

from trn.gateway.answers import takes_gzip

FOLDER = Path(__file__).with_name("static")
INDEX = "/index.html"
ASSETS = "/assets/"  # their names change with their content
NOT_BUILT = "The files of the page are missing in this installation: `make web` builds them.\n"


class PageFile(NamedTuple):
    plain: bytes
    gzipped: bytes  # empty: not worth it
    media_type: str
    tag: str
    cache_control: str


def read_page_files(folder: Path = FOLDER) -> dict[str, PageFile]:
    """path -> file. What lies compressed beside a file is taken from there."""
    found: dict[str, PageFile] = {}
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.suffix == ".gz" or path.name.startswith("."):
            continue
        name = f"/{path.relative_to(folder).as_posix()}"
        plain = path.read_bytes()
        beside = path.with_name(f"{path.name}.gz")
        gzipped = beside.read_bytes() if beside.exists() else gzip.compress(plain, mtime=0)
        kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        found[name] = PageFile(
            plain,
            gzipped if len(gzipped) < len(plain) else b"",
            f"{kind}; charset=utf-8" if kind.startswith("text/") else kind,
            f'"{hashlib.sha256(plain).hexdigest()[:16]}"',
            "public, max-age=31536000, immutable" if name.startswith(ASSETS) else "no-cache",
        )
    return found


class PageFiles:
    """An ASGI application for GET and HEAD."""

    def __init__(self, files: dict[str, PageFile]) -> None:
        self._files = files

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._answer(scope["path"], Headers(scope=scope))(scope, receive, send)

    def _answer(self, path: str, headers: Headers) -> Response:
        is_view = "." not in path.rpartition("/")[2] or path.startswith("/runs/")
        file = self._files.get(path) or (self._files.get(INDEX) if is_view else None)
        if file is None:
            text = NOT_BUILT if not self._files else "There is nothing at this path.\n"
            return Response(text, status_code=404, media_type="text/plain")
        known = {"etag": file.tag, "cache-control": file.cache_control, "vary": "Accept-Encoding"}
        if headers.get("if-none-match") == file.tag:
            return Response(status_code=304, headers=known)
        if file.gzipped and takes_gzip(headers.get("accept-encoding", "")):
            return Response(
                file.gzipped, media_type=file.media_type, headers={**known, "content-encoding": "gzip"}
            )
        return Response(file.plain, media_type=file.media_type, headers=known)
