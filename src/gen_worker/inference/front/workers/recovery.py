"""What becomes of the rows of a batch that raised, or whose worker ended."""

import logging
import math
import secrets
from collections import deque

from gen_worker.inference.front.figures import PoolCounters
from gen_worker.inference.front.queries import Query
from gen_worker.inference.front.refusals import poisoned, refuse_raised
from gen_worker.inference.front.workers.batches import Batch
from gen_worker.inference.front.workers.quarantine import Quarantine
from gen_worker.inference.front.workers.replica import Replica
from gen_worker.inference.messages import Raised
from gen_worker.inference.model.orders import WorkerEnd


class Recovery:
    """Of one pool."""

    def __init__(self, counters: PoolCounters, log: logging.Logger) -> None:
        self.again: deque[list[Query]] = deque()  # parts of batches that raised: each is a batch of its own
        self.quarantine = Quarantine()
        self._counters = counters
        self._log = log

    def divide(self, batch: Batch, raised: Raised) -> None:
        """Of a batch that raised: answer the row that is alone, halve what is more."""
        self._counters.raised_batches += 1
        queries = [query for query in batch.queries if not query.is_closed]
        if not queries:
            return
        if raised.kind in ("row_count", "output") or (len(queries) == 1 and queries[0].num_rows == 1):
            refusal = refuse_raised(raised)
            for query in queries:
                query.answer(refusal)
            return
        if len(queries) == 1:
            query = queries[0]
            query.min_shape = (
                batch.shape
            )  # what raises now may be answered the next time: then all rows are alike
            halves = [[part] for part in query.divide(math.ceil(query.num_rows / 2))]
        else:
            middle = math.ceil(len(queries) / 2)
            halves = [queries[:middle], queries[middle:]]
        self.again.extendleft(reversed(halves))

    def suspect(self, replica: Replica, batch: Batch, end: WorkerEnd | None) -> None:
        queries = [query for query in batch.queries if not query.is_closed]
        if not batch.is_alone:
            for query in queries:
                query.min_shape = batch.shape
                replica.suspects.extend([query] if query.num_rows == 1 else query.divide(1))
            return
        for query in queries:
            query.num_deaths += 1
            # Somebody else may have killed it, or memory was short for a moment: that is no proof against the row.
            is_proven = replica.is_killed or end is None or end.signal not in ("SIGKILL", "SIGTERM")
            if is_proven or query.num_deaths > 1:
                error_id = secrets.token_hex(8)
                self._log.error(
                    "%s: a row of a request ends its model worker; it is not computed any more", error_id
                )
                self._counters.quarantined_rows += 1
                self.quarantine.add(query.rows)
                query.answer(poisoned([0], error_id=error_id))
            else:
                replica.suspects.appendleft(query)
