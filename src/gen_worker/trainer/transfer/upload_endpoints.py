"""Destinations of uploads: an HTTP endpoint, or a prefix in an object store."""

import base64
import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol
from urllib.parse import quote, urlsplit

from gen_worker.contract.redaction import SecretRedactor, strip_url_secrets
from gen_worker.errors import StartupError
from gen_worker.trainer.authz import SCOPE_UPLOAD, TrainerAuthContext
from gen_worker.trainer.transfer.object_store import ObjectStore, store_errors
from gen_worker.trainer.transfer.policy import (
    MAX_DETAIL,
    FaultKind,
    TransferFault,
    TransferOptions,
    bearer_headers,
    http_errors,
    http_fault,
    status_fault,
)
from gen_worker.trainer.transfer.upload_parcels import Parcel, Sender

if TYPE_CHECKING:
    import httpx

MAX_ANSWER_BYTES = 64 << 10
MAX_WAITING_BYTES = 64 << 20  # of an object, not yet stored
MAX_COPIED_BYTES = 5 << 30  # S3 copies no more in one call
PART_SUFFIX = ".part"


class Endpoint(Protocol):
    def send(self, parcel: Parcel, *, check: Callable[[], None]) -> None:
        """Deliver all of it or raise TransferFault. `check` is called per chunk and may raise to stop."""

    def close(self) -> None: ...


def check_target(name: str, target: str) -> None:
    """StartupError for an invalid target, before the first upload."""
    try:
        parts = urlsplit(target)
        is_sound = parts.scheme in ("http", "https", "s3", "gs") and bool(parts.hostname)
        _ = parts.port
    except ValueError:
        is_sound = False
    if not is_sound:
        raise StartupError(
            f"the {name} is {strip_url_secrets(target)!r}, expected http(s)://host/path, s3://bucket/prefix or"
            " gs://bucket/prefix"
        )


def open_endpoint(
    target: str, sender: Sender, auth: TrainerAuthContext | None, options: TransferOptions
) -> Endpoint:
    if urlsplit(target).scheme in ("http", "https"):
        return HttpEndpoint(target, sender, auth, options)
    return ObjectEndpoint(target, options)


class HttpEndpoint:
    def __init__(
        self, url: str, sender: Sender, auth: TrainerAuthContext | None, options: TransferOptions
    ) -> None:
        self._url = url
        self._sender = sender
        self._auth = auth
        self._options = options
        self._redactor = SecretRedactor([auth.token] if auth else [])
        self._client = options.http_client()

    def close(self) -> None:
        self._client.close()

    def headers(self, parcel: Parcel) -> dict[str, str]:
        """All headers except the credential."""
        digest = base64.b64encode(bytes.fromhex(parcel.digest)).decode()
        headers = {
            "Content-Type": parcel.content_type,
            "Content-Length": str(parcel.size_bytes),
            "Content-Digest": f"sha-256=:{digest}:",
            "Idempotency-Key": parcel.idempotency_key(self._sender),
            "X-Trn-Run-Id": quote(self._sender.run_id),
            "X-Trn-Attempt": str(self._sender.attempt),
            "X-Trn-File-Name": quote(parcel.file_name),
        }
        if self._sender.owner is not None:
            headers["X-Trn-Owner"] = quote(self._sender.owner)
        if parcel.step is not None:
            headers["X-Trn-Step"] = str(parcel.step)
        if parcel.is_final:
            headers["X-Trn-Final"] = "1"
        return headers

    def send(self, parcel: Parcel, *, check: Callable[[], None]) -> None:
        bearer = bearer_headers(self._url, self._auth, scope=SCOPE_UPLOAD, options=self._options)
        try:
            with self._client.stream(
                "POST",
                self._url,
                headers={**self.headers(parcel), **bearer},
                content=_checked(parcel.body(), check),
            ) as response:
                self._judge(response, sent_token=bool(bearer))
        except http_errors() as exc:
            raise http_fault(exc, self._redactor) from None

    def _judge(self, response: "httpx.Response", *, sent_token: bool) -> None:
        status = response.status_code
        length = response.headers.get("content-length", "")
        is_short = length.isdigit() and int(length) <= MAX_ANSWER_BYTES
        if 200 <= status < 300:
            if is_short:
                # Reading the whole answer keeps the connection open. Its content does not matter.
                with contextlib.suppress(*http_errors()):
                    for _ in response.iter_raw():
                        pass
            return
        if 300 <= status < 400:
            place = self._redactor.redact(response.headers.get("location", "nowhere"))[:MAX_DETAIL]
            raise TransferFault(
                FaultKind.PERMANENT, f"the server redirects ({status}) to {place}: set the target to that URL"
            )
        if status == 409:
            # Draft Idempotency-Key: the server still processes the first request with this key.
            raise TransferFault(FaultKind.TRANSIENT, "the server answered 409")
        detail = ""
        if is_short:
            with contextlib.suppress(*http_errors()):  # the status is enough
                text = b"".join(response.iter_raw()).decode(errors="replace")
                detail = self._redactor.redact(" ".join(text.split()))[:MAX_DETAIL]
        raise status_fault(status, response.headers.get("retry-after"), sent_token=sent_token, detail=detail)


class ObjectEndpoint:
    """Puts objects below a prefix. An incomplete object is deleted again, and replaces none that was there before."""

    def __init__(self, target: str, options: TransferOptions) -> None:
        parts = urlsplit(target)
        self._scheme = parts.scheme
        self._bucket = parts.netloc
        self._prefix = f"{parts.netloc}{parts.path}".rstrip("/")
        self._options = options
        self._store: ObjectStore | None = None

    def close(self) -> None:
        self._store = None

    def send(self, parcel: Parcel, *, check: Callable[[], None]) -> None:
        if self._store is None:
            self._store = ObjectStore(self._scheme, self._bucket, self._options)
        store = self._store
        key = f"{self._prefix}/{parcel.object_name}"
        # Closing a stream stores what was written; there is no way to abort. So an object that is there is replaced only by
        # one that is whole. Stores copy up to a size in one call.
        is_replacing = parcel.size_bytes <= MAX_COPIED_BYTES and store.exists(key)
        target = f"{key}{PART_SUFFIX}" if is_replacing else key
        stream = store.create(target, parcel.content_type)
        is_whole = False
        try:
            with store_errors():
                num_waiting = 0
                for chunk in _checked(parcel.body(), check):
                    stream.write(chunk)
                    num_waiting += len(chunk)
                    if num_waiting >= MAX_WAITING_BYTES:
                        stream.flush()  # writes are asynchronous, with a copy of each part
                        num_waiting = 0
            is_whole = True
        finally:
            if not is_whole:
                with contextlib.suppress(OSError, ValueError, TransferFault):
                    stream.close()
                    store.delete(target)
        with store_errors():
            stream.close()
        stored_bytes = store.size_bytes(target)
        if stored_bytes != parcel.size_bytes:
            raise TransferFault(
                FaultKind.TRANSIENT, f"only {stored_bytes} of {parcel.size_bytes} bytes were stored as {key}"
            )
        if is_replacing:
            store.move(target, key)


def _checked(chunks: Iterator[bytes], check: Callable[[], None]) -> Iterator[bytes]:
    for chunk in chunks:
        check()
        yield chunk
