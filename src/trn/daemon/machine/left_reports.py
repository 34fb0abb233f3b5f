"""Runs whose report a daemon before us did not get to write, or to complete with the doctor's: it ended too soon.

Looked for once, a little after the start; the doctor himself is only asked when the first half minute is over, which
belongs to the runs. The newest come first, and a page of runs that lack nothing ends the search.
"""

import asyncio
import logging
import sqlite3
from pathlib import Path

from trn.core.errors import TrnError
from trn.core.home import Home
from trn.core.runs import RunRecord
from trn.daemon.machine.environment_report import EnvironmentReports, is_whole
from trn.registry.reader import RegistryReader

logger = logging.getLogger("trn.daemon.report")

PAGE, MAX_PAGES = 200, 50
CALM_S = 5.0


class LeftReports:
    """`run` is one task of the daemon, and ends when everything is handed to `reports`."""

    def __init__(
        self, home: Home, reports: EnvironmentReports, *, python: str, calm_s: float = CALM_S
    ) -> None:
        """`python` is for runs that name no interpreter."""
        self._home, self._reports, self._python, self._calm_s = home, reports, python, calm_s

    async def run(self) -> None:
        await asyncio.sleep(self._calm_s)
        try:
            found = await asyncio.to_thread(self.find)
        except (OSError, sqlite3.Error, TrnError):
            logger.exception("which runs are left without a report could not be found out")
            return
        if found:
            logger.info("%d runs are left with an unfinished report: they get it now", len(found))
        for run in found:
            path = self._home.run(run.run_id).report
            self._reports.write_late(
                run, path, python=run.interpreter or self._python, store=self._home.snapshots
            )
        self._reports.forget_own()

    def find(self) -> list[RunRecord]:
        """Runs that began and have no whole report. Blocks."""
        reader = RegistryReader(self._home.registry)
        found: list[RunRecord] = []
        try:
            before: tuple[int, str] | None = None
            for _ in range(MAX_PAGES):
                page = reader.page(before=before, limit=PAGE)
                left = [run for run in page if run.attempt and self._lacks(self._home.run(run.run_id).report)]
                found += left
                if len(page) < PAGE or not left:
                    break
                before = (page[-1].submitted_ms, page[-1].run_id)
        finally:
            reader.close()
        return found

    def _lacks(self, report: Path) -> bool:
        return not self._reports.is_own(report) and report.parent.is_dir() and not is_whole(report)
