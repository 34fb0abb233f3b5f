"""Data as a caller in this process gives it: paths that go into the job, or a source."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gen_worker.errors import InputError, SpecError
from gen_worker.trainer.attempt.trainer_config import TrainerConfig
from gen_worker.trainer.sources.base import SourceOptions
from gen_worker.trainer.sources.opening import DEFAULT_BATCH_SIZE, open_own_data, takes_batch_size
from gen_worker.trainer.steps.batch_source import BatchSource, ListSource


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenData:
    paths: list[str] | None = None
    source: BatchSource | None = None

    @classmethod
    def of(cls, data: Any, config: TrainerConfig, *, is_held_out: bool = False) -> "GivenData":
        """SpecError where it is no data."""
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


def refuse_unused_settings(config: TrainerConfig, train: Any, held_out: Sequence[Any]) -> None:
    """SpecError for settings that no data would take: its batches are made already."""
    faults = []
    if config.batch_size != DEFAULT_BATCH_SIZE and not any(map(_is_cut_into_batches, (train, *held_out))):
        faults.append(f"batch_size: found {config.batch_size}, but the data is batches already: leave it out")
    is_made = _is_source(train) or (isinstance(train, list | tuple) and not _is_paths(train))
    faults += [
        f"{name}: found true, but the data is batches already, in an order of their own: leave it out"
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
