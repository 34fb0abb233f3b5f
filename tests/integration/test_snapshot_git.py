"""Taking a snapshot: the code as it is on disk, without secrets, ignored files or junk, in git and outside it."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from trn.client.code.excludes import Excludes, Kind
from trn.client.code.git_tree import MAX_DIFF_BYTES
from trn.client.code.snapshot import Snapshot, take_snapshot
from trn.core.errors import InvalidRequestError
from trn.core.home import Home
from trn.core.snapshots import SnapshotStore, materialise

LIMIT = 64 << 20


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    home.make()
    return home


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    write(folder, {"train.py": "print(1)", "pkg/model.py": "x = 1", "README.md": "hello"})
    return folder


@pytest.fixture
def repo(folder: Path) -> Path:
    write(folder, {".gitignore": "*.log\ndata/\n", "noise.log": "no", "data/big.bin": "no"})
    git(folder, "init", "--initial-branch=main")
    git(folder, "add", ".")
    git(folder, "commit", "-m", "first")
    return folder


def write(folder: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "protocol.file.allow=always")
    command = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def paths(home: Home, snapshot: Snapshot) -> set[str]:
    return set(SnapshotStore(home.snapshots).manifest(snapshot.digest).paths())


def patch(home: Home, snapshot: Snapshot) -> bytes:
    store = SnapshotStore(home.snapshots)
    state = store.manifest(snapshot.digest).git
    assert state is not None
    return store.object_path(state.diff).read_bytes() if state.diff else b""


CODE = {"train.py", "pkg/model.py", "README.md"}


def test_the_work_tree_is_taken_as_it_is_on_disk(repo: Path, home: Home, tmp_path: Path) -> None:
    clean = take_snapshot(repo, home, max_bytes=LIMIT)
    assert paths(home, clean) == {*CODE, ".gitignore"}
    assert (clean.commit, clean.branch, clean.is_dirty) == (git(repo, "rev-parse", "HEAD"), "main", False)
    assert patch(home, clean) == b""
    write(repo, {"train.py": "print(2)", "new file é.py": "y = 2", "noise.log": "more"})
    (repo / "README.md").unlink()
    dirty = take_snapshot(repo, home, max_bytes=LIMIT)
    assert paths(home, dirty) == {"train.py", "pkg/model.py", ".gitignore", "new file é.py"}
    assert (dirty.commit, dirty.is_dirty, dirty.num_files) == (clean.commit, True, 4)
    assert b"+print(2)" in patch(home, dirty)
    assert b"-hello" in patch(home, dirty)
    materialise(home.snapshots, dirty.digest, tmp_path / "code")
    assert (tmp_path / "code" / "train.py").read_text() == "print(2)"


def test_code_that_is_edited_after_the_submit_is_not_what_runs(
    repo: Path, home: Home, tmp_path: Path
) -> None:
    first = take_snapshot(repo, home, max_bytes=LIMIT)
    (repo / "train.py").write_text("print(9)")  # as long as before
    second = take_snapshot(repo, home, max_bytes=LIMIT)
    assert first.digest != second.digest
    for snapshot, text in ((first, "print(1)"), (second, "print(9)")):
        materialise(home.snapshots, snapshot.digest, tmp_path / snapshot.digest)
        assert (tmp_path / snapshot.digest / "train.py").read_text() == text


def test_the_same_code_has_one_digest_wherever_it_lies_and_whatever_its_commit(
    repo: Path, home: Home, tmp_path: Path
) -> None:
    first = take_snapshot(repo, home, max_bytes=LIMIT)
    git(repo, "commit", "--allow-empty", "-m", "second")
    assert take_snapshot(repo, home, max_bytes=LIMIT).digest == first.digest
    git(tmp_path, "clone", str(repo), "clone")
    assert take_snapshot(tmp_path / "clone", home, max_bytes=LIMIT).digest == first.digest
    (repo / "train.py").chmod(0o755)
    assert take_snapshot(repo, home, max_bytes=LIMIT).digest != first.digest


def test_an_untracked_file_alone_makes_it_dirty_and_an_ignored_one_does_not(repo: Path, home: Home) -> None:
    write(repo, {"other.log": "ignored"})
    assert not take_snapshot(repo, home, max_bytes=LIMIT).is_dirty
    write(repo, {"new.py": ""})
    assert take_snapshot(repo, home, max_bytes=LIMIT).is_dirty


def test_a_subfolder_is_a_snapshot_of_itself(repo: Path, home: Home) -> None:
    write(repo, {"pkg/model.py": "x = 2", "train.py": "print(3)"})
    taken = take_snapshot(repo / "pkg", home, max_bytes=LIMIT)
    assert paths(home, taken) == {"model.py"}
    assert b"x = 2" in patch(home, taken)
    assert b"print(3)" not in patch(home, taken)


def test_a_repository_without_a_commit_is_taken_too(folder: Path, home: Home) -> None:
    git(folder, "init")
    taken = take_snapshot(folder, home, max_bytes=LIMIT)
    assert (paths(home, taken), taken.commit, taken.is_dirty) == (CODE, "", True)


def test_a_folder_that_the_outer_repository_ignores_is_taken_as_if_there_were_none(
    repo: Path, home: Home
) -> None:
    write(repo, {"data/inner/job.py": "z"})
    taken = take_snapshot(repo / "data" / "inner", home, max_bytes=LIMIT)
    assert (paths(home, taken), taken.commit) == ({"job.py"}, "")


def test_submodules_and_nested_repositories_are_files_like_others(
    repo: Path, home: Home, tmp_path: Path
) -> None:
    library = tmp_path / "library"
    write(library, {"lib.py": "a", ".gitignore": "*.tmp"})
    git(library, "init")
    git(library, "add", ".")
    git(library, "commit", "-m", "lib")
    git(repo, "submodule", "add", str(library), "vendor/library")
    git(repo, "commit", "-m", "with a submodule")
    git(repo, "clone", str(library), "nested")
    write(repo, {"vendor/library/untracked.py": "b", "vendor/library/x.tmp": "ignored there"})
    found = paths(home, take_snapshot(repo, home, max_bytes=LIMIT))
    assert {path for path in found if path.startswith(("vendor", "nested"))} == {
        "vendor/library/lib.py",
        "vendor/library/.gitignore",
        "vendor/library/untracked.py",
        "nested/lib.py",
        "nested/.gitignore",
    }


SECRETS = (
    ".env",
    ".env.production",
    "deploy.pem",
    "server.KEY",
    "id_rsa",
    "id_ed25519.pub",
    "gcp-credentials-prod.json",
    ".netrc",
    "sub/.npmrc",
    ".pypirc",
    ".aws/config",
    "conf/secrets.yaml",
)


def test_secrets_stay_where_they_are_and_each_is_named(repo: Path, home: Home) -> None:
    write(repo, dict.fromkeys(SECRETS, "hunter2") | {".env.example": "KEY=", "keys.py": "", "monkey.py": ""})
    git(repo, "add", "--force", ".env", "id_rsa")  # tracked or not
    taken = take_snapshot(repo, home, max_bytes=LIMIT)
    assert paths(home, taken) == {*CODE, ".gitignore", ".env.example", "keys.py", "monkey.py"}
    assert {skipped.path for skipped in taken.skipped} == set(SECRETS)
    assert {skipped.reason for skipped in taken.skipped} == {"it looks like a secret"}
    stored = b"".join(path.read_bytes() for path in home.snapshots.rglob("*") if path.is_file())
    assert b"hunter2" not in stored


def test_a_changed_secret_is_not_in_the_patch(repo: Path, home: Home) -> None:
    write(repo, {".env": "old"})
    git(repo, "add", "--force", ".")
    git(repo, "commit", "-m", "by mistake")
    write(repo, {".env": "hunter2", "train.py": "print(4)"})
    diff = patch(home, take_snapshot(repo, home, max_bytes=LIMIT))
    assert b"print(4)" in diff
    assert b"hunter2" not in diff


def test_a_long_patch_is_cut(repo: Path, home: Home) -> None:
    write(repo, {"train.py": "x" * 99 + "\n" + ("y" * 99 + "\n") * (MAX_DIFF_BYTES // 99)})
    taken = take_snapshot(repo, home, max_bytes=LIMIT)
    assert len(patch(home, taken)) == MAX_DIFF_BYTES
    state = SnapshotStore(home.snapshots).manifest(taken.digest).git
    assert state is not None
    assert state.is_diff_cut


def test_outside_git_junk_and_data_stay_behind(folder: Path, home: Home) -> None:
    junk = (
        "__pycache__/a.pyc",
        ".venv/x.py",
        "env3/pyvenv.cfg",
        "env3/lib/x.py",
        "node_modules/x.js",
        ".mypy_cache/x",
    )
    write(
        folder,
        dict.fromkeys((*junk, ".git-not/x", "model.pt", "w/a.safetensors", "d.parquet", ".ssh/known"), "x"),
    )
    taken = take_snapshot(folder, home, max_bytes=LIMIT)
    assert paths(home, taken) == {*CODE, ".git-not/x"}
    assert {skipped.path for skipped in taken.skipped} == {"*.pt", "*.safetensors", "*.parquet", ".ssh/"}
    assert (taken.commit, taken.is_dirty) == ("", False)


def test_trnignore_has_the_last_word(repo: Path, home: Home) -> None:
    write(
        repo,
        {"secrets.py": "a module", "notes/a.txt": "", "notes/b.md": "", "deep/notes/c.txt": "", "out/x": ""},
    )
    write(repo, {".trnignore": "# not code\n/notes/*.txt\nout/\n!secrets.py\n"})
    found = paths(home, take_snapshot(repo, home, max_bytes=LIMIT, extra_excludes=["README*"]))
    assert found == {*CODE, ".gitignore", ".trnignore", "secrets.py", "notes/b.md", "deep/notes/c.txt"} - {
        "README.md"
    }


@pytest.mark.parametrize(
    ("pattern", "path", "is_out"),
    [
        ("*.txt", "a/b.txt", True),
        ("/*.txt", "a/b.txt", False),
        ("a/*.txt", "a/b.txt", True),
        ("a/*.txt", "a/c/b.txt", False),
        ("a/**/b.txt", "a/b.txt", True),
        ("a/**/b.txt", "a/c/d/b.txt", True),
        ("**/b.txt", "b.txt", True),
        ("build", "build/x/y", True),
        ("build/", "build", False),
        ("build/", "x/build/y", True),
        ("[!a].py", "a.py", False),
        ("[!a].py", "b.py", True),
        ("a+b?.py", "a+bc.py", True),
        ("a+b?.py", "aab/.py", False),
        (r"\!x", "!x", True),
        ("x", "X", False),
    ],
)
def test_patterns_mean_what_they_mean_in_a_gitignore(pattern: str, path: str, is_out: bool) -> None:
    assert (Excludes([(pattern, Kind.UNWANTED)]).kind(path) is not None) == is_out


def test_too_much_is_refused_with_the_biggest_files_and_the_way_out(repo: Path, home: Home) -> None:
    write(repo, {f"big{n}.bin": "x" * (n * 200_000) for n in range(1, 8)})
    with pytest.raises(InvalidRequestError) as caught:
        take_snapshot(repo, home, max_bytes=1_000_000)
    assert caught.value.faults == [f"big{n}.bin: {n * 0.2:.1f} MB" for n in (7, 6, 5, 4, 3)]
    assert "5.6 MB in 11 files, more than the 1.0 MB allowed" in str(caught.value)
    assert ".trnignore" in str(caught.value)
    assert not list(home.snapshots.glob("objects/*/*"))


def test_the_home_is_never_part_of_a_snapshot(repo: Path) -> None:
    home = Home(repo / ".trn")
    home.make()
    first = take_snapshot(repo, home, max_bytes=LIMIT)
    assert paths(home, first) == {*CODE, ".gitignore"}
    assert take_snapshot(repo, home, max_bytes=LIMIT).digest == first.digest
    assert not first.is_dirty


def test_links_inside_are_kept_and_links_out_are_named(repo: Path, home: Home, tmp_path: Path) -> None:
    (repo / "inside.py").symlink_to("pkg/model.py")
    (repo / "pkg" / "up").symlink_to("..")
    (repo / "outside").symlink_to("../../elsewhere")
    (repo / "absolute").symlink_to("/etc/hostname")
    taken = take_snapshot(repo, home, max_bytes=LIMIT)
    assert {skipped.path for skipped in taken.skipped} == {"outside", "absolute"}
    materialise(home.snapshots, taken.digest, tmp_path / "code")
    assert (tmp_path / "code" / "inside.py").read_text() == "x = 1"
    assert (tmp_path / "code" / "pkg" / "up").resolve() == tmp_path / "code"


def test_a_tracked_folder_that_became_a_link_is_a_link(repo: Path, home: Home, tmp_path: Path) -> None:
    (repo / "pkg").rename(repo / "renamed")
    (repo / "pkg").symlink_to("renamed")
    taken = take_snapshot(repo, home, max_bytes=LIMIT)
    materialise(home.snapshots, taken.digest, tmp_path / "code")
    assert (tmp_path / "code" / "pkg").is_symlink()
    assert (tmp_path / "code" / "pkg" / "model.py").read_text() == "x = 1"


def test_pipes_sockets_and_odd_names_are_passed_over(folder: Path, home: Home) -> None:
    os.mkfifo(folder / "pipe")
    Path(os.fsdecode(os.fsencode(folder) + b"/bad-\xff.py")).write_text("x")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "sock"))
        taken = take_snapshot(folder, home, max_bytes=LIMIT)
    assert paths(home, taken) == CODE
    assert {skipped.path for skipped in taken.skipped} == {"pipe", "sock", "bad-\\udcff.py"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_cannot_be_read_is_an_error_that_names_it(folder: Path, home: Home) -> None:
    (folder / "train.py").chmod(0)
    with pytest.raises(InvalidRequestError, match=r"train\.py: Permission denied"):
        take_snapshot(folder, home, max_bytes=LIMIT)


def test_what_is_no_folder_is_refused(tmp_path: Path, home: Home) -> None:
    with pytest.raises(InvalidRequestError, match="is not a folder"):
        take_snapshot(tmp_path / "nowhere", home, max_bytes=LIMIT)


def test_without_git_the_folder_is_taken_all_the_same(
    repo: Path, home: Home, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    taken = take_snapshot(repo, home, max_bytes=LIMIT)
    assert (taken.commit, paths(home, taken) >= CODE) == ("", True)


def test_a_hooks_own_variables_do_not_lead_elsewhere(
    repo: Path, home: Home, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wanted = take_snapshot(repo, home, max_bytes=LIMIT)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other.git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "index"))
    assert take_snapshot(repo, home, max_bytes=LIMIT) == wanted


def test_a_repository_that_git_will_not_read_is_an_error_in_its_words(repo: Path, home: Home) -> None:
    (repo / ".git" / "config").write_text("[core\n")
    with pytest.raises(InvalidRequestError, match="git cannot list the files"):
        take_snapshot(repo, home, max_bytes=LIMIT)


def test_the_index_of_the_owner_is_left_alone(repo: Path, home: Home) -> None:
    os.utime(repo / "train.py")  # git would like to refresh its index
    before = (repo / ".git" / "index").stat().st_mtime_ns
    take_snapshot(repo, home, max_bytes=LIMIT)
    assert (repo / ".git" / "index").stat().st_mtime_ns == before
    assert not (repo / ".git" / "index.lock").exists()


def settle(home: Home) -> Path:
    """The cache as if it had been written when its files were old; their ctime cannot be set."""
    (cache,) = (home.snapshots / "stat-cache").iterdir()
    document = msgspec.msgpack.decode(cache.read_bytes())
    document["taken_ns"] += 10_000_000_000
    cache.write_bytes(msgspec.msgpack.encode(document))
    return cache


def test_an_unchanged_file_is_not_read_again_and_a_changed_one_always(
    repo: Path, home: Home, tmp_path: Path
) -> None:
    first = take_snapshot(repo, home, max_bytes=LIMIT)
    cache = settle(home)
    assert take_snapshot(repo, home, max_bytes=LIMIT).digest == first.digest
    # If a file were read again its hash would be found out; so a lie in the cache is told on.
    lie = msgspec.msgpack.decode(cache.read_bytes())
    store = SnapshotStore(home.snapshots)
    with store.adding():
        other = store.put_bytes(b"print(7)").sha256
    lie["files"]["train.py"][-1] = other
    cache.write_bytes(msgspec.msgpack.encode(lie))
    told = take_snapshot(repo, home, max_bytes=LIMIT)
    assert other in {file.sha256 for file in store.manifest(told.digest).files}
    # Within two seconds of the cache's time nothing is trusted.
    lie["taken_ns"] -= 10_000_000_000
    cache.write_bytes(msgspec.msgpack.encode(lie))
    assert take_snapshot(repo, home, max_bytes=LIMIT).digest == first.digest
    settle(home)
    # Changed with its size and mtime put back, as `cp -p` does it: its ctime tells.
    found = (repo / "train.py").stat()
    (repo / "train.py").write_text("print(5)")
    os.utime(repo / "train.py", ns=(found.st_atime_ns, found.st_mtime_ns))
    changed = take_snapshot(repo, home, max_bytes=LIMIT)
    materialise(home.snapshots, changed.digest, tmp_path / "code")
    assert (tmp_path / "code" / "train.py").read_text() == "print(5)"


def test_a_damaged_cache_and_a_lost_object_only_cost_time(repo: Path, home: Home, tmp_path: Path) -> None:
    first = take_snapshot(repo, home, max_bytes=LIMIT)
    for path in (home.snapshots / "stat-cache").iterdir():
        path.write_bytes(b"\xc1 no")
    for path in home.snapshots.glob("objects/*/*"):
        path.unlink()
    assert take_snapshot(repo, home, max_bytes=LIMIT).digest == first.digest
    materialise(home.snapshots, first.digest, tmp_path / "code")


TAKE = """
import sys
from pathlib import Path
from trn.client.code.snapshot import take_snapshot
from trn.core.home import Home
sys.stdin.readline()
print(take_snapshot(Path(sys.argv[1]), Home(Path(sys.argv[2])), max_bytes=1 << 26).digest)
"""


def test_many_processes_at_once_take_one_snapshot(repo: Path, home: Home, tmp_path: Path) -> None:
    write(repo, {f"many/m{number}.py": f"n = {number}" for number in range(60)})
    command = [sys.executable, "-c", TAKE, str(repo), str(home.root)]
    takers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(8)
    ]
    for taker in takers:
        assert taker.stdin is not None
        taker.stdin.write("go\n")
        taker.stdin.flush()
    said = {taker.communicate(timeout=120)[0].strip() for taker in takers}
    assert {taker.returncode for taker in takers} == {0}
    assert said == {take_snapshot(repo, home, max_bytes=LIMIT).digest}
    materialise(home.snapshots, said.pop(), tmp_path / "code")
    assert len(list((tmp_path / "code" / "many").iterdir())) == 60
    assert list((home.snapshots / "staging").iterdir()) == []
    assert len(list((home.snapshots / "manifests").iterdir())) == 1


def test_what_python_leaves_beside_untracked_code_is_no_code_but_what_git_tracks_is(
    home: Home, repo: Path
) -> None:
    write(repo, {"wandb/kept.py": "x = 1"})
    git(repo, "add", "--force", "wandb")
    git(repo, "commit", "-m", "tracked though it looks like junk")
    before = take_snapshot(repo, home, max_bytes=LIMIT)
    write(repo, {"__pycache__/train.cpython-311.pyc": "no", "pkg/.mypy_cache/x.json": "no"})
    after = take_snapshot(repo, home, max_bytes=LIMIT)
    assert (after.digest, after.is_dirty) == (before.digest, False)
    assert "wandb/kept.py" in paths(home, after)


def test_a_folder_outside_git_with_too_many_files_is_given_up_before_it_is_looked_through(
    home: Home, folder: Path
) -> None:
    assert take_snapshot(folder, home, max_bytes=LIMIT, max_files=3).num_files == 3
    write(folder, {"data.csv": "1,2"})
    with pytest.raises(InvalidRequestError, match="not in a git work tree and has more than 3 files"):
        take_snapshot(folder, home, max_bytes=LIMIT, max_files=3)
