"""Which code a run trains: a snapshot taken now, or the files on disk when it starts."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from trn.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from trn.client.code.snapshot import Snapshot
    from trn.client.wire_requests import SubmitOptions
    from trn.core.home import Home

# Of a folder outside git, without --code: more than this is probably not only code.
MAX_UNASKED_FILES, MAX_UNASKED_BYTES = 2_000, 32 << 20
NUM_SKIPPED_SHOWN = 5
NUM_CHANGED_SHOWN = 5

# A new file of another kind is probably the output of a run.
CODE_SUFFIXES = frozenset(
    (".py", ".pyi", ".pyx", ".pxd", ".so", ".sh", ".c", ".cc", ".cpp", ".cxx", ".h", ".hpp", ".cu", ".cuh")
)
# These count only if they were in the snapshot.
CONFIG_SUFFIXES = frozenset((".yaml", ".yml", ".toml", ".json", ".ini", ".cfg"))


class FrozenCode(NamedTuple):
    """A snapshot; without one, why there is none."""

    snapshot: "Snapshot | None" = None
    reason: str = ""

    @property
    def options(self) -> "SubmitOptions":
        """Of a submit; none where the code is read when the run starts."""
        if self.snapshot is None:
            return {}
        return {"snapshot": self.snapshot.digest, "frozen_from": self.snapshot.folder}

    def lines(self) -> list[str]:
        """What the snapshot has, and what it leaves out."""
        said = [f"code: no snapshot: {self.reason}; --code DIR takes one of a folder"] if self.reason else []
        if self.snapshot is None:
            return said
        snapshot = self.snapshot
        files = "1 file" if snapshot.num_files == 1 else f"{snapshot.num_files:,} files"
        commit = f", commit {snapshot.commit[:10]}" if snapshot.commit else ""
        changes = " with changes" if snapshot.commit and snapshot.is_dirty else ""
        said.append(f"code: {files}, {snapshot.size_bytes:,} bytes{commit}{changes}")
        said += [
            f"  without {skipped.path}: {skipped.reason}" for skipped in snapshot.skipped[:NUM_SKIPPED_SHOWN]
        ]
        if len(snapshot.skipped) > NUM_SKIPPED_SHOWN:
            said.append(f"  and without {len(snapshot.skipped) - NUM_SKIPPED_SHOWN} more")
        return said


def freeze(
    home: "Home", base_dir: Path, *, code_dir: Path | None, env_files: Sequence[Path] = ()
) -> FrozenCode:
    """A snapshot of `code_dir`, else of the job's own folder. Blocks.

    `env_files` may hold secrets and are left out. Without `code_dir`, a folder outside git that is large or cannot be
    read gives no snapshot; with it, an InvalidRequestError.
    """
    from trn.client.code.snapshot import take_snapshot
    from trn.core.settings import read_settings

    if code_dir is not None and not code_dir.is_dir():
        raise InvalidRequestError(
            f"--code {code_dir}: there is no such folder: give the one that holds the code"
        )
    folder = code_dir or base_dir
    max_bytes = read_settings(home.settings).max_snapshot_bytes
    without = [
        f"/{path.resolve().relative_to(folder.resolve()).as_posix()}"
        for path in env_files
        if path.resolve().is_relative_to(folder.resolve())
    ]
    if code_dir is not None or _is_in_git(folder):
        return FrozenCode(take_snapshot(folder, home, max_bytes=max_bytes, extra_excludes=without))
    try:
        return FrozenCode(
            take_snapshot(
                folder,
                home,
                max_bytes=min(max_bytes, MAX_UNASKED_BYTES),
                max_files=MAX_UNASKED_FILES,
                extra_excludes=without,
            )
        )
    except InvalidRequestError as fault:
        return FrozenCode(reason=fault.reason)


def find_changed_files(home: "Home", folder: Path, snapshot: str) -> list[str]:
    """Files of code that differ from the snapshot; none if that cannot be found out. Blocks."""
    from trn.core.errors import TrnError
    from trn.core.snapshots import SnapshotStore

    store = SnapshotStore(home.snapshots)
    try:
        digest = freeze(home, folder, code_dir=folder).options["snapshot"]
        if digest == snapshot:
            return []
        was, is_ = (
            {file.path: file.sha256 for file in store.manifest(each).files} for each in (snapshot, digest)
        )
    except TrnError:
        return []
    return sorted(
        path
        for path in was.keys() | is_.keys()
        if was.get(path) != is_.get(path) and _is_code(path, is_new=path not in was)
    )


def listed(paths: list[str]) -> str:
    """The first few."""
    more = f" and {len(paths) - NUM_CHANGED_SHOWN} more" if len(paths) > NUM_CHANGED_SHOWN else ""
    return ", ".join(paths[:NUM_CHANGED_SHOWN]) + more


def _is_code(path: str, *, is_new: bool) -> bool:
    suffix = Path(path).suffix.lower()
    return suffix in CODE_SUFFIXES or (suffix in CONFIG_SUFFIXES and not is_new)


def _is_in_git(folder: Path) -> bool:
    return any((place / ".git").exists() for place in (folder, *folder.parents))
