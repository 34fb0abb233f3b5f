"""Markdown pages as tests see them: their code blocks, links and tables."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block. `info` is what follows the language: `file=NAME`, or `no-run: REASON`."""

    page: Path
    line: int
    language: str
    info: str
    text: str

    @property
    def file_name(self) -> str | None:
        found = re.fullmatch(r"file=([\w.-]+)", self.info)
        return found[1] if found else None

    @property
    def no_run_reason(self) -> str | None:
        found = re.fullmatch(r"no-run(?::\s*(.*))?", self.info)
        return None if found is None else found[1] or ""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def all_pages() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def read_blocks(page: Path) -> list[Block]:
    blocks: list[Block] = []
    opened: tuple[int, str, str, str] | None = None
    body: list[str] = []
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        fence = re.match(r"^(\s*)(`{3,})\s*([\w-]*)\s*(.*)$", line)
        if opened is None and fence:
            opened, body = (number, fence[2], fence[3], fence[4].strip()), []
        elif opened is not None and line.strip() == opened[1]:
            start, _, language, info = opened
            text = "".join(f"{row}\n" for row in body)
            blocks.append(Block(page=page, line=start, language=language, info=info, text=text))
            opened = None
        elif opened is not None:
            body.append(line)
    assert opened is None, f"{page}: the block that begins in line {opened and opened[0]} has no end"
    return blocks


def prose(page: Path) -> str:
    """The page without its code blocks."""
    return re.sub(r"(?ms)^\s*```.*?^\s*```\s*$", "", page.read_text())


def links(page: Path) -> Iterator[str]:
    for found in re.finditer(r"\[[^\]]*\]\(([^)\s]+)\)", prose(page)):
        yield found[1]


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings."""
    found = re.findall(r"(?m)^#+ +(.*?)\s*$", prose(page))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in found}


def table_rows(page: Path, heading: str) -> list[list[str]]:
    """The cells of all tables below `heading`, up to the next heading; without their header rows."""
    text = prose(page)
    begin = re.search(rf"(?m)^#+ {re.escape(heading)}\s*$", text)
    assert begin is not None, f"{page} has no heading {heading!r}"
    section = re.split(r"(?m)^#+ ", text[begin.end() :])[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip("|"))] for row in rows]
    dividers = {index for index, row in enumerate(cells) if set("".join(row)) <= set("-: ")}
    return [row for index, row in enumerate(cells) if index not in dividers and index + 1 not in dividers]


def code_words(text: str) -> list[str]:
    """What stands between backticks."""
    return re.findall(r"`([^`]+)`", text)
