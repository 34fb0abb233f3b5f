"""`qt_shown_script.py HOME BEGUN`: `trn gui` until its table has rows; prints when it was painted and when they came."""

import json
import sys
import time
from pathlib import Path
from typing import Any

from PySide6.QtCore import QTimer, Slot

from trn.core.home import Home
from trn.qt import application
from trn.qt.window import TrainerWindow

LOOK_EVERY_MS = 2


class TimedWindow(TrainerWindow):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.took_ms: dict[str, float] = {}
        self.look = QTimer(self)
        self.look.timeout.connect(self.take_rows)

    def paintEvent(self, event: Any) -> None:  # noqa: N802
        super().paintEvent(event)
        if not self.took_ms:
            self.took_ms["ms"] = 1e3 * (time.time() - float(sys.argv[2]))
            self.took_ms["cpu_ms"] = 1e3 * time.process_time()
            self.look.start(LOOK_EVERY_MS)

    @Slot()
    def take_rows(self) -> None:
        if self.table.runs.rowCount():
            self.took_ms["rows_ms"] = 1e3 * (time.time() - float(sys.argv[2]))
            print(json.dumps(self.took_ms), flush=True)
            self.look.stop()
            self.close()


def fail(words: str) -> int:
    print(words, file=sys.stderr, flush=True)
    return 1


application.TrainerWindow = TimedWindow  # type: ignore[misc]
sys.exit(application.run(Home(Path(sys.argv[1])), fail))
