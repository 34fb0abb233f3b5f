"""The exit codes of `trn`. Scripts may rely on these numbers."""

from enum import IntEnum

from trn.core import errors


class ExitCode(IntEnum):
    OK = 0  # also: detached, the run continues
    FAILED_RUN = 1  # the run that was followed or waited for failed; a check found faults
    USAGE = 2  # the command line cannot be parsed, or a prefix matches several runs
    REFUSED = 3  # the job is not valid, names files that do not exist, or can never run on this machine
    NOT_FOUND = 4  # no such run or checkpoint
    UNAVAILABLE = 5  # no daemon, a full disk, no permission to write, or a registry that cannot be read
    CONFLICT = 6  # the run's state does not allow it
    FORBIDDEN = 7  # no permission
    CANCELLED_RUN = 8  # the run that was followed or waited for was cancelled
    INTERNAL = 70  # a bug in trn
    INTERRUPTED = 130  # Ctrl-C


# The first match counts: special errors before general ones.
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
    """Its code for programs, consistent with the exit code: a damaged registry is no bug in trn."""
    return "unavailable" if isinstance(fault, errors.RegistryError) else fault.code


def exit_code_of_state(state: str) -> ExitCode:
    """For commands that follow a run to its end."""
    return {"COMPLETED": ExitCode.OK, "CANCELLED": ExitCode.CANCELLED_RUN}.get(state, ExitCode.FAILED_RUN)
