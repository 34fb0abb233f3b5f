"""One place of a pool: the model worker that has it, and the next one when that ends."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

from gen_worker.contract.doubling_delay import DoublingDelay
from gen_worker.contract.job.model_version import ModelVersion
from gen_worker.errors import ModelLoadError
from gen_worker.inference.frames import Buffer, FrameError, FrameReader, encode_frame, from_worker_decoder
from gen_worker.inference.front.queries import Query
from gen_worker.inference.front.workers.batches import Batch
from gen_worker.inference.front.workers.model_processes import ModelProcesses
from gen_worker.inference.messages import FromWorker, NotReady, Ready, ToWorker
from gen_worker.inference.model.orders import ModelOptions, WorkerEnd

FIRST_DELAY_S, MAX_DELAY_S = 0.1, 10.0  # between launches that did not become ready


class WorkerLink(asyncio.Protocol):
    """The front's end of the link to one worker process."""

    def __init__(
        self, receive: Callable[[FromWorker, memoryview], None], fail: Callable[[str], None]
    ) -> None:
        self._receive = receive
        self._fail = fail
        self._frames: FrameReader[FromWorker] = FrameReader(from_worker_decoder)
        self._writer: asyncio.WriteTransport | None = None
        self.lost = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._writer = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for message, payload in self._frames.feed(data):
                self._receive(message, payload)
        except FrameError as fault:
            self._fail(str(fault))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  (asyncio's name)
        self._writer = None
        if not self.lost.done():
            self.lost.set_result(None)

    def send(self, message: ToWorker, payload: Sequence[Buffer] = ()) -> None:
        if self._writer is not None:
            self._writer.writelines(encode_frame(message, payload))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.abort()


class Replica:
    """Keeps one model worker up. Its pool gives it batches while `is_free`."""

    def __init__(
        self,
        version: ModelVersion,
        options: ModelOptions,
        processes: ModelProcesses,
        *,
        received: "Callable[[Replica, FromWorker, memoryview], None]",
        changed: "Callable[[Replica], None]",
        ended: "Callable[[Replica, WorkerEnd | None], None]",
    ) -> None:
        """`received` gets messages of a worker that is ready, `changed` says that one is, `ended` that it is not any more."""
        self._version = version
        self._options = options
        self._processes = processes
        self._received = received
        self._changed = changed
        self._ended = ended
        self._link: WorkerLink | None = None
        self._worker_id = 0
        self._delay = DoublingDelay(FIRST_DELAY_S, MAX_DELAY_S)
        self.ready: Ready | None = None
        self.not_ready: NotReady | None = None  # of the last launch, if it failed
        self.batch: Batch | None = None
        self.suspects: deque[Query] = (
            deque()
        )  # single rows, one of which may have ended a worker: computed alone
        self.streams: set[int] = set()
        self.is_killed = False  # by us: it took too long, or said what it must not

    @property
    def is_free(self) -> bool:
        return self.ready is not None and self.batch is None and not self.is_killed

    async def keep_up(self) -> None:
        """Until it is cancelled: then its worker is ended."""
        try:
            while True:
                await self._run_worker()
                if self.not_ready is not None:
                    await asyncio.sleep(self._delay.next_s())
        finally:
            self._end_link()

    def send(self, message: ToWorker, payload: Sequence[Buffer] = ()) -> None:
        assert self._link is not None
        self._link.send(message, payload)

    def kill(self) -> None:
        """End its worker, whatever that does. What it computes is lost with it."""
        self.is_killed = True
        self._processes.kill(self._worker_id)

    async def _run_worker(self) -> None:
        """From its launch to its end."""
        self.is_killed, self.not_ready = False, None
        try:
            link = self._processes.launch(self._version, self._options)
        except ModelLoadError as fault:
            self._give_up(NotReady(category=fault.category, words=str(fault), cause=fault.cause))
            return
        except OSError as fault:  # no descriptor is free, say
            self._give_up(NotReady(category="startup", words=f"no model worker can be started: {fault}"))
            return
        self._worker_id = link.worker_id
        connection = self._link = WorkerLink(self._receive, self._break)
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: connection, sock=link.socket)
        except BaseException:
            link.close()
            raise
        await self._processes.wait_link(link.worker_id, connection.lost)
        connection.close()
        was_ready = self.ready is not None
        self.ready = None
        end = await self._processes.wait_end(link.worker_id)
        if was_ready:
            self._ended(self, end)
        elif self.not_ready is None:
            words = end.words if end is not None else "it ended before it was ready"
            cause = end.signal if end is not None else ""
            self._give_up(NotReady(category="model-load", words=words, cause=cause))

    def _receive(self, message: FromWorker, payload: memoryview) -> None:
        if self.is_killed:
            return  # what it says after that is not believed
        if self.ready is not None:
            self._received(self, message, payload)
        elif isinstance(message, Ready):
            self.ready = message
            self._delay.reset()
            self._changed(self)
        elif isinstance(message, NotReady):
            self._give_up(message)
        else:
            self._break(f"its first message is {type(message).__name__}")

    def _give_up(self, why: NotReady) -> None:
        self.not_ready = why
        self._changed(self)

    def _break(self, words: str) -> None:
        """Its worker does not speak as it must."""
        if self.ready is None:
            self._give_up(NotReady(category="model-load", words=words))
        self.kill()

    def _end_link(self) -> None:
        self.ready = None
        if self._link is not None:
            self._link.close()
