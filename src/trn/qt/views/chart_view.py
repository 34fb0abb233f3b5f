"""Curves of the chosen metrics over the selected runs, live. Their points are buckets, as many as there are pixels.

pyqtgraph takes half a second to import. That happens in the thread of the calls, while the window is shown.
"""

import asyncio
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

from PySide6.QtCore import Qt, QTimer, Signal, Slot
from PySide6.QtGui import QColor
from PySide6.QtWidgets import (
    QCheckBox,
    QHBoxLayout,
    QLabel,
    QListWidget,
    QListWidgetItem,
    QPushButton,
    QScrollArea,
    QSplitter,
    QVBoxLayout,
    QWidget,
)

from trn.client.client import AsyncClient
from trn.core.terminal_text import plain
from trn.proto.records import MetricSeries, Run
from trn.qt.call_thread import CallThread, Ticket
from trn.qt.theme import LIGHT, Theme
from trn.qt.views.labels import escape

MAX_POINTS = 1000  # of each curve: a screen shows no more
MAX_RUNS, MAX_CHOSEN = 12, 8
REFRESH_EVERY_MS, ZOOM_SETTLED_MS = 500, 150
PLOT_HEIGHT_PX = 210
BAND_ALPHA = 50
FIRST_CHOICES = ("train/loss", "val/loss")


class ChartView(QWidget):
    """`metricsChosen` carries the names whenever the reader changes them."""

    metricsChosen = Signal(object)  # noqa: N815 - names of Qt

    def __init__(self, calls: CallThread, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._calls = calls
        self._runs: dict[str, Run] = {}
        self._fresh: dict[str, int] = {}  # of each run: the event up to which its curves are shown
        self._asked: dict[str, Ticket] = {}
        self._plots: dict[str, _Plot] = {}
        self._wanted: list[str] | None = None
        self._range: tuple[int, int] | None = None
        self._theme = LIGHT
        self._library: Any = None
        self._names = QListWidget()
        self._names.setAccessibleName("Metrics")
        self._names.itemChanged.connect(self._take_choice)
        self._is_log = QCheckBox("Log scale")
        self._is_log.toggled.connect(self._set_scale)
        self._reset = QPushButton("Whole range")
        self._reset.clicked.connect(self._show_all)
        self._legend = QLabel()
        self._legend.setTextFormat(Qt.TextFormat.RichText)
        self._legend.setWordWrap(True)
        self._empty = QLabel("Select runs in the table, and metrics in the list.")
        self._empty.setObjectName("muted")
        self._empty.setAlignment(Qt.AlignmentFlag.AlignCenter)
        self._build()
        self._refresh = QTimer(self, interval=REFRESH_EVERY_MS)
        self._refresh.timeout.connect(self._fetch)
        self._zoomed = QTimer(self)
        self._zoomed.setInterval(ZOOM_SETTLED_MS)
        self._zoomed.setSingleShot(True)
        self._zoomed.timeout.connect(self._fetch_zoomed)

    @property
    def curves(self) -> dict[tuple[str, str], int]:
        """(metric, run) -> number of points that are drawn."""
        return {
            (name, run_id): num_points
            for name, plot in self._plots.items()
            for run_id, num_points in plot.num_points.items()
        }

    def set_theme(self, theme: Theme) -> None:
        self._theme = theme
        for plot in self._plots.values():
            plot.set_theme(theme)
        self._forget_points()
        self._show_legend()

    def choose_metrics(self, names: Iterable[str]) -> None:
        self._wanted = list(names)
        self._list_names()

    def show_runs(self, runs: Sequence[Run]) -> None:
        """Show these runs from now on."""
        self._runs = {run.run_id: run for run in runs[:MAX_RUNS]}
        self._fresh = {run_id: seq for run_id, seq in self._fresh.items() if run_id in self._runs}
        for run_id in [run_id for run_id in self._asked if run_id not in self._runs]:
            self._asked.pop(run_id).cancel()
        for plot in self._plots.values():
            plot.keep(self._runs)
        self._list_names()
        self._show_legend(num_left_out=len(runs) - len(self._runs))
        self._fetch()

    def update_run(self, run: Run) -> None:
        """One of them may have new points."""
        if run.run_id in self._runs:
            has_new_name = not run.metrics.keys() <= self._known_names()
            self._runs[run.run_id] = run
            if has_new_name:
                self._list_names()

    def showEvent(self, event: Any) -> None:  # noqa: N802
        super().showEvent(event)
        self._refresh.start()
        if self._library is None:
            self._calls.ask(_import_library, self._take_library)
        self._fetch()

    def hideEvent(self, event: Any) -> None:  # noqa: N802
        super().hideEvent(event)
        self._refresh.stop()

    def _take_library(self, library: Any) -> None:
        if self._library is None:
            library.setConfigOptions(antialias=True)
            self._library = library
            self._lay_out()

    def _build(self) -> None:
        bar = QHBoxLayout()
        bar.addWidget(self._legend, 1)
        bar.addWidget(self._is_log)
        bar.addWidget(self._reset)
        inner = QWidget()
        self._stack = QVBoxLayout(inner)
        self._stack.addWidget(self._empty)
        scroll = QScrollArea()
        scroll.setWidget(inner)
        scroll.setWidgetResizable(True)
        right = QWidget()
        column = QVBoxLayout(right)
        column.setContentsMargins(8, 0, 0, 0)
        column.addLayout(bar)
        column.addWidget(scroll, 1)
        splitter = QSplitter()
        splitter.addWidget(self._names)
        splitter.addWidget(right)
        splitter.setSizes([180, 800])
        splitter.setStretchFactor(1, 1)
        whole = QHBoxLayout(self)
        whole.setContentsMargins(0, 8, 0, 0)
        whole.addWidget(splitter)

    def _known_names(self) -> set[str]:
        return {name for run in self._runs.values() for name in run.metrics}

    def _chosen(self) -> list[str]:
        items = [self._names.item(row) for row in range(self._names.count())]
        return [
            item.data(Qt.ItemDataRole.UserRole)
            for item in items
            if item.checkState() is Qt.CheckState.Checked
        ][:MAX_CHOSEN]

    def _list_names(self) -> None:
        names = sorted(
            self._known_names(), key=lambda name: (name.partition("/")[0] not in ("train", "val"), name)
        )
        wanted = self._wanted
        if wanted is None and names:
            wanted = [name for name in FIRST_CHOICES if name in names] or names[:1]
        self._names.blockSignals(True)
        self._names.clear()
        for name in names:
            item = QListWidgetItem(plain(name))
            item.setData(Qt.ItemDataRole.UserRole, name)
            item.setCheckState(Qt.CheckState.Checked if name in (wanted or ()) else Qt.CheckState.Unchecked)
            self._names.addItem(item)
        self._names.blockSignals(False)
        self._lay_out()

    @Slot(QListWidgetItem)
    def _take_choice(self, _item: QListWidgetItem) -> None:
        shown = self._known_names()
        self._wanted = [*self._chosen(), *(name for name in self._wanted or () if name not in shown)]
        self.metricsChosen.emit(self._wanted)
        self._lay_out()
        self._forget_points()

    def _lay_out(self) -> None:
        """A plot for each chosen metric, in the order of the list."""
        chosen = self._chosen()
        if self._library is None:
            return
        for name in [name for name in self._plots if name not in chosen]:
            self._plots.pop(name).close()
        for place, name in enumerate(chosen):
            if name not in self._plots:
                plot = _Plot(self._library, name, self._theme, is_log=self._is_log.isChecked())
                plot.item.vb.sigRangeChangedManually.connect(self._take_zoom)
                self._plots[name] = plot
                self._stack.insertWidget(place, plot.widget)
                first = self._plots[chosen[0]]
                if plot is not first:
                    plot.item.setXLink(first.item)
        self._empty.setVisible(not chosen)
        self._fetch()

    def _show_legend(self, *, num_left_out: int = 0) -> None:
        parts = [
            f'<span style="color:{self._colour(run_id)}">━</span> {escape(run_id)}' for run_id in self._runs
        ]
        if num_left_out > 0:
            parts.append(f"and {num_left_out} more, not drawn")
        self._legend.setText("&nbsp;&nbsp; ".join(parts))

    def _colour(self, run_id: str) -> str:
        return self._theme.lines[list(self._runs).index(run_id) % len(self._theme.lines)]

    @Slot()
    def _forget_points(self) -> None:
        self._fresh.clear()
        self._fetch()

    @Slot()
    def _fetch(self) -> None:
        """Ask for the points of the runs that have new ones, once at a time for each."""
        names = list(self._plots)
        if not names or not self.isVisible():
            return
        for run_id, run in self._runs.items():
            if run_id in self._asked or self._fresh.get(run_id) == run.last_seq:
                continue
            self._asked[run_id] = self._ask(run_id, names, run.last_seq)

    def _ask(self, run_id: str, names: list[str], seq: int) -> Ticket:
        from_step, to_step = self._range or (None, None)

        async def read(client: AsyncClient) -> dict[str, MetricSeries]:
            return await client.metrics(
                run_id, names, from_step=from_step, to_step=to_step, max_points=MAX_POINTS, is_exact=True
            )

        def draw(series: dict[str, MetricSeries]) -> None:
            self._asked.pop(run_id, None)
            if run_id not in self._runs:
                return
            self._fresh[run_id] = seq
            for name in names:
                if name in self._plots:
                    self._plots[name].draw(run_id, series.get(name), self._colour(run_id))
            if self._plots.keys() - set(names):
                self._fresh.pop(run_id)  # another metric was chosen meanwhile

        def give_up(_fault: Exception) -> None:
            self._asked.pop(run_id, None)  # the next refresh asks again

        return self._calls.ask(read, draw, give_up)

    def zoom(self, from_step: int, to_step: int) -> None:
        """Show these steps in all charts, with points of their own."""
        for plot in self._plots.values():
            plot.item.setXRange(from_step, to_step, padding=0)
        self._zoomed.start()

    @Slot(object)
    def _take_zoom(self, _axes: object) -> None:
        """By wheel or mouse. The other charts are linked."""
        self._zoomed.start()

    @Slot()
    def _fetch_zoomed(self) -> None:
        plot = next(iter(self._plots.values()), None)
        if plot is not None:
            first, last = plot.item.vb.viewRange()[0]
            self._range = (max(int(first), 0), max(int(last) + 1, 1))
            self._forget_points()

    @Slot()
    def _show_all(self) -> None:
        self._range = None
        for plot in self._plots.values():
            plot.item.enableAutoRange()
        self._forget_points()

    @Slot(bool)
    def _set_scale(self, is_log: bool) -> None:
        for plot in self._plots.values():
            plot.item.setLogMode(y=is_log)


async def _import_library(_client: AsyncClient) -> Any:
    return await asyncio.to_thread(import_module, "pyqtgraph")


class _Plot:
    """One metric: for each run a line, and where a point stands for several a band from their min to their max."""

    def __init__(self, library: Any, name: str, theme: Theme, *, is_log: bool) -> None:
        self._lib = library
        self.num_points: dict[str, int] = {}
        self._parts: dict[str, tuple[Any, Any, Any, Any]] = {}
        self.widget = library.PlotWidget()
        self.widget.setMinimumHeight(PLOT_HEIGHT_PX)
        self.widget.setAccessibleName(f"Chart of {plain(name)}")
        self.item = self.widget.getPlotItem()
        self.item.setTitle(escape(name), size="10pt")
        self.item.setLogMode(y=is_log)
        self.item.setMouseEnabled(x=True, y=False)
        self.item.setAutoVisible(y=True)
        self.item.hideButtons()
        self._name = name
        self.set_theme(theme)

    def set_theme(self, theme: Theme) -> None:
        self.widget.setBackground(theme.surface)
        self.item.setTitle(escape(self._name), size="10pt", color=theme.text)
        self.item.showGrid(x=False, y=True, alpha=0.15)
        for side in ("left", "bottom"):
            axis = self.item.getAxis(side)
            axis.setPen(theme.border)
            axis.setTextPen(theme.muted)

    def draw(self, run_id: str, series: MetricSeries | None, colour: str) -> None:
        if series is None or not series.steps:
            self.num_points[run_id] = 0
            return
        line, low, high, band = self._parts.get(run_id) or self._add(run_id)
        line.setData(series.steps, series.values)
        line.setPen(self._lib.mkPen(colour, width=1.5))
        low.setData(series.steps, series.lows or series.values)
        high.setData(series.steps, series.highs or series.values)
        shade = QColor(colour)
        shade.setAlpha(BAND_ALPHA)
        band.setBrush(shade)
        band.setVisible(bool(series.lows))
        self.num_points[run_id] = len(series.steps)

    def keep(self, run_ids: Iterable[str]) -> None:
        for run_id in self._parts.keys() - set(run_ids):
            for part in self._parts.pop(run_id):
                self.item.removeItem(part)
            self.num_points.pop(run_id, None)

    def close(self) -> None:
        self.widget.hide()
        self.widget.setParent(None)
        self.widget.deleteLater()

    def _add(self, run_id: str) -> tuple[Any, Any, Any, Any]:
        low, high = (self._lib.PlotDataItem(pen=None, connect="finite") for _ in range(2))
        band = self._lib.FillBetweenItem(low, high)
        line = self._lib.PlotDataItem(connect="finite")
        for part in (low, high, band, line):
            self.item.addItem(part)
        self._parts[run_id] = (line, low, high, band)
        return self._parts[run_id]
