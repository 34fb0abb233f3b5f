"""One metric as a chart: lines of runs, marks on its axis, and a line at the step under the pointer."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from PySide6.QtCore import QPointF, Qt, Signal, Slot
from PySide6.QtGui import QColor, QFocusEvent, QKeyEvent, QPen
from PySide6.QtWidgets import QGraphicsLineItem, QVBoxLayout, QWidget

from trn.core.terminal_text import plain
from trn.proto.records import MetricSeries
from trn.qt.theme import Theme
from trn.qt.views.chart_marks import LINES, Mark
from trn.qt.views.labels import escape
from trn.qt.views.signs_item import SignsItem

HEIGHT_PX = 220
BAND_ALPHA = 50
NEAR_PX = 5
KEY_MOVES = 100  # to the other end of the axis
ZOOM = 0.7
NAN = math.nan


class Curve(NamedTuple):
    """What is drawn of one run, for a lookup."""

    steps: Sequence[int]
    values: Sequence[float]

    def nearest(self, x: float) -> int:
        """The index of the point that is nearest to x."""
        place = min(bisect_left(self.steps, x), len(self.steps) - 1)
        is_left_nearer = place > 0 and x - self.steps[place - 1] < self.steps[place] - x
        return place - 1 if is_left_nearer else place


class Plot(QWidget):
    """For each run a line, and where a point stands for several a band from their min to their max.

    `pointed` carries the x under the pointer, or None when it has left. `zoomed`: the reader changed the range.
    """

    pointed = Signal(object)
    zoomed = Signal()
    resetWanted = Signal()  # noqa: N815 - names of Qt

    def __init__(self, library: Any, name: str, theme: Theme, *, is_log: bool) -> None:
        super().__init__()
        self.name = name
        self.num_points: dict[str, int] = {}
        self.cursor_step: int | None = None
        self._lib = library
        self._curves: dict[str, Curve] = {}
        self._parts: dict[str, tuple[Any, Any, Any, Any]] = {}
        self._chart = library.PlotWidget()
        self._chart.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self.item = self._chart.getPlotItem()
        self.item.setLogMode(y=is_log)
        self.item.setMouseEnabled(x=True, y=False)
        self.item.setAutoVisible(y=True)
        self.item.hideButtons()
        self._view = self.item.vb
        self._view.sigRangeChangedManually.connect(self._take_zoom)
        self._view.sigXRangeChanged.connect(self._place)
        self._view.sigResized.connect(self._place)
        self._chart.scene().sigMouseMoved.connect(self._take_pointer)
        self._signs = SignsItem(self._view)
        self._cursor = QGraphicsLineItem(self._view)
        self._cursor.setZValue(101)
        self._cursor.hide()
        self.setMinimumHeight(HEIGHT_PX)
        self.setAccessibleName(f"Chart of {plain(name)}")
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.addWidget(self._chart)
        self.set_theme(theme)

    def set_theme(self, theme: Theme) -> None:
        self._chart.setBackground(theme.surface)
        self.item.setTitle(escape(self.name), size="10pt", color=theme.text)
        self.item.showGrid(x=False, y=True, alpha=0.15)
        for side in ("left", "bottom"):
            axis = self.item.getAxis(side)
            axis.enableAutoSIPrefix(False)  # else the label would scale the numbers
            axis.setZValue(-1)  # below the signs
            axis.setPen(theme.border)
            axis.setTextPen(theme.muted)
        self._cursor.setPen(QPen(QColor(theme.muted), 0))
        self._signs.theme = theme
        self._place()

    def set_x_label(self, words: str) -> None:
        self.item.setLabel("bottom", words)

    def set_log(self, is_log: bool) -> None:
        self.item.setLogMode(y=is_log)

    def draw(self, run_id: str, series: MetricSeries | None, colour: str) -> None:
        if series is None or not series.steps:
            self.num_points[run_id] = 0
            self._curves.pop(run_id, None)
            return
        line, low, high, band = self._parts.get(run_id) or self._add(run_id)
        values = _finite(series.values)
        is_drawn = not all(map(math.isnan, values))
        line.setData(series.steps if is_drawn else [], values if is_drawn else [])
        line.setPen(self._lib.mkPen(colour, width=1.5))
        # A single point has no line.
        line.setSymbol("o" if len(values) == 1 else None)
        line.setSymbolBrush(colour)
        line.setSymbolPen(None)
        line.setSymbolSize(6)
        is_band = is_drawn and bool(series.lows)
        low.setData(series.steps if is_band else [], _finite(series.lows) if is_band else [])
        high.setData(series.steps if is_band else [], _finite(series.highs) if is_band else [])
        shade = QColor(colour)
        shade.setAlpha(BAND_ALPHA)
        band.setBrush(shade)
        band.setVisible(is_band)
        self.num_points[run_id] = len(series.steps)
        self._curves[run_id] = Curve(series.steps, series.values)
        faults = _faults(series)
        if faults or run_id in self._signs.faults:
            self._signs.faults[run_id] = (colour, faults)
            self._place()

    def keep(self, run_ids: Iterable[str]) -> None:
        for run_id in self._parts.keys() - set(run_ids):
            for part in self._parts.pop(run_id):
                self.item.removeItem(part)
            self.num_points.pop(run_id, None)
            self._curves.pop(run_id, None)
            self._signs.faults.pop(run_id, None)
        self._place()

    @property
    def has_faults(self) -> bool:
        """A value that is drawn is NaN or infinite."""
        return any(steps for _, steps in self._signs.faults.values())

    @property
    def marks(self) -> Sequence[Mark]:
        return self._signs.marks

    def show_marks(self, marks: Sequence[Mark]) -> None:
        self._signs.marks = marks
        self._place()

    def mark_at(self, step: float) -> Mark | None:
        """The mark that is near; a failure before a checkpoint."""
        near = [mark for mark in self._signs.marks if abs(mark.step - step) <= self._near_steps()]
        return min(near, key=lambda mark: (mark.kind not in LINES, abs(mark.step - step)), default=None)

    def step_at(self, x: float) -> int | None:
        """The drawn step that is nearest to x."""
        steps = [curve.steps[curve.nearest(x)] for curve in self._curves.values()]
        return min(steps, key=lambda step: abs(step - x), default=None)

    def value_at(self, run_id: str, step: int | None) -> float | None:
        """Of the run's nearest point; None: its newest. None where it has no point there."""
        curve = self._curves.get(run_id)
        if curve is None:
            return None
        if step is None:
            return curve.values[-1]
        near = self._near_steps()
        if not curve.steps[0] - near <= step <= curve.steps[-1] + near:
            return None
        return curve.values[curve.nearest(step)]

    def set_cursor(self, step: int | None) -> None:
        """Show the line at this step; None: nowhere."""
        if step != self.cursor_step:
            self.cursor_step = step
            self._place_cursor()

    def close_chart(self) -> None:
        self.hide()
        self.setParent(None)
        self.deleteLater()

    def leaveEvent(self, event: Any) -> None:  # noqa: N802
        super().leaveEvent(event)
        self.pointed.emit(None)

    def focusInEvent(self, event: QFocusEvent) -> None:  # noqa: N802
        """By a key, the line shows where the focus is."""
        super().focusInEvent(event)
        if event.reason() in (Qt.FocusReason.TabFocusReason, Qt.FocusReason.BacktabFocusReason):
            self.pointed.emit(sum(self._view.viewRange()[0]) / 2)

    def focusOutEvent(self, event: Any) -> None:  # noqa: N802
        super().focusOutEvent(event)
        self.pointed.emit(None)

    def keyPressEvent(self, event: QKeyEvent) -> None:  # noqa: N802
        """As on the page: arrows move the line, + and - zoom, 0 shows all."""
        first, last = self._view.viewRange()[0]
        at = (first + last) / 2 if self.cursor_step is None else self.cursor_step
        match event.key():
            case Qt.Key.Key_Left | Qt.Key.Key_Right as key:
                move = max((last - first) / KEY_MOVES, 1) * (1 if key == Qt.Key.Key_Right else -1)
                self.pointed.emit(min(max(at + move, first), last))
            case Qt.Key.Key_Plus | Qt.Key.Key_Equal | Qt.Key.Key_Minus as key:
                factor = 1 / ZOOM if key == Qt.Key.Key_Minus else ZOOM
                self.item.setXRange(at - (at - first) * factor, at + (last - at) * factor, padding=0)
                self.zoomed.emit()
            case Qt.Key.Key_0:
                self.resetWanted.emit()
            case _:
                super().keyPressEvent(event)

    def _add(self, run_id: str) -> tuple[Any, Any, Any, Any]:
        low, high = (self._lib.PlotDataItem(pen=None, connect="finite") for _ in range(2))
        band = self._lib.FillBetweenItem(low, high)
        line = self._lib.PlotDataItem(connect="finite")
        for part in (low, high, band, line):
            self.item.addItem(part)
        self._parts[run_id] = (line, low, high, band)
        return self._parts[run_id]

    def _near_steps(self) -> float:
        first, last = self._view.viewRange()[0]
        return float(NEAR_PX * (last - first) / max(self._view.width(), 1))

    @Slot(object)
    def _take_pointer(self, place: QPointF) -> None:
        is_inside = self._view.sceneBoundingRect().contains(place)
        self.pointed.emit(self._view.mapSceneToView(place).x() if is_inside else None)

    @Slot(object)
    def _take_zoom(self, _axes: object) -> None:
        self.zoomed.emit()

    @Slot()
    def _place(self, *_: object) -> None:
        first, last = self._view.viewRange()[0]
        self._signs.place(first, last)
        self._place_cursor()

    def _place_cursor(self) -> None:
        first, last = self._view.viewRange()[0]
        step = self.cursor_step
        is_seen = step is not None and first <= step <= last
        if step is not None and is_seen:
            at = (step - first) / (last - first) * self._view.width()
            self._cursor.setLine(at, 0, at, self._view.height())
        self._cursor.setVisible(is_seen)


def _finite(values: Iterable[float]) -> list[float]:
    """An infinite value would be the end of the y axis."""
    return [value if math.isfinite(value) else NAN for value in values]


def _faults(series: MetricSeries) -> list[int]:
    """Steps at which a value is NaN or infinite, also in a bucket: an infinite value is its min or max."""
    faults = {
        step for step, value in zip(series.steps, series.values, strict=True) if not math.isfinite(value)
    }
    for bounds in (series.lows, series.highs):
        faults.update(step for step, bound in zip(series.steps, bounds, strict=False) if math.isinf(bound))
    return sorted(faults)
