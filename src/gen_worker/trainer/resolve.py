"""A ref of a job -> its location and expected digest. Uses no network."""

import glob
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from gen_worker.contract.redaction import strip_url_secrets
from gen_worker.errors import InputError

SCHEMES = ("file", "http", "https", "s3", "gs")

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+):")  # two characters at least: `C:` is a drive
_DIGEST = re.compile(r"(?:#sha256=|@sha256:)([^#@/]*)\Z")
_HEX = re.compile(r"[0-9a-fA-F]{64}")
_MAGIC = re.compile(r"[*?\[]")


class RefKind(StrEnum):
    FILE = "file"
    FOLDER = "folder"
    GLOB = "glob"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRef:
    """`location`: an absolute path or pattern (file), a URL (http, https) or `bucket/key` (s3, gs).

    `display`: the ref without credentials, for messages. `digest`: `sha256:<hex>` or None.
    """

    scheme: str
    location: str
    kind: RefKind
    digest: str | None
    display: str

    @property
    def is_local(self) -> bool:
        return self.scheme == "file"

    @property
    def name(self) -> str:
        """The last part of its path, as a plain file name."""
        path = unquote(urlsplit(self.location).path) if self.scheme in ("http", "https") else self.location
        name = path.rstrip("/").rpartition("/")[2].replace("\0", "")
        return "data" if name in ("", ".", "..") else name

    def sibling(self, name: str, digest: str | None) -> "ResolvedRef":
        """The ref of the file `name` in the same folder."""
        if self.scheme in ("http", "https"):
            parts = urlsplit(self.location)
            path = f"{parts.path.rpartition('/')[0]}/{quote(name)}"
            location = urlunsplit(parts._replace(path=path))
        else:
            location = f"{self.location.rpartition('/')[0]}/{name}"
        display = strip_url_secrets(location if "://" in location else f"{self.scheme}://{location}")
        return ResolvedRef(
            scheme=self.scheme, location=location, kind=RefKind.FILE, digest=digest, display=display
        )


def resolve(ref: str, *, base_dir: Path) -> ResolvedRef:
    """Parse `ref`; relative paths start at `base_dir`. InputError where it is invalid. Does not check that it exists."""
    display = strip_url_secrets(ref)
    if not ref.strip():
        raise InputError("an input ref is empty; give a path or a URL")
    if "\0" in ref:
        raise InputError(f"the input ref {display!r} contains a NUL character")
    body, digest = _split_digest(ref, display)
    display = strip_url_secrets(body)
    found = _SCHEME.match(body)
    scheme = found[1].lower() if found else "file"
    if scheme not in SCHEMES:
        raise InputError(
            f"the input ref {display!r} has the unknown scheme {scheme!r}; known are "
            f"{', '.join(f'{known}:' for known in SCHEMES)} and plain paths "
            "(write ./ before a path that has a colon in it)"
        )
    if scheme == "file":
        text = _path_of_file_uri(body, display) if found else body
        return _resolve_path(text, digest, display, base_dir)
    if scheme in ("http", "https"):
        return _resolve_http(body, scheme, digest, display)
    return _resolve_object(body, scheme, digest, display)


def _split_digest(ref: str, display: str) -> tuple[str, str | None]:
    found = _DIGEST.search(ref)
    if found is None:
        return ref, None
    if not _HEX.fullmatch(found[1]):
        raise InputError(
            f"the input ref {display!r} ends in a sha256 of {len(found[1])} characters that is not 64 hex digits; "
            "write #sha256=<64 hex digits> or leave it out"
        )
    body = ref[: found.start()]
    if _DIGEST.search(body):
        raise InputError(f"the input ref {display!r} names two digests; keep one")
    if not body:
        raise InputError(f"the input ref {display!r} has a digest only; put a path or URL before it")
    return body, f"sha256:{found[1].lower()}"


def _path_of_file_uri(body: str, display: str) -> str:
    rest = body.partition(":")[2]
    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")
        if host.lower() not in ("", "localhost"):
            raise InputError(
                f"the input ref {display!r} names the host {host!r}; a file: ref is on this machine: "
                "write file:///absolute/path"
            )
        rest = slash + path
    if not rest:
        raise InputError(f"the input ref {display!r} has no path; write file:///absolute/path")
    path_text = unquote(rest)
    if "\0" in path_text:
        raise InputError(f"the input ref {display!r} contains a NUL character")
    return path_text


def _resolve_path(text: str, digest: str | None, display: str, base_dir: Path) -> ResolvedRef:
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        raise InputError(
            f"the home folder in the input ref {display!r} is unknown here; write the full path"
        ) from None
    is_pattern = glob.has_magic(str(path))  # before joining the base folder, whose brackets are no pattern
    base = "" if path.is_absolute() else str(base_dir.absolute())
    pattern = f"{glob.escape(base)}/{path}"
    path = Path(base) / path
    kind = RefKind.FILE
    try:
        if path.is_dir():
            kind = RefKind.FOLDER
        elif is_pattern and not path.exists():
            kind = RefKind.GLOB
    except OSError:  # a name that is too long, for example: `fetch` reports it
        kind = RefKind.FILE
    if digest is not None and kind is not RefKind.FILE:
        raise InputError(
            f"the input ref {display!r} has a digest but is a {kind}; only one file can have one"
        )
    location = pattern if base and kind is RefKind.GLOB else str(path)
    return ResolvedRef(scheme="file", location=location, kind=kind, digest=digest, display=display)


def _resolve_http(body: str, scheme: str, digest: str | None, display: str) -> ResolvedRef:
    try:
        parts = urlsplit(body)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise InputError(f"the input ref {display!r} is not a valid URL; check its host and port") from None
    if not host:
        raise InputError(f"the input ref {display!r} names no host; write {scheme}://host/path")
    # Fragments are never sent: refs that differ only there are one download.
    location = urlunsplit(parts._replace(scheme=scheme, fragment=""))
    return ResolvedRef(scheme=scheme, location=location, kind=RefKind.FILE, digest=digest, display=display)


def _resolve_object(body: str, scheme: str, digest: str | None, display: str) -> ResolvedRef:
    rest = body.partition(":")[2]
    bucket, _, key = rest.removeprefix("//").partition("/")
    if "@" in bucket:
        raise InputError(
            f"the input ref {display!r} contains credentials; remove them: for {scheme} they come from the "
            "environment or the store's configuration file"
        )
    if not rest.startswith("//") or not bucket or not key:
        raise InputError(f"the input ref {display!r} names no object; write {scheme}://bucket/key")
    kind = RefKind.FILE
    if _MAGIC.search(key):
        kind = RefKind.GLOB
    elif key.endswith("/"):
        kind = RefKind.FOLDER
    if digest is not None and kind is not RefKind.FILE:
        raise InputError(
            f"the input ref {display!r} has a digest but is a {kind}; only one file can have one"
        )
    return ResolvedRef(scheme=scheme, location=f"{bucket}/{key}", kind=kind, digest=digest, display=display)
