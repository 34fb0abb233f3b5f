"""The front with model workers behind it, as `trn serve` has them: without a run, its events and its log.

    python inference_server.py VERSION.json REPLICAS

Prints a line of JSON with its port when it answers. SIGUSR1 kills a model worker; a second line says how long it was gone.
"""

import asyncio
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from gen_worker.contract.job.model_version import ModelVersion
from gen_worker.inference.front.event_loop import run
from gen_worker.inference.front.front import Front, FrontOptions
from gen_worker.inference.front.pool import ReplicaPool
from gen_worker.inference.front.workers.model_processes import ModelProcesses
from gen_worker.inference.model.parent import ModelOptions, ModelParent

BEARER = "bench"
POLL_S = 0.001


async def serve(parent: ModelParent, version: ModelVersion, replicas: int) -> None:
    log = logging.getLogger("bench")
    processes = ModelProcesses(parent, log=log, gone=_fail)
    pool = ReplicaPool(version, processes, ModelOptions(), replicas, log=log)
    await pool.open()
    front = Front(FrontOptions(bearer=BEARER), name="mlp", log=log)
    front.switch(pool)
    url = await front.open("127.0.0.1:0")
    print(json.dumps({"port": int(url.rpartition(":")[2])}), flush=True)
    is_asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, is_asked.set)
    while True:
        await is_asked.wait()
        is_asked.clear()
        before = pool.counters.worker_ends
        os.kill(pool.worker_pids[0], signal.SIGKILL)
        killed_at = time.monotonic()
        while pool.counters.worker_ends == before or pool.num_ready < replicas:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        print(json.dumps({"gone_ms": 1000 * (time.monotonic() - killed_at)}), flush=True)


def _fail(fault: Exception) -> None:
    raise fault


if __name__ == "__main__":
    model_parent = ModelParent.start()  # before there is a thread
    model_version = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=ModelVersion)
    run(serve(model_parent, model_version, int(sys.argv[2])))
