"""Which code a run trains: what is frozen now, or what is there when it starts."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from trn.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from trn.cli.output import Output
    from trn.client.code.snapshot import Snapshot
    from trn.core.home import Home

C = TypeVar("C", bound=Callable[..., Any])

# Of a folder that nobody asked to freeze and of which git says nothing: more than this is hardly code.
MAX_UNASKED_FILES, MAX_UNASKED_BYTES = 2_000, 32 << 20
NUM_SKIPPED_SHOWN = 5
NUM_CHANGED_SHOWN = 5

# What a program is made of. A new file of another kind is something that somebody or a run left in the folder.
CODE_SUFFIXES = frozenset(
    (".py", ".pyi", ".pyx", ".pxd", ".so", ".sh", ".c", ".cc", ".cpp", ".cxx", ".h", ".hpp", ".cu", ".cuh")
)
# What a program may read: it counts where it was frozen, and is no longer as it was.
CONFIG_SUFFIXES = frozenset((".yaml", ".yml", ".toml", ".json", ".ini", ".cfg"))


def code_option(default: str) -> Callable[[C], C]:
    """Adds `--code` to a command; `default` says what is trained without it."""

    def add(command: C) -> C:
        return click.option(
            "--code",
            "code_dir",
            metavar="DIR",
            type=click.Path(path_type=Path),
            help=f"Freeze the code of this folder (default: {default}).",
        )(command)

    return add


class FrozenCode(NamedTuple):
    """A snapshot; without one, why there is none."""

    snapshot: "Snapshot | None" = None
    reason: str = ""

    @property
    def digest(self) -> str:
        return self.snapshot.digest if self.snapshot else ""

    @property
    def folder(self) -> str:
        return self.snapshot.folder if self.snapshot else ""

    def say(self, output: "Output") -> None:
        """What of the code is frozen, and what was left out of it."""
        if self.reason:
            output.say(f"code: not frozen: {self.reason}; --code DIR freezes a folder")
        if self.snapshot is None:
            return
        snapshot = self.snapshot
        files = "1 file" if snapshot.num_files == 1 else f"{snapshot.num_files:,} files"
        commit = f", commit {snapshot.commit[:10]}" if snapshot.commit else ""
        changes = " with changes" if snapshot.commit and snapshot.is_dirty else ""
        output.say(f"code: {files}, {snapshot.size_bytes:,} bytes{commit}{changes}")
        for skipped in snapshot.skipped[:NUM_SKIPPED_SHOWN]:
            output.say(f"  without {skipped.path}: {skipped.reason}")
        if len(snapshot.skipped) > NUM_SKIPPED_SHOWN:
            output.say(f"  and without {len(snapshot.skipped) - NUM_SKIPPED_SHOWN} more")


def freeze(
    home: "Home", base_dir: Path, *, code_dir: Path | None, env_files: Sequence[Path] = ()
) -> FrozenCode:
    """Freeze `code_dir`, else the job's own folder. InvalidRequestError where that was asked for and cannot be. Blocks.

    What is given as `--env-file` may hold secrets, and is no code. The job's folder is not asked for: where it is in no git work tree and holds much, or what cannot be read, it is left.
    """
    from trn.client.code.snapshot import take_snapshot
    from trn.core.settings import read_settings

    if code_dir is not None and not code_dir.is_dir():
        raise InvalidRequestError(
            f"--code {code_dir}: there is no such folder: name the one that holds the code"
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
        return FrozenCode(reason=str(fault).partition("\n")[0])


def find_changed_files(home: "Home", folder: Path, snapshot: str) -> list[str]:
    """Which files of code in that folder are not as in the snapshot of it; none where that cannot be told. Blocks."""
    from trn.core.errors import TrnError
    from trn.core.snapshots import SnapshotStore

    store = SnapshotStore(home.snapshots)
    try:
        digest = freeze(home, folder, code_dir=folder).digest
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
    """As many as fit a line."""
    more = f" and {len(paths) - NUM_CHANGED_SHOWN} more" if len(paths) > NUM_CHANGED_SHOWN else ""
    return ", ".join(paths[:NUM_CHANGED_SHOWN]) + more


def _is_code(path: str, *, is_new: bool) -> bool:
    suffix = Path(path).suffix.lower()
    return suffix in CODE_SUFFIXES or (suffix in CONFIG_SUFFIXES and not is_new)


def _is_in_git(folder: Path) -> bool:
    return any((place / ".git").exists() for place in (folder, *folder.parents))
