"""The model parent: one thread that forks templates, hands them orders, reaps all model processes and reports their ends.

It runs none of the author's code. A template gets the orders of its version. It becomes the worker of the first one and
leaves a copy of itself, which forks a worker for each further one; where it cannot be forked, every further order gets a
process that loads by itself. One process is kept ahead: it becomes the template of the next version with the same code.
"""

import contextlib
import gc
import importlib
import logging
import os
import select
import signal
import socket
import sys
from collections import deque
from typing import NoReturn

from gen_worker.contract.installed_packages import is_same_python
from gen_worker.contract.job.model_version import ModelVersion, VersionFacts
from gen_worker.errors import Category
from gen_worker.frozen_imports import note_warm_modules
from gen_worker.inference.frames import send_frame
from gen_worker.inference.messages import NotReady
from gen_worker.inference.model.children import Child, Ordered, code_of, describe_end, key_of
from gen_worker.inference.model.orders import (
    Ahead,
    Alone,
    BecameWorker,
    Forked,
    KillWorker,
    LaunchWorker,
    LeftTemplate,
    LoadFailed,
    OrderReader,
    Prepare,
    Retire,
    WorkerEnd,
    from_server_decoder,
    from_template_decoder,
    send_order,
)
from gen_worker.inference.model.process import (
    adopt_orphans,
    flush_output,
    run_to_exit,
    settle_in,
)

logger = logging.getLogger("gen_worker.inference")

MAX_STRANGERS = 1000
AHEAD_AFTER_MS = 100.0  # without an order: the end of a promotion comes first, and so does the next one
NO_VERSION = VersionFacts(run_id="", step=0, weights_hash="")
# What every template needs before the author's code, where it is installed.
WARM_MODULES = (
    "numpy",
    "numpy.ma",  # pyarrow imports it with the first array of numpy
    "torch",
    "pyarrow.parquet",
    "gen_worker.trainer.arrow_feed",  # of `batch_to_torch`, which most classes use
    "gen_worker.trainer.author.hooks",
    "gen_worker.trainer.author.plugin_import",
    "gen_worker.inference.model.template",
)
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def become_parent(link: socket.socket, server_pid: int) -> NoReturn:
    """Never returns."""

    def work() -> int:
        settle_in(server_pid)
        adopt_orphans()
        ParentProcess(link).run()
        return 0

    run_to_exit(work)


class ParentProcess:
    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._orders = OrderReader(link, from_server_decoder)
        self._templates: dict[int, Child] = {}  # by pid
        self._ahead: Child | None = None  # has no version yet
        self._next_code: ModelVersion | None = (
            None  # for which one is to be forked, when there is nothing else to do
        )
        self._seen: set[VersionFacts] = set()  # one version alone: nothing is kept ahead
        self._alone: dict[bytes, str] = {}  # versions that cannot be forked, and why
        self._workers: dict[int, int] = {}  # pid -> worker id
        self._pids: dict[int, int] = {}  # worker id -> pid
        self._strangers: dict[int, int] = {}  # pid -> wait status, of a worker that has no name yet
        self._unwritten: deque[WorkerEnd] = deque()
        self._poll = select.poll()
        self._waker, self._wake = socket.socketpair()

    def run(self) -> None:
        """Until the server closes its end."""
        for end in (self._waker, self._wake):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._poll.register(self._link, select.POLLIN)
        self._poll.register(self._waker, select.POLLIN)
        _warm_up()
        try:
            while self._turn():
                pass
        finally:
            self._end_all()
            signal.set_wakeup_fd(-1)
            for end in (
                self._link,
                self._waker,
                self._wake,
                *(each.link for each in self._templates.values()),
            ):
                end.close()

    def _turn(self) -> bool:
        """Wait, then do what there is to do. False at the end."""
        is_due = self._next_code is not None and not any(each.waiting for each in self._templates.values())
        ready = {fd for fd, _ in self._poll.poll(AHEAD_AFTER_MS if is_due else None)}
        if not ready:
            self._fork_ahead()
        if self._waker.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                while self._waker.recv(4096):
                    pass
        # Before the reaping: what a template said before it died counts.
        for template in list(self._templates.values()):
            if template.link.fileno() in ready:
                self._hear(template)
        self._reap()
        return self._link.fileno() not in ready or self._obey()

    def _obey(self) -> bool:
        try:
            orders = self._orders.receive()
        except ConnectionResetError:
            return False
        if orders is None:
            return False
        for order in orders:
            match order:
                case LaunchWorker():
                    self._launch(Ordered(order=order, fd=self._orders.take_fd()))
                case Prepare():
                    self._prepare(order)
                case Retire(version=version):
                    for template in list(self._templates.values()):
                        if template.version == version:
                            self._retire(template)
                case KillWorker(worker_id=worker_id):
                    pid = self._pids.get(worker_id)
                    if pid is not None:  # not reaped yet, so the pid is still its own
                        os.kill(pid, signal.SIGKILL)
        return True

    def _launch(self, ordered: Ordered) -> None:
        order = ordered.order
        key = key_of(order)
        template = self._find(key) if key not in self._alone else None
        if template is None:
            try:
                template = self._template_of(key, order.version, ordered.fd)
            except OSError as fault:
                words = f"no process can be started: {fault.strerror}"
                self._refuse(ordered, LoadFailed(category=Category.STARTUP, words=words))
                return
        template.waiting[order.worker_id] = ordered
        if key in self._alone:
            template.is_open = False
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it ended: seen when it is reaped
            send_order(template.link, order, ordered.fd)

    def _prepare(self, order: Prepare) -> None:
        key = key_of(order)
        if key in self._alone or self._find(key) is not None:
            return
        try:
            template = self._template_of(key, order.version)
        except OSError as fault:  # the order of a worker will say it
            logger.info("%s is not loaded ahead: %s", order.version.label, fault.strerror)
            return
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            send_order(template.link, order)

    def _find(self, key: bytes) -> Child | None:
        return next((each for each in self._templates.values() if each.key == key and each.is_open), None)

    def _template_of(self, key: bytes, version: ModelVersion, fd: int | None = None) -> Child:
        """A new one. `fd`: of the order that it gets first."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            if ahead.is_open and ahead.key == code_of(version) and key not in self._alone:
                ahead.key, ahead.version = key, version.facts
                return ahead
            self._close(ahead)
        return self._fork_template(key, version, fd)

    def _fork_ahead(self) -> None:
        version, self._next_code = self._next_code, None
        if version is None or (self._ahead is not None and self._ahead.is_open):
            return
        with contextlib.suppress(OSError):
            self._ahead = self._fork_template(code_of(version), version)
            self._ahead.is_ahead, self._ahead.version = True, NO_VERSION
            send_order(self._ahead.link, Ahead(version=version))

    def _fork_template(self, key: bytes, version: ModelVersion, fd: int | None = None) -> Child:
        ours, theirs = socket.socketpair()
        parent_pid = os.getpid()
        flush_output()
        try:
            pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            raise
        if pid == 0:
            self._become_template(ours, theirs, version, fd, parent_pid, is_alone=key in self._alone)
        theirs.close()
        template = Child(
            pid=pid,
            link=ours,
            orders=OrderReader(ours, from_template_decoder),
            key=key,
            version=version.facts,
        )
        self._templates[pid] = template
        self._poll.register(ours, select.POLLIN)
        return template

    def _become_template(
        self,
        ours: socket.socket,
        theirs: socket.socket,
        version: ModelVersion,
        fd: int | None,
        parent_pid: int,
        *,
        is_alone: bool,
    ) -> NoReturn:
        def work() -> int:
            settle_in(parent_pid)
            for end in (self._link, self._waker, self._wake, ours):
                end.close()
            # A copy of a link's end that stays open would hide the end of its worker.
            if fd is not None:
                os.close(fd)
            self._orders.close_fds()
            for other in self._templates.values():
                other.link.close()
                for one in other.waiting.values():
                    os.close(one.fd)
            interpreter = version.interpreter
            if interpreter and not is_same_python(interpreter, sys.executable):
                os.set_inheritable(theirs.fileno(), True)
                flag = ["--alone"] if is_alone else []
                module = "gen_worker.inference.model.template"
                arguments = [interpreter, "-P", "-m", module, str(theirs.fileno()), str(parent_pid), *flag]
                os.execv(interpreter, arguments)  # noqa: S606
            from gen_worker.inference.model.template import Template

            return Template(theirs, parent_pid, is_alone=is_alone).run()

        run_to_exit(work)

    def _hear(self, template: Child) -> None:
        try:
            said = template.orders.receive()
        except ConnectionResetError:
            said = None
        if said is None:
            self._close(template)
            if (
                template.is_copy or template.pid in self._workers
            ):  # nothing of it is reaped, and orders may wait
                self._templates.pop(template.pid, None)
                self._end_template(template, 0)
            return
        for message in said:
            match message:
                case Forked(worker_id=worker_id, pid=pid):
                    template.has_loaded = True
                    self._settle(template, worker_id, pid)
                case BecameWorker(worker_id=worker_id):
                    template.has_loaded = True
                    self._settle(template, worker_id, template.pid)
                case LeftTemplate(pid=pid):
                    template.is_copy = True
                    del self._templates[template.pid]
                    template.pid = pid
                    self._templates[pid] = template
                case Alone(worker_id=worker_id, reason=reason):
                    self._alone[template.key] = reason
                    self._settle(template, worker_id, template.pid)
                    del self._templates[template.pid]
                    self._close(template)
                    for ordered in template.waiting.values():
                        self._launch(ordered)
                    return
                case LoadFailed():
                    template.failure = message

    def _settle(self, template: Child, worker_id: int, pid: int) -> None:
        """That order has its worker."""
        ordered = template.waiting.pop(worker_id)
        os.close(ordered.fd)
        if len(self._seen) < 2:
            self._seen.add(template.version)
        if len(self._seen) == 2:
            self._next_code = ordered.order.version
        self._workers[pid] = worker_id
        self._pids[worker_id] = pid
        status = self._strangers.pop(pid, None)
        if status is not None and not _is_child(pid):  # else an earlier process had that number
            self._report_end(pid, status)

    def _close(self, template: Child) -> None:
        """It takes no more orders, and exits. Its end is seen when it is reaped."""
        template.is_open = False
        if template.link.fileno() >= 0:
            self._poll.unregister(template.link)
            template.link.close()

    def _retire(self, template: Child) -> None:
        """Nobody waits for what it was ordered any more: that is not loaded again when it ends."""
        self._close(template)
        if not template.has_loaded:  # whatever it does
            os.kill(template.pid, signal.SIGKILL)
        for ordered in template.waiting.values():
            words = f"{template.version.label} is not wanted any more"
            self._refuse(ordered, LoadFailed(category=Category.MODEL_LOAD, words=words))
        template.waiting.clear()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            template = self._templates.get(pid)
            if template is not None:
                while template.is_open and _is_readable(template.link):
                    self._hear(template)
            is_worker, template = pid in self._workers, self._templates.pop(pid, None)
            if is_worker:  # also one that was a template until now, and perhaps left none
                self._report_end(pid, status)
            if template is not None:
                self._end_template(template, status)
            elif not is_worker:
                self._strangers[pid] = status
                if len(self._strangers) > MAX_STRANGERS:  # the author's own processes
                    del self._strangers[next(iter(self._strangers))]

    def _end_template(self, template: Child, status: int) -> None:
        """Answer the orders that it leaves: loaded again where it had loaded, else refused."""
        self._close(template)
        failure = template.failure
        has_not_begun = template.is_ahead and not template.has_loaded and status == 0
        for ordered in template.waiting.values():
            if failure is None and (template.has_loaded or has_not_begun):
                self._launch(ordered)
                continue
            _, signal_name, words = describe_end(status)
            ending = LoadFailed(
                category=Category.MODEL_LOAD,
                words=f"the process that loads {template.version.label} {words}",
                cause=signal_name,
            )
            self._refuse(ordered, failure or ending)
        if failure is None and template.has_loaded and os.waitstatus_to_exitcode(status) != 0:
            logger.warning("the template of %s %s", template.version.label, describe_end(status)[2])

    def _refuse(self, ordered: Ordered, failure: LoadFailed) -> None:
        """In the place of a worker that never was."""
        with socket.socket(fileno=ordered.fd) as link, contextlib.suppress(OSError):
            refused = NotReady(category=failure.category, words=failure.words, cause=failure.cause)
            send_frame(link, refused)
        self._tell(WorkerEnd(worker_id=ordered.order.worker_id, exit_code=1, words=failure.words))

    def _report_end(self, pid: int, status: int) -> None:
        worker_id = self._workers.pop(pid)
        del self._pids[worker_id]
        exit_code, signal_name, words = describe_end(status)
        self._tell(
            WorkerEnd(
                worker_id=worker_id,
                exit_code=exit_code,
                signal=signal_name,
                words=f"the model worker {words}",
            )
        )

    def _tell(self, end: WorkerEnd) -> None:
        with contextlib.suppress(
            BrokenPipeError, ConnectionResetError
        ):  # the server ended: seen in the next turn
            send_order(self._link, end)

    def _end_all(self) -> None:
        """Kill them and wait, so that nothing of this server is left."""
        pids = [*self._workers, *self._templates]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _is_child(pid: int) -> bool:
    """Whether it lives, or has ended and is still to be reaped."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _warm_up() -> None:
    """Imported once for all templates. In a fork of a launcher all of it is there."""
    # An OpenBLAS starts its threads when it is imported. Workers set their number themselves.
    for name in _ONE_THREAD:
        os.environ.setdefault(name, "1")
    missing = [name for name in WARM_MODULES if name not in sys.modules]
    for name in missing:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if missing:  # else the launcher noted them: to look at each again would copy its memory
        note_warm_modules()
    gc.collect()
    gc.freeze()  # else a collection in a template would visit all modules and copy their pages


def _is_readable(link: socket.socket) -> bool:
    poll = select.poll()
    poll.register(link, select.POLLIN)
    return bool(poll.poll(0))
