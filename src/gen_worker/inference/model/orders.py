"""What the server, its model parent and the templates say to each other, as frames. A descriptor may come with one."""

import os
import socket
from array import array
from collections import deque
from typing import Generic, TypeVar

import msgspec
from msgspec.structs import replace

from gen_worker.contract.job.model_version import ModelVersion, VersionFacts
from gen_worker.inference.frames import FrameReader, encode_frame
from gen_worker.inference.messages import Message

RECEIVE_BYTES = 1 << 18
MAX_FDS = 16

O = TypeVar("O")  # noqa: E741


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the workers of a version compute. The same options give the same bits, on one machine."""

    max_batch_rows: int = 32
    num_threads: int = 1  # of a worker, for one operation
    device: str | None = None  # None: what training would choose
    devices: tuple[str, ...] = ()  # of several workers: they take turns with them
    memory_mb: int | None = None  # what a worker may take above its loaded model
    probe: bool = True  # every shape is called before a worker says that it is ready

    def of_worker(self, number: int) -> "ModelOptions":
        """With the device of that one of several workers."""
        if not self.devices:
            return self
        return replace(self, device=self.devices[number % len(self.devices)], devices=())


def threads_of_worker(cpus: int | None, num_workers: int) -> int:
    """A run's CPUs, shared out among its workers. The bits of an answer may depend on it."""
    return max((cpus or 1) // num_workers, 1)


class LaunchWorker(Message, frozen=True, kw_only=True):
    """A new worker of that version. Its end of the link comes with the frame."""

    worker_id: int
    version: ModelVersion
    options: ModelOptions = ModelOptions()


class Prepare(Message, frozen=True, kw_only=True):
    """Load that version: a worker of it will be wanted."""

    version: ModelVersion
    options: ModelOptions = ModelOptions()


class Ahead(Message, frozen=True, kw_only=True):
    """Make ready to load a version with the code and the environment of that one."""

    version: ModelVersion


class Retire(Message, frozen=True, kw_only=True):
    """End the templates of that version. Their workers go on."""

    version: VersionFacts


class KillWorker(Message, frozen=True, kw_only=True):
    """Whatever it does."""

    worker_id: int


class Forked(Message, frozen=True, kw_only=True):
    """From a template: that further worker exists."""

    worker_id: int
    pid: int


class BecameWorker(Message, frozen=True, kw_only=True):
    """From a template: it is its first worker now, and `LeftTemplate` follows."""

    worker_id: int


class LeftTemplate(Message, frozen=True, kw_only=True):
    """From the first worker of a version: a copy of it, its child, is the template from here on."""

    pid: int


class Alone(Message, frozen=True, kw_only=True):
    """From a template that cannot be forked: it is that worker now, and takes no more orders."""

    worker_id: int
    reason: str


class LoadFailed(Message, frozen=True, kw_only=True):
    """From a template that is about to exit."""

    category: str
    words: str
    cause: str = ""  # a `Cause`, or the signal that killed it


class WorkerEnd(Message, frozen=True, kw_only=True):
    """A worker's process has ended. Exactly one of the first two is given, unless it never was one."""

    worker_id: int
    exit_code: int | None = None
    signal: str = ""  # SIGKILL, SIGSEGV, …
    words: str


FromServer = LaunchWorker | Prepare | Retire | KillWorker
ToTemplate = LaunchWorker | Prepare | Ahead
FromTemplate = Forked | BecameWorker | LeftTemplate | Alone | LoadFailed

from_server_decoder: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)
to_template_decoder: msgspec.msgpack.Decoder[ToTemplate] = msgspec.msgpack.Decoder(ToTemplate)
from_template_decoder: msgspec.msgpack.Decoder[FromTemplate] = msgspec.msgpack.Decoder(FromTemplate)
end_decoder: msgspec.msgpack.Decoder[WorkerEnd] = msgspec.msgpack.Decoder(WorkerEnd)


def send_order(link: socket.socket, order: Message, fd: int | None = None) -> None:
    """Blocks until it is in the socket's buffer."""
    (frame,) = encode_frame(order)
    sent = link.send(frame) if fd is None else socket.send_fds(link, [frame], [fd])
    if sent < len(frame):
        link.sendall(memoryview(frame)[sent:])


class OrderReader(Generic[O]):
    """Orders, and the descriptors that came with them, from a stream socket."""

    def __init__(self, link: socket.socket, decoder: msgspec.msgpack.Decoder[O]) -> None:
        self._link = link
        self._frames = FrameReader(decoder)
        self._fds: deque[int] = deque()

    def receive(self) -> list[O] | None:
        """What there is, after one wait; None at the end of the stream. `take_fd` has their descriptors, in order."""
        room = socket.CMSG_SPACE(MAX_FDS * array("i").itemsize)
        try:
            data, ancillary, _, _ = self._link.recvmsg(RECEIVE_BYTES, room, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:  # it was killed before it had read all that we sent
            return None
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array("i")
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
                self._fds.extend(fds)
        if not data:
            return None
        return [message for message, _ in self._frames.feed(data)]

    def take_fd(self) -> int:
        """The descriptor of the oldest order that had one."""
        return self._fds.popleft()

    def close_fds(self) -> None:
        """Of orders that were received and not looked at: in a fork, which has copies of them."""
        while self._fds:
            os.close(self._fds.popleft())
