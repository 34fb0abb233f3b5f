"""Errors -> gRPC statuses: one table. What is not ours becomes INTERNAL with a number that the log knows."""

import logging
import secrets

import grpc

from trn.core.errors import TrnError

_log = logging.getLogger(__name__)

# TrnError.code -> status. A code that is not here is internal.
STATUSES: dict[str, grpc.StatusCode] = {
    "invalid-argument": grpc.StatusCode.INVALID_ARGUMENT,
    "failed-precondition": grpc.StatusCode.FAILED_PRECONDITION,
    "not-found": grpc.StatusCode.NOT_FOUND,
    "unavailable": grpc.StatusCode.UNAVAILABLE,
    "permission-denied": grpc.StatusCode.PERMISSION_DENIED,
    "unauthenticated": grpc.StatusCode.UNAUTHENTICATED,
    "resource-exhausted": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "deadline-exceeded": grpc.StatusCode.DEADLINE_EXCEEDED,
    "internal": grpc.StatusCode.INTERNAL,
}

# Statuses travel in HTTP headers, whose size is limited (8 KiB by default); a list of faults may be longer.
MAX_MESSAGE_BYTES = 4096


def status_of(fault: BaseException, *, method: str) -> tuple[grpc.StatusCode, str]:
    """(status, message for the caller). The text of an error that is not ours stays in the log."""
    if isinstance(fault, TrnError):
        return STATUSES.get(fault.code, grpc.StatusCode.INTERNAL), _cut(str(fault))
    number = secrets.token_hex(4)
    _log.error("error %s in %s", number, method, exc_info=fault)
    return (
        grpc.StatusCode.INTERNAL,
        f"the daemon failed in {method}: error {number}; its log (`daemon.log` in the home) says what happened",
    )


def _cut(text: str) -> str:
    raw = text.encode()
    if len(raw) <= MAX_MESSAGE_BYTES:
        return text
    return raw[: MAX_MESSAGE_BYTES - 40].decode(errors="ignore") + "\n  … and more"
