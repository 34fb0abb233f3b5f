"""Shared by downloads and uploads: retries, delays, timeouts, and which hosts get the token."""

import functools
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit

from gen_worker.contract.redaction import SecretRedactor
from gen_worker.trainer.authz import TrainerAuthContext

if TYPE_CHECKING:
    import ssl

    import httpx

CHUNK_BYTES = 1 << 20
MAX_DETAIL = 300  # characters of a server's answer in a message
RETRYABLE_STATUS = frozenset({408, 425, 429})
_URL_STRIPPER = SecretRedactor()
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class FaultKind(Enum):
    TRANSIENT = auto()  # retry
    PERMANENT = auto()  # a retry would fail too
    MISSING = auto()  # the object does not exist
    AUTH = auto()  # the credential was rejected


class TransferFault(Exception):  # noqa: N818  (internal; callers turn it into a WorkerError or an UploadFailure)
    """One failed attempt. `reason` has no secrets."""

    def __init__(self, kind: FaultKind, reason: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Exponential backoff with full jitter, limited by count and time.

    No attempt starts after `max_elapsed_s`. Timeouts limit the attempt itself.
    """

    max_attempts: int = 6
    base_s: float = 0.5
    cap_s: float = 30.0
    max_elapsed_s: float = 600.0

    def jittered_s(self, failures: int, draw: float) -> float:
        """The wait after `failures` failures (from 1) for a uniform `draw` from [0, 1)."""
        # 2.0**1100 would overflow; the cap applies long before.
        return draw * min(self.cap_s, self.base_s * 2.0 ** min(failures - 1, 60))


class Backoff:
    """Counts the failures of one transfer. Not thread-safe."""

    def __init__(
        self,
        policy: RetryPolicy,
        *,
        draw: Callable[[], float] = random.random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = policy
        self._draw = draw
        self._clock = clock
        self._began_at = clock()
        self.failures = 0

    def next_delay_s(self, retry_after_s: float | None = None) -> float | None:
        """Count a failure. Returns the delay before the next attempt, or None to give up."""
        self.failures += 1
        if self.failures >= self._policy.max_attempts:
            return None
        delay_s = self._policy.jittered_s(self.failures, self._draw())
        if retry_after_s is not None:
            delay_s = max(delay_s, retry_after_s)
        if self._clock() - self._began_at + delay_s > self._policy.max_elapsed_s:
            return None
        return delay_s

    def reset(self) -> None:
        """Restart count and time after progress."""
        self.failures = 0
        self._began_at = self._clock()


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStoreOptions:
    """Endpoints of s3:// and gs://. The library itself finds credentials.

    `s3_endpoint` is the value of AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL, `gcs_endpoint` of
    STORAGE_EMULATOR_HOST: `http://host:port`, or `host:port` for https.
    """

    s3_endpoint: str | None = None
    s3_region: str | None = None
    gcs_endpoint: str | None = None
    gcs_anonymous: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOptions:
    """Options of a transfer; the defaults are for a worker.

    The token is sent only to `token_hosts` (`host` or `host:port`); None: every https host. Plain http gets it only on
    loopback, unless `allow_insecure_token`.
    """

    retry: RetryPolicy = field(default_factory=RetryPolicy)
    connect_timeout_s: float = 10.0
    stall_timeout_s: float = 60.0
    allow_insecure_token: bool = False
    token_hosts: frozenset[str] | None = None
    object_store: ObjectStoreOptions = field(default_factory=ObjectStoreOptions)
    sleep: Callable[[float], None] = time.sleep
    draw: Callable[[], float] = random.random

    def http_client(self) -> "httpx.Client":
        import httpx

        from gen_worker.trainer.transfer.pacing import pace

        # httpx logs each URL with its query at INFO.
        logging.getLogger("httpx").addFilter(_URL_STRIPPER)
        client = httpx.Client(
            timeout=httpx.Timeout(self.stall_timeout_s, connect=self.connect_timeout_s),
            follow_redirects=False,  # we follow them without the token
            verify=_tls_context(),
            # The token is sent over plain http on loopback: no proxy of the environment there.
            mounts={f"all://{_bracketed(host)}": None for host in _LOOPBACK},
            # No cookies: a server could fill our memory with them.
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
        )
        pace(client, self.stall_timeout_s)
        return client


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


@functools.cache
def _tls_context() -> "ssl.SSLContext":
    """Created once: reading the certificate store is slow."""
    import httpx

    return httpx.create_ssl_context()


def bearer_headers(
    url: str, auth: TrainerAuthContext | None, *, scope: str, options: TransferOptions
) -> dict[str, str]:
    """The Authorization header for `url`; empty if the token must not be sent there."""
    if auth is None or not auth.allows(scope):
        return {}
    parts = urlsplit(url)
    host = (parts.hostname or "").lower()
    if parts.username is not None:
        return {}  # the URL has its own credential
    if options.token_hosts is not None and not {host, _host_port(parts)} & options.token_hosts:
        return {}
    if parts.scheme != "https" and host not in _LOOPBACK and not options.allow_insecure_token:
        return {}
    return {"Authorization": auth.authorization_header()}


def has_same_origin(one: str, other: str) -> bool:
    """May a credential for `one` be sent to `other`? Equal scheme, host and port."""
    first, second = urlsplit(one), urlsplit(other)
    return first.scheme == second.scheme and _host_port(first) == _host_port(second)


def _host_port(parts: SplitResult) -> str:
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    return f"{(parts.hostname or '').lower()}:{port}"


def parse_retry_after_s(value: str | None, *, now: float) -> float | None:
    """Seconds of a Retry-After header (a number or a date); None if missing or invalid."""
    if value is None:
        return None
    text = value.strip()
    if text.isascii() and text.isdigit():
        return float(text) if len(text) < 10 else None
    from email.utils import parsedate_to_datetime

    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - now)
    except (ValueError, TypeError, OverflowError, OSError):  # also for dates out of range
        return None


def status_fault(
    status: int, retry_after: str | None, *, sent_token: bool, detail: str = ""
) -> TransferFault:
    """The fault of an HTTP status that is not a success."""
    reason = f"the server answered {status}" + (f" ({detail})" if detail else "")
    if status in (401, 403):
        credential = "the capability token was rejected" if sent_token else "no capability token was sent"
        return TransferFault(FaultKind.AUTH, f"{reason}: {credential}")
    if status in (404, 410):
        return TransferFault(FaultKind.MISSING, reason)
    if status >= 500 or status in RETRYABLE_STATUS:
        wait_s = parse_retry_after_s(retry_after, now=time.time())
        return TransferFault(FaultKind.TRANSIENT, reason, retry_after_s=wait_s)
    return TransferFault(FaultKind.PERMANENT, reason)


def http_errors() -> tuple[type[Exception], ...]:
    """What a request may raise. ValueError: httpx parses the URL of a redirect even if it does not follow it."""
    import httpx

    return httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, ValueError


def http_fault(exc: Exception, redactor: SecretRedactor) -> TransferFault:
    """An exception of `http_errors` as a fault. Raise it `from None`: the original may contain headers and URLs."""
    import httpx

    text = redactor.redact(str(exc))[:MAX_DETAIL] or "no details"
    lasting = (httpx.InvalidURL, httpx.UnsupportedProtocol, httpx.LocalProtocolError, ValueError)
    kind = FaultKind.PERMANENT if isinstance(exc, lasting) else FaultKind.TRANSIENT
    return TransferFault(kind, f"{type(exc).__name__}: {text}")
