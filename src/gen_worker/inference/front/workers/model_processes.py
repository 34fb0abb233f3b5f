"""The model parent on the event loop: launches workers, and tells how each of them ended."""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from gen_worker.contract.job.model_version import ModelVersion
from gen_worker.errors import ModelLoadError
from gen_worker.inference.model.orders import ModelOptions, WorkerEnd
from gen_worker.inference.model.parent import ModelLink

END_PATIENCE_S = 2.0  # between the end of a link and the report of its worker's end
MAX_KEPT_ENDS = 64


class Parent(Protocol):
    """What of `ModelParent` is used."""

    def launch(self, version: ModelVersion, options: ModelOptions) -> ModelLink: ...
    def kill(self, worker_id: int) -> None: ...
    def fileno(self) -> int: ...
    def read_ends(self) -> list[WorkerEnd]: ...


class ModelProcesses:
    """One for a server, shared by its pools. Must be made on the loop that it uses, and closed before the parent."""

    def __init__(
        self, parent: Parent, *, log: logging.Logger, gone: Callable[[ModelLoadError], None]
    ) -> None:
        """`gone` is called if the parent ends, and all model workers with it: nothing can be launched any more."""
        self._parent = parent
        self._log = log
        self._gone = gone
        self._ends: dict[int, WorkerEnd] = {}
        self._waiting: dict[int, asyncio.Future[WorkerEnd]] = {}
        self._loop = asyncio.get_running_loop()
        self._fd: int | None = parent.fileno()
        self._loop.add_reader(self._fd, self._read)

    def launch(self, version: ModelVersion, options: ModelOptions) -> ModelLink:
        """Returns at once. ModelLoadError where the parent has ended."""
        try:
            return self._parent.launch(version, options)
        except ModelLoadError as fault:
            self._lose(fault)
            raise

    def kill(self, worker_id: int) -> None:
        """Whatever it does. A worker that has ended is no error."""
        try:
            self._parent.kill(worker_id)
        except ModelLoadError as fault:
            self._lose(fault)

    async def wait_link(self, worker_id: int, link_lost: "asyncio.Future[None]") -> None:
        """Until its link has ended, or the worker has: a process that the author's code left behind may hold the link."""
        ended = self._loop.create_future()
        if worker_id in self._ends:
            ended.set_result(self._ends.pop(worker_id))
        self._waiting[worker_id] = ended
        try:
            await asyncio.wait([ended, link_lost], return_when=asyncio.FIRST_COMPLETED)
            if not link_lost.done():  # what it said before is still to be read
                await asyncio.wait([link_lost], timeout=END_PATIENCE_S)
        finally:
            del self._waiting[worker_id]
            if ended.done():
                self._ends[worker_id] = ended.result()

    async def wait_end(self, worker_id: int) -> WorkerEnd | None:
        """How a worker ended whose link has ended; None where that is not known. To be asked once."""
        if worker_id in self._ends:
            return self._ends.pop(worker_id)
        if self._fd is None:
            return None
        waiting = self._waiting[worker_id] = self._loop.create_future()
        try:
            return await asyncio.wait_for(waiting, END_PATIENCE_S)
        except TimeoutError:
            return None
        finally:
            del self._waiting[worker_id]

    def close(self) -> None:
        """Safe to repeat."""
        if self._fd is not None:
            self._loop.remove_reader(self._fd)
            self._fd = None

    def _read(self) -> None:
        try:
            ends = self._parent.read_ends()
        except ModelLoadError as fault:
            self._lose(fault)
            return
        for end in ends:
            self._log.info("model worker %d ended: %s", end.worker_id, end.words)
            waiting = self._waiting.get(end.worker_id)
            if waiting is not None and not waiting.done():
                waiting.set_result(end)
                continue
            self._ends[end.worker_id] = end
            while len(self._ends) > MAX_KEPT_ENDS:  # of workers that no caller asks for: they were closed
                del self._ends[next(iter(self._ends))]

    def _lose(self, fault: ModelLoadError) -> None:
        if self._fd is not None:
            self.close()
            self._gone(fault)
