"""Which files changed since a snapshot: code and what it reads, not what somebody left beside it."""

from pathlib import Path

import pytest

from trn.client.code.frozen_code import find_changed_files, freeze, listed
from trn.core.home import Home


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    home.make()
    return home


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "model.py").write_text("RATE = 1\n")
    (folder / "config.yaml").write_text("rate: 1\n")
    (folder / "results.txt").write_text("0.1\n")
    return folder


def changed(home: Home, project: Path, snapshot: str) -> list[str]:
    return find_changed_files(home, project, snapshot)


def test_what_a_run_or_a_person_leaves_in_the_folder_is_no_changed_code(home: Home, project: Path) -> None:
    snapshot = freeze(home, project, code_dir=None).options["snapshot"]
    assert changed(home, project, snapshot) == []
    (project / "results.txt").write_text("0.2\n")
    for name in ("notes.md", "curve.png", "out.json", "events.out.tfevents.1", "analysis.ipynb"):
        (project / name).write_text("new")
    (project / "src" / "model.py").chmod(0o755)
    assert changed(home, project, snapshot) == []


def test_code_and_what_it_reads_is_named_when_it_changes(home: Home, project: Path) -> None:
    snapshot = freeze(home, project, code_dir=None).options["snapshot"]
    (project / "src" / "model.py").write_text("RATE = 2\n")
    (project / "src" / "new.py").write_text("")
    (project / "config.yaml").unlink()
    assert changed(home, project, snapshot) == ["config.yaml", "src/model.py", "src/new.py"]


def test_a_folder_that_was_named_is_compared_with_itself_and_not_with_the_jobs(
    home: Home, project: Path, tmp_path: Path
) -> None:
    code = freeze(home, tmp_path, code_dir=project)
    assert code.options["frozen_from"] == str(project)
    assert changed(home, Path(code.options["frozen_from"]), code.options["snapshot"]) == []


def test_nothing_is_said_where_it_cannot_be_told(home: Home, project: Path, tmp_path: Path) -> None:
    snapshot = freeze(home, project, code_dir=None).options["snapshot"]
    assert changed(home, tmp_path / "gone", snapshot) == []
    (project / "src" / "model.py").write_text("RATE = 2\n")
    assert changed(home, project, "0" * 64) == []


def test_many_names_are_cut_short() -> None:
    assert listed(["a.py", "b.py"]) == "a.py, b.py"
    assert listed([f"{name}.py" for name in "abcdefg"]) == "a.py, b.py, c.py, d.py, e.py and 2 more"
