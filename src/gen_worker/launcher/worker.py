"""What a launcher's child does between its fork and its work.

A child first drops the launcher's session, signals, descriptors and random state. A worker then opens its log, enters its
folder, creates the attempt's record and continues like a new interpreter. It reports its start through a pipe.
"""

import atexit
import contextlib
import ctypes
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import msgspec

from gen_worker import entrypoint
from gen_worker.contract.files.regular import open_regular
from gen_worker.contract.process_identity import boot_id, read_process
from gen_worker.errors import Fault
from gen_worker.frozen_imports import frozen_variables
from gen_worker.launcher.attempt_records import AttemptRecord, claim, record_path
from gen_worker.launcher.messages import Close, TryImports, WorkerPlan, encode
from gen_worker.launcher.process_family import PROCESS_MARK, hold_mark, process_mark

NO_EXEC = 127  # as in shells
PR_SET_PDEATHSIG = 1

_not_ours: list[Any] = []  # never freed


class StartReport(msgspec.Struct, frozen=True, kw_only=True):
    """From the child to the launcher, one a line."""

    is_claimed: bool = False
    is_taken: bool = False  # the record existed already
    is_done: bool = False  # of a child that is not a worker
    error: str = ""
    faults: tuple[dict[str, str], ...] = ()  # of the author's code and the data, as `Fault.to_data`


class Ground(NamedTuple):
    """What a new interpreter would start with."""

    import_path: Sequence[str]
    environ: dict[str, str]
    open_files: int | None = None  # its limit; None: that of the launcher


def become_worker(plan: WorkerPlan, report_fd: int, ground: Ground) -> NoReturn:
    """Never returns."""

    def work() -> int:
        os.setsid()
        _shed_launcher(keep_fd=report_fd, open_files=ground.open_files)
        environ_of_worker = _lay_over(ground.environ, plan)
        try:
            _open_log(plan.log_path)
            _enter(plan, environ_of_worker)
        except OSError as fault:
            return _tell(report_fd, StartReport(error=_words(fault)))
        pid = os.getpid()
        state = read_process(pid)
        ticks = None if state is None else state.start_ticks
        log_offset = os.fstat(1).st_size
        record = AttemptRecord(
            nonce=plan.nonce,
            boot_id=boot_id(),
            pid=pid,
            start_ticks=ticks,
            log_offset=log_offset,
            devices=plan.devices,
            cpus=plan.cpus,
            memory_mb=plan.memory_mb,
        )
        try:
            is_ours = claim(record_path(plan.attempt_dir, plan.number), record)
        except OSError as fault:
            return _tell(report_fd, StartReport(error=f"the attempt cannot be recorded: {_words(fault)}"))
        if not is_ours:
            return _tell(report_fd, StartReport(is_taken=True))
        _tell(report_fd, StartReport(is_claimed=True))
        environ_of_worker[PROCESS_MARK] = process_mark(pid, ticks)
        hold_mark(environ_of_worker[PROCESS_MARK])
        if not plan.is_warm:
            _exec(plan, environ_of_worker, report_fd)
        os.close(report_fd)
        _prepare_interpreter(plan, ground.import_path, environ_of_worker)
        return entrypoint.main()

    _run_to_exit(work)


def become_importer(request: TryImports, report_fd: int, ground: Ground) -> NoReturn:
    """Never returns. Imports the author's code as the plan's worker would, and reports the faults.

    It and everything that the author's modules start is killed after the answer, or when the launcher exits.
    """
    plan = request.plan

    def work() -> int:
        _die_with_parent()
        os.setsid()
        _shed_launcher(keep_fd=report_fd, open_files=ground.open_files)
        environ = _lay_over(ground.environ, plan)
        state = read_process(os.getpid())
        environ[PROCESS_MARK] = process_mark(os.getpid(), None if state is None else state.start_ticks)
        hold_mark(environ[PROCESS_MARK])
        try:
            _open_log(os.devnull)
            _enter(plan, environ)
        except OSError as fault:
            return _tell(report_fd, StartReport(is_done=True, faults=(_trainer_fault(_words(fault)),)))
        try:
            if plan.is_warm:
                _prepare_interpreter(plan, ground.import_path, environ)
                from gen_worker.launcher.import_check import find_import_faults

                faults = [found.to_data() for found in find_import_faults(request.config)]
            else:
                faults = _ask_interpreter(request, environ)
        except Exception as fault:  # ours: errors of the author's modules are among the faults
            return _tell(report_fd, StartReport(error=f"{type(fault).__name__}: {_words(fault)}"))
        _tell(report_fd, StartReport(is_done=True, faults=tuple(faults)))
        os.killpg(0, signal.SIGKILL)
        return 0

    _run_to_exit(work)


def _trainer_fault(words: str) -> dict[str, str]:
    return Fault(words, path="trainer", kind="code").to_data()


def _ask_interpreter(request: TryImports, environ: dict[str, str]) -> list[dict[str, str]]:
    """The same in another Python; an exit without an answer is a fault too."""
    python = request.plan.argv[0]
    # Files: processes that the author's modules start may keep a pipe open.
    with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as words:
        done = subprocess.run(
            [python, "-P", "-m", "gen_worker.launcher.import_check"],
            input=encode(request.config),
            stdout=answer,
            stderr=words,
            env=environ,
            preexec_fn=_die_with_parent,
            check=False,
        )
        answer.seek(0)
        with contextlib.suppress(msgspec.MsgspecError):
            found = msgspec.json.decode(
                answer.read(), type=list[dict[str, str] | str]
            )  # text: of an older release
            return [{"text": fault} if isinstance(fault, str) else fault for fault in found]
        words.seek(0)
        said = words.read().decode(errors="replace").strip().splitlines()
    last = (said or ["no output"])[-1]
    return [_trainer_fault(f"{python} ended with {done.returncode} when it was to import it: {last}")]


def become_closer(request: Close, report_fd: int) -> NoReturn:
    """Never returns. Writes the terminal event of an attempt that has ended, and reports whether it could."""

    def work() -> int:
        os.setsid()
        _shed_launcher(keep_fd=report_fd)
        try:
            from gen_worker.errors import Category
            from gen_worker.trainer.attempt.child_attempt import close_attempt

            plan = request.plan
            folder = Path(plan.attempt_dir).parent
            close_attempt(
                run_id=plan.run_id,
                attempt=plan.number,
                nonce=plan.nonce,
                checkpoints_dir=Path(plan.checkpoints_dir or folder / "checkpoints"),
                events_path=Path(plan.events_path or folder / "metrics" / "events.jsonl"),
                trainer=plan.trainer or None,
                category=Category(request.category),
                error=request.error,
                cause=request.cause,
                fault=request.fault,
                values=request.values,
                doorbell=plan.env.get("TRAINER_DOORBELL") or None,
            )
        except Exception as fault:  # the client must get an answer
            return _tell(report_fd, StartReport(error=_words(fault)))
        _tell(report_fd, StartReport(is_done=True))
        # The exit functions of the launcher's libraries take longer than the work, and the client waits.
        os._exit(0)

    _run_to_exit(work)


def _shed_launcher(*, keep_fd: int, open_files: int | None = None) -> None:
    """Drop the launcher's signal handlers and descriptors. Signals were blocked before the fork."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        with contextlib.suppress(OSError, ValueError, TypeError):
            signal.signal(number, signal.SIG_DFL)
    # As in a new interpreter.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in ("SIGPIPE", "SIGXFSZ"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    os.closerange(3, keep_fd)
    os.closerange(keep_fd + 1, _max_fd())
    if open_files is not None:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (open_files, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
            )
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _die_with_parent() -> None:
    """The launcher ends this process at its deadline; if it dies first, the system does."""
    with contextlib.suppress(OSError, AttributeError):  # Linux
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _max_fd() -> int:
    try:
        return max(map(int, os.listdir("/proc/self/fd"))) + 1  # noqa: PTH208
    except OSError:
        return os.sysconf("SC_OPEN_MAX")


def _lay_over(environ: dict[str, str], plan: WorkerPlan) -> dict[str, str]:
    laid = {**environ, **plan.env}
    if plan.code_dir:
        # Also for what this process starts: the run's code comes first, the current folder is left out.
        paths = [path for path in laid.get("PYTHONPATH", "").split(os.pathsep) if path]
        laid["PYTHONPATH"] = os.pathsep.join([plan.code_dir, *(p for p in paths if p != plan.code_dir)])
        laid["PYTHONSAFEPATH"] = "1"
        laid |= frozen_variables(plan.frozen_from, plan.code_dir)
    return laid


def _open_log(log_path: str) -> None:
    if log_path == os.devnull:
        log = os.open(log_path, os.O_WRONLY | os.O_CLOEXEC)
    else:
        log = open_regular(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.close(null)


def _enter(plan: WorkerPlan, environ: dict[str, str]) -> None:
    """OSError where the worker's folder or program does not exist."""
    os.chdir(plan.cwd)
    if not plan.is_warm and shutil.which(plan.argv[0], path=environ.get("PATH")) is None:
        raise FileNotFoundError(2, "No such program", plan.argv[0])


def _exec(plan: WorkerPlan, environ: dict[str, str], report_fd: int) -> NoReturn:
    for name in ("SIGINT", "SIGPIPE", "SIGXFSZ"):  # ignored signals stay ignored after exec
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvpe(plan.argv[0], plan.argv, environ)  # noqa: S606
    except OSError as fault:
        _tell(report_fd, StartReport(error=_words(fault)))
    os._exit(NO_EXEC)


def _prepare_interpreter(plan: WorkerPlan, import_path: Sequence[str], environ: dict[str, str]) -> None:
    """Set what a new interpreter has: environment, import path, arguments, threads, random numbers."""
    for name in [name for name in os.environ if name not in environ]:
        del os.environ[name]
    os.environ.update({name: value for name, value in environ.items() if os.environ.get(name) != value})
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*given, *import_path]
    sys.modules["__main__"] = entrypoint
    sys.argv = [entrypoint.__file__]
    # The launcher's finalizers are not the worker's; to run them copies 30 MB. There is no public way to drop them.
    _not_ours.append(weakref.finalize._registry)  # type: ignore[attr-defined]
    weakref.finalize._registry = {}  # type: ignore[attr-defined]
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed()  # else forks would draw the same numbers; `random` reseeds itself
    threads = plan.env.get("OMP_NUM_THREADS", "")
    if torch is not None and threads.isdecimal() and int(threads) > 0:
        torch.set_num_threads(int(threads))  # it read the variable at its import
    if plan.is_writer_wanted and numpy is not None and torch is not None:
        from gen_worker.trainer.checkpoints.writing import warm_writer

        with contextlib.suppress(OSError):  # then the worker starts one itself
            warm_writer.prepare()


def _run_to_exit(work: Callable[[], int]) -> NoReturn:
    """Run it and exit like an interpreter, without unwinding into the launcher's frames."""
    code = 1
    try:
        try:
            code = work()
        except SystemExit as exit_:
            code = _exit_code(exit_.code)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        # The end of a main module, without the seconds that freeing torch's modules takes. There is no public way:
        # to join the threads alone would wait for ever for the idle ones of a ThreadPoolExecutor.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code & 0xFF)


def _exit_code(code: str | int | None) -> int:
    if code is None or isinstance(code, int):
        return code or 0
    sys.stderr.write(f"{code}\n")
    return 1


def _tell(report_fd: int, report: StartReport) -> int:
    """Returns the exit code of a child that exits with this report."""
    with contextlib.suppress(OSError):  # the launcher may have exited; the record counts
        os.write(report_fd, encode(report) + b"\n")
    return 1 if report.error else 0


def _words(fault: BaseException) -> str:
    if isinstance(fault, OSError) and fault.strerror:
        return f"{fault.strerror}: {fault.filename}" if fault.filename else fault.strerror
    return str(fault) or type(fault).__name__
