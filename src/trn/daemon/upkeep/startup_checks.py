"""What must be true before a daemon starts. Each refusal says what was found and what to do."""

import shutil
import sqlite3
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.version import InvalidVersion, Version

from gen_worker.contract.sizes import show_bytes
from trn.core.errors import UnavailableError
from trn.core.home import Home
from trn.core.settings import Settings

# The generated code in trn.proto asks for these; older ones fail later and in stranger ways.
LEAST_PACKAGES = {"grpcio": "1.80.0", "protobuf": "6.30.0"}
LEAST_SQLITE = "3.35.0"  # RETURNING
SOUND_SQLITE = "3.51.3"  # before it, two connections that checkpoint at once may damage a file


def check_start(
    home: Home,
    settings: Settings,
    *,
    installed: Callable[[str], str] = version,
    sqlite_version: str = sqlite3.sqlite_version,
    free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
) -> list[str]:
    """Every reason not to start at once, as UnavailableError; else notes for the log."""
    faults = [*_package_faults(LEAST_PACKAGES, installed)]
    if Version(sqlite_version) < Version(LEAST_SQLITE):
        faults.append(
            f"SQLite is {sqlite_version}, and {LEAST_SQLITE} or newer is needed: use a newer Python"
        )
    home.make()
    free = free_bytes(home.root)
    if free < settings.min_free_bytes:
        faults.append(
            f"{home.root} has {show_bytes(free)} free, and {show_bytes(settings.min_free_bytes)} are needed: free some space,"
            " or lower min_free_bytes in its settings.toml"
        )
    if faults:
        raise UnavailableError("\n".join(["the daemon cannot start:", *(f"  - {fault}" for fault in faults)]))
    notes = []
    if Version(sqlite_version) < Version(SOUND_SQLITE):
        notes.append(f"SQLite {sqlite_version}: safe here, since one connection alone writes and checkpoints")
    return notes


def _package_faults(least: Mapping[str, str], installed: Callable[[str], str]) -> list[str]:
    faults = []
    for name, wanted in least.items():
        try:
            found = installed(name)
            is_old = Version(found) < Version(wanted)
        except PackageNotFoundError:
            faults.append(f"{name} is not installed: pip install '{name}>={wanted}'")
        except InvalidVersion:
            faults.append(f"{name} has a version that cannot be read: {found!r}; install {wanted} or newer")
        else:
            if is_old:
                faults.append(
                    f"{name} is {found}, and {wanted} or newer is needed: pip install '{name}>={wanted}'"
                )
    return faults
