"""Checks that an object has the hooks of a trainer class, with signatures that the loop can call."""

import inspect
from typing import Any

from gen_worker.errors import PluginTypeError
from gen_worker.trainer.attempt.failure import kind_of, say
from gen_worker.trainer.contracts import OPTIONAL_HOOKS, REQUIRED_HOOKS

# How the loop calls each hook.
POSITIONAL: dict[str, tuple[str, ...]] = {
    "check_job": ("job",),
    "setup": ("ctx",),
    "configure": ("ctx",),
    "prepare_batch": ("raw_batch", "state", "ctx"),
    "train_step": ("prepared_batch", "state", "ctx"),
    "state_dict": ("state",),
    "load_state_dict": ("state", "payload", "ctx"),
    "validate_step": ("batch", "state", "ctx"),
    "test_step": ("batch", "state", "ctx"),
    "begin_evaluation": ("kind", "state", "ctx"),
    "end_evaluation": ("kind", "state", "ctx"),
    "apply_hyperparams": ("state", "changes", "ctx"),
    "predict": ("rows", "state", "ctx"),
    "predict_stream": ("row", "state", "ctx"),
    "serving_state": ("state", "ctx"),
}
KEYWORD: dict[str, tuple[str, ...]] = {
    "save_checkpoint": ("state", "step", "output_dir", "final", "ctx"),
    "load_checkpoint": ("state", "checkpoint_dir", "payload", "ctx"),
    "sample": ("state", "step", "request", "output_dir", "ctx"),
}
GENERATORS = ("predict_stream",)  # what they yield is their result


def missing_hooks(candidate: object) -> list[str]:
    """The required hooks that a class or an instance does not have."""
    return [
        name
        for name in REQUIRED_HOOKS
        if inspect.getattr_static(candidate, name, None) is None and not hasattr(candidate, name)
    ]


def check_hooks(trainer: object, ref: str) -> None:
    """PluginTypeError with every fault of an instance's hooks."""
    missing = missing_hooks(trainer)
    faults = []
    if missing:
        needed = ", ".join(f"`{_signature_in_words(name)}`" for name in missing)
        faults.append(
            f"missing {', '.join(missing)}{_similar_methods(trainer, missing)}: write the methods {needed}"
        )
    for name in (*REQUIRED_HOOKS, *OPTIONAL_HOOKS):
        if name not in missing:
            faults += _hook_faults(trainer, name)
    if not faults:
        return  # before the line is looked up, which is slow
    where = source_line(type(trainer))
    if len(faults) == 1:
        raise PluginTypeError(f"{where}: {ref} is not a valid trainer class: {faults[0]}")
    listed = "".join(f"\n  - {fault}" for fault in faults)
    raise PluginTypeError(f"{where}: {ref} is not a valid trainer class:{listed}")


def source_line(code: Any) -> str:
    """`file:line` of a class or function, if Python knows it."""
    code = inspect.unwrap(code) if callable(code) and not isinstance(code, type) else code
    try:
        file = inspect.getsourcefile(code) or inspect.getfile(code)
        return f"{file}:{inspect.getsourcelines(code)[1]}"
    except (OSError, TypeError, IndexError):
        module = getattr(code, "__module__", None) or type(code).__module__
        return f"{module}.{getattr(code, '__qualname__', type(code).__qualname__)}"


def _hook_faults(trainer: object, name: str) -> list[str]:
    try:
        hook = getattr(trainer, name, None)
    except Exception as error:
        return [f"reading `{name}` raised {kind_of(error)}: {say(error)}"]
    if hook is None:
        # `sample = None` switches an inherited optional hook off.
        return (
            [f"`{name}` is None, expected a method `{_signature_in_words(name)}`"]
            if name in REQUIRED_HOOKS
            else []
        )
    if not callable(hook):
        return [f"`{name}` is a {type(hook).__name__}, expected a method `{_signature_in_words(name)}`"]
    for code in (hook, inspect.getattr_static(type(hook), "__call__", None)):  # an object may be a hook
        if inspect.iscoroutinefunction(code) or inspect.isasyncgenfunction(code):
            return [
                f"{source_line(hook)}: `{name}` is async, expected a plain `def {name}`: the loop cannot await hooks"
            ]
        if inspect.isgeneratorfunction(code) and name not in GENERATORS:
            return [
                f"{source_line(hook)}: `{name}` contains `yield`, expected a method that returns its result"
            ]
    try:
        signature = inspect.signature(hook)
    except (ValueError, TypeError):
        return []  # some builtins have no signature
    positional, keyword = POSITIONAL.get(name, ()), KEYWORD.get(name, ())
    try:
        signature.bind(*positional, **dict.fromkeys(keyword))
    except TypeError as error:
        how = "positionally" if positional else "by keyword"
        return [
            f"{source_line(hook)}: `{name}{signature}` cannot be called {how} with ({', '.join(positional or keyword)}): {error}; "
            f"expected `{_signature_in_words(name)}`"
        ]
    return []


def _signature_in_words(name: str) -> str:
    if name in KEYWORD:
        return f"{name}(self, *, {', '.join(KEYWORD[name])})"
    return f"{name}(self, {', '.join(POSITIONAL[name])})"


def _similar_methods(trainer: object, missing: list[str]) -> str:
    from gen_worker.trainer.author.plugin_import import nearest_names

    known = (*REQUIRED_HOOKS, *OPTIONAL_HOOKS)
    others = [name for name in dir(trainer) if not name.startswith("__") and name not in known]
    found = {name: near[0] for name in missing if (near := nearest_names(name, others))}
    return (
        f" (it has {', '.join(f'`{near}`: rename it to `{name}`?' for name, near in found.items())})"
        if found
        else ""
    )
