"""A process that has torch and pyarrow imported and forks real workers from there: seconds saved per worker.

Reads one JSON request a line. {"env", "cwd", "stdout", "stderr"} starts a worker: answers {"pid"}. {"wait": pid} answers its
{"code"} when it has ended.
"""

import json
import os
import runpy
import signal
import sys
from typing import Any, NoReturn

import pyarrow.parquet  # noqa: F401
import torch._dynamo  # noqa: F401 - the first optimizer imports it, which takes a second
import torchmetrics  # noqa: F401

import gen_worker.inference.model.template
import gen_worker.inference.server
import gen_worker.trainer.arrow_feed
import gen_worker.trainer.runtime  # noqa: F401
from gen_worker.trainer.checkpoints.writing import warm_writer


def become_worker(request: dict[str, Any]) -> NoReturn:
    code = 1
    try:
        os.setsid()
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        sys.executable = os.environ.get("PYTHON_EXEC", sys.executable)
        sys.path[:0] = [request["cwd"], *filter(None, request["env"].get("PYTHONPATH", "").split(os.pathsep))]
        for number, name in ((1, "stdout"), (2, "stderr")):
            fd = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(fd, number)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        if os.environ["WORKER_MODE"] == "trainer":
            warm_writer.prepare()
        runpy.run_module("gen_worker.entrypoint", run_name="__main__")
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    started: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            started.discard(request["wait"])
            print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            become_worker(request)
        started.add(pid)
        print(json.dumps({"pid": pid}), flush=True)
    for pid in started:  # of a test that failed
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
