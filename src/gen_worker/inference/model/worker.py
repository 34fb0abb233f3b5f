"""A model worker: reads work from its link, calls the model, writes answers. One thread; it exits at the end of the link."""

import contextlib
import logging
import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from gen_worker.inference.frames import FrameError, receive_frame, send_frame, to_worker_decoder
from gen_worker.inference.messages import (
    Answers,
    CloseStream,
    MoreItems,
    OpenStream,
    Part,
    PredictGroup,
    Raised,
    Ready,
    StreamEnd,
    StreamItem,
    Work,
)
from gen_worker.inference.model.columns import PartsReader, RowsError, encode_answer, plain_value
from gen_worker.inference.model.loading import LoadedModel
from gen_worker.inference.model.orders import ModelOptions
from gen_worker.inference.model.predictor import OutputError
from gen_worker.inference.model.process import limit_memory
from gen_worker.trainer.attempt.failure import kind_of, say

if TYPE_CHECKING:
    from gen_worker.inference.offline.part import PartMaker

logger = logging.getLogger("gen_worker.inference")

MAX_WORDS = 10_000  # of an exception; the log has all of it
_json = msgspec.json.Encoder(enc_hook=plain_value)


class ModelWorker:
    def __init__(self, link: socket.socket, model: LoadedModel, options: ModelOptions) -> None:
        self._link = link
        self._model = model
        self._reader = PartsReader(model.schema)
        self._options = options
        self._parts: PartMaker | None = None
        self._streams: dict[int, Iterator[Any]] = {}
        self._credit: dict[int, int] = {}  # how many items of each stream may be sent
        self._poll = select.poll()
        self._poll.register(link, select.POLLIN)
        # A child must not answer in this process's place, nor keep the link open after its end.
        os.register_at_fork(after_in_child=link.close)

    def run(self, when_ready: Callable[[], None] = lambda: None) -> int:
        """Until the other end is closed. Returns the exit code. `when_ready` is called before the first work is read."""
        self._link.setblocking(True)
        self._model.settle(self._options)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            send_frame(self._link, self._ready())
            when_ready()
            limit_memory(self._options.memory_mb)
            while self._turn():
                pass
        return 0

    def _ready(self) -> Ready:
        model = self._model
        return Ready(
            pid=os.getpid(),
            inputs=model.inputs,
            outputs=model.outputs,
            can_stream=model.predictor.can_stream,
            probe_ms=model.probe_ms,
            load_ms=model.load_ms,
        )

    def _turn(self) -> bool:
        """One frame, or one item of every stream with credit while there is none. False at the end of the link."""
        wanted = [stream for stream in self._streams if self._credit[stream] > 0]
        if wanted and not self._poll.poll(0):
            for stream in wanted:
                self._send_item(stream)
            return True
        try:
            frame = receive_frame(self._link, to_worker_decoder)
        except (FrameError, ConnectionResetError) as fault:
            logger.warning("the link of a model worker broke: %s", fault)
            return False
        if frame is None:
            return False
        message, payload = frame
        match message:
            case Work():
                self._answer(message, payload)
            case PredictGroup():
                self._predict_group(message)
            case OpenStream():
                self._open(message, payload)
            case MoreItems(stream=stream, credit=credit):
                if stream in self._streams:
                    self._credit[stream] += credit
            case CloseStream(stream=stream):
                if stream in self._streams:
                    self._end(stream)
        return True

    def _answer(self, work: Work, payload: memoryview) -> None:
        started_s = time.perf_counter()
        try:
            parts, content = self._compute(work.parts, payload, work.shape)
        except Exception as fault:
            send_frame(self._link, self._raised(work.batch, fault))
            return
        compute_ms = (time.perf_counter() - started_s) * 1000
        send_frame(self._link, Answers(batch=work.batch, parts=parts, compute_ms=compute_ms), content)

    def _compute(
        self, parts: tuple[Part, ...], payload: memoryview, shape: int
    ) -> tuple[tuple[Part, ...], list[Any]]:
        batch = self._reader.read(parts, payload, shape)
        answer = self._model.predictor.predict(batch)
        encoded: list[Part] = []
        content: list[Any] = []
        start = 0
        for part in parts:
            one, pieces = encode_answer(answer.slice(start, start + part.num_rows), part.answer)
            encoded.append(one)
            content += pieces
            start += part.num_rows
        return tuple(encoded), content

    def _predict_group(self, message: PredictGroup) -> None:
        if self._parts is None:
            from gen_worker.inference.offline.part import PartMaker

            self._parts = PartMaker(self._model, partial(send_frame, self._link), self._raised)
        self._parts.make(message)

    def _raised(self, batch: int, fault: Exception) -> Raised:
        error_id, kind, words = describe_fault(fault, "predict")
        return Raised(batch=batch, kind=kind, error_id=error_id, words=words)

    def _open(self, message: OpenStream, payload: memoryview) -> None:
        try:
            row = self._reader.read((message.part,), payload, 1)
            self._streams[message.stream] = self._model.predictor.stream(row)
            self._credit[message.stream] = message.credit
        except Exception as fault:
            self._end(message.stream, fault)

    def _send_item(self, stream: int) -> None:
        self._credit[stream] -= 1
        try:
            item = next(self._streams[stream])
            content = _json.encode(item)
        except StopIteration:
            self._end(stream)
        except Exception as fault:
            self._end(stream, fault)
        else:
            send_frame(self._link, StreamItem(stream=stream), [content])

    def _end(self, stream: int, fault: Exception | None = None) -> None:
        items = self._streams.pop(stream, None)
        self._credit.pop(stream, None)
        close = getattr(items, "close", None)
        if close is not None:
            try:
                close()
            except Exception:  # of the author's `finally`
                logger.exception("closing a stream raised")
        if fault is None:
            send_frame(self._link, StreamEnd(stream=stream))
            return
        error_id, kind, words = describe_fault(fault, "predict_stream")
        send_frame(self._link, StreamEnd(stream=stream, kind=kind, error_id=error_id, words=words))


def describe_fault(fault: Exception, hook: str) -> tuple[str, Any, str]:
    """(id, kind, words); the traceback goes into the log under the id. Never raises, whatever the author's objects do."""
    error_id = secrets.token_hex(8)
    said = say(fault)
    if isinstance(fault, RowsError):
        return error_id, "input", said[:MAX_WORDS]
    if isinstance(fault, OutputError):
        _log_error("%s: %s", error_id, said)
        return error_id, fault.kind, said[:MAX_WORDS]
    _log_error("%s: %s raised", error_id, hook, exc_info=fault)
    notes = [note for note in getattr(fault, "__notes__", None) or () if isinstance(note, str)]
    return error_id, "error", "; ".join([f"{kind_of(fault)}: {said}"[:MAX_WORDS], *notes])[: 2 * MAX_WORDS]


def _log_error(text: str, *values: str, exc_info: Exception | None = None) -> None:
    """Whatever the author's code did to the log: the error is answered."""
    with contextlib.suppress(Exception):
        logger.error(text, *values, exc_info=exc_info)
