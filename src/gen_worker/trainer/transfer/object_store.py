"""s3:// and gs:// through pyarrow.fs, and the meaning of its errors."""

import contextlib
import fnmatch
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from gen_worker.contract.redaction import strip_url_secrets
from gen_worker.trainer.transfer.policy import FaultKind, TransferFault, TransferOptions

# The libraries of the stores raise OSError for everything; the error code is only in its text.
_AUTH_WORDS = re.compile(
    r"ACCESS_DENIED|INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH|EXPIRED_TOKEN|INVALID_CLIENT_TOKEN_ID"
    r"|UNRECOGNIZED_CLIENT|INVALID_SIGNATURE|MISSING_AUTHENTICATION_TOKEN|ExpiredToken|InvalidAccessKeyId"
    r"|PERMISSION_DENIED|UNAUTHENTICATED|Permission denied|HTTP status (?:401|403)|HTTP response code 40[13]"
)
_MISSING_WORDS = re.compile(
    r"NO_SUCH_BUCKET|NO_SUCH_KEY|RESOURCE_NOT_FOUND|does not exist|NOT_FOUND|HTTP response code 404"
)
_LASTING_WORDS = re.compile(r"INVALID_ARGUMENT|INVALID_PARAMETER|MALFORMED|NOT_IMPLEMENTED|VALIDATION")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """One object: `key` is `bucket/path`; `validator` changes whenever its bytes do."""

    key: str
    size_bytes: int
    validator: str


class ObjectStore:
    """The file system of one bucket. Every method may raise TransferFault. Thread-safe."""

    def __init__(self, scheme: str, bucket: str, options: TransferOptions) -> None:
        self.scheme = scheme
        with store_errors():
            self._fs = _open_s3(bucket, options) if scheme == "s3" else _open_gcs(options)

    def stat(self, key: str) -> StoredObject:
        """The object at `key`."""
        with store_errors(), self._fs.open_input_file(key) as stream:
            return _describe(key, stream)

    def exists(self, key: str) -> bool:
        from pyarrow import fs

        with store_errors():
            return bool(self._fs.get_file_info(key).type == fs.FileType.File)

    def open(self, key: str) -> tuple[Any, StoredObject]:
        """A seekable stream and its object; the caller closes it."""
        with store_errors():
            stream = self._fs.open_input_file(key)
            return stream, _describe(key, stream)

    def create(self, key: str, content_type: str) -> Any:
        """A stream that becomes the object when it is closed. Closing it early stores an incomplete object."""
        with store_errors():
            return self._fs.open_output_stream(key, metadata={"Content-Type": content_type})

    def size_bytes(self, key: str) -> int | None:
        with store_errors():
            size = self._fs.get_file_info(key).size
        return None if size is None else int(size)

    def delete(self, key: str) -> None:
        with store_errors():
            self._fs.delete_file(key)

    def move(self, source: str, target: str) -> None:
        """A copy in the store, which replaces an object of that name at once; then the source is deleted."""
        with store_errors():
            self._fs.copy_file(source, target)
            self._fs.delete_file(source)

    def list_files(self, prefix: str) -> list[str]:
        """Keys of all objects below `prefix` (a folder), sorted; empty if there are none."""
        from pyarrow import fs

        with store_errors():
            selector = fs.FileSelector(prefix.rstrip("/"), recursive=True, allow_not_found=True)
            found = self._fs.get_file_info(selector)
        return sorted(info.path for info in found if info.type == fs.FileType.File)

    def match(self, pattern: str) -> list[str]:
        """Keys that match a glob. `*` matches within one folder, `**` across folders."""
        first_magic = min(pattern.find(mark) for mark in "*?[" if mark in pattern)
        base = pattern[:first_magic].rpartition("/")[0]
        wanted = pattern.split("/")
        return [key for key in self.list_files(base) if matches_glob(wanted, key.split("/"))]


def matches_glob(pattern: Sequence[str], key: Sequence[str]) -> bool:
    """Does a key match a glob? Both are split at `/`."""
    if not pattern:
        return not key
    if pattern[0] == "**":
        return any(matches_glob(pattern[1:], key[skipped:]) for skipped in range(len(key) + 1))
    return bool(key) and fnmatch.fnmatchcase(key[0], pattern[0]) and matches_glob(pattern[1:], key[1:])


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """Turn errors of the store's library into TransferFaults."""
    try:
        yield
    except (OSError, ValueError) as exc:
        raise _store_fault(exc) from None


def _store_fault(exc: Exception) -> TransferFault:
    """Without URL credentials."""
    text = strip_url_secrets(" ".join(str(exc).split()))
    if isinstance(exc, FileNotFoundError | NotADirectoryError) or _MISSING_WORDS.search(text):
        return TransferFault(FaultKind.MISSING, text)
    if isinstance(exc, PermissionError) or _AUTH_WORDS.search(text):
        return TransferFault(FaultKind.AUTH, text)
    lasting = isinstance(exc, ValueError) or _LASTING_WORDS.search(text)
    return TransferFault(FaultKind.PERMANENT if lasting else FaultKind.TRANSIENT, text)


def _describe(key: str, stream: Any) -> StoredObject:
    metadata = {_text(name).lower(): _text(value) for name, value in (stream.metadata() or {}).items()}
    size = int(stream.size())
    marks = [
        metadata[name] for name in ("etag", "generation", "last-modified", "updated") if name in metadata
    ]
    return StoredObject(key=key, size_bytes=size, validator="|".join([*marks, str(size)]))


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _split_endpoint(endpoint: str) -> tuple[str, str]:
    scheme, mark, host = endpoint.partition("://")
    return (scheme, host.rstrip("/")) if mark else ("https", endpoint.rstrip("/"))


def _open_s3(bucket: str, options: TransferOptions) -> Any:
    from pyarrow import fs

    store = options.object_store
    settings: dict[str, Any] = {
        "connect_timeout": options.connect_timeout_s,
        "request_timeout": options.stall_timeout_s,
        # We retry; retries of the library would multiply ours.
        "retry_strategy": fs.AwsStandardS3RetryStrategy(max_attempts=1),
    }
    region = store.s3_region
    if store.s3_endpoint:
        settings["scheme"], settings["endpoint_override"] = _split_endpoint(store.s3_endpoint)
    elif region is None:
        region = fs.resolve_s3_region(bucket)
    if region:
        settings["region"] = region
    return fs.S3FileSystem(**settings)


def _open_gcs(options: TransferOptions) -> Any:
    from pyarrow import fs

    store = options.object_store
    settings: dict[str, Any] = {
        "retry_time_limit": timedelta(seconds=max(1.0, options.stall_timeout_s)),
        "anonymous": store.gcs_anonymous,
    }
    if store.gcs_endpoint:
        settings["scheme"], settings["endpoint_override"] = _split_endpoint(store.gcs_endpoint)
    return fs.GcsFileSystem(**settings)
