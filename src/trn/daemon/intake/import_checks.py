"""Can a run's code be loaded at all? Found out before it is queued, by a process that a worker's launcher forks.

What is frozen is laid out in a folder of the trial's own: the run has none yet, and may never have one.
"""

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from gen_worker.contract.redaction import Secret, SecretRedactor
from trn.core.errors import InvalidRequestError
from trn.core.home import Home
from trn.core.snapshots import materialise
from trn.daemon.api.secret_values import reveal
from trn.executors.base import Executor, LaunchPlan


class ImportChecks:
    """One for a daemon; there is one daemon to a home, so what lies in its folder at the start is nobody's."""

    def __init__(self, executor: Executor, home: Home) -> None:
        self._executor = executor
        self._home = home

    def prepare(self) -> None:
        """Remove what a killed daemon left. Blocks."""
        shutil.rmtree(self._home.trials, ignore_errors=True)

    async def check_imports(
        self,
        plan: LaunchPlan,
        config: dict[str, Any],
        *,
        snapshot: str,
        secret_env: Mapping[str, Secret] = MappingProxyType({}),
    ) -> list[str]:
        """InvalidRequestError where the code that the job names cannot be loaded; warnings where nobody can tell."""
        folder = await asyncio.to_thread(self._make_folder, snapshot)
        code = str(folder / "code") if snapshot else plan.code_dir
        is_homeless = plan.cwd == str(self._home.run(plan.run_id).root)
        trial = msgspec.structs.replace(
            plan, code_dir=code, cwd=str(folder) if is_homeless else plan.cwd, is_writer_wanted=False
        )
        try:
            tried = await self._executor.check_imports(trial, config, reveal(secret_env))
        finally:
            with contextlib.suppress(OSError):
                shutil.rmtree(folder)  # a few files; a thread would take longer
        if tried.faults:
            redactor = SecretRedactor(secret_env.values())
            faults = [redactor.redact(_show(fault, code if snapshot else "")) for fault in tried.faults]
            raise InvalidRequestError("the job is not valid", faults)
        return [f"whether its code can be imported is not known: {tried.problem}"] if tried.problem else []

    def _make_folder(self, snapshot: str) -> Path:
        self._home.trials.mkdir(mode=0o700, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=self._home.trials))
        if snapshot:
            materialise(self._home.snapshots, snapshot, folder / "code")
        return folder


def _show(fault: str, frozen: str) -> str:
    """In the author's terms: files of frozen code by their place in it."""
    if frozen:
        fault = fault.replace(f"{frozen}/", "").replace(frozen, "the code of this run")
    return fault.replace("\n  - ", ", ").replace(":,", ":")
