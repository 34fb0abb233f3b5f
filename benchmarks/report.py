"""Rows as one table for a person, and as JSON for the next run to be compared with."""

import json
import os
import platform
import re
import shutil
import subprocess
import unicodedata
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bars import Row
from environments import APART
from harness import Spread

LIBRARIES = (
    "torch",
    "numpy",
    "pyarrow",
    "msgspec",
    "lightning",
    "transformers",
    "accelerate",
    "pytorch-ignite",
    "datasets",
    "torchdata",
    "ray",
    "submitit",
    "redis",
    "playwright",
)
LIBRARIES_APART = ("torchx", "mlflow", "tensorboard", "trackio")
HEADS = ("what", "median", "min..max", "ours ÷ this", "bar", "verdict")


def describe_machine() -> dict[str, Any]:
    """What a reader needs to judge the numbers; nothing that names the machine."""
    libraries = {}
    for name in LIBRARIES:
        try:
            libraries[name] = version(name)
        except PackageNotFoundError:
            libraries[name] = "not installed"
    apart = APART.versions(LIBRARIES_APART)
    libraries |= {name: apart.get(name, "not installed") for name in LIBRARIES_APART}
    libraries["chromium"] = _chromium_version()
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "num_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "python": platform.python_version(),
        "libraries": libraries,
    }


def _chromium_version() -> str:
    program = shutil.which("chromium")
    if program is None:
        return "not installed"
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"\d+[\d.]*", said)
    return found[0] if found else "unknown"


def format_number(value: float, unit: str) -> str:
    """Three figures; rates in thousands or millions."""
    if unit == "rows/s":
        return f"{value / 1e6:.3g} M" if value >= 1e6 else f"{value / 1e3:.3g} k"
    if abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.3g}"


def _cells(spread: Spread | None, reason: str, unit: str) -> tuple[str, str]:
    if spread is None:
        return f"not measured: {reason}", ""
    shown = f"{format_number(spread.median, unit)} {unit}".rstrip()
    return shown, f"{format_number(spread.low, unit)}..{format_number(spread.high, unit)}"


def table_lines(rows: Sequence[Row]) -> list[str]:
    """A markdown table whose columns also line up in a terminal: ours in bold, the others below it."""
    lines: list[tuple[str, ...]] = [HEADS]
    for row in rows:
        median, span = _cells(row.ours, row.reason, row.unit)
        bar, ratio = "", ""
        if row.bar is not None:
            bar = row.bar.describe(row.unit)
            if row.bar.against and row.judged is not None:
                bar = f"{bar} (is {row.judged:.3g} ×)"
        lines.append((f"**{row.what}**", median, span, ratio, bar, row.verdict))
        for side in row.beside:
            median, span = _cells(side.spread, side.reason, row.unit)
            if row.ours and side.spread and side.spread.median > 0 and row.ours.median > 0:
                ratio = f"{row.ours.median / side.spread.median:.3g}"
            else:
                ratio = ""
            lines.append((f"· {side.name}", median, span, ratio, "", ""))
    widths = [max(_width(line[column]) for line in lines) for column in range(len(HEADS))]
    shown = [
        "| " + " | ".join(_pad(cell, width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in lines
    ]
    shown.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return shown


def _width(text: str) -> int:
    return sum(not unicodedata.combining(char) for char in text)


def _pad(text: str, width: int) -> str:
    return text + " " * (width - _width(text))


def render_markdown(
    *, date: str, mode: str, machine: Mapping[str, Any], rows: Sequence[Row], topics: Mapping[str, Any]
) -> str:
    libraries = ", ".join(f"{name} {found}" for name, found in machine["libraries"].items())
    verdicts = [row.verdict for row in rows if row.bar is not None]
    lines = [
        "# Benchmarks",
        "",
        f"Taken by `make bench` ({mode} run), the last part on {date}: {verdicts.count('pass')} of {len(verdicts)} bars met.",
        "",
        f"Machine: {machine['num_cores']} cores ({machine['architecture']}), {machine['memory_gib']} GiB,"
        f" {machine['system']}, Python {machine['python']}, CPU only.",
        f"Libraries: {libraries}.",
        "",
        "Every value is the median of interleaved rounds, each round in a new random order; bold is ours, the lines",
        "below it were measured in the same rounds. Read ratios first: absolute numbers are this machine's only.",
        "",
        *table_lines(rows),
        "",
    ]
    notes = [f"- {row.what}: {row.note}" for row in rows if row.note]
    if notes:
        lines += ["What was done:", "", *notes, ""]
    taken = "; ".join(f"{name} {topic['date']} ({topic['seconds']:.0f} s)" for name, topic in topics.items())
    return "\n".join([*lines, f"Each topic, when it was taken last and how long that took: {taken}.", ""])


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Whole or not at all: an interrupted run keeps what the topics before it wrote."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    text = json.dumps(document, indent=1, ensure_ascii=False)
    partial.write_text(_short_lines(text) + "\n", encoding="utf-8")
    partial.replace(path)


def _short_lines(text: str) -> str:
    """The same JSON with each innermost object, such as a sample, on one line: there are thousands of them."""
    return re.sub(
        r"\{\n\s*([^{}\[\]]*?)\n\s*\}", lambda found: "{" + re.sub(r"\n\s*", " ", found[1]) + "}", text
    )
