"""Checks before a daemon starts: package versions, SQLite, disk space."""

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

# Required by the generated code in trn.proto; older ones fail later with unclear errors.
MIN_PACKAGES = {"grpcio": "1.80.0", "protobuf": "6.30.0"}
MIN_SQLITE = "3.35.0"  # RETURNING
SAFE_SQLITE = "3.51.3"  # older: two connections that checkpoint at once may corrupt a file


def check_start(
    home: Home,
    settings: Settings,
    *,
    installed: Callable[[str], str] = version,
    sqlite_version: str = sqlite3.sqlite_version,
    free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
) -> list[str]:
    """UnavailableError with all reasons not to start; else notes for the log."""
    faults = [*_package_faults(MIN_PACKAGES, installed)]
    if Version(sqlite_version) < Version(MIN_SQLITE):
        faults.append(
            f"SQLite is {sqlite_version}, but {MIN_SQLITE} or newer is required: use a newer Python"
        )
    home.make()
    free = free_bytes(home.root)
    if free < settings.min_free_bytes:
        faults.append(
            f"{home.root} has {show_bytes(free)} free, but {show_bytes(settings.min_free_bytes)} are required: free"
            " some space, or lower min_free_bytes in its settings.toml"
        )
    if faults:
        raise UnavailableError("\n".join(["the daemon cannot start:", *(f"  - {fault}" for fault in faults)]))
    notes = []
    if Version(sqlite_version) < Version(SAFE_SQLITE):
        notes.append(
            f"SQLite {sqlite_version}: safe here, because only one connection writes and checkpoints"
        )
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
            faults.append(f"{name} has an invalid version {found!r}: install {wanted} or newer")
        else:
            if is_old:
                faults.append(
                    f"{name} is {found}, but {wanted} or newer is required: pip install '{name}>={wanted}'"
                )
    return faults
