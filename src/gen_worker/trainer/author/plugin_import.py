"""`module:symbol` -> the object. Errors name the author's line."""

import importlib
import os
import re
import sys
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from gen_worker.errors import (
    PluginError,
    PluginNotFoundError,
    PluginValueError,
    TrainingCanceled,
    TrainingTimeout,
)
from gen_worker.frozen_imports import find_left_out, import_frozen_code, is_installed
from gen_worker.trainer.attempt.failure import kind_of, say

_REF = re.compile(r"(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*)(:(?P<symbol>[^\W\d]\w*(\.[^\W\d]\w*)*))?")


def split_ref(ref: str) -> tuple[str, str | None]:
    """`package.module:Outer.Inner` -> its two parts; the symbol may be left out."""
    found = _REF.fullmatch(ref) if isinstance(ref, str) else None
    if found:
        return found["module"], found["symbol"]
    expected = "expected module:symbol, such as my_package.train:MyTrainer"
    if isinstance(ref, str) and re.search(r"[/\\]|\.py(:|$)", ref):
        path, _, symbol = ref.partition(":")
        module = re.sub(r"[/\\]+", ".", re.sub(r"\.py$", "", re.sub(r"^\./", "", path))).strip(".")
        expected = f"it names a file, expected a module: {module}:{symbol or 'MyTrainer'}"
    raise PluginValueError(f"{ref!r} names no trainer: {expected}")


def import_symbol(ref: str) -> Any:
    """The object that `module:symbol` names; PluginError if there is none."""
    module_name, symbol = split_ref(ref)
    if symbol is None:
        raise PluginValueError(f"{ref!r} names a module only, expected module:symbol")
    return find_symbol(import_author_module(module_name), symbol)


def import_author_module(name: str) -> ModuleType:
    """Import from the working folder, PYTHONPATH and installed packages."""
    _extend_search_path()
    import_frozen_code()
    _look_again(name)
    try:
        return importlib.import_module(name)
    except (TrainingCanceled, TrainingTimeout):
        raise
    except ModuleNotFoundError as error:
        if author_line(error.__traceback__) is None and _is_or_holds(error.name, name):
            raise PluginNotFoundError(_not_found(name, error)) from error
        raise _import_fault(name, error) from error
    except SyntaxError as error:
        where = f"{error.filename}:{error.lineno}" if error.filename and error.lineno else f"module {name!r}"
        text = f": {error.text.strip()}" if error.text and error.text.strip() else ""
        raise PluginError(f"{where}: {type(error).__name__}: {error.msg}{text}") from error
    except SystemExit as error:
        fault = _import_fault(name, error)
        fault.args = (f"{fault}; put code for the command line below `if __name__ == '__main__':`",)
        raise fault from error
    except Exception as error:
        raise _import_fault(name, error) from error


def _look_again(name: str) -> None:
    """Invalidate the import caches of its folders: the file may be new. Not of all folders: a forked worker would copy
    a memory page for each.
    """
    folders = list(sys.path)
    while "." in name:
        name = name.rpartition(".")[0]
        folders += getattr(sys.modules.get(name), "__path__", ())
    for folder in folders:
        finder = sys.path_importer_cache.get(folder)
        if finder is None:
            sys.path_importer_cache.pop(folder, None)
        elif hasattr(finder, "invalidate_caches"):
            finder.invalidate_caches()


def find_symbol(module: ModuleType, dotted: str) -> Any:
    """The attribute of a module, or of a class in it."""
    holder: Any = module
    holder_name = f"module {module.__name__!r} ({getattr(module, '__file__', None) or 'no file'})"
    for name in dotted.split("."):
        try:
            holder = getattr(holder, name)
        except AttributeError:
            raise PluginValueError(f"{holder_name} has no {name!r}: {_what_there_is(holder, name)}") from None
        except Exception as error:
            raise PluginError(f"{holder_name}: reading {name!r} raised {exception_text(error)}") from error
        holder_name = f"{module.__name__}:{name}"
    return holder


def author_line(trace: TracebackType | None) -> str | None:
    """`file:line` of the innermost frame in the author's code, else of the innermost that is not ours."""
    import sysconfig

    paths = sysconfig.get_paths()
    installed = tuple({paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"]})
    innermost: str | None = None
    authors: str | None = None
    while trace is not None:
        filename = trace.tb_frame.f_code.co_filename
        if filename not in _OUR_FILES and not filename.startswith("<frozen importlib"):
            innermost = f"{filename}:{trace.tb_lineno}"
            if not filename.startswith((*installed, "<frozen")):
                authors = innermost
        trace = trace.tb_next
    return authors or innermost


def exception_text(error: BaseException) -> str:
    """`ValueError: its text`."""
    text = say(error)
    return f"{kind_of(error)}: {text}" if text else kind_of(error)


def nearest_names(name: str, names: list[str]) -> list[str]:
    """Up to three similar names, the most similar first."""
    import difflib

    folded: dict[str, str] = {}
    for known in names:
        folded.setdefault(known.lower(), known)
    return [folded[match] for match in difflib.get_close_matches(name.lower(), folded, n=3, cutoff=0.6)]


_OUR_FILES = frozenset({__file__, importlib.__file__, str(Path(__file__).parent.parent / "api.py")})


def _extend_search_path() -> None:
    """Working folder and PYTHONPATH, also in a forked process."""
    try:
        folder = str(Path.cwd())
    except FileNotFoundError:  # the working folder was removed
        folder = ""
    if os.environ.get("PYTHONSAFEPATH"):  # as in Python itself
        folder = ""
    if folder and folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)
    known = set(sys.path)
    wanted = [
        entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry and entry not in known
    ]
    at = sys.path.index(folder) + 1 if folder in sys.path else 0
    sys.path[at:at] = wanted


def _is_or_holds(missing: str | None, name: str) -> bool:
    return missing is not None and (name == missing or name.startswith(f"{missing}."))


def _import_fault(name: str, error: BaseException) -> PluginError:
    where = author_line(error.__traceback__)
    said = f"{f'{where}: ' if where else ''}importing {name!r} raised {exception_text(error)}"
    return PluginError(said + _left_out_hint(error))


def _left_out_hint(error: BaseException) -> str:
    left_out = find_left_out(error.name) if isinstance(error, ModuleNotFoundError) and error.name else None
    return f"; {left_out} is not in the frozen code: git or .trnignore excludes it" if left_out else ""


def _not_found(name: str, error: ModuleNotFoundError) -> str:
    import sysconfig

    paths = sysconfig.get_paths()
    stdlib = {paths["stdlib"], paths["platstdlib"]}
    folders = [entry or str(Path.cwd()) for entry in sys.path if not _is_stdlib(entry, stdlib)]
    own = _modules_in([folder for folder in folders if not is_installed(folder)])
    module, _, symbol = name.rpartition(".")
    nearest = [] if module else nearest_names(name, own)
    if module.partition(".")[0] in own and symbol[:1].isupper():
        nearest = [f"{module}:{symbol}"]
    hint = f": did you mean {' or '.join(repr(found) for found in nearest)}?" if nearest else ""
    searched = "".join(f"\n  - {folder}" for folder in dict.fromkeys(folders))
    reason = str(error) if error.name != name or ";" in str(error) else f"no module named {name!r}"
    hint += _left_out_hint(error)
    return f"module {name!r} is not found ({reason}){hint}; searched:{searched}"


def _is_stdlib(entry: str, stdlib: set[str]) -> bool:
    return bool(entry) and (entry in stdlib or entry.endswith((".zip", "lib-dynload")))


def _modules_in(folders: list[str]) -> list[str]:
    names: list[str] = []
    for folder in folders:
        try:
            entries = sorted(entry.name for entry in Path(folder).iterdir())
        except OSError:
            continue  # it may not exist
        names += [entry.removesuffix(".py") for entry in entries if re.fullmatch(r"[^\W\d]\w*(\.py)?", entry)]
    return names


def _what_there_is(holder: Any, name: str) -> str:
    public = [known for known in dir(holder) if not known.startswith("_")]
    nearest = nearest_names(name, public)
    if nearest:
        return f"did you mean {' or '.join(repr(found) for found in nearest)}?"
    classes = [known for known in public if isinstance(getattr(holder, known, None), type)]
    return f"it has the classes {', '.join(classes)}" if classes else "it has no classes"
