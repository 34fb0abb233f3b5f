"""The launchers of a home: which of them live, and how another is started."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import msgspec

from gen_worker.contract.process_identity import is_same_process
from gen_worker.launcher.messages import LauncherInfo
from trn.core.errors import UnavailableError
from trn.core.workers_variables import without_workers_variables

START_PATIENCE_S = 60.0
LOG_NAME = "launcher.log"


def inherited_environ() -> dict[str, str]:
    """What a launcher that we start passes on to its workers."""
    return without_workers_variables(os.environ)


def find_launchers(folder: Path) -> list[LauncherInfo]:
    """Those that live, the oldest first. What the dead left is removed. Blocks."""
    living: list[LauncherInfo] = []
    for path in folder.glob("*.json"):
        try:
            info = msgspec.json.decode(path.read_bytes(), type=LauncherInfo)
        except FileNotFoundError:
            continue
        except msgspec.MsgspecError:
            path.unlink(missing_ok=True)
            continue
        if is_same_process(info.pid, info.start_ticks, info.boot_id):
            living.append(info)
        else:
            path.unlink(missing_ok=True)
            (folder / Path(info.socket).name).unlink(missing_ok=True)
    return sorted(living, key=lambda info: (info.start_ticks or 0, info.pid))


def start_launcher(
    folder: Path, *, idle_exit_s: float, is_bare: bool = False, worker_open_files: int | None = None
) -> None:
    """Returns when a new one listens; it is warm some seconds later. Blocks.

    `worker_open_files` is the limit that workers get, where ours is higher than what we were started with.
    """
    # -P: a file in the current folder must not stand in for a library.
    command = [sys.executable, "-P", "-m", "gen_worker.launcher", "--folder", str(folder)]
    command += ["--idle-exit-s", str(idle_exit_s), *(["--bare"] if is_bare else [])]
    if worker_open_files is not None and worker_open_files > 0:
        command += ["--worker-open-files", str(worker_open_files)]
    log_path = folder / LOG_NAME
    try:
        with log_path.open("ab") as log:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
                env=inherited_environ(),
                start_new_session=True,
                timeout=START_PATIENCE_S,
                check=False,
            )
    except (OSError, subprocess.SubprocessError) as fault:
        raise UnavailableError(f"no launcher can be started: {fault}") from fault
    if done.returncode != 0:
        raise UnavailableError(f"the launcher did not start: {_last_line(log_path)} (see {log_path})")


def _last_line(path: Path) -> str:
    with contextlib.suppress(OSError):
        lines = path.read_text(errors="replace").splitlines()
        if lines:
            return lines[-1]
    return "it said nothing"
