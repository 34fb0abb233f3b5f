"""The snapshot store: content is what its hash says, a manifest cannot lead out of its folder, a kill leaves nothing half."""

import hashlib
import os
import random
import signal
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trn.core.errors import InvalidRequestError, NotFoundError, UnavailableError
from trn.core.snapshot_manifest import FileEntry, GitState, LinkEntry, Manifest, check_manifest, stays_inside
from trn.core.snapshots import SMALL_BYTES, SnapshotStore, collect_garbage, materialise


def entry(path: str, data: bytes = b"x", mode: int = 0o644) -> FileEntry:
    return FileEntry(path=path, sha256=hashlib.sha256(data).hexdigest(), mode=mode, size_bytes=len(data))


def put(store: SnapshotStore, files: dict[str, bytes], git: GitState | None = None) -> str:
    with store.adding():
        for data in files.values():
            store.put_bytes(data)
        return store.put_manifest(
            Manifest(files=tuple(entry(path, data) for path, data in files.items()), git=git)
        )


def age(*paths: Path) -> None:
    for path in paths:
        os.utime(path, (1000, 1000))


def tree(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def check_store(store: SnapshotStore) -> int:
    """Every object is what its name says, every manifest is whole and has all its objects."""
    for path in store.objects.glob("*/*"):
        assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name
        assert stat.S_IMODE(path.stat().st_mode) == 0o444
    digests = [path.stem for path in store.manifests.iterdir()]
    for digest in digests:
        assert all(store.object_path(file.sha256).exists() for file in store.manifest(digest).files)
    return len(digests)


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "snapshots")


NAMES = st.text(
    st.characters(exclude_characters="/\0", exclude_categories=("Cs",)), min_size=1, max_size=12
).filter(lambda name: name not in (".", ".."))
FILES = st.dictionaries(
    st.lists(NAMES, min_size=1, max_size=3).map("/".join),
    st.tuples(st.binary(max_size=30), st.booleans()),
    max_size=6,
).filter(
    lambda files: not any(one != other and other.startswith(one + "/") for one in files for other in files)
)


@given(files=FILES, order=st.randoms(use_true_random=False))
def test_a_manifest_comes_back_as_it_was_and_its_digest_is_that_of_its_content(
    files: dict[str, tuple[bytes, bool]], order: random.Random
) -> None:
    entries = [
        entry(path, data, 0o755 if is_program else 0o644) for path, (data, is_program) in files.items()
    ]
    manifest = Manifest(files=tuple(entries), git=GitState(commit="a"), created_ms=1)
    assert msgspec.json.decode(msgspec.json.encode(manifest), type=Manifest) == manifest
    check_manifest(manifest, manifest.digest)
    order.shuffle(entries)
    assert Manifest(files=tuple(entries), created_ms=2).digest == manifest.digest
    if entries:
        changed = msgspec.structs.replace(entries[0], sha256="0" * 64)
        assert Manifest(files=(changed, *entries[1:])).digest != manifest.digest


def test_equal_content_is_stored_once(store: SnapshotStore) -> None:
    assert put(store, {"a.py": b"1", "b.py": b"1"}) != put(store, {"a.py": b"1"})
    assert len(list(store.objects.glob("*/*"))) == 1
    assert check_store(store) == 2


def test_equal_code_of_another_commit_has_the_same_digest_and_tells_the_newest_commit(
    store: SnapshotStore,
) -> None:
    first = put(store, {"a.py": b"1"}, GitState(commit="old", is_dirty=True))
    assert put(store, {"a.py": b"1"}, GitState(commit="new")) == first
    assert store.manifest(first).git == GitState(commit="new")


@pytest.mark.parametrize("size_bytes", [0, 10, SMALL_BYTES, SMALL_BYTES + 1])
def test_a_file_of_any_size_comes_back_whole(size_bytes: int, store: SnapshotStore, tmp_path: Path) -> None:
    data = random.Random(1).randbytes(size_bytes)
    (tmp_path / "file").write_bytes(data)
    with store.adding():
        stored = store.put_file(tmp_path / "file")
    digest = put(store, {"a/file": data})
    assert (stored.sha256, stored.size_bytes) == (hashlib.sha256(data).hexdigest(), size_bytes)
    materialise(store.root, digest, tmp_path / "code")
    assert tree(tmp_path / "code") == {"a/file": data}
    check_store(store)


def test_materialised_code_is_a_writable_copy_with_its_modes_and_links(
    store: SnapshotStore, tmp_path: Path
) -> None:
    with store.adding():
        store.put_bytes(b"x")
        manifest = Manifest(
            files=(entry("bin/run.sh", mode=0o755), entry("a.py")),
            symlinks=(LinkEntry(path="bin/a.py", target="../a.py"),),
        )
        digest = store.put_manifest(manifest)
    code = tmp_path / "run" / "code"
    materialise(store.root, digest, code)
    assert os.access(code / "bin" / "run.sh", os.X_OK)
    assert not os.access(code / "a.py", os.X_OK)
    assert (code / "bin" / "a.py").resolve() == (code / "a.py").resolve()
    (code / "a.py").write_text("edited by the run")
    check_store(store)


def test_materialise_is_repeatable_and_mends_what_was_edited(store: SnapshotStore, tmp_path: Path) -> None:
    digest = put(store, {"a.py": b"1", "p/b.py": b"2"})
    code = tmp_path / "code"
    materialise(store.root, digest, code)
    (code / "__pycache__").mkdir()
    materialise(store.root, digest, code)
    assert (code / "__pycache__").exists()
    (code / "a.py").write_bytes(b"?")
    (tmp_path / ".code-999999999-abc").mkdir()  # of a process that was killed
    materialise(store.root, digest, code)
    assert tree(code) == {"a.py": b"1", "p/b.py": b"2"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["code", "snapshots"]


def test_damaged_bytes_are_never_handed_to_a_run(store: SnapshotStore, tmp_path: Path) -> None:
    digest = put(store, {"a.py": b"1"})
    damaged = next(store.objects.glob("*/*"))
    damaged.chmod(0o644)
    damaged.write_bytes(b"2")
    with pytest.raises(InvalidRequestError, match=r"'a\.py' are damaged"):
        materialise(store.root, digest, tmp_path / "code")
    damaged.unlink()
    with pytest.raises(NotFoundError, match="submit the run again"):
        materialise(store.root, digest, tmp_path / "code")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["snapshots"]
    assert put(store, {"a.py": b"1"}) == digest
    materialise(store.root, digest, tmp_path / "code")


def test_a_large_damaged_file_is_found_out_too(store: SnapshotStore, tmp_path: Path) -> None:
    data = bytes(SMALL_BYTES + 5)
    digest = put(store, {"a.bin": data})
    damaged = next(store.objects.glob("*/*"))
    damaged.chmod(0o644)
    damaged.write_bytes(data[:-1] + b"!")
    with pytest.raises(InvalidRequestError, match="damaged"):
        materialise(store.root, digest, tmp_path / "code")


HOSTILE = {
    "absolute": Manifest(files=(entry("/etc/passwd"),)),
    "parent": Manifest(files=(entry("../outside"),)),
    "hidden parent": Manifest(files=(entry("a/../../outside"),)),
    "empty part": Manifest(files=(entry("a//b"),)),
    "empty": Manifest(files=(entry(""),)),
    "nul": Manifest(files=(entry("a\0b"),)),
    "twice": Manifest(files=(entry("a"), entry("a", b"y"))),
    "below a file": Manifest(files=(entry("a"), entry("a/b"))),
    "link out": Manifest(symlinks=(LinkEntry(path="a", target="../x"),)),
    "absolute link": Manifest(symlinks=(LinkEntry(path="a", target="/etc"),)),
    "link through a link": Manifest(
        symlinks=(LinkEntry(path="a/b/up", target="../.."), LinkEntry(path="e", target="a/b/up/../x"))
    ),
    "through a link": Manifest(files=(entry("a/b"),), symlinks=(LinkEntry(path="a", target="."),)),
    "mode": Manifest(files=(entry("a", mode=0o4755),)),
    "hash": Manifest(files=(FileEntry(path="a", sha256="../../../secret", mode=0o644, size_bytes=1),)),
    "diff": Manifest(git=GitState(diff="../../secret")),
    "version": Manifest(version=2),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_manifest_writes_nothing_anywhere(name: str, store: SnapshotStore, tmp_path: Path) -> None:
    manifest = HOSTILE[name]
    put(store, {"x": b"x", "y": b"y"})
    (store.manifests / f"{manifest.digest}.json").write_bytes(msgspec.json.encode(manifest))
    with pytest.raises(InvalidRequestError):
        materialise(store.root, manifest.digest, tmp_path / "run" / "code")
    with pytest.raises(InvalidRequestError):
        store.put_manifest(manifest)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["snapshots"]


def test_a_manifest_under_a_digest_that_is_not_its_own_is_refused(
    store: SnapshotStore, tmp_path: Path
) -> None:
    digest = put(store, {"a": b"1"})
    path = store.manifests / f"{digest}.json"
    path.rename(path.with_name(f"{'0' * 64}.json"))
    with pytest.raises(InvalidRequestError, match="damaged"):
        materialise(store.root, "0" * 64, tmp_path / "code")
    for bad in ("../registry", "", "0" * 63, "G" * 64):
        with pytest.raises(InvalidRequestError, match="no digest"):
            materialise(store.root, bad, tmp_path / "code")


@given(
    depth=st.integers(0, 3),
    target=st.lists(st.sampled_from(["..", "a", ".", "", "b"]), max_size=6).map("/".join),
)
def test_a_link_that_stays_inside_does_so_by_its_text_alone(depth: int, target: str) -> None:
    path = "/".join(["d"] * depth + ["link"])
    if stays_inside(path, target):
        landing = os.path.normpath(f"/root/{'d/' * depth}{target}")
        assert landing == "/root" or landing.startswith("/root/")


def test_garbage_goes_and_what_is_kept_or_young_stays(store: SnapshotStore, tmp_path: Path) -> None:
    kept = put(store, {"a": b"1", "both": b"shared"})
    gone = put(store, {"b": b"2", "both": b"shared"})
    with store.adding():
        orphan = store.put_bytes(b"left by a client that was killed").sha256
    (store.staging / "half").write_bytes(b"")
    age(*store.manifests.iterdir(), *store.objects.glob("*/*"), *store.staging.iterdir())
    young = put(store, {"c": b"3", "d": b"4"})
    found = collect_garbage(store.root, {kept})
    assert (found.num_manifests, found.num_objects, found.warning) == (1, 2, "")
    assert found.freed_bytes > 0
    for digest in (kept, young):
        materialise(store.root, digest, tmp_path / digest)
    with pytest.raises(NotFoundError):
        store.manifest(gone)
    assert not store.object_path(orphan).exists()
    assert list(store.staging.iterdir()) == []
    assert check_store(store) == 2


def test_an_old_snapshot_that_is_taken_again_counts_as_young(store: SnapshotStore) -> None:
    digest = put(store, {"a": b"1"})
    age(*store.manifests.iterdir(), *store.objects.glob("*/*"))
    assert put(store, {"a": b"1"}) == digest
    assert collect_garbage(store.root, set()).num_manifests == 0
    assert check_store(store) == 1


def test_nothing_is_collected_while_a_snapshot_is_being_taken(store: SnapshotStore) -> None:
    put(store, {"a": b"1"})
    age(*store.manifests.iterdir(), *store.objects.glob("*/*"))
    with store.adding():
        assert "being taken" in collect_garbage(store.root, set()).warning
        assert check_store(store) == 1
    assert collect_garbage(store.root, set()).num_objects == 1


def test_a_damaged_manifest_costs_no_object(store: SnapshotStore) -> None:
    kept = put(store, {"a": b"1"})
    path = store.manifests / f"{kept}.json"
    path.chmod(0o644)
    path.write_bytes(b"{")
    age(*store.manifests.iterdir(), *store.objects.glob("*/*"))
    found = collect_garbage(store.root, {kept})
    assert (found.num_objects, len(list(store.objects.glob("*/*")))) == (0, 1)
    assert kept in found.warning


def test_no_store_is_no_garbage(tmp_path: Path) -> None:
    assert collect_garbage(tmp_path / "none", set()).num_objects == 0


def test_a_store_that_cannot_be_written_says_so(store: SnapshotStore) -> None:
    store.make()
    store.staging.rmdir()
    with pytest.raises(UnavailableError, match="cannot be written"):
        store.put_bytes(b"x")


ENDLESS = """
import itertools, sys
from pathlib import Path
from trn.core.snapshots import SnapshotStore, materialise
from trn.core.snapshot_manifest import FileEntry, Manifest
store, target = SnapshotStore(Path(sys.argv[1])), Path(sys.argv[2])
for number in itertools.count():
    with store.adding():
        data = [b"%s %d" % (sys.argv[3].encode(), number) * size for size in (1, 3000, 600000)]
        put = [store.put_bytes(one) for one in data]
        files = tuple(FileEntry(path=f"f{n}", sha256=one.sha256, mode=0o644, size_bytes=one.size_bytes) for n, one in enumerate(put))
        digest = store.put_manifest(Manifest(files=files))
    print(digest, flush=True)
    materialise(store.root, digest, target)
"""


def test_kill_minus_9_at_any_point_leaves_nothing_half_visible(store: SnapshotStore, tmp_path: Path) -> None:
    choice = random.Random(0)
    said: list[str] = []
    for round_number in range(8):
        command = [
            sys.executable,
            "-c",
            ENDLESS,
            str(store.root),
            str(tmp_path / "run" / "code"),
            str(round_number),
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            said += [process.stdout.readline().strip() for _ in range(choice.randint(1, 4))]
            for _ in range(choice.randint(0, 20000)):
                pass  # somewhere inside the next one
            process.send_signal(signal.SIGKILL)
        assert check_store(store) >= len(said)
        code = tmp_path / "run" / "code"
        held = {hashlib.sha256(data).hexdigest() for data in tree(code).values()} if code.exists() else set()
        snapshots = [store.manifest(path.stem) for path in store.manifests.iterdir()]
        assert not code.exists() or held in [{file.sha256 for file in one.files} for one in snapshots]
    for digest in said:
        materialise(store.root, digest, tmp_path / "run" / "code")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["code"]
