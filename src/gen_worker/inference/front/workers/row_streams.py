"""Calls of `predict_stream` that run."""

from collections.abc import Callable, Sequence

from gen_worker.inference.front.refusals import RETRY_AFTER_S, Refusal, refuse_stream, unavailable
from gen_worker.inference.front.rows import Rows
from gen_worker.inference.front.workers.replica import Replica
from gen_worker.inference.messages import CloseStream, MoreItems, OpenStream, StreamEnd, StreamItem

MAX_STREAMS = 16  # of one worker
CREDIT = 16  # items that a worker may be ahead of the client


class RowStream:
    """One call. `item` gets each item as JSON, `end` a refusal or None, once and last."""

    def __init__(
        self,
        item: Callable[[bytes], None],
        end: Callable[[Refusal | None], None],
        replica: Replica,
        number: int,
    ) -> None:
        self.item = item
        self.end = end
        self.replica = replica
        self.number = number
        self.is_ended = False  # by its worker, or because its reader has left

    def more(self, count: int = 1) -> None:
        """So many items were passed on: as many further ones may come."""
        if not self.is_ended:
            self.replica.send(MoreItems(stream=self.number, credit=count))

    def close(self) -> None:
        """Its reader has left. `end` is not called."""
        if not self.is_ended:
            self.is_ended = True
            self.replica.send(CloseStream(stream=self.number))


class RowStreams:
    """Those of one pool."""

    def __init__(self) -> None:
        self._open: dict[int, RowStream] = {}
        self._last_number = 0

    def __bool__(self) -> bool:
        return bool(self._open)

    def open(
        self,
        rows: Rows,
        item: Callable[[bytes], None],
        end: Callable[[Refusal | None], None],
        replicas: Sequence[Replica],
    ) -> RowStream:
        """By the worker that has the fewest of them. Refusal where none can take it."""
        ready = [replica for replica in replicas if replica.ready is not None]
        if not ready:
            raise unavailable("no model worker is ready")
        replica = min(ready, key=lambda each: len(each.streams))
        if len(replica.streams) >= MAX_STREAMS:
            raise Refusal(
                "queue_full", f"{MAX_STREAMS} streams run on each model worker", retry_after_s=RETRY_AFTER_S
            )
        self._last_number += 1
        stream = self._open[self._last_number] = RowStream(item, end, replica, self._last_number)
        replica.streams.add(stream.number)
        part, payload = rows.encode()
        replica.send(OpenStream(stream=stream.number, part=part, credit=CREDIT), payload)
        return stream

    def receive(self, message: StreamItem | StreamEnd, payload: memoryview) -> None:
        stream = self._open.get(message.stream)
        if stream is None:
            return
        if isinstance(message, StreamEnd):
            self._end(stream, refuse_stream(message))
        elif not stream.is_ended:
            stream.item(bytes(payload))

    def end_all(self, replica: Replica, refusal: Refusal | None = None) -> None:
        """Those of a worker that has ended."""
        gone = refusal or Refusal("error", "the model worker ended while it computed the stream")
        for number in [*replica.streams]:
            self._end(self._open[number], gone)

    def _end(self, stream: RowStream, refusal: Refusal | None) -> None:
        del self._open[stream.number]
        stream.replica.streams.discard(stream.number)
        if not stream.is_ended:
            stream.is_ended = True
            stream.end(refusal)
