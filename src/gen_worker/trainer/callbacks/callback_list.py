"""The callbacks of an attempt as the loop calls them: in order, by name, and saved with it."""

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from gen_worker.errors import TrainStepError, WorkerError
from gen_worker.trainer.attempt.failure import add_note, kind_of, say
from gen_worker.trainer.callbacks.base import HOOKS, Callback

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
        """True where one may change the state before a validation and put it back after it."""
        watchers = {
            name
            for name, callback in zip(self._names, self._callbacks, strict=True)
            if callback._only_watches
        }
        return any(name not in watchers for name, _ in self.hooks["on_validation_begin"])

    def call(self, hook: str, *args: Any, done: list[str] | None = None) -> None:
        """That hook of each, in order; not of those in `done`, which takes the names of those that have returned."""
        for name, function in self.hooks[hook]:
            if done and name in done:
                continue
            try:
                function(*args)
            except WorkerError:
                raise  # it says itself what is wrong
            except Exception as error:
                raise _named(error, name, hook) from error
            if done is not None:
                done.append(name)

    def function(self, hook: str) -> Hook:
        """`call` of one hook as a function without detours, for every batch."""
        bound = self.hooks[hook]
        if not bound:
            return lambda *_: None
        if len(bound) > 1:
            return partial(self.call, hook)
        ((name, function),) = bound

        def call_one(*args: Any) -> None:
            try:
                function(*args)
            except WorkerError:
                raise
            except Exception as error:
                raise _named(error, name, hook) from error

        return call_one

    def call_all(self, hook: str, *args: Any) -> list[BaseException]:
        """For the last call of all: one that raises keeps none of the others from theirs."""
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
        """By name; only of callbacks that have something to keep."""
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
        """Every callback as it was first given: one that served another attempt brings nothing of it along."""
        for callback, settings in zip(self._callbacks, self._settings, strict=True):
            own = vars(callback)
            for name in [name for name in own if not name.startswith("_")]:
                if name in settings:
                    own[name] = copy.deepcopy(settings[name])
                elif _is_plain(own[name]):
                    del own[name]

    def go_on(self) -> None:
        """A run that had stopped early is to go on after all."""
        for callback in self._callbacks:
            forgive = getattr(callback, "forgive", None)
            if forgive is not None:
                forgive()

    def load_state_dict(self, saved: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Restore each by its name; returns the names that are saved and not here any more."""
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
                and callback._initial_objects.get(attribute) is not value  # else it is as it was given
            ):
                self._skipped.add(f"{name}.{attribute}")
                logger.warning(
                    "%s.%s is a %s, which a checkpoint cannot hold: it will not be restored on resume (begin its name"
                    " with an underscore to say that this is meant)",
                    name,
                    attribute,
                    type(value).__name__,
                )
        return changed


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
    """Its public attributes as they were when it was first used: a second `train` must not take state for settings."""
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
    """What a checkpoint can hold: plain values, arrays and tensors, and collections of these."""
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
