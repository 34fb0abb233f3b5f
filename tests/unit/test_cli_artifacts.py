"""`trn artifacts` and what `trn status` says of artifacts, over a home made by hand: no daemon runs."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
from test_cli_looking import HandMade

from artifact_samples import make_checkpoint, make_mp4
from trn.cli import command_table as verbs
from trn.core.artifacts.files import check_file
from trn.core.artifacts.records import ArtifactKind, NamedFile
from trn.core.home import Home
from trn.core.runs import RunState


class WithArtifacts(HandMade):
    """A run `r` whose files were recorded as a daemon would."""

    def add(self, *files: tuple[ArtifactKind, str]) -> None:
        run = self.registry.get("r")
        named = [
            NamedFile(
                artifact_id=f"{chr(97 + run.last_seq + seq)}{seq:05d}",
                seq=run.last_seq + seq,
                attempt=1,
                step=10 * seq,
                kind=kind,
                path=path,
                created_ms=1_760_000_000_000,
            )
            for seq, (kind, path) in enumerate(files, 1)
        ]
        place = {"offset": run.event_offset + 1, "last_seq": run.last_seq + len(files)}
        self.registry.follow("r", 1, **place, step=1, heartbeat_ms=1, metrics={}, named_files=named).result()
        page = self.registry.unchecked_artifacts("r", 1000)
        checked = [check_file(self.home, artifact, "", may_be_gone=False) for artifact in page]
        self.registry.settle_artifacts("r", checked).result()

    def write(self, path: str, content: bytes) -> None:
        target = self.home.run("r").root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)

    def fail(self, *words: str) -> tuple[int, str]:
        self._capsys.readouterr()
        code = verbs.run(["--home", str(self.home.root), *words])
        return code, self._capsys.readouterr().err


@pytest.fixture
def made(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    made = WithArtifacts(Home(tmp_path / "home"), capsys, monkeypatch)
    made.submit("r")
    made.start("r", pid=77)
    made.home.run("r").checkpoints.mkdir(parents=True)
    make_checkpoint(made.home.run("r").checkpoints, step=10, run_id="r")
    made.write("samples/a.txt", b"a sample")
    made.write("videos/attempt-1/a.mp4", make_mp4())
    made.write("samples/empty.png", b"")
    made.add(
        ("checkpoint", "checkpoints/step-00000010.pt"),
        ("sample", "samples/a.txt"),
        ("video", "videos/attempt-1/a.mp4"),
        ("sample", "samples/empty.png"),
    )
    yield made
    made.registry.close()


def test_artifacts_are_listed_with_step_kind_size_and_hash_newest_first(made: WithArtifacts) -> None:
    screen = made.show("artifacts", "r")
    sha256 = hashlib.sha256(b"a sample").hexdigest()
    assert screen.splitlines()[0].split() == [
        "step",
        "attempt",
        "kind",
        "size",
        "sha256",
        "made",
        "id",
        "name",
    ]
    steps = [line.split()[0] for line in screen.splitlines() if line.strip()[:1].isdigit()]
    assert steps == ["40", "30", "20", "10"]
    assert f"sample       8 bytes  {sha256[:12]}" in screen
    assert "refused\n  e00004  sample of step 40, empty.png: the file is empty" in screen
    assert [item["kind"] for item in made.ask("artifacts", "r")] == [
        "sample",
        "video",
        "sample",
        "checkpoint",
    ]
    (video,) = made.ask("artifacts", "r", "--kind", "video")
    assert (video["event"], video["name"], video["media_type"]) == ("artifact", "a.mp4", "video/mp4")
    assert video["is_present"] is True
    assert "path" not in video
    assert len(made.ask("artifacts", "r", "--limit", "2")) == 2
    assert "… and 3 older: --limit 0 shows all" in made.show("artifacts", "r", "--limit", "1")
    assert made.ask("artifacts", "r", "--kind", "file") == []
    assert made.show("artifacts", "r", "--kind", "file") == "no artifacts match\n"


def test_one_artifact_is_saved_by_the_beginning_of_its_id(made: WithArtifacts, tmp_path: Path) -> None:
    (saved,) = made.ask("artifacts", "r", "--save", "d", str(tmp_path / "a.mp4"))
    assert saved == {
        "event": "artifact_saved",
        "artifact_id": "d00003",
        "size_bytes": len(make_mp4()),
        "path": str(tmp_path / "a.mp4"),
    }
    assert (tmp_path / "a.mp4").read_bytes() == make_mp4()
    assert made.show("artifacts", "r", "--save", "c0", str(tmp_path)) == f"saved {tmp_path / 'a.txt'}\n"
    code, message = made.fail("artifacts", "r", "--save", "c0", str(tmp_path))
    assert (code, "exists: give another path" in message) == (6, True)
    code, message = made.fail("artifacts", "r", "--save", "zz", str(tmp_path / "b"))
    assert (code, "has no artifact with the id 'zz'" in message) == (4, True)
    code, message = made.fail("artifacts", "r", "--save", "e0", str(tmp_path / "b"))
    assert (code, "it is refused: the file is empty" in message) == (4, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.mp4", "a.txt", "home"]


def test_a_changed_file_is_not_saved(made: WithArtifacts, tmp_path: Path) -> None:
    made.write("samples/a.txt", b"A SAMPLE")
    code, message = made.fail("artifacts", "r", "--save", "c0", str(tmp_path / "a.txt"))
    assert (code, "changed after it was recorded" in message) == (6, True)
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_all_artifacts_are_saved_with_the_meta_files_of_checkpoints(
    made: WithArtifacts, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert len(made.ask("artifacts", "r", "--out", str(out))) == 3
    assert sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()) == [
        "checkpoints/step-00000010.meta.json",
        "checkpoints/step-00000010.pt",
        "samples/a.txt",
        "videos/attempt-1/a.mp4",
    ]
    assert made.fail("artifacts", "r", "--out", str(out))[0] == 6
    assert made.fail("artifacts", "r", "--out", str(out), "--save", "c", "x")[0] == 2
    assert made.show("artifacts", "r", "--kind", "file", "--out", str(out)) == "no artifacts match\n"


def test_status_shows_the_newest_video_and_sample_and_warns_of_refused_files(made: WithArtifacts) -> None:
    screen = made.show("status", "r")
    assert "  video    step 30: a.mp4 (70 bytes)" in screen
    assert "  sample   step 20: a.txt (8 bytes)" in screen
    assert "warnings\n  sample empty.png was refused as an artifact: the file is empty" in screen
    (record,) = made.ask("status", "r")
    assert (record["newest_video"], record["num_refused_artifacts"]) == ("d00003", 1)
    (refused,) = record["refused_artifacts"]
    assert (refused["name"], refused["cause"]["id"]) == ("empty.png", "artifact-empty")
    made.end("r", RunState.COMPLETED)
    assert "warnings" in made.show("status", "r")


def test_a_run_without_artifacts_says_nothing_of_them(made: WithArtifacts) -> None:
    made.submit("other")
    assert made.show("artifacts", "other") == "no artifacts match\n"
    assert "warnings" not in made.show("status", "other")
    assert made.fail("artifacts", "nothing")[0] == 4


def test_a_narrow_terminal_shortens_the_name_alone(made: WithArtifacts) -> None:
    made.write(f"samples/{'n' * 200}.txt", b"x")
    made.add(("sample", f"samples/{'n' * 200}.txt"))
    screen = made.show("artifacts", "r", num_columns=100)
    assert max(map(len, screen.splitlines())) <= 100
    assert "…nnnnnnnn" in screen
    assert "nnn.txt" in screen
