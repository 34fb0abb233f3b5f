"""The verbs of `trn`: finds the one that is asked for, loads it alone, turns every error into a line and an exit code."""

import contextlib
import errno
import gc
import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trn.cli.exit_codes import ExitCode, code_of, exit_code_of
from trn.cli.output import Output, asks_for_json, say
from trn.core.errors import TrnError, UnavailableError
from trn.core.home import DISK_FAULTS, Home, find_home
from trn.core.terminal_text import plain

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

# verb -> (module of `trn.cli.verbs`, its line in the help); the order of the help
VERBS: dict[str, tuple[str, str]] = {
    "run": ("run", "Train a job: check it, submit it, follow it to its end."),
    "resume": ("resume", "Go on from a checkpoint, or from a run that stopped."),
    "list": ("list_runs", "Show the runs."),
    "status": ("status", "Show everything about one run."),
    "why": ("why", "Say in one sentence why a run is where it is."),
    "compare": ("compare", "Show what differs between runs."),
    "watch": ("watch", "Follow a run, or all of them."),
    "logs": ("logs", "Print what a run's worker wrote."),
    "cancel": ("cancel", "Stop a run."),
    "wait": ("wait", "Wait for the end of a run."),
    "rm": ("rm", "Remove ended runs."),
    "prune": ("prune", "Remove old runs and what nobody needs."),
    "check": ("check", "Find out whether a trainer class is sound and resumes exactly."),
    "doctor": ("doctor", "Say what this machine can do."),
    "dataset": ("dataset", "Index and verify folders of data."),
    "daemon": ("daemon", "Start, stop and look at the daemon."),
}


class LazyGroup(click.Group):
    """Knows its verbs by name; a verb's module loads when that verb is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        folder = os.path.dirname(__file__)  # noqa: PTH120
        return [verb for verb, (module, _) in VERBS.items() if os.path.exists(f"{folder}/verbs/{module}.py")]  # noqa: PTH110

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command = import_module(f"trn.cli.verbs.{VERBS[cmd_name][0]}").command
        gc.freeze()  # what is loaded by now stays; `main` has kept the collector from looking through it
        gc.enable()
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(verb, VERBS[verb][1]) for verb in self.list_commands(ctx)])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> "list[CompletionItem]":
        from click.shell_completion import CompletionItem

        verbs = [verb for verb in self.list_commands(ctx) if verb.startswith(incomplete)]
        # Past Group's own answer, which would load every verb for its help.
        return [
            *(CompletionItem(verb, help=VERBS[verb][1]) for verb in verbs),
            *click.Command.shell_complete(self, ctx, incomplete),
        ]


def _print_version(ctx: click.Context, _parameter: click.Parameter, is_wanted: bool) -> None:
    if is_wanted and not ctx.resilient_parsing:
        from importlib.metadata import version

        click.echo(f"trn {version('trn')}")
        ctx.exit()


EPILOG = """\b
Examples:
  trn run --config job.yaml
  trn list --state running --watch
  trn --home /data/trn status mnist-2b53

\b
Run ids may be shortened to a prefix that only one family has. `trn COMMAND -h`
shows more examples. Completion, for bash (or zsh, fish):
  eval "$(_TRN_COMPLETE=bash_source trn)"
"""


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]}, epilog=EPILOG)
@click.option(
    "--home",
    metavar="DIR",
    help="The daemon's folder (default: $TRN_HOME, else the platform's folder for state).",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and end.",
)
@click.pass_context
def group(ctx: click.Context, home: str | None) -> None:
    """Train, watch, resume: trn runs trainer classes and never loses a run."""
    ctx.obj = chosen_home(home)


def chosen_home(option: str | None) -> Home:
    """The home that `--home` names, else the one of the environment."""
    return Home(Path(option).expanduser().absolute() if option else find_home())


def run(words: list[str]) -> int:
    """The exit code, as `exit_codes` names it."""
    is_json = asks_for_json(words)
    try:
        result = group.main(words, prog_name="trn", standalone_mode=False)
    except click.exceptions.Abort:
        return ExitCode.INTERRUPTED
    except click.ClickException as fault:
        return _refuse_usage(is_json, fault, words)
    except TrnError as fault:
        _say_fault(fault)
        _tell(is_json, code_of(fault), str(fault), getattr(fault, "faults", None))
        return exit_code_of(fault)
    except OSError as fault:
        if fault.errno not in DISK_FAULTS:
            return _confess(is_json, fault)
        message = _explain_disk(fault)
        _say_fault(UnavailableError(message))
        _tell(is_json, "unavailable", message)
        return ExitCode.UNAVAILABLE
    except Exception as fault:
        return _confess(is_json, fault)
    return int(result) if isinstance(result, int) else ExitCode.OK


def _refuse_usage(is_json: bool | None, fault: click.ClickException, words: list[str]) -> int:
    if not isinstance(fault, click.UsageError):
        _say_fault(fault)
        _tell(is_json, "usage", fault.format_message())
        return fault.exit_code
    from trn.cli.usage import explain_usage

    message, hint = explain_usage(fault, words, group.list_commands(click.Context(group)))
    if isinstance(fault, click.exceptions.NoArgsIsHelpError):
        fault.show()
    else:
        say(f"trn: {plain(message)}\n  {plain(hint)}")
    _tell(is_json, "usage", message, hint=hint)
    return fault.exit_code


def _explain_disk(fault: OSError) -> str:
    """What the system said, with what to do about it."""
    where = f"{fault.filename}: " if fault.filename else ""
    remedies = {
        errno.EACCES: "see whose it is and which rights you have (`ls -ld`), or name another place",
        errno.EPERM: "see whose it is and which rights you have (`ls -ld`), or name another place",
        errno.EROFS: "name another place, or set TRN_HOME to a folder that can be written",
        errno.EIO: "the disk fails: look at the system's log, and save what you have",
    }
    return f"{where}{fault.strerror or fault}; {remedies.get(fault.errno or 0, 'make room there')}"


def _say_fault(fault: Exception) -> None:
    # Line by line: what a job or a worker said may be part of it, and must not steer the terminal.
    say("\n".join(map(plain, f"trn: {fault}".splitlines())))


def _confess(is_json: bool | None, fault: Exception) -> ExitCode:
    import traceback

    say(traceback.format_exc().rstrip())
    say("trn: a fault of trn itself, please report it with the lines above")
    _tell(is_json, "internal", f"{type(fault).__name__}: {fault}")
    return ExitCode.INTERNAL


def _tell(
    is_json: bool | None, code: str, message: str, faults: list[str] | None = None, *, hint: str = ""
) -> None:
    """The same for programs."""
    fields: dict[str, Any] = {"code": code, "message": message}
    more = {"faults": faults, "hint": hint}
    with contextlib.suppress(click.exceptions.Exit):  # nobody reads any more
        Output(is_json=is_json).event("error", **fields, **{name: it for name, it in more.items() if it})
