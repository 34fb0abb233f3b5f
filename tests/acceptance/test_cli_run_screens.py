"""The screens of `trn run` in the docs are what a terminal shows, from its first line to its last."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import COLUMNS, Terminal
from daemon_process import end_everything
from documents import ROOT, read_blocks

pytestmark = pytest.mark.usefixtures("without_torch")
PAGE = ROOT / "docs" / "cli-run.md"
SCREENS = {
    block.info.removeprefix("screen: "): block
    for block in read_blocks(PAGE)
    if block.info.startswith("screen: ")
}


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "home"
    end_everything(tmp_path / "home")


def unwrap(text: str) -> list[str]:
    """Its lines as they were before a terminal's width broke them: long paths break them elsewhere than short ones."""
    return [re.sub(" +", " ", line) for line in re.sub(r"\n {2}(?=[^ -])", " ", text).splitlines()]


def compare(terminal: Terminal, name: str) -> None:
    """Line by line, those that the terminal has folded as one; `…` in the page stands for anything.

    That the code is being imported is said where it takes long, as it may or may not.
    """
    shown = ""
    for line in terminal.screen.lines:
        if not line.startswith("trn: importing the code"):
            shown += line if len(line) == COLUMNS else line + "\n"
    lines, patterns = unwrap(shown), unwrap(SCREENS[name].text)
    assert len(lines) == len(patterns), lines
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.fullmatch(".*".join(map(re.escape, pattern.split("…"))), line), (line, pattern)


def test_the_screens_in_the_docs_are_what_a_terminal_shows(home: Path, tmp_path: Path) -> None:
    for block in read_blocks(PAGE):
        if block.info.startswith("file="):
            (tmp_path / block.info.removeprefix("file=")).write_text(block.text)
    words = ["run", "--config", tmp_path / "job.yaml"]
    followed = Terminal(home, *words, "--profile", "slow")
    followed.wait_for("5/10  loss 15")
    followed.wait_for("steps/s")
    compare(followed, "progress")
    assert followed.end()[0] == 0
    compare(followed, "end")

    equal = Terminal(home, *words, "--profile", "slow")
    assert equal.end()[0] == 0
    compare(equal, "equal")

    asked = Terminal(home, *words, "--profile", "slow", "--another")
    asked.wait_for("loss ")
    asked.press(b"\x03")
    asked.wait_for("(Enter)?")
    compare(asked, "question")
    asked.press(b"c")
    assert asked.end()[0] == 8

    rejected = Terminal(home, *words, "--set", "max_stps=3", "--set", "trainer=adder:Addr")
    assert rejected.end()[0] == 3
    compare(rejected, "rejected")


def test_the_screens_are_not_lost() -> None:
    assert set(SCREENS) == {"progress", "end", "equal", "question", "rejected"}
