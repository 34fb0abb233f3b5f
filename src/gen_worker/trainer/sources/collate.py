"""Rows to a batch: like torch's DataLoader, or the same with numpy where torch is not used."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gen_worker.errors import InputError

Collate = Callable[[list[Any]], Any]


def choose_collate(dataset: object) -> Collate:
    """The dataset's own `collate_fn`, else by the type of the rows."""
    own = getattr(dataset, "collate_fn", None)
    if callable(own):
        return own  # type: ignore[no-any-return]
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dataset, torch.utils.data.Dataset):
        return torch.utils.data.default_collate  # type: ignore[no-any-return]
    return collate_rows


def collate_rows(rows: list[Any]) -> Any:
    """Stack numbers and arrays, collate dicts and tuples field by field, keep text as a list."""
    torch = sys.modules.get("torch")
    if torch is not None and _holds_tensor(torch, rows[0]):
        return torch.utils.data.default_collate(rows)
    return _collate_numpy(rows)


def _collate_numpy(rows: Sequence[Any]) -> Any:
    import numpy as np

    first = rows[0]
    if isinstance(first, Mapping):
        return {name: _collate_numpy([row[name] for row in rows]) for name in first}
    if isinstance(first, tuple | list):
        if any(len(row) != len(first) for row in rows):
            raise InputError(
                f"rows of different lengths cannot be collated (the first has {len(first)} fields): give the dataset a"
                " `collate_fn`"
            )
        return [_collate_numpy(column) for column in zip(*rows, strict=True)]
    if isinstance(first, np.ndarray):
        return np.stack(rows)
    if isinstance(first, bool | int | float | complex | np.generic):
        return np.asarray(rows)
    return list(rows)


def _holds_tensor(torch: Any, row: Any) -> bool:
    if isinstance(row, Mapping):
        return any(_holds_tensor(torch, value) for value in row.values())
    if isinstance(row, tuple | list):
        return any(_holds_tensor(torch, value) for value in row)
    return isinstance(row, torch.Tensor)


def without_rows(batch: Any) -> Any:
    """The same batch with no rows, for a process without rows of the last batch."""
    if isinstance(batch, Mapping):
        return {name: without_rows(value) for name, value in batch.items()}
    if isinstance(batch, tuple | list) and batch and not isinstance(batch[0], str | bytes):
        return type(batch)([without_rows(value) for value in batch])
    try:
        return batch[:0]
    except (TypeError, IndexError, KeyError):
        raise InputError(
            f"this process has no rows of the epoch's last batch, and a {type(batch).__name__} cannot be made empty:"
            " set dataset.drop_last to true"
        ) from None
