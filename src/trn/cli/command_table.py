"""The commands of `trn`: loads only the one that runs, and turns every error into a message and an exit code."""

import contextlib
import errno
import gc
import os
from collections.abc import Sequence
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
    "resume": ("resume", "Continue a run or a checkpoint."),
    "serve": ("serve", "Serve a checkpoint of a run over HTTP."),
    "promote": ("promote", "Change the model that a served name answers with."),
    "rollback": ("rollback", "Go back to the model that answered before."),
    "predict": ("predict", "Predict the rows of parquet files with a checkpoint."),
    "list": ("list_runs", "Show the runs."),
    "status": ("status", "Show everything about one run."),
    "why": ("why", "Explain why a run waits, runs or ended."),
    "compare": ("compare", "Show what differs between runs."),
    "artifacts": ("artifacts", "List and save the files of a run."),
    "tag": ("tag", "Set and remove tags of a run."),
    "note": ("note", "Write notes about a run."),
    "watch": ("watch", "Follow a run, or all of them."),
    "logs": ("logs", "Print the output of a run's worker."),
    "cancel": ("cancel", "Stop a run."),
    "wait": ("wait", "Wait for the end of a run."),
    "rm": ("rm", "Remove ended runs."),
    "prune": ("prune", "Remove old runs, checkpoints, code and caches."),
    "ui": ("ui", "Open the page: all runs, live, in a browser."),
    "open": ("open_run", "Open the page at one run."),
    "gui": ("gui", "Open the desktop window: all runs, live."),
    "check": ("check", "Test a trainer class: is it correct, and does it resume exactly?"),
    "doctor": ("doctor", "Show what this machine can do."),
    "dataset": ("dataset", "Index and verify folders of data."),
    "daemon": ("daemon", "Start, stop and inspect the daemon."),
}


class LazyGroup(click.Group):
    """Knows its commands by name; imports a command's module when that command runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        folder = os.path.dirname(__file__)  # noqa: PTH120
        return [verb for verb, (module, _) in VERBS.items() if os.path.exists(f"{folder}/verbs/{module}.py")]  # noqa: PTH110

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command = import_module(f"trn.cli.verbs.{VERBS[cmd_name][0]}").command
        gc.freeze()  # the collector never has to scan what is imported by now; `main` switched it off
        gc.enable()
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(verb, VERBS[verb][1]) for verb in self.list_commands(ctx)])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> "list[CompletionItem]":
        from click.shell_completion import CompletionItem

        verbs = [verb for verb in self.list_commands(ctx) if verb.startswith(incomplete)]
        # Not Group's own answer, which would import every command for its help.
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
    help="Show the version and exit.",
)
@click.pass_context
def group(ctx: click.Context, home: str | None) -> None:
    """Train, watch and resume runs of trainer classes."""
    ctx.obj = chosen_home(home)


def chosen_home(option: str | None) -> Home:
    """The home that `--home` names, else the one of the environment."""
    return Home(Path(option).expanduser().absolute() if option else find_home())


def run(words: list[str]) -> int:
    """Run a command line; returns a code of `exit_codes`."""
    is_json = asks_for_json(words)
    try:
        result = group.main(words, prog_name="trn", standalone_mode=False)
    except click.exceptions.Abort:
        return ExitCode.INTERRUPTED
    except click.ClickException as fault:
        return _refuse_usage(is_json, fault, words)
    except TrnError as fault:
        return report_fault(fault, is_json)
    except OSError as fault:
        if fault.errno not in DISK_FAULTS:
            return _report_bug(is_json, fault)
        message = _explain_disk(fault)
        _say_fault(UnavailableError(message))
        _tell(is_json, "unavailable", message)
        return ExitCode.UNAVAILABLE
    except Exception as fault:
        return _report_bug(is_json, fault)
    return int(result) if isinstance(result, int) else ExitCode.OK


def report_fault(fault: TrnError, is_json: bool | None) -> int:
    """The error for people and for programs; returns the exit code."""
    _say_fault(fault)
    _tell(is_json, code_of(fault), str(fault), getattr(fault, "faults", None))
    return exit_code_of(fault)


def _refuse_usage(is_json: bool | None, fault: click.ClickException, words: list[str]) -> int:
    if not isinstance(fault, click.UsageError):
        _say_fault(fault)
        _tell(is_json, "usage", fault.format_message())
        return fault.exit_code
    message, hint = explain_usage(fault, words, group.list_commands(click.Context(group)))
    if isinstance(fault, click.exceptions.NoArgsIsHelpError):
        fault.show()
    else:
        say(f"trn: {plain(message)}\n  {plain(hint)}")
    _tell(is_json, "usage", message, hint=hint)
    return fault.exit_code


def _explain_disk(fault: OSError) -> str:
    """The system's error, and what to do about it."""
    where = f"{fault.filename}: " if fault.filename else ""
    remedies = {
        errno.EACCES: "check owner and permissions (`ls -ld`), or use another path",
        errno.EPERM: "check owner and permissions (`ls -ld`), or use another path",
        errno.EROFS: "use another path, or set TRN_HOME to a writable folder",
        errno.EIO: "the disk fails: read the system's log and back up your data",
    }
    return f"{where}{fault.strerror or fault}; {remedies.get(fault.errno or 0, 'free disk space there')}"


def _say_fault(fault: Exception) -> None:
    # Line by line: text of a job or a worker in it must not control the terminal.
    say("\n".join(map(plain, f"trn: {fault}".splitlines())))


def _report_bug(is_json: bool | None, fault: Exception) -> ExitCode:
    import traceback

    say(traceback.format_exc().rstrip())
    say("trn: this is a bug in trn; please report it with the lines above")
    _tell(is_json, "internal", f"{type(fault).__name__}: {fault}")
    return ExitCode.INTERNAL


def _tell(
    is_json: bool | None, code: str, message: str, faults: list[str] | None = None, *, hint: str = ""
) -> None:
    """The error for programs."""
    fields: dict[str, Any] = {"code": code, "message": message}
    more = {"faults": faults, "hint": hint}
    with contextlib.suppress(click.exceptions.Exit):  # the reader is gone
        Output(is_json=is_json).event("error", **fields, **{name: it for name, it in more.items() if it})


def explain_usage(fault: click.UsageError, words: Sequence[str], verbs: Sequence[str]) -> tuple[str, str]:
    """(what is wrong, what to type instead) for a command line that cannot be parsed."""
    path = fault.ctx.command_path if fault.ctx is not None else "trn"
    if isinstance(fault, click.exceptions.NoArgsIsHelpError):
        return f"no command was given after `{path}`", f"`{path} -h` lists them"
    message = fault.format_message().strip().rstrip(".").replace("\n", " ")
    return message[:1].lower() + message[1:], _hint(fault, words, verbs) or f"`{path} -h` shows the usage"


def _hint(fault: click.UsageError, words: Sequence[str], verbs: Sequence[str]) -> str:
    if isinstance(fault, click.exceptions.NoSuchOption) and fault.option_name == "--home":
        import shlex

        at = next(place for place, word in enumerate(words) if word.partition("=")[0] == "--home")
        given = list(words[at : at + (1 if "=" in words[at] else 2)])
        others = [*words[:at], *words[at + len(given) :]]
        return f"`--home` goes before the command: `{shlex.join(['trn', *given, *others])}`"
    if isinstance(fault, click.exceptions.NoSuchCommand):
        import difflib

        is_verb = fault.ctx is not None and fault.ctx.parent is None
        near = difflib.get_close_matches(fault.command_name, verbs, n=1) if is_verb else []
        return f"did you mean `trn {near[0]}`?" if near else ""
    return ""
