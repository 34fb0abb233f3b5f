"""What a model server says in its events, for the registry: ready, promoted or refused, and feedback that is due.

An author's own events may have these names, too: the registry takes them of servers alone, and what has other fields is
passed over.
"""

import logging
from collections.abc import Sequence

import msgspec

from gen_worker.contract.serving import (
    FeedbackDueEvent,
    PromotedEvent,
    PromotionRefusedEvent,
    ReadyEvent,
)
from trn.daemon.ingest.event_file import Chunk
from trn.registry.serving.served import ServerEvent

logger = logging.getLogger("trn.ingest")

_DECODERS: dict[str, msgspec.json.Decoder[ServerEvent]] = {
    "ready": msgspec.json.Decoder(ReadyEvent),
    "promoted": msgspec.json.Decoder(PromotedEvent),
    "promotion_refused": msgspec.json.Decoder(PromotionRefusedEvent),
    "feedback_due": msgspec.json.Decoder(FeedbackDueEvent),
}


def read_server_events(chunks: Sequence[Chunk], after_seq: int) -> list[tuple[int, ServerEvent]]:
    """(when in ms, event), in order, of those after `after_seq`."""
    found: list[tuple[int, ServerEvent]] = []
    for chunk in chunks:
        if not any(event.event in _DECODERS for event in chunk.events):
            continue
        for event, line in zip(chunk.events, chunk.lines.split(b"\n")[:-1], strict=True):
            decoder = _DECODERS.get(event.event)
            if decoder is None or event.seq <= after_seq:
                continue
            try:
                found.append((event.timestamp_ms, decoder.decode(line)))
            except msgspec.MsgspecError as fault:
                logger.info(
                    "run %s: its event %d, %s, is not a server's: %s",
                    event.run_id,
                    event.seq,
                    event.event,
                    fault,
                )
    return found
