"""`module:symbol` -> a trainer class, built and checked."""

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.errors import (
    PluginError,
    PluginNotFoundError,
    PluginTypeError,
    PluginValueError,
    SpecError,
    TrainingCanceled,
    TrainingTimeout,
)
from gen_worker.trainer.contracts import REQUIRED_HOOKS, TrainerPlugin

# Where `module` alone is looked up, in this order.
DEFAULT_SYMBOLS = ("TRAINER", "Trainer", "trainer")
NO_TRAINER = "no trainer class is named: set `trainer` in the job or TRAINER_PLUGIN to module:symbol"
_NEVER_MEANT = ("TrainerPlugin",)  # the protocol has the hooks, but is no trainer class


def load_trainer_plugin(ref: str) -> TrainerPlugin:
    """Import `module:symbol`, build the class (without arguments) or take the instance, and check its hooks.

    `module` alone means its `TRAINER`, `Trainer` or `trainer`, or the only trainer class in it. Classes defined there
    come before imported ones. Raises PluginError, with the author's file and line where known.
    """
    from gen_worker.trainer.author.hooks import check_hooks
    from gen_worker.trainer.author.plugin_import import find_symbol, import_author_module, split_ref

    module_name, symbol = split_ref(ref)
    module = import_author_module(module_name)
    if symbol is None:
        symbol = _pick_symbol(module)
        ref = f"{module_name}:{symbol}"
    trainer = _build(find_symbol(module, symbol), ref)
    check_hooks(trainer, ref)
    return cast("TrainerPlugin", trainer)


def load_jobs_plugin(ref: str | None, *, job_dir: Path) -> TrainerPlugin:
    """`load_trainer_plugin` for a job; where the module is only beside the job file, the error says so."""
    if ref is None:
        raise PluginError(NO_TRAINER)
    try:
        return load_trainer_plugin(ref)
    except PluginNotFoundError as fault:
        name = ref.partition(":")[0].partition(".")[0]
        if (job_dir / f"{name}.py").exists():
            fault.add_note(f"{name}.py is in {job_dir}: start the worker there, or set PYTHONPATH={job_dir}")
        raise


def find_job_faults(trainer: TrainerPlugin, job: TrainingJobSpec) -> list[str]:
    """The faults that the class's optional hook `check_job(job)` returns, one text each."""
    from gen_worker.trainer.author.plugin_import import author_line, exception_text

    hook = getattr(trainer, "check_job", None)
    if hook is None:
        return []
    try:
        found = hook(job)
    except SpecError as error:
        return list(error.faults)
    except (TrainingCanceled, TrainingTimeout):
        raise
    except Exception as error:
        line = author_line(error.__traceback__)
        raise PluginError(f"{f'{line}: ' if line else ''}check_job raised {exception_text(error)}") from error
    if found is None:
        return []
    if isinstance(found, str) or not all(isinstance(fault, str) for fault in found):
        raise PluginTypeError(f"check_job returned {found!r:.80}, expected a list of texts, one per fault")
    return list(found)


def require_sound_job(trainer: TrainerPlugin, job: TrainingJobSpec) -> None:
    """SpecError with every fault that `check_job` finds."""
    faults = find_job_faults(trainer, job)
    if faults:
        raise SpecError(f"the job of run {job.run_id}", faults)


def _pick_symbol(module: ModuleType) -> str:
    from gen_worker.trainer.author.hooks import missing_hooks

    names = vars(module)
    for name in DEFAULT_SYMBOLS:
        found = names.get(name)
        # `from gen_worker.trainer import Trainer` and `from gen_worker import trainer` do not count.
        is_imported = isinstance(found, type) and found.__module__ != module.__name__ and missing_hooks(found)
        if found is not None and not isinstance(found, ModuleType) and not is_imported:
            return name
    own = {
        cls: name
        for name, cls in names.items()
        if isinstance(cls, type) and cls.__module__ == module.__name__
    }
    # Classes of a module made in memory may name another module.
    imported = {id(item): name for name, item in names.items() if not isinstance(item, ModuleType | Mapping)}
    candidates = sorted(
        name for cls, name in own.items() if not name.startswith("_") and not missing_hooks(cls)
    ) or sorted(
        name
        for name in imported.values()
        if not name.startswith("_") and name not in _NEVER_MEANT and not missing_hooks(names[name])
    )
    if len(candidates) == 1:
        return candidates[0]
    where = f"module {module.__name__!r} ({getattr(module, '__file__', None) or 'no file'})"
    if candidates:
        choices = ", ".join(f"{module.__name__}:{name}" for name in candidates)
        raise PluginValueError(f"{where} has multiple trainer candidates, name one of them: {choices}")
    incomplete = [f"{name} lacks {', '.join(missing_hooks(cls))}" for cls, name in own.items()]
    found_instead = f"; its classes: {'; '.join(incomplete[:10])}" if incomplete else "; it defines no class"
    raise PluginValueError(
        f"{where} holds no {', '.join(f'`{name}`' for name in DEFAULT_SYMBOLS)} and no trainer class{found_instead}"
    )


def _build(found: Any, ref: str) -> object:
    import functools
    import inspect

    from gen_worker.trainer.author.hooks import missing_hooks, source_line
    from gen_worker.trainer.author.plugin_import import author_line, exception_text

    if isinstance(found, ModuleType):
        raise PluginTypeError(f"{ref} is a module, expected a class: {found.__name__}:MyTrainer")
    if not isinstance(found, type):
        is_plain = inspect.isroutine(found) or isinstance(found, functools.partial)
        if is_plain or (callable(found) and len(missing_hooks(found)) == len(REQUIRED_HOOKS)):
            raise PluginTypeError(
                f"{source_line(found)}: {ref} is a {type(found).__name__}: plain callables are unsupported; "
                f"write a class with the methods {', '.join(REQUIRED_HOOKS)}"
            )
        return cast("object", found)
    try:
        if found.__init__ is not object.__init__ or found.__new__ is not object.__new__:  # type: ignore[misc, comparison-overlap]
            inspect.signature(found).bind()
    except TypeError as error:
        raise PluginTypeError(
            f"{source_line(found)}: {ref} cannot be built: it is called without arguments, but {error}; "
            "give its constructor defaults, or export an instance"
        ) from error
    except ValueError:
        pass  # the constructor has no readable signature: the call below decides
    try:
        return cast("object", found())
    except (TrainingCanceled, TrainingTimeout):
        raise
    except (Exception, SystemExit) as error:
        line = author_line(error.__traceback__) or source_line(found)
        raise PluginError(f"{line}: building {ref} raised {exception_text(error)}") from error
