"""Colours of the window, for light and dark: those of the page."""

from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from PySide6.QtCore import Qt
from PySide6.QtGui import QColor, QFont, QFontDatabase, QGuiApplication, QIcon, QPainter, QPalette, QPixmap
from PySide6.QtWidgets import QApplication


class ThemeName(StrEnum):
    SYSTEM = "system"
    LIGHT = "light"
    DARK = "dark"


class Theme(NamedTuple):
    is_dark: bool
    background: str
    surface: str
    sunken: str
    hover: str
    selected: str
    border: str
    text: str
    muted: str
    accent: str
    on_accent: str
    good: str
    bad: str
    warn: str
    idle: str
    lines: tuple[str, ...]  # of a chart, told apart also by people who see few colours

    def state_colour(self, state: str) -> str:
        """Also for states that a newer daemon may know."""
        return {
            "RUNNING": self.accent,
            "DISPATCHING": self.accent,
            "PENDING": self.idle,
            "COMPLETED": self.good,
            "FAILED": self.bad,
            "CANCELLED": self.warn,
        }.get(state, self.idle)


LIGHT = Theme(
    is_dark=False,
    background="#f6f7f9",
    surface="#ffffff",
    sunken="#eef0f3",
    hover="#f0f3f8",
    selected="#e5eefd",
    border="#dfe3e8",
    text="#1b2027",
    muted="#5a6472",
    accent="#1f5fd6",
    on_accent="#ffffff",
    good="#156c3f",
    bad="#c22f36",
    warn="#8a5a00",
    idle="#5a6472",
    lines=("#1f5fd6", "#c4560b", "#17805b", "#a0348f", "#6a5400", "#5b45c2", "#0c7d92", "#b3273f"),
)
DARK = Theme(
    is_dark=True,
    background="#0f1216",
    surface="#161a20",
    sunken="#0b0e11",
    hover="#1e242d",
    selected="#17263f",
    border="#2a3039",
    text="#e4e8ee",
    muted="#9aa5b4",
    accent="#7aaeff",
    on_accent="#0b1a33",
    good="#56c78c",
    bad="#ff8a8a",
    warn="#e6b450",
    idle="#9aa5b4",
    lines=("#7aaeff", "#ff9d5c", "#4fcf9f", "#e58ad6", "#d9c14a", "#b3a2ff", "#57cfe3", "#ff8fa0"),
)

STYLE = """
QMainWindow, QDialog, QMessageBox {{ background: {background}; }}
QToolTip {{ background: {surface}; color: {text}; border: 1px solid {border}; padding: 4px; }}
QMenuBar, QStatusBar {{ background: {surface}; }}
QStatusBar {{ border-top: 1px solid {border}; }}
QStatusBar::item {{ border: none; }}
QSplitter::handle {{ background: {background}; }}
QTableView, QListView, QPlainTextEdit, QScrollArea {{
    background: {surface}; border: 1px solid {border}; border-radius: 6px;
}}
QTableView {{ gridline-color: transparent; selection-background-color: {selected}; selection-color: {text}; }}
QTableView::item {{ padding: 0 5px; }}
QDialogButtonBox {{ dialogbuttonbox-buttons-have-icons: 0; }}
QListView::item {{ padding: 3px 6px; border-radius: 4px; }}
QListView::item:selected {{ background: {selected}; color: {text}; }}
QHeaderView::section {{
    background: {surface}; color: {muted}; border: none; border-bottom: 1px solid {border}; padding: 5px 6px;
}}
QLineEdit {{ background: {surface}; border: 1px solid {border}; border-radius: 6px; padding: 5px 8px; }}
QLineEdit:focus, QTableView:focus, QListView:focus, QPlainTextEdit:focus {{ border-color: {accent}; }}
QPushButton, QToolButton {{
    background: {surface}; border: 1px solid {border}; border-radius: 6px; padding: 5px 12px;
}}
QPushButton:hover, QToolButton:hover {{ background: {hover}; }}
QPushButton:focus, QToolButton:focus {{ border-color: {accent}; }}
QPushButton:disabled, QToolButton:disabled {{ color: {muted}; }}
QPushButton:default {{ background: {accent}; color: {on_accent}; border-color: {accent}; }}
QPushButton:default:disabled {{ background: {sunken}; color: {muted}; border-color: {border}; }}
QTabWidget::pane {{ border: none; border-top: 1px solid {border}; }}
QTabBar::tab {{
    background: transparent; color: {muted}; padding: 6px 12px; border: none; border-bottom: 2px solid transparent;
}}
QTabBar::tab:selected {{ color: {text}; border-bottom-color: {accent}; }}
QTabBar::tab:focus {{ color: {accent}; }}
QCheckBox::indicator, QListView::indicator {{
    width: 13px; height: 13px; border: 1px solid {muted}; border-radius: 3px; background: {surface};
}}
QCheckBox::indicator:checked, QListView::indicator:checked {{
    background: {accent}; border-color: {accent}; image: url({check});
}}
QLabel#muted {{ color: {muted}; }}
QLabel#title {{ font-size: 15px; font-weight: 600; }}
QFrame#banner {{ background: {selected}; border: 1px solid {border}; border-radius: 6px; }}
"""


def apply(name: ThemeName) -> Theme:
    """Paint the whole application so; the theme that it has now."""
    application = QApplication.instance()
    assert isinstance(application, QApplication)
    theme = _choose(name)
    application.setStyle("Fusion")
    palette = QPalette()
    for role, colour in {
        QPalette.ColorRole.Window: theme.background,
        QPalette.ColorRole.WindowText: theme.text,
        QPalette.ColorRole.Base: theme.surface,
        QPalette.ColorRole.AlternateBase: theme.sunken,
        QPalette.ColorRole.Text: theme.text,
        QPalette.ColorRole.Button: theme.surface,
        QPalette.ColorRole.ButtonText: theme.text,
        QPalette.ColorRole.BrightText: theme.bad,
        QPalette.ColorRole.ToolTipBase: theme.surface,
        QPalette.ColorRole.ToolTipText: theme.text,
        QPalette.ColorRole.PlaceholderText: theme.muted,
        QPalette.ColorRole.Highlight: theme.accent,
        QPalette.ColorRole.HighlightedText: theme.on_accent,
        QPalette.ColorRole.Link: theme.accent,
    }.items():
        palette.setColor(role, QColor(colour))
    for role in (QPalette.ColorRole.Text, QPalette.ColorRole.WindowText, QPalette.ColorRole.ButtonText):
        palette.setColor(QPalette.ColorGroup.Disabled, role, QColor(theme.muted))
    application.setPalette(palette)
    check = Path(__file__).with_name("check-dark.svg" if theme.is_dark else "check-light.svg")
    application.setStyleSheet(STYLE.format(check=check.as_posix(), **theme._asdict()))
    return theme


def _choose(name: ThemeName) -> Theme:
    if name is ThemeName.SYSTEM:
        return DARK if QGuiApplication.styleHints().colorScheme() is Qt.ColorScheme.Dark else LIGHT
    return DARK if name is ThemeName.DARK else LIGHT


def fixed_font() -> QFont:
    return QFontDatabase.systemFont(QFontDatabase.SystemFont.FixedFont)


@lru_cache(maxsize=64)
def dot(colour: str, size_px: int = 10) -> QIcon:
    """A filled circle."""
    picture = QPixmap(size_px * 2, size_px * 2)
    picture.setDevicePixelRatio(2)
    picture.fill(Qt.GlobalColor.transparent)
    painter = QPainter(picture)
    painter.setRenderHint(QPainter.RenderHint.Antialiasing)
    painter.setBrush(QColor(colour))
    painter.setPen(Qt.PenStyle.NoPen)
    painter.drawEllipse(1, 1, size_px - 2, size_px - 2)
    painter.end()
    icon = QIcon()
    for mode in (QIcon.Mode.Normal, QIcon.Mode.Selected):  # else a style tints it in a selected row
        icon.addPixmap(picture, mode)
    return icon
