"""A template: one version, loaded and probed, that is forked for each of its workers.

The process that loaded is the first worker itself. Once it is ready, it leaves a copy of itself as the template: no fork
until the version answers, and the memory that it wrote to is already its own. Forks share memory until one of them writes to it.
There is a copy only while the process has one thread and no GPU in use (else: `Alone`).
"""

import contextlib
import gc
import logging
import os
import socket
import sys
from collections.abc import Sequence

from gen_worker.errors import Category, WorkerError
from gen_worker.inference.model.loading import LoadedModel, load_model
from gen_worker.inference.model.orders import (
    Ahead,
    Alone,
    BecameWorker,
    Forked,
    LaunchWorker,
    LeftTemplate,
    LoadFailed,
    OrderReader,
    ToTemplate,
    send_order,
    to_template_decoder,
)
from gen_worker.inference.model.process import count_threads, flush_output, run_to_exit, settle_in
from gen_worker.inference.model.rehearsal import rehearse
from gen_worker.inference.model.worker import ModelWorker
from gen_worker.trainer.attempt.failure import describe_failure, find_cause

logger = logging.getLogger("gen_worker.inference")


class Template:
    """`run` returns the exit code."""

    def __init__(self, link: socket.socket, parent_pid: int, *, is_alone: bool) -> None:
        self._link = link
        self._parent_pid = parent_pid
        self._is_alone = is_alone
        self._orders = OrderReader(link, to_template_decoder)

    def run(self) -> int:
        orders = self._wait_orders()
        while orders and isinstance(orders[0], Ahead):
            try:
                rehearse(orders[0].version)
            except BaseException as fault:  # a process that begins anew will say what is wrong
                logger.info(
                    "nothing is kept ahead of the version after %s: %s", orders[0].version.label, fault
                )
                return 0
            orders = orders[1:] or self._wait_orders()
        if orders is None:
            return 0
        wanted = orders[0]
        assert not isinstance(wanted, Ahead)
        try:
            model = load_model(wanted.version, wanted.options)
        except BaseException as fault:
            self._say_failure(fault)
            return 1
        launches = _launches(orders) or self._wait_launches()
        if launches is None:
            return 0
        first = launches[0]
        reason = "it was tried before" if self._is_alone else _why_not_forked()
        if reason:
            send_order(self._link, Alone(worker_id=first.worker_id, reason=reason))
            logger.info("model workers of %s are not forked: %s", first.version.label, reason)
            self._link.close()
            return ModelWorker(socket.socket(fileno=self._orders.take_fd()), model, first.options).run()
        worker = ModelWorker(socket.socket(fileno=self._orders.take_fd()), model, first.options)
        send_order(self._link, BecameWorker(worker_id=first.worker_id))
        if not model.is_settled(first.options):  # the threads that it starts then cannot be copied
            self._leave_copy(launches[1:], model)
            return worker.run()
        return worker.run(when_ready=lambda: self._leave_copy(launches[1:], model))

    def _leave_copy(self, launches: list[LaunchWorker], model: LoadedModel) -> None:
        """Returns in the worker. Without a copy, a further worker of the version has to load."""
        gc.collect()
        gc.freeze()  # else a collection in a worker would copy all pages
        flush_output()
        try:
            pid = os.fork()
        except OSError as fault:
            logger.warning("model workers of this version are not forked: %s", fault)
        else:
            if pid == 0:
                run_to_exit(lambda: self._obey(launches, model))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it was retired
                send_order(self._link, LeftTemplate(pid=pid))
        self._link.close()
        self._orders.close_fds()  # of orders that the copy has

    def _obey(self, launches: list[LaunchWorker] | None, model: LoadedModel) -> int:
        """Until the model parent closes its end: it is not this process's parent before the first worker has ended."""
        while launches is not None:
            for launch in launches:
                self._fork_worker(launch, self._orders.take_fd(), model)
            launches = self._wait_launches()
        return 0

    def _wait_orders(self) -> list[ToTemplate] | None:
        """At least one; None where the model parent has closed its end."""
        orders: list[ToTemplate] | None = []
        while orders == []:
            orders = self._orders.receive()
        return orders

    def _wait_launches(self) -> list[LaunchWorker] | None:
        launches: list[LaunchWorker] = []
        while not launches:
            orders = self._wait_orders()
            if orders is None:
                return None
            launches = _launches(orders)
        return launches

    def _say_failure(self, fault: BaseException) -> None:
        if not isinstance(fault, WorkerError):
            logger.error("the model cannot be loaded", exc_info=fault)
        category, words = describe_failure(fault, phase=Category.MODEL_LOAD)
        send_order(self._link, LoadFailed(category=category, words=words, cause=find_cause(fault)))

    def _fork_worker(self, order: LaunchWorker, link_fd: int, model: LoadedModel) -> None:
        """As a child of the model parent: the process between the two exits, and leaves it to that."""
        named_read, named_write = os.pipe()
        start_read, start_write = os.pipe()
        flush_output()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid:
                os.write(named_write, str(pid).encode())
                os._exit(0)

            def work() -> int:
                for fd in (named_read, named_write, start_write):
                    os.close(fd)
                self._link.close()
                self._orders.close_fds()
                os.read(start_read, 1)  # until it has its parent, who knows its name
                os.close(start_read)
                settle_in(self._parent_pid)
                return ModelWorker(socket.socket(fileno=link_fd), model, order.options).run()

            run_to_exit(work)
        for fd in (named_write, start_read, link_fd):
            os.close(fd)
        name = os.read(named_read, 32)
        os.waitpid(between, 0)
        os.close(named_read)
        if name:
            send_order(self._link, Forked(worker_id=order.worker_id, pid=int(name)))
        os.close(start_write)


def _launches(orders: Sequence[ToTemplate]) -> list[LaunchWorker]:
    return [order for order in orders if isinstance(order, LaunchWorker)]


def _why_not_forked() -> str:
    """Empty where a fork of this process is sound."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "the model is on a GPU"
    num_threads = count_threads()
    return f"it has {num_threads} threads" if num_threads > 1 else ""


def main(arguments: list[str]) -> int:
    """In another interpreter than that of the server: descriptor, the model parent's pid, perhaps `--alone`."""
    fd, parent_pid, *flags = arguments
    settle_in(int(parent_pid))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    return Template(socket.socket(fileno=int(fd)), int(parent_pid), is_alone="--alone" in flags).run()


if __name__ == "__main__":
    run_to_exit(lambda: main(sys.argv[1:]))
