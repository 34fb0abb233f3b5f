"""Cancel and resume: each asks first, and waits for nothing."""

from collections.abc import Callable, Sequence
from functools import partial

from PySide6.QtCore import QObject, Qt, Signal, Slot
from PySide6.QtWidgets import QLabel, QMessageBox, QWidget

from trn.client.client import AsyncClient
from trn.core.terminal_text import plain
from trn.proto.records import Run, SubmitResult
from trn.qt.call_thread import CallThread

NUM_LISTED = 5


class RunCommands(QObject):
    """`done` says what was recorded, `submitted` carries the `SubmitResult` of a resume."""

    done = Signal(str)
    submitted = Signal(object)

    def __init__(self, calls: CallThread, window: QWidget) -> None:
        super().__init__(window)
        self._calls = calls
        self._window = window

    def ask_cancel(self, runs: Sequence[Run]) -> None:
        live = [run.run_id for run in runs if not run.is_terminal]
        if live:
            is_one = len(live) == 1
            words = f"{'It saves' if is_one else 'Each saves'} a checkpoint if it can."
            yes = "Cancel the run" if is_one else f"Cancel {len(live)} runs"
            self._ask(f"Cancel {_listed(live)}?", words, yes, partial(self._cancel, live))

    def ask_resume(self, runs: Sequence[Run]) -> None:
        if len(runs) == 1 and runs[0].is_terminal:
            run_id = runs[0].run_id
            words = "A new run continues from its newest checkpoint that verifies."
            self._ask(f"Resume {run_id}?", words, "Resume", partial(self._resume, run_id))

    def _ask(self, question: str, words: str, yes: str, do: Callable[[], None]) -> None:
        """Without an event loop of its own: the window stays alive."""
        box = self._box(QMessageBox.Icon.Question, question, words)
        agree = box.addButton(yes, QMessageBox.ButtonRole.AcceptRole)
        box.setDefaultButton(box.addButton("Back", QMessageBox.ButtonRole.RejectRole))

        @Slot()
        def take_yes() -> None:
            do()

        agree.clicked.connect(take_yes)
        box.open()

    def _cancel(self, run_ids: list[str]) -> None:
        async def cancel(client: AsyncClient) -> str:
            for run_id in run_ids:
                await client.cancel(run_id, is_exact=True)
            return f"{_listed(run_ids)}: being cancelled"

        self._calls.ask(cancel, self.done.emit, self._show_fault)

    def _resume(self, run_id: str) -> None:
        async def resume(client: AsyncClient) -> SubmitResult:
            return await client.resume(run_id, is_exact=True)

        self._calls.ask(resume, self.submitted.emit, self._show_fault)

    def _show_fault(self, fault: Exception) -> None:
        self._box(QMessageBox.Icon.Warning, "This was refused.", str(fault)).open()

    def _box(self, icon: QMessageBox.Icon, title: str, words: str) -> QMessageBox:
        box = QMessageBox(icon, "trn", plain(title), parent=self._window)
        box.setTextFormat(Qt.TextFormat.PlainText)
        box.setInformativeText("\n".join(map(plain, words.splitlines())))
        for label in box.findChildren(QLabel):  # some releases of Qt take the format for the first text alone
            label.setTextFormat(Qt.TextFormat.PlainText)
        box.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        return box


def _listed(run_ids: Sequence[str]) -> str:
    more = f" and {len(run_ids) - NUM_LISTED} more" if len(run_ids) > NUM_LISTED else ""
    return ", ".join(run_ids[:NUM_LISTED]) + more
