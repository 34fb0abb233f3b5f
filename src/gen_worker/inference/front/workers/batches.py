"""What a model worker computes with one call: the rows of several queries, and whose row of the answer is whose."""

import time
from collections.abc import Sequence
from itertools import groupby

from gen_worker.inference.frames import Buffer
from gen_worker.inference.front.queries import Query
from gen_worker.inference.front.rows import AnswerBlock, join_rows
from gen_worker.inference.messages import Answers, Part


class Batch:
    """What a worker computes with one call. Queries of one group have the same layout, and are one part."""

    __slots__ = ("groups", "is_alone", "num_rows", "number", "sent_at", "shape")

    def __init__(
        self, number: int, groups: Sequence[Sequence[Query]], num_rows: int, shape: int, *, is_alone: bool
    ) -> None:
        self.number = number
        self.groups = groups
        self.num_rows = num_rows
        self.shape = shape
        self.is_alone = is_alone  # one row, after a worker ended that computed it with others
        self.sent_at = time.monotonic()

    @property
    def queries(self) -> list[Query]:
        return [query for group in self.groups for query in group]

    def encode(self) -> tuple[tuple[Part, ...], list[Buffer]]:
        """A part for each group, and the payload of all."""
        parts: list[Part] = []
        payload: list[Buffer] = []
        for group in self.groups:
            part, pieces = join_rows([query.rows for query in group])
            parts.append(part)
            payload += pieces
        return tuple(parts), payload


def group_queries(queries: Sequence[Query]) -> list[list[Query]]:
    """Neighbours whose rows can be joined."""
    first = queries[0].rows.layout
    if not first.is_ipc and all(query.rows.layout is first for query in queries):
        return [[*queries]]
    groups: list[list[Query]] = []
    for layout, neighbours in groupby(queries, key=lambda query: query.rows.layout):
        group = [*neighbours]
        groups += [[query] for query in group] if layout.is_ipc else [group]
    return groups


def read_blocks(batch: Batch, message: Answers, payload: memoryview) -> list[AnswerBlock]:
    """One for each group. ValueError where it does not fit what was sent: never somebody else's rows."""
    if len(message.parts) != len(batch.groups):
        raise ValueError(f"it answers {len(message.parts)} parts, expected {len(batch.groups)}")
    blocks = []
    start = 0
    for part, group in zip(message.parts, batch.groups, strict=True):
        num_rows = sum([query.num_rows for query in group])
        if part.num_rows != num_rows:
            raise ValueError(f"it answers {part.num_rows} rows, expected {num_rows}")
        stop = start + part.payload_bytes
        block = AnswerBlock(part, payload[start:stop])
        block.check()
        blocks.append(block)
        start = stop
    if start != len(payload):
        raise ValueError(f"its answer has {len(payload)} bytes, expected {start}")
    return blocks
