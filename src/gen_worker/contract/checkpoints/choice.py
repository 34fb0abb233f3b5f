"""Which checkpoint a resume or a server takes: the same order and reasons for the worker, the daemon and the command line.

Needs neither torch nor numpy: the caller brings the function that verifies the bytes.
"""

import contextlib
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from gen_worker.contract.checkpoints.file_check import check_file, check_size
from gen_worker.contract.checkpoints.meta import CheckpointMeta, Metric, has_digest, parse_meta
from gen_worker.contract.files.regular import read_regular
from gen_worker.errors import CheckpointError

META_SUFFIX = ".meta.json"
# `step-00000010`, `final`, and `….previous`: what a save of the same name sets aside while it replaces it.
STEM = re.compile(r"(?:step-(?P<step>\d{8,})|final)(?P<previous>\.previous)?")
DATA_SUFFIXES = (".pt", ".safetensors")

T = TypeVar("T")
M = TypeVar("M")


def checkpoint_stem(step: int, *, final: bool) -> str:
    return "final" if final else f"step-{step:08d}"


def say_no_checkpoint(path: Path) -> str:
    """Of a path at which there is no file."""
    if path.is_dir():
        return f"{path} is a folder, expected the {META_SUFFIX} of a checkpoint"
    return f"there is no checkpoint {path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """A checkpoint by its meta; its data was not read."""

    stem: str
    meta_path: Path
    data_path: Path
    step: int
    epoch: int
    final: bool
    verified: bool
    reason: str
    created_ms: int
    size_bytes: int
    meta: CheckpointMeta

    @property
    def order(self) -> tuple[int, bool, bool, int]:
        """Older to newer."""
        return (self.step, not self.stem.endswith(".previous"), self.final, self.created_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedOver:
    """A checkpoint that a resume does not take, and why."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path.name}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Generic[T]):
    """What was taken (None: nothing), and the newer ones that were not."""

    taken: T | None
    passed_over: tuple[PassedOver, ...]


def choose_newest(
    folder: Path,
    take: Callable[[CheckpointInfo], T],
    *,
    is_non_finite_taken: bool = False,
    is_candidate: Callable[[CheckpointInfo], bool] = lambda _info: True,
    of_run: str | None = None,
    nonce: str = "",
) -> Choice[T]:
    """The newest checkpoint that a resume may take. `take` reads its bytes, or raises CheckpointError.

    With `of_run`, checkpoints of other runs are passed over; with a `nonce`, also those of other submissions.
    """

    def require(info: CheckpointInfo) -> None:
        require_run(info.meta, of_run, nonce)
        require_finite(info, is_non_finite_taken=is_non_finite_taken)

    infos, unreadable = scan(folder)
    return _choose(list(filter(is_candidate, infos)), unreadable, require, take)


def choose_best(
    folder: Path, take: Callable[[CheckpointInfo], T], *, of_run: str | None = None, nonce: str = ""
) -> Choice[T]:
    """As `choose_newest`, by the metric that the checkpoints carry; the newest where none carries one."""

    def require(info: CheckpointInfo) -> None:
        require_run(info.meta, of_run, nonce)
        require_finite(info)

    infos, unreadable = scan(folder)
    ranked = best_first(infos[::-1], lambda info: info.meta.metric)
    choice = _choose(ranked or infos, unreadable, require, take)
    return choice if choice.taken is not None or not ranked else _choose(infos, unreadable, require, take)


def best_first(items: Sequence[M], metric_of: Callable[[M], Metric | None]) -> list[M]:
    """Those with a finite value of the metric that the newest of them has, the best first. `items`: the oldest first."""
    found = [(item, metric) for item in items if (metric := metric_of(item)) is not None]
    measured = [
        (item, metric, metric.value)
        for item, metric in found
        if metric.value is not None and math.isfinite(metric.value)
    ]
    if not measured:
        return []
    newest = measured[-1][1]  # a changed job may have changed the metric
    sign = -1.0 if newest.mode == "max" else 1.0
    comparable = [(sign * value, item) for item, metric, value in measured if metric.name == newest.name]
    comparable.reverse()  # of equals the newer one comes first
    return [item for _, item in sorted(comparable, key=lambda pair: pair[0])]


def _choose(
    infos: Sequence[CheckpointInfo],
    unreadable: Sequence[PassedOver],
    require: Callable[[CheckpointInfo], None],
    take: Callable[[CheckpointInfo], T],
) -> Choice[T]:
    """The first that can be taken."""
    passed_over: list[PassedOver] = []
    taken, reached = None, 0
    for info in infos:
        try:
            require(info)
            taken, reached = take(info), info.step
        except CheckpointError as error:
            passed_over.append(PassedOver(path=info.meta_path, reason=str(error)))
        else:
            break
    return Choice(
        taken=taken,
        passed_over=(*(item for item in unreadable if step_of(item.path) >= reached), *passed_over),
    )


def find_committed(folder: Path) -> list[str]:
    """Names of all metas, readable or not; none where there is no folder, or none that can be listed."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        return sorted(name for name in os.listdir(folder) if name.endswith(META_SUFFIX))  # noqa: PTH208  (hot)
    return []


def require_run(meta: CheckpointMeta, run_id: str | None, nonce: str = "") -> None:
    """CheckpointError where another run or another submission saved it."""
    if run_id is not None and meta.run_id != run_id:
        raise CheckpointError(f"it is of run {meta.run_id!r}, not of {run_id!r}")
    if run_id is not None and nonce and meta.nonce != nonce:
        raise CheckpointError(f"it is of another submission of run {run_id!r}")


def require_finite(info: CheckpointInfo, *, is_non_finite_taken: bool = False) -> None:
    """CheckpointError for a state with NaN or infinity, unless `is_non_finite_taken`."""
    if not info.verified and not is_non_finite_taken:
        raise CheckpointError(f"not verified: {info.reason}")


def verify_files(info: CheckpointInfo) -> CheckpointInfo:
    """CheckpointError unless every file matches its hash."""
    check_layout(info.meta, info.meta_path.name)
    for entry in info.meta.files:
        check_file(info.meta_path.parent / entry.name, entry)
    return info


def check_quickly(info: CheckpointInfo) -> CheckpointInfo:
    """CheckpointError unless every file has its size. The worker verifies the bytes."""
    check_layout(info.meta, info.meta_path.name)
    for entry in info.meta.files:
        check_size(info.meta_path.parent / entry.name, entry)
    return info


def check_layout(meta: CheckpointMeta, source: str) -> None:
    """CheckpointError for another byte order, or overlapping storages."""
    if meta.byteorder != sys.byteorder:
        raise CheckpointError(
            f"{source} was written on a {meta.byteorder}-endian machine, this one is {sys.byteorder}-endian"
        )
    position = 0
    for number, storage in sorted(
        enumerate(meta.storages), key=lambda item: (item[1].offset, item[1].size_bytes)
    ):
        if storage.size_bytes and storage.offset < position:
            raise CheckpointError(f"{meta.data.name}: storage {number} overlaps another one")
        position = max(position, storage.offset + storage.size_bytes)


def meta_path_of(path: Path) -> Path:
    """The meta beside a data file, which must exist; any other path itself."""
    if path.suffix not in DATA_SUFFIXES:
        return path
    meta_path = path.with_name(path.stem + META_SUFFIX)
    if not meta_path.exists():
        raise CheckpointError(f"{path} has no {meta_path.name} beside it: it was never committed")
    return meta_path


def choose_named(
    path: Path, take: Callable[[CheckpointInfo], T], *, is_non_finite_taken: bool, how_to_force: str
) -> T | dict[str, object]:
    """That checkpoint, or the `state` of a plain document. CheckpointError where a resume must not take it."""
    named = read_named(path)
    if isinstance(named, dict):
        return named
    try:
        require_finite(named, is_non_finite_taken=is_non_finite_taken)
    except CheckpointError as error:
        raise CheckpointError(
            f"{named.meta_path} is {error}. Resume from an earlier checkpoint, or {how_to_force}"
        ) from error
    try:
        return take(named)
    except CheckpointError as error:
        raise CheckpointError(
            f"{named.meta_path} cannot be resumed: {error}. Give another checkpoint; older ones may be in the same folder"
        ) from error


def read_named(path: Path) -> CheckpointInfo | dict[str, object]:
    """A checkpoint by its meta or its data file; or the `state` of a plain `{"state": {...}}` document."""
    path = meta_path_of(path)
    content = _read(path)
    is_meta = STEM.fullmatch(path.name.removesuffix(META_SUFFIX)) is not None or has_digest(content)
    plain = None if is_meta else _parse_plain_state(content)
    return make_info(path, parse_meta(content, path.name)) if plain is None else plain


def scan(folder: Path) -> tuple[list[CheckpointInfo], list[PassedOver]]:
    """(checkpoints, newest first; files named like checkpoints whose meta is missing or unreadable)."""
    infos: list[CheckpointInfo] = []
    passed_over: list[PassedOver] = []
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    claimed: set[str] = set()
    for name in names:
        stem = name.removesuffix(META_SUFFIX)
        if stem == name or STEM.fullmatch(stem) is None:
            continue
        try:
            info = read_info(folder, stem)
        except CheckpointError as error:
            passed_over.append(PassedOver(path=folder / name, reason=str(error)))
            claimed.update(stem + suffix for suffix in DATA_SUFFIXES)
        else:
            infos.append(info)
            claimed.add(info.data_path.name)
    for name in names:
        path = folder / name
        if path.suffix in DATA_SUFFIXES and STEM.fullmatch(path.stem) and name not in claimed:
            reason = f"no {path.stem}{META_SUFFIX}: it was never committed"
            if f"{path.stem}{META_SUFFIX}.damaged" in names:
                reason = "its bytes did not match when read back after the save"
            passed_over.append(PassedOver(path=path, reason=reason))
    infos.sort(key=lambda info: info.order, reverse=True)
    return infos, passed_over


def step_of(path: Path) -> float:
    """The step in a file's name; infinity for a final one."""
    match = STEM.match(path.name)
    return int(match["step"]) if match and match["step"] else float("inf")


def read_info(folder: Path, stem: str) -> CheckpointInfo:
    """The checkpoint of that name; CheckpointError if its meta cannot be read."""
    meta_path = folder / (stem + META_SUFFIX)
    return make_info(meta_path, parse_meta(_read(meta_path), meta_path.name))


def make_info(meta_path: Path, meta: CheckpointMeta) -> CheckpointInfo:
    return CheckpointInfo(
        stem=meta_path.name.removesuffix(META_SUFFIX),
        meta_path=meta_path,
        data_path=meta_path.with_name(meta.data.name),
        step=meta.step,
        epoch=meta.epoch,
        final=meta.final,
        verified=meta.verified,
        reason=meta.reason,
        created_ms=meta.created_ms,
        size_bytes=sum(file.size_bytes for file in meta.files),
        meta=meta,
    )


def _read(path: Path) -> bytes:
    try:
        return read_regular(path, follow=True)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _parse_plain_state(content: bytes) -> dict[str, object] | None:
    """The `state` of a plain `{"state": {...}}` document, None for anything else."""
    try:
        document = msgspec.json.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(document, dict) or "schema_version" in document:
        return None
    state = document.get("state")
    return state if isinstance(state, dict) else None
