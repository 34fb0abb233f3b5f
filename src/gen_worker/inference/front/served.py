"""A pool as the routes see it: how its rows are read, and what says which version it is."""

from functools import lru_cache

from gen_worker.contract.job.model_version import VersionFacts
from gen_worker.inference.front.formats.json_rows import RowReader
from gen_worker.inference.front.pool import ReplicaPool


class Served:
    """Made once for each pool that answers requests."""

    def __init__(self, pool: ReplicaPool) -> None:
        self.pool = pool
        self.facts = pool.facts
        self.reader = RowReader(pool.inputs, max_rows=pool.limits.max_queue_rows)


@lru_cache(maxsize=256)
def answer_headers(facts: VersionFacts, shape: int | None) -> bytes:
    """Lines that say what made an answer. A stream has no batch shape."""
    values = {
        "X-Trn-Run": facts.run_id,
        "X-Trn-Step": facts.step,
        "X-Trn-Weights": facts.weights_hash,
        "X-Trn-Code": facts.code_hash,
    }
    if shape is not None:
        values["X-Trn-Batch-Shape"] = shape
    return "".join(f"{name}: {_one_line(str(value))}\r\n" for name, value in values.items()).encode("ascii")


def _one_line(text: str) -> str:
    """What a header may hold."""
    return "".join(letter if 0x20 <= ord(letter) < 0x7F else "?" for letter in text)
