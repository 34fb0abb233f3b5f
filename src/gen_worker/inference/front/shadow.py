"""A second version that answers the same rows: its answers are compared with those that were sent."""

import math
from typing import Any

from gen_worker.inference.front.figures import Figures
from gen_worker.inference.front.pool import ReplicaPool
from gen_worker.inference.front.queries import Outcome, Query
from gen_worker.inference.front.refusals import Refusal
from gen_worker.inference.front.rows import Answer, Rows

MAX_WAITING = 256  # comparisons that wait for the shadow: a slow one sees a part of the requests


class Shadow:
    """Changes no answer and delays none: a full queue means that a request is not compared."""

    def __init__(self, pool: ReplicaPool, figures: Figures) -> None:
        self.pool = pool
        self._figures = figures
        self._num_waiting = 0

    def compare(self, rows: Rows, answer: Answer) -> None:
        """Ask the shadow the same, and count whether its answer is that one."""
        if self._num_waiting >= MAX_WAITING:
            return
        self._num_waiting += 1

        def receive(outcome: Outcome) -> None:
            self._num_waiting -= 1
            self._note(answer, outcome, rows.num_rows)

        self.pool.submit(Query(rows, receive))

    def _note(self, answer: Answer, outcome: Outcome, num_rows: int) -> None:
        figures = self._figures
        if isinstance(outcome, Refusal):
            figures.shadow_failed += num_rows
            return
        for live, shadowed in zip(_read_rows(answer), _read_rows(outcome), strict=True):
            difference = compare_values(live, shadowed)
            if difference == 0:
                figures.shadow_equal += 1
            else:
                figures.shadow_different += 1
                if math.isfinite(difference):
                    figures.shadow_largest_difference = max(figures.shadow_largest_difference, difference)


def _read_rows(answer: Answer) -> list[dict[str, Any]]:
    if answer.pieces[0][0].part.encoding == "columns":
        return answer.rows()
    from gen_worker.inference.front.formats.arrow_rows import decode_answer

    return decode_answer(answer)


def compare_values(one: Any, other: Any) -> float:
    """The largest difference of numbers in the same places; infinite where they are not alike otherwise."""
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return math.inf
        return max((compare_values(value, other[name]) for name, value in one.items()), default=0.0)
    if isinstance(one, list) and isinstance(other, list):
        if len(one) != len(other):
            return math.inf
        return max((compare_values(*pair) for pair in zip(one, other, strict=True)), default=0.0)
    if one == other or (one != one and other != other):  # noqa: PLR0124  both are not a number
        return 0.0
    if isinstance(one, int | float) and isinstance(other, int | float):
        difference = abs(one - other)
        return math.inf if math.isnan(difference) else difference
    return math.inf
