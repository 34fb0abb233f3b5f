"""`trn gui`: the desktop window on this home. Starts a daemon if none runs."""

import contextlib
import os
import re
import signal
import socket
import sys
from importlib.util import find_spec

import click

from trn.cli.output import asks_for_json
from trn.core.errors import UnavailableError
from trn.core.home import Home

EPILOG = """\b
Examples:
  trn gui
  trn --home /data/trn gui
"""


@click.command("gui", epilog=EPILOG)
@click.pass_obj
def command(home: Home) -> int:
    """Open the desktop window: all runs, live. Starts a daemon if none runs.

    It needs the extra `qt`: `pip install 'trn[qt]'`. Runs continue when the window is closed.
    """
    if not _has_screen():
        raise UnavailableError(
            "there is no screen: DISPLAY and WAYLAND_DISPLAY are not set; `trn ui` opens the page, also from another machine"
        )
    _require_display()
    for name in ("PySide6", "pyqtgraph"):
        if find_spec(name) is None:
            raise UnavailableError(
                f"the window needs {name}, which is not installed: `pip install 'trn[qt]'` installs it"
            )
    # Nothing has begun, so Ctrl+C may just end the process. KeyboardInterrupt within an import of PySide6 aborts or is lost.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        from trn.qt.application import run
    except ImportError as fault:
        raise UnavailableError(
            f"Qt cannot be loaded: {fault}; it needs libraries of the system, on Debian"
            " `apt-get install libegl1 libgl1 libxkbcommon0 libdbus-1-3 libfontconfig1 libglib2.0-0`"
        ) from fault
    return run(home, _say_why_no_screen)


def _say_why_no_screen(reason: str) -> int:
    from trn.cli.command_table import report_fault

    return report_fault(
        UnavailableError(
            f"Qt cannot open a window: {reason}; `trn ui` opens the page, also from another machine"
        ),
        asks_for_json(sys.argv[1:]),
    )


def _require_display() -> None:
    """UnavailableError where no X server answers. Of this Qt would say more than it knows."""
    display = os.environ.get("DISPLAY", "")
    others = ("WAYLAND_DISPLAY", "QT_QPA_PLATFORM")
    named = re.fullmatch(r"(?:unix)?:(\d+)(?:\.\d+)?", display)  # of this machine
    if named is None or any(os.environ.get(name) for name in others):
        return
    path = f"/tmp/.X11-unix/X{named[1]}"  # noqa: S108  (its place since ever)
    for address in (f"\0{path}", path):
        with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(OSError):
            connection.connect(address)
            return
    raise UnavailableError(
        f"no screen answers at DISPLAY={display}; `trn ui` opens the page, also from another machine"
    )


def _has_screen() -> bool:
    """Else Qt would abort the process. QT_QPA_PLATFORM may name a platform without a screen."""
    names = ("DISPLAY", "WAYLAND_DISPLAY", "QT_QPA_PLATFORM")
    return sys.platform == "darwin" or any(os.environ.get(name) for name in names)
