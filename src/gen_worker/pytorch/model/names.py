"""Names and arguments of classes and functions in a config: the object, or faults."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from gen_worker.contract.document_schema import nearest_name
from gen_worker.contract.documents import render_value
from gen_worker.errors import PluginError

_MAX_LISTED = 12


def is_reference(name: str) -> bool:
    """Is the name the author's `module:symbol`?"""
    return ":" in name


def unknown_name(path: str, name: str, known: Collection[str], what: str) -> str:
    """The fault of a name that is not in `known`, with the nearest of these, or all."""
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
    """Unknown and missing names in `args`. `ours` are the parameters that the runner sets."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return []  # it has no signature
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
            faults.append(f"{path}.{key}: the runner sets this argument of {name}: remove it")
        elif key not in named and not takes_any:
            known = [known for known in named if known not in ours]
            nearest = nearest_name(key, known)
            hint = f": did you mean `{nearest}`?" if nearest else f", it has {', '.join(known) or 'none'}"
            faults.append(f"{path}: {name} has no argument `{key}`{hint}")
    return faults + [
        f"{path}.{key}: missing, {name} needs it"
        for key, parameter in named.items()
        if parameter.default is parameter.empty and key not in args and key not in ours
    ]


def try_call(
    path: str, function: Callable[..., Any], *positional: Any, **named: Any
) -> tuple[Any, list[str]]:
    """(the result, faults): an exception of a library about its arguments is a fault of the config."""
    try:
        return function(*positional, **named), []
    except (TypeError, ValueError, RuntimeError, AssertionError, LookupError) as error:
        name = getattr(function, "__name__", str(function))
        return None, [f"{path}: {name} rejected its arguments: {first_line(error)}"]


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, with its type if the text is one word."""
    text = str(error).strip().partition("\n")[0]
    return text if " " in text else f"{type(error).__name__}: {text}" if text else type(error).__name__
