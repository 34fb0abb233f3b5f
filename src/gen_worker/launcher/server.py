"""`python -m gen_worker.launcher --folder F`: a warm parent that forks workers, reaps them and records how they ended.

It has the heavy modules imported, one thread and no gRPC, so a worker costs one fork. It is independent of daemons and
stays while it has workers; if it dies, they stay. What others need is in files: the attempt's record (written by the
worker) and its exit (written here, before the process is reaped).

A fork is safe only with these library threads: OpenBLAS (numpy) ends its own before each fork, jemalloc (pyarrow) holds
its locks over the fork, and torch starts its threads with the first operator, which never runs here. A module that
starts other threads must not be warm.
"""

import argparse
import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import secrets
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from gen_worker.contract.files.durable import replace_file
from gen_worker.contract.job.rules import parse_job_spec, spec_digest
from gen_worker.contract.process_identity import boot_id, read_process
from gen_worker.frozen_imports import note_warm_modules
from gen_worker.launcher.attempt_records import ForeignRecordError, read_record, record_path
from gen_worker.launcher.channel import Channel
from gen_worker.launcher.children import Children, as_reply, say
from gen_worker.launcher.messages import (
    AnyRequest,
    Close,
    Hello,
    Launch,
    LauncherInfo,
    List,
    Refused,
    Retire,
    Retired,
    TryImports,
    Welcome,
    Worker,
    Workers,
    code_stamp,
    encode,
    read_id,
    request_decoder,
)
from gen_worker.launcher.worker import Ground, become_closer, become_importer, become_worker

TICK_S = 5.0
BUSY_TICK_S = 0.2
CLOSE_PATIENCE_S = 90.0  # the checkpoint writer of a dead worker may take up to 60 s
IMPORT_PATIENCE_S = 60.0
PR_SET_CHILD_SUBREAPER = 36
MADV_COLLAPSE = 25  # Linux 6.1; others refuse it
PAGE_BYTES = 2 << 20
SMALL_JOB = {"run_id": "small", "trainer": "module:Class", "mock_batches": [0]}

# What a worker imports before the author's code.
WARM_MODULES = (
    "numpy",
    "numpy.ma",  # pyarrow imports it with the first array of numpy
    "torch",
    "torch._dynamo",  # the first optimizer imports it, which takes a second
    "pyarrow.parquet",
    "gen_worker.trainer.runtime",
    "gen_worker.trainer.arrow_feed",
    "gen_worker.launcher.import_check",
    "gen_worker.trainer.checkpoints.writing.writer",
    "gen_worker.trainer.checkpoints.writing.warm_writer",
    "gen_worker.trainer.datasets.shard_loader",
    "gen_worker.trainer.feed.tensors",
    "gen_worker.inference.server",
    "gen_worker.inference.model.template",
)


class Launcher:
    """`listen`, `warm_up`, `run`: in this order, in one thread. The current folder is its folder."""

    def __init__(self, folder: Path, *, idle_exit_s: float, worker_open_files: int | None = None) -> None:
        self.folder = folder
        self._worker_open_files = worker_open_files
        self._idle_exit_s = idle_exit_s
        self._instance = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._inode = folder.stat().st_ino
        self._environ = dict(os.environ)
        self._import_path = _import_path_without(self._environ.get("PYTHONPATH", ""))
        self._stamp = code_stamp()
        self._selector = selectors.DefaultSelector()
        self._channels: dict[int, Channel] = {}
        self._children = Children(self._selector, self._reply, self._announce)
        self._is_retired = False
        self._last_asked_at = time.monotonic()

    def listen(self) -> None:
        """Before the long imports: clients may connect meanwhile, and wait."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        old = os.umask(0o177)
        try:
            listener.bind(f"{self._instance}.sock")  # relative: no folder is too deep
        finally:
            os.umask(old)
        listener.listen(64)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))
        self._publish(is_warm=False)

    def _publish(self, *, is_warm: bool) -> None:
        state = read_process(os.getpid())
        info = LauncherInfo(
            pid=os.getpid(),
            start_ticks=None if state is None else state.start_ticks,
            boot_id=boot_id(),
            socket=f"{self._instance}.sock",
            stamp=self._stamp,
            is_warm=is_warm,
        )
        replace_file(Path(f"{self._instance}.json"), encode(info), sync="file", mode=0o600)

    def warm_up(self, modules: Sequence[str]) -> None:
        """Import what every worker imports, where it is installed."""
        for name in modules:
            try:
                importlib.import_module(name)
            except ImportError as fault:
                say(f"{name} is not warm: {fault}")
        runtime = sys.modules.get("gen_worker.trainer.attempt.worker_runtime")
        if runtime is not None:
            runtime.set_log_levels()
        # What is found out once about the types of a job: each worker would do it anew.
        spec_digest(parse_job_spec(SMALL_JOB, source="a small job"))
        note_warm_modules()
        dynamo = sys.modules.get("torch._dynamo.utils")
        if (
            dynamo is not None
        ):  # at its end each worker would look for `tabulate` in all folders, to log no time
            atexit.unregister(dynamo.dump_compile_times)
        gc.collect()
        gc.freeze()  # else a collection in a child would copy all pages
        _collapse_pages()
        with contextlib.suppress(OSError):  # then clients only wait longer
            self._publish(is_warm=True)

    def run(self) -> None:
        """Until no worker and no client is left."""
        waker = _take_signals(self._retire)
        self._selector.register(waker, selectors.EVENT_READ, lambda: _drain(waker))
        while not self._is_over():
            tick_s = BUSY_TICK_S if self._children.is_busy else min(TICK_S, self._idle_exit_s)
            for key, events in self._selector.select(tick_s):
                if isinstance(key.data, Channel):
                    self._serve(key.data, events)
                else:
                    key.data()
            self._children.reap()
            self._children.look_after()
        self._leave()

    def _is_over(self) -> bool:
        if not self._is_home():
            return True
        if self._children:
            return False
        if self._is_retired:
            return not any(channel.has_unsent for channel in self._channels.values())
        return not self._channels and time.monotonic() - self._last_asked_at > self._idle_exit_s

    def _is_home(self) -> bool:
        try:
            return self.folder.stat().st_ino == self._inode
        except OSError:
            return False

    def _leave(self) -> None:
        for name in (f"{self._instance}.json", f"{self._instance}.sock"):
            Path(name).unlink(missing_ok=True)

    def _retire(self) -> None:
        self._is_retired = True

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            channel = Channel(connection)
            self._channels[connection.fileno()] = channel
            self._selector.register(connection, selectors.EVENT_READ, channel)

    def _serve(self, channel: Channel, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            channel.flush()
        if events & selectors.EVENT_READ:
            for line in channel.receive():
                self._last_asked_at = time.monotonic()
                self._answer(channel, line)
        self._keep(channel)

    def _keep(self, channel: Channel) -> None:
        """Update what the selector watches, or close a lost channel."""
        fd = channel.socket.fileno()
        if fd not in self._channels:
            return
        if channel.is_lost:
            self._selector.unregister(channel.socket)
            del self._channels[fd]
            channel.socket.close()
            self._last_asked_at = time.monotonic()
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.has_unsent else 0)
        if self._selector.get_key(channel.socket).events != wanted:
            self._selector.modify(channel.socket, wanted, channel)

    def _reply(self, channel: Channel, message: msgspec.Struct) -> None:
        if not channel.is_lost:
            channel.send(message)
            self._keep(channel)

    def _announce(self, message: msgspec.Struct) -> None:
        for channel in list(self._channels.values()):
            self._reply(channel, message)

    def _answer(self, channel: Channel, line: bytes) -> None:
        try:
            request: AnyRequest = request_decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as fault:
            self._reply(channel, Refused(id=read_id(line), message=f"invalid request: {fault}"))
            return
        try:
            self._do(channel, request)
        except OSError as fault:
            self._reply(channel, Refused(id=request.id, message=f"failed: {fault}"))

    def _do(self, channel: Channel, request: AnyRequest) -> None:
        match request:
            case Hello():
                welcome = Welcome(
                    id=request.id,
                    pid=os.getpid(),
                    stamp=self._stamp,
                    is_retired=self._is_retired,
                    environ=self._environ,
                )
                self._reply(channel, welcome)
            case Launch():
                self._launch(channel, request)
            case Close():
                child = self._children.fork(request, lambda fd: become_closer(request, fd))
                child.deadline = time.monotonic() + CLOSE_PATIENCE_S
                child.waiting.append((channel, request.id))
            case TryImports():
                child = self._children.fork(
                    request, lambda fd: become_importer(request, fd, self._ground(request))
                )
                child.deadline = time.monotonic() + IMPORT_PATIENCE_S
                child.waiting.append((channel, request.id))
            case List():
                workers = tuple(
                    Worker(run_id=child.plan.run_id, number=child.plan.number, pid=pid)
                    for pid, child in self._children.workers().items()
                    if child.is_claimed
                )
                self._reply(channel, Workers(id=request.id, workers=workers))
            case Retire():
                self._retire()
                self._reply(channel, Retired(id=request.id, num_workers=len(self._children.workers())))

    def _ground(self, request: Launch | TryImports) -> Ground:
        environ = dict(os.environ) if request.plan.is_warm else self._environ
        return Ground(
            import_path=self._import_path,
            environ={**environ, **request.secret_env},
            open_files=self._worker_open_files,
        )

    def _launch(self, channel: Channel, request: Launch) -> None:
        plan = request.plan
        starting = self._children.find_starting(plan)
        if starting is not None:
            starting.waiting.append((channel, request.id))
            return
        try:
            record = read_record(record_path(plan.attempt_dir, plan.number), plan.nonce)
        except ForeignRecordError as fault:
            self._reply(channel, Refused(id=request.id, message=str(fault)))
            return
        if record is not None:
            self._reply(channel, as_reply(request.id, record))
        elif self._children.is_hopeless(plan):
            self._reply(channel, Refused(id=request.id, message="this attempt already failed to start"))
        elif self._is_retired:
            text = "this launcher is retired: it starts no more workers"
            self._reply(channel, Refused(id=request.id, message=text, is_retired=True))
        else:
            try:
                child = self._children.fork(
                    request, lambda fd: become_worker(plan, fd, self._ground(request))
                )
            except OSError as fault:
                record = self._children.give_up(plan)
                self._reply(
                    channel, as_reply(request.id, record, f"no process can be started: {fault.strerror}")
                )
            else:
                child.waiting.append((channel, request.id))


def _import_path_without(given: str) -> list[str]:
    """The import path of a new interpreter, without PYTHONPATH and the folder of its script."""
    named = {os.path.abspath(path) for path in given.split(os.pathsep) if path}  # noqa: PTH100
    start = 0 if sys.flags.safe_path else 1
    return [path for path in sys.path[start:] if os.path.abspath(path) not in named]  # noqa: PTH100


def _take_signals(retire: Callable[[], None]) -> socket.socket:
    """SIGCHLD and SIGTERM wake the loop."""
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setblocking(False)
    signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    _kept.append(theirs)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: retire())
    return ours


_kept: list[socket.socket] = []  # open until the process exits


def _drain(waker: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        while waker.recv(4096):
            pass


def _collapse_pages() -> None:
    """Use large pages for the heap: a fork copies the page table, and takes a third of the time."""
    with contextlib.suppress(OSError, AttributeError, ValueError):
        libc = ctypes.CDLL(None)
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, access, _, device, *rest = line.split()
            if access != "rw-p" or device != "00:00" or (len(rest) > 1 and rest[1] != "[heap]"):
                continue
            start, end = (int(text, 16) for text in span.split("-"))
            for address in range(-(-start // PAGE_BYTES) * PAGE_BYTES, end - PAGE_BYTES + 1, PAGE_BYTES):
                libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(PAGE_BYTES), MADV_COLLAPSE)


def _adopt_orphans() -> None:
    """Orphans of workers become our children, and are reaped here."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def main(arguments: Sequence[str]) -> int:
    """Starts a detached launcher; returns when it listens."""
    parser = argparse.ArgumentParser(
        prog="gen_worker.launcher", description="Starts workers by forking a warm process."
    )
    parser.add_argument("--folder", type=Path, required=True, help="where it listens")
    parser.add_argument(
        "--idle-exit-s", type=float, default=600.0, help="exit after this time without workers and clients"
    )
    parser.add_argument(
        "--bare", action="store_true", help="import nothing in advance: slower starts, less memory"
    )
    parser.add_argument(
        "--worker-open-files", type=int, help="limit of open files of a worker (default: as here)"
    )
    options = parser.parse_args(arguments)
    ready_fd, tell_fd = os.pipe()
    if os.fork() > 0:
        os.close(tell_fd)
        return 0 if os.read(ready_fd, 1) else 1
    os.close(ready_fd)
    os.setsid()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    code = 1
    try:
        folder = options.folder.absolute()
        os.chdir(folder)
        _adopt_orphans()
        launcher = Launcher(
            folder, idle_exit_s=options.idle_exit_s, worker_open_files=options.worker_open_files
        )
        launcher.listen()
        os.write(tell_fd, b"1")
        os.close(tell_fd)
        launcher.warm_up(() if options.bare else WARM_MODULES)
        launcher.run()
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code)
