"""Qt: the thread that brings runs and events into a window of yours, and the window of `trn gui`.

Needs the extra `qt` (PySide6 and pyqtgraph). Nothing else in trn imports it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trn.qt.bridge_thread import TrainerQBridgeThread
    from trn.qt.garbage import GarbageTimer
    from trn.qt.run_stream import ConnectionState, RunEvents, WatchRequest

__all__ = ["ConnectionState", "GarbageTimer", "RunEvents", "TrainerQBridgeThread", "WatchRequest"]

_WHERE = {
    "ConnectionState": "trn.qt.run_stream",
    "GarbageTimer": "trn.qt.garbage",
    "RunEvents": "trn.qt.run_stream",
    "TrainerQBridgeThread": "trn.qt.bridge_thread",
    "WatchRequest": "trn.qt.run_stream",
}


def __getattr__(name: str) -> object:
    """Loaded when they are first asked for. ImportError, with what to install, where there is no PySide6."""
    if name not in _WHERE:
        raise AttributeError(f"module 'trn.qt' has no attribute {name!r}")
    from importlib import import_module

    try:
        return getattr(import_module(_WHERE[name]), name)
    except ModuleNotFoundError as fault:
        if fault.name is None or fault.name.partition(".")[0] != "PySide6":
            raise
        raise ImportError(f"trn.qt.{name} needs PySide6, which is not installed: {INSTALL}") from fault


INSTALL = "`pip install 'trn[qt]'`"
