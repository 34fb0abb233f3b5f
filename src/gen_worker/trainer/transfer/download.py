"""One attempt to download a file: over HTTP, or from an object store."""

import contextlib
import re
import zlib
from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urljoin, urlsplit

from gen_worker.contract.redaction import SecretRedactor, strip_url_secrets
from gen_worker.trainer.authz import SCOPE_READ_INPUTS, TrainerAuthContext
from gen_worker.trainer.resolve import ResolvedRef
from gen_worker.trainer.transfer.input_cache import PartialDownload
from gen_worker.trainer.transfer.object_store import ObjectStore, store_errors
from gen_worker.trainer.transfer.policy import (
    CHUNK_BYTES,
    FaultKind,
    TransferFault,
    TransferOptions,
    bearer_headers,
    has_same_origin,
    http_errors,
    http_fault,
    status_fault,
)

if TYPE_CHECKING:
    import httpx

OBJECT_CHUNK_BYTES = 8 << 20
MAX_REDIRECTS = 10
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)")
_GZIP = ("gzip", "x-gzip")

OnBytes = Callable[[int, int | None], None]


class Outcome(Enum):
    COMPLETE = auto()  # the download is complete
    NOT_MODIFIED = auto()  # the file still has `known_validator`


class Source(Protocol):
    def attempt(self, partial: PartialDownload, *, known_validator: str | None, on_bytes: OnBytes) -> Outcome:
        """Continue `partial`. TransferFault on failure; received bytes are kept."""

    def close(self) -> None: ...


def open_source(ref: ResolvedRef, auth: TrainerAuthContext | None, options: TransferOptions) -> Source:
    if ref.scheme in ("http", "https"):
        return HttpSource(ref, auth, options)
    return ObjectSource(ref, options)


class HttpSource:
    """Range requests for one version of the file, by If-Range or by its digest."""

    def __init__(self, ref: ResolvedRef, auth: TrainerAuthContext | None, options: TransferOptions) -> None:
        self._url = ref.location
        self._has_digest = ref.digest is not None
        self._auth = auth
        self._options = options
        self._redactor = SecretRedactor([auth.token] if auth else [])
        self._client = options.http_client()

    def close(self) -> None:
        self._client.close()

    def attempt(self, partial: PartialDownload, *, known_validator: str | None, on_bytes: OnBytes) -> Outcome:
        if partial.size_bytes and not (self._has_digest or _can_resume(partial.validator)):
            partial.restart()
        # Ranges and lengths count stored bytes, so no compression.
        headers = {"Accept-Encoding": "identity"}
        if partial.size_bytes:
            headers["Range"] = f"bytes={partial.size_bytes}-"
            if not self._has_digest:
                headers["If-Range"] = partial.validator
        elif known_validator:
            is_etag = known_validator.endswith('"')
            headers["If-None-Match" if is_etag else "If-Modified-Since"] = known_validator
        try:
            with self._request(headers) as response:
                if response.status_code == 304 and known_validator and not partial.size_bytes:
                    return Outcome.NOT_MODIFIED
                self._receive(response, partial, on_bytes)
        except http_errors() as exc:
            raise http_fault(exc, self._redactor) from None
        return Outcome.COMPLETE

    @contextlib.contextmanager
    def _request(self, headers: dict[str, str]) -> "Iterator[httpx.Response]":
        """GET with redirects. The token is sent only to the origin of the ref."""
        url = self._url
        for _ in range(MAX_REDIRECTS):
            bearer: dict[str, str] = {}
            if has_same_origin(self._url, url):
                bearer = bearer_headers(url, self._auth, scope=SCOPE_READ_INPUTS, options=self._options)
            with self._client.stream("GET", url, headers={**headers, **bearer}) as response:
                target = response.headers.get("location")
                if response.status_code not in _REDIRECTS or target is None:
                    if response.status_code not in (200, 206, 304, 416):
                        raise status_fault(
                            response.status_code, response.headers.get("retry-after"), sent_token=bool(bearer)
                        )
                    yield response
                    return
            url = self._follow(url, target)
        raise TransferFault(FaultKind.PERMANENT, f"more than {MAX_REDIRECTS} redirects")

    def _follow(self, url: str, target: str) -> str:
        try:
            after = urljoin(url, target)
            before_scheme, after_scheme = urlsplit(url).scheme, urlsplit(after).scheme
            _ = urlsplit(after).port
        except ValueError:
            raise TransferFault(FaultKind.PERMANENT, "the server redirects to an invalid URL") from None
        is_downgrade = before_scheme == "https" and after_scheme == "http"
        if after_scheme not in ("http", "https") or is_downgrade:
            raise TransferFault(
                FaultKind.PERMANENT,
                f"the server redirects from {before_scheme} to {strip_url_secrets(after)}, which is not allowed",
            )
        return after

    def _receive(self, response: "httpx.Response", partial: PartialDownload, on_bytes: OnBytes) -> None:
        if response.status_code == 416:
            partial.restart()
            raise TransferFault(FaultKind.TRANSIENT, "the file is shorter than the part downloaded before")
        coding = response.headers.get("content-encoding", "identity").lower()
        if coding != "identity":
            self._receive_decoded(response, coding, partial, on_bytes)
            return
        if response.status_code == 206:
            total_bytes = self._accept_range(response, partial)
        elif response.status_code == 200:
            length = response.headers.get("content-length", "")
            total_bytes = int(length) if length.isascii() and length.isdigit() else None
            self._require_end(response)
            partial.restart(_validator_of(response.headers), total_bytes)
        else:
            raise status_fault(response.status_code, None, sent_token=False)
        on_bytes(partial.size_bytes, total_bytes)
        for chunk in response.iter_raw():  # `on_bytes` may raise to stop
            partial.write(chunk)
            on_bytes(partial.size_bytes, total_bytes)
        if total_bytes is not None and partial.size_bytes != total_bytes:
            missing = f"received {partial.size_bytes} of {total_bytes} bytes"
            if partial.size_bytes > total_bytes:
                partial.restart()
            raise TransferFault(FaultKind.TRANSIENT, missing)

    def _require_end(self, response: "httpx.Response") -> None:
        """A body that ends with the connection may be incomplete: only a digest can tell."""
        is_chunked = "chunked" in response.headers.get("transfer-encoding", "").lower()
        if not (self._has_digest or is_chunked or "content-length" in response.headers):
            raise TransferFault(
                FaultKind.PERMANENT,
                "the server does not send the length of the file, so a broken connection would not be noticed. Add"
                " #sha256=<64 hex digits> to the end of the ref",
            )

    def _accept_range(self, response: "httpx.Response", partial: PartialDownload) -> int | None:
        """Check that a 206 continues `partial`. Returns the size of the whole file, or None if only the digest can tell."""
        found = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
        total_bytes = None if found is None or found[3] == "*" else int(found[3])
        validator = _validator_of(response.headers)
        # An ETag must be repeated (RFC 9110 15.3.7), a date need not.
        is_other = bool(partial.validator) and validator != partial.validator
        if not validator and not partial.validator.startswith('"'):
            is_other = False
        if total_bytes is None or partial.total_bytes not in (None, total_bytes):
            is_other = is_other or not self._has_digest
        if found is None or int(found[1]) != partial.size_bytes or not partial.size_bytes or is_other:
            partial.restart()
            raise TransferFault(
                FaultKind.TRANSIENT, "the server sent another part of the file than requested"
            )
        return total_bytes

    def _receive_decoded(
        self, response: "httpx.Response", coding: str, partial: PartialDownload, on_bytes: OnBytes
    ) -> None:
        """A server that compresses against the request: offsets are meaningless, so the file is read as a whole."""
        partial.restart()
        if response.status_code != 200:
            raise TransferFault(FaultKind.TRANSIENT, "the server sent a compressed part of the file")
        if coding not in _GZIP:
            raise TransferFault(
                FaultKind.PERMANENT,
                f"the server sends the file with encoding {coding[:40]!r}, which was not requested. Only gzip is supported",
            )
        is_complete = False
        partial.restart(_validator_of(response.headers))
        try:
            for chunk in _unzip(response.iter_raw()):
                partial.write(chunk)
                on_bytes(partial.size_bytes, None)
            is_complete = True
        finally:
            if not is_complete:
                partial.restart()


def _unzip(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The bytes of a gzip stream, in bounded parts. TransferFault if it is corrupt or incomplete."""
    unzipper = zlib.decompressobj(wbits=31)
    try:
        for chunk in chunks:
            left = chunk
            while left:
                if unzipper.eof:  # a file may have several members
                    unzipper = zlib.decompressobj(wbits=31)
                yield unzipper.decompress(left, CHUNK_BYTES)
                left = unzipper.unconsumed_tail or unzipper.unused_data
    except zlib.error as exc:
        raise TransferFault(FaultKind.TRANSIENT, f"the gzip stream of the server is corrupt: {exc}") from None
    if not unzipper.eof:
        raise TransferFault(FaultKind.TRANSIENT, "the gzip stream of the server is incomplete")


class ObjectSource:
    """Seeks to the end of the last attempt. The store's ETag tells whether it is still the same object."""

    def __init__(self, ref: ResolvedRef, options: TransferOptions) -> None:
        self._ref = ref
        self._options = options
        self._store: ObjectStore | None = None

    def close(self) -> None:
        self._store = None

    def attempt(self, partial: PartialDownload, *, known_validator: str | None, on_bytes: OnBytes) -> Outcome:
        if self._store is None:
            bucket = self._ref.location.partition("/")[0]
            self._store = ObjectStore(self._ref.scheme, bucket, self._options)
        stream, found = self._store.open(self._ref.location)
        with contextlib.closing(stream):
            if known_validator == found.validator:
                return Outcome.NOT_MODIFIED
            if not partial.size_bytes or partial.validator != found.validator:
                partial.restart(found.validator, found.size_bytes)
            on_bytes(partial.size_bytes, found.size_bytes)
            with store_errors():
                stream.seek(partial.size_bytes)
            while partial.size_bytes < found.size_bytes:
                with store_errors():
                    chunk = stream.read(OBJECT_CHUNK_BYTES)
                if not chunk:
                    received = f"received {partial.size_bytes} of {found.size_bytes} bytes"
                    raise TransferFault(FaultKind.TRANSIENT, received)
                partial.write(chunk)
                on_bytes(partial.size_bytes, found.size_bytes)
        # Reads of one stream are separate requests: the object must not have changed meanwhile.
        if self._store.stat(self._ref.location).validator != found.validator:
            partial.restart()
            raise TransferFault(FaultKind.TRANSIENT, "the object was replaced while it was being read")
        return Outcome.COMPLETE


def _validator_of(headers: "httpx.Headers") -> str:
    """A strong ETag, else a reliable date, else a weak ETag, else nothing."""
    etag = headers.get("etag", "").strip()
    if etag.startswith('"'):
        return str(etag)
    from email.utils import parsedate_to_datetime

    modified = headers.get("last-modified", "").strip()
    try:
        # RFC 9110 8.8.2.2: a date is reliable only if it is older than the answer.
        age_s = (
            parsedate_to_datetime(headers.get("date", "")) - parsedate_to_datetime(modified)
        ).total_seconds()
    except (ValueError, TypeError):
        age_s = 0.0
    return str(modified) if age_s >= 1 else str(etag)


def _can_resume(validator: str) -> bool:
    return bool(validator) and not validator.startswith("W/")
