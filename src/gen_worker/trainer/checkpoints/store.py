"""The checkpoints of a run's folder: names, listing, verifying, loading, and which one to resume from."""

import hashlib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gen_worker.errors import CheckpointError
from gen_worker.trainer.checkpoints.image import hash_file
from gen_worker.trainer.checkpoints.meta import CheckpointMeta, FileEntry, parse_meta

META_SUFFIX = ".meta.json"
# `step-00000010`, `final`, and `….previous`: what a save of the same name sets aside while it replaces it.
STEM = re.compile(r"(?:step-(?P<step>\d{8,})|final)(?P<previous>\.previous)?")
DATA_SUFFIXES = (".pt", ".safetensors")
_PIECE = 1 << 20


def checkpoint_stem(step: int, *, final: bool) -> str:
    return "final" if final else f"step-{step:08d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """A checkpoint by its meta alone; whether its bytes still match is only known after loading it."""

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
        """Older to newer: step, then a primary before what it set aside, then final."""
        return (self.step, not self.stem.endswith(".previous"), self.final, self.created_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedOver:
    """A checkpoint that resume did not take, and why."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A loaded checkpoint: its files matched their hashes. Tensors are fresh, writable memory."""

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


# Named here because the class has a method called `list`.
_Infos = list[CheckpointInfo]
_PassedOver = list[PassedOver]


class CheckpointStore:
    """Reads a checkpoints folder. Never writes, never deletes."""

    def __init__(self, checkpoints_dir: Path) -> None:
        self._dir = checkpoints_dir

    def list(self) -> _Infos:
        """Newest first, from names and metas. What cannot be read is left out: see `unreadable`."""
        infos, _ = self._scan()
        return infos

    def unreadable(self) -> _PassedOver:
        """Files named like checkpoints that have no meta, or one that cannot be read."""
        _, passed_over = self._scan()
        return passed_over

    def newest_verified(self) -> tuple[Checkpoint | None, _PassedOver]:
        """The newest checkpoint whose bytes match, and those newer than it that were passed over, with reasons."""
        infos, unreadable = self._scan()
        passed_over: _PassedOver = []

        def newer(step: int) -> _PassedOver:
            return [item for item in unreadable if step_of(item.path) >= step] + passed_over

        for info in infos:
            if not info.verified:
                passed_over.append(PassedOver(path=info.meta_path, reason=f"not verified: {info.reason}"))
                continue
            try:
                return self._load(info.meta_path, info.meta), newer(info.step)
            except CheckpointError as error:
                passed_over.append(PassedOver(path=info.meta_path, reason=str(error)))
        return None, newer(0)

    def load(self, meta_or_data_path: Path) -> Checkpoint:
        """Load one checkpoint, verified or not, by its meta, its data file, or a plain `{"state": {...}}` file."""
        path = Path(meta_or_data_path)
        if path.suffix in DATA_SUFFIXES:
            path = path.with_name(path.stem + META_SUFFIX)
            if not path.exists():
                raise CheckpointError(
                    f"{meta_or_data_path} has no {path.name} beside it: it was never committed"
                )
        content = _read(path)
        plain = _parse_plain_state(content)
        if plain is not None:
            return _plain_checkpoint(path, plain)
        return self._load(path, parse_meta(content, path.name))

    def verify(self, meta_path: Path) -> CheckpointMeta:
        """Compare every file of a checkpoint with its hash, without building tensors; CheckpointError if one differs."""
        meta = parse_meta(_read(meta_path), meta_path.name)
        for entry in meta.files:
            check_file(meta_path.parent / entry.name, entry)
        return meta

    def _scan(self) -> tuple[_Infos, _PassedOver]:
        infos: _Infos = []
        passed_over: _PassedOver = []
        names = sorted(path.name for path in self._dir.iterdir()) if self._dir.is_dir() else []
        claimed: set[str] = set()
        for name in names:
            stem = name.removesuffix(META_SUFFIX)
            if stem == name or STEM.fullmatch(stem) is None:
                continue
            try:
                info = read_info(self._dir, stem)
            except CheckpointError as error:
                passed_over.append(PassedOver(path=self._dir / name, reason=str(error)))
                claimed.update(stem + suffix for suffix in DATA_SUFFIXES)
            else:
                infos.append(info)
                claimed.add(info.data_path.name)
        for name in names:
            path = self._dir / name
            if path.suffix in DATA_SUFFIXES and STEM.fullmatch(path.stem) and name not in claimed:
                reason = f"no {path.stem}{META_SUFFIX}: it was never committed"
                if f"{path.stem}{META_SUFFIX}.damaged" in names:
                    reason = "its bytes did not match their hash when read back after the save"
                passed_over.append(PassedOver(path=path, reason=reason))
        infos.sort(key=lambda info: info.order, reverse=True)
        return infos, passed_over

    def _load(self, meta_path: Path, meta: CheckpointMeta) -> Checkpoint:
        from gen_worker.trainer.checkpoints.state_tree import decode
        from gen_worker.trainer.checkpoints.tensors import StorageBuffers

        if meta.byteorder != sys.byteorder:
            raise CheckpointError(
                f"{meta_path.name} was written on a {meta.byteorder}-endian machine; this one is not"
            )
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


def step_of(path: Path) -> float:
    """The step in a file's name; a final one, whose name has none, counts as the newest."""
    match = STEM.match(path.name)
    return int(match["step"]) if match and match["step"] else float("inf")


def read_info(folder: Path, stem: str) -> CheckpointInfo:
    """The checkpoint called `stem` as its meta tells it; CheckpointError if that cannot be read."""
    meta_path = folder / (stem + META_SUFFIX)
    meta = parse_meta(_read(meta_path), meta_path.name)
    return CheckpointInfo(
        stem=stem,
        meta_path=meta_path,
        data_path=folder / meta.data.name,
        step=meta.step,
        epoch=meta.epoch,
        final=meta.final,
        verified=meta.verified,
        reason=meta.reason,
        created_ms=meta.created_ms,
        size_bytes=sum(file.size_bytes for file in meta.files),
        meta=meta,
    )


def check_size(path: Path, entry: FileEntry) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{entry.name} cannot be read: {error.strerror}") from error
    if size != entry.size_bytes:
        what = "truncated" if size < entry.size_bytes else "too long"
        raise CheckpointError(f"{entry.name} is {what}: {size} bytes, its meta says {entry.size_bytes}")


def check_file(path: Path, entry: FileEntry, *, from_disk: bool = False) -> None:
    """Size and hash, or CheckpointError."""
    check_size(path, entry)
    try:
        found = hash_file(path, from_disk=from_disk)
    except OSError as error:
        raise CheckpointError(f"{entry.name} cannot be read: {error.strerror}") from error
    _compare(entry, found)


def is_intact(folder: Path, meta: CheckpointMeta) -> bool:
    """Whether every file of the checkpoint is there and matches its hash."""
    try:
        for entry in meta.files:
            check_file(folder / entry.name, entry)
    except CheckpointError:
        return False
    return True


def _compare(entry: FileEntry, found: str) -> None:
    if found != entry.hash:
        raise CheckpointError(f"hash mismatch: {entry.name} is {found}, its meta says {entry.hash}")


def _fill(path: Path, meta: CheckpointMeta, buffers: Sequence[memoryview]) -> None:
    """Read the data file once, hashing all of it and keeping the storages' bytes where they belong.

    Nothing is given out before the hash has matched, so tensors are built only from verified bytes.
    """
    digest = hashlib.sha256()
    gap = memoryview(bytearray(_PIECE))
    storages = sorted(enumerate(meta.storages), key=lambda item: (item[1].offset, item[1].size_bytes))
    position = 0
    with path.open("rb", buffering=0) as file:

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
                if storage.offset < position:
                    raise CheckpointError(f"{meta.data.name}: storage {number} overlaps another one")
                skip_to(storage.offset)
                take(buffers[number])
            skip_to(meta.data.size_bytes)
        except OSError as error:
            raise CheckpointError(f"{meta.data.name} cannot be read: {error.strerror}") from error
    _compare(meta.data, "sha256:" + digest.hexdigest())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _json(raw: msgspec.Raw, where: str) -> object:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{where} cannot be read: {error}") from error


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
