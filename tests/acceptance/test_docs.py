"""Every command and snippet of the docs runs; what the docs name exists; what they list is what the code has."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from documents import (
    ROOT,
    Block,
    all_pages,
    anchors,
    code_words,
    links,
    prose,
    read_blocks,
    table_rows,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
from daemon_process import kill_processes
from warm_python import launchers_folder, python_folder

DOCS = ROOT / "docs"
DEADLINE_S = 120

# Commands that are not run here, and why.
NOT_RUN = {
    "make demo": "test_demo.py runs the demo itself",
    "make test": "it would run this test",
    "make bench": "it installs the peers and takes minutes",
    "make soak": "it takes minutes; test_nothing_lost.py runs its short form",
    "make proto": "it would write into the sources; test_proto.py makes the same and compares",
    ". .venv/bin/activate": "the sandbox has this interpreter first in its PATH",
    ".venv/bin/python -m pytest tests/unit/test_lease.py -q": "the tests run already",
}
RUNNABLE = ("python", "sh", "bash", "console")

PAGES = [page for page in all_pages() if any(block.language in RUNNABLE for block in read_blocks(page))]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_of_the_page_runs(page: Path, sandbox: Path) -> None:
    """Blocks run in order in one folder per page; files that a block is (`file=NAME`) are there for the later ones.

    So are daemons: a block may start one in the background, if it sends its output to a file.
    """
    blocks = read_blocks(page)
    if any("redis-server" in block.text for block in blocks) and shutil.which("redis-server") is None:
        pytest.skip("needs redis-server (apt-get install redis-server)")
    for index, block in enumerate(blocks):
        if block.file_name is not None:
            rest = "".join(later.text for later in blocks[index + 1 :])
            used = block.file_name.removesuffix(".py")
            assert re.search(rf"\b{re.escape(used)}\b", rest), (
                f"{block}: nothing below uses {block.file_name}"
            )
            (sandbox / block.file_name).write_text(block.text)
        elif block.no_run_reason is not None:
            assert len(block.no_run_reason.split()) >= 3, (
                f"{block}: no-run needs a reason: `no-run: because …`"
            )
        elif block.language == "python":
            script = sandbox / f"block_{block.line}.py"
            script.write_text(block.text)
            done = run(["python", script.name], sandbox)
            assert done.returncode == 0, f"{block}:\n{done.stdout}"
        elif block.language in ("sh", "bash"):
            run_commands(block, sandbox)
        elif block.language == "console":
            run_console(block, sandbox)


@pytest.fixture
def sandbox(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A folder to run a page in. Daemons, launchers and workers that were started there end with it.

    Where no block of the page names torch, there is none.
    """
    programs = [str(Path(sys.executable).parent), os.environ["PATH"]]
    if any("torch" in block.text for block in read_blocks(request.getfixturevalue("page"))):
        programs.insert(0, python_folder())
        monkeypatch.setenv("PYTHONPATH", launchers_folder())
    else:
        request.getfixturevalue("without_torch")
    monkeypatch.setenv("PATH", os.pathsep.join(programs))
    yield tmp_path
    end_processes(tmp_path)


def end_processes(folder: Path) -> int:
    """End all that was started there, and how many that were."""
    num_ended = 0
    while ours := [process for process in psutil.process_iter() if is_of(process, folder)]:
        num_ended += kill_processes(ours)
    return num_ended


def is_of(process: psutil.Process, folder: Path) -> bool:
    try:
        is_over = process.status() == psutil.STATUS_ZOMBIE
        # A Redis server writes its title over its environment.
        return not is_over and str(folder) in (process.environ().get("HOME"), process.cwd())
    except psutil.Error:
        return False


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "TRN_HOME": str(folder / "home"),  # short: a socket's path must be
        "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return subprocess.run(
        command,
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def run_commands(block: Block, folder: Path) -> None:
    kept = [line for line in block.text.splitlines() if line.strip() not in NOT_RUN]
    done = run(["bash", "-euo", "pipefail", "-c", "\n".join(kept)], folder)
    assert done.returncode == 0, f"{block}:\n{done.stdout}"


def run_console(block: Block, folder: Path) -> None:
    """`$ command` lines with the output below them; `…` stands for anything, log lines of a worker may be left out.

    All commands of a block run in one shell. `[exit N]` ends the output of a command that ends with N.
    """
    commands = [line[2:] for line in block.text.splitlines() if line.startswith("$ ")]
    script = ["set -uo pipefail"]
    for number, command in enumerate(commands):
        script += [f"echo '<<{number}'", command, 'echo "\x1e[exit $?]"']
    done = run(["bash", "-c", "\n".join(script)], folder)
    # An output need not end with a newline; what we print after it begins a line all the same.
    printed = re.sub(r"(?<!\n)\x1e", "\n", done.stdout).replace("\x1e", "")
    outputs = re.split(r"(?m)^<<\d+\n", printed)[1:]
    expected = re.split(r"(?m)^\$ .*\n", block.text)[1:]
    assert len(outputs) == len(expected) == len(commands), f"{block}:\n{done.stdout}"
    for command, output, wanted in zip(commands, outputs, expected, strict=True):
        lines = [line for line in output.splitlines() if not is_log_line(line)]
        patterns = wanted.splitlines()
        if not patterns or not patterns[-1].startswith("[exit "):
            patterns.append("[exit 0]")
        shown = f"{block}: $ {command}\n{output}"
        assert len(lines) == len(patterns), shown
        for line, pattern in zip(lines, patterns, strict=True):
            regex = ".*".join(map(re.escape, pattern.split("…")))
            assert re.fullmatch(regex, line), f"{shown}\nthis line: {line}\nexpected:  {pattern}"


def is_log_line(line: str) -> bool:
    if line.startswith("trn: importing the code"):
        return True  # said where it takes long, as it may or may not
    return re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (INFO|WARNING|DEBUG) ", line) is not None and (
        "finished" not in line
    )


def test_no_command_is_left_out_without_need() -> None:
    lines = {
        line.strip() for page in PAGES for block in read_blocks(page) for line in block.text.splitlines()
    }
    assert NOT_RUN.keys() <= lines


@pytest.mark.parametrize("page", all_pages(), ids=name_of)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    broken = []
    for link in links(page):
        if link.startswith(("https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("page", all_pages(), ids=name_of)
def test_repository_paths_in_prose_exist(page: Path) -> None:
    tops = "|".join(("src", "tests", "docs", "examples", "benchmarks", "proto"))
    elsewhere = {"settings.toml"}  # in the daemon's home
    named = [
        word
        for word in code_words(prose(page))
        if re.fullmatch(rf"({tops})/[\w./-]*|[A-Z]+\.md|\w+\.toml", word) and word not in elsewhere
    ]
    assert [word for word in named if not (ROOT / word).exists()] == []


# What this project once said instead of the standard terms.
RIDDLES = re.compile(
    r"\b(whoever|goes on|go on|going on|told|mend|mended|anew|sign of life|in words|so many|struck|to be had)\b"
)


@pytest.mark.parametrize(
    "page",
    [page for page in all_pages() if page.parent.name != "decisions" and page.name != "CHANGELOG.md"],
    ids=name_of,
)
def test_pages_use_standard_terms(page: Path) -> None:
    plain = re.sub(r"`[^`]*`|\]\([^)]*\)", "", prose(page))
    assert RIDDLES.findall(plain) == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_index_leads_to_every_page() -> None:
    index = DOCS / "index.md"
    linked = {(DOCS / link.partition("#")[0]).resolve() for link in links(index)}
    assert [name_of(page) for page in DOCS.rglob("*.md") if page not in linked and page != index] == []


def test_the_tree_of_the_readme_names_only_what_exists() -> None:
    (tree,) = [block for block in read_blocks(ROOT / "README.md") if block.language == "tree"]
    folders: list[tuple[int, Path]] = []
    for line in tree.text.splitlines():
        name = line.split()[0]
        indent = len(line) - len(line.lstrip())
        while folders and folders[-1][0] >= indent:
            folders.pop()
        path = (folders[-1][1] if folders else ROOT) / name
        assert path.exists(), line
        assert path.is_dir() == name.endswith("/"), line
        if path.is_dir():
            folders.append((indent, path))


def test_the_job_reference_is_fresh() -> None:
    for script in ("generate_job_reference.py", "generate_http_reference.py"):
        done = run([sys.executable, str(DOCS / script), "--check"], ROOT)
        assert done.returncode == 0, f"run `python docs/{script}`\n{done.stdout}"


def test_the_environment_table_is_what_the_worker_reads() -> None:
    rows = table_rows(DOCS / "operating.md", "Environment")
    documented = {word for row in rows for word in code_words(row[0])}
    sources = (
        "trainer/attempt/runtime_env.py",
        "entrypoint.py",
        "inference/environment.py",
        "contract/failpoints.py",
        "frozen_imports.py",
        "contract/subprocess_contract.py",
    )
    code = "".join((ROOT / "src" / "gen_worker" / name).read_text() for name in sources)
    pattern = r"\"((?:TRAINER|INFERENCE|TRN|WORKER|AWS|GEN_WORKER|STORAGE)_[A-Z0-9_]+)\""
    assert documented == set(re.findall(pattern, code))


def test_every_room_is_in_the_architecture_and_says_what_it_is_for() -> None:
    block = (DOCS / "architecture.md").read_text().split("```rooms\n")[1].split("```")[0]
    listed, above = set(), []
    for line in block.splitlines():
        name = line.split()[0].rstrip("/")
        depth = (len(line) - len(line.lstrip())) // 2
        above = [*above[:depth], name]
        listed.add("/".join(above))
    rooms = {str(path.parent.relative_to(ROOT)): path for path in (ROOT / "src").rglob("__init__.py")}
    assert listed == set(rooms)
    silent = [room for room, path in rooms.items() if not path.read_text().startswith('"""')]
    assert silent == []


def test_the_exit_code_table_is_the_codes() -> None:
    from gen_worker.errors import ExitCode

    rows = table_rows(DOCS / "loop.md", "Exit codes")
    assert {int(row[0]): code_words(row[1])[0] for row in rows} == {
        code.value: code.name for code in ExitCode
    }


def test_the_names_of_the_contract_reference_are_the_exported_ones() -> None:
    import gen_worker.trainer

    rows = table_rows(DOCS / "contract-reference.md", "Names")
    assert sorted(code_words(row[0])[0] for row in rows) == sorted(gen_worker.trainer.__all__)


def test_the_hooks_in_the_authoring_guide_are_the_ones_that_are_checked() -> None:
    from gen_worker.trainer.author.hooks import KEYWORD, POSITIONAL

    page = DOCS / "authoring.md"
    shown = {
        word
        for heading in ("The six hooks", "Optional hooks")
        for row in table_rows(page, heading)
        for word in code_words(row[0])
    }
    shown |= {word for word in code_words(prose(page)) if word.startswith(("validate_step(", "test_step("))}
    expected = {f"{name}({', '.join(names)})" for name, names in POSITIONAL.items()}
    expected |= {f"{name}(*, {', '.join(names)})" for name, names in KEYWORD.items()}
    assert shown == expected


def test_the_context_in_the_authoring_guide_is_the_context() -> None:
    from gen_worker.trainer import StepContext

    rows = table_rows(DOCS / "authoring.md", "StepContext")
    public = {name for name in dir(StepContext) if not name.startswith("_")} - {"progress"}
    assert {word for row in rows for word in code_words(row[0])} == public


def test_errors_in_the_authoring_guide_are_said_by_the_code() -> None:
    code = "".join(path.read_text() for path in (ROOT / "src" / "gen_worker").rglob("*.py"))
    # A message may go on in the next literal.
    code = re.sub(r"\"\s*\n\s*f?\"", "", code)
    rows = table_rows(DOCS / "authoring.md", "Common errors and their messages")
    assert len(rows) > 10
    unsaid = [word for row in rows for word in code_words(row[1]) if word not in code]
    assert unsaid == []


def test_the_example_events_have_the_fields_that_are_written(tmp_path: Path) -> None:
    from gen_worker.trainer import TrainingReporter

    (block,) = [block for block in read_blocks(DOCS / "operating.md") if block.language == "jsonl"]
    examples = [json.loads(line) for line in block.text.splitlines()]
    methods = {name for name in vars(TrainingReporter) if not name.startswith("_")}
    kinds = {example["event"] for example in examples}
    assert kinds == methods - {
        "cancel_reason",
        "close",
        "ended_by",
        "event",  # of any name: of a model server
        "events_path",
        "flush",
        "is_canceled",
        "reached_step",
        "terminal_event",
    }

    path = tmp_path / "events.jsonl"
    reporter = TrainingReporter(path, run_id="r")
    head = ("schema_version", "event", "seq", "run_id", "attempt", "timestamp_ms")
    for example in examples:
        fields = {name: value for name, value in example.items() if name not in head}
        if example["event"] == "failed":  # a second terminal event needs a second attempt
            reporter.close()
            reporter = TrainingReporter(path, run_id="r")
        getattr(reporter, example["event"])(**fields)
    reporter.close()
    written = [json.loads(line) for line in path.read_text().splitlines()]
    moments = {"timestamp_ms": 0}
    assert [event | moments for event in written] == [example | moments for example in examples]


def test_the_events_a_run_writes_have_the_documented_fields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    (block,) = [block for block in read_blocks(DOCS / "operating.md") if block.language == "jsonl"]
    documented = {(event := json.loads(line))["event"]: set(event) for line in block.text.splitlines()}
    (tmp_path / "tiny.py").write_text(
        next(
            block.text for block in read_blocks(DOCS / "operating.md") if block.file_name == "slow.py"
        ).replace("time.sleep(0.1)", "pass")
    )
    job = {
        "run_id": "r",
        "trainer": "tiny:Slow",
        "mock_batches": [1, 2],
        "metric_every": 1,
        "heartbeat_s": 0.2,
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    command = "WORKER_MODE=trainer TRAINER_JOB_SPEC_PATH=job.json TRAINER_ARTIFACTS_DIR=run exec python -m gen_worker.entrypoint"
    done = run(["bash", "-c", command], tmp_path)
    assert done.returncode == 0, done.stdout
    events = [
        json.loads(line) for line in (tmp_path / "run" / "metrics" / "events.jsonl").read_text().splitlines()
    ]
    kinds = {event["event"] for event in events}
    assert kinds >= {"started", "metric", "checkpoint", "log", "completed"}
    for event in events:
        if event["event"] != "log":  # its extra fields differ by message
            assert set(event) == documented[event["event"]], event


def test_no_process_of_a_page_is_left_behind(tmp_path: Path) -> None:
    """What ends the daemons of a page also finds what was detached, or has another folder."""
    command = "exec > /dev/null 2>&1; cd /; sleep 600 & setsid sleep 600 &"
    assert run(["bash", "-c", command], tmp_path).returncode == 0
    deadline = time.monotonic() + DEADLINE_S
    num_ended = 0
    while num_ended < 2 and time.monotonic() < deadline:
        num_ended += end_processes(tmp_path)
    assert num_ended == 2
