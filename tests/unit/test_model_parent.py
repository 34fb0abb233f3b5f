"""The model parent reports the end of a worker once, and of no other process."""

import os
import socket
import subprocess
import sys

from gen_worker.contract.job.model_version import ModelVersion
from gen_worker.inference.model.children import Child, Ordered, key_of
from gen_worker.inference.model.orders import (
    LaunchWorker,
    ModelOptions,
    OrderReader,
    end_decoder,
    from_template_decoder,
)
from gen_worker.inference.model.parent_process import ParentProcess

VERSION = ModelVersion(
    run_id="run",
    step=1,
    weights_hash="sha256:0",
    code_hash="sha256:0",
    checkpoint="/nowhere.meta.json",
    trainer="models:Model",
    config={},
)


def template_with_order(pid: int, ends: list[socket.socket]) -> Child:
    order = LaunchWorker(worker_id=7, version=VERSION, options=ModelOptions())
    ours, theirs = socket.socketpair()
    ends += [ours, theirs]
    return Child(
        pid=pid,
        link=ours,
        orders=OrderReader(ours, from_template_decoder),
        key=key_of(order),
        version=VERSION.facts,
        waiting={7: Ordered(order=order, fd=os.open(os.devnull, os.O_RDONLY))},
    )


def test_the_end_of_an_earlier_process_of_that_number_is_not_a_workers() -> None:
    """A worker that ended before it had a name is; numbers of processes are used again."""
    link, server = socket.socketpair()
    server.setblocking(False)
    parent = ParentProcess(link)
    ends = [link, server, parent._waker, parent._wake]
    living = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    gone = subprocess.Popen(["true"])
    gone.wait()
    try:
        parent._strangers = {living.pid: 9, gone.pid: 9}
        parent._settle(template_with_order(living.pid, ends), 7, living.pid)
        assert parent._workers == {living.pid: 7}
        parent._settle(template_with_order(gone.pid, ends), 7, gone.pid)
        assert parent._workers == {living.pid: 7}
        assert parent._strangers == {}
        told = OrderReader(server, end_decoder).receive()
        assert told is not None
        assert [(end.worker_id, end.signal) for end in told] == [(7, "SIGKILL")]
    finally:
        living.communicate()
        for end in ends:
            end.close()
