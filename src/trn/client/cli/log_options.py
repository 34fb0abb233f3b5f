"""`--log-dir` and `--event-log`: where the daemon writes a run's lines as well, checked before anything is spent."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

if TYPE_CHECKING:
    from trn.client.cli.output import Output
    from trn.core.home import Home
    from trn.proto.records import Submission

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

    def say_kept(self, output: "Output", submission: "Submission") -> None:
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


def read_log_paths(options: dict[str, Any], home: "Home") -> LogPaths:
    """The given paths, made absolute. InvalidRequestError with every fault, where one could not be written."""
    from trn.core.errors import InvalidRequestError

    faults = [
        f"{option} is empty: name a {what}"
        for option, name, what in (("--log-dir", "log_dir", "folder"), ("--event-log", "event_log", "file"))
        if options[name] == ""
    ]
    if faults:
        raise InvalidRequestError("the run's lines could not be written", faults)
    log_dir, event_log = _absolute(options["log_dir"]), _absolute(options["event_log"])
    if log_dir is not None:
        faults += [f"--log-dir {log_dir}: {fault}" for fault in _find_faults(log_dir, home, is_folder=True)]
    if event_log is not None:
        faults += [
            f"--event-log {event_log}: {fault}" for fault in _find_faults(event_log, home, is_folder=False)
        ]
    if faults:
        raise InvalidRequestError("the run's lines could not be written", faults)
    return LogPaths(str(log_dir or ""), str(event_log or ""))


def _absolute(path: str | None) -> Path | None:
    return None if path is None else Path(os.path.abspath(Path(path).expanduser()))  # noqa: PTH100


def _find_faults(path: Path, home: "Home", *, is_folder: bool) -> list[str]:
    if path.is_relative_to(home.root) and not (is_folder and path == home.logs.root):
        return ["it is in the daemon's own folder: choose another place"]
    if path.exists():
        if is_folder and not path.is_dir():
            return ["it is no folder: choose another one"]
        if not is_folder and not path.is_file():
            return ["it is no regular file: choose another one"]
        is_writable = os.access(path, os.W_OK | (os.X_OK if is_folder else os.R_OK))
        return [] if is_writable else ["you may not write there: choose another place, or change its mode"]
    nearest = next(parent for parent in path.parents if os.path.lexists(parent))
    if not nearest.is_dir():
        return [f"{nearest} is no folder: choose another place"]
    if not os.access(nearest, os.W_OK | os.X_OK):
        return [f"it cannot be made, since you may not write in {nearest}: choose another place"]
    return []
