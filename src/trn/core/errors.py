"""Every error that an operator or a program reads.

TrnError
├── InvalidRequestError   what was asked for cannot be: all its faults at once
│   └── InfeasibleError   no machine that we know could ever run it
├── NotFoundError         no such run, checkpoint or snapshot
├── AmbiguousError        a prefix that several runs have
├── ConflictError         it is not in a state in which that can be done
├── UnavailableError      the daemon, the launcher or the disk is not there
│   ├── SettingsError         the settings of the home are not valid
│   ├── AlreadyRunningError   another daemon has this home
│   └── BusUnavailableError   the event bus is away, or takes nothing
├── ForbiddenError        not yours
├── UnauthenticatedError  no token, or one that is not valid
├── TooMuchError          more than one caller is given
└── RegistryError         the registry is damaged, or of another version
    └── RegistryGoneError     its file was deleted or replaced under the daemon
"""

from collections.abc import Iterable
from typing import ClassVar

from gen_worker.errors import Fault


class TrnError(Exception):
    """Base: `code` is its name in the API and picks the exit code of the command line."""

    code: ClassVar[str] = "internal"


class InvalidRequestError(TrnError):
    code = "invalid-argument"

    def __init__(self, reason: str, faults: Iterable[str] = ()) -> None:
        """`reason` is one line; each fault becomes a line of the message, and keeps its data."""
        self.reason = reason
        self.faults = [Fault.of(fault) for fault in faults]
        super().__init__("\n".join([reason, *(f"  - {fault}" for fault in self.faults)]))


class InfeasibleError(InvalidRequestError):
    code = "failed-precondition"


class NotFoundError(TrnError):
    code = "not-found"


class AmbiguousError(TrnError):
    code = "invalid-argument"


class ConflictError(TrnError):
    code = "failed-precondition"


class UnavailableError(TrnError):
    code = "unavailable"


class SettingsError(UnavailableError):
    code = "unavailable"


class AlreadyRunningError(UnavailableError):
    code = "unavailable"
    daemon_exit_code: ClassVar[int] = 3  # of `python -m trn.daemon serve`


class BusUnavailableError(UnavailableError):
    code = "unavailable"


class ForbiddenError(TrnError):
    code = "permission-denied"


class UnauthenticatedError(TrnError):
    code = "unauthenticated"


class TooMuchError(TrnError):
    code = "resource-exhausted"


class RegistryError(TrnError):
    code = "internal"


class RegistryGoneError(RegistryError):
    code = "failed-precondition"  # to ask again does not help
