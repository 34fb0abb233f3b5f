"""Looks at the files that events named, and records what was found: present, refused with a cause, or removed.

The rows to look at are in the registry since their events are. So a daemon that was killed leaves them to the next one,
and a file is recorded once, however often it was looked at. Files are opened and hashed in a few other threads.
"""

import asyncio
import logging
from pathlib import Path

from gen_worker.contract.failpoints import failpoint
from trn.core.artifacts.files import check_file, is_there
from trn.core.artifacts.records import ArtifactRecord, ArtifactState, CheckedFile
from trn.core.cause_words import say_what
from trn.core.errors import NotFoundError
from trn.core.home import Home
from trn.core.runs import RunRecord
from trn.registry.base import Registry
from trn.registry.writer import committed

logger = logging.getLogger("trn.ingest")

MAX_AT_ONCE = 2  # runs whose files are read
PAGE = 128  # files of a run in one commit
GONE_PAGE = 500
SETTLE_S = 20.0  # how long the end of an attempt waits for its files


class ArtifactIntake:
    """From the loop's thread."""

    def __init__(self, *, registry: Registry, home: Home, retry_s: float) -> None:
        self._registry = registry
        self._home = home
        self._retry_s = retry_s
        self._asked: set[str] = set()  # runs to look at: in the queue, or again once they are not busy
        self._busy: set[str] = set()
        self._due: asyncio.Queue[str] = asyncio.Queue()  # bounded: each run at most once
        self._passed = asyncio.Event()
        self._known_faults: dict[str, str] = {}

    def look(self, run_id: str) -> None:
        """Events of the run named files: they are looked at soon."""
        if run_id not in self._asked:
            self._asked.add(run_id)
            if run_id not in self._busy:
                self._due.put_nowait(run_id)

    async def settle(self, run_id: str) -> None:
        """Wait until every file that was named is recorded. Not for long: large files are recorded later."""
        self.look(run_id)
        try:
            async with asyncio.timeout(SETTLE_S):
                while run_id in self._asked or run_id in self._busy:
                    await self._passed.wait()
        except TimeoutError:
            logger.warning("run %s: its artifacts are still being hashed; the run ends before that", run_id)
        else:
            await record_gone(self._registry, self._home, run_id)

    async def run(self) -> None:
        """Until cancelled: first what an earlier daemon left."""
        for run_id in self._registry.runs_with_unchecked_artifacts():
            self.look(run_id)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(MAX_AT_ONCE):
                tasks.create_task(self._work())

    async def _work(self) -> None:
        while True:
            run_id = await self._due.get()
            self._asked.discard(run_id)  # what is named from now on is looked at again
            self._busy.add(run_id)
            try:
                await self._check(run_id)
            except NotFoundError:
                pass  # it was removed
            except Exception as fault:  # must not stop the others
                self._warn(run_id, fault)
                self._asked.add(run_id)
                asyncio.get_running_loop().call_later(self._retry_s, self._release, run_id)
                continue
            self._known_faults.pop(run_id, None)
            self._release(run_id)

    def _release(self, run_id: str) -> None:
        self._busy.discard(run_id)
        if run_id in self._asked:
            self._due.put_nowait(run_id)
        self._passed.set()
        self._passed.clear()

    def _warn(self, run_id: str, fault: Exception) -> None:
        text = f"{type(fault).__name__}: {fault}"
        if self._known_faults.get(run_id) != text:
            self._known_faults[run_id] = text
            logger.warning("artifacts of run %s cannot be recorded: %s; will try again", run_id, text)

    async def _check(self, run_id: str) -> None:
        run = self._registry.get(run_id)
        has_checkpoint = False
        while page := self._registry.unchecked_artifacts(run_id, PAGE):
            checked = await asyncio.to_thread(self._check_files, run, page)
            failpoint("artifacts.checked")
            await committed(self._registry.settle_artifacts(run_id, checked))
            failpoint("artifacts.recorded")
            _log_refused(page, checked)
            has_checkpoint |= any(artifact.kind == "checkpoint" for artifact in page)
        if has_checkpoint:  # that is when a worker applies retention
            kind = "" if _has_retention(run) else "checkpoint"
            await record_gone(self._registry, self._home, run_id, kind=kind)

    def _check_files(self, run: RunRecord, page: list[ArtifactRecord]) -> list[CheckedFile]:
        has_retention = _has_retention(run)
        return [
            check_file(
                self._home, artifact, run.nonce, may_be_gone=has_retention or artifact.kind == "checkpoint"
            )
            for artifact in page
        ]


def _has_retention(run: RunRecord) -> bool:
    """Of samples and videos; checkpoints always have one."""
    return bool((run.config.get("artifacts") or {}).get("keep_last"))


async def record_gone(registry: Registry, home: Home, run_id: str, *, kind: str = "") -> None:
    """Retention removes files without an event: those that are not there any more are recorded as removed."""
    present = registry.present_files(run_id, kind)
    gone = await asyncio.to_thread(_find_gone, present, home.run(run_id).root) if present else []
    for start in range(0, len(gone), GONE_PAGE):
        await committed(registry.settle_artifacts(run_id, gone=gone[start : start + GONE_PAGE]))


def _find_gone(present: list[tuple[str, str, str]], root: Path) -> list[str]:
    return [artifact_id for artifact_id, kind, path in present if not is_there(root, kind, path)]


def _log_refused(page: list[ArtifactRecord], checked: list[CheckedFile]) -> None:
    for artifact, file in zip(page, checked, strict=True):
        if file.state is ArtifactState.REFUSED:
            logger.warning(
                "run %s: %s %r was refused as an artifact: %s",
                artifact.run_id,
                artifact.kind,
                artifact.name,
                say_what(file.cause),
            )
