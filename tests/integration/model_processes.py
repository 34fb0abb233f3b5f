"""Real model processes for tests: a model parent in a process without threads, and links that wait."""

import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from worker_process import TRAINERS, Run, write_rows

from gen_worker.contract.job.model_version import ModelVersion
from gen_worker.inference.frames import from_worker_decoder, receive_frame, send_frame
from gen_worker.inference.messages import (
    Answers,
    ColumnData,
    FromWorker,
    Message,
    NotReady,
    Part,
    Raised,
    Ready,
    Work,
)
from gen_worker.inference.model.parent import ModelLink, ModelOptions, ModelParent, WorkerEnd
from gen_worker.inference.shapes import shape_for

DEADLINE_S = 120.0
_opened: "list[Worker]" = []
_BECOME = """
import logging, socket, sys
logging.basicConfig(level=logging.INFO)
from gen_worker.inference.model.parent_process import become_parent
become_parent(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
"""


@contextmanager
def open_parent(log: Path) -> Iterator[ModelParent]:
    """As `ModelParent.start`, which a test process cannot call: it has threads."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", _BECOME, str(theirs.fileno()), str(os.getpid())]
    with log.open("ab") as out:
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=out, stderr=out)
    theirs.close()
    parent = ModelParent(process.pid, ours)
    try:
        yield parent
    finally:
        for worker in _opened:
            if worker.parent is parent:
                worker.close()
        parent.close()
        process.returncode = 0  # reaped by `close`


def train(folder: Path, **job: Any) -> Path:
    """The .meta.json of a small run."""
    write_rows(folder / "data" / "train.parquet")
    spec: dict[str, Any] = {
        "run_id": "served",
        "trainer": "serving:ServingMlp",
        "max_steps": 6,
        "checkpoint_every": 3,
        "dataset": {"parquet_paths": ["data/train.parquet"], "batch_size": 20},
        **job,
    }
    run = Run(folder, **spec)
    done = run.work()
    assert done.returncode == 0, done.stderr
    return run.checkpoints / "final.meta.json"


def version_of(meta: Path, trainer: str = "serving:ServingMlp", **changes: Any) -> ModelVersion:
    said = json.loads(meta.read_text())
    version = ModelVersion(
        run_id=said["run_id"],
        step=said["step"],
        weights_hash=said["files"][0]["hash"],
        checkpoint=str(meta),
        trainer=trainer,
        config=said["identity"]["config"],
        code_dir=str(TRAINERS),
        base_dir=str(meta.parents[2]),
    )
    return msgspec.structs.replace(version, **changes)


class Worker:
    """One model worker, and calls that wait for its answer. Closed with its parent at the latest."""

    def __init__(
        self, parent: ModelParent, version: ModelVersion, options: ModelOptions | None = None
    ) -> None:
        self.parent = parent
        _opened.append(self)
        self.options = options or ModelOptions()
        self.link: ModelLink = parent.launch(version, self.options)
        self.link.socket.setblocking(True)
        self.link.socket.settimeout(DEADLINE_S)

    def receive(self) -> tuple[FromWorker, memoryview] | None:
        return receive_frame(self.link.socket, from_worker_decoder)

    def ready(self) -> Ready:
        frame = self.receive()
        assert frame is not None
        assert isinstance(frame[0], Ready), frame[0]
        return frame[0]

    def refusal(self) -> NotReady:
        frame = self.receive()
        assert frame is not None
        assert isinstance(frame[0], NotReady), frame[0]
        return frame[0]

    def send(self, message: Message, payload: list[bytes] | None = None) -> None:
        send_frame(self.link.socket, message, payload or [])

    def ask(self, *arrays: "np.ndarray[Any, Any]", shape: int | None = None, answer: str = "columns") -> Any:
        """One part for each array of `x`. The answer's values by name for each part, or what was raised."""
        parts, payload = [], []
        for array in arrays:
            x = np.ascontiguousarray(array, dtype="float32")
            data = ColumnData(
                name="x", encoding="packed", size_bytes=x.nbytes, dtype="float32", dims=x.shape[1:]
            )
            parts.append(Part(num_rows=len(x), columns=(data,), answer=answer))  # type: ignore[arg-type]
            payload.append(x.tobytes())
        rows = sum(part.num_rows for part in parts)
        shape = shape or shape_for(rows, self.options.max_batch_rows)
        return self.ask_parts(tuple(parts), payload, shape)

    def ask_parts(self, parts: tuple[Part, ...], payload: list[bytes], shape: int) -> Any:
        self.send(Work(batch=1, shape=shape, parts=parts), payload)
        frame = self.receive()
        assert frame is not None, "the worker ended"
        message, content = frame
        if isinstance(message, Raised):
            return message
        assert isinstance(message, Answers), message
        return read_answers(message, content)

    def end(self) -> WorkerEnd:
        """Waits until its end is reported."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            for end in self.parent.read_ends():
                if end.worker_id == self.link.worker_id:
                    return end
            select.select([self.parent], [], [], 1.0)
        raise AssertionError("no end was reported")

    def close(self) -> None:
        self.link.close()


def read_answers(message: Answers, content: memoryview) -> list[dict[str, Any]]:
    found = []
    start = 0
    for part in message.parts:
        values: dict[str, Any] = {}
        if part.encoding == "ipc":
            values["ipc"] = bytes(content[start : start + part.size_bytes])
            start += part.size_bytes
        for column in part.columns:
            piece = content[start : start + column.size_bytes]
            start += column.size_bytes
            if column.encoding == "packed":
                values[column.name] = np.frombuffer(piece, column.dtype).reshape(part.num_rows, *column.dims)
            else:
                values[column.name] = msgspec.msgpack.decode(piece)
        found.append(values)
    assert start == len(content)
    return found
