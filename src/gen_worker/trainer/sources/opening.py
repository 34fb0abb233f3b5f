"""What kind of data an object is, and `module:symbol` of a job to such an object."""

import inspect
import sys
from collections.abc import Mapping
from typing import Any

from gen_worker.contract.job.spec import DatasetSpec
from gen_worker.errors import InputError, PluginError
from gen_worker.trainer.author.plugin_import import import_symbol
from gen_worker.trainer.sources.base import OwnSource, SourceOptions
from gen_worker.trainer.sources.random_streams import DataStreams

DEFAULT_BATCH_SIZE = DatasetSpec().batch_size
EXPECTED = "a map-style or iterable Dataset, a DataLoader, or an object with `__len__` and `__getitem__`, or with `__iter__`"


def open_own_data(data: Any, options: SourceOptions) -> OwnSource:
    """The object as a source of batches; InputError where it is none, or where a setting cannot be obeyed."""
    if is_loader(data):
        how = "set it in the DataLoader, or give its dataset"
        _refuse_settings(options, "a DataLoader", how, "batch_size", "drop_last")
        from gen_worker.trainer.sources.loader import IterableLoaderSource, LoaderSource

        is_replayed = _is_iterable_dataset(data.dataset) or callable(getattr(data, "state_dict", None))
        source = IterableLoaderSource(data, options) if is_replayed else LoaderSource(data, options)
        size = data.batch_size
        if size is not None and size != options.batch_size:  # a 32 of the job's own looks like the default
            source.note = (
                f"the DataLoader makes batches of {size} rows: batch_size {options.batch_size} is not used"
            )
        return source
    if is_rows(data):
        from gen_worker.trainer.sources.rows import RowsSource

        return RowsSource(data, options)
    if not hasattr(data, "__iter__") or isinstance(data, str | bytes | Mapping):
        raise InputError(f"the data is {data!r:.60} ({type(data).__name__}), expected {EXPECTED}")
    if iter_is_itself(data):
        raise InputError(
            f"the data is a {type(data).__name__}, which can be gone through only once: give an object whose `__iter__`"
            " begins a new pass, such as a class with a generator as `__iter__`"
        )
    from gen_worker.trainer.sources.iterables import IterableRowsSource, ReplayedSource

    if _is_iterable_dataset(data):
        _refuse_settings(options, "an IterableDataset", "shuffle inside the dataset, from `random` or torch")
        return IterableRowsSource(data, options)
    how = "its items are batches already"
    _refuse_settings(options, "an iterable", how, "batch_size", "drop_last")
    return ReplayedSource(data, options)


def _refuse_settings(options: SourceOptions, what: str, how: str, *names: str) -> None:
    """Never pass over what was asked for."""
    defaults = SourceOptions(batch_size=DEFAULT_BATCH_SIZE)
    for name in ("shuffle", *names):
        value = getattr(options, name)
        if value != getattr(defaults, name):
            raise InputError(f"{name} is {value}, and the data is {what}, which does not take it: {how}")


def takes_batch_size(data: object) -> bool:
    """Whether the settings say how its rows become batches."""
    return is_rows(data) or _is_iterable_dataset(data)


def is_loader(data: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(data, torch.utils.data.DataLoader)


def is_rows(data: object) -> bool:
    """Whether it is rows by number. (Every torch Dataset has a `__getitem__`, also one that cannot be indexed.)"""
    if isinstance(data, str | bytes | Mapping) or _is_iterable_dataset(data):
        return False
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")


def iter_is_itself(data: Any) -> bool:
    return hasattr(data, "__next__") and hasattr(data, "__iter__")


def _is_iterable_dataset(data: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(data, torch.utils.data.IterableDataset)


def load_source(ref: str, args: Mapping[str, Any], *, seed: int = 0, field: str = "dataset") -> Any:
    """The data that a job names: what a class or function gives when it is called with `args`, or an object.

    What it draws (to split rows, say) follows from the seed: it is the same for training and validation, and after a
    resume.
    """
    maker = find_source(ref, args, field=field)
    streams = DataStreams(seed)
    with streams.apart():
        streams.seed("make")
        return maker(**args) if _is_maker(maker) else maker


def find_source(ref: str, args: Mapping[str, Any], *, field: str = "dataset") -> Any:
    """What `module:symbol` names; PluginError where there is nothing, or where it cannot be called so."""
    try:
        found = import_symbol(ref)
    except PluginError as fault:
        raise PluginError(f"{field}.source: {fault}") from fault
    if not _is_maker(found):
        if args:
            raise PluginError(
                f"{field}.args: found {', '.join(args)}, but {ref} is an object ({type(found).__name__}), not a class or"
                " function that could take them: leave `args` out, or name what makes the data"
            )
        return found
    try:
        inspect.signature(found).bind(**args)
    except TypeError as fault:
        raise PluginError(
            f"{field}.args: {ref}{inspect.signature(found)} cannot be called with ({', '.join(args) or 'nothing'}): {fault}"
        ) from None
    except ValueError:
        pass  # a builtin that does not tell what it takes
    return found


def _is_maker(found: object) -> bool:
    if isinstance(found, type):
        return True
    return callable(found) and not any(
        hasattr(found, name) for name in ("__iter__", "__getitem__", "batches")
    )
