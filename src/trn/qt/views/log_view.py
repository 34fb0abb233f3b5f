"""What the worker of a run prints, followed while it runs."""

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from PySide6.QtCore import Slot
from PySide6.QtGui import QTextDocument
from PySide6.QtWidgets import QCheckBox, QHBoxLayout, QLineEdit, QPlainTextEdit, QVBoxLayout, QWidget

from trn.client.client import AsyncClient
from trn.core.terminal_text import clean
from trn.proto.records import LogChunk
from trn.qt.call_thread import CallThread, Ticket
from trn.qt.theme import fixed_font
from trn.qt.views.labels import text_label

if TYPE_CHECKING:
    from trn.client.screen.worker_log import WholeLines

TAIL_BYTES = 256 << 10
MAX_LINES = 20_000


class LogView(QWidget):
    """The end of the log of one run. "Follow" scrolls with it; scrolling up switches that off."""

    def __init__(self, calls: CallThread, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._calls = calls
        self._run_id = ""
        self._ticket: Ticket | None = None
        self._lines: WholeLines | None = None
        self._is_appending = False
        self.text = QPlainTextEdit(readOnly=True)
        self.text.setFont(fixed_font())
        self.text.setMaximumBlockCount(MAX_LINES)
        self.text.setLineWrapMode(QPlainTextEdit.LineWrapMode.NoWrap)
        self.text.setAccessibleName("Log")
        self.is_followed = QCheckBox("Follow")
        self.is_followed.setChecked(True)
        self.is_followed.toggled.connect(self._scroll_if_followed)
        self.finder = QLineEdit(
            placeholderText="Find in the log: Enter for the next, Shift+Enter for the last"
        )
        self.finder.setClearButtonEnabled(True)
        self.finder.returnPressed.connect(self._find_next)
        self._note = text_label(is_muted=True, is_wrapped=False)
        bar = QHBoxLayout()
        bar.addWidget(self.finder, 1)
        bar.addWidget(self._note)
        bar.addWidget(self.is_followed)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 8, 0, 0)
        column.addLayout(bar)
        column.addWidget(self.text, 1)
        self.text.verticalScrollBar().valueChanged.connect(self._take_scroll)
        self.setFocusProxy(self.text)

    def show_run(self, run_id: str) -> None:
        """Read the end of its log and follow it; empty: nothing."""
        if run_id == self._run_id:
            return
        self._run_id = run_id
        self._is_appending = True
        self.text.clear()
        self._is_appending = False
        self.is_followed.setChecked(True)
        self._note.clear()
        if self._ticket is not None:
            self._ticket.cancel()
            self._ticket = None
        if not run_id:
            return
        from trn.client.screen.worker_log import WholeLines

        def stream(client: AsyncClient) -> AsyncGenerator[LogChunk, None]:
            return client.logs(run_id, is_followed=True, tail_bytes=TAIL_BYTES, is_exact=True)

        self._lines = None

        def take(chunk: LogChunk) -> None:
            if self._lines is None:
                is_cut = chunk.offset > 0
                self._lines = WholeLines(is_begun_in_the_middle=is_cut)
                if is_cut:
                    self._note.setText(f"the last {TAIL_BYTES >> 10} KiB; `trn logs` has all")
            lines = self._lines.take(chunk.data)
            self._append(lines + self._lines.rest() if chunk.is_end else lines)

        self._ticket = self._calls.follow(stream, take, lambda fault: self._note.setText(str(fault)))

    def _append(self, lines: list[str]) -> None:
        if not lines:
            return
        bar = self.text.verticalScrollBar()
        at = bar.value()
        self._is_appending = True  # what scrolls now is not the reader
        self.text.appendPlainText("\n".join(map(clean, lines)))
        bar.setValue(bar.maximum() if self.is_followed.isChecked() else at)
        self._is_appending = False

    @Slot()
    def _scroll_if_followed(self) -> None:
        if self.is_followed.isChecked():
            bar = self.text.verticalScrollBar()
            bar.setValue(bar.maximum())

    @Slot(int)
    def _take_scroll(self, value: int) -> None:
        if not self._is_appending:
            self.is_followed.setChecked(value >= self.text.verticalScrollBar().maximum())

    @Slot()
    def _find_next(self) -> None:
        from PySide6.QtCore import Qt
        from PySide6.QtWidgets import QApplication

        is_back = bool(QApplication.keyboardModifiers() & Qt.KeyboardModifier.ShiftModifier)
        flags = QTextDocument.FindFlag.FindBackward if is_back else QTextDocument.FindFlag(0)
        if not self.text.find(self.finder.text(), flags):
            cursor = self.text.textCursor()
            cursor.movePosition(cursor.MoveOperation.End if is_back else cursor.MoveOperation.Start)
            self.text.setTextCursor(cursor)
            is_found = self.text.find(self.finder.text(), flags)
            self._note.setText("" if is_found else "not found")
