"""Which parts of the work after a step are done, so that each is done once.

Invariant: the journal is opened before anything that can raise, and a part is done once it has returned. A checkpoint
saved in between contains the journal: a resume continues with the first part that is not done. A callback that raised
is called again; those before it are not.
"""

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any

from gen_worker.errors import CheckpointError
from gen_worker.trainer.attempt.state import MetricsRecord
from gen_worker.trainer.callbacks.callback_list import CallbackList


class Part(IntEnum):
    """In the order of their execution. Checkpoints contain the name."""

    METRICS = 0
    ON_METRICS = 1
    VALIDATION = 2  # with `on_validation_begin`
    VALIDATED = 3
    ON_VALIDATION_END = 4
    ON_VALIDATION_METRICS = 5
    ON_EPOCH_END = 6
    ON_EPOCH_BEGIN = 7  # of the next epoch
    TEST = 8
    TESTED = 9
    ON_TEST_METRICS = 10
    FINAL_CHECKPOINT = 11  # by the loop; never saved as done


Mark = tuple[bool, int, int]


class WorkJournal:
    """Of one step at a time. `values` and `record`: measured, not reported yet."""

    def __init__(self, callbacks: CallbackList) -> None:
        self.is_open = False
        self.values: Mapping[str, float] = {}
        self.record: MetricsRecord | None = None
        self._callbacks = callbacks
        self._step = 0
        self._at: int = Part.METRICS
        self._called: list[str] = []  # the callbacks that have returned from the hook of this part

    @property
    def mark(self) -> Mark:
        """Changes whenever a part is done."""
        return (self.is_open, self._at, len(self._called)) if self.is_open else (False, 0, 0)

    def open(self, step: int, part: Part = Part.METRICS) -> None:
        """Start the work of `step` with this part, unless an interrupted attempt was further."""
        if not self.is_open or self._step != step or self._at < part:
            self.close()
            self.is_open, self._step, self._at = True, step, part

    def close(self) -> None:
        self.is_open, self._at = False, Part.METRICS
        self._called.clear()
        self.values, self.record = {}, None

    def has_left(self, part: Part) -> bool:
        """True where this part is not done."""
        return self._at <= part

    def do(self, part: Part, action: Callable[[], object]) -> None:
        """Do the part, unless it is done."""
        if self._at <= part:
            if self._at != part:
                self._reach(part)
            action()
            self._reach(part + 1)

    def call(self, part: Part, hook: str, *args: Any) -> None:
        """Call the hook of every callback that has not returned from it yet."""
        if self._at <= part:
            if self._at != part:
                self._reach(part)
            if self._callbacks.hooks[hook]:
                self._callbacks.call_rest(hook, args, self._called)
            self._reach(part + 1)

    def _reach(self, part: int) -> None:
        self._at = part
        self._called.clear()

    def to_saved(self) -> dict[str, Any] | None:
        """Plain values for a checkpoint; None where all is done."""
        if not self.is_open:
            return None
        record = self.record
        return {
            "part": Part(self._at).name.lower(),
            "called": list(self._called),
            "values": dict(self.values),
            "record": None if record is None else record.to_saved(),
        }

    def restore(self, step: int, saved: Mapping[str, Any]) -> None:
        """From what `to_saved` returned at `step`."""
        name = str(saved["part"])
        if name.upper() not in Part.__members__:
            raise CheckpointError(
                f"the checkpoint needs the work {name!r} after step {step}, which is unknown to this release: resume with"
                " the release that wrote it"
            )
        self.is_open, self._step, self._at = True, step, Part[name.upper()]
        self._called[:] = saved["called"]
        self.values = dict(saved["values"])
        self.record = None if saved["record"] is None else MetricsRecord(**saved["record"])
