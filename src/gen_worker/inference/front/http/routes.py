"""What each path does."""

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Coroutine
from importlib.metadata import version
from typing import Any

import msgspec

from gen_worker.inference.front.answering import Answering
from gen_worker.inference.front.formats import oip
from gen_worker.inference.front.formats.json_rows import NOT_JSON, encode_answer, read_untyped, refuse_body
from gen_worker.inference.front.formats.openapi import describe_api
from gen_worker.inference.front.formats.prometheus import CONTENT_TYPE, describe_figures
from gen_worker.inference.front.http.exchange import Exchange, Route
from gen_worker.inference.front.http.streams import StreamedAnswer
from gen_worker.inference.front.refusals import Refusal
from gen_worker.inference.front.rows import Answer, Rows
from gen_worker.inference.front.served import Served

Feedback = Callable[[list[dict[str, Any]]], Awaitable[Any]]
_JSON_TYPES = frozenset(
    {b"application/json", b"application/json; charset=utf-8", b"application/json;charset=utf-8"}
)
ARROW_TYPE = b"application/vnd.apache.arrow.stream"
MAX_ON_LOOP = 4 << 20  # bytes of a stream that is checked without a thread


def require_json(exchange: Exchange) -> None:
    content_type = exchange.head.content_type
    if content_type not in _JSON_TYPES:
        raise wrong_media_type(content_type, "application/json")


def wrong_media_type(content_type: bytes, expected: str) -> Refusal:
    return Refusal(
        "media_type", f"Content-Type is {content_type[:100].decode('latin-1')!r}, expected {expected}"
    )


def _answer_json(exchange: Exchange, document: Any, status: int = 200) -> None:
    exchange.answer(status, msgspec.json.encode(document))


class FeedbackBody(msgspec.Struct, forbid_unknown_fields=True):
    rows: list[dict[str, Any]]


class Routes:
    """The handlers. Those that wait are tasks of their own; `close` ends them."""

    def __init__(self, name: str, answering: Answering, *, log: logging.Logger) -> None:
        self.on_feedback: Feedback | None = None
        self._name = name
        self._version = version("trn")
        self._answering = answering
        self._log = log
        self._tasks: set[asyncio.Task[None]] = set()
        model = f"/v2/models/{name}".encode()
        self.table: dict[bytes, Route] = {
            b"/v1/predict": Route(method=b"POST", handle=self.predict),
            b"/v1/stream": Route(method=b"POST", handle=self.stream),
            b"/v1/feedback": Route(method=b"POST", handle=self.feedback),
            model + b"/infer": Route(method=b"POST", handle=self.infer),
            model + b"/ready": Route(method=b"GET", handle=self.model_ready, is_open=True),
            model: Route(method=b"GET", handle=self.model),
            b"/v2": Route(method=b"GET", handle=self.server),
            b"/v2/health/live": Route(method=b"GET", handle=self.live, is_open=True),
            b"/v2/health/ready": Route(method=b"GET", handle=self.ready, is_open=True),
            b"/health": Route(method=b"GET", handle=self.health, is_open=True),
            b"/metrics": Route(method=b"GET", handle=self.metrics),
            b"/openapi.json": Route(method=b"GET", handle=self.openapi),
        }

    def predict(self, exchange: Exchange) -> None:
        content_type = exchange.head.content_type
        if content_type in _JSON_TYPES:
            served = self._answering.choose(exchange.request_id)
            self._answering.predict(exchange, served, served.reader.read(exchange.body), encode_answer)
        elif content_type == ARROW_TYPE:
            self._predict_arrow(exchange)
        else:
            raise wrong_media_type(content_type, f"application/json or {ARROW_TYPE.decode()}")

    def _predict_arrow(self, exchange: Exchange) -> None:
        served = self._answering.choose(exchange.request_id)
        max_rows = served.pool.limits.max_queue_rows
        if (
            "gen_worker.inference.front.formats.arrow_rows" in sys.modules
            and len(exchange.body) <= MAX_ON_LOOP
        ):
            self._answer_arrow(exchange, served, max_rows)
        else:
            self._run(exchange, self._read_arrow(exchange, served, max_rows))

    async def _read_arrow(self, exchange: Exchange, served: Served, max_rows: int) -> None:
        """Off the loop: the first import takes long, and so does the check of a large stream."""

        def read() -> Rows:
            from gen_worker.inference.front.formats.arrow_rows import read_stream

            return read_stream(exchange.body, served.pool.inputs, max_rows)

        rows = await asyncio.to_thread(read)
        if not exchange.is_gone:
            self._send_arrow(exchange, served, rows)

    def _answer_arrow(self, exchange: Exchange, served: Served, max_rows: int) -> None:
        from gen_worker.inference.front.formats.arrow_rows import read_stream

        self._send_arrow(exchange, served, read_stream(exchange.body, served.pool.inputs, max_rows))

    def _send_arrow(self, exchange: Exchange, served: Served, rows: Rows) -> None:
        from gen_worker.inference.front.formats.arrow_rows import encode_answer as encode_stream

        self._answering.predict(exchange, served, rows, encode_stream, ARROW_TYPE)

    def stream(self, exchange: Exchange) -> None:
        require_json(exchange)
        document = read_untyped(exchange.body)
        if not isinstance(document, dict) or set(document) != {"row"}:
            raise Refusal("input", 'the body is not an object with "row" and nothing else')
        served = self._answering.choose(exchange.request_id)
        if not served.pool.can_stream:
            raise Refusal("not_found", "this model has no predict_stream")
        rows = served.reader.convert([document["row"]])
        StreamedAnswer(exchange, served, rows, self._answering.read_deadline(exchange))

    def feedback(self, exchange: Exchange) -> None:
        if self.on_feedback is None:
            raise Refusal("not_found", "this server takes no feedback")
        require_json(exchange)
        try:
            body = msgspec.json.decode(exchange.body, type=FeedbackBody)
        except NOT_JSON as fault:
            raise refuse_body("an object with a list of rows", fault) from None
        self._run(exchange, self._take_feedback(exchange, self.on_feedback, body.rows))

    async def _take_feedback(
        self, exchange: Exchange, on_feedback: Feedback, rows: list[dict[str, Any]]
    ) -> None:
        result = await on_feedback(rows)
        exchange.answer(200, msgspec.json.encode(result))

    # The Open Inference Protocol.

    def infer(self, exchange: Exchange) -> None:
        if b"inference-header-content-length" in exchange.head.headers:
            raise oip.refuse_binary()
        require_json(exchange)
        served = self._answering.choose(exchange.request_id)
        request, rows = oip.read_request(exchange.body, served.reader)

        def encode(answer: Answer) -> bytes:
            return oip.encode_answer(answer, request, self._name)

        self._answering.predict(exchange, served, rows, encode)

    def server(self, exchange: Exchange) -> None:
        _answer_json(exchange, {"name": "trn", "version": self._version, "extensions": []})

    def model(self, exchange: Exchange) -> None:
        served = self._answering.choose(exchange.request_id)
        pool = served.pool
        _answer_json(exchange, oip.describe_model(self._name, served.facts, pool.inputs, pool.outputs))

    def live(self, exchange: Exchange) -> None:
        _answer_json(exchange, {"live": True})

    def ready(self, exchange: Exchange) -> None:
        is_ready = self._answering.is_ready
        _answer_json(exchange, {"ready": is_ready}, 200 if is_ready else 503)

    def model_ready(self, exchange: Exchange) -> None:
        is_ready = self._answering.is_ready
        _answer_json(exchange, {"name": self._name, "ready": is_ready}, 200 if is_ready else 503)

    # What describes the server.

    def health(self, exchange: Exchange) -> None:
        live, is_ready = self._answering.live, self._answering.is_ready
        document: dict[str, Any] = {"status": "ok" if is_ready else "unavailable", "name": self._name}
        if live is not None:
            document["version"] = live.facts
        _answer_json(exchange, document, 200 if is_ready else 503)

    def metrics(self, exchange: Exchange) -> None:
        text = describe_figures(self._answering.figures, self._answering.pools)
        exchange.answer(200, text.encode(), content_type=CONTENT_TYPE)

    def openapi(self, exchange: Exchange) -> None:
        served = self._answering.choose(exchange.request_id)
        document = describe_api(
            self._name,
            served.facts,
            served.pool.inputs,
            served.pool.outputs,
            can_stream=served.pool.can_stream,
            takes_feedback=self.on_feedback is not None,
            needs_bearer=exchange.connection.reception.bearer is not None,
        )
        _answer_json(exchange, document)

    def _run(self, exchange: Exchange, work: Coroutine[Any, Any, None]) -> None:
        """Work of a request that waits. What it raises is answered."""

        async def answer() -> None:
            try:
                await work
            except Refusal as refusal:
                exchange.refuse(refusal)
            except Exception:
                exchange.refuse(self._answering.note_fault(exchange, "the request"))

        task = asyncio.get_running_loop().create_task(answer())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
