"""A stand-in for the model parent: real processes that speak the real frames, without torch and without a model.

    python frame_workers.py FD OPTIONS     a worker at the end of the socket FD

It answers each row with `y`, the sum of its column `x` and the version's `bias`, and with the worker's `pid`. A row whose
first value is one of those below makes it misbehave.
"""

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from gen_worker.contract.job.model_version import ModelVersion
from gen_worker.inference.frames import receive_frame, send_frame, to_worker_decoder
from gen_worker.inference.messages import (
    Answers,
    CloseStream,
    ColumnData,
    ColumnType,
    MoreItems,
    NotReady,
    OpenStream,
    Part,
    Raised,
    Ready,
    StreamEnd,
    StreamItem,
    ToWorker,
    Work,
)
from gen_worker.inference.model.orders import ModelOptions, WorkerEnd
from gen_worker.inference.model.parent import ModelLink

WIDTH = 4
RAISES, CRASHES, HANGS, WRONG_COUNT, FEWER_ROWS, GARBAGE, KILLED, SLOW, RAISES_ONCE, LEAVES_CHILD = (
    1000.0 * number for number in range(1, 11)
)
INPUTS = (ColumnType(name="x", dtype="float32", dims=(WIDTH,)),)
OUTPUTS = (ColumnType(name="y", dtype="float32"), ColumnType(name="pid", dtype="int64"))


def make_version(step: int = 1, **options: Any) -> ModelVersion:
    """Options: `bias`, `delay_s` of each batch, `not_ready` (words), `can_stream`, `max_items` of a
    stream, `dies_at_start`, `any_columns`."""
    return ModelVersion(
        run_id="run",
        step=step,
        weights_hash=f"sha256:{step:064x}",
        code_hash="sha256:c0de",
        checkpoint="/nowhere.meta.json",
        trainer="frame_workers:Model",
        config=options,
    )


class FrameParent:
    """Has what the pool uses of `ModelParent`. Its workers are children of the test."""

    def __init__(self) -> None:
        self._epoll = select.epoll()  # readable when one of its workers has ended
        self.children: dict[int, subprocess.Popen[bytes]] = {}
        self._ids: dict[int, int] = {}  # by the descriptor of the process

    def launch(self, version: ModelVersion, options: ModelOptions) -> ModelLink:
        ours, theirs = socket.socketpair()
        worker_id = len(self.children) + 1
        command = [sys.executable, __file__, str(theirs.fileno()), json.dumps(version.config)]
        with theirs:
            child = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self.children[worker_id] = child
        fd = os.pidfd_open(child.pid)
        self._ids[fd] = worker_id
        self._epoll.register(fd, select.EPOLLIN)
        ours.setblocking(False)
        return ModelLink(socket=ours, worker_id=worker_id, label=version.label)

    def kill(self, worker_id: int) -> None:
        self.children[worker_id].kill()

    def fileno(self) -> int:
        return self._epoll.fileno()

    def read_ends(self) -> list[WorkerEnd]:
        ends = []
        for fd, _ in self._epoll.poll(0):
            self._epoll.unregister(fd)
            os.close(fd)
            worker_id = self._ids.pop(fd)
            code = self.children[worker_id].wait()
            name = signal.Signals(-code).name if code < 0 else ""
            ends.append(
                WorkerEnd(
                    worker_id=worker_id,
                    exit_code=None if code < 0 else code,
                    signal=name,
                    words=name or f"exit code {code}",
                )
            )
        return ends

    @property
    def pids(self) -> list[int]:
        """Of those that live."""
        return [child.pid for child in self.children.values() if child.poll() is None]

    def close(self) -> None:
        for child in self.children.values():
            child.kill()
            child.wait()
        for fd in self._ids:
            os.close(fd)
        self._epoll.close()


# The worker.


class Worker:
    def __init__(self, link: socket.socket, options: Mapping[str, Any]) -> None:
        self._link = link
        self._options = options
        self._bias = float(options.get("bias", 0.0))
        self._has_raised = False
        self._streams: dict[int, Iterator[int]] = {}  # what each has still to say
        self._ends: dict[int, float] = {}  # and how it ends
        self._credit: dict[int, int] = {}

    def run(self) -> None:
        if "not_ready" in self._options:
            send_frame(self._link, NotReady(category="model-load", words=self._options["not_ready"]))
            return
        if "dies_at_start" in self._options:
            os._exit(3)
        inputs = () if self._options.get("any_columns") else INPUTS
        can_stream = bool(self._options.get("can_stream"))
        send_frame(self._link, Ready(pid=os.getpid(), inputs=inputs, outputs=OUTPUTS, can_stream=can_stream))
        while True:
            is_idle = not any(self._credit.get(stream) for stream in self._streams)
            if select.select([self._link], [], [], None if is_idle else 0)[0]:
                frame = receive_frame(self._link, to_worker_decoder)
                if frame is None:
                    return
                self._take(*frame)
            self._yield_items()

    def _take(self, message: ToWorker, payload: memoryview) -> None:
        if isinstance(message, Work):
            self._work(message, payload)
        elif isinstance(message, OpenStream):
            (rows,) = _read_rows(message.part, payload)
            self._streams[message.stream] = iter(
                range(int(min(rows[1], self._options.get("max_items", 1e7))))
            )
            self._ends[message.stream] = rows[2]
            self._credit[message.stream] = message.credit
        elif isinstance(message, MoreItems):
            if message.stream in self._credit:
                self._credit[message.stream] += message.credit
        elif isinstance(message, CloseStream) and self._streams.pop(message.stream, None) is not None:
            send_frame(self._link, StreamEnd(stream=message.stream))

    def _yield_items(self) -> None:
        for stream, items in [*self._streams.items()]:
            if not self._credit[stream]:
                continue
            self._credit[stream] -= 1
            item = next(items, None)
            if item is not None:
                content = json.dumps({"item": item, "text": "ä"}).encode()
                send_frame(self._link, StreamItem(stream=stream), [content])
                continue
            del self._streams[stream]
            if self._ends[stream] == RAISES:
                end = StreamEnd(stream=stream, kind="error", error_id="e1", words="secret words")
            elif self._ends[stream] == CRASHES:
                os.abort()
            else:
                end = StreamEnd(stream=stream)
            send_frame(self._link, end)

    def _work(self, work: Work, payload: memoryview) -> None:
        time.sleep(self._options.get("delay_s", 0.0))
        parts: list[Part] = []
        answers: list[bytes] = []
        start = 0
        for part in work.parts:
            data = payload[start : start + part.payload_bytes]
            start += part.payload_bytes
            rows = _read_rows(part, data)
            assert len(rows) == part.num_rows
            first = {row[0] for row in rows}
            raises_now = RAISES_ONCE in first and not self._has_raised
            self._has_raised |= raises_now
            if raises_now or RAISES in first or WRONG_COUNT in first:
                kind = "row_count" if WRONG_COUNT in first else "error"
                send_frame(
                    self._link, Raised(batch=work.batch, kind=kind, error_id="e1", words="secret words")
                )
                return
            _misbehave(first, self._link)
            values = [(sum(row) + self._bias, os.getpid()) for row in rows]
            if FEWER_ROWS in first:
                values.pop()
            answer, pieces = _encode_ipc(values) if part.answer == "ipc" else _encode_columns(values)
            parts.append(answer)
            answers += pieces
        assert sum(part.num_rows for part in work.parts) <= work.shape
        send_frame(self._link, Answers(batch=work.batch, parts=tuple(parts), compute_ms=0.1), answers)


def _misbehave(first: set[float], link: socket.socket) -> None:
    if CRASHES in first:
        signal.signal(signal.SIGABRT, signal.SIG_DFL)
        os.abort()
    if LEAVES_CHILD in first:
        if os.fork() == 0:
            while link.recv(1 << 16):  # it holds the link, until the front closes it
                pass
            os._exit(0)
        os._exit(3)
    if KILLED in first:
        os.kill(os.getpid(), signal.SIGKILL)
    if HANGS in first:
        signal.pause()
    if SLOW in first:
        time.sleep(0.3)
    if GARBAGE in first:
        link.sendall(b"\xff" * 64)


def _read_rows(part: Part, payload: memoryview) -> list[list[float]]:
    if part.encoding == "ipc":
        import pyarrow as pa

        with pa.ipc.open_stream(pa.py_buffer(payload)) as reader:
            return reader.read_all().column("x").to_pylist()
    (column,) = (each for each in part.columns if each.name == "x")
    if column.encoding == "values":
        import msgspec

        return msgspec.msgpack.decode(payload[: column.size_bytes])
    assert column.dims == (WIDTH,)
    values = struct.unpack(f"<{part.num_rows * WIDTH}f", payload[: column.size_bytes])
    return [list(values[row * WIDTH : (row + 1) * WIDTH]) for row in range(part.num_rows)]


def _encode_columns(values: list[tuple[float, int]]) -> tuple[Part, list[bytes]]:
    packed = [
        struct.pack(f"<{len(values)}f", *(y for y, _ in values)),
        struct.pack(f"<{len(values)}q", *(pid for _, pid in values)),
    ]
    columns = tuple(
        ColumnData(name=output.name, encoding="packed", size_bytes=len(data), dtype=output.dtype)
        for output, data in zip(OUTPUTS, packed, strict=True)
    )
    return Part(num_rows=len(values), columns=columns), packed


def _encode_ipc(values: list[tuple[float, int]]) -> tuple[Part, list[bytes]]:
    import pyarrow as pa

    batch = pa.record_batch(
        {
            "y": pa.array([y for y, _ in values], pa.float32()),
            "pid": pa.array([pid for _, pid in values], pa.int64()),
        }
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    data = sink.getvalue().to_pybytes()
    return Part(num_rows=len(values), encoding="ipc", size_bytes=len(data)), [data]


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as link:
        Worker(link, json.loads(sys.argv[2])).run()
