"""Record the picture of the README: run its example in a real terminal, kill the worker once, draw the screen as SVG.

`python docs/record_terminal.py` runs the files of README.md with `trn run` in a temporary folder and writes
docs/terminal.svg. Everything in the picture is what the programs printed.
"""

import argparse
import codecs
import contextlib
import fcntl
import io
import itertools
import json
import os
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
TRN = str(Path(sys.executable).with_name("trn"))
RUN = "first-run"
TITLE = "The worker is killed with kill -9 while it trains"
COLUMNS = 92
TIMEOUT_S = 120.0
CONTROL = re.compile(r"\x1b\[(\??)([0-9;]*)([A-Za-z])")
# rich's own format without its web font: the picture loads nothing from elsewhere.
SVG_FORMAT = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">
<style>
.{unique_id}-matrix {{ font-family: Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; }}
.{unique_id}-title {{ font-family: sans-serif; font-size: 18px; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


class StyledScreen:
    """A terminal's screen: each cell is a character with the style codes that were active."""

    def __init__(self) -> None:
        self._rows: list[list[tuple[str, str]]] = [[]]
        self._row = self._column = 0
        self._style = ""

    def write(self, text: str) -> None:
        while text:
            if found := CONTROL.match(text):
                if not found[1]:  # `?` sets modes of the terminal, such as a hidden cursor
                    self._control(found[3], found[2])
                text = text[found.end() :]
            else:
                self._put(text[0])
                text = text[1:]

    def to_ansi(self) -> str:
        """The screen as text with style codes, without empty lines at its end."""
        lines = [
            "".join(
                f"\x1b[0m{style}{''.join(char for char, _ in cells)}"
                for style, cells in itertools.groupby(row, key=lambda cell: cell[1])
            )
            for row in self._rows
        ]
        while lines and not lines[-1]:
            lines.pop()
        return "\x1b[0m\n".join(lines)

    def _control(self, name: str, number: str) -> None:
        row = self._rows[self._row]
        if name == "m":
            self._style = "" if number in ("", "0") else f"{self._style}\x1b[{number}m"
        elif name == "A":
            self._row = max(self._row - int(number or 1), 0)
        elif name == "K":
            del row[0 if number == "2" else self._column :]
        elif name == "J":
            del row[self._column :], self._rows[self._row + 1 :]

    def _put(self, char: str) -> None:
        if char == "\r":
            self._column = 0
            return
        if char == "\n" or self._column == COLUMNS:
            self._row += 1
            if self._row == len(self._rows):
                self._rows.append([])
        if char == "\n":
            return
        if self._column == COLUMNS:
            self._column = 0
        row = self._rows[self._row]
        row += [(" ", "")] * (self._column - len(row))
        row[self._column : self._column + 1] = [(char, self._style)]
        self._column += 1


class Recorder:
    """Runs `trn` in a folder, in a pseudo-terminal, and collects on one screen what it prints."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.screen = StyledScreen()
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("TRN_", "TRAINER_"))
        }
        own = {"HOME": str(folder), "TRN_HOME": str(folder / "home"), "TERM": "xterm-256color"}
        self._environ = {**inherited, **own}

    def run(self, *words: str, after_output: Callable[[], None] = lambda: None) -> None:
        """Run one command to its end. SystemExit where it fails."""
        self.screen.write(f"\x1b[1m$ trn {' '.join(words)}\x1b[0m\r\n")
        master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, COLUMNS, 0, 0))
        decoder = codecs.getincrementaldecoder("utf-8")()
        with subprocess.Popen(
            [TRN, *words], cwd=self.folder, env=self._environ, stdin=slave, stdout=slave, stderr=slave
        ) as process:
            os.close(slave)
            while data := read_chunk(master):
                self.screen.write(decoder.decode(data))
                after_output()
            os.close(master)
        if process.returncode:
            raise SystemExit(
                f"trn {' '.join(words)}: exit code {process.returncode}\n{self.screen.to_ansi()}"
            )

    def stop_daemon(self) -> None:
        """Stop the daemon and its launcher, which would otherwise wait for another daemon."""
        done = subprocess.run(
            [TRN, "daemon", "stop", "--json"], env=self._environ, capture_output=True, check=True
        )
        for pid in json.loads(done.stdout).get("launcher_pids", []):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)


def read_chunk(master: int) -> bytes:
    """What the program printed next; nothing once it has closed the terminal."""
    if not select.select([master], [], [], TIMEOUT_S)[0]:
        raise SystemExit(f"no output for {TIMEOUT_S:g} s")
    try:
        return os.read(master, 65536)
    except OSError:  # Linux: no process has the other side open
        return b""


class WorkerKiller:
    """Kills the worker of the first attempt with SIGKILL once the run has saved a checkpoint."""

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder
        self.killed_pid: int | None = None

    def __call__(self) -> None:
        if self.killed_pid is None and any(self._folder.glob("checkpoints/step-*.meta.json")):
            self.killed_pid = json.loads((self._folder / "attempts" / "1.json").read_bytes())["pid"]
            os.kill(self.killed_pid, signal.SIGKILL)


def write_example(folder: Path) -> None:
    """The files that README.md shows."""
    readme = (ROOT / "README.md").read_text()
    for name, text in re.findall(r"(?ms)^```\w+ file=(\S+)\n(.*?)^```$", readme):
        (folder / name).write_text(text)


def draw(screen: StyledScreen) -> str:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(screen.to_ansi()))
    svg = console.export_svg(title=TITLE, theme=SVG_EXPORT_THEME, code_format=SVG_FORMAT, unique_id="trn")
    return "".join(f"{line.rstrip()}\n" for line in svg.splitlines() if line.strip())


def record() -> str:
    """Run the example, kill its worker once, and return the picture."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        write_example(folder)
        recorder = Recorder(folder)
        killer = WorkerKiller(folder / "home" / "runs" / RUN)
        try:
            recorder.run("run", "job.yaml", after_output=killer)
            recorder.run("status", RUN)
        finally:
            recorder.stop_daemon()
    if killer.killed_pid is None:
        raise SystemExit("the run ended before its worker could be killed: give it more steps")
    return draw(recorder.screen)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "terminal.svg", help="where to write")
    parser.parse_args().out.write_text(record())


if __name__ == "__main__":
    main()
