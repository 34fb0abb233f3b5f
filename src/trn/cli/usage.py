"""A command line that cannot be understood: what is wrong in one line, and one that says how it is meant."""

import shlex
from collections.abc import Sequence

import click


def explain_usage(fault: click.UsageError, words: Sequence[str], verbs: Sequence[str]) -> tuple[str, str]:
    """(what is wrong, what to type instead). `words` are what was given, `verbs` the commands there are."""
    path = fault.ctx.command_path if fault.ctx is not None else "trn"
    if isinstance(fault, click.exceptions.NoArgsIsHelpError):
        return f"no command was given after `{path}`", f"`{path} -h` shows them"
    message = fault.format_message().strip().rstrip(".").replace("\n", " ")
    return message[:1].lower() + message[1:], _hint(
        fault, words, verbs
    ) or f"`{path} -h` shows how it is used"


def _hint(fault: click.UsageError, words: Sequence[str], verbs: Sequence[str]) -> str:
    if isinstance(fault, click.exceptions.NoSuchOption) and fault.option_name == "--home":
        at = next(place for place, word in enumerate(words) if word.partition("=")[0] == "--home")
        given = list(words[at : at + (1 if "=" in words[at] else 2)])
        others = [*words[:at], *words[at + len(given) :]]
        return f"`--home` stands before the command: `{shlex.join(['trn', *given, *others])}`"
    if isinstance(fault, click.exceptions.NoSuchCommand):
        near = (
            _nearest(fault.command_name, verbs) if fault.ctx is not None and fault.ctx.parent is None else ""
        )
        return f"did you mean `trn {near}`?" if near else ""
    return ""


def _nearest(word: str, words: Sequence[str]) -> str:
    import difflib

    return next(iter(difflib.get_close_matches(word, words, n=1)), "")
