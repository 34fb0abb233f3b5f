"""The files, commit and changes of a folder, from git. Never writes, never prompts."""

import os
import shutil
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trn.core.errors import InvalidRequestError, UnavailableError

TIMEOUT_S = 60.0
MAX_DIFF_BYTES = 4 << 20
ARGUMENT_BYTES = 64 << 10  # of paths in one call

# Variables of a hook would name another repository; refreshing the index would disturb the user's git.
GIT = (
    *("env", "-u", "GIT_DIR", "-u", "GIT_WORK_TREE", "-u", "GIT_INDEX_FILE", "-u", "GIT_PREFIX"),
    *("GIT_OPTIONAL_LOCKS=0", "GIT_TERMINAL_PROMPT=0", "LC_ALL=C"),
    *("git", "-c", "core.fsmonitor=false", "-c", "core.quotePath=false"),
)
LIST = ("ls-files", "-z", "-t", "--cached", "--others", "--exclude-standard")


@dataclass(frozen=True, slots=True, kw_only=True)
class GitTree:
    """The work tree of a folder. Paths are relative to that folder."""

    root: Path
    prefix: str  # of the folder below the root: "" or "a/b/"
    paths: tuple[str, ...]  # tracked or not ignored
    commit: str
    branch: str
    changed: tuple[str, ...]  # tracked, and not as in the commit
    untracked: frozenset[str]


def read_git(folder: Path) -> GitTree | None:
    """None if the folder is in no work tree, is ignored there, or there is no git."""
    root = next((place for place in (folder, *folder.parents) if (place / ".git").exists()), None)
    if root is None or shutil.which("git") is None:
        return None
    ask = ("status", "--porcelain=v2", "--branch", "-z", "--untracked-files=no", "--no-renames", "--", ".")
    with _start(folder, *LIST) as listing, _start(folder, *ask) as status:
        listed, state = _finish(listing, folder), _finish(status, folder)
    if listed is None or state is None:
        return None
    prefix = "" if folder == root else folder.relative_to(root).as_posix() + "/"
    paths, untracked = _paths(folder, listed)
    if not paths and prefix:
        return None
    commit = branch = ""
    changed = []
    for line in os.fsdecode(state).split("\0"):
        if line.startswith("# branch.oid ") and not line.endswith("(initial)"):
            commit = line.removeprefix("# branch.oid ")
        elif line.startswith("# branch.head ") and not line.endswith("(detached)"):
            branch = line.removeprefix("# branch.head ")
        elif line[:2] in ("1 ", "u "):
            path = line.split(" ", 8 if line[0] == "1" else 10)[-1]
            changed.append(path.removeprefix(prefix))
    return GitTree(
        root=root,
        prefix=prefix,
        paths=tuple(paths),
        commit=commit,
        branch=branch,
        changed=tuple(changed),
        untracked=untracked,
    )


def read_diff(tree: GitTree, paths: Sequence[str]) -> tuple[bytes, bool]:
    """`git diff HEAD` of those paths, and whether it was cut at MAX_DIFF_BYTES."""
    diff = b""
    for group in _groups([tree.prefix + path for path in paths]):
        process = _start(
            *(
                tree.root,
                "--literal-pathspecs",
                "-c",
                "diff.noprefix=false",
                "-c",
                "diff.mnemonicPrefix=false",
            ),
            *("diff", "HEAD", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", "--", *group),
            is_quiet=True,
        )
        timer = threading.Timer(TIMEOUT_S, process.kill)
        timer.start()
        try:
            assert process.stdout is not None
            diff += process.stdout.read(MAX_DIFF_BYTES + 1 - len(diff))
            process.stdout.close()
        finally:
            timer.cancel()
            process.kill()
            process.wait()
        if len(diff) > MAX_DIFF_BYTES:
            return diff[:MAX_DIFF_BYTES], True
    return diff, False


def _paths(folder: Path, listed: bytes) -> tuple[list[str], frozenset[str]]:
    """The paths of a listing, with those of submodules and nested repositories."""
    found: dict[str, None] = {}  # a path in conflict is listed several times
    untracked: set[str] = set()
    for line in os.fsdecode(listed).split("\0"):
        if not line:
            continue
        path = line[2:].rstrip("/")
        place = f"{folder}/{path}"
        names = [path]
        if os.path.isdir(place) and not os.path.islink(place):  # noqa: PTH112, PTH114 (for every file there is)
            names = [f"{path}/{name}" for name in _nested(Path(place))]
        found.update(dict.fromkeys(names))
        if line[0] == "?":
            untracked.update(names)
    return list(found), frozenset(untracked)


def _nested(folder: Path) -> list[str]:
    if not (folder / ".git").exists():
        return []  # a submodule that is not checked out
    with _start(folder, *LIST) as listing:
        listed = _finish(listing, folder)
    return _paths(folder, listed)[0] if listed else []


def _groups(paths: Sequence[str]) -> list[list[str]]:
    groups: list[list[str]] = []
    size_bytes = ARGUMENT_BYTES
    for path in paths:
        if size_bytes >= ARGUMENT_BYTES:
            groups.append([])
            size_bytes = 0
        groups[-1].append(path)
        size_bytes += len(path)
    return groups


def _start(folder: Path, *arguments: str, is_quiet: bool = False) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*GIT, "-C", str(folder), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if is_quiet else subprocess.PIPE,
    )


def _finish(process: subprocess.Popen[bytes], folder: Path) -> bytes | None:
    """Its output; None if the folder is not in a work tree after all."""
    try:
        out, said = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as fault:
        process.kill()
        process.communicate()
        raise UnavailableError(f"git did not answer within {TIMEOUT_S:g} s in {folder}") from fault
    if process.returncode == 0:
        return out
    words = said.decode(errors="replace").strip()
    if "not a git repository" in words or "must be run in a work tree" in words:
        return None
    raise InvalidRequestError(f"git cannot list the files of {folder}: {words}")
