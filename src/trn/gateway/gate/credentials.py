"""Who may ask: a bearer for programs, single-use login tokens and sessions for browsers.

All of them are drawn anew at each start and are in memory only, except the bearer, which is also in `gateway.json`.
"""

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable

LOGIN_TOKEN_S = 300.0
MAX_LOGIN_TOKENS = 100
SESSION_S = 7 * 86_400.0  # without a request
MAX_SESSIONS = 100
SECRET_BYTES = 32
BEARER = "bearer"  # the holder of it, beside the names of sessions


class Credentials:
    """Belongs to the loop's thread. Secrets are kept as digests, the bearer is compared in constant time."""

    def __init__(self, port: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.bearer = secrets.token_urlsafe(SECRET_BYTES)
        self.cookie_name = f"trn_session_{port}"  # cookies know no ports
        self._clock = clock
        self._tokens: dict[bytes, float] = {}  # digest -> until when
        self._sessions: dict[bytes, float] = {}

    def draw_login_token(self) -> str:
        """For one login, soon. Of too many the oldest are dropped."""
        self._forget_old()
        while len(self._tokens) >= MAX_LOGIN_TOKENS:
            del self._tokens[next(iter(self._tokens))]
        token = secrets.token_urlsafe(SECRET_BYTES)
        self._tokens[_digest(token)] = self._clock() + LOGIN_TOKEN_S
        return token

    def log_in(self, token: str) -> str | None:
        """The secret of a new session; None where the token was used, is too old or was never drawn."""
        self._forget_old()
        if self._tokens.pop(_digest(token), None) is None:
            return None
        while len(self._sessions) >= MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        session = secrets.token_urlsafe(SECRET_BYTES)
        self._sessions[_digest(session)] = self._clock() + SESSION_S
        return session

    def log_out(self, holder: str) -> None:
        for digest in [digest for digest in self._sessions if _name(digest) == holder]:
            del self._sessions[digest]

    def holder_of_bearer(self, authorization: str) -> str | None:
        """BEARER where the header `Authorization` has the bearer."""
        scheme, _, given = authorization.partition(" ")
        is_right = hmac.compare_digest(given.strip().encode(), self.bearer.encode())
        return BEARER if is_right and scheme.lower() == "bearer" else None

    def holder_of_cookie(self, cookie: str) -> str | None:
        """The name of the session that the header `Cookie` has."""
        # By hand: cookies of other programs on this host come along, and a parser may stop at one that is malformed.
        given = dict(part.strip().split("=", 1) for part in cookie.split(";") if "=" in part)
        digest = _digest(given.get(self.cookie_name, ""))
        until = self._sessions.get(digest)
        now = self._clock()
        if until is None or until < now:
            return None
        self._sessions[digest] = now + SESSION_S
        return _name(digest)

    def _forget_old(self) -> None:
        now = self._clock()
        for known in (self._tokens, self._sessions):
            for digest in [digest for digest, until in known.items() if until < now]:
                del known[digest]


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="surrogatepass")).digest()


def _name(digest: bytes) -> str:
    return f"session-{digest.hex()[:16]}"
