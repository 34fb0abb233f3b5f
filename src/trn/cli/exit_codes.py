"""How `trn` ends, by name. Scripts may rely on these numbers."""

from enum import IntEnum

from trn.core import errors


class ExitCode(IntEnum):
    OK = 0  # also: detached, the run goes on
    FAILED_RUN = 1  # the run that was followed or waited for has failed; what was examined is not sound
    USAGE = 2  # the command line cannot be understood, or a prefix means several runs
    REFUSED = (
        3  # a job that is not valid, or that names files that are not there; no machine that could run it
    )
    NOT_FOUND = 4  # no such run or checkpoint
    UNAVAILABLE = 5  # no daemon, no room on the disk, no right to write, a registry that cannot be read
    CONFLICT = 6  # not in a state in which that can be done
    FORBIDDEN = 7  # not yours
    CANCELLED_RUN = 8  # the run that was followed or waited for was cancelled
    INTERNAL = 70  # a fault of trn itself
    INTERRUPTED = 130  # Ctrl-C


# The first that fits: the more special before the more general.
_BY_ERROR: tuple[tuple[type[errors.TrnError], ExitCode], ...] = (
    (errors.InvalidRequestError, ExitCode.REFUSED),
    (errors.NotFoundError, ExitCode.NOT_FOUND),
    (errors.AmbiguousError, ExitCode.USAGE),
    (errors.ConflictError, ExitCode.CONFLICT),
    (errors.UnavailableError, ExitCode.UNAVAILABLE),
    (errors.ForbiddenError, ExitCode.FORBIDDEN),
    (errors.UnauthenticatedError, ExitCode.FORBIDDEN),
    (errors.TooMuchError, ExitCode.UNAVAILABLE),
    (errors.RegistryError, ExitCode.UNAVAILABLE),
)


def exit_code_of(fault: errors.TrnError) -> ExitCode:
    return next((code for kind, code in _BY_ERROR if isinstance(fault, kind)), ExitCode.INTERNAL)


def code_of(fault: errors.TrnError) -> str:
    """Its name for programs, which agrees with the exit code: whose registry is damaged is not a fault of trn's."""
    return "unavailable" if isinstance(fault, errors.RegistryError) else fault.code


def exit_code_of_state(state: str) -> ExitCode:
    """For commands that end with the run they followed."""
    return {"COMPLETED": ExitCode.OK, "CANCELLED": ExitCode.CANCELLED_RUN}.get(state, ExitCode.FAILED_RUN)
