"""Python's garbage collector, kept in the thread of the window.

By itself it runs in whichever thread makes the next object. There it would also destroy widgets that are part of a cycle, and
Qt allows that in their own thread alone.
"""

import gc

from PySide6.QtCore import QObject, QTimer, Slot

LOOK_EVERY_MS = 500


class GarbageTimer(QTimer):
    """Collects in the thread that made it, as often as Python would. For the whole process; `stop` gives that up."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.setInterval(LOOK_EVERY_MS)
        self.timeout.connect(self._collect)
        gc.disable()
        self.start()

    def stop(self) -> None:
        super().stop()
        gc.enable()

    @Slot()
    def _collect(self) -> None:
        for generation in (2, 1, 0):  # a collection of one includes the younger ones
            threshold = gc.get_threshold()[generation]
            if threshold and gc.get_count()[generation] > threshold:
                gc.collect(generation)
                return
