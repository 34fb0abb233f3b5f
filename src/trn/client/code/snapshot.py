"""Take a snapshot of a folder's code, so that a queued run trains what was submitted."""

import contextlib
import errno
import hashlib
import os
import stat
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from gen_worker.contract.files.durable import replace_file
from trn.client.code.excludes import IGNORE_FILE, JUNK, Excludes, Kind, read_excludes
from trn.client.code.git_tree import GitTree, read_diff, read_git
from trn.client.code.secret_content import HoldsSecretError, SecretFinder, find_secret
from trn.core.errors import InvalidRequestError
from trn.core.home import Home
from trn.core.snapshot_manifest import FileEntry, GitState, LinkEntry, Manifest, is_plain, stays_inside
from trn.core.snapshots import SnapshotStore, StoredFile

RACY_NS = 2_000_000_000  # a file this young may change again without a change of its times
NUM_WRITERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    path: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    folder: str  # as it was named, absolute
    digest: str
    num_files: int
    size_bytes: int
    commit: str = ""
    branch: str = ""
    is_dirty: bool = False
    skipped: tuple[Skipped, ...] = ()


class Known(msgspec.Struct, frozen=True, array_like=True):
    """A file as it was when it was read last."""

    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    sha256: str


class StatCache(msgspec.Struct, frozen=True, kw_only=True):
    version: int = 2  # 1: files were not looked through for secrets
    folder: str = ""
    taken_ns: int = 0
    files: dict[str, Known] = {}

    def find(self, path: str, found: os.stat_result) -> str:
        """The hash of that file; "" where it may have changed."""
        known = self.files.get(path)
        if known is None or max(known.mtime_ns, known.ctime_ns) >= self.taken_ns - RACY_NS:
            return ""
        return known.sha256 if known == _known(found, known.sha256) else ""


@dataclass(slots=True)
class Code:
    """What of a folder is code."""

    files: dict[str, os.stat_result] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)
    data: Counter[str] = field(default_factory=Counter)
    secrets: set[str] = field(default_factory=set)  # found by their content

    def skip(self, path: str, reason: str) -> None:
        self.skipped.append(Skipped(path=path.encode(errors="backslashreplace").decode(), reason=reason))

    def leave_out(self, path: str, fault: HoldsSecretError) -> None:
        """A file that holds a secret: it is listed first, because code may depend on it."""
        del self.files[path]
        self.secrets.add(path)
        reason = f"it seems to hold {fault}; `!/{path}` in {IGNORE_FILE} includes it anyway"
        self.skipped.insert(0, Skipped(path=path, reason=reason))


def take_snapshot(
    folder: Path,
    home: Home,
    *,
    max_bytes: int,
    max_files: int | None = None,
    extra_excludes: Iterable[str] = (),
) -> Snapshot:
    """Store the folder's code as it is on disk now, and its digest. Blocks; several may run at once.

    In a git work tree: tracked and not ignored files, without untracked junk. Elsewhere: all but junk and data; a folder
    with more than `max_files` is refused. Never secrets.
    """
    named = folder.absolute()
    folder = folder.resolve()
    if not folder.is_dir():
        raise InvalidRequestError(f"{folder} is not a folder: give the one that holds the code")
    taken_ns = time.time_ns()
    tree = read_git(folder)
    excludes = read_excludes(folder, extra_excludes, is_in_git=tree is not None)
    code = find_code(folder, tree, excludes, barred=home.root.resolve(), max_files=max_files)
    _check_size(code, folder, max_bytes)
    store = SnapshotStore(home.snapshots)
    with store.adding():
        files = _store_files(store, folder, code, excludes, taken_ns)
        manifest = Manifest(
            files=files,
            symlinks=tuple(LinkEntry(path=path, target=code.links[path]) for path in sorted(code.links)),
            git=_store_git(store, tree, excludes, code),
            created_ms=taken_ns // 1_000_000,
        )
        digest = store.put_manifest(manifest)
    git = manifest.git or GitState()
    return Snapshot(
        folder=str(named),
        digest=digest,
        num_files=len(files),
        size_bytes=manifest.size_bytes,
        commit=git.commit,
        branch=git.branch,
        is_dirty=git.is_dirty,
        skipped=tuple(code.skipped),
    )


def find_code(
    folder: Path, tree: GitTree | None, excludes: Excludes, *, barred: Path, max_files: int | None = None
) -> Code:
    """The code of that folder, without `barred`, the home, if it is inside."""
    code = Code()
    home = f"{barred.relative_to(folder).as_posix()}/" if barred.is_relative_to(folder) else None
    paths = _walk(folder, "", excludes, code) if tree is None else _without_junk(tree)
    for count, path in enumerate(paths, start=1):
        if max_files is not None and count > max_files:
            raise InvalidRequestError(
                f"{folder} is not in a git work tree and has more than {max_files:,} files"
            )
        if home is not None and f"{path}/".startswith(home):
            continue
        _sort_in(folder, path, excludes, code)
    for path in [*code.files, *code.links]:
        # A folder that became a link since git indexed it: its files are no longer here.
        parts = path.split("/")
        if any("/".join(parts[:depth]) in code.links for depth in range(1, len(parts))):
            code.files.pop(path, None)
            code.links.pop(path, None)
    for suffix, count in sorted(code.data.items()):
        code.skip(f"*{suffix}", f"{count} file{'s' if count > 1 else ''} with {Kind.DATA.value}")
    return code


def _without_junk(tree: GitTree) -> Iterable[str]:
    """Tracked files are always included; untracked ones only if they are not junk."""
    junk = Excludes((rule, Kind.UNWANTED) for rule in JUNK)
    return (path for path in tree.paths if path not in tree.untracked or junk.kind(path) is None)


def _walk(folder: Path, prefix: str, excludes: Excludes, code: Code) -> Iterable[str]:
    """Every path below that is not in an excluded folder."""
    try:
        with os.scandir(folder) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
    except OSError as fault:
        raise _unreadable([f"{prefix or folder}: {fault.strerror}"]) from fault
    if prefix and any(entry.name == "pyvenv.cfg" for entry in found):
        return
    for entry in found:
        path = prefix + entry.name
        if not entry.is_dir(follow_symlinks=False):
            yield path
        elif (kind := excludes.kind(f"{path}/")) is None:
            yield from _walk(Path(entry.path), f"{path}/", excludes, code)
        elif kind is Kind.SECRET:
            code.skip(f"{path}/", kind.value)


def _sort_in(folder: Path, path: str, excludes: Excludes, code: Code) -> None:
    kind = excludes.kind(path)
    if kind is Kind.UNWANTED:
        return
    try:
        found = os.lstat(f"{folder}/{path}")
    except (FileNotFoundError, NotADirectoryError):
        return  # tracked, and deleted on disk
    if kind is Kind.DATA:
        code.data[Path(path).suffix] += 1
    elif kind is not None:
        code.skip(path, kind.value)
    elif not path.isprintable() and not _is_utf8(path):
        code.skip(path, "its name is not UTF-8")
    elif stat.S_ISREG(found.st_mode):
        code.files[path] = found
    elif stat.S_ISLNK(found.st_mode):
        target = str((folder / path).readlink())
        if _is_utf8(target) and stays_inside(path, target):
            code.links[path] = target
        else:
            code.skip(path, f"a link that leaves the folder, to {target}")
    elif not stat.S_ISDIR(found.st_mode):
        code.skip(path, "neither a file nor a link")


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_size(code: Code, folder: Path, max_bytes: int) -> None:
    total = sum(found.st_size for found in code.files.values())
    if total > max_bytes:
        biggest = sorted(code.files.items(), key=lambda item: -item[1].st_size)[:5]
        raise InvalidRequestError(
            f"the code in {folder} has {_megabytes(total)} in {len(code.files)} files, more than the"
            f" {_megabytes(max_bytes)} allowed: list data in {folder / IGNORE_FILE} (one pattern a"
            " line, as in .gitignore), or raise max_snapshot_bytes in the settings. The largest are",
            [f"{path}: {_megabytes(found.st_size)}" for path, found in biggest],
        )


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB" if size_bytes >= 100_000 else f"{size_bytes} bytes"


def _store_files(
    store: SnapshotStore, folder: Path, code: Code, excludes: Excludes, taken_ns: int
) -> tuple[FileEntry, ...]:
    """Store new files; only files that may have changed are read. Files with a secret are left out."""
    name = hashlib.sha256(os.fsencode(folder)).hexdigest()[:32]
    cache = _read_cache(store.stat_cache / name, folder)
    known: dict[str, Known] = {}
    unread = []
    for path, found in code.files.items():
        sha256 = cache.find(path, found)
        if sha256 and store.has(sha256, found.st_size):
            known[path] = cache.files[path]
        else:
            unread.append(path)
    faults = []
    with ThreadPoolExecutor(NUM_WRITERS) if len(unread) > 1 else contextlib.nullcontext() as pool:
        read = [(path, folder / path) for path in unread]
        puts = (pool.map if pool else map)(
            lambda item: _put(store, item[1], is_wanted=excludes.is_asked_for(item[0])), read
        )
        for path, stored in zip(unread, puts, strict=True):
            if isinstance(stored, HoldsSecretError):
                code.leave_out(path, stored)
            elif isinstance(stored, OSError):
                if stored.errno != errno.ENOENT:
                    faults.append(f"{path}: {stored.strerror}")
            else:
                assert stored.found is not None
                known[path] = _known(stored.found, stored.sha256, stored.size_bytes)
    if faults:
        raise _unreadable(faults)
    # Files that `.trnignore` includes were not scanned, and it may not include them the next time.
    looked_through = {path: file for path, file in known.items() if not excludes.is_asked_for(path)}
    if unread or looked_through.keys() != cache.files.keys():
        new = StatCache(folder=str(folder), taken_ns=taken_ns, files=looked_through)
        with contextlib.suppress(OSError):
            _write_cache(store.stat_cache / name, new)
    return tuple(
        FileEntry(
            path=path,
            sha256=known[path].sha256,
            mode=0o755 if found.st_mode & 0o100 else 0o644,
            size_bytes=known[path].size_bytes,
        )
        for path, found in sorted(code.files.items())
        if path in known
    )


def _put(store: SnapshotStore, path: Path, *, is_wanted: bool) -> StoredFile | OSError | HoldsSecretError:
    try:
        return store.put_file(path) if is_wanted else store.put_file(path, inspect=SecretFinder())
    except (OSError, HoldsSecretError) as fault:
        return fault


def _known(found: os.stat_result, sha256: str, size_bytes: int | None = None) -> Known:
    return Known(
        found.st_size if size_bytes is None else size_bytes,
        found.st_mtime_ns,
        found.st_ctime_ns,
        found.st_ino,
        sha256,
    )


def _unreadable(faults: list[str]) -> InvalidRequestError:
    return InvalidRequestError(
        f"some files cannot be read: make them readable, or list them in {IGNORE_FILE}", faults
    )


def _read_cache(path: Path, folder: Path) -> StatCache:
    try:
        cache = msgspec.msgpack.decode(path.read_bytes(), type=StatCache)
    except (OSError, msgspec.MsgspecError):
        return StatCache()
    is_ours = cache.folder == str(folder) and cache.version == StatCache().version
    return cache if is_ours else StatCache()


def _write_cache(path: Path, cache: StatCache) -> None:
    replace_file(path, msgspec.msgpack.encode(cache), sync="none", mode=0o600)


def _store_git(store: SnapshotStore, tree: GitTree | None, excludes: Excludes, code: Code) -> GitState | None:
    if tree is None:
        return None
    wanted = [
        path
        for path in tree.changed
        if excludes.kind(path) is None and path not in code.secrets and is_plain(path)
    ]
    diff, is_cut = _read_clean_diff(tree, wanted, excludes) if tree.commit and wanted else (b"", False)
    return GitState(
        commit=tree.commit,
        branch=tree.branch,
        is_dirty=bool(
            tree.changed or tree.untracked & (code.files.keys() | code.links.keys()) or not tree.commit
        ),
        diff=store.put_bytes(diff).sha256 if diff else "",
        is_diff_cut=is_cut,
    )


def _read_clean_diff(tree: GitTree, paths: list[str], excludes: Excludes) -> tuple[bytes, bool]:
    """Without files whose patch holds a secret: a removed secret is still in the removed lines."""
    diff, is_cut = read_diff(tree, paths)
    if not find_secret(diff):
        return diff, is_cut
    clean = [
        path for path in paths if excludes.is_asked_for(path) or not find_secret(read_diff(tree, [path])[0])
    ]
    return read_diff(tree, clean) if clean else (b"", is_cut)
