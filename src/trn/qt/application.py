"""The program of `trn gui`."""

import gc
import os
import signal
import sys
from types import FrameType

from PySide6.QtCore import QSettings
from PySide6.QtWidgets import QApplication

from trn.core.home import Home
from trn.qt.garbage import GarbageTimer
from trn.qt.window import TrainerWindow

EXIT_TIMEOUT_MS = 60_000  # an import or a code snapshot cannot be cancelled


def run(home: Home) -> int:
    """Show the window until it is closed. SIGINT and SIGTERM close it, too."""
    home.make()
    application = QApplication(sys.argv[:1])
    application.setApplicationName("trn")
    application.setDesktopFileName("trn")
    gc.freeze()  # what is imported by now is never garbage
    timer = GarbageTimer(application)  # with it Python also gets to handle signals
    window = TrainerWindow(home, QSettings(str(home.window), QSettings.Format.IniFormat))

    def close(_signal: int, _frame: FrameType | None) -> None:
        application.closeAllWindows()
        application.quit()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, close)
    window.show()
    window.start()
    code = application.exec()
    timer.stop()
    for thread in (window.bridge, window.calls):
        if not thread.wait(EXIT_TIMEOUT_MS):
            os._exit(code)  # Python must not end under a thread that uses Qt
    return code
