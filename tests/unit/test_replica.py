"""A model worker is believed until it is ended, and not after it."""

import asyncio
import logging
import os
import socket
from collections.abc import Callable

from gen_worker.contract.job.model_version import ModelVersion
from gen_worker.inference.frames import send_frame
from gen_worker.inference.front.workers.model_processes import ModelProcesses
from gen_worker.inference.front.workers.replica import Replica
from gen_worker.inference.messages import Answers, Ready
from gen_worker.inference.model.orders import ModelOptions, WorkerEnd
from gen_worker.inference.model.parent import ModelLink

VERSION = ModelVersion(
    run_id="run",
    step=1,
    weights_hash="sha256:0",
    code_hash="sha256:0",
    checkpoint="/nowhere.meta.json",
    trainer="models:Model",
    config={},
)


class SlowToKill:
    """A parent whose one worker speaks on after it was killed."""

    def __init__(self) -> None:
        self.worker, self._ours = socket.socketpair()
        self.killed: list[int] = []
        self._fd = os.eventfd(0)

    def launch(self, version: ModelVersion, options: ModelOptions) -> ModelLink:
        self._ours.setblocking(False)
        return ModelLink(socket=self._ours, worker_id=1, label=version.label)

    def kill(self, worker_id: int) -> None:
        self.killed.append(worker_id)

    def fileno(self) -> int:
        return self._fd

    def read_ends(self) -> list[WorkerEnd]:
        return []

    def close(self) -> None:
        self.worker.close()
        os.close(self._fd)


def test_nothing_is_taken_from_a_worker_after_a_broken_frame() -> None:
    async def main() -> None:
        parent = SlowToKill()
        processes = ModelProcesses(parent, log=logging.getLogger("test"), gone=lambda _fault: None)
        said: list[object] = []
        replica = Replica(
            VERSION,
            ModelOptions(),
            processes,
            received=lambda _replica, message, _payload: said.append(message),
            changed=lambda _replica: None,
            ended=lambda _replica, _end: None,
        )
        up = asyncio.create_task(replica.keep_up())

        async def until(condition: Callable[[], bool]) -> None:
            while not condition():
                assert not up.done(), up.exception()
                await asyncio.sleep(0)

        send_frame(
            parent.worker, Ready(pid=1, inputs=(), outputs=(), can_stream=False, probe_ms={}, load_ms=0)
        )
        await until(lambda: replica.ready is not None)
        answer = Answers(batch=1, parts=(), compute_ms=0)
        send_frame(parent.worker, answer)
        await until(lambda: bool(said))
        parent.worker.sendall(b"\xff" * 64)
        await until(lambda: bool(parent.killed))
        send_frame(parent.worker, answer)
        parent.worker.shutdown(socket.SHUT_WR)
        await until(lambda: replica.ready is None)  # it read to the end of the link
        up.cancel()
        await asyncio.gather(up, return_exceptions=True)
        processes.close()
        parent.close()
        assert said == [answer]

    asyncio.run(main())
