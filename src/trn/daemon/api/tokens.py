"""Who may call over TCP. Calls through the socket need no token: its folder is private to the owner.

The operator's token is a secret in a file of the home. A run token is made from it: it names a run by its id and the
nonce of its submission, a day on which it ends, and an HMAC that only the daemon can make. Nothing is stored; another
operator's token ends them all.
"""

import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gen_worker.contract.files.durable import create_file
from trn.core.errors import ForbiddenError, UnauthenticatedError, UnavailableError

RUN_TOKEN_LIFE_S = 30 * 24 * 3600
MIN_TOKEN_CHARS = 32

_HEAD = "trnrun2"
_PROMOTE = "trnpromote1"
_HEAD_WITHOUT_NONCE = "trnrun1"  # of runs from before there were nonces


class PromoteGrant(NamedTuple):
    """What a token for promotions is good for: one served name."""

    name: str


class RunGrant(NamedTuple):
    """What a run's token is good for: that very submission, and no later run of the same id."""

    run_id: str
    nonce: str = ""


Grant = RunGrant | PromoteGrant


def read_or_make_token(path: Path) -> str:
    """The operator's token; made at first need. UnavailableError where others could read it."""
    if not path.exists():
        create_file(path, secrets.token_urlsafe(32).encode() + b"\n")
    found = path.stat()
    if found.st_mode & 0o077 or found.st_uid != os.getuid():
        raise UnavailableError(
            f"{path} can be read by others (mode {found.st_mode & 0o777:o}): delete it, and a new one is made"
        )
    token = path.read_text().strip()
    if len(token) < MIN_TOKEN_CHARS:
        raise UnavailableError(
            f"{path} holds {len(token)} characters, expected at least {MIN_TOKEN_CHARS}: delete it, and a new one is made"
        )
    return token


class ApiTokens:
    """Makes and judges tokens. The file is read once; to change the operator's token, delete it and restart."""

    def __init__(self, path: Path, *, clock_s: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock_s = clock_s
        self._secret: tuple[bytes, hmac.HMAC] | None = None  # (the operator's token, what signs run tokens)

    def prepare(self) -> None:
        """Read the operator's token, or make it. UnavailableError where it cannot be trusted."""
        self._load()

    def make_run_token(self, run_id: str, nonce: str = "") -> str:
        expiry_s = int(self._clock_s()) + RUN_TOKEN_LIFE_S
        claim = (
            f"{_HEAD}.{expiry_s}.{nonce}.{run_id}" if nonce else f"{_HEAD_WITHOUT_NONCE}.{expiry_s}.{run_id}"
        )
        return f"{claim}.{self._sign(claim)}"

    def make_promote_token(self, name: str) -> str:
        claim = f"{_PROMOTE}.{int(self._clock_s()) + RUN_TOKEN_LIFE_S}.{name}"
        return f"{claim}.{self._sign(claim)}"

    def authenticate(self, values: Sequence[str | bytes]) -> Grant | None:
        """The run or the served name that the caller's `authorization` is for; None: it is the operator.
        UnauthenticatedError otherwise."""
        if len(values) != 1:
            raise UnauthenticatedError(
                "this call needs one token: send the metadata `authorization: Bearer <token>`; the operator's is in the"
                " file `token` of the daemon's home, a run's came with its submit"
            )
        value = values[0]
        raw = value if isinstance(value, bytes) else value.encode()
        scheme, _, token = raw.partition(b" ")
        token = token.strip()
        operator, _ = self._load()
        if scheme.lower() != b"bearer" or not token:
            raise UnauthenticatedError("the authorization is not of the form `Bearer <token>`")
        if hmac.compare_digest(token, operator):
            return None
        return self._read_token(token)

    def _read_token(self, token: bytes) -> Grant:
        text = token.decode(errors="replace")
        claim, _, signature = text.rpartition(".")
        if not hmac.compare_digest(signature.encode(), self._sign(claim).encode()):
            raise UnauthenticatedError(
                "the token is not valid here: it is of another daemon, or was cut short"
            )
        head, expiry_s, rest = claim.split(".", 2)
        if head == _PROMOTE:
            if int(expiry_s) <= self._clock_s():
                raise UnauthenticatedError(
                    f"the token for promotions of {rest} has ended: make another with `trn promote {rest} --token`"
                )
            return PromoteGrant(rest)
        nonce, _, run_id = rest.partition(".") if head == _HEAD else ("", "", rest)
        if int(expiry_s) <= self._clock_s():
            raise UnauthenticatedError(
                f"the token of run {run_id} has ended: submit the run once more for a new one, or use the operator's"
            )
        return RunGrant(run_id, nonce)

    def _sign(self, claim: str) -> str:
        signer = self._load()[1].copy()  # cheaper than one from its key: each submit makes a token
        signer.update(claim.encode())
        return signer.hexdigest()

    def _load(self) -> tuple[bytes, hmac.HMAC]:
        if self._secret is None:
            operator = read_or_make_token(self._path).encode()
            key = hmac.new(operator, b"trn run tokens v1", hashlib.sha256).digest()
            self._secret = operator, hmac.new(key, digestmod=hashlib.sha256)
        return self._secret


# What a token for promotions is good for, besides the watch of its server.
_OF_ONE_NAME = frozenset({"Promote", "Rollback", "GetServed"})
# What a run's token is good for, and where in the request the run is named.
_OF_ONE_RUN = frozenset({"GetRun", "StreamEvents", "StreamLogs", "GetMetrics", "CancelRun", "ListArtifacts"})


def require_allowed(
    grant: Grant | None,
    method: str,
    request: Any,
    nonce_of: Callable[[str], str | None],
    run_of_artifact: Callable[[str], str | None] = lambda _artifact_id: None,
    server_of: Callable[[str], str | None] = lambda _name: None,
) -> None:
    """ForbiddenError where a token is used for anything but its run or its served name. None is the operator, who may do
    everything.

    With a run's token its name means that very run, and neither the newest of its family nor another submission that has
    the id by now. `nonce_of` a run that is not there is None.
    """
    if grant is None:
        return
    if isinstance(grant, PromoteGrant):
        _require_promotion(grant, method, request, server_of)
        return
    run_id = grant.run_id
    if method in _OF_ONE_RUN:
        named = [request.run_id]
    elif method == "WatchRuns":
        named = list(request.run_ids)
    elif method == "ReadArtifact":
        if run_of_artifact(request.artifact_id) != run_id:
            raise ForbiddenError(f"this token is for run {run_id} alone, and this artifact is not of it")
        named = [run_id]
    else:
        raise ForbiddenError(f"a run's token is not good for {method}: use the operator's")
    if named != [run_id]:
        asked = ", ".join(repr(name) for name in named) or "every run"
        raise ForbiddenError(f"this token is for run {run_id} alone, and {asked} was asked for")
    if method == "GetMetrics" and request.with_ancestors:
        raise ForbiddenError(f"this token is for run {run_id} alone, and its ancestors were asked for")
    if nonce_of(run_id) not in (None, grant.nonce):
        raise ForbiddenError(f"this token is for an earlier run {run_id}, and another has its id by now")
    if method != "ReadArtifact":
        request.is_exact = True


def _require_promotion(
    grant: PromoteGrant, method: str, request: Any, server_of: Callable[[str], str | None]
) -> None:
    """A served name's token also names its server, and watches that."""
    server = server_of(grant.name)
    if server is None:  # its name may be the id of another server by now
        raise ForbiddenError(f"this token is for {grant.name} alone, and nothing is served as that")
    if method in _OF_ONE_NAME:
        if request.name not in (grant.name, server):
            raise ForbiddenError(f"this token is for {grant.name} alone, and {request.name!r} was asked for")
        request.name = grant.name
        if method != "GetServed":
            request.by = f"token{f' ({request.by})' if request.by else ''}"
    elif method == "WatchRuns":
        if not request.is_exact or list(request.run_ids) != [server]:
            raise ForbiddenError(f"this token is for {grant.name} alone, and other runs were asked for")
    else:
        raise ForbiddenError(f"a token for promotions is not good for {method}: use the operator's")
