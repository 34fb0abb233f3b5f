"""Refs -> local files, downloaded and verified: base weights, parquet files, a checkpoint to resume from."""

import contextlib
import errno
import glob
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NoReturn

from gen_worker.contract.checkpoints.choice import META_SUFFIX
from gen_worker.contract.checkpoints.meta import parse_meta
from gen_worker.contract.files.hashes import hash_file
from gen_worker.errors import AuthError, Cause, InputError
from gen_worker.trainer.authz import TrainerAuthContext
from gen_worker.trainer.resolve import RefKind, ResolvedRef, resolve
from gen_worker.trainer.transfer.download import Outcome, Source, open_source
from gen_worker.trainer.transfer.input_cache import IndexEntry, InputCache, PartialDownload, key_of
from gen_worker.trainer.transfer.object_store import ObjectStore
from gen_worker.trainer.transfer.policy import Backoff, FaultKind, TransferFault, TransferOptions

# (ref for people, bytes so far, total bytes or None). It may raise to stop the transfer; what was received is kept.
OnProgress = Callable[[str, int, int | None], None]

# Attempts that receive this much each do not count as failures in a row.
PROGRESS_BYTES = 1 << 20
ROOM_BYTES = 16 << 20  # how often free space is looked at
MAX_META_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalInput:
    """A file (or local folder) to read. `digest` is None for local refs without one: they are not hashed."""

    path: Path
    size_bytes: int
    digest: str | None
    from_cache: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MaterializedInputs:
    base_model_path: Path | None
    parquet_paths: tuple[Path, ...]
    resume_checkpoint_path: Path | None


def fetch(
    ref: str | ResolvedRef,
    *,
    cache: InputCache,
    auth: TrainerAuthContext | None = None,
    base_dir: Path | None = None,
    on_progress: OnProgress | None = None,
    options: TransferOptions | None = None,
    max_bytes: int | None = None,
) -> LocalInput:
    """Download one file into `cache`; a local file is used in place. Blocks.

    InputError if it cannot be read, is larger than `max_bytes` or does not match its digest; AuthError if the credential
    was refused.
    """
    found = resolve(ref, base_dir=base_dir or Path.cwd()) if isinstance(ref, str) else ref
    if found.is_local:
        return _use_in_place(found)
    if found.kind is not RefKind.FILE:
        raise InputError(f"the input {found.display} is a {found.kind}; here one file is needed")
    download = _Download(found, cache, auth, on_progress, options or TransferOptions(), max_bytes)
    with _reported(found):
        return download.run()


class _UselessError(Exception):
    """The download is not to be kept; `error` is for the caller."""

    def __init__(self, error: InputError) -> None:
        super().__init__(error)
        self.error = error


class _Download:
    """Of one remote file into the cache."""

    def __init__(
        self,
        ref: ResolvedRef,
        cache: InputCache,
        auth: TrainerAuthContext | None,
        on_progress: OnProgress | None,
        options: TransferOptions,
        max_bytes: int | None,
    ) -> None:
        self._max_bytes = max_bytes
        self._room_until = -1  # bytes of this file for which there was space
        self._ref = ref
        self._cache = cache
        self._auth = auth
        self._on_progress = on_progress
        self._options = options
        self._key = key_of(ref.digest or f"{ref.scheme}:{ref.location}")

    def run(self) -> LocalInput:
        # Before the lock too: many ranks with a warm cache hash in parallel.
        if (hit := self._find_by_digest()) is not None:
            return hit
        with self._cache.locked(self._key, on_wait=lambda: self._tell(0, None)):
            if (hit := self._find_by_digest()) is not None:
                return hit
            known = None if self._ref.digest else self._cache.recall(self._key)
            if known and not self._cache.find(known.digest, size_bytes=known.size_bytes, rehash=False):
                known = None
            source = open_source(self._ref, self._auth, self._options)
            partial = self._cache.partial(self._key)
            try:
                partial.open()
                return self._try_until_done(source, partial, known)
            except _UselessError as exc:
                partial.restart()
                raise exc.error from None
            except OSError as exc:
                if exc.errno in (errno.ENOSPC, errno.EDQUOT):
                    partial.discard()  # it does not fit, and others need the space
                raise
            finally:
                if partial.size_bytes:
                    partial.close()
                else:
                    partial.discard()
                source.close()

    def _find_by_digest(self) -> LocalInput | None:
        if self._ref.digest is None:
            return None
        path = self._cache.find(self._ref.digest, size_bytes=None, rehash=True)
        return None if path is None else self._placed(self._ref.digest, path.stat().st_size, from_cache=True)

    def _try_until_done(
        self, source: Source, partial: PartialDownload, known: IndexEntry | None
    ) -> LocalInput:
        backoff = Backoff(self._options.retry, draw=self._options.draw)
        furthest = partial.size_bytes
        while True:
            began_at = partial.size_bytes
            try:
                outcome = source.attempt(
                    partial, known_validator=known.validator if known else None, on_bytes=self._on_bytes
                )
                if outcome is Outcome.NOT_MODIFIED:
                    assert known is not None
                    partial.discard()
                    return self._placed(known.digest, known.size_bytes, from_cache=True)
                self._check_digest(partial, was_resumed=began_at > 0)
                return self._commit(partial)
            except TransferFault as fault:
                if partial.size_bytes - furthest >= PROGRESS_BYTES:
                    backoff.reset()
                furthest = max(furthest, partial.size_bytes)
                delay_s = None
                if fault.kind is FaultKind.TRANSIENT:
                    delay_s = backoff.next_delay_s(fault.retry_after_s)
                if delay_s is None:
                    _refuse(self._ref, fault, attempts=max(1, backoff.failures))
            finally:
                # Also on a cancel: the next attempt continues from these bytes.
                partial.sync()
            self._options.sleep(delay_s)

    def _check_digest(self, partial: PartialDownload, *, was_resumed: bool) -> None:
        found = partial.digest()
        if self._ref.digest is None or found == self._ref.digest:
            return
        size_bytes = partial.size_bytes
        partial.restart()
        if was_resumed:
            raise TransferFault(FaultKind.TRANSIENT, "the rest of an earlier download does not match")
        raise InputError(
            f"the input {self._ref.display} has the digest {found} ({size_bytes} bytes), expected "
            f"{self._ref.digest}; the file has changed or the ref is wrong"
        )

    def _commit(self, partial: PartialDownload) -> LocalInput:
        size_bytes, validator, digest = partial.size_bytes, partial.validator, partial.digest()
        partial.commit()
        if self._ref.digest is None and validator:
            entry = IndexEntry(
                ref=self._ref.display, validator=validator, digest=digest, size_bytes=size_bytes
            )
            self._cache.remember(self._key, entry)
        return self._placed(digest, size_bytes, from_cache=False)

    def _placed(self, digest: str, size_bytes: int, *, from_cache: bool) -> LocalInput:
        """Under its own name: readers know the format by the suffix."""
        path = self._cache.place({self._ref.name: digest}) / self._ref.name
        return LocalInput(path=path, size_bytes=size_bytes, digest=digest, from_cache=from_cache)

    def _on_bytes(self, done_bytes: int, total_bytes: int | None) -> None:
        known_bytes = max(done_bytes, total_bytes or 0)
        if self._max_bytes is not None and known_bytes > self._max_bytes:
            size = f"has {total_bytes} bytes" if total_bytes else "is longer"
            raise _UselessError(
                InputError(
                    f"the input {self._ref.display} {size}, expected at most {self._max_bytes} bytes; "
                    "the file was replaced or the ref is wrong"
                )
            )
        if known_bytes > self._room_until:
            self._cache.require_room(known_bytes - done_bytes)
            self._room_until = known_bytes + ROOM_BYTES
        self._tell(done_bytes, total_bytes)

    def _tell(self, done_bytes: int, total_bytes: int | None) -> None:
        if self._on_progress is not None:
            self._on_progress(self._ref.display, done_bytes, total_bytes)


def materialize_inputs(
    *,
    base_model_ref: str | None,
    dataset_parquet_refs: Sequence[str],
    resume_checkpoint_ref: str | None,
    cache: InputCache,
    auth: TrainerAuthContext | None = None,
    base_dir: Path,
    on_progress: OnProgress | None = None,
    options: TransferOptions | None = None,
) -> MaterializedInputs:
    """Download everything that a job names. Blocks."""
    settings = options or TransferOptions()
    # All refs are parsed before the first download: a typo in the last one costs nothing.
    base_model = resolve(base_model_ref, base_dir=base_dir) if base_model_ref else None
    datasets = [resolve(ref, base_dir=base_dir) for ref in dataset_parquet_refs]
    checkpoint = resolve(resume_checkpoint_ref, base_dir=base_dir) if resume_checkpoint_ref else None

    def bring(ref: ResolvedRef, max_bytes: int | None = None) -> LocalInput:
        return fetch(
            ref, cache=cache, auth=auth, on_progress=on_progress, options=settings, max_bytes=max_bytes
        )

    return MaterializedInputs(
        base_model_path=_bring_model(base_model, bring, cache, settings) if base_model else None,
        parquet_paths=tuple(
            bring(file).path for dataset in datasets for file in expand(dataset, options=settings)
        ),
        resume_checkpoint_path=_bring_checkpoint(checkpoint, bring, cache) if checkpoint else None,
    )


def expand(ref: ResolvedRef, *, options: TransferOptions | None = None) -> list[ResolvedRef]:
    """The parquet files of a dataset ref, sorted; of a folder all below it except hidden ones."""
    if ref.kind is RefKind.FILE:
        return [ref]
    if ref.is_local:
        if ref.kind is RefKind.GLOB:
            names = glob.glob(ref.location, recursive=True)  # noqa: PTH207  (an absolute pattern)
            paths = [name for name in names if Path(name).is_file()]
        else:
            paths = [str(path) for path in Path(ref.location).rglob("*.parquet") if path.is_file()]
            paths = [path for path in paths if not _is_hidden(path[len(ref.location) :])]
    else:
        paths = _list_objects(ref, options or TransferOptions())
        if ref.kind is RefKind.FOLDER:
            paths = [p for p in paths if p.endswith(".parquet") and not _is_hidden(p[len(ref.location) :])]
    if not paths:
        wanted = "parquet file below it" if ref.kind is RefKind.FOLDER else "file that matches it"
        raise InputError(f"the dataset {ref.display} has no {wanted}; check the ref")
    return [_file_ref(ref, path) for path in sorted(paths)]


def _is_hidden(relative: str) -> bool:
    return any(part.startswith((".", "_")) for part in relative.split("/"))


def _file_ref(ref: ResolvedRef, location: str) -> ResolvedRef:
    display = location if ref.is_local else f"{ref.scheme}://{location}"
    return ResolvedRef(scheme=ref.scheme, location=location, kind=RefKind.FILE, digest=None, display=display)


def _list_objects(ref: ResolvedRef, options: TransferOptions) -> list[str]:
    backoff = Backoff(options.retry, draw=options.draw)
    while True:
        try:
            store = ObjectStore(ref.scheme, ref.location.partition("/")[0], options)
            if ref.kind is RefKind.FOLDER:
                return store.list_files(ref.location)
            # A key may look like a pattern: an existing key wins.
            return [ref.location] if store.exists(ref.location) else store.match(ref.location)
        except TransferFault as fault:
            delay_s = backoff.next_delay_s() if fault.kind is FaultKind.TRANSIENT else None
            if delay_s is None:
                _refuse(ref, fault, attempts=max(1, backoff.failures))
        options.sleep(delay_s)


def _bring_model(
    ref: ResolvedRef, bring: Callable[[ResolvedRef], LocalInput], cache: InputCache, options: TransferOptions
) -> Path:
    """One file, or all files of a folder."""
    if ref.is_local or ref.kind is RefKind.FILE:
        return bring(ref).path
    keys = [key for key in _list_objects(ref, options) if not key.endswith("/")]
    if not keys:
        raise InputError(f"the base model {ref.display} has no files; check the ref")
    base = ref.location if ref.kind is RefKind.FOLDER else ref.location.rpartition("/")[0] + "/"
    names = {key[len(base) :].lstrip("/"): key for key in keys}
    files = {_checked_name(name, ref): _digest_of(bring(_file_ref(ref, key))) for name, key in names.items()}
    with _reported(ref):
        return cache.place(files)


def _bring_checkpoint(
    ref: ResolvedRef, bring: Callable[[ResolvedRef, int | None], LocalInput], cache: InputCache
) -> Path:
    """The file; if it is remote, with its meta file and the files that this lists."""
    if ref.is_local or not ref.name.endswith((META_SUFFIX, ".pt", ".safetensors")):
        return bring(ref, None).path
    meta_ref = ref
    if not ref.name.endswith(META_SUFFIX):
        meta_ref = ref.sibling(ref.name.rpartition(".")[0] + META_SUFFIX, None)
    meta = bring(meta_ref, MAX_META_BYTES)
    files = {meta_ref.name: _digest_of(meta)}
    for name, size_bytes, digest in _listed_files(meta.path, meta_ref):
        is_named = name == ref.name
        if is_named and ref.digest and ref.digest != digest:
            raise InputError(
                f"the checkpoint {ref.display} has the digest {digest} in its meta file, but the ref says {ref.digest}; "
                "one of them is wrong"
            )
        part_ref = ref.sibling(name, ref.digest if is_named and ref.digest else digest)
        part = bring(part_ref, size_bytes)
        if part.size_bytes != size_bytes:
            raise InputError(
                f"the checkpoint file {part_ref.display} has {part.size_bytes} bytes, its meta file says "
                f"{size_bytes}; the upload was cut short or the file was replaced"
            )
        files[name] = _digest_of(part)
    if ref.name not in files:
        raise InputError(f"the checkpoint {ref.display} is not listed in {meta_ref.display}; check the ref")
    with _reported(ref):
        return cache.place(files) / ref.name


def _listed_files(path: Path, ref: ResolvedRef) -> Iterator[tuple[str, int, str]]:
    """CheckpointError where the meta file cannot be read or is damaged."""
    meta = parse_meta(path.read_bytes(), f"the checkpoint's meta file {ref.display}")
    for entry in meta.files:
        yield _checked_name(entry.name, ref), entry.size_bytes, entry.hash


def _checked_name(name: str, ref: ResolvedRef) -> str:
    """`name`; InputError where it leads out of its folder."""
    path = PurePosixPath(name)
    is_plain = name == str(path) and not path.is_absolute() and ".." not in path.parts and name != "."
    is_text = not any(ord(mark) < 32 or "\ud800" <= mark <= "\udfff" for mark in name)
    if not name or not is_plain or "\\" in name or not is_text:
        raise InputError(
            f"{ref.display} names the file {name!r}, which is not a plain name inside its folder; refused"
        )
    return name


def _digest_of(local: LocalInput) -> str:
    assert local.digest is not None
    return local.digest


def _use_in_place(ref: ResolvedRef) -> LocalInput:
    path = Path(ref.location)
    with _reported(ref):
        if ref.kind is RefKind.FOLDER:
            size_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            return LocalInput(path=path, size_bytes=size_bytes, digest=None, from_cache=False)
        if not path.is_file():
            raise InputError(f"the input {ref.display} does not exist (looked at {path}); check the path")
        found = hash_file(path) if ref.digest else None
        if found != ref.digest:
            raise InputError(
                f"the input {ref.display} has the digest {found}, expected {ref.digest}; "
                "the file has changed or the ref is wrong"
            )
        return LocalInput(path=path, size_bytes=path.stat().st_size, digest=found, from_cache=False)


@contextlib.contextmanager
def _reported(ref: ResolvedRef) -> Iterator[None]:
    """OSError as InputError."""
    try:
        yield
    except OSError as exc:
        place = f" at {exc.filename}" if exc.filename else ""
        raise InputError(
            f"the input {ref.display} could not be read or stored{place}: {exc.strerror or exc}; "
            "check the free space and the permissions"
        ) from exc


_ADVICE: Mapping[FaultKind, str] = {
    FaultKind.TRANSIENT: "check the network and the server, then start the run again: the download continues where it stopped",
    FaultKind.PERMANENT: "check the ref",
    FaultKind.MISSING: "check the ref: it does not exist",
    FaultKind.AUTH: "check that the credential is valid there and may read inputs",
}


def _refuse(ref: ResolvedRef, fault: TransferFault, *, attempts: int) -> NoReturn:
    tries = "" if attempts == 1 else f" after {attempts} attempts"
    error = AuthError if fault.kind is FaultKind.AUTH else InputError
    refusal = error(
        f"the input {ref.display} could not be fetched{tries}: {fault.reason}; {_ADVICE[fault.kind]}"
    )
    if fault.kind is FaultKind.TRANSIENT:
        refusal.cause = Cause.CONNECTION
    raise refusal from None
