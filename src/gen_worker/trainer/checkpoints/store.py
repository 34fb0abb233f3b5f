"""Loads the checkpoints of a run's folder."""

import contextlib
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gen_worker.contract.checkpoints.choice import (
    META_SUFFIX,
    CheckpointInfo,
    Choice,
    PassedOver,
    check_layout,
    choose_named,
    choose_newest,
    meta_path_of,
    read_info,
    read_named,
)
from gen_worker.contract.checkpoints.file_check import check_file, check_size, compare_hash
from gen_worker.contract.checkpoints.meta import CheckpointMeta
from gen_worker.contract.files.regular import open_regular
from gen_worker.errors import CheckpointError

_PIECE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A loaded checkpoint, whose files matched their hashes. Its tensors are new, writable memory."""

    step: int
    epoch: int
    final: bool
    state: Mapping[str, object]
    loop: Mapping[str, object]
    cursor: Mapping[str, object] | None
    rng: Mapping[str, object]
    identity: Mapping[str, object]
    metric: tuple[str, float, str] | None
    author_files: Path | None
    author_payload: Mapping[str, object] | None
    path: Path
    meta: CheckpointMeta | None  # None: read from a plain state file


class CheckpointStore:
    """Reads a checkpoints folder. Never writes, never deletes."""

    def __init__(self, checkpoints_dir: Path) -> None:
        self._dir = checkpoints_dir

    def choose(
        self,
        *,
        is_non_finite_taken: bool = False,
        is_candidate: Callable[[CheckpointInfo], bool] = lambda _info: True,
        of_run: str | None = None,
        nonce: str = "",
    ) -> Choice[Checkpoint]:
        """As `choose_newest`, loaded."""
        return choose_newest(
            self._dir,
            self._load,
            is_non_finite_taken=is_non_finite_taken,
            is_candidate=is_candidate,
            of_run=of_run,
            nonce=nonce,
        )

    def newest_verified(self) -> tuple[Checkpoint | None, list[PassedOver]]:
        """The newest checkpoint that verifies, and the newer ones that do not, with reasons."""
        choice = self.choose()
        return choice.taken, list(choice.passed_over)

    def load(self, meta_or_data_path: Path) -> Checkpoint:
        """Load one checkpoint, finite or not, by its meta, its data file, or a plain `{"state": {...}}` file."""
        path = Path(meta_or_data_path)
        named = read_named(path)
        return _plain_checkpoint(path, named) if isinstance(named, dict) else self._load(named)

    def load_found(self, info: CheckpointInfo) -> Checkpoint:
        """As `load`, of a checkpoint whose meta was read."""
        return self._load(info)

    def choose_named(self, path: Path, *, is_non_finite_taken: bool) -> Checkpoint:
        """By its meta, its data file, or a plain state; CheckpointError where a resume must not take it."""
        chosen = choose_named(
            path,
            self._load,
            is_non_finite_taken=is_non_finite_taken,
            how_to_force="set resume_non_finite to true to take it",
        )
        return _plain_checkpoint(path, chosen) if isinstance(chosen, dict) else chosen

    def choose_named_or_older(self, path: Path, *, is_non_finite_taken: bool) -> Choice[Checkpoint]:
        """That one, or the newest before it, of the same run, that a resume may take."""
        named = None
        with contextlib.suppress(CheckpointError):  # an unreadable meta is among the reasons
            named = read_info(path.parent, meta_path_of(path).name.removesuffix(META_SUFFIX))
        return choose_newest(
            path.parent,
            self._load,
            is_non_finite_taken=is_non_finite_taken,
            is_candidate=lambda info: named is None or info.order <= named.order,
            of_run=None if named is None else named.meta.run_id,
            nonce="" if named is None else named.meta.nonce,
        )

    def _load(self, info: CheckpointInfo) -> Checkpoint:
        from gen_worker.trainer.checkpoints.files.state_tree import decode
        from gen_worker.trainer.checkpoints.files.tensors import StorageBuffers

        meta, meta_path = info.meta, info.meta_path
        check_layout(meta, meta_path.name)
        folder = meta_path.parent
        data_path = folder / meta.data.name
        check_size(data_path, meta.data)
        for entry in meta.files[1:]:
            check_file(folder / entry.name, entry)
        buffers = StorageBuffers(meta, meta_path.name)
        _fill(data_path, meta, [memory.data for memory in buffers.bytes])
        tensors = buffers.build()

        def tree(raw: msgspec.Raw, field: str) -> Mapping[str, object] | None:
            where = f"{field} in {meta_path.name}"
            value = decode(_json(raw, where), tensors, where=where)
            if value is not None and not isinstance(value, dict):
                raise CheckpointError(f"{where} is a {type(value).__name__}, expected a dict")
            return value

        metric = meta.metric
        return Checkpoint(
            step=meta.step,
            epoch=meta.epoch,
            final=meta.final,
            state=tree(meta.state, "state") or {},
            loop=tree(meta.loop, "loop") or {},
            cursor=tree(meta.cursor, "cursor"),
            rng=tree(meta.rng, "rng") or {},
            identity=tree(meta.identity, "identity") or {},
            metric=(metric.name, metric.value, metric.mode) if metric and metric.value is not None else None,
            author_files=folder / meta.author_dir if meta.author_dir else None,
            author_payload=tree(meta.author_payload, "author_payload"),
            path=data_path,
            meta=meta,
        )


def _fill(path: Path, meta: CheckpointMeta, buffers: Sequence[memoryview]) -> None:
    """Read the data file once into the buffers of its storages; CheckpointError if its hash differs."""
    digest = hashlib.sha256()
    gap = memoryview(bytearray(_PIECE))
    storages = sorted(enumerate(meta.storages), key=lambda item: (item[1].offset, item[1].size_bytes))
    position = 0
    with os.fdopen(open_regular(path, follow=True), "rb", buffering=0) as file:

        def take(view: memoryview) -> None:
            nonlocal position
            start = 0
            while start < len(view):
                count = file.readinto(view[start : start + _PIECE])
                if not count:
                    raise CheckpointError(f"{meta.data.name} is truncated: it ended at byte {position}")
                digest.update(view[start : start + count])
                start += count
                position += count

        def skip_to(end: int) -> None:
            while position < end:
                take(gap[: min(_PIECE, end - position)])

        try:
            for number, storage in storages:
                if storage.size_bytes == 0:
                    continue
                skip_to(storage.offset)
                take(buffers[number])
            skip_to(meta.data.size_bytes)
        except OSError as error:
            raise CheckpointError(f"{meta.data.name} cannot be read: {error.strerror}") from error
    compare_hash(meta.data, "sha256:" + digest.hexdigest())


def _json(raw: msgspec.Raw, where: str) -> object:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{where} cannot be read: {error}") from error


def _plain_checkpoint(path: Path, state: dict[str, object]) -> Checkpoint:
    return Checkpoint(
        step=0,
        epoch=0,
        final=False,
        state=state,
        loop={},
        cursor=None,
        rng={},
        identity={},
        metric=None,
        author_files=None,
        author_payload=None,
        path=path,
        meta=None,
    )
