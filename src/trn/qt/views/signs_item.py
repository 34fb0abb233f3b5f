"""Signs over a chart: marks of a run at their steps, and crosses where a value is NaN or infinite."""

from collections.abc import Iterable, Sequence
from typing import Any

from PySide6.QtCore import QPointF, QRectF, Qt
from PySide6.QtGui import QColor, QPainter, QPainterPath, QPen, QPolygonF
from PySide6.QtWidgets import QGraphicsItem

from trn.qt.theme import Theme
from trn.qt.views.chart_marks import LINES, Mark, MarkKind

SIGN_PX = 4.0  # half of its width


class SignsItem(QGraphicsItem):
    """Marks and crosses, in pixels of the view. Shapes are made when the range changes: a repaint only draws them."""

    def __init__(self, view: Any) -> None:
        super().__init__(view)
        self.setZValue(100)
        self.theme: Theme | None = None
        self.marks: Sequence[Mark] = ()
        self.faults: dict[
            str, tuple[str, list[int]]
        ] = {}  # of each run: its colour, and steps without a number
        self._view = view
        self._size = QRectF()
        self._shapes: list[tuple[QPainterPath, QPen, QColor | None]] = []

    def boundingRect(self) -> QRectF:  # noqa: N802 - names of Qt
        return self._size

    def paint(self, painter: QPainter, _option: Any, _widget: Any = None) -> None:
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        for path, pen, fill in self._shapes:
            painter.setPen(pen)
            painter.setBrush(Qt.BrushStyle.NoBrush if fill is None else fill)
            painter.drawPath(path)

    def place(self, first: float, last: float) -> None:
        if self._size != self._view.rect():
            self.prepareGeometryChange()
            self._size = QRectF(self._view.rect())
        self._shapes = []
        if self.theme is not None and last > first:
            width = self._size.width()
            for kind in MarkKind:
                steps = [mark.step for mark in self.marks if mark.kind is kind]
                self._add_marks(kind, _apart(steps, first, last, width))
            for colour, steps in self.faults.values():
                path = QPainterPath()
                for at in _apart(steps, first, last, width):
                    _add_cross(path, at, self._size.height() - 2 * SIGN_PX)
                self._shapes.append((path, QPen(QColor(colour), 1.5), None))
        self.update()

    def _add_marks(self, kind: MarkKind, places: list[float]) -> None:
        if not places:
            return
        assert self.theme is not None
        colour = QColor(self.theme.bad if kind is MarkKind.FAILURE else self.theme.warn)
        signs, lines = QPainterPath(), QPainterPath()
        bottom = self._size.height()
        for at in places:
            if kind in LINES:
                lines.moveTo(at, 0)
                lines.lineTo(at, bottom)
            if kind is MarkKind.FAILURE:
                _add_cross(signs, at, SIGN_PX + 1)
            elif kind is MarkKind.RESUME:
                _add_corners(signs, (at, 1), (at + 2 * SIGN_PX, SIGN_PX + 1), (at, 2 * SIGN_PX + 1))
            else:
                y = bottom - SIGN_PX - 1
                left, right = at - SIGN_PX, at + SIGN_PX
                _add_corners(signs, (left, y), (at, y - SIGN_PX), (right, y), (at, y + SIGN_PX))
        self._shapes.append((lines, QPen(colour, 1, Qt.PenStyle.DotLine), None))
        is_filled = kind in (MarkKind.CHECKPOINT, MarkKind.RESUME)
        pen = QPen(colour, 1.5 if kind is MarkKind.FAILURE else 1)
        self._shapes.append((signs, pen, colour if is_filled else None))


def _apart(steps: Iterable[int], first: float, last: float, width: float) -> list[float]:
    """Where these steps are, in pixels. Of those that would lie on each other one."""
    places: list[float] = []
    for step in steps:
        at = (step - first) / (last - first) * width
        if 0 <= at <= width and (not places or at - places[-1] >= 2 * SIGN_PX):
            places.append(at)
    return places


def _add_cross(path: QPainterPath, x: float, y: float) -> None:
    size = SIGN_PX - 0.5
    for up in (-size, size):
        path.moveTo(x - size, y - up)
        path.lineTo(x + size, y + up)


def _add_corners(path: QPainterPath, *corners: tuple[float, float]) -> None:
    path.addPolygon(QPolygonF([QPointF(x, y) for x, y in corners]))
    path.closeSubpath()
