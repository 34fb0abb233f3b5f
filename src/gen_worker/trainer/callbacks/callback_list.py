"""The callbacks of an attempt: loaded from the job, called in order, saved with checkpoints."""

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.errors import PluginError, TrainStepError, WorkerError
from gen_worker.trainer import callbacks as shipped
from gen_worker.trainer.attempt.failure import add_note, kind_of, say
from gen_worker.trainer.author.plugin_import import import_symbol
from gen_worker.trainer.callbacks.base import HOOKS, Callback
from gen_worker.trainer.callbacks.early_stopping import EarlyStopping

logger = logging.getLogger("gen_worker.callbacks")

Hook = Callable[..., None]


class CallbackList:
    """Calls each hook of those callbacks that override it, in order; names the one that raises."""

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        self._callbacks = tuple(callbacks)
        self._names = _unique_names(self._callbacks)
        self._settings = [_settings_of(callback) for callback in self._callbacks]
        self._skipped: set[str] = set()
        self.hooks: dict[str, tuple[tuple[str, Hook], ...]] = {
            hook: tuple(
                (name, getattr(callback, hook))
                for name, callback in zip(self._names, self._callbacks, strict=True)
                if _overrides(callback, hook)
            )
            for hook in HOOKS
        }

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._callbacks)

    @property
    def has_batch_hooks(self) -> bool:
        return bool(self.hooks["on_batch_begin"] or self.hooks["on_batch_end"])

    @property
    def wraps_validation(self) -> bool:
        """True if a callback may change the state before a validation and restore it afterwards."""
        return any(
            _overrides(callback, "on_validation_begin") and not callback._only_watches
            for callback in self._callbacks
        )

    def call(self, hook: str, *args: Any) -> None:
        """Call that hook of each callback, in order."""
        self.call_rest(hook, args, [])

    def call_rest(self, hook: str, args: tuple[Any, ...], done: list[str]) -> None:
        """`call` without the callbacks in `done`. Where one raises, those that returned before it are added there."""
        bound = self.hooks[hook]
        if done:
            bound = tuple(pair for pair in bound if pair[0] not in done)
        if not bound:
            return
        name = bound[0][0]
        try:
            for name, function in bound:  # noqa: B007  (the handler below uses the name)
                function(*args)
        except BaseException as error:
            done += takewhile(lambda before: before != name, (before for before, _ in bound))
            if isinstance(error, WorkerError) or not isinstance(error, Exception):
                raise
            raise _named(error, name, hook) from error

    def function(self, hook: str) -> Hook:
        """`call` of one hook as a function, without overhead for every batch."""
        bound = self.hooks[hook]
        if not bound:
            return lambda *_: None
        return _guard(bound[0][0], hook, bound[0][1]) if len(bound) == 1 else partial(self.call, hook)

    def call_all(self, hook: str, *args: Any) -> list[BaseException]:
        """Call that hook of every callback, also after one raised; returns the errors."""
        faults: list[BaseException] = []
        for name, function in self.hooks[hook]:
            try:
                function(*args)
            except BaseException as error:
                logger.exception("the callback %s.%s raised", name, hook)
                add_note(error, f"in the callback {name}.{hook}")
                faults.append(error)
        return faults

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """By name; without callbacks that have nothing to save."""
        saved: dict[str, dict[str, Any]] = {}
        for name, callback, settings in zip(self._names, self._callbacks, self._settings, strict=True):
            try:
                own = callback.state_dict()
            except Exception as error:
                raise _named(error, name, "state_dict") from error
            state = self._changed(name, callback, settings) if own is None else dict(own)
            if state:
                saved[name] = state
        return saved

    def reset(self) -> None:
        """Restore the public attributes that each callback had before its first attempt."""
        for callback, settings in zip(self._callbacks, self._settings, strict=True):
            own = vars(callback)
            for name in [name for name in own if not name.startswith("_")]:
                if name in settings:
                    own[name] = copy.deepcopy(settings[name])
                elif _is_plain(own[name]):
                    del own[name]

    def reset_patience(self) -> None:
        """Continue a run that had stopped early."""
        for callback in self._callbacks:
            if isinstance(callback, EarlyStopping):
                callback.reset_patience()

    def load_state_dict(self, saved: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Restore each callback by name; returns saved names that no callback has."""
        for name, callback in zip(self._names, self._callbacks, strict=True):
            if name not in saved:
                continue
            try:
                callback.load_state_dict(saved[name])
            except Exception as error:
                raise _named(error, name, "load_state_dict") from error
        return [name for name in saved if name not in self._names]

    def _changed(self, name: str, callback: Callback, settings: Mapping[str, Any]) -> dict[str, Any]:
        changed = {}
        for attribute, value in vars(callback).items():
            if attribute.startswith("_") or callable(value):
                continue
            if attribute in settings and _is_same(settings[attribute], value):
                continue
            if _is_plain(value):
                changed[attribute] = value
            elif (
                f"{name}.{attribute}" not in self._skipped
                and callback._initial_objects.get(attribute) is not value  # else it is unchanged
            ):
                self._skipped.add(f"{name}.{attribute}")
                logger.warning(
                    "%s.%s is a %s, which a checkpoint cannot hold: it is not restored on resume. Start its name with"
                    " an underscore if that is intended",
                    name,
                    attribute,
                    type(value).__name__,
                )
        return changed


def load_callbacks(job: TrainingJobSpec) -> list[Callback]:
    """Early stopping first, then the job's `callbacks` in order."""
    stopping = job.early_stopping
    made: list[Callback] = [] if stopping is None else [EarlyStopping.from_spec(stopping)]
    return made + [load_callback(ref, f"callbacks[{number}]") for number, ref in enumerate(job.callbacks)]


def load_callback(ref: str, field: str) -> Callback:
    """The callback that `field` of the job names; PluginError if there is none."""
    if ":" not in ref:
        hint = f": did you mean gen_worker.trainer.callbacks:{ref}?" if ref in shipped.__all__ else ""
        raise PluginError(f"{field}: found {ref!r}, expected module:symbol{hint}")
    try:
        found = import_symbol(ref)
    except PluginError as fault:
        raise PluginError(f"{field}: {fault}") from fault
    if isinstance(found, type) and issubclass(found, Callback):
        try:
            found = found()
        except TypeError as fault:
            raise PluginError(
                f"{field}: {ref} cannot be built without arguments ({say(fault)}): name an instance instead,"
                " such as my_module:my_callback"
            ) from fault
    if not isinstance(found, Callback):
        kind = "class" if isinstance(found, type) else type(found).__name__
        raise PluginError(f"{field}: {ref} is a {kind}, expected a subclass of gen_worker.trainer.Callback")
    return found


def _guard(name: str, hook: str, function: Hook) -> Hook:
    """`function`, whose exceptions name the callback. A WorkerError has its own message."""

    def call(*args: Any) -> None:
        try:
            function(*args)
        except WorkerError:
            raise
        except Exception as error:
            raise _named(error, name, hook) from error

    return call


def _named(error: Exception, name: str, hook: str) -> TrainStepError:
    return TrainStepError(f"the callback {name}.{hook} raised {kind_of(error)}: {say(error)}")


def _overrides(callback: Callback, hook: str) -> bool:
    own = getattr(callback, hook, None)
    return own is not None and getattr(own, "__func__", own) is not getattr(Callback, hook)


def _unique_names(callbacks: Sequence[Callback]) -> list[str]:
    names: list[str] = []
    for callback in callbacks:
        name = type(callback).__name__
        number = sum(taken.partition("#")[0] == name for taken in names) + 1
        names.append(name if number == 1 else f"{name}#{number}")
    return names


def _settings_of(callback: Callback) -> dict[str, Any]:
    """Its public attributes before its first attempt, so that a second `train` does not mistake state for settings."""
    own = vars(callback)
    if "_initial_settings" not in own:
        callback._initial_objects = {name: value for name, value in own.items() if not _is_plain(value)}
        callback._initial_settings = {
            name: copy.deepcopy(value)
            for name, value in own.items()
            if not name.startswith("_") and _is_plain(value)
        }
    return callback._initial_settings


def _is_plain(value: Any) -> bool:
    """Can a checkpoint hold it? Plain values, arrays, tensors, and collections of these."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return True
    if type(value) is dict:
        return all(type(key) is str and _is_plain(item) for key, item in value.items())
    if type(value) in (list, tuple):
        return all(_is_plain(item) for item in value)
    if type(value).__name__ == "ndarray":
        return value.dtype.kind in "biuf"
    return type(value).__name__ == "Tensor"


def _is_same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    try:
        return bool(one == other)
    except (
        ValueError,
        RuntimeError,
    ):  # arrays and tensors of several values: cheaper to save than to compare
        return False
