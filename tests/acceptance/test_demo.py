"""The first minute keeps its promise: the demo trains, kills, resumes, compares, and leaves nothing behind."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
from documents import ROOT

sys.path.insert(0, str(ROOT / "tests" / "integration"))
from daemon_process import end_everything

DEMO = ROOT / "examples" / "first_minute"
DEADLINE_S = 240


def start(out: Path, *, demo: Path = DEMO, **env: str) -> subprocess.Popen[str]:
    environ = {"PATH": os.environ["PATH"], "HOME": "", "DEMO_OF": str(out), **env}
    return subprocess.Popen(
        [sys.executable, str(demo / "demo.py"), "--quick", "--out", str(out)],
        env=environ,
        cwd=out.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def processes_of(out: Path) -> list[str]:
    """Command lines of living processes that the demo of `out` started, known by the variable it was given."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"DEMO_OF={out}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # gone meanwhile, or not ours to read
    return found


def events_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics/events.jsonl").read_text().splitlines()]


def test_a_killed_and_resumed_run_ends_with_the_same_bits_and_only_the_page_is_left(tmp_path: Path) -> None:
    out = tmp_path / "runs"
    try:
        with start(out) as process:
            text, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, text
        check_the_words(text)
        check_the_runs(out)
        check_the_page(out, text)
        assert [path.name for path in tmp_path.iterdir()] == [out.name], "it writes nowhere else"
        looked_at = text.partition("Look at")[2].partition("See both runs")[0]
        places = [line.split()[0] for line in looked_at.splitlines() if line.strip()]
        files = [place for place in places if "/" in place]
        assert len(files) == 5
        files = [place.removeprefix("TRN_HOME=") for place in files]
        assert [
            place for place in files if not (tmp_path / place).exists() and not (ROOT / place).exists()
        ] == []
        check_that_one_bit_is_noticed(out)
    finally:
        end_everything(out)


def check_the_words(text: str) -> None:
    assert "Bit-identical. 200 of 200 step losses are equal;" in text
    assert re.search(r"\n  0 of the [\d,]+ values in final\.pt", text)
    killed, resumed = (
        int(found[1])
        for pattern in (r"killed with -9 at step (\d+)", r"resumed at step (\d+)")
        if (found := re.search(pattern, text))
    )
    assert 0 < resumed <= killed < 200
    accuracies = [float(number) for number in re.findall(r"([\d.]+)%", text)]
    assert len(accuracies) == 2
    assert min(accuracies) > 40, "of ten digits; a guess would be right one time in ten"
    for unwanted in ("\x1b", "\r", "Traceback"):
        assert unwanted not in text, "in a pipe it is plain text"


def check_the_page(out: Path, text: str) -> None:
    """The link shows both runs, and the printed command ends what the demo left."""
    found = re.search(r"(http://127\.0\.0\.1:\d+)/compare\?run=a&run=b#token=(\S+)", text)
    assert found, text
    origin, token = found.groups()
    with httpx.Client(base_url=origin, headers={"Origin": origin}, timeout=DEADLINE_S) as browser:
        assert browser.get("/compare").status_code == 200
        assert browser.post("/api/v1/login", json={"token": token}).status_code == 204
        runs = browser.get("/api/v1/runs").json()["runs"]
    assert {run["run_id"]: run["state"] for run in runs} == {"a": "COMPLETED", "b": "COMPLETED"}
    (stop,) = re.findall(r"close the page +(.*)", text)
    done = subprocess.run(
        stop.split(), cwd=out.parent, capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert "the page is closed" in done.stdout or '"daemon_stopped"' in done.stdout
    left = processes_of(out)
    assert [command for command in left if "gen_worker.launcher" not in command] == [], (
        "the launcher waits for a daemon"
    )


def check_the_runs(out: Path) -> None:
    terminals = {}
    for name in "ab":
        events = events_of(out / "home" / "runs" / name)
        assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
        assert {event["run_id"] for event in events} == {name}
        ends = [event for event in events if event["event"] in ("completed", "failed")]
        terminals[name] = [(event["attempt"], event["event"]) for event in ends]
    # One for each attempt: what a killed worker could not say, the daemon said for it.
    assert terminals == {"a": [(1, "completed")], "b": [(1, "failed"), (2, "completed")]}
    folders = [out / "home" / "runs" / name / "checkpoints" for name in "ab"]
    a, b = ((folder / "final.pt").read_bytes() for folder in folders)
    assert a == b
    meta_a, meta_b = (json.loads((folder / "final.meta.json").read_text()) for folder in folders)
    for part in ("state", "rng", "cursor", "step", "epoch"):
        assert meta_a[part] == meta_b[part]


def check_that_one_bit_is_noticed(out: Path) -> None:
    """The demo's own comparison, over runs of which one value has one bit that is different."""
    folder = out / "home" / "runs" / "b" / "checkpoints"
    meta = json.loads((folder / "final.meta.json").read_text())
    weight = next(tensor for tensor in meta["tensors"] if tensor["name"].startswith("model."))
    content = bytearray((folder / "final.pt").read_bytes())
    content[weight["offset"]] ^= 1
    (folder / "final.pt").write_bytes(content)
    code = (
        "import sys; from pathlib import Path; from demo import compare; from screen import Screen; from runs import Run;"
        " out = Path(sys.argv[1]); sys.exit(not compare(Screen(), out, Run(out, 'a'), Run(out, 'b'), 200))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(out)],
        cwd=DEMO,
        env={"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "NOT bit-identical. 200 of 200 step losses are equal;" in done.stdout
    assert re.search(r"\n  1 of the [\d,]+ values in final\.pt", done.stdout)


def test_ctrl_c_ends_the_demo_with_its_worker(tmp_path: Path) -> None:
    out = tmp_path / "runs"
    with start(out) as process:
        assert process.stdout is not None
        lines = [next(line for line in process.stdout if "step " in line)]  # a worker is training
        started = processes_of(out)
        for part in ("trn.daemon", "gen_worker.launcher", "trn run"):
            assert any(part in command for command in started), started
        process.send_signal(signal.SIGINT)
        lines += process.stdout.readlines()
    assert process.returncode == 130, lines
    assert "Stopped. No worker is left running." in "".join(lines)
    assert "Traceback" not in "".join(lines)
    assert processes_of(out) == []


def test_a_failing_worker_is_told_in_its_own_words(tmp_path: Path) -> None:
    broken = tmp_path / "first_minute"
    shutil.copytree(DEMO, broken, ignore=shutil.ignore_patterns("__pycache__"))
    trainer = broken / "trainer.py"
    trainer.write_text(
        trainer.read_text().replace("loss.backward()", 'raise ValueError("no gradient today")')
    )
    with start(tmp_path / "runs", demo=broken) as process:
        text, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert re.search(r"The demo stopped: run a: training failed: ValueError: no gradient today", text), text
    assert "Traceback" not in text
    assert processes_of(tmp_path / "runs") == []


def test_a_folder_that_is_not_the_demos_is_never_emptied(tmp_path: Path) -> None:
    out = tmp_path / "thesis"
    out.mkdir()
    (out / "chapter-1.md").write_text("precious")
    with start(out) as process:
        text, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert "holds files that are not the demo's" in text
    assert (out / "chapter-1.md").read_text() == "precious"
