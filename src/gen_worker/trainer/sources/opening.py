"""Own data by its kind: from the object itself, from `module:symbol` of a job, or from a caller of `Trainer`."""

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gen_worker.contract.job.spec import DatasetSpec
from gen_worker.errors import InputError, PluginError, SpecError
from gen_worker.trainer.author.plugin_import import import_symbol
from gen_worker.trainer.sources.base import OwnSource, SourceOptions
from gen_worker.trainer.sources.random_streams import DataStreams
from gen_worker.trainer.steps.batch_source import BatchSource, ListSource

if TYPE_CHECKING:
    from gen_worker.trainer.attempt.trainer_config import TrainerConfig

DEFAULT_BATCH_SIZE = DatasetSpec().batch_size
EXPECTED = "a map-style or iterable Dataset, a DataLoader, or an object with `__len__` and `__getitem__`, or with `__iter__`"


def open_own_data(data: Any, options: SourceOptions) -> OwnSource:
    """The object as a source of batches; InputError if it is none, or does not support a setting."""
    if is_loader(data):
        how = "set it in the DataLoader, or give its dataset"
        _refuse_settings(options, "a DataLoader", how, "batch_size", "drop_last")
        from gen_worker.trainer.sources.loader import IterableLoaderSource, LoaderSource

        is_replayed = _is_iterable_dataset(data.dataset) or callable(getattr(data, "state_dict", None))
        source = IterableLoaderSource(data, options) if is_replayed else LoaderSource(data, options)
        size = data.batch_size
        if size is not None and size != options.batch_size:
            source.note = (
                f"the batch_size of the DataLoader is used, {size}; that of the job is not"
                f" ({options.batch_size}, the default)"
            )
        return source
    if is_rows(data):
        from gen_worker.trainer.sources.rows import RowsSource

        return RowsSource(data, options)
    if not hasattr(data, "__iter__") or isinstance(data, str | bytes | Mapping):
        raise InputError(f"the data is {data!r:.60} ({type(data).__name__}), expected {EXPECTED}")
    if iter_is_itself(data):
        raise InputError(
            f"the data is a {type(data).__name__}, which can be iterated only once: give an object whose `__iter__`"
            " starts a new pass, such as a class with a generator as `__iter__`"
        )
    from gen_worker.trainer.sources.iterables import IterableRowsSource, ReplayedSource

    if _is_iterable_dataset(data):
        _refuse_settings(options, "an IterableDataset", "shuffle inside the dataset, from `random` or torch")
        return IterableRowsSource(data, options)
    how = "its items are batches already"
    _refuse_settings(options, "an iterable", how, "batch_size", "drop_last")
    return ReplayedSource(data, options)


def _refuse_settings(options: SourceOptions, what: str, how: str, *names: str) -> None:
    """InputError for a setting that would be ignored."""
    defaults = SourceOptions(batch_size=DEFAULT_BATCH_SIZE)
    for name in ("shuffle", *names):
        value = getattr(options, name)
        if value != getattr(defaults, name):
            raise InputError(f"{name} is {value}, but the data is {what}, which does not support it: {how}")


def takes_batch_size(data: object) -> bool:
    """Are its batches made by our settings?"""
    return is_rows(data) or _is_iterable_dataset(data)


def is_loader(data: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(data, torch.utils.data.DataLoader)


def is_rows(data: object) -> bool:
    """Can rows be read by number? (Every torch Dataset has `__getitem__`, also one that cannot be indexed.)"""
    if isinstance(data, str | bytes | Mapping) or _is_iterable_dataset(data):
        return False
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")


def iter_is_itself(data: Any) -> bool:
    return hasattr(data, "__next__") and hasattr(data, "__iter__")


def _is_iterable_dataset(data: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(data, torch.utils.data.IterableDataset)


def load_source(ref: str, args: Mapping[str, Any], *, seed: int = 0, field: str = "dataset") -> Any:
    """The data that a job names: an object, or the result of a class or function called with `args`.

    Random numbers drawn here (to split rows, for example) follow from the seed: training, validation and a resume get
    the same.
    """
    maker = find_source(ref, args, field=field)
    streams = DataStreams(seed)
    with streams.swapped_in():
        streams.seed("make")
        return maker(**args) if _is_maker(maker) else maker


def find_source(ref: str, args: Mapping[str, Any], *, field: str = "dataset") -> Any:
    """What `module:symbol` names; PluginError if it does not exist or cannot be called with `args`."""
    try:
        found = import_symbol(ref)
    except PluginError as fault:
        raise PluginError(f"{field}.source: {fault}") from fault
    if not _is_maker(found):
        if args:
            raise PluginError(
                f"{field}.args: found {', '.join(args)}, but {ref} is an object ({type(found).__name__}), not a class or"
                " function: remove `args`, or name the class or function"
            )
        return found
    try:
        inspect.signature(found).bind(**args)
    except TypeError as fault:
        raise PluginError(
            f"{field}.args: {ref}{inspect.signature(found)} cannot be called with ({', '.join(args) or 'nothing'}): {fault}"
        ) from None
    except ValueError:
        pass  # a builtin without a signature
    return found


def _is_maker(found: object) -> bool:
    if isinstance(found, type):
        return True
    return callable(found) and not any(
        hasattr(found, name) for name in ("__iter__", "__getitem__", "batches")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerData:
    """Data that a caller in this process passes: paths for the job, or a source."""

    paths: list[str] | None = None
    source: BatchSource | None = None

    @classmethod
    def of(cls, data: Any, config: "TrainerConfig", *, is_held_out: bool = False) -> "CallerData":
        """SpecError if it is not data."""
        if data is None:
            return cls()
        if _is_paths(data):
            paths = [data] if isinstance(data, str | Path) else data
            return cls(paths=[str(Path(path).absolute()) for path in paths])
        if _is_source(data):
            return cls(source=data)
        if isinstance(data, list | tuple):
            return cls(source=ListSource(data, is_endless=True))
        options = SourceOptions(
            batch_size=config.batch_size if takes_batch_size(data) else DEFAULT_BATCH_SIZE,
            shuffle=config.shuffle and not is_held_out,
            drop_last=config.drop_last and not is_held_out,
            seed=config.seed,
            is_held_out=is_held_out,
        )
        try:
            return cls(source=open_own_data(data, options))
        except InputError as fault:
            raise SpecError("Trainer", [f"data: {fault}"]) from fault


def refuse_unused_settings(config: "TrainerConfig", train: Any, held_out: Sequence[Any]) -> None:
    """SpecError for settings without effect, because the data is already batches."""
    faults = []
    if config.batch_size != DEFAULT_BATCH_SIZE and not any(map(_is_cut_into_batches, (train, *held_out))):
        faults.append(f"batch_size: found {config.batch_size}, but the data is already batches: remove it")
    is_made = _is_source(train) or (isinstance(train, list | tuple) and not _is_paths(train))
    faults += [
        f"{name}: found true, but the data is already batches: remove it"
        for name in ("shuffle", "drop_last")
        if is_made and getattr(config, name)
    ]
    if faults:
        raise SpecError("Trainer", faults)


def _is_cut_into_batches(data: Any) -> bool:
    is_list = isinstance(data, list | tuple)
    return _is_paths(data) or (not is_list and not _is_source(data) and takes_batch_size(data))


def _is_paths(data: Any) -> bool:
    if isinstance(data, list | tuple):
        return bool(data) and all(isinstance(item, str | Path) for item in data)
    return isinstance(data, str | Path)


def _is_source(data: Any) -> bool:
    return hasattr(data, "batches") and hasattr(data, "position")
