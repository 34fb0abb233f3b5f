"""The daemon's health at the foot of the window, and a banner where none answers."""

import time

from PySide6.QtCore import Signal, Slot
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QPushButton, QSizePolicy, QWidget

from trn.client.screen.figures import show_duration
from trn.core.terminal_text import plain
from trn.proto.records import Health
from trn.qt.run_stream import ConnectionState
from trn.qt.theme import LIGHT, Theme, dot
from trn.qt.views.labels import text_label, tip

DOT_PX = 10


class DaemonBar(QWidget):
    """A dot with the state of the connection, and what the daemon says of itself."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._theme = LIGHT
        self._state = ConnectionState.CONNECTING
        self._health: Health | None = None
        self._dot = QLabel()
        self.words = text_label(is_wrapped=False)
        row = QHBoxLayout(self)
        row.setContentsMargins(8, 2, 8, 2)
        row.addWidget(self._dot)
        row.addWidget(self.words)
        self._show()

    @property
    def is_connected(self) -> bool:
        return self._state is ConnectionState.CONNECTED

    def set_theme(self, theme: Theme) -> None:
        self._theme = theme
        self._show()

    def show_connection(self, state: ConnectionState) -> None:
        self._state = state
        self._show()

    def show_health(self, health: Health) -> None:
        self._health = health
        self._show()

    def _show(self) -> None:
        is_up = self._state is ConnectionState.CONNECTED
        has_warnings = is_up and self._health is not None and bool(self._health.warnings)
        colour = self._theme.warn if has_warnings else self._theme.good if is_up else self._theme.bad
        if self._state is ConnectionState.CONNECTING:
            colour = self._theme.idle
        self._dot.setPixmap(dot(colour, DOT_PX).pixmap(DOT_PX, DOT_PX))
        self.words.setText(self._say(is_up=is_up))
        self.setToolTip(self._explain())

    def _say(self, *, is_up: bool) -> str:
        if not is_up:
            return self._state.value.capitalize()
        if self._health is None:
            return "Connected"
        health = self._health
        counts = [
            f"{number} {word}"
            for state, word in (("RUNNING", "running"), ("PENDING", "waiting"), ("FAILED", "failed"))
            if (number := health.runs_by_state.get(state, 0))
        ]
        up_s = time.time() - health.started_ms / 1000
        parts = [f"Connected to trn {health.version}, up {show_duration(up_s)}", *counts]
        if health.warnings:
            parts.append(f"{len(health.warnings)} warning{'s' if len(health.warnings) > 1 else ''}")
        return "  ·  ".join(parts)

    def _explain(self) -> str:
        if self._health is None:
            return ""
        health = self._health
        lines = [f"home {health.home}", f"process {health.pid}", f"launcher: {health.launcher}"]
        return tip("\n".join((*lines, *health.warnings)))


class Banner(QFrame):
    """Says what is wrong with the daemon, and offers to start one."""

    startWanted = Signal()  # noqa: N815 - names of Qt

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("banner")
        self.words = text_label()
        self.words.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Preferred)
        self.button = QPushButton("Start the daemon")
        self.button.clicked.connect(self._want_start)
        row = QHBoxLayout(self)
        row.setContentsMargins(10, 6, 10, 6)
        row.addWidget(self.words, 1)
        row.addWidget(self.button)
        self.hide()

    def say(self, words: str, *, can_start: bool) -> None:
        """Empty: nothing is wrong."""
        self.words.setText(plain(words))
        self.button.setVisible(can_start)
        self.setVisible(bool(words))

    @Slot()
    def _want_start(self) -> None:
        self.startWanted.emit()
