"""An exception as a `failed` event has it: category, cause, and a text for people.

Invariant: nothing here raises, even if the author's exception raises in `__str__`, `__repr__`, `__class__` or a property.
"""

import contextlib
import errno
import re
import socket
import traceback
from collections.abc import Iterator
from pathlib import Path

from gen_worker.errors import Category, Cause, TrainingCanceled, TrainingTimeout, WorkerError
from gen_worker.frozen_imports import name_originals

_OURS = str(Path(__file__).resolve().parents[2])
_PYTHONS = str(Path(traceback.__file__).resolve().parent)

_BROKEN = frozenset(
    {
        errno.EIO,
        errno.EREMOTEIO,
        errno.ESTALE,
        errno.ENOTCONN,
        errno.ESHUTDOWN,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ENETRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
    }
)
# By name: none of these packages is imported for it.
_CONNECTION_TYPES = frozenset(
    {
        "torch.distributed.DistBackendError",
        "torch.distributed.DistNetworkError",
        "torch.distributed.DistStoreError",
        "httpx.TransportError",
        "requests.exceptions.ConnectionError",
        "requests.exceptions.Timeout",
        "requests.exceptions.ChunkedEncodingError",
        "urllib3.exceptions.MaxRetryError",
        "urllib3.exceptions.ProtocolError",
        "urllib3.exceptions.TimeoutError",
        "http.client.IncompleteRead",
        "aiohttp.client_exceptions.ClientConnectionError",
        "aiohttp.client_exceptions.ClientPayloadError",
        "botocore.exceptions.HTTPClientError",
        "google.api_core.exceptions.ServiceUnavailable",
        "google.auth.exceptions.TransportError",
        "azure.core.exceptions.ServiceRequestError",
        "azure.core.exceptions.ServiceResponseError",
    }
)
_MEMORY_TYPES = frozenset({"builtins.MemoryError", "torch.OutOfMemoryError"})
# gloo has no exception type of its own for this. A collective that is called wrongly says "enforce fail" there.
_GLOO_LOST = re.compile(r"\[(?!enforce fail)[^\]]*gloo/transport/")
# Nor has torch's allocator on the CPU.
_TORCH_NO_MEMORY = re.compile(
    r"\[enforce fail at alloc_cpu\.cpp|DefaultCPUAllocator: (can't allocate|not enough) memory"
)


def say(fault: BaseException) -> str:
    """`str(fault)`, else `repr(fault)`."""
    for make_text in (str, repr):
        with contextlib.suppress(BaseException):
            return str.__str__(make_text(fault))
    return "no text: its __str__ and __repr__ raise"


def add_note(fault: BaseException, note: str) -> None:
    """`fault.add_note`."""
    with contextlib.suppress(BaseException):
        BaseException.add_note(fault, note)


def find_cause(fault: BaseException) -> str:
    """A `Cause` by the type of the exception, or of what it was raised from; empty where none is known."""
    with contextlib.suppress(BaseException):
        if isinstance(fault, TrainingCanceled | TrainingTimeout):
            return ""
        return next(filter(None, map(_cause_of, _raised_from(fault))), "")
    return ""


def _raised_from(fault: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while fault is not None and id(fault) not in seen:
        seen.add(id(fault))
        yield fault
        reason = getattr(fault, "reason", None)  # of urllib's
        fault = fault.__cause__ or (reason if isinstance(reason, BaseException) else None)


def _cause_of(fault: BaseException) -> str:
    if isinstance(fault, WorkerError) and fault.cause:
        return fault.cause
    if isinstance(fault, BaseExceptionGroup):
        causes = {find_cause(item) for item in fault.exceptions}
        return causes.pop() if len(causes) == 1 else ""
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(fault).__mro__}
    is_runtime_error = type(fault) is RuntimeError
    if names & _MEMORY_TYPES or (is_runtime_error and _TORCH_NO_MEMORY.search(say(fault)) is not None):
        return Cause.OUT_OF_MEMORY
    if isinstance(fault, OSError) and fault.errno in (errno.ENOSPC, errno.EDQUOT):
        return Cause.DISK_FULL
    is_broken = (
        isinstance(fault, ConnectionError | TimeoutError)
        or (isinstance(fault, socket.gaierror) and fault.errno == socket.EAI_AGAIN)
        or (isinstance(fault, OSError) and fault.errno in _BROKEN)
        or (is_runtime_error and _GLOO_LOST.match(say(fault)) is not None)
        or bool(names & _CONNECTION_TYPES)
    )
    return Cause.CONNECTION if is_broken else ""


def describe_failure(cause: BaseException, *, phase: Category = Category.TRAIN_STEP) -> tuple[Category, str]:
    """(category, text). An exception that is not a WorkerError has the category `phase`, and its place in the text."""
    with contextlib.suppress(BaseException):
        return _describe(cause, phase)
    return phase, f"{kind_of(cause)}: {say(cause)}"


def _describe(cause: BaseException, phase: Category) -> tuple[Category, str]:
    if isinstance(cause, WorkerError):
        category, text = cause.category, say(cause)
    elif isinstance(cause, KeyboardInterrupt):
        category, text = Category.CANCELLED, "interrupted"
    else:
        category = phase
        said = say(cause)
        text = f"{kind_of(cause)}: {said}" if said else kind_of(cause)
        place = author_place(cause)
        if place is not None:
            text = f"{text} (at {place})"
        if is_our_fault(cause):
            text = f"a bug in the worker, please report it: {text}"
    notes = [note for note in getattr(cause, "__notes__", None) or () if isinstance(note, str)]
    return Category(category), name_originals("\n".join([text, *notes]))


def kind_of(fault: BaseException) -> str:
    """The name of its class, even if a metaclass hides it."""
    return str(type.__dict__["__name__"].__get__(type(fault)))


def is_our_fault(cause: BaseException) -> bool:
    """True where our own code raised an error that is not a WorkerError: a bug in the worker."""
    with contextlib.suppress(BaseException):
        return _is_our_fault(cause)
    return False


def _is_our_fault(cause: BaseException) -> bool:
    if isinstance(cause, WorkerError | KeyboardInterrupt | OSError) or author_place(cause) is not None:
        return False
    frames = traceback.extract_tb(cause.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(_OURS)


def find_place(cause: BaseException) -> str | None:
    """`author_place` that never raises; None for our own errors, whose text names what matters."""
    with contextlib.suppress(BaseException):
        return None if isinstance(cause, WorkerError) else author_place(cause)
    return None


def author_place(cause: BaseException) -> str | None:
    """`file:line` of the innermost frame in the author's code: not ours, Python's or an installed package's."""
    for frame in reversed(traceback.extract_tb(cause.__traceback__)):
        path = frame.filename
        if path.startswith("/") and not path.startswith((_OURS, _PYTHONS)) and "site-packages" not in path:
            return f"{frame.filename}:{frame.lineno}, in {frame.name}"
    return None
