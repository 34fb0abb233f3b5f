"""The picture of the README can be made again: the script runs the example, kills its worker, and draws what was printed."""

import re
import subprocess
import sys
from html import unescape
from pathlib import Path

from documents import ROOT

DEADLINE_S = 240
SCRIPT = ROOT / "docs" / "record_terminal.py"
PICTURE = ROOT / "docs" / "terminal.svg"


def words(svg: str) -> str:
    texts = re.findall(r">([^<>\n]+)</text>", svg)
    return unescape(" ".join(texts)).replace("\xa0", " ")


def test_the_script_records_a_run_that_was_killed_and_resumed(tmp_path: Path) -> None:
    out = tmp_path / "terminal.svg"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for shown in (words(out.read_text()), words(PICTURE.read_text())):
        assert "$ trn run job.yaml" in shown
        assert "killed by SIGKILL" in shown
        assert "resumed at step" in shown
        assert re.search(r"first-run\s+completed", shown)
        assert "$ trn status first-run" in shown


def test_the_pictures_of_the_page_are_those_of_its_script_and_small() -> None:
    script = (ROOT / "docs" / "record_page.py").read_text()
    views = re.findall(r'\n    View\("(\w+)"', script)
    assert len(views) == 7
    names = {
        f"page-{view}{size}{scheme}.png"
        for view in views
        for size in ("", "-phone")
        for scheme in ("", "-dark")
    }
    pictures = list((ROOT / "docs" / "images").glob("page-*"))
    assert {path.name for path in pictures} == names
    assert sum(path.stat().st_size for path in pictures) < 1_500_000


def test_the_pictures_of_the_window_are_there_in_both_colour_schemes_shown_and_small() -> None:
    page = (ROOT / "docs" / "window.md").read_text()
    pictures = list((ROOT / "docs" / "images").glob("window-*"))
    assert {path.name.endswith("-dark.png") for path in pictures} == {True, False}
    for path in pictures:
        assert path.name in page, path
        twin = path.stem.removesuffix("-dark") if path.stem.endswith("-dark") else f"{path.stem}-dark"
        assert path.with_stem(twin) in pictures, path
    assert sum(path.stat().st_size for path in pictures) < 800_000
