"""Is there room for a run's checkpoints? Estimated from checkpoints that exist; without one, nothing is said.

A run is refused only if it cannot fit: a checkpoint of that size is known (the one that it resumes from, or those of an
earlier run of the same trainer class with the same hyperparams). Everything less certain is a warning.
"""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from gen_worker.contract.checkpoints.choice import META_SUFFIX, read_named
from gen_worker.contract.files.regular import read_regular
from gen_worker.contract.job.run_ids import slug_from
from gen_worker.contract.job.spec import JOB_DEFAULTS
from gen_worker.contract.sizes import show_bytes
from gen_worker.errors import CheckpointError, Fault
from trn.core.home import Home, RunFolder

# These may end a run before its `max_steps`.
EARLIER_ENDS = ("epochs", "mock_batches", "early_stopping", "callbacks", "time_limit_s")
TIGHT = 1.25
MAX_LOOKED = 32  # earlier runs


class Room(NamedTuple):
    """Faults refuse the run, warnings do not."""

    faults: tuple[Fault, ...] = ()
    warnings: tuple[str, ...] = ()


class _Known(NamedTuple):
    """How large a checkpoint is. `is_certain`: this run's will be as large."""

    size_bytes: int
    source: str
    is_certain: bool
    step: int = 0


def check_room(
    config: Mapping[str, Any],
    base_dir: Path,
    home: Home,
    *,
    min_free_bytes: int,
    free_bytes: int | None = None,
) -> Room:
    """Compare a job with what is free in `home` (or, in a test, with `free_bytes`). Blocks."""
    try:
        free = _free(home.root) if free_bytes is None else free_bytes
        return _judge(config, base_dir, home, free, min_free_bytes)
    except (OSError, ValueError):
        return Room()  # a file cannot be read: the run will report it


def _judge(config: Mapping[str, Any], base_dir: Path, home: Home, free: int, min_free_bytes: int) -> Room:
    warnings: list[str] = []
    if free < min_free_bytes:
        warnings.append(
            f"{home.root} has {show_bytes(free)} free: nothing starts before {show_bytes(min_free_bytes)} are;"
            " make room, or lower min_free_bytes in its settings.toml"
        )
    if config.get("mode") == "inference":
        return Room(warnings=tuple(warnings))  # it saves no checkpoint
    known = _find_known(config, base_dir, home)
    if known is None or not known.size_bytes:
        return Room(warnings=tuple(warnings))
    least, likely = count_at_once(config, known.step)
    where = f"{home.root} has {show_bytes(free)} free"
    remedy = "make room, keep fewer with `--set checkpoints.keep_last=1`, or set TRN_HOME to a folder on a larger disk"
    if known.is_certain and least * known.size_bytes > free:
        message = f"{_need(least, known)}, and {where}: {remedy}"
        return Room(faults=(Fault(message, path="checkpoints", kind="disk"),), warnings=tuple(warnings))
    if likely * known.size_bytes * TIGHT > free:
        warnings.append(f"room for checkpoints is tight: {_need(likely, known)}, and {where}: {remedy}")
    return Room(warnings=tuple(warnings))


def count_at_once(config: Mapping[str, Any], from_step: int = 0) -> tuple[int, int]:
    """(min, likely) number of checkpoints on disk at once: those kept, and the one being written."""
    kept = config.get("checkpoints")
    kept = kept if isinstance(kept, Mapping) else {}
    keep_last, keep_best = (
        kept.get(name, getattr(JOB_DEFAULTS.checkpoints, name)) for name in ("keep_last", "keep_best")
    )
    every, end = config.get("checkpoint_every", JOB_DEFAULTS.checkpoint_every), config.get("max_steps")
    saves = 1  # the last one
    if isinstance(every, int) and every and isinstance(end, int):
        saves += max((end - 1) // every - from_step // every, 0)
    is_sure = isinstance(end, int) and not any(config.get(name) for name in EARLIER_ENDS)
    if not isinstance(keep_last, int) or not isinstance(keep_best, int) or not keep_last:
        return saves if is_sure else 1, saves
    if end is None:
        return 1, keep_last + keep_best + 1  # how often it saves is not known
    return min(saves, keep_last + 1) if is_sure else 1, min(saves, keep_last + keep_best + 1)


def _need(count: int, known: _Known) -> str:
    each = f"of {show_bytes(known.size_bytes)}, as {known.source}"
    if count == 1:
        return f"the run needs room for one {each}"
    return f"the run needs {show_bytes(count * known.size_bytes)} for {count} at once, each {each}"


def _free(folder: Path) -> int:
    place = next((place for place in (folder, *folder.parents) if place.is_dir()), Path("/"))
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize


def _find_known(config: Mapping[str, Any], base_dir: Path, home: Home) -> _Known | None:
    for field, is_certain in (("resume_checkpoint_path", True), ("weights", False)):
        text = config.get(field)
        if isinstance(text, str) and text and "://" not in text and (base_dir / text).is_file():
            path = base_dir / text
            return _Known(
                size_bytes=_size(path),
                source=f"`{field}` {path.name} has",
                is_certain=is_certain,
                step=_read_step(path) if is_certain else 0,
            )
    return _find_earlier(config, home)


def _find_earlier(config: Mapping[str, Any], home: Home) -> _Known | None:
    """The newest checkpoint of the newest run with that trainer class and name."""
    begin = slug_from(str(config.get("name") or str(config.get("trainer", "")).rpartition(":")[2]))
    try:
        with os.scandir(home.root / "runs") as entries:
            found = [entry for entry in entries if entry.name.startswith(begin)]
        found.sort(key=lambda entry: entry.stat().st_mtime_ns, reverse=True)
    except OSError:
        return None
    likely: _Known | None = None
    for entry in found[:MAX_LOOKED]:
        folder = RunFolder(Path(entry.path))
        try:
            job = msgspec.json.decode(read_regular(folder.job), type=dict[str, Any])
            metas = [path for path in folder.checkpoints.iterdir() if path.name.endswith(META_SUFFIX)]
            newest = max(metas, key=lambda path: path.stat().st_mtime_ns, default=None)
        except (OSError, msgspec.MsgspecError):
            continue
        if newest is None or job.get("trainer") != config.get("trainer"):
            continue
        is_same = (job.get("hyperparams") or {}) == (config.get("hyperparams") or {})
        known = _Known(
            size_bytes=_size(newest),
            source=f"run {entry.name} saved them",
            is_certain=is_same,
        )
        if is_same:
            return known
        likely = likely or known
    return likely


def _size(path: Path) -> int:
    """The size of a checkpoint, given by any of its files."""
    stem = path.name.removesuffix(META_SUFFIX) if path.name.endswith(META_SUFFIX) else path.stem
    total = 0
    with os.scandir(path.parent) as entries:
        for entry in entries:
            if entry.name.startswith(f"{stem}.") and entry.is_file():
                total += entry.stat().st_size
    return total


def _read_step(path: Path) -> int:
    with contextlib.suppress(CheckpointError):
        found = read_named(path)
        return 0 if isinstance(found, dict) else found.step
    return 0
