"""All runs as a table: state, step, time left, and why."""

import bisect
import time
from collections import deque
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, NamedTuple

from PySide6.QtCore import (
    QAbstractTableModel,
    QItemSelectionModel,
    QModelIndex,
    QPersistentModelIndex,
    Qt,
    Signal,
    Slot,
)
from PySide6.QtGui import QColor, QPainter
from PySide6.QtWidgets import (
    QAbstractItemView,
    QHeaderView,
    QStyledItemDelegate,
    QStyleOptionViewItem,
    QTableView,
    QWidget,
)

from trn.client.screen.figures import show_duration, show_number
from trn.core.cause_words import say_outlook
from trn.core.terminal_text import plain
from trn.proto.records import Run
from trn.qt.theme import LIGHT, Theme, dot
from trn.qt.views.labels import tip

POINT_EVERY_MS = 500
RATE_OVER_MS = 30_000  # the speed of a run is that of its last steps
NUM_METRICS_SHOWN = 3
ROW_HEIGHT_PX = 28
Index = QModelIndex | QPersistentModelIndex


class Pace:
    """How quickly a run makes steps, from the records that were seen of it."""

    def __init__(self) -> None:
        self._points: deque[tuple[int, int]] = deque()  # (ms, step)
        self._attempt = 0

    def take(self, run: Run) -> None:
        if run.attempt != self._attempt or (self._points and run.step < self._points[-1][1]):
            self._points.clear()  # a rollback is no speed
        self._attempt = run.attempt
        if run.state != "RUNNING":
            return
        points = self._points
        if not points or run.step > points[-1][1]:
            if len(points) > 1 and run.updated_ms - points[-2][0] < POINT_EVERY_MS:
                points.pop()  # the newest, and before it one for each half second
            points.append((run.updated_ms, run.step))
        while len(self._points) > 2 and run.updated_ms - self._points[0][0] > RATE_OVER_MS:
            self._points.popleft()

    def left_s(self, run: Run) -> float | None:
        """None where it is unknown."""
        if run.state != "RUNNING" or run.end_step is None or len(self._points) < 2:
            return None
        (first_ms, first), (last_ms, last) = self._points[0], self._points[-1]
        if last_ms <= first_ms or last <= first:
            return None
        return (run.end_step - run.step) * (last_ms - first_ms) / 1000 / (last - first)


class Column(NamedTuple):
    title: str
    show: Callable[["RunTableModel", Run], str]
    sort_key: Callable[["RunTableModel", Run], Any]
    width_px: int


def say_state(run: Run) -> str:
    if run.is_cancel_wanted and not run.is_terminal:
        return "cancelling"
    words = {"PENDING": "waiting", "DISPATCHING": "starting"}
    return words.get(run.state, run.state.lower())


def _show_step(_model: "RunTableModel", run: Run) -> str:
    return f"{run.step:,} / {run.end_step:,}" if run.end_step else f"{run.step:,}"


def _left_s(model: "RunTableModel", run: Run) -> float | None:
    return model.pace(run.run_id).left_s(run)


def _show_left(model: "RunTableModel", run: Run) -> str:
    left_s = _left_s(model, run)
    return "" if left_s is None else show_duration(left_s)


def say_why(run: Run) -> str:
    """The reason of a run that waits, failed or was cancelled; of another one its newest metrics."""
    if run.state == "RUNNING" and not run.is_cancel_wanted:
        return _say_metrics(run) or plain(run.reason)
    if run.state == "COMPLETED":
        return plain(f"stopped early: {run.stop_reason}") if run.stop_reason else _say_metrics(run)
    if run.cause.is_retry and run.state == "PENDING":
        return plain(f"{run.reason}" if run.reason else say_outlook(run.cause))
    return plain(run.reason)


def _say_metrics(run: Run) -> str:
    names = sorted(run.metrics, key=lambda name: (not name.startswith(("train/loss", "val/")), name))
    return "   ".join(f"{plain(name)} {show_number(run.metrics[name])}" for name in names[:NUM_METRICS_SHOWN])


def _show_time(at_ms: int) -> str:
    at = datetime.fromtimestamp(at_ms / 1000)
    is_today = time.time() - at_ms / 1000 < 12 * 3600
    return at.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M")


COLUMNS = (
    Column("Run", lambda _, run: plain(run.run_id), lambda _, run: run.run_id, 170),
    Column("State", lambda _, run: say_state(run), lambda _, run: say_state(run), 125),
    Column("Step", _show_step, lambda _, run: run.step, 130),
    Column("Time left", _show_left, lambda model, run: _left_s(model, run) or 0.0, 80),
    Column("Newest metrics, or why", lambda _, run: say_why(run), lambda _, run: say_why(run), 380),
    Column("Devices", lambda _, run: ", ".join(run.devices), lambda _, run: run.devices, 80),
    Column("Submitted", lambda _, run: _show_time(run.submitted_ms), lambda _, run: run.submitted_ms, 90),
)
STEP, SUBMITTED = 2, 6


class RunTableModel(QAbstractTableModel):
    """The runs that match the filter, in the chosen order. New ones come to their place; changes move nothing."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.theme = LIGHT
        self.runs: dict[str, Run] = {}
        self._paces: dict[str, Pace] = {}
        self._rows: list[str] = []
        self._row_of: dict[str, int] | None = {}
        self._words: list[str] = []
        self._column, self._is_descending = SUBMITTED, True

    def pace(self, run_id: str) -> Pace:
        return self._paces.setdefault(run_id, Pace())

    def run_at(self, row: int) -> Run:
        return self.runs[self._rows[row]]

    def row_of(self, run_id: str) -> int | None:
        """None where the filter hides it."""
        if self._row_of is None:
            self._row_of = {found: row for row, found in enumerate(self._rows)}
        return self._row_of.get(run_id)

    def update(self, runs: Iterable[Run]) -> None:
        changed: list[int] = []
        for run in runs:
            is_new = run.run_id not in self.runs
            self.runs[run.run_id] = run
            self.pace(run.run_id).take(run)
            row = None if is_new else self.row_of(run.run_id)
            if row is not None:
                changed.append(row)
            elif self._matches(run):
                self._insert(run)
        if changed:
            self.dataChanged.emit(self.index(min(changed), 0), self.index(max(changed), len(COLUMNS) - 1), [])

    def remove(self, run_id: str) -> None:
        row = self.row_of(run_id)
        self.runs.pop(run_id, None)
        self._paces.pop(run_id, None)
        if row is not None:
            self.beginRemoveRows(QModelIndex(), row, row)
            del self._rows[row]
            self._row_of = None
            self.endRemoveRows()

    def set_filter(self, text: str) -> None:
        """Words that must all be somewhere in a run's row, tags or name; `-word`: must not."""
        self.beginResetModel()
        self._words = text.lower().split()
        self._rows = sorted(
            (run.run_id for run in self.runs.values() if self._matches(run)), key=self._sort_key
        )
        if self._is_descending:
            self._rows.reverse()
        self._row_of = None
        self.endResetModel()

    def repaint_all(self) -> None:
        if self._rows:
            self.dataChanged.emit(self.index(0, 0), self.index(len(self._rows) - 1, len(COLUMNS) - 1), [])

    def sort(self, column: int, order: Qt.SortOrder = Qt.SortOrder.AscendingOrder) -> None:
        self.layoutAboutToBeChanged.emit()
        kept = [(index, self._rows[index.row()]) for index in self.persistentIndexList()]
        self._column, self._is_descending = column, order is Qt.SortOrder.DescendingOrder
        self._rows.sort(key=self._sort_key, reverse=self._is_descending)
        self._row_of = None
        for index, run_id in kept:
            row = self.row_of(run_id)
            assert row is not None
            self.changePersistentIndex(index, self.index(row, index.column()))
        self.layoutChanged.emit()

    def rowCount(self, parent: Index = QModelIndex()) -> int:  # noqa: N802, B008
        return 0 if parent.isValid() else len(self._rows)

    def columnCount(self, parent: Index = QModelIndex()) -> int:  # noqa: N802, B008
        return 0 if parent.isValid() else len(COLUMNS)

    def headerData(  # noqa: N802
        self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole
    ) -> Any:
        if role == Qt.ItemDataRole.DisplayRole and orientation is Qt.Orientation.Horizontal:
            return COLUMNS[section].title
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter
        return None

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        run = self.run_at(index.row())
        column = index.column()
        if role == Qt.ItemDataRole.DisplayRole:
            return COLUMNS[column].show(self, run)
        if role == Qt.ItemDataRole.DecorationRole and column == 1:
            return dot(self.theme.state_colour(run.state))
        if role == Qt.ItemDataRole.ForegroundRole and column == 1:
            return QColor(self.theme.state_colour(run.state))
        if role == Qt.ItemDataRole.ForegroundRole and (
            column >= SUBMITTED or (column == 4 and run.state != "FAILED")
        ):
            return QColor(self.theme.muted)
        if role == Qt.ItemDataRole.ToolTipRole and column in (0, 4):
            return tip("\n".join(dict.fromkeys((run.name or run.run_id, run.reason, run.notes))))
        return None

    def _insert(self, run: Run) -> None:
        key = self._sort_key(run.run_id)
        if self._is_descending:
            row = len(self._rows) - bisect.bisect_left(self._rows[::-1], key, key=self._sort_key)
        else:
            row = bisect.bisect_right(self._rows, key, key=self._sort_key)
        self.beginInsertRows(QModelIndex(), row, row)
        self._rows.insert(row, run.run_id)
        self._row_of = None
        self.endInsertRows()

    def _sort_key(self, run_id: str) -> Any:
        run = self.runs[run_id]
        return (COLUMNS[self._column].sort_key(self, run), run.submitted_ms, run_id)

    def _matches(self, run: Run) -> bool:
        if not self._words:
            return True
        tags = " ".join(f"{name}={value}" for name, value in run.tags.items())
        text = f"{run.run_id} {run.name} {say_state(run)} {run.reason} {' '.join(run.devices)} {tags}".lower()
        return all(
            (word[1:] not in text) if word.startswith("-") and len(word) > 1 else word in text
            for word in self._words
        )


class StepDelegate(QStyledItemDelegate):
    """A pale bar over the steps."""

    def __init__(self, model: RunTableModel, parent: QWidget) -> None:
        super().__init__(parent)
        self._model = model

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: Index) -> None:
        super().paint(painter, option, index)
        run = self._model.run_at(index.row())
        if run.end_step:
            theme: Theme = self._model.theme
            place = option.rect.adjusted(2, 5, -6, -5)
            done = place.adjusted(0, 0, 0, 0)
            done.setWidth(round(place.width() * min(run.step / run.end_step, 1.0)))
            for part, colour, alpha in (
                (place, theme.idle, 24),
                (done, theme.state_colour(run.state), 70 if theme.is_dark else 45),
            ):
                shade = QColor(colour)
                shade.setAlpha(alpha)
                painter.fillRect(part, shade)


class RunTable(QTableView):
    """The table with its selection. `selected` carries the ids of the chosen runs, the current one first."""

    selected = Signal(object)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.runs = RunTableModel(self)
        self.setModel(self.runs)
        self.setItemDelegateForColumn(STEP, StepDelegate(self.runs, self))
        self.setSelectionBehavior(QAbstractItemView.SelectionBehavior.SelectRows)
        self.setSelectionMode(QAbstractItemView.SelectionMode.ExtendedSelection)
        self.setVerticalScrollMode(QAbstractItemView.ScrollMode.ScrollPerPixel)
        self.setShowGrid(False)
        self.setWordWrap(False)
        self.setTabKeyNavigation(False)
        self.setAccessibleName("Runs")
        self.verticalHeader().hide()
        self.verticalHeader().setDefaultSectionSize(ROW_HEIGHT_PX)
        header = self.horizontalHeader()
        header.setSortIndicator(SUBMITTED, Qt.SortOrder.DescendingOrder)
        header.setHighlightSections(False)
        self.setSortingEnabled(True)
        for number, column in enumerate(COLUMNS):
            self.setColumnWidth(number, column.width_px)
        header.setSectionResizeMode(4, QHeaderView.ResizeMode.Stretch)
        self.selectionModel().selectionChanged.connect(self._tell_selection)
        self.runs.modelReset.connect(self._restore_selection)
        self._chosen: list[str] = []

    def chosen(self) -> list[str]:
        rows = [index.row() for index in self.selectionModel().selectedRows()]
        current = self.currentIndex().row()
        return [self.runs.run_at(row).run_id for row in sorted(rows, key=lambda row: (row != current, row))]

    def choose(self, run_ids: Iterable[str]) -> None:
        """Select these, as far as the filter shows them."""
        rows = [row for row in map(self.runs.row_of, run_ids) if row is not None]
        model = self.selectionModel()
        model.clearSelection()
        kind = QItemSelectionModel.SelectionFlag
        for row in reversed(rows):
            model.setCurrentIndex(self.runs.index(row, 0), kind.Select | kind.Rows)

    @Slot()
    def _tell_selection(self) -> None:
        self._chosen = self.chosen()
        self.selected.emit(self._chosen)

    @Slot()
    def _restore_selection(self) -> None:
        self.choose(list(self._chosen))
