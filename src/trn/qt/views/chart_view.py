"""Curves of the chosen metrics over the selected runs, live. Their points are buckets, as many as there are pixels.

The legend has each run's value at the step under the pointer. A pointer that moves costs a lookup in what is drawn.

pyqtgraph takes half a second to import. That happens in the thread of the calls, while the window is shown.
"""

import asyncio
from collections.abc import Iterable, Sequence
from importlib import import_module
from itertools import pairwise
from typing import Any

from PySide6.QtCore import Qt, QTimer, Signal, Slot
from PySide6.QtWidgets import (
    QCheckBox,
    QHBoxLayout,
    QLabel,
    QLineEdit,
    QListWidget,
    QListWidgetItem,
    QPushButton,
    QScrollArea,
    QSizePolicy,
    QSplitter,
    QVBoxLayout,
    QWidget,
)

from trn.client.client import AsyncClient
from trn.client.screen.figures import show_number
from trn.core.runs import SERVER
from trn.core.terminal_text import plain
from trn.proto.records import MetricSeries, Run
from trn.qt.call_thread import CallThread, Ticket
from trn.qt.theme import LIGHT, Theme
from trn.qt.views.chart_marks import Mark, MarkReader, say_signs
from trn.qt.views.labels import escape, shorten, text_label
from trn.qt.views.plot import Plot

MAX_POINTS = 1000  # of each curve: a screen shows no more
MAX_RUNS, MAX_CHOSEN = 12, 8
MANY_NAMES = 15  # more than are seen at once
REFRESH_EVERY_MS, ZOOM_SETTLED_MS = 500, 150
READ_EVERY_MS = 50  # while the pointer moves
MAX_NAME_CHARS = 40
VALUE_CHARS = 9  # the legend keeps its shape while the pointer moves
DIGIT_SPACE = "&nbsp;" * 2  # about as wide as a digit, and never dropped as white space
IDLE = "Point at a chart to read the values of a step."
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
        self._plots: dict[str, Plot] = {}
        self._wanted: list[str] | None = None
        self._range: tuple[int, int] | None = None
        self._theme = LIGHT
        self._library: Any = None
        self._num_left_out = 0
        self._pointer: tuple[Plot, float] | None = None
        self._marks: list[Mark] = []
        self._mark_reader = MarkReader(calls, self._show_marks)
        self._names = QListWidget()
        self._names.setAccessibleName("Metrics")
        self._names.itemChanged.connect(self._take_choice)
        self.finder = QLineEdit(placeholderText="Find metrics")
        self.finder.setClearButtonEnabled(True)
        self.finder.textChanged.connect(self._filter_names)
        self.finder.hide()
        self._is_log = QCheckBox("Log scale")
        self._is_log.toggled.connect(self._set_scale)
        self._reset = QPushButton("Whole range")
        self._reset.clicked.connect(self._show_all)
        self._legend = QLabel()
        self._legend.setTextFormat(Qt.TextFormat.RichText)
        self._legend.setWordWrap(True)
        self._legend.setMinimumWidth(1)
        self.reading = text_label(is_muted=True, is_wrapped=False)
        self.reading.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
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
        self._read = QTimer(self)
        self._read.setInterval(READ_EVERY_MS)
        self._read.setSingleShot(True)
        self._read.timeout.connect(self._read_out)

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
        self._read_out()

    def choose_metrics(self, names: Iterable[str]) -> None:
        self._wanted = list(names)
        self._list_names()

    def show_runs(self, runs: Sequence[Run]) -> None:
        """Show these runs from now on."""
        self._runs = {run.run_id: run for run in runs[:MAX_RUNS]}
        self._fresh = {run_id: seq for run_id, seq in self._fresh.items() if run_id in self._runs}
        for run_id in [run_id for run_id in self._asked if run_id not in self._runs]:
            self._asked.pop(run_id).cancel()
        self._num_left_out = len(runs) - len(self._runs)
        for plot in self._plots.values():
            plot.keep(self._runs)
        self._mark_reader.choose(list(self._runs))
        self._list_names()
        self._read_out()
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
        self._scroll = QScrollArea()
        self._scroll.setWidget(inner)
        self._scroll.setWidgetResizable(True)
        right = QWidget()
        column = QVBoxLayout(right)
        column.setContentsMargins(8, 0, 0, 0)
        column.addLayout(bar)
        column.addWidget(self.reading)
        column.addWidget(self._scroll, 1)
        left = QWidget()
        names = QVBoxLayout(left)
        names.setContentsMargins(0, 0, 0, 0)
        names.addWidget(self.finder)
        names.addWidget(self._names)
        splitter = QSplitter()
        splitter.addWidget(left)
        splitter.addWidget(right)
        splitter.setSizes([180, 800])
        splitter.setStretchFactor(1, 1)
        whole = QHBoxLayout(self)
        whole.setContentsMargins(0, 8, 0, 0)
        whole.addWidget(splitter)
        self.setFocusProxy(self._names)

    def _known_names(self) -> set[str]:
        return {name for run in self._runs.values() for name in run.metrics}

    def _chosen(self) -> list[str]:
        return [
            item.data(Qt.ItemDataRole.UserRole)
            for item in self._items()
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
        listed = [item.data(Qt.ItemDataRole.UserRole) for item in self._items()]
        if listed != names:  # else the list stays where it was scrolled to
            self._names.clear()
            for name in names:
                item = QListWidgetItem(plain(name))
                item.setData(Qt.ItemDataRole.UserRole, name)
                self._names.addItem(item)
        for item, name in zip(self._items(), names, strict=True):
            item.setCheckState(Qt.CheckState.Checked if name in (wanted or ()) else Qt.CheckState.Unchecked)
        self._names.blockSignals(False)
        self.finder.setVisible(len(names) >= MANY_NAMES)
        self._filter_names()
        self._lay_out()

    def _items(self) -> list[QListWidgetItem]:
        return [self._names.item(row) for row in range(self._names.count())]

    @Slot()
    def _filter_names(self) -> None:
        """Chosen ones stay: they are drawn."""
        words = self.finder.text().lower().split() if self.finder.isVisibleTo(self) else []
        for item in self._items():
            is_checked = item.checkState() is Qt.CheckState.Checked
            item.setHidden(not is_checked and not all(word in item.text().lower() for word in words))

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
            self._plots.pop(name).close_chart()
        for place, name in enumerate(chosen):
            if name not in self._plots:
                plot = Plot(self._library, name, self._theme, is_log=self._is_log.isChecked())
                plot.zoomed.connect(self._zoomed.start)
                plot.resetWanted.connect(self._show_all)
                plot.pointed.connect(self._take_pointer)
                plot.show_marks(self._marks)
                self._plots[name] = plot
                self._stack.insertWidget(place, plot)
                first = self._plots[chosen[0]]
                if plot is not first:
                    plot.item.setXLink(first.item)
            self._plots[name].set_x_label(self._x_name())
        for before, after in pairwise([self._scroll, *(self._plots[name] for name in chosen)]):
            QWidget.setTabOrder(before, after)
        self._empty.setVisible(not chosen)
        self._read_out()
        self._fetch()

    @Slot(object)
    def _take_pointer(self, x: float | None) -> None:
        plot = self.sender()
        assert isinstance(plot, Plot)
        self._pointer = None if x is None else (plot, x)
        self._read_later()

    def _read_later(self) -> None:
        if not self._read.isActive():
            self._read.start()

    @Slot()
    def _read_out(self) -> None:
        """The values at the step under the pointer, else the newest ones."""
        plots = list(self._plots.values())
        pointed, step = None, None
        if self._pointer is not None and self._pointer[0] in plots:
            pointed, x = self._pointer
            step = pointed.step_at(x)
        for plot in plots:
            plot.set_cursor(step)
        # Of a single run the legend has room for all of its metrics.
        read = plots if len(self._runs) == 1 else [pointed or plots[0]] if plots else []
        self._say_legend(read, step)
        self._say_reading(read, pointed, step)

    def _say_legend(self, plots: list[Plot], step: int | None) -> None:
        parts = []
        for run_id in self._runs:
            part = f'<span style="color:{self._colour(run_id)}">━</span>&nbsp;{escape(shorten(run_id, MAX_NAME_CHARS))}'
            for plot in plots:
                value = plot.value_at(run_id, step)
                figure = "" if value is None else show_number(value)
                figure += DIGIT_SPACE * (VALUE_CHARS - len(figure))
                name = f" {escape(shorten(plot.name, MAX_NAME_CHARS))}" if len(plots) > 1 else ""
                part += f"{name}&nbsp;<b>{figure}</b>"
            parts.append(part)
        if self._num_left_out > 0:
            parts.append(f"and {self._num_left_out} more, not drawn")
        text = "&nbsp; ".join(parts)
        if text != self._legend.text():
            self._legend.setText(text)

    def _say_reading(self, plots: list[Plot], pointed: Plot | None, step: int | None) -> None:
        parts = []
        if pointed is not None and step is not None:
            mark = pointed.mark_at(step)
            parts = [f"{self._x_name()} {step:,}", plain(pointed.name), "" if mark is None else mark.text]
        elif plots:
            names = "" if len(plots) > 1 else f" of {plain(plots[0].name)}"
            is_faulty = any(plot.has_faults for plot in self._plots.values())
            crosses = "× NaN or infinite" if is_faulty else ""
            parts = [f"Newest values{names}", say_signs(self._marks), crosses, IDLE]
        self.reading.setText("   ·   ".join(filter(None, parts)))

    def _x_name(self) -> str:
        """A server reports each second, not each step."""
        are_servers = bool(self._runs) and all(run.kind == SERVER for run in self._runs.values())
        return "second" if are_servers else "step"

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
        if len(self._runs) == 1:  # marks of several runs would hide each other
            self._mark_reader.read(*self._runs.values())

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
            self._read_later()

        def give_up(_fault: Exception) -> None:
            self._asked.pop(run_id, None)  # the next refresh asks again

        return self._calls.ask(read, draw, give_up)

    def _show_marks(self, marks: list[Mark]) -> None:
        self._marks = marks
        for plot in self._plots.values():
            plot.show_marks(marks)
        self._read_later()

    def zoom(self, from_step: int, to_step: int) -> None:
        """Show these steps in all charts, with points of their own."""
        for plot in self._plots.values():
            plot.item.setXRange(from_step, to_step, padding=0)
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
            plot.set_log(is_log)


async def _import_library(_client: AsyncClient) -> Any:
    return await asyncio.to_thread(import_module, "pyqtgraph")
