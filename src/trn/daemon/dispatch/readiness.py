"""May a run start on this machine's GPUs now? The doctor's report of its interpreter decides.

Only errors about torch, the driver and what several processes talk through count: everything else of the report is
for people. An interpreter that does not answer stops no run: its worker will say what is wrong with it. Devices
that the operator names in the settings are trusted and not checked.
"""

from typing import Protocol

from trn.core.causes import DOCTOR, Cause
from trn.daemon.machine.doctor_reports import DoctorReports

# The most telling first: one fault is shown, and the others often follow from it.
TOPICS = {"cuda": ("torch", "cuda", "driver"), "rocm": ("torch", "rocm")}
BETWEEN_PROCESSES = "collectives"


class Readiness(Protocol):
    """What the dispatcher asks before it hands out a GPU that was detected. Answers at once."""

    def obstacle(self, python: str, *, kind: str, num_gpus: int) -> Cause | None:
        """Why a run of that interpreter cannot start on GPUs of that kind now; None where it can."""
        ...


class FakeReadiness:
    """Says what a test wants: an obstacle by interpreter, or by (interpreter, kind). Notes what it was asked."""

    def __init__(self) -> None:
        self.obstacles: dict[str | tuple[str, str], Cause] = {}
        self.questions: list[tuple[str, str, int]] = []

    def obstacle(self, python: str, *, kind: str, num_gpus: int) -> Cause | None:
        self.questions.append((python, kind, num_gpus))
        return self.obstacles.get((python, kind)) or self.obstacles.get(python)


class DoctorReadiness:
    """The doctor's word, asked again as reports grow old."""

    def __init__(self, reports: DoctorReports) -> None:
        self._reports = reports

    def obstacle(self, python: str, *, kind: str, num_gpus: int) -> Cause | None:
        report = self._reports.newest(python, is_urgent=True)
        if report is None:
            return Cause(id="waits-for-doctor", waits_for=(DOCTOR,), values={"python": python})
        errors = {finding.check: finding for finding in report.findings if finding.level == "error"}
        topics = (*TOPICS.get(kind, ()), *((BETWEEN_PROCESSES,) if num_gpus > 1 else ()))
        fault = next((errors[topic] for topic in topics if topic in errors), None)
        if fault is None:
            return None
        values = {"check": fault.check, "message": fault.message, "remedy": fault.remedy}
        return Cause(id="gpu-not-usable", fault="machine", waits_for=(DOCTOR,), values=values)
