"""Programs of a home that run in the background, one of each: the daemon, the gateway.

A process that starts one holds a lock meanwhile; others wait for it, so ten at once start one. The program's own lock
decides if two are started all the same.
"""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

from trn.core.errors import AlreadyRunningError, UnavailableError
from trn.core.home import Home
from trn.core.variables import without_workers_variables

START_PATIENCE_S = 60.0
LOOK_EVERY_S = 0.02
GAVE_WAY_S = 0.5  # before another is started beside one that holds the home and does not answer yet
MAX_OUTPUT_BYTES = 1 << 20


class Running(Protocol):
    @property
    def pid(self) -> int: ...


R = TypeVar("R", bound=Running)


class Program(NamedTuple, Generic[R]):
    """How to find and start it. It refuses to start with a line `trn: …` on stderr."""

    name: str
    module: str
    arguments: Sequence[str]  # after `--home`; others can read them
    find: Callable[[], R | None]  # the one that answers now
    output: Path  # of its start; its log has the rest
    lock: Path
    log: Path
    variables: Mapping[str, str]  # that it gets besides ours; others cannot read them


def ensure_running(
    program: Program[R], home: Home, *, patience_s: float = START_PATIENCE_S
) -> tuple[R, bool]:
    """(the one that runs, whether it was started here). Blocks until it answers.

    UnavailableError, with the program's own message, if it refuses to start.
    """
    found = program.find()
    if found is not None:
        return found, False
    home.make()
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        with _start_lock(program, home) as is_held:
            found = program.find()
            if found is not None:
                return found, False
            started = _start(program, home, deadline) if is_held else None
            if started is not None:
                return started
        time.sleep(GAVE_WAY_S if is_held else LOOK_EVERY_S)
    raise UnavailableError(
        f"no {program.name} of {home.root} answers after {patience_s:g} s: see {program.log} and {program.output}"
    )


def _start(program: Program[R], home: Home, deadline: float) -> tuple[R, bool] | None:
    """None if it gave way to another one."""
    process, begin = _spawn(program, home)
    while time.monotonic() < deadline:
        is_over = process.poll() is not None
        found = program.find()
        if found is not None:
            # A caller that lives long, such as a notebook, must reap it later.
            threading.Thread(target=process.wait, name=f"{program.name}-reaper", daemon=True).start()
            return found, found.pid == process.pid
        if is_over:
            if process.returncode == AlreadyRunningError.daemon_exit_code:
                return None  # wait for that one
            said = _read_from(program.output, begin)
            raise UnavailableError(_refusal(program, said, home, process.returncode))
        time.sleep(LOOK_EVERY_S)
    process.kill()  # each of them may be killed at any moment
    process.wait()
    return None


def _spawn(program: Program[R], home: Home) -> "tuple[subprocess.Popen[bytes], int]":
    # -P: do not import modules from the current folder.
    command = [sys.executable, "-P", "-m", program.module, "--home", str(home.root), *program.arguments]
    path = program.output
    try:
        with path.open("ab") as file:
            if path.stat().st_size > MAX_OUTPUT_BYTES:  # the program's log has it all
                file.truncate(0)
            begin = path.stat().st_size
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                cwd=home.root,
                env={**_inherited(), **program.variables},
                start_new_session=True,
            )
            return process, begin
    except OSError as fault:
        if fault.filename == str(path):
            raise home.unwritable(fault) from fault
        raise UnavailableError(f"no {program.name} can be started: {fault}") from fault


def _inherited() -> dict[str, str]:
    environ = without_workers_variables(os.environ)
    if (
        environ.get("GRPC_VERBOSITY") == "NONE"
    ):  # the command's, for its terminal; workers inherit what a daemon has
        del environ["GRPC_VERBOSITY"]
    return environ


@contextlib.contextmanager
def _start_lock(program: Program[R], home: Home) -> Iterator[bool]:
    """Whether we hold it: its holder starts the program, the others wait for that one."""
    import fcntl

    try:
        file = program.lock.open("ab")
    except OSError as fault:
        raise home.unwritable(fault) from fault
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_held = True
        except BlockingIOError:
            is_held = False
        yield is_held


def _read_from(path: Path, begin: int) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(begin)
        return file.read(MAX_OUTPUT_BYTES).decode(errors="replace")
    return ""


def _refusal(program: Program[R], said: str, home: Home, exit_code: int) -> str:
    """The program's own message, which begins with `trn: `; else its last line."""
    _, mark, words = said.rpartition("trn: ")
    if mark and words.strip():
        return words.strip()
    import shutil

    from gen_worker.contract.sizes import show_bytes

    free_bytes = shutil.disk_usage(home.root).free
    if not said.strip() and free_bytes < MAX_OUTPUT_BYTES:
        return (
            f"the {program.name} did not start: {home.root} has {show_bytes(free_bytes)} free, too little even for an"
            " error message"
        )
    last = (said.strip().splitlines() or ["no output"])[-1]
    return f"the {program.name} exited with {exit_code} instead of starting: {last}; see {program.log}"
