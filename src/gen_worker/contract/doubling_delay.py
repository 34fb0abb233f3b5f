"""How long to wait before the next try: twice as long after each failure, up to a limit."""


class DoublingDelay:
    """Not shared between threads."""

    def __init__(self, first_s: float, max_s: float) -> None:
        self._first_s = self._next_s = first_s
        self._max_s = max_s

    def next_s(self) -> float:
        """How long to wait after this failure."""
        delay_s = self._next_s
        self._next_s = min(2 * delay_s, self._max_s)
        return delay_s

    def reset(self) -> None:
        """It worked."""
        self._next_s = self._first_s
