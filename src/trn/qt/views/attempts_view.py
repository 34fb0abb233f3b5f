"""Each launch of a run: when, how far it came, and why it ended."""

from datetime import datetime

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QHeaderView, QTableWidget, QTableWidgetItem, QVBoxLayout, QWidget

from trn.client.client import AsyncClient
from trn.client.screen.figures import show_duration
from trn.core.cause_words import say_exit, say_what
from trn.core.terminal_text import plain
from trn.proto.records import Attempt, Run, RunDetails
from trn.qt.call_thread import CallThread, Ticket
from trn.qt.views.labels import text_label, tip
from trn.qt.views.run_table import say_state

TITLES = ("Attempt", "Started", "Took", "Step", "Devices", "Process", "Why it ended", "Caused by")
WHY = 6
FAULTS = {"job": "the job", "machine": "the machine", "trn": "trn"}


class AttemptsView(QWidget):
    """Of one run. It is read again whenever the run's state or attempt changes."""

    def __init__(self, calls: CallThread, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._calls = calls
        self._shown: tuple[object, ...] = ()
        self._ticket: Ticket | None = None
        self.why = text_label()
        self.facts = text_label(is_muted=True)
        self.table = QTableWidget(0, len(TITLES))
        self.table.setHorizontalHeaderLabels(TITLES)
        self.table.setEditTriggers(QTableWidget.EditTrigger.NoEditTriggers)
        self.table.setSelectionBehavior(QTableWidget.SelectionBehavior.SelectRows)
        self.table.setShowGrid(False)
        self.table.setTabKeyNavigation(False)
        self.table.setAccessibleName("Attempts")
        self.table.verticalHeader().hide()
        header = self.table.horizontalHeader()
        header.setDefaultAlignment(Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter)
        header.setSectionResizeMode(QHeaderView.ResizeMode.ResizeToContents)
        header.setSectionResizeMode(WHY, QHeaderView.ResizeMode.Stretch)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 8, 0, 0)
        column.addWidget(self.why)
        column.addWidget(self.facts)
        column.addWidget(self.table, 1)
        self.setFocusProxy(self.table)

    def show_run(self, run: Run | None) -> None:
        """Read its attempts if they may have changed; None: nothing."""
        shown = () if run is None else (run.run_id, run.state, run.attempt, run.is_cancel_wanted, run.cause)
        if shown == self._shown:
            return
        self._shown = shown
        if self._ticket is not None:
            self._ticket.cancel()
        if run is None:
            self.why.clear()
            self.facts.clear()
            self.table.setRowCount(0)
            return
        self.why.setText(plain(f"{run.run_id}: {run.reason or say_state(run)}"))
        run_id = run.run_id

        async def read(client: AsyncClient) -> RunDetails:
            return await client.details(run_id, is_exact=True)

        self._ticket = self._calls.ask(read, self._show, lambda _fault: self._retry())

    def _retry(self) -> None:
        self._shown = ()  # with the next change

    def _show(self, details: RunDetails) -> None:
        run = details.run
        facts = [f"folder {details.folder}"]
        trainer = (run.config or {}).get("trainer")
        if trainer:
            facts.insert(0, f"trainer {trainer}")
        if run.parent_run_id:
            facts.append(f"resumed from {run.parent_run_id} at step {run.start_step}")
        if run.tags:
            facts.append("tags " + ", ".join(f"{name}={value}" for name, value in run.tags.items()))
        if run.notes:
            facts.append(f"notes: {run.notes}")
        self.facts.setText("\n".join(plain(fact) for fact in facts))
        self.table.setRowCount(len(details.attempts))
        for row, attempt in enumerate(reversed(details.attempts)):
            for column, text in enumerate(_cells(attempt)):
                item = QTableWidgetItem(plain(text))
                item.setToolTip(tip(text))
                self.table.setItem(row, column, item)


def _cells(attempt: Attempt) -> tuple[str, ...]:
    launched = datetime.fromtimestamp(attempt.launched_ms / 1000)
    took = "" if attempt.ended_ms is None else show_duration((attempt.ended_ms - attempt.launched_ms) / 1000)
    why = say_what(attempt.cause) if attempt.cause.id or attempt.cause.values else attempt.reason
    if attempt.ended_ms is not None and not why:
        why = say_exit(attempt.exit_code)
    return (
        str(attempt.number),
        launched.strftime("%Y-%m-%d %H:%M:%S"),
        took,
        f"{attempt.step:,}",
        ", ".join(attempt.devices),
        str(attempt.pid or ""),
        why if attempt.ended_ms is not None else "runs",
        FAULTS.get(attempt.cause.fault, ""),
    )
