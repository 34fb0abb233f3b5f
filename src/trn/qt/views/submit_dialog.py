"""A job file on its way to the daemon: what is wrong with it, or what would run, before it is queued."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from PySide6.QtCore import Qt, Signal, Slot
from PySide6.QtWidgets import (
    QDialog,
    QDialogButtonBox,
    QPlainTextEdit,
    QPushButton,
    QVBoxLayout,
    QWidget,
)

from trn.client.client import AsyncClient
from trn.core.errors import InvalidRequestError
from trn.core.home import Home
from trn.core.terminal_text import plain
from trn.proto.records import SubmitResult
from trn.qt.call_thread import CallThread
from trn.qt.views.labels import text_label

if TYPE_CHECKING:
    from trn.client.code.frozen_code import FrozenCode
    from trn.client.job_file import Job
    from trn.client.wire_requests import SubmitOptions

JOB_SUFFIXES = frozenset({".yaml", ".yml", ".toml", ".json"})


class CheckedJob(NamedTuple):
    """A job with the snapshot of its code. `faults`: why it would be refused; `notes`: what else to know."""

    job: "Job | None"
    code: "FrozenCode | None"
    faults: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def options(self) -> "SubmitOptions":
        assert self.job is not None
        assert self.code is not None
        return {**self.code.options, "base_dir": self.job.base_dir, "is_import_tried": True}


async def check_job(client: AsyncClient, home: Home, path: Path) -> CheckedJob:
    """As `trn run` does before it submits: the file, a snapshot of the code, the daemon's judgement."""
    from trn.client.code.frozen_code import freeze
    from trn.client.job_file import Changes, read_job

    try:
        job = await asyncio.to_thread(read_job, path, Changes())
        code = await asyncio.to_thread(freeze, home, job.base_dir, code_dir=None)
        found = CheckedJob(job, code, ())
        check = await client.check(job.config, **found.options)
    except InvalidRequestError as fault:
        return CheckedJob(None, None, tuple(map(str, fault.faults)) or (fault.reason,))
    faults = dict.fromkeys(map(str, (*job.faults, *check.faults)))
    plan = str((check.plan or {}).get("shell", "")).replace("\n", "\n  ")
    notes = [*code.lines(), *check.notes, *([f"It would be started as\n  {plan}"] if plan else [])]
    return found._replace(faults=tuple(faults), notes=tuple(map(str, notes)))


class SubmitDialog(QDialog):
    """`submitted` carries the `SubmitResult`."""

    submitted = Signal(object)

    def __init__(self, calls: CallThread, home: Home, path: Path, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._calls = calls
        self._checked: CheckedJob | None = None
        self.setWindowTitle("Submit a job")
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.resize(640, 380)
        title = text_label(plain(str(path)))
        title.setObjectName("title")
        self.verdict = text_label(
            "Checking: fields, data, code, devices, disk. The first check imports the code."
        )
        self.details = QPlainTextEdit(readOnly=True)
        self.details.setAccessibleName("What the check found")
        self.buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Cancel)
        self.submit = QPushButton("Submit")
        self.submit.setEnabled(False)
        self.submit.setDefault(True)
        self.submit.clicked.connect(self._submit)
        self.buttons.addButton(self.submit, QDialogButtonBox.ButtonRole.ActionRole)
        self.buttons.rejected.connect(self.reject)
        column = QVBoxLayout(self)
        for widget in (title, self.verdict):
            column.addWidget(widget)
        column.addWidget(self.details, 1)
        column.addWidget(self.buttons)
        self._ticket = calls.ask(
            lambda client: check_job(client, home, path), self._take_check, self._take_fault
        )
        self.finished.connect(self._forget)

    @Slot(int)
    def _forget(self, _result: int) -> None:
        self._ticket.cancel()

    def _take_check(self, checked: CheckedJob) -> None:
        self._checked = checked
        if checked.faults:
            number = len(checked.faults)
            self.verdict.setText(f"This job is not valid: {number} error{'s' if number > 1 else ''}.")
            self.details.setPlainText("\n".join(f"• {plain(fault)}" for fault in checked.faults))
            return
        self.verdict.setText("This job would be accepted.")
        self.details.setPlainText(
            "\n".join(plain(line) for note in checked.notes for line in note.splitlines())
        )
        self.submit.setEnabled(True)
        self.submit.setFocus()

    def _take_fault(self, fault: Exception) -> None:
        self.submit.setEnabled(False)
        self.verdict.setText("The job was not submitted.")
        self.details.setPlainText("\n".join(map(plain, str(fault).splitlines())))

    @Slot()
    def _submit(self) -> None:
        checked = self._checked
        if checked is None or checked.job is None:
            return
        job, options = checked.job, checked.options
        self.submit.setEnabled(False)
        self.verdict.setText("Submitting…")
        self._ticket = self._calls.ask(
            lambda client: client.submit(job.config, **options), self._take_result, self._take_fault
        )

    def _take_result(self, result: SubmitResult) -> None:
        self.submitted.emit(result)
        self.accept()
