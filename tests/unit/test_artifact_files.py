"""Files that an event names: which are taken, which are refused and why, and that no others are ever read."""

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from artifact_samples import make_checkpoint, make_mp4
from trn.core.artifacts.files import (
    check_file,
    find_checkpoint_meta,
    is_there,
    locate,
    open_artifact,
)
from trn.core.artifacts.records import ArtifactKind, ArtifactRecord, ArtifactState, make_artifact_id
from trn.core.cause_words import say_what
from trn.core.causes import REFUSALS
from trn.core.errors import ConflictError, NotFoundError
from trn.core.home import Home

RUN = "run-1"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    home.make()
    (home.run(RUN).samples / "step-1").mkdir(parents=True)
    home.run(RUN).checkpoints.mkdir()
    return home


def named(path: Path | str, *, kind: ArtifactKind = "sample", size_bytes: int = 0) -> ArtifactRecord:
    return ArtifactRecord(
        artifact_id="a1",
        run_id=RUN,
        seq=1,
        attempt=1,
        step=1,
        kind=kind,
        name=Path(path).name,
        path=str(path),
        size_bytes=size_bytes,
    )


def take(home: Home, artifact: ArtifactRecord, nonce: str = "") -> ArtifactRecord:
    """The artifact as it is recorded after the check."""
    from msgspec.structs import asdict, replace

    checked = check_file(home, artifact, nonce, may_be_gone=False)
    return replace(artifact, **asdict(checked))


def write(home: Home, name: str, content: bytes = b"content") -> Path:
    path = home.run(RUN).samples / "step-1" / name
    path.write_bytes(content)
    return path


def read(home: Home, artifact: ArtifactRecord) -> bytes:
    with os.fdopen(open_artifact(home, artifact), "rb") as file:
        return file.read()


def test_a_whole_file_is_taken_with_its_size_and_hash_under_a_relative_path(home: Home) -> None:
    artifact = take(home, named(write(home, "a.txt"), size_bytes=7))
    assert artifact.state is ArtifactState.PRESENT
    assert artifact.path == "samples/step-1/a.txt"
    assert artifact.size_bytes == 7
    assert artifact.sha256 == "ed7002b439e9ac845f22357d822bac1444730fbdb6016d3ec9432297b9ec9f73"
    assert read(home, artifact) == b"content"


def test_a_home_behind_a_link_knows_its_files_by_both_paths(home: Home, tmp_path: Path) -> None:
    path = write(home, "a.txt")
    (tmp_path / "link").symlink_to(home.root)
    linked = Home(tmp_path / "link")
    for said in (path, linked.run(RUN).samples / "step-1" / "a.txt", "samples/step-1/a.txt"):
        assert take(linked, named(said)).is_present, said


def outside(home: Home) -> Path:
    secret = home.root / "token"
    secret.write_text("secret")
    return secret


def by_dots(home: Home) -> str:
    outside(home)
    return "samples/../../../token"


def linked_file(home: Home) -> Path:
    path = home.run(RUN).samples / "a.txt"
    path.symlink_to(outside(home))
    return path


def linked_folder(home: Home) -> Path:
    outside(home)
    folder = home.run(RUN).samples / "folder"
    folder.symlink_to(home.root)
    return folder / "token"


def linked_inside(home: Home) -> Path:
    path = home.run(RUN).samples / "a.txt"
    path.symlink_to(write(home, "b.txt"))
    return path


def fifo(home: Home) -> Path:
    path = home.run(RUN).samples / "fifo"
    os.mkfifo(path)
    return path


def bound_socket(home: Home) -> Path:
    path = home.run(RUN).samples / "s"
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(os.path.relpath(path))
    return path


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (outside, "artifact-outside"),
        (by_dots, "artifact-outside"),
        (lambda home: home.run(RUN).root, "artifact-outside"),
        (lambda _home: "/dev/zero", "artifact-outside"),
        (lambda _home: "", "artifact-outside"),
        (lambda _home: "samples/a\0b", "artifact-outside"),
        (lambda _home: "a/" * 4000, "artifact-outside"),
        (linked_file, "artifact-link"),
        (linked_inside, "artifact-link"),
        (linked_folder, "artifact-link"),
        (fifo, "artifact-not-file"),
        (bound_socket, "artifact-not-file"),
        (lambda home: home.run(RUN).samples / "step-1", "artifact-not-file"),
        (lambda home: write(home, "a.txt") / "below", "artifact-not-file"),
        (lambda home: write(home, "a.txt", b""), "artifact-empty"),
        (lambda home: home.run(RUN).samples / "nothing", "artifact-missing"),
        (lambda _home: "x" * 300, "artifact-unreadable"),
        (lambda home: write(home, "a.mp4", make_mp4()[:-9]), "artifact-half-written"),
        (lambda home: write(home, "a.mp4", b"\0" * 400), "artifact-half-written"),
    ],
)
def test_what_is_not_a_whole_file_of_the_run_is_refused_with_its_cause(
    home: Home, make: Callable[[Home], Path | str], cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home.root)  # a socket's path must be short
    artifact = take(home, named(make(home)))
    assert (artifact.state, artifact.cause.id) == (ArtifactState.REFUSED, cause)
    assert cause in REFUSALS
    assert artifact.reason
    with pytest.raises(NotFoundError, match="refused"):
        open_artifact(home, artifact)


def test_a_device_is_refused_without_being_opened(home: Home) -> None:
    path = home.run(RUN).samples / "device"
    try:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero: reading it never ends
    except PermissionError:
        pytest.skip("only root may create a device")
    assert take(home, named(path)).cause.id == "artifact-not-file"


@pytest.mark.parametrize("said", [6, 8])
def test_a_file_of_another_size_than_its_event_says_is_refused(home: Home, said: int) -> None:
    artifact = take(home, named(write(home, "a.txt"), size_bytes=said))
    assert artifact.cause.id == "artifact-incomplete"
    assert artifact.cause.values == {"size_bytes": 7, "expected_bytes": said}


def test_a_file_that_is_written_while_it_is_hashed_is_refused(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(home, "a.txt")

    def hash_slowly(_fd: int) -> str:
        path.write_bytes(b"changed")
        return "0" * 64

    monkeypatch.setattr("trn.core.artifacts.files.hash_descriptor", hash_slowly)
    assert take(home, named(path)).cause.id == "artifact-changing"


@pytest.mark.parametrize(
    ("number", "is_ours"), [(errno.EIO, False), (errno.EMFILE, True), (errno.ENOMEM, True)]
)
def test_a_disk_that_cannot_be_read_refuses_the_file_and_a_shortage_of_ours_does_not(
    home: Home, monkeypatch: pytest.MonkeyPatch, number: int, is_ours: bool
) -> None:
    def fail(_fd: int) -> str:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("trn.core.artifacts.files.hash_descriptor", fail)
    artifact = named(write(home, "a.txt"))
    if is_ours:
        with pytest.raises(OSError, match=os.strerror(number)):
            take(home, artifact)
    else:
        assert take(home, artifact).cause.id == "artifact-unreadable"


def test_a_whole_mp4_is_taken_whatever_the_order_of_its_boxes(home: Home) -> None:
    assert take(home, named(write(home, "a.mp4", make_mp4()), kind="video")).is_present


def test_every_refusal_has_words() -> None:
    from trn.core.causes import Cause

    for cause_id in REFUSALS:
        words = say_what(Cause(id=cause_id, values={"part": "p", "found": "a FIFO", "error": "e"}))
        assert cause_id not in words
        assert "None" not in words or cause_id == "artifact-incomplete"


def test_a_checkpoint_is_taken_by_its_meta_and_not_hashed(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_fd: int) -> str:
        raise AssertionError("hashed")

    monkeypatch.setattr("trn.core.artifacts.files.hash_descriptor", fail)
    path, sha256 = make_checkpoint(home.run(RUN).checkpoints, step=10, run_id=RUN, nonce="n1")
    artifact = take(home, named(path, kind="checkpoint"), nonce="n1")
    assert artifact.is_present
    assert artifact.sha256 == sha256
    assert find_checkpoint_meta(home, artifact) == path.with_name("step-00000010.meta.json")
    path.with_name("step-00000010.meta.json").unlink()  # as retention begins
    assert not is_there(home.run(RUN).root, artifact.kind, artifact.path)
    with pytest.raises(NotFoundError, match="deleted"):
        find_checkpoint_meta(home, artifact)


def test_a_checkpoint_of_another_submission_or_size_or_without_a_valid_meta_is_refused(home: Home) -> None:
    path, _ = make_checkpoint(home.run(RUN).checkpoints, step=10, run_id=RUN, nonce="n1")
    assert take(home, named(path, kind="checkpoint"), nonce="n2").cause.id == "artifact-no-checkpoint"
    with path.open("ab") as file:
        file.write(b"more")
    assert take(home, named(path, kind="checkpoint"), nonce="n1").cause.id == "artifact-incomplete"
    meta = path.with_name("step-00000010.meta.json")
    meta.write_bytes(meta.read_bytes()[:-20])
    assert take(home, named(path, kind="checkpoint"), nonce="n1").cause.id == "artifact-no-checkpoint"


def test_what_retention_removed_before_the_check_is_removed_and_not_refused(home: Home) -> None:
    checked = check_file(home, named("checkpoints/step-00000010.pt", kind="checkpoint"), "", may_be_gone=True)
    assert checked.state is ArtifactState.REMOVED
    assert not checked.cause.id


def test_a_file_that_was_replaced_is_an_error_and_its_bytes_are_not_read(home: Home) -> None:
    path = write(home, "a.txt")
    artifact = take(home, named(path))
    times = path.stat()
    other = write(home, "b.txt", b"CONTENT")
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    other.replace(path)
    with pytest.raises(ConflictError, match="changed after it was recorded"):
        open_artifact(home, artifact)
    path.write_bytes(b"longer content")
    with pytest.raises(ConflictError):
        open_artifact(home, artifact)
    path.unlink()
    path.symlink_to(outside(home))
    with pytest.raises(ConflictError):
        open_artifact(home, artifact)
    path.unlink()
    with pytest.raises(NotFoundError, match="deleted"):
        open_artifact(home, artifact)


def test_a_copy_with_the_same_bytes_is_still_the_artifact(home: Home) -> None:
    path = write(home, "a.txt")
    artifact = take(home, named(path))
    path.unlink()
    path.write_bytes(b"content")  # as after a restored backup: other inode, other times
    assert read(home, artifact) == b"content"


def test_names_with_markup_and_control_characters_are_kept_as_they_are(home: Home) -> None:
    name = "<img src=x onerror=alert(1)>\x1b[31m\n\u202e.txt"
    artifact = take(home, named(write(home, name)))
    assert artifact.is_present
    assert artifact.name == name
    assert read(home, artifact) == b"content"


def test_an_id_is_stable_and_says_nothing_of_the_path() -> None:
    def made(**changed: object) -> str:
        return make_artifact_id(
            **{"run_id": RUN, "nonce": "n", "attempt": 1, "seq": 2, "path": "samples/a", **changed}  # type: ignore[arg-type]
        )

    assert made() == made()
    others = [made(nonce="m"), made(attempt=2), made(seq=3), made(path="samples/b"), made(run_id="other")]
    assert len({made(), *others}) == 6
    assert made().isalnum()
    assert made(path="\ud800\0")  # whatever an event says


def test_a_path_is_taken_as_it_is_and_not_decoded(home: Home) -> None:
    assert locate(home.run(RUN).root, "samples/%2e%2e/a") == "samples/%2e%2e/a"
