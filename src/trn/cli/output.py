"""Where a command's output goes; the only module that distinguishes a terminal from a pipe.

At a terminal, or with `--format table`: tables on stdout. In a pipe, or with `--format json`: JSON lines on stdout, one
object a line, and nothing else. Messages for people go to stderr in both cases.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import click

from trn.core.terminal_text import shield, shield_json

F = TypeVar("F", bound=Callable[..., Any])

STATE_COLOURS = {
    "PENDING": "yellow",
    "DISPATCHING": "cyan",
    "RUNNING": "blue",
    "COMPLETED": "green",
    "FAILED": "red",
    "CANCELLED": "magenta",
}
DEFAULT_WIDTH = 100
MIN_WRAPPED = 20  # shorter text is not wrapped at any width
TABLE, JSON = "table", "json"


class Output:
    """Of one command. `is_json` decides whether `record` or `show` prints to stdout; None: JSON in a pipe."""

    def __init__(self, *, is_json: bool | None = None) -> None:
        self.is_json = not sys.stdout.isatty() if is_json is None else is_json
        self.has_colour = _may_colour() and sys.stdout.isatty() and not self.is_json
        self._held: list[str] | None = None

    def record(self, record: Mapping[str, Any]) -> None:
        """One JSON object on a line of stdout; nothing at a terminal."""
        if self.is_json:
            _print(_as_json(record))

    def event(self, name: str, /, **fields: Any) -> None:
        """`record` with its name first: job_submitted, job_rejected, job_completed, …"""
        self.record({"event": name, **fields})

    def show(self, text: str = "") -> None:
        """A line for people on stdout; nothing with JSON output."""
        if not self.is_json:
            _print(shield(text))

    def show_wrapped(self, text: str, *, indent: int = 0) -> None:
        """`show`, wrapped at the terminal's width; lines after the first are indented."""
        from trn.client.screen.cells import wrap

        for line in wrap(text, self.size[0], indent=indent):
            self.show(line)

    def say(self, text: str) -> None:
        """A line for people on stderr, always."""
        if self._held is None:
            say(text)
        else:
            self._held.append(text)

    def say_first(self, text: str) -> None:
        """`say`, before the lines that are held."""
        say(text)

    @contextlib.contextmanager
    def holding_lines(self) -> Iterator[None]:
        """Lines of `say` within are printed at its end, so that `say_first` can come before them."""
        self._held = []
        try:
            yield
        finally:
            held, self._held = self._held, None
            for text in held:
                say(text)

    def paint(self, text: str, colour: str = "", *, is_bold: bool = False, is_dim: bool = False) -> str:
        if not self.has_colour:
            return text
        return click.style(text, fg=colour or None, bold=is_bold or None, dim=is_dim or None)

    def paint_state(self, state: str, text: str = "") -> str:
        """The state's word (or `text`) in the state's colour."""
        return self.paint(text or state, STATE_COLOURS.get(state, ""))

    @property
    def size(self) -> tuple[int, int]:
        """(columns, lines) of the terminal."""
        try:
            found = os.get_terminal_size(sys.stdout.fileno())
        except (OSError, ValueError):
            return DEFAULT_WIDTH, 24
        return found.columns or DEFAULT_WIDTH, found.lines or 24

    @property
    def is_unicode(self) -> bool:
        return "utf" in (sys.stdout.encoding or "").lower()


def _as_json(record: Mapping[str, Any]) -> str:
    import json

    try:
        text = json.dumps(record, ensure_ascii=False, default=str, allow_nan=False)
    except ValueError:  # a value is NaN or infinite
        from trn.core.number_words import with_words

        text = json.dumps(with_words(dict(record)), ensure_ascii=False, default=str)
    return shield_json(text)


def _print(text: str) -> None:
    try:
        print(text, flush=True)  # noqa: T201
    except BrokenPipeError:  # `trn list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise click.exceptions.Exit(0) from None


def say(text: str) -> None:
    """A line for people on stderr. Never fails, not even if stderr is closed."""
    with contextlib.suppress(OSError):
        print(_wrap(shield(text)), file=sys.stderr, flush=True)  # noqa: T201


def _wrap(text: str) -> str:
    """Long lines wrapped between words, if stderr is a terminal."""
    if len(text) < MIN_WRAPPED or not sys.stderr.isatty():
        return text
    from trn.client.screen.cells import wrap

    width = os.get_terminal_size(sys.stderr.fileno()).columns or DEFAULT_WIDTH
    lines: list[str] = []
    for line in text.splitlines():
        margin = len(line) - len(line.lstrip(" -"))
        lines += wrap(line, width, indent=margin or 2)
    return "\n".join(lines)


def json_option(command: F) -> F:
    """Adds `--format table|json` and `--json`; the command gets `is_json`, None if neither is given."""
    import functools

    @functools.wraps(command)
    def with_format(*args: Any, is_json: bool, format_: str | None, **options: Any) -> Any:
        if is_json and format_ == TABLE:
            raise click.UsageError("--json and --format table exclude each other")
        chosen = True if is_json else None if format_ is None else format_ == JSON
        return command(*args, is_json=chosen, **options)

    add_format = click.option(
        "--format",
        "format_",
        type=click.Choice((TABLE, JSON)),
        help="Tables for people or JSON lines for programs (default: tables at a terminal, JSON in a pipe).",
    )
    add_json = click.option("--json", "is_json", is_flag=True, help="Short for --format json.")
    return add_json(add_format(with_format))  # type: ignore[return-value]


def asks_for_json(words: Sequence[str]) -> bool | None:
    """Whether a command line that cannot be parsed asks for JSON; None: it does not say."""
    text = " ".join(words).replace("--format=", "--format ")
    if "--json" in words or f"--format {JSON}" in text:
        return True
    return False if f"--format {TABLE}" in text else None


def _may_colour() -> bool:
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
