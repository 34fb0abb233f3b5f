"""Is there such a trainer class? Told from its source, so that nothing of the author's is run here."""

import ast
import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path


def find_trainer_faults(trainer: str, folders: Sequence[Path]) -> list[str]:
    """Why `module:symbol` cannot be found in those folders or among the installed packages; empty where it may be."""
    module, _, symbol = trainer.partition(":")
    names = module.split(".")
    if not all(name.isidentifier() for name in names):
        return []  # what the field may hold is judged elsewhere
    source = next((found for folder in folders if (found := _find_source(folder, names))), None)
    if source is not None:
        return _symbol_faults(source, module, symbol)
    if any((folder / names[0]).is_dir() or (folder / f"{names[0]}.py").is_file() for folder in folders):
        return [f"trainer: there is no module {module} in {folders[0]}"]
    try:
        is_installed = importlib.util.find_spec(names[0]) is not None
    except (ImportError, ValueError):
        is_installed = False
    if is_installed:
        return []
    near = _nearest(names[0], [path.stem for path in folders[0].glob("*.py")])
    hint = f": did you mean {near}?" if near else ": name another with `trainer`, or its folder with --code"
    return [f"trainer: there is no module {module} in {folders[0]}, nor is one installed{hint}"]


def _find_source(folder: Path, names: Sequence[str]) -> Path | None:
    place = folder.joinpath(*names)
    for path in (place / "__init__.py", place.with_name(f"{names[-1]}.py")):
        if path.is_file():
            return path
    return None


def _symbol_faults(source: Path, module: str, symbol: str) -> list[str]:
    try:
        tree = ast.parse(source.read_bytes(), str(source))
    except SyntaxError as fault:
        return [f"trainer: {source}, line {fault.lineno}: {fault.msg}"]
    except (OSError, ValueError) as fault:
        return [f"trainer: {source} cannot be read: {fault}"]
    defined = _defined_names(tree)
    wanted = symbol.split(".", maxsplit=1)[0]
    if defined is None or not wanted or wanted in defined:
        return []
    near = _nearest(wanted, defined)
    hint = f"did you mean {near}?" if near else f"it has {', '.join(sorted(defined)[:6]) or 'nothing'}"
    return [f"trainer: {module} defines no {wanted}: {hint}"]


def _nearest(name: str, names: Iterable[str]) -> str:
    import difflib

    return next(iter(difflib.get_close_matches(name, names, n=1)), "")


def _defined_names(tree: ast.Module) -> set[str] | None:
    """The names of a module, also those that it defines under a condition; None where they cannot be told."""
    names: set[str] = set()
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        node = pending.pop()
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                if node.name == "__getattr__":
                    return None
                names.add(node.name)
            case ast.Import() | ast.ImportFrom():
                for alias in node.names:
                    if alias.name == "*":
                        return None
                    names.add((alias.asname or alias.name).split(".")[0])
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= {
                    name.id
                    for target in targets
                    for name in ast.walk(target)
                    if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
                }
            case ast.If() | ast.Try() | ast.With() | ast.For() | ast.While():
                for child in ast.walk(node):
                    if isinstance(child, ast.stmt) and child is not node:
                        pending.append(child)
            case _:
                pass
    if "globals" in {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}:
        return None
    return names
