"""Text of others in labels and tips: never as markup, whatever a job wrote."""

import html

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QLabel

from trn.core.terminal_text import plain


def text_label(text: str = "", *, is_muted: bool = False, is_wrapped: bool = True) -> QLabel:
    """Shows its text as it is."""
    label = QLabel(text)
    label.setTextFormat(Qt.TextFormat.PlainText)
    label.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
    label.setWordWrap(is_wrapped)
    if is_wrapped:
        label.setMinimumWidth(1)  # else a long word in it would widen the window
    if is_muted:
        label.setObjectName("muted")
    return label


def tip(text: str) -> str:
    """For a tooltip, which Qt would read as markup."""
    lines = [escape(line) for line in text.splitlines() if line.strip()]
    return f"<div>{'<br>'.join(lines)}</div>" if lines else ""


def escape(text: str) -> str:
    """For a place that takes markup alone."""
    return html.escape(plain(text))


def shorten(text: str, max_chars: int) -> str:
    """Without its middle, if it is longer."""
    if len(text) <= max_chars:
        return text
    half = (max_chars - 1) // 2
    return f"{text[:half]}…{text[-half:]}"
