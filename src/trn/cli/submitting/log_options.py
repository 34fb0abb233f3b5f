"""`--log-dir` and `--event-log`: where the daemon also writes a run's lines."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

if TYPE_CHECKING:
    from trn.cli.output import Output
    from trn.proto.records import SubmitResult

C = TypeVar("C", bound=Callable[..., Any])


def log_options(command: C) -> C:
    """Adds both options to a command."""
    event_log = click.option(
        "--event-log",
        metavar="F",
        type=click.Path(),  # text: an empty one is no path, and must not become the current folder
        help="Append every event of the run to this file, too; runs may share it.",
    )
    log_dir = click.option(
        "--log-dir",
        metavar="D",
        type=click.Path(),  # text: an empty one is no path, and must not become the current folder
        help="Write the run's log lines below this folder, too: D/YYYY/MM/DD/RUN.log.jsonl.",
    )
    return log_dir(event_log(command))


class LogPaths(NamedTuple):
    """Absolute, or empty."""

    log_dir: str
    event_log: str

    def say_kept(self, output: "Output", submission: "SubmitResult") -> None:
        """An equal run that exists keeps its own: say so, where others were asked for."""
        run = submission.run
        for option, wanted, kept in (
            ("--log-dir", self.log_dir, run.log_dir),
            ("--event-log", self.event_log, run.event_log),
        ):
            if submission.existed and wanted and wanted != kept:
                output.say(
                    f"{run.run_id} keeps what it was submitted with: {option} {kept or 'was not given'}"
                )


def read_log_paths(options: dict[str, Any]) -> LogPaths:
    """The given paths, made absolute. InvalidRequestError where one is empty."""
    from trn.core.errors import InvalidRequestError

    faults = [
        f"{option} is empty: name a {what}"
        for option, name, what in (("--log-dir", "log_dir", "folder"), ("--event-log", "event_log", "file"))
        if options[name] == ""
    ]
    if faults:
        raise InvalidRequestError("the run's lines could not be written", faults)
    return LogPaths(_absolute(options["log_dir"]), _absolute(options["event_log"]))


def _absolute(path: str | None) -> str:
    return "" if path is None else os.path.abspath(Path(path).expanduser())  # noqa: PTH100
