"""A window of your own with a bar for each live run. `python own_window.py [HOME]`; it needs the extra `qt`."""

import signal
import sys

from PySide6.QtCore import Slot
from PySide6.QtGui import QCloseEvent
from PySide6.QtWidgets import QApplication, QFormLayout, QProgressBar, QWidget

from trn.proto.records import Run
from trn.qt import TrainerQBridgeThread, WatchRequest


class RunBars(QWidget):
    def __init__(self, home: str | None = None) -> None:
        super().__init__()
        self.bars: dict[str, QProgressBar] = {}
        self.rows = QFormLayout(self)
        self.bridge = TrainerQBridgeThread(home, WatchRequest(is_live_only=True))
        self.bridge.runUpdated.connect(self.show_run)
        self.bridge.connectionChanged.connect(self.show_connection)
        self.bridge.start()

    @Slot(object)  # without it, PySide6 may call the method in the wrong thread
    def show_run(self, run: Run) -> None:
        if run.run_id not in self.bars:
            self.bars[run.run_id] = QProgressBar()
            self.rows.addRow(run.run_id, self.bars[run.run_id])
        bar = self.bars[run.run_id]
        bar.setMaximum(run.end_step or 0)  # 0: it only shows that something happens
        bar.setValue(run.step)
        bar.setFormat(f"{run.state} %p%")
        bar.setToolTip(run.reason)

    @Slot(str)
    def show_connection(self, state: str) -> None:
        self.setWindowTitle(f"My runs ({state})")

    def closeEvent(self, event: QCloseEvent) -> None:  # noqa: N802 - a name of Qt
        self.bridge.stop()
        super().closeEvent(event)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # else Ctrl+C waits until Qt calls something of Python
    application = QApplication(sys.argv)
    window = RunBars(*sys.argv[1:])
    window.show()
    sys.exit(application.exec())
