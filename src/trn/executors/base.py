"""What an executor is: a plan goes in, a worker with an opaque reference comes out, and one day its exit.

The plan is pure data that can be printed. An attempt is named by its key, and at most one process can ever stand for
a key: the worker makes the attempt's record file before it does anything else, and giving up an attempt makes
the same file first, so that only one of the two can. Record and exit carry the submission's nonce: those of another
submission are not believed.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import msgspec

from gen_worker.errors import Fault
from trn.core.causes import Cause
from trn.core.errors import UnavailableError
from trn.core.home import Home

NO_SECRETS: Mapping[str, str] = MappingProxyType({})


class AttemptKey(msgspec.Struct, frozen=True):
    """One attempt of one submission: a run of another one may have had the same id."""

    run_id: str
    number: int
    nonce: str = ""

    def __str__(self) -> str:
        return f"{self.run_id}#{self.number}"


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """What every executor is built with, besides the options of its pool."""

    pool: str  # its name
    home: Home
    start_timeout_s: float
    worker_open_files: int | None = None  # the limit that workers get; None: the daemon's own


class LaunchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All that starts one attempt's worker."""

    run_id: str
    number: int
    argv: tuple[str, ...]  # for a cold start; a warm one runs the same module in a fork
    env: dict[str, str]  # laid over the launcher's own environment
    cwd: str
    code_dir: str  # first on the worker's import path; empty: none
    log_path: str  # stdout and stderr, appended
    attempt_dir: str  # its record and its exit are made here
    checkpoints_dir: str
    events_path: str
    trainer: str  # module:symbol, for the events of one that could not say it
    is_warm: bool
    is_writer_wanted: bool = True  # a warm worker forks its checkpoint writer first of all
    frozen_from: str = ""  # the folder that `code_dir` is a frozen copy of; empty: it is none
    nonce: str = ""  # of the submission: all that the worker leaves carries it
    devices: tuple[str, ...] = ()  # what the attempt holds, for its record
    cpus: int = 1
    memory_mb: int = 0
    gpus: int = 0  # in another pool than `local`: so many that its executor has to give it

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(self.run_id, self.number, self.nonce)


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that was started. `ref` is opaque: its executor finds the worker by it, also after a restart."""

    ref: str
    pid: int = 0  # of its process on this machine, for people alone; 0: it is elsewhere

    def __str__(self) -> str:
        return f"process {self.pid}" if self.pid else f"worker {self.ref}"


class FoundWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker of which some process lives: where, and what its record says of it."""

    run_id: str  # whose folder it is in
    worker: Worker
    number: int = 0  # of its attempt; 0: its record is gone
    nonce: str = ""
    devices: tuple[str, ...] = ()
    cpus: int = 1
    memory_mb: int = 0


class WorkerExit(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker's process ended. The code is None if it is not known."""

    exit_code: int | None = None  # negative: ended by that signal
    is_out_of_memory: bool = False  # the system says that it killed it for memory
    is_reboot: bool = False  # the machine went down under it
    detail: str = ""


class ImportCheck(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong with the author's code or the data, or the problem that prevented the check."""

    faults: tuple[Fault, ...] = ()
    problem: str = ""


class LaunchUnknownError(UnavailableError):
    """Whether the worker started is not known: `find` tells."""


class RunFile(Protocol):
    """A file that a worker writes, wherever that is. Its methods block, and raise OSErrors."""

    def size(self) -> int:
        """In bytes; 0 where there is no such file."""
        ...

    def read(self, offset: int, max_bytes: int) -> bytes:
        """From the offset on; empty at the end, and where there is none."""
        ...


class AttemptStart(NamedTuple):
    """Where in a run's log the output of an attempt begins."""

    offset: int
    number: int


class RunFiles(Protocol):
    """What workers write, by run."""

    def events(self, run_id: str) -> RunFile: ...

    def log(self, run_id: str) -> RunFile: ...

    def log_starts(self, run_id: str, offset: int) -> Sequence[AttemptStart]:
        """Of the attempts that printed at that offset of the log or after it, in order. Blocks."""
        ...


class FilesByPool(Protocol):
    """What workers write, by pool."""

    def of(self, pool: str) -> RunFiles:
        """UnavailableError if there is no such pool any more."""
        ...


class Executor(RunFiles, Protocol):
    """Starts and ends workers. All calls are safe to repeat, and to make after a restart of the daemon."""

    async def start(self) -> None:
        """Once, before all others. Does not wait for the place where workers run, and does not fail if it is down."""
        ...

    async def aclose(self) -> None:
        """Once, after all others. Workers keep running."""
        ...

    def state(self) -> str:
        """In words, for people."""
        ...

    async def launch(self, plan: LaunchPlan, secret_env: Mapping[str, str] = NO_SECRETS) -> Worker:
        """Start it, or return the worker that this attempt already has.

        `secret_env` is no part of the plan, which is printed and compared: it reaches the worker's environment alone.

        UnavailableError where it certainly does not run and never will; LaunchUnknownError where that is not known.
        """
        ...

    def worker_environ(self) -> Mapping[str, str]:
        """What every worker inherits, before its plan is laid over it."""
        ...

    async def check_imports(
        self, plan: LaunchPlan, config: dict[str, Any], secret_env: Mapping[str, str] = NO_SECRETS
    ) -> ImportCheck:
        """Load the code that the job names where the plan's worker would, and nothing more. Never raises."""
        ...

    async def find(self, key: AttemptKey) -> Worker | None:
        """The attempt's worker, alive or ended. None: it never started, and from now on cannot."""
        ...

    async def find_workers(self) -> Sequence[FoundWorker]:
        """Every live worker, also unknown ones. OSError, UnavailableError if that cannot be found out."""
        ...

    async def wait(self, key: AttemptKey, worker: Worker) -> WorkerExit:
        """Returns once the worker has ended and how is known, as far as it can be. May be cancelled."""
        ...

    async def stop(self, worker: Worker) -> bool:
        """Ask the worker to save and exit (SIGTERM); False where it is gone."""
        ...

    async def notify(self, worker: Worker) -> bool:
        """Ask a worker to look at what is wanted of it now (SIGUSR1); False where it is gone.

        Only for one that said that it hears this: it ends any other.
        """
        ...

    async def end(self, worker: Worker) -> None:
        """Kill the worker and everything that it started, until nothing is left.

        UnavailableError where something cannot be ended (and so still holds its devices).
        """
        ...

    async def close_attempt(self, plan: LaunchPlan, *, category: str, error: str, cause: Cause) -> bool:
        """Write the attempt's terminal event if it wrote none itself. False where that could not be done."""
        ...
