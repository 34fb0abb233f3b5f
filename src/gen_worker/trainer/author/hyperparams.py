"""`ctx.job.hyperparams`: a dict that knows the planned steps of the run and, until step 1, which names were read."""

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple


class ScheduleLength(NamedTuple):
    """Of a learning-rate schedule: the step at which it ends, and the fraction of the rate there."""

    steps: int
    final_ratio: float
    setting: str | None = None  # the job's field with the length; None: the length of the run


class RunLength:
    """The planned steps of the run (None: unknown), and the schedules that were built."""

    __slots__ = ("schedules", "steps")

    def __init__(self, steps: int | None = None) -> None:
        self.steps = steps
        self.schedules: list[ScheduleLength] = []


class Hyperparams(dict[str, Any]):
    """A dict; pickled and copied as a plain one."""

    __slots__ = ("asked", "run_length")

    asked: set[str]  # names that were read or looked up
    run_length: RunLength

    def __init__(self, values: Iterable[tuple[str, Any]] = (), run_length: RunLength | None = None) -> None:
        super().__init__(values)
        self.asked = set()
        self.run_length = RunLength() if run_length is None else run_length

    def __reduce__(self) -> Any:
        return OrderedDict, (), None, None, iter(self.items())  # torch.load(weights_only=True) accepts it

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(self.items()), memo)

    def copy(self) -> dict[str, Any]:
        return dict(self.items())


class TrackedHyperparams(Hyperparams):
    """Records every name that is read; iterating reads all. `untrack` ends it."""

    __slots__ = ()

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        self.asked.add(key)
        return super().pop(key, *default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().setdefault(key, default)

    def __iter__(self) -> Iterator[str]:
        self.asked.update(super().keys())
        return super().__iter__()

    def keys(self) -> Any:
        self.asked.update(super().keys())
        return super().keys()

    def values(self) -> Any:
        self.asked.update(super().keys())
        return super().values()

    def items(self) -> Any:
        self.asked.update(super().keys())
        return super().items()


def track(values: dict[str, Any], run_length: RunLength | None = None) -> TrackedHyperparams:
    """A tracked copy, nested objects included."""
    return TrackedHyperparams(
        (
            (name, track(value, run_length) if type(value) is dict else value)
            for name, value in dict.items(values)
        ),
        run_length,
    )


def untrack(values: Hyperparams) -> None:
    """From here on it is as fast as a dict."""
    values.__class__ = Hyperparams
    for value in values.values():
        if isinstance(value, Hyperparams):
            untrack(value)


def unread_names(values: TrackedHyperparams) -> Iterator[str]:
    """Dotted names that were given and not read.

    C code (`msgspec.convert`) reads without recording names: an object that was read, but none of its names, counts as
    read whole.
    """
    for name, value in dict.items(values):
        if value is None:
            continue
        if name not in values.asked:
            yield name
        elif isinstance(value, TrackedHyperparams) and value.asked:
            yield from (f"{name}.{inner}" for inner in unread_names(value))


def asked_names(values: TrackedHyperparams) -> Iterator[str]:
    """Dotted names that were read or looked up."""
    for name in values.asked:
        yield name
        value = dict.get(values, name)
        if isinstance(value, TrackedHyperparams):
            yield from (f"{name}.{inner}" for inner in asked_names(value))
