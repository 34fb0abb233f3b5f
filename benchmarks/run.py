"""`make bench`: the worker beside its named peers, in one run.

    python3 benchmarks/run.py                      everything, about fifty minutes
    python3 benchmarks/run.py --only loop --quick  a part of it, fewer rounds, smaller data
    python3 benchmarks/run.py --resume             go on with today's run, leaving out the topics it already has

Makes an environment of its own (.venv-bench) with the peers in it, and one apart (.venv-bench-apart) for those whose
pins exclude ours. Each topic's result is written when the topic is done: to benchmarks/results/<date>.json and
latest.md, or with --quick to benchmarks/.data/quick/.
"""

import argparse
import datetime
import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from environments import APART, MAIN

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TOPICS = (
    "loop",
    "trainer",
    "ddp",
    "runner",
    "feed",
    "checkpoint",
    "import",
    "daemon",
    "cli",
    "faces",
    "qt",
    "inference",
)
NEED_APART = {"cli", "faces"}
FORMAT_VERSION = 1


def main() -> int:
    options = parse_arguments()
    if not options.here and Path(sys.prefix).resolve() != MAIN.folder.resolve():
        MAIN.make()
        os.execv(MAIN.python, [str(MAIN.python), str(Path(__file__).resolve()), *sys.argv[1:]])
    if not options.here and NEED_APART & set(options.only or TOPICS):
        APART.make()
    return run_topics(options)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Benchmarks of the worker against the named peers.")
    parser.add_argument("--only", action="append", choices=TOPICS, help="this topic only (may be repeated)")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, smaller data; for development")
    parser.add_argument(
        "--resume", action="store_true", help="leave out topics that today's result already has"
    )
    parser.add_argument(
        "--here", action="store_true", help="use this interpreter; peers it lacks are not measured"
    )
    return parser.parse_args()


def run_topics(options: argparse.Namespace) -> int:
    sys.path.insert(0, str(HERE))
    from bars import row_as_json, row_from_json
    from report import describe_machine, render_markdown, table_lines, write_json

    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    mode = "quick" if options.quick else "full"
    folder = HERE / ".data" / "quick" if options.quick else HERE / "results"
    result_path = folder / f"{date}.json"
    document: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "date": date,
        "mode": mode,
        "machine": describe_machine(),
        "topics": {},
    }
    wanted = options.only or TOPICS
    if options.only or options.resume:
        document["topics"] = read_newest_topics(folder)
    topics = {name: import_module(f"{name}_bench") for name in wanted}
    for name in wanted:
        if options.resume and document["topics"].get(name, {}).get("date") == date:
            print(f"[{name}] done before", flush=True)
            continue
        started = time.monotonic()
        say = Ticker(name)
        topic_rows, measured = topics[name].run(quick=options.quick, say=say)
        document["topics"][name] = {
            "date": date,
            "seconds": round(time.monotonic() - started, 1),
            "rows": [row_as_json(row) for row in topic_rows],
            "samples": measured.samples,
            "failures": measured.failures,
        }
        document["topics"] = {key: document["topics"][key] for key in TOPICS if key in document["topics"]}
        write_json(result_path, document)
        rows = [row_from_json(row) for topic in document["topics"].values() for row in topic["rows"]]
        markdown = render_markdown(
            date=date, mode=mode, machine=document["machine"], rows=rows, topics=document["topics"]
        )
        (folder / "latest.md").write_text(markdown, encoding="utf-8")
        say.end(f"{document['topics'][name]['seconds']:.0f} s")
    shown = [name for name in document["topics"] if name in wanted]
    rows = [row_from_json(row) for name in shown for row in document["topics"][name]["rows"]]
    print("\n" + "\n".join(table_lines(rows)))
    missed = [row.what for row in rows if row.bar is not None and row.verdict != "pass"]
    print(f"\nwritten to {folder.relative_to(ROOT)}/{date}.json and latest.md")
    if missed:
        print(f"{len(missed)} bars not met: {'; '.join(missed)}")
    return 0


def read_newest_topics(folder: Path) -> dict[str, Any]:
    """The topics of the newest result, each with the date on which it was taken; a part of a run keeps the others'."""
    newest = max(folder.glob("????-??-??.json"), default=None)
    if newest is None:
        return {}
    document = json.loads(newest.read_text(encoding="utf-8"))
    if document["format_version"] != FORMAT_VERSION:
        return {}
    return {name: {"date": document["date"], **topic} for name, topic in document["topics"].items()}


class Ticker:
    """Says what is being measured, on one line at a terminal; in a pipe only when a topic is done."""

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._is_shown = sys.stdout.isatty()

    def __call__(self, text: str) -> None:
        if self._is_shown:
            print(f"\r[{self._topic}] {text}\033[K", end="", flush=True)

    def end(self, text: str) -> None:
        start, clear = ("\r", "\033[K") if self._is_shown else ("", "")
        print(f"{start}[{self._topic}] {text}{clear}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
