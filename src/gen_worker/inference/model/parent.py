"""The server's side of its model processes. No torch, no pyarrow, none of the author's code.

```text
server ── fork, before any thread ──> model parent ── fork ──> first worker of a version ── fork ──> template ──> others
   └────────────────────── one socketpair for each worker: frames of `inference.messages` ──────────┘
```

The model parent is the parent of all workers, also of those that a template forked: it reaps them and reports their end.
All of them are killed when it exits, and it is killed when the server exits.
"""

import contextlib
import os
import select
import signal
import socket
import time
from dataclasses import dataclass

from gen_worker.contract.doubling_delay import DoublingDelay
from gen_worker.contract.job.model_version import ModelVersion, VersionFacts
from gen_worker.errors import ModelLoadError
from gen_worker.inference.model.orders import (
    FromServer,
    KillWorker,
    LaunchWorker,
    ModelOptions,
    OrderReader,
    Prepare,
    Retire,
    WorkerEnd,
    end_decoder,
    send_order,
)
from gen_worker.inference.model.process import count_threads, flush_output

__all__ = ["ModelLink", "ModelOptions", "ModelParent", "WorkerEnd"]

CLOSE_PATIENCE_S = 10.0
FIRST_POLL_S, MAX_POLL_S = 0.001, 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLink:
    """The server's end of a worker's link. Its first frame is `Ready` or `NotReady`; to close it ends the worker.

    `socket` does not block. End of file there, or an entry of `read_ends`: the worker has ended.
    """

    socket: socket.socket
    worker_id: int
    label: str

    def close(self) -> None:
        """Safe to repeat."""
        self.socket.close()


class ModelParent:
    """The handle of the model parent. Used by one thread of the process that started it."""

    def __init__(self, pid: int, link: socket.socket) -> None:
        self._pid = pid
        self._link = link
        self._orders: OrderReader[WorkerEnd] = OrderReader(link, end_decoder)
        self._last_id = 0
        self._exit: str | None = None

    @classmethod
    def start(cls) -> "ModelParent":
        """Fork it. Must be called before the process has a second thread, and in its main thread."""
        _require_one_thread()
        ours, theirs = socket.socketpair()
        server_pid = os.getpid()
        flush_output()
        pid = os.fork()
        if pid == 0:
            from gen_worker.inference.model.parent_process import become_parent

            ours.close()
            become_parent(theirs, server_pid)
        theirs.close()
        return cls(pid, ours)

    @property
    def pid(self) -> int:
        return self._pid

    def launch(self, version: ModelVersion, options: ModelOptions) -> ModelLink:
        """Ask for a worker of that version. Returns at once; the worker says `Ready` or `NotReady` when it can."""
        self._last_id += 1
        ours, theirs = socket.socketpair()
        try:
            order = LaunchWorker(worker_id=self._last_id, version=version, options=options)
            self._send(order, theirs.fileno())
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        return ModelLink(socket=ours, worker_id=self._last_id, label=version.label)

    def prepare(self, version: ModelVersion, options: ModelOptions) -> None:
        """Load that version now: a worker with the same options is asked for soon. Only that says what failed."""
        self._send(Prepare(version=version, options=options))

    def retire(self, version: VersionFacts) -> None:
        """End the templates of that version: a further worker of it has to load. Its workers go on."""
        self._send(Retire(version=version))

    def kill(self, worker_id: int) -> None:
        """End a worker whatever it does: it hangs, say. Its end is reported as any other."""
        self._send(KillWorker(worker_id=worker_id))

    def fileno(self) -> int:
        """Readable where `read_ends` has something to say."""
        return self._link.fileno()

    def read_ends(self) -> list[WorkerEnd]:
        """Workers that ended since the last call; does not block. ModelLoadError where the model parent has ended."""
        found: list[WorkerEnd] = []
        while _is_readable(self._link):
            ends = self._orders.receive()
            if ends is None:
                if found:
                    break  # the next call says it
                raise self._gone()
            found += ends
        return found

    def close(self) -> None:
        """End all model processes, and wait for the model parent. Safe to repeat."""
        self._link.close()
        if self._exit is None and not self._wait(CLOSE_PATIENCE_S):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._wait(CLOSE_PATIENCE_S)

    def __enter__(self) -> "ModelParent":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, order: FromServer, fd: int | None = None) -> None:
        try:
            send_order(self._link, order, fd)
        except (BrokenPipeError, ConnectionResetError) as fault:
            raise self._gone() from fault

    def _gone(self) -> ModelLoadError:
        self._wait(CLOSE_PATIENCE_S)
        fault = ModelLoadError(
            f"the parent of the model workers ended: {self._exit or 'its exit status is unknown'}"
        )
        if self._exit is not None and self._exit.startswith("SIG"):
            fault.cause = self._exit
        return fault

    def _wait(self, patience_s: float) -> bool:
        deadline, poll = time.monotonic() + patience_s, DoublingDelay(FIRST_POLL_S, MAX_POLL_S)
        while self._exit is None:
            try:
                pid, status = os.waitpid(self._pid, os.WNOHANG)
            except ChildProcessError:
                self._exit = ""
                break
            if pid:
                code = os.waitstatus_to_exitcode(status)
                self._exit = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                break
            if time.monotonic() > deadline:
                return False
            time.sleep(poll.next_s())
        return True


def _require_one_thread() -> None:
    """A fork of a process with threads may hold their locks for ever."""
    num_threads = count_threads()
    if num_threads > 1:
        raise RuntimeError(
            f"the model parent must be started first: this process has {num_threads} threads already"
        )


def _is_readable(link: socket.socket) -> bool:
    poll = select.poll()
    poll.register(link, select.POLLIN)
    return bool(poll.poll(0))
