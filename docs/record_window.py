"""Take the pictures of the desktop window: make real runs, open the window on a screen of Xvfb, save its main views.

`python docs/record_window.py` makes the runs of record_page.py, and writes PNG files to docs/images/, in light and dark. It
needs Xvfb and the packages of the extras `dev` and `qt`.
"""

import argparse
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from record_page import ROOT, TIMEOUT_S, Recorder, make_runs, save

SCREEN = "1280x860x24"
SETTLED_S = 2.0  # curves, and the first picture of a list


@contextmanager
def open_screen() -> Iterator[None]:
    """A screen of its own for windows of this process."""
    reading, writing = os.pipe()
    command = ["Xvfb", "-displayfd", str(writing), "-screen", "0", SCREEN, "-nolisten", "tcp"]
    with subprocess.Popen(command, pass_fds=[writing], stderr=subprocess.DEVNULL) as server:
        os.close(writing)
        with os.fdopen(reading) as number:
            os.environ["DISPLAY"] = f":{number.readline().strip()}"
        os.environ["QT_QPA_PLATFORM"] = "xcb"
        try:
            yield
        finally:
            server.terminate()


def take_pictures(recorder: Recorder, out: Path) -> None:
    from PySide6.QtCore import QBuffer, QIODevice, QSettings
    from PySide6.QtWidgets import QApplication

    from trn.core.home import Home
    from trn.qt.theme import ThemeName
    from trn.qt.window import TrainerWindow

    out.mkdir(parents=True, exist_ok=True)
    application = QApplication([])
    settings = QSettings(str(recorder.folder / "window.ini"), QSettings.Format.IniFormat)
    window = TrainerWindow(Home(recorder.home), settings)

    def spin(until: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not until():
            application.processEvents()
            time.sleep(0.01)

    def shoot(name: str, tab: int, *run_ids: str) -> None:
        window.tabs.setCurrentIndex(tab)
        window.table.choose(run_ids)
        for theme in (ThemeName.LIGHT, ThemeName.DARK):
            window.set_theme(theme)
            spin(lambda: False, SETTLED_S)
            buffer = QBuffer()
            buffer.open(QIODevice.OpenModeFlag.WriteOnly)
            window.grab().save(buffer, "PNG")
            dark = "-dark" if theme is ThemeName.DARK else ""
            save(buffer.data().data(), out / f"window-{name}{dark}.png")

    window.show()
    window.start()
    spin(lambda: "digits-long" in window.table.runs.runs and bool(window.table.runs.runs["digits-long"].step))
    window.charts.choose_metrics(["train/loss", "val/accuracy"])
    shoot("charts", 0, "digits", "digits-slow", "digits-killed")
    shoot("log", 1, "digits-killed")
    shoot("attempts", 2, "digits-killed")
    shoot("videos", 3, "cartpole")
    window.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images", help="folder to write to")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="trn-", ignore_cleanup_errors=True) as temporary,
        Recorder(Path(temporary)) as recorder,
        open_screen(),
    ):
        make_runs(recorder)
        take_pictures(recorder, options.out.resolve())


if __name__ == "__main__":
    main()
