"""What ended an attempt is told by the type of its exception: a cause that whoever retries can rely on."""

import errno
import socket
import urllib.error

import httpx
import pytest

from gen_worker.errors import InputError, TrainingCanceled, TrainStepError
from gen_worker.trainer.attempt.failure import find_cause

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [::1]:23229: Connection reset by peer"
MISUSE = "[enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes"


def raised(fault: BaseException, cause: BaseException) -> BaseException:
    try:
        raise fault from cause
    except type(fault) as found:
        return found


def dist_error() -> BaseException:
    distributed = pytest.importorskip("torch.distributed")
    error: BaseException = distributed.DistNetworkError("the store is gone")
    return error


@pytest.mark.parametrize(
    "fault",
    [
        ConnectionResetError("reset"),
        BrokenPipeError(errno.EPIPE, "broken"),
        TimeoutError("no answer"),
        OSError(errno.ENETUNREACH, "unreachable"),
        OSError(errno.ESTALE, "stale file handle"),
        OSError(errno.EIO, "i/o error"),
        socket.gaierror(socket.EAI_AGAIN, "try again"),
        urllib.error.URLError(ConnectionRefusedError("refused")),
        httpx.ReadTimeout("slow"),
        RuntimeError(GLOO),
        raised(TrainStepError("the batch could not be read"), ConnectionResetError("reset")),
        ExceptionGroup("two", [ConnectionResetError("a"), BrokenPipeError("b")]),
    ],
    ids=lambda fault: type(fault).__name__,
)
def test_a_broken_connection_is_known_by_its_type(fault: BaseException) -> None:
    assert find_cause(fault) == "connection"


def test_an_error_of_torchs_processes_is_a_broken_connection() -> None:
    assert find_cause(dist_error()) == "connection"


@pytest.mark.parametrize("fault", [MemoryError(), raised(InputError("too large"), MemoryError())])
def test_a_failed_allocation_is_out_of_memory(fault: BaseException) -> None:
    assert find_cause(fault) == "out-of-memory"


def test_a_full_disk_is_told_apart() -> None:
    assert find_cause(raised(TrainStepError("not saved"), OSError(errno.ENOSPC, "no space"))) == "disk-full"


def test_a_full_device_is_out_of_memory() -> None:
    torch = pytest.importorskip("torch")
    assert find_cause(torch.OutOfMemoryError("CUDA out of memory")) == "out-of-memory"


@pytest.mark.parametrize(
    "fault",
    [
        ValueError("Connection reset by peer"),  # words are no type
        RuntimeError("the connection timed out, I think"),
        RuntimeError(MISUSE),
        FileNotFoundError(errno.ENOENT, "no such file"),
        socket.gaierror(socket.EAI_NONAME, "no such host"),
        TrainingCanceled("the other processes are out of reach"),
        ExceptionGroup("two", [ConnectionResetError("a"), ValueError("b")]),
    ],
    ids=repr,
)
def test_an_error_of_the_authors_own_is_no_broken_connection(fault: BaseException) -> None:
    assert find_cause(fault) == ""


def break_and_err() -> None:
    try:
        raise ConnectionResetError
    except ConnectionResetError:
        raise KeyError("typo")  # noqa: B904


def test_an_exception_while_a_broken_connection_is_handled_is_an_error_of_its_own() -> None:
    with pytest.raises(KeyError) as caught:
        break_and_err()
    assert find_cause(caught.value) == ""
