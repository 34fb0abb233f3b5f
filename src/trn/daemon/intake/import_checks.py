"""Can a run's code be loaded, and its data be read? Checked before it is queued, in a process that the launcher forks.

A snapshot is unpacked into a folder of the check's own, because the run has no folder yet.
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
from gen_worker.errors import Fault
from trn.core.home import Home
from trn.core.snapshots import materialise
from trn.daemon.api.secret_values import reveal
from trn.executors.base import LaunchPlan
from trn.executors.pools import Pools


class ImportChecks:
    """One for a daemon. A home has one daemon, so what is in its folder at the start is left over."""

    def __init__(self, pools: Pools, home: Home) -> None:
        self._pools = pools
        self._home = home

    def prepare(self) -> None:
        """Remove what a killed daemon left. Blocks."""
        shutil.rmtree(self._home.trials, ignore_errors=True)

    async def find_faults(
        self,
        plan: LaunchPlan,
        config: dict[str, Any],
        *,
        pool: str,
        snapshot: str,
        secret_env: Mapping[str, Secret] = MappingProxyType({}),
    ) -> tuple[list[Fault], list[str]]:
        """(what is wrong with code or data, warnings if they could not be checked)."""
        folder = await asyncio.to_thread(self._make_folder, snapshot)
        code = str(folder / "code") if snapshot else plan.code_dir
        is_homeless = plan.cwd == str(self._home.run(plan.run_id).root)
        checked = msgspec.structs.replace(
            plan, code_dir=code, cwd=str(folder) if is_homeless else plan.cwd, is_writer_wanted=False
        )
        try:
            tried = await self._pools.of(pool).check_imports(checked, config, reveal(secret_env))
        finally:
            with contextlib.suppress(OSError):
                shutil.rmtree(folder)  # a few files; a thread would take longer
        redactor = SecretRedactor(secret_env.values())
        shown = [
            fault.changed(redactor.redact(_show(fault, code if snapshot else ""))) for fault in tried.faults
        ]
        problem = f"the code was not checked: {tried.problem}"
        return shown, [problem] if tried.problem else []

    def _make_folder(self, snapshot: str) -> Path:
        self._home.trials.mkdir(mode=0o700, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=self._home.trials))
        if snapshot:
            materialise(self._home.snapshots, snapshot, folder / "code")
        return folder


def _show(fault: str, frozen: str) -> str:
    """Files of a snapshot by their path in it."""
    if frozen:
        fault = fault.replace(f"{frozen}/", "").replace(frozen, "the code of this run")
    return fault.replace("\n  - ", ", ").replace(":,", ":")
