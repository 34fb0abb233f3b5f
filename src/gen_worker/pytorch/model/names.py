"""Names and arguments that a config gives for classes and functions of others: found, or a fault in words."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from gen_worker.contract.document_schema import nearest_name
from gen_worker.contract.documents import render_value
from gen_worker.errors import PluginError

_MAX_LISTED = 12


def is_reference(name: str) -> bool:
    """True where the name is the author's `module:symbol`."""
    return ":" in name


def unknown_name(path: str, name: str, known: Collection[str], what: str) -> str:
    """The fault of a name that is not among `known`, with the one that was meant, or with all of them."""
    text = f"{path}: found {render_value(name)}, expected {what}"
    nearest = nearest_name(name, list(known))
    if nearest is not None:
        return f"{text}: did you mean {render_value(nearest)}?"
    return f"{text}: {', '.join(sorted(known))}" if len(known) <= _MAX_LISTED else text


def import_reference(path: str, ref: str) -> tuple[Any, list[str]]:
    """(the object that `module:symbol` names, faults)."""
    from gen_worker.trainer.author.plugin_import import import_symbol

    try:
        return import_symbol(ref), []
    except PluginError as error:
        return None, [f"{path}: found {render_value(ref)}: {error}"]


def argument_faults(
    path: str, function: Callable[..., Any], args: Mapping[str, Any], *, ours: Sequence[str] = ()
) -> list[str]:
    """What is wrong with the names in `args`; `ours` are the parameters that the runner fills itself."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return []  # it does not tell; calling it will
    name = getattr(function, "__name__", str(function))
    named = {
        key: parameter
        for key, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    faults = []
    for key in args:
        if key in ours:
            faults.append(f"{path}.{key}: the runner gives it to {name} itself: leave it out")
        elif key not in named and not takes_any:
            known = [known for known in named if known not in ours]
            nearest = nearest_name(key, known)
            hint = f": did you mean `{nearest}`?" if nearest else f", it takes {', '.join(known) or 'none'}"
            faults.append(f"{path}: {name} has no argument `{key}`{hint}")
    missing = [
        key
        for key, parameter in named.items()
        if parameter.default is parameter.empty and key not in args and key not in ours
    ]
    faults += [f"{path}.{key}: missing, {name} needs it" for key in missing]
    return faults


def try_call(
    path: str, function: Callable[..., Any], *positional: Any, **named: Any
) -> tuple[Any, list[str]]:
    """(what it returns, faults): a library's refusal of its arguments is the config's fault."""
    try:
        return function(*positional, **named), []
    except (TypeError, ValueError, RuntimeError, AssertionError, LookupError) as error:
        name = getattr(function, "__name__", str(function))
        return None, [f"{path}: {name} refused its arguments: {first_line(error)}"]


def first_line(error: BaseException) -> str:
    """What an exception says, as one line with its type where the text alone says little."""
    text = str(error).strip().partition("\n")[0]
    return text if " " in text else f"{type(error).__name__}: {text}" if text else type(error).__name__
