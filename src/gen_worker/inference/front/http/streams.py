"""`POST /v1/stream`: what `predict_stream` yields for one row, as server-sent events or as lines of JSON."""

import asyncio

import msgspec

from gen_worker.inference.front.http.exchange import Exchange
from gen_worker.inference.front.refusals import Refusal, missed_deadline
from gen_worker.inference.front.rows import Rows
from gen_worker.inference.front.served import Served, answer_headers
from gen_worker.inference.front.workers.row_streams import RowStream

SSE, NDJSON = b"text/event-stream", b"application/x-ndjson"


class StreamedAnswer:
    """One stream on its way to a client. A client that reads slowly slows the model down; one that leaves ends it.

    An error before the first item is answered by a status, as of any request; a later one is the last event.
    """

    def __init__(self, exchange: Exchange, served: Served, rows: Rows, deadline_ms: int | None) -> None:
        """Refusal where the model worker cannot be asked."""
        self._exchange = exchange
        self._served = served
        self._is_sse = NDJSON not in exchange.head.headers.get(b"accept", b"")
        self._has_begun = False
        self._num_owed = 0  # items that were passed on, and that the client has not read
        self._timer: asyncio.TimerHandle | None = None
        self._stream: RowStream = served.pool.open_stream(rows, self._pass_on, self._end)
        exchange.left = self._leave
        if deadline_ms is not None:
            self._timer = asyncio.get_running_loop().call_later(deadline_ms / 1000, self._miss_deadline)

    def _pass_on(self, item: bytes) -> None:
        if not self._has_begun:
            self._has_begun = True
            content_type = SSE if self._is_sse else NDJSON
            self._exchange.begin(content_type, answer_headers(self._served.facts, None), self._resume)
        self._num_owed += 1
        data = b"data: %b\n\n" % item if self._is_sse else b'{"item":%b}\n' % item
        if self._exchange.add(data):
            self._resume()

    def _resume(self) -> None:
        owed, self._num_owed = self._num_owed, 0
        if owed:
            self._stream.more(owed)

    def _end(self, refusal: Refusal | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        exchange = self._exchange
        if not self._has_begun:
            if refusal is not None:
                exchange.refuse(refusal)
                return
            exchange.begin(
                SSE if self._is_sse else NDJSON, answer_headers(self._served.facts, None), self._resume
            )
        if refusal is None:
            exchange.add(b"event: end\ndata: {}\n\n" if self._is_sse else b'{"end":true}\n')
        else:
            error = msgspec.json.encode(refusal.document(exchange.request_id.decode("ascii")))
            exchange.add(b"event: error\ndata: %b\n\n" % error if self._is_sse else error + b"\n")
        exchange.finish()

    def _leave(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._stream.close()

    def _miss_deadline(self) -> None:
        self._stream.close()
        self._end(missed_deadline())
