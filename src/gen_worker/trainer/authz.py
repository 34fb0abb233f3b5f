"""Capability tokens: what a worker may do with which run.

A token is a JWT signed with Ed25519. Only the orchestrator has the private key; a worker can verify tokens, not make them.
"""

import math
import re
import reprlib
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gen_worker.contract.redaction import Secret
from gen_worker.errors import AuthError

AUDIENCE = "trn-worker"
ALGORITHM = "EdDSA"
TOKEN_VARIABLE = "TRAINER_CAPABILITY_TOKEN"  # noqa: S105  (its name, not its value)

SCOPE_TRAIN = "train"
SCOPE_SERVE = "serve"  # and predict
SCOPE_UPLOAD = "upload"
SCOPE_READ_INPUTS = "read-inputs"
SCOPES = frozenset({SCOPE_TRAIN, SCOPE_SERVE, SCOPE_UPLOAD, SCOPE_READ_INPUTS})

DEFAULT_LEEWAY_S = 30.0
MAX_TIME_S = 1e15  # since 1970, either way
MAX_SHOWN = 300  # characters of what a library says of a token

# RFC 6750 b64token. HTTP libraries show a header value that they refuse in their error message.
_BEARER = re.compile(r"[A-Za-z0-9\-._~+/]+=*")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerAuthContext:
    """What this worker may do, and its token. `is_verified` is False where this worker has no key to verify it."""

    owner: str | None
    scopes: frozenset[str]
    run_id: str
    expires_at: float | None
    token: Secret = field(repr=False)
    is_verified: bool

    def allows(self, scope: str) -> bool:
        return scope in self.scopes

    def require(self, scope: str) -> None:
        if scope not in self.scopes:
            raise AuthError(
                f"the capability token of run {self.run_id!r} has the scopes {_listed(self.scopes)}, "
                f"but {scope!r} is needed; get a token that includes it"
            )

    def authorization_header(self) -> str:
        """The value of the Authorization header."""
        return f"Bearer {self.token.reveal()}"


def mint_capability_token(
    private_key_pem: str,
    *,
    owner: str,
    scopes: Iterable[str],
    run_id: str,
    ttl_s: float,
    now: float | None = None,
) -> str:
    """A signed token for one run, valid for `ttl_s` seconds from `now` (default: this clock)."""
    import jwt

    wanted = frozenset(scopes)
    if not wanted or wanted - SCOPES:
        raise AuthError(f"cannot mint a token for the scopes {_listed(wanted)}; known are {_listed(SCOPES)}")
    if not owner or not run_id:
        raise AuthError(f"cannot mint a token for owner {owner!r} and run {run_id!r}: both are required")
    if not ttl_s > 0 or math.isinf(ttl_s):
        raise AuthError(f"cannot mint a token with ttl_s={ttl_s!r}; give a finite number above 0")
    issued_at = time.time() if now is None else now
    claims = {
        "aud": AUDIENCE,
        "owner": owner,
        "run_id": run_id,
        "scope": " ".join(sorted(wanted)),
        "iat": math.floor(issued_at),
        "exp": math.ceil(issued_at + ttl_s),
        "jti": uuid.uuid4().hex,
    }
    key = _load_key(private_key_pem, is_private=True)
    return jwt.encode(claims, key, algorithm=ALGORITHM)


def verify_capability_token(
    token: str | Secret,
    public_key_pem: str,
    *,
    run_id: str,
    owner: str | None = None,
    required_scope: str | None = SCOPE_TRAIN,
    now: float | None = None,
    leeway_s: float = DEFAULT_LEEWAY_S,
) -> TrainerAuthContext:
    """Check signature, audience, time, run, owner (if given) and scope; AuthError names the one that failed."""
    import jwt

    secret = _as_bearer(token)
    key = _load_key(public_key_pem, is_private=False)
    claims: dict[str, Any] = {}
    refusal = ""
    try:
        claims = jwt.decode(
            secret.reveal(),
            key,
            algorithms=[ALGORITHM],  # never the token's choice: no `none`, no HMAC with a public key
            audience=AUDIENCE,
            # Times are checked below, with an injectable clock.
            options={
                "require": ["aud", "exp", "iat", "owner", "run_id", "scope"],
                "verify_exp": False,
                "verify_iat": False,
                "verify_nbf": False,
            },
        )
    except (jwt.PyJWTError, ValueError, RecursionError) as exc:
        refusal = f"{type(exc).__name__}: {exc}"[:MAX_SHOWN]
    # Raised outside the handler: the library's exception must not be printed with it.
    if refusal:
        raise AuthError(
            f"the capability token is not valid ({refusal}); get a new one for run {run_id!r} from the orchestrator"
        )
    _judge_claims(claims, run_id=run_id, owner=owner, now=now, leeway_s=leeway_s)
    context = TrainerAuthContext(
        owner=str(claims["owner"]),
        scopes=_scopes_of(claims),
        run_id=run_id,
        expires_at=float(claims["exp"]),
        token=secret,
        is_verified=True,
    )
    if required_scope is not None:
        context.require(required_scope)
    return context


def authorize_start(
    *,
    orchestrated: bool,
    token: str | Secret | None,
    public_key_pem: str | None,
    run_id: str,
    owner: str | None,
    scope: str = SCOPE_TRAIN,
    now: float | None = None,
    leeway_s: float = DEFAULT_LEEWAY_S,
) -> TrainerAuthContext | None:
    """AuthError where the worker may not start; None where no token is needed and none was given."""
    given = token.reveal() if isinstance(token, Secret) else token
    if given is None or not given.strip():
        if orchestrated:
            raise AuthError(
                f"{TOKEN_VARIABLE} is not set, but an orchestrated worker (TRAINER_ORCHESTRATED=1) starts only "
                f"with a capability token; set it to the token of run {run_id!r}"
            )
        return None
    secret = _as_bearer(given)
    if public_key_pem is not None:
        return verify_capability_token(
            secret,
            public_key_pem,
            run_id=run_id,
            owner=owner,
            required_scope=scope,
            now=now,
            leeway_s=leeway_s,
        )
    claims = _read_unverified(secret)
    if claims is None:
        return TrainerAuthContext(
            owner=owner, scopes=SCOPES, run_id=run_id, expires_at=None, token=secret, is_verified=False
        )
    _judge_claims(claims, run_id=run_id, owner=owner, now=now, leeway_s=leeway_s)
    is_ours = AUDIENCE in _as_list(claims.get("aud"))
    expires_at = claims.get("exp")
    context = TrainerAuthContext(
        owner=owner if claims.get("owner") is None else str(claims["owner"]),
        # Scopes of another issuer are checked by its endpoints.
        scopes=_scopes_of(claims) if is_ours else SCOPES,
        run_id=run_id,
        expires_at=None if expires_at is None else float(expires_at),
        token=secret,
        is_verified=False,
    )
    context.require(scope)
    return context


def _judge_claims(
    claims: Mapping[str, Any], *, run_id: str, owner: str | None, now: float | None, leeway_s: float
) -> None:
    """AuthError for claims out of their time, of another run or owner. Missing claims are not checked."""
    clock = time.time() if now is None else now
    expires_at = _time_claim(claims, "exp")
    if expires_at is not None and clock >= expires_at + leeway_s:
        raise AuthError(
            f"the capability token expired {clock - expires_at:.0f} s ago; get a new one for run {run_id!r}"
        )
    for name in ("nbf", "iat"):
        begins_at = _time_claim(claims, name)
        if begins_at is not None and clock < begins_at - leeway_s:
            raise AuthError(
                f"the capability token is not valid for another {begins_at - clock:.0f} s ({name}); "
                "compare the clocks of this machine and of the orchestrator"
            )
    named_run, named_owner = claims.get("run_id"), claims.get("owner")
    if named_run is not None and named_run != run_id:
        raise AuthError(f"the capability token is for run {_shown(named_run)}, this worker runs {run_id!r}")
    if owner is not None and named_owner is not None and named_owner != owner:
        raise AuthError(f"the capability token belongs to owner {_shown(named_owner)}, the run to {owner!r}")


def _time_claim(claims: Mapping[str, Any], name: str) -> float | None:
    value = claims.get(name)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not -MAX_TIME_S < value < MAX_TIME_S:  # nor is NaN
        raise AuthError(f"the capability token's {name} is {_shown(value)}, expected seconds since 1970")
    return float(value)


def _scopes_of(claims: Mapping[str, Any]) -> frozenset[str]:
    scope = claims.get("scope")
    words = scope.split() if isinstance(scope, str) else _as_list(scope)
    return frozenset(words) & SCOPES


def _as_list(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _as_bearer(token: str | Secret) -> Secret:
    value = (token.reveal() if isinstance(token, Secret) else token).strip()
    if not _BEARER.fullmatch(value):
        raise AuthError(
            f"the value of {TOKEN_VARIABLE} ({len(value)} characters) holds characters that a bearer token "
            "cannot have; check that it is the token itself, without quotes, spaces or a 'Bearer' in front"
        )
    return Secret(value)


def _read_unverified(secret: Secret) -> dict[str, Any] | None:
    """The claims of a JWT without verification; None for another kind of token."""
    import jwt

    try:
        return jwt.decode(secret.reveal(), options={"verify_signature": False})
    except (jwt.PyJWTError, ValueError, RecursionError):
        return None


def _load_key(pem: str, *, is_private: bool) -> Any:
    """An Ed25519 key. AuthError for anything else, also for a private key instead of a public one."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

    role = "private" if is_private else "public"
    if not is_private and "PRIVATE KEY" in pem:
        raise AuthError(
            "the worker has a private key; give it the public key only, so that it cannot mint tokens"
        )
    key: object = None
    try:
        if is_private:
            key = serialization.load_pem_private_key(pem.encode(), password=None)
        else:
            key = serialization.load_pem_public_key(pem.encode())
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey if is_private else Ed25519PublicKey):
        raise AuthError(f"the {role} key for capability tokens is not an Ed25519 key in PEM form")
    return key


def _shown(claim: object) -> str:
    """Shortened: the token's author chose its length."""
    return reprlib.repr(claim)


def _listed(words: Iterable[str]) -> str:
    return ", ".join(repr(word) for word in sorted(words)) or "none"
