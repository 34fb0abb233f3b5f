"""What the demo shows: a progress bar per worker at a terminal, plain lines in a pipe."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

LINES_PER_WORKER = 8  # in a pipe
FRAME_EVERY_S = 0.1


class Screen:
    def __init__(self) -> None:
        self.console = Console(highlight=False)
        self.is_terminal = self.console.is_terminal

    def say(self, markup: str = "") -> None:
        self.console.print(markup, soft_wrap=True)

    def say_error(self, message: str) -> None:
        self.console.print(f"\n[bold red]The demo stopped:[/] {escape(message)}", soft_wrap=True)

    @contextmanager
    def bars(self, total: int) -> Iterator["Bars"]:
        if not self.is_terminal:
            yield Bars(self.console, None, total)
            return
        columns = (
            TextColumn("  {task.description}"),
            BarColumn(
                bar_width=max(6, min(24, self.console.width - 69)),
                complete_style="cyan",
                finished_style="green",
            ),
            TextColumn("[progress.percentage]{task.completed:>4}/{task.total}"),
            TextColumn("{task.fields[loss]}"),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=self.console, refresh_per_second=1 / FRAME_EVERY_S) as progress:
            yield Bars(self.console, progress, total)

    def show_digits(self, images: npt.NDArray[np.uint8], guesses: list[int], labels: list[int]) -> None:
        """Test digits in half blocks (two pixels per character), each with the prediction."""
        if not self.is_terminal or self.console.color_system not in ("256", "truecolor"):
            return
        self.say()
        num, side, _ = images.shape
        for row in range(0, side, 2):
            line = Text("  ")
            for image in images:
                for upper, lower in zip(image[row], image[row + 1], strict=True):
                    line.append("▀", f"rgb({upper},{upper},{upper}) on rgb({lower},{lower},{lower})")
                line.append("  ")
            self.console.print(line)
        words = [
            f"predicted {guess}" + ("" if guess == label else f", is {label}")
            for guess, label in zip(guesses[:num], labels, strict=True)
        ]
        self.console.print("  " + "".join(word.ljust(side + 2) for word in words), style="dim")

    def show_comparison(self, rows: list[tuple[str, str, str]]) -> None:
        table = Table(box=None, padding=(0, 3, 0, 2), header_style="bold")
        for name in ("", "A: never stopped", "B: killed, resumed"):
            table.add_column(name, no_wrap=True)
        for name, a, b in rows:
            table.add_row(name, a, b)
        self.say()
        self.console.print(table)

    def show_next(self, items: list[tuple[str, str]]) -> None:
        self.say("\n[bold]Look at[/]")
        width = max(len(place) for place, _ in items)
        for place, words in items:
            self.say(f"  [cyan]{escape(place.ljust(width))}[/]  {words}")

    def show_page(self, link: str, *, again: str, stop: str) -> None:
        self.say("\n[bold]See both runs in a browser[/]  (this link works once, within 5 minutes)")
        self.say(f"  [cyan]{escape(link)}[/]")
        self.say(f"  another link    [cyan]{escape(again)}[/]")
        self.say(f"  close the page  [cyan]{escape(stop)}[/]")


class Bars:
    """The rows of the progress display, one per worker."""

    def __init__(self, console: Console, progress: Progress | None, total: int) -> None:
        self._console = console
        self._progress = progress
        self._total = total

    def add(self, name: str) -> "Bar":
        return Bar(self._console, self._progress, name, self._total)


class Bar:
    def __init__(self, console: Console, progress: Progress | None, name: str, total: int) -> None:
        self._console = console
        self._progress = progress
        self._name = name
        self._total = total
        self._loss = ""
        self._note = "starting"
        self._next_line = 0
        self.step = 0
        if progress is not None:
            self._task = progress.add_task(name, total=total, loss="", note=f"[dim]{self._note}[/]")

    def advance(self, step: int, loss: float | None = None) -> None:
        self.step = step
        self._loss = "" if loss is None else f"loss {loss:.4f}"
        if self._note == "starting":
            self._set_note("", "")
        self._show()

    def note(self, words: str, style: str = "") -> None:
        self._set_note(words, style)
        self._show()
        if self._progress is None:
            self._console.print(f"  {self._name}  {words}")

    def _set_note(self, words: str, style: str) -> None:
        self._note = f"[{style}]{words}[/]" if style else words

    def _show(self) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=self.step, loss=self._loss, note=self._note)
        elif self._loss and (self.step >= self._next_line or self.step == self._total):
            self._next_line = self.step + max(1, self._total // LINES_PER_WORKER)
            self._console.print(f"  {self._name}  step {self.step:>4}/{self._total}  {self._loss}")
