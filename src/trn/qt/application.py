"""The program of `trn gui`."""

import gc
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from PySide6.QtCore import QMessageLogContext, QSettings, QTimer, QtMsgType, qInstallMessageHandler
from PySide6.QtWidgets import QApplication

from trn.core.home import Home
from trn.qt.garbage import GarbageTimer
from trn.qt.window import TrainerWindow

EXIT_TIMEOUT_MS = 60_000  # an import or a code snapshot cannot be cancelled


def run(home: Home, fail: Callable[[str], int]) -> int:
    """Show the window until it is closed. SIGINT and SIGTERM close it, too.

    Where Qt finds no screen, the process ends with the code of `fail`, which is given the reason.
    """
    was_signalled = False

    def close() -> None:
        application.closeAllWindows()
        application.quit()

    def take_signal(_signal: int, _frame: FrameType | None) -> None:
        nonlocal was_signalled
        was_signalled = True
        if QApplication.instance() is not None:
            QTimer.singleShot(0, close)  # within the event loop: before it begins, `quit` does nothing

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, take_signal)
    application = _open_screen(fail)
    home.make()
    application.setApplicationName("trn")
    application.setDesktopFileName("trn")
    gc.freeze()  # what is imported by now is never garbage
    timer = GarbageTimer(application)  # with it Python also gets to handle signals
    window = TrainerWindow(home, QSettings(str(home.window), QSettings.Format.IniFormat))
    window.show()
    window.start()
    if was_signalled:
        QTimer.singleShot(0, close)
    code = application.exec()
    timer.stop()
    for thread in (window.bridge, window.calls):
        if not thread.wait(EXIT_TIMEOUT_MS):
            os._exit(code)  # Python must not end under a thread that uses Qt
    return code


def _open_screen(fail: Callable[[str], int]) -> QApplication:
    """Qt aborts the process where it has no screen. Its last message comes here before."""
    said: list[str] = []

    def take_message(kind: QtMsgType, _context: QMessageLogContext, words: str | None) -> None:
        if kind is QtMsgType.QtFatalMsg:
            code = fail("; ".join(dict.fromkeys(said)) or str(words))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        said.append((words or "").strip().rstrip("."))

    qInstallMessageHandler(take_message)
    application = QApplication(sys.argv[:1])
    qInstallMessageHandler(None)
    for words in said:
        sys.stderr.write(f"{words}\n")
    return application
