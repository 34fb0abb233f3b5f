"""The lease on a run's folder: two workers never train one run at once.

It is a kernel lock on `.lease` in the checkpoints folder, released when its holder exits. The checkpoint writer inherits
it: after `kill -9` of the worker the folder stays leased until the current save is finished. No other child keeps it.
"""

import fcntl
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from gen_worker.contract.checkpoints.choice import find_committed
from gen_worker.contract.files.regular import open_regular
from gen_worker.contract.files.unshared import keep_from_children, no_longer_open
from gen_worker.contract.process_identity import is_process_alive, start_ticks
from gen_worker.errors import LeaseHeldError, StartupError

FILE_NAME = ".lease"
POLL_S = 0.05


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds the folder, or held it last."""

    run_id: str
    pid: int
    host: str
    started_ticks: int | None = None
    nonce: str = ""  # of the submission, from a daemon

    def is_alive(self) -> bool:
        """False only when the process is known to have exited: same host, and its pid is free or was reused."""
        if self.host != socket.gethostname():
            return True
        return is_process_alive(self.pid, self.started_ticks)


class RunLease:
    """Held from `acquire` to `release`, or until the last process that has `fd` open exits."""

    def __init__(self, fd: int, path: Path) -> None:
        self.fd = fd
        self.path = path

    @classmethod
    def acquire(
        cls,
        folder: Path,
        *,
        run_id: str,
        nonce: str = "",
        wait_s: float = 60.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> "RunLease":
        """Take the folder for `run_id`. LeaseHeldError at once if a worker lives; waits for a writer that finishes.

        With a `nonce`, checkpoints of another submission of the same id are refused, like those of another run.
        """
        path = folder / FILE_NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
            fd = open_regular(path, os.O_RDWR | os.O_CREAT)
        except OSError as fault:
            raise StartupError(
                f"the checkpoints folder {folder} cannot be written: {fault.strerror}"
            ) from fault
        try:
            _lock(fd, path, wait_s=wait_s, sleep=sleep)
            previous = _read_holder(fd)
            if previous is not None and find_committed(folder):
                _require_same_run(previous, run_id, nonce, folder)
            holder = Holder(
                run_id=run_id,
                pid=os.getpid(),
                host=socket.gethostname(),
                started_ticks=start_ticks(os.getpid()),
                nonce=nonce,
            )
            os.ftruncate(fd, 0)
            os.pwrite(fd, msgspec.json.encode(holder), 0)
        except OSError as fault:
            os.close(fd)
            raise StartupError(f"{path} cannot be written: {fault.strerror}") from fault
        except BaseException:
            os.close(fd)
            raise
        keep_from_children(fd)
        return cls(fd, path)

    def release(self) -> None:
        no_longer_open(self.fd)
        os.close(self.fd)


def _lock(fd: int, path: Path, *, wait_s: float, sleep: Callable[[float], None]) -> None:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _read_holder(fd)
            if holder is not None and holder.is_alive():
                raise LeaseHeldError(
                    f"run {holder.run_id!r} is being trained by pid {holder.pid} on {holder.host} ({path}):"
                    " wait for it to end, or stop it"
                ) from None
            if time.monotonic() > deadline:
                raise LeaseHeldError(
                    f"{path} is still locked {wait_s:.0f} s after its worker exited."
                    " A checkpoint writer may hang on a slow disk: run `fuser` on that file"
                ) from None
            sleep(POLL_S)
        else:
            return


def _require_same_run(previous: Holder, run_id: str, nonce: str, folder: Path) -> None:
    if previous.run_id != run_id:
        raise StartupError(
            f"{folder} holds the checkpoints of run {previous.run_id!r}, not of {run_id!r}:"
            " set TRAINER_ARTIFACTS_DIR (or TRAINER_CHECKPOINTS_DIR) to another folder"
        )
    if nonce and previous.nonce != nonce:
        raise StartupError(
            f"{folder} holds the checkpoints of another submission of run {run_id!r}: move them away"
        )


def _read_holder(fd: int) -> Holder | None:
    try:
        return msgspec.json.decode(os.pread(fd, 4096, 0), type=Holder)
    except msgspec.MsgspecError:
        return None
