"""What a run was made of: its code snapshot, the difference to another one, and documents about it."""

import contextlib
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

import msgspec

from gen_worker.contract.checkpoints.choice import scan
from gen_worker.contract.files.regular import read_regular
from trn.core.errors import NotFoundError, TrnError
from trn.core.home import Home
from trn.core.runs import RunRecord
from trn.core.snapshot_manifest import FileEntry, GitState, Manifest
from trn.core.snapshots import SnapshotStore

MAX_DIFFED = 512 << 10  # bytes of one file
MAX_DIFF = 4 << 20  # of all of them
MAX_SHOWN = 2 << 20
MAX_DOCUMENT = 16 << 20
CHECKED_FOR_BINARY = 8192

DocumentName = Literal["job", "environment", "doctor", "dataset", "certificate"]
DOCUMENT_NAMES: tuple[DocumentName, ...] = get_args(DocumentName)


class CodeFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The code snapshot of a run. `snapshot` is empty where none was taken."""

    snapshot: str
    frozen_from: str
    files: tuple[FileEntry, ...] = ()
    git: GitState | None = None
    size_bytes: int = 0


class FileDifference(msgspec.Struct, frozen=True, kw_only=True):
    """`diff` is a unified diff; empty for files that are binary or too long."""

    path: str
    status: str  # added, removed, changed
    diff: str = ""
    is_binary: bool = False
    is_cut: bool = False  # too long to be shown


class CodeDifference(msgspec.Struct, frozen=True, kw_only=True):
    """From the code of `against` to that of the run."""

    against: str
    files: list[FileDifference]


def read_code(home: Home, run: RunRecord) -> CodeFiles:
    if not run.snapshot:
        return CodeFiles(snapshot="", frozen_from="")
    manifest = SnapshotStore(home.snapshots).manifest(run.snapshot)
    return CodeFiles(
        snapshot=run.snapshot,
        frozen_from=run.frozen_from,
        files=manifest.files,
        git=manifest.git,
        size_bytes=manifest.size_bytes,
    )


def read_code_file(home: Home, run: RunRecord, sha256: str) -> bytes:
    """A file that the run's snapshot lists, by its hash. NotFoundError."""
    store = SnapshotStore(home.snapshots)
    known = {file.sha256 for file in store.manifest(run.snapshot).files} if run.snapshot else set()
    if sha256 not in known:
        raise NotFoundError(f"the code of run {run.run_id} has no file {sha256[:16]!r}")
    return read_regular(store.object_path(sha256), MAX_SHOWN)


def diff_code(home: Home, run: RunRecord, other: RunRecord) -> CodeDifference:
    """NotFoundError where one of them has no snapshot."""
    for each in (run, other):
        if not each.snapshot:
            raise NotFoundError(f"run {each.run_id} has no code snapshot")
    store = SnapshotStore(home.snapshots)
    new, old = (_by_path(store.manifest(each.snapshot)) for each in (run, other))
    files: list[FileDifference] = []
    left = MAX_DIFF
    for path in sorted({*new, *old}):
        before, after = old.get(path), new.get(path)
        if before is not None and after is not None and before.sha256 == after.sha256:
            continue
        found = _diff_file(store, path, before, after, left)
        left -= len(found.diff)
        files.append(found)
    return CodeDifference(against=other.run_id, files=files)


def _by_path(manifest: Manifest) -> dict[str, FileEntry]:
    return {file.path: file for file in manifest.files}


def _diff_file(
    store: SnapshotStore, path: str, before: FileEntry | None, after: FileEntry | None, left: int
) -> FileDifference:
    status = "added" if before is None else "removed" if after is None else "changed"
    if any(file is not None and file.size_bytes > MAX_DIFFED for file in (before, after)):
        return FileDifference(path=path, status=status, is_cut=True)
    old, new = (
        b"" if file is None else read_regular(store.object_path(file.sha256)) for file in (before, after)
    )
    if any(b"\0" in text[:CHECKED_FOR_BINARY] for text in (old, new)):
        return FileDifference(path=path, status=status, is_binary=True)
    lines = difflib.unified_diff(
        old.decode(errors="replace").splitlines(),
        new.decode(errors="replace").splitlines(),
        fromfile=path if before is not None else "/dev/null",
        tofile=path if after is not None else "/dev/null",
        lineterm="",
    )
    diff = "\n".join(lines)
    if len(diff) > left:
        return FileDifference(path=path, status=status, is_cut=True)
    return FileDifference(path=path, status=status, diff=diff)


def list_documents(home: Home, run: RunRecord, trainer: str) -> list[DocumentName]:
    """Those that there are."""
    found: list[DocumentName] = []
    for name in DOCUMENT_NAMES:
        with contextlib.suppress(NotFoundError, OSError):
            read_document(home, run, trainer, name)
            found.append(name)
    return found


def read_document(home: Home, run: RunRecord, trainer: str, name: DocumentName) -> bytes:
    """As JSON. NotFoundError where there is none."""
    folder = home.run(run.run_id)
    missing = NotFoundError(f"run {run.run_id} has no document {name!r}")
    try:
        if name == "job":
            return _read(folder.job)
        if name == "environment":
            return _read(folder.report)
        if name == "doctor":
            report = msgspec.json.decode(_read(folder.report), type=dict)
            found = report.get("doctor")
        elif name == "dataset":
            found = _read_manifest(folder.checkpoints)
        else:
            found = _read_certificate(home, run, trainer)
    except (FileNotFoundError, msgspec.MsgspecError) as fault:
        raise missing from fault
    if not found:
        raise missing
    return msgspec.json.encode(found)


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """What `trn check` found out about a trainer class, as far as it is read here."""

    trainer: str
    is_sound: bool
    code: dict[str, str] = {}  # file -> SHA-256; of older releases: empty

    def is_about(self, trainer: str, code: Mapping[str, str]) -> bool:
        """Whether it tested this trainer class with these files, path -> SHA-256: each below one folder under
        the same name. Any other code may be inexact, also code with a copy of the tested file beside it."""
        if self.trainer != trainer or not self.code:
            return False
        tested, checksum = next(iter(self.code.items()))
        folders = {
            tested.removesuffix(f"/{path}")
            for path, found in code.items()
            if found == checksum and tested.endswith(f"/{path}")
        }
        return any(
            {f"{folder}/{path}": found for path, found in code.items()}.items() >= self.code.items()
            for folder in folders
        )


def read_certificates(home: Home) -> list[tuple[Certificate, bytes]]:
    """All that there are, with their documents, the newest first."""
    found: list[tuple[float, Certificate, bytes]] = []
    for path in home.checks.glob("*/certificate.json"):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            document = _read(path)
            found.append((path.stat().st_mtime, msgspec.json.decode(document, type=Certificate), document))
    found.sort(key=lambda item: item[0], reverse=True)
    return [(certificate, document) for _, certificate, document in found]


def hash_snapshot(home: Home, snapshot: str) -> dict[str, str]:
    """Its files with their hashes; empty where there is none."""
    with contextlib.suppress(TrnError, OSError):
        if snapshot:
            return {file.path: file.sha256 for file in SnapshotStore(home.snapshots).manifest(snapshot).files}
    return {}


def _read_certificate(home: Home, run: RunRecord, trainer: str) -> object:
    """The newest about this code."""
    code = hash_snapshot(home, run.snapshot)
    for certificate, document in read_certificates(home):
        if certificate.is_about(trainer, code):
            return msgspec.json.decode(document)
    return None


def _read_manifest(checkpoints: Path) -> object:
    """Of the data, as the newest checkpoint has it."""
    for info in scan(checkpoints)[0]:
        identity = msgspec.json.decode(info.meta.identity)
        if isinstance(identity, dict) and identity.get("dataset_manifest"):
            return identity["dataset_manifest"]
    return None


def _read(path: Path) -> bytes:
    return read_regular(path, MAX_DOCUMENT)
