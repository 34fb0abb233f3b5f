"""The front of one model server: listens, and gives each request to the version that answers it.

```text
connections ── requests ──> routes ── rows ──> live pool ── batches ──> model workers
                                          ├──> split pool: a share of the requests, by their id
                                          └──> shadow pool: the same rows, its answers are compared and dropped
```
"""

import asyncio
import logging
import secrets
import ssl
from collections.abc import Callable
from contextlib import suppress
from itertools import count

import msgspec

from gen_worker.errors import StartupError
from gen_worker.inference.front.answering import AnsweredRequest, Answering
from gen_worker.inference.front.figures import Figures
from gen_worker.inference.front.http.addresses import UNIX, Address, bind, read_address
from gen_worker.inference.front.http.connection import Connection
from gen_worker.inference.front.http.exchange import Exchange
from gen_worker.inference.front.http.reception import MAX_CONNECTIONS, SWEEP_S, Reception
from gen_worker.inference.front.http.routes import Feedback, Routes
from gen_worker.inference.front.pool import ReplicaPool
from gen_worker.inference.front.refusals import Refusal
from gen_worker.inference.front.served import Served
from gen_worker.inference.front.shadow import Shadow

__all__ = ["AnsweredRequest", "Front", "FrontOptions", "Refusal"]

UNFINISHED_BODIES = 4  # of the largest size that may be received at the same time


class FrontOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How requests are taken."""

    max_body_bytes: int = 64 << 20
    deadline_ms: int | None = None  # for requests that bring none
    bearer: str | None = (
        None  # the secret that requests need; a TCP address needs one, a Unix socket does not use it
    )
    certificate: str | None = None  # PEM files: TLS
    key: str | None = None
    max_connections: int = MAX_CONNECTIONS


class Front:
    """All of it is of the loop's thread."""

    def __init__(self, options: FrontOptions, *, name: str, log: logging.Logger) -> None:
        """`name` is the model's name in the Open Inference Protocol."""
        self._options = options
        self._log = log
        self._answering = Answering(deadline_ms=options.deadline_ms, log=log)
        self._routes = Routes(name, self._answering, log=log)
        numbers, prefix = count(1), secrets.token_hex(6).encode()
        self.reception = Reception(
            routes=self._routes.table,
            max_body_bytes=options.max_body_bytes,
            max_unfinished_bytes=UNFINISHED_BODIES * options.max_body_bytes,
            new_id=lambda: b"%s-%x" % (prefix, next(numbers)),
            answered=self._note_answered,
            failed=self._answering.note_fault,
            max_connections=options.max_connections,
        )
        self._server: asyncio.Server | None = None
        self._path: Address | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    # Hooks, for the server. Set them before `open`.

    @property
    def on_answered(self) -> Callable[[AnsweredRequest], None] | None:
        """Called with each answered request before its answer leaves. What it raises becomes the answer: 500."""
        return self._answering.on_answered

    @on_answered.setter
    def on_answered(self, hook: Callable[[AnsweredRequest], None] | None) -> None:
        self._answering.on_answered = hook

    @property
    def on_feedback(self) -> Feedback | None:
        """Called with the rows of `POST /v1/feedback`. What it returns is answered as JSON; it may raise a Refusal."""
        return self._routes.on_feedback

    @on_feedback.setter
    def on_feedback(self, hook: Feedback | None) -> None:
        self._routes.on_feedback = hook

    @property
    def figures(self) -> Figures:
        """Since the front was made; `stats` has those since the last call."""
        return self._answering.figures

    # Which versions answer. A pool has to be open; who takes one out drains it.

    def switch(self, pool: ReplicaPool) -> ReplicaPool | None:
        """From the next batch on, this one answers. Returns the one before it, which may still compute.

        What waited for the one before it is computed by this one, if both take the same columns.
        """
        before = self._answering.live
        self._answering.live = Served(pool)
        if before is None:
            return None
        if before.pool.inputs == pool.inputs:
            pool.adopt(before.pool.take_waiting())
        return before.pool

    def set_split(self, pool: ReplicaPool | None, percent: float = 0.0) -> ReplicaPool | None:
        """It answers that share of the requests, by their id. Returns the one before it."""
        before = self._answering.split
        self._answering.split = None if pool is None else Served(pool)
        self._answering.split_percent = percent
        return None if before is None else before.pool

    def set_shadow(self, pool: ReplicaPool | None) -> ReplicaPool | None:
        """It answers the same rows, its answers are not sent, and `stats` counts what differs. Returns the one before it."""
        before = self._answering.shadow
        self._answering.shadow = None if pool is None else Shadow(pool, self._answering.figures)
        return None if before is None else before.pool

    # Its life.

    async def open(self, address: str) -> str:
        """Listen; returns the URL. StartupError where that address cannot be used."""
        place = read_address(address)
        context = self._open_tls(place)
        if place.path is None:
            if self._options.bearer is None:
                raise StartupError(f"{address} is a TCP address, which needs a bearer")
            self.reception.bearer = self._options.bearer.encode()
        listener = bind(place)
        loop = asyncio.get_running_loop()
        if place.path is not None:
            self._path = place
            self._server = await loop.create_unix_server(self._connect, sock=listener)
            url = f"{UNIX}{place.path}"
        else:
            self._server = await loop.create_server(self._connect, sock=listener, ssl=context)
            port = listener.getsockname()[1]
            host = f"[{place.host}]" if ":" in place.host else place.host
            url = f"{'http' if context is None else 'https'}://{host}:{port}"
        self._sweep()
        return url

    def stats(self) -> dict[str, float]:
        """The figures since the last call: the values of a `request_stats` event."""
        values = self._answering.figures.take_window()
        if self._answering.live is not None:
            values["serve/queue_rows"] = self._answering.live.pool.queued_rows
        return values

    async def drain(self, deadline_s: float) -> None:
        """Take no more connections, answer what was asked, with 503 from the deadline on, and close."""
        self._answering.is_draining = True
        self.reception.is_closing = True
        if self._server is not None:
            self._server.close()
        for connection in [*self.reception.connections]:
            connection.close_if_idle()
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                while self.reception.connections:
                    self.reception.emptied.clear()
                    await self.reception.emptied.wait()
        self._close()

    def _close(self) -> None:
        gone = Refusal("unavailable", "the server is stopping", retry_after_s=1)
        for connection in [*self.reception.connections]:
            connection.end(gone)
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._path is not None and self._path.path is not None:
            self._path.path.unlink(missing_ok=True)

    def _connect(self) -> Connection:
        return Connection(self.reception)

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        self._sweeper = loop.call_later(SWEEP_S, self._sweep)
        self.reception.sweep()

    def _note_answered(self, exchange: Exchange, status: int) -> None:
        self._answering.figures.note(b"other" if exchange.head.route is None else exchange.head.path, status)

    def _open_tls(self, place: Address) -> ssl.SSLContext | None:
        """None where it is not used. StartupError where it has to be, or where its files cannot be read."""
        certificate, key = self._options.certificate, self._options.key
        if certificate is None:
            if not place.is_loopback:
                raise StartupError(
                    f"{place.host} is not the loopback: without TLS it would send the bearer for all to read;"
                    " use 127.0.0.1 or unix:PATH, or give a certificate"
                )
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(certificate, key)
        except OSError as fault:
            raise StartupError(f"the certificate {certificate} cannot be used: {fault}") from fault
        return context
