"""The manifest of a code snapshot: which paths hold which bytes, and what a sound one looks like."""

import hashlib
import re

import msgspec

from trn.core.errors import InvalidRequestError

VERSION = 1
DIGEST = re.compile(r"[0-9a-f]{64}\Z")


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    path: str  # relative, with '/'
    sha256: str
    mode: int  # 0o644 or 0o755
    size_bytes: int


class LinkEntry(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    target: str  # relative, inside the folder


class GitState(msgspec.Struct, frozen=True, kw_only=True):
    """Where the code came from."""

    commit: str = ""
    branch: str = ""
    is_dirty: bool = False
    diff: str = ""  # the object that holds `git diff HEAD`
    is_diff_cut: bool = False


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    version: int = VERSION
    files: tuple[FileEntry, ...] = ()
    symlinks: tuple[LinkEntry, ...] = ()
    git: GitState | None = None
    created_ms: int = 0

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def paths(self) -> list[str]:
        return [*(file.path for file in self.files), *(link.path for link in self.symlinks)]

    def folders(self) -> list[str]:
        """Those that hold an entry, relative and without their own parents."""
        return sorted({path.rpartition("/")[0] for path in self.paths()})

    @property
    def digest(self) -> str:
        """SHA-256 over the content: neither time nor git nor the order of the entries is part of it."""
        content = {
            "version": self.version,
            "files": sorted([file.path, file.sha256, file.mode, file.size_bytes] for file in self.files),
            "symlinks": sorted([link.path, link.target] for link in self.symlinks),
        }
        return hashlib.sha256(msgspec.json.encode(content)).hexdigest()


def check_manifest(manifest: Manifest, digest: str) -> None:
    """InvalidRequestError for one that is not that digest's, or that names a place outside its folder."""
    if manifest.version != VERSION:
        raise InvalidRequestError(
            f"snapshot {digest} has version {manifest.version}; this trn reads version {VERSION}"
        )
    if manifest.digest != digest:
        raise InvalidRequestError(f"the manifest of snapshot {digest} is damaged: submit the run again")
    faults: list[str] = []
    paths = manifest.paths()
    named = set(paths)
    if len(named) != len(paths):
        faults.append("a path is named twice")
    for path in paths:
        parts = path.split("/")
        if not is_plain(path):
            faults.append(f"{path!r} is not a plain relative path")
        elif any("/".join(parts[:depth]) in named for depth in range(1, len(parts))):
            faults.append(f"{path!r} lies below a path that is no folder")
    faults += [
        f"{link.path!r} points to {link.target!r}, outside the snapshot"
        for link in manifest.symlinks
        if not stays_inside(link.path, link.target)
    ]
    faults += [
        f"{file.path!r} has no valid hash, mode or size"
        for file in manifest.files
        if not DIGEST.match(file.sha256) or file.mode not in (0o644, 0o755) or file.size_bytes < 0
    ]
    if manifest.git is not None and manifest.git.diff and not DIGEST.match(manifest.git.diff):
        faults.append(f"{manifest.git.diff!r} is no hash of a diff")
    if faults:
        raise InvalidRequestError(f"snapshot {digest} is refused", faults)


def is_plain(path: str) -> bool:
    """Whether it is a relative path that names something below its folder."""
    return "\0" not in path and all(part not in ("", ".", "..") for part in path.split("/"))


def stays_inside(path: str, target: str) -> bool:
    """Whether a link at `path` with that target cannot lead out of the folder, whatever other links there are.

    '..' may only stand at its beginning: behind a name it would climb from wherever that name links to.
    """
    if not target or target.startswith("/") or "\0" in target:
        return False
    parts = target.rstrip("/").split("/")
    num_up = next((at for at, part in enumerate(parts) if part != ".."), len(parts))
    rest = parts[num_up:]
    return num_up <= path.count("/") and not {"", ".."} & set(rest)
