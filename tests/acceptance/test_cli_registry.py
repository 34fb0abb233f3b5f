"""`trn list`, `status`, `why` and `daemon`, as operators and programs use them: the installed command, a real home."""

import contextlib
import fcntl
import itertools
import json
import os
import pty
import re
import signal
import sqlite3
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT, Block, code_words, read_blocks, table_rows

from trn.client.daemon_start import ensure_daemon, find_daemon
from trn.core.causes import Cause, failure
from trn.core.digest import run_digest
from trn.core.errors import UnavailableError
from trn.core.home import Home
from trn.core.runs import RunState
from trn.registry.base import Ending, NewRun
from trn.registry.metrics import MetricStore
from trn.registry.sqlite import RunRegistry

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
from daemon_process import DEADLINE_S, DaemonProcess, end_everything

pytestmark = pytest.mark.usefixtures("without_torch")
TRN = str(Path(sys.executable).with_name("trn"))
CAUSE = "training failed at step 3: RuntimeError: too \x1b[31mbad"
FAILED = failure("train-step", step=3, error="RuntimeError: too \x1b[31mbad", outlook="not-retried")
WAITS_FOR_GPU = Cause(id="waits-for-gpu", waits_for=("gpu",), values={"gpus": 1})


def new_run(run_id: str, **more: Any) -> NewRun:
    config = {"trainer": "a:B", "seed": run_id}
    return NewRun(run_id=run_id, digest=run_digest(config), config=config, **more)


def fill(home: Home) -> None:
    """Four runs, as a daemon would have left them."""
    home.make()
    ticks = itertools.count(time.time_ns() // 1_000_000 - 1000)  # no two at once
    registry = RunRegistry(home.registry, clock_ms=lambda: next(ticks))
    metrics = MetricStore(home.metrics)
    for run in (
        new_run("alpha-1", name="first", tags={"team": "vision"}),
        new_run("alpha-2", name="second", tags={"team": "speech"}, max_attempts=2),
        new_run("beta-1", name="third"),
        new_run("gamma-1", name="fourth", priority=5),
    ):
        registry.submit(run).result()
    for run_id, step in (("alpha-1", 40), ("alpha-2", 3)):
        registry.claim(run_id, []).result()
        registry.launched(run_id, 1, worker="b/77/1", pid=77).result()
        last = {"train/loss": float(step)}
        registry.follow(
            run_id, 1, offset=100, last_seq=9, step=step, heartbeat_ms=1, metrics=last, end_step=40
        ).result()
        points = [(seq, 1, "train/loss", seq, 10.0 / seq, 1000 + seq) for seq in range(1, step + 1)]
        metrics.add(run_id, offset=100, last_seq=step, points=points).result()
    done = Ending(state=RunState.COMPLETED, cause=Cause(id="completed", values={"step": 40}), exit_code=0)
    registry.end("alpha-1", 1, done).result()
    failed = Ending(state=RunState.FAILED, cause=FAILED, category="train-step", exit_code=14)
    registry.end("alpha-2", 1, failed).result()
    registry.want_cancel("beta-1", "not wanted any more").result()
    registry.set_cause("gamma-1", WAITS_FOR_GPU).result()
    metrics.close()
    registry.close()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """No daemon serves it: everything that is read here is read without one."""
    home = Home(tmp_path_factory.mktemp("cli") / "home")
    fill(home)
    return home


@pytest.fixture
def live_home(tmp_path: Path) -> Iterator[Home]:
    yield Home(tmp_path / "home")
    end_everything(tmp_path / "home")


def trn(
    home: Home | None, *words: str, stdin: str | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    """The installed command in a pipe."""
    return subprocess.run(
        [TRN, *words],
        env={**os.environ, **({"TRN_HOME": str(home.root)} if home else {}), **environ},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def records(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines()]


class Terminal:
    """The command in a real terminal of 30 lines."""

    def __init__(self, home: Home, *words: str, num_columns: int = 100, **environ: str) -> None:
        self.screen = ""
        self._leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 30, num_columns, 0, 0))
        kept = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        self._process = subprocess.Popen(
            [TRN, *words],
            env={**kept, "TERM": "xterm", "PYTHONUTF8": "1", "TRN_HOME": str(home.root), **environ},
            stdin=follower,
            stdout=follower,
            stderr=follower,
            start_new_session=True,
        )
        os.close(follower)

    def read_until(self, text: str) -> None:
        """Until the terminal has shown this since the last call."""
        begin = len(self.screen)
        while text not in self.screen[begin:]:
            part = self._read()
            assert part, f"no {text!r} in {self.screen[begin:]!r}"
            self.screen += part

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def end(self) -> int:
        while part := self._read():
            self.screen += part
        os.close(self._leader)
        return self._process.wait(DEADLINE_S)

    def _read(self) -> str:
        try:
            return os.read(self._leader, 65536).decode(errors="replace")
        except OSError:  # nobody has the other end open any more
            return ""


def shown(home: Home, *words: str, num_columns: int = 100, **environ: str) -> str:
    terminal = Terminal(home, *words, num_columns=num_columns, **environ)
    code = terminal.end()
    assert code == 0, terminal.screen
    return terminal.screen.replace("\r\n", "\n")


def without_colour(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_list_gives_programs_one_object_a_line_and_nothing_else(home: Home) -> None:
    done = trn(home, "list")
    assert (done.returncode, done.stderr) == (0, "")
    found = records(done)
    assert [run["run_id"] for run in found] == ["gamma-1", "beta-1", "alpha-2", "alpha-1"]
    assert found[3]["metrics"] == {"train/loss": 40.0}
    assert found[3]["tags"] == {"team": "vision"}
    assert {"state", "reason", "name", "step", "end_step", "attempt", "submitted_ms", "ended_ms"} <= found[
        0
    ].keys()


@pytest.mark.parametrize(
    ("words", "ids"),
    [
        (("--state", "failed", "--state", "COMPLETED"), ["alpha-2", "alpha-1"]),
        (("--name", "ir"), ["beta-1", "alpha-1"]),
        (("--tag", "team"), ["alpha-2", "alpha-1"]),
        (("--tag", "team=speech"), ["alpha-2"]),
        (("--since", "1h", "--limit", "1"), ["gamma-1"]),
        (("--since", "2100-01-01"), []),
        (("--sort", "priority"), ["gamma-1", "beta-1", "alpha-2", "alpha-1"]),
        (("--sort", "submitted", "--reverse"), ["alpha-1", "alpha-2", "beta-1", "gamma-1"]),
        (("--sort", "train/loss"), ["alpha-2", "alpha-1"]),
        (("--sort", "name", "--limit", "2"), ["alpha-1", "gamma-1"]),
    ],
)
def test_list_filters_sorts_and_limits(home: Home, words: tuple[str, ...], ids: list[str]) -> None:
    assert [run["run_id"] for run in records(trn(home, "list", *words))] == ids


def test_list_is_a_table_at_a_terminal_with_colour_by_state(home: Home) -> None:
    screen = shown(home, "list")
    assert "\x1b[31mFAILED" in screen
    lines = without_colour(screen).splitlines()
    assert lines[0].split() == ["ID", "STATE", "NAME", "STEP", "AGE", "TOOK", "REASON"]
    assert max(map(len, lines)) <= 100
    assert {line.index("fourth") for line in lines if "fourth" in line} == {lines[0].index("NAME")}
    # what a worker said cannot steer the terminal of who looks
    assert "too \x1b[31m" not in shown(home, "list", "--columns", "id,reason", "--state", "failed")


@pytest.mark.parametrize("environ", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_colour_where_none_is_wanted(home: Home, environ: dict[str, str]) -> None:
    for words in (("list",), ("status", "alpha-2")):
        assert "\x1b" not in shown(home, *words, **environ)


def test_columns_are_chosen_by_name_and_metrics_too(home: Home) -> None:
    screen = without_colour(shown(home, "list", "--columns", "id,train/loss,tags"))
    assert screen.splitlines()[-1].split() == ["alpha-1", "40", "team=vision"]
    wrong = trn(home, "list", "--columns", "id,nonsense")
    assert wrong.returncode == 2
    assert "no column nonsense: there are id, state" in wrong.stderr


def test_on_a_narrow_terminal_the_columns_that_tell_least_give_way(home: Home) -> None:
    for columns in (100, 60, 44, 30):
        lines = without_colour(shown(home, "list", num_columns=columns)).splitlines()
        assert max(map(len, lines)) <= columns, lines
        assert {"ID", "STATE", "STEP"} <= set(lines[0].split())
    assert "REASON" not in lines[0]
    chosen = without_colour(shown(home, "list", "--columns", "id,took,name,age", num_columns=30))
    assert chosen.split()[:4] == ["ID", "TOOK", "NAME", "AGE"]  # what was asked for is shown


def test_a_home_without_runs_says_how_to_begin(tmp_path: Path) -> None:
    done = trn(Home(tmp_path / "nowhere"), "list")
    assert (done.returncode, done.stdout) == (0, "")
    assert "no runs yet" in done.stderr
    assert not (tmp_path / "nowhere").exists()
    missing = trn(Home(tmp_path / "nowhere"), "status", "x")
    assert missing.returncode == 4
    assert records(missing)[0]["code"] == "not-found"


def test_list_watch_redraws_until_ctrl_c_and_gives_the_screen_back(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    fill(home)
    terminal = Terminal(home, "list", "--watch")
    terminal.read_until("waits for 1 GPU")
    registry = RunRegistry(home.registry)
    registry.set_cause("gamma-1", Cause(id="waits-for-cpu", waits_for=("cpu",))).result()
    registry.close()
    terminal.read_until("waits for 1 CPU")
    terminal.interrupt()
    assert terminal.end() == 130
    assert terminal.screen.startswith("\x1b[?1049h")
    assert terminal.screen.endswith("\x1b[?1049l")


def test_list_watch_in_a_pipe_tells_each_change(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    fill(home)
    command = [TRN, "--home", str(home.root), "list", "--watch", "--state", "pending"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["reason"] == "waits for 1 GPU"
        registry = RunRegistry(home.registry)
        registry.set_cause("gamma-1", Cause(id="waits-for-cpu", waits_for=("cpu",))).result()
        registry.close()
        assert json.loads(process.stdout.readline())["reason"] == "waits for 1 CPU"
        process.send_signal(signal.SIGINT)
    assert process.returncode == 130


def test_status_tells_a_person_everything_about_a_run(home: Home) -> None:
    screen = without_colour(shown(home, "status", "alpha-1"))
    for part in (
        "COMPLETED  first",
        "step 40 of 40 (100 %)",
        "completed at step 40",
        "exit 0: completed at step 40",
    ):
        assert part in screen
    assert re.search(r"train/loss +0\.25 +0\.25 +10  min at step 40\n", screen)
    assert re.search(r"10 │⡇|10 │⢇|10 │[⠀-⣿]", screen)
    assert "trn logs alpha-1" in screen


def test_status_gives_programs_the_record_its_attempts_and_why(home: Home) -> None:
    [record] = records(trn(home, "status", "alpha-2"))
    assert (record["state"], record["step"], record["attempts"][0]["exit_code"]) == ("FAILED", 3, 14)
    assert record["metrics"]["train/loss"] == {
        "last": 10 / 3,
        "min": 10 / 3,
        "max": 10.0,
        "best": 10 / 3,
        "best_is": "min",
        "best_step": 3,
        "step": 3,
        "num_points": 3,
    }
    assert record["why"]["fault"] == "job"
    assert Path(record["folder"]) == home.root / "runs" / "alpha-2"
    assert trn(home, "status", "alpha-2", "--metric", "nonsense").returncode == 2


@pytest.mark.parametrize(
    ("run_id", "says", "fault"),
    [
        ("alpha-1", "alpha-1 completed at step 40", ""),
        ("alpha-2", "Why: training failed at step 3", "job"),
        ("beta", "Why: not wanted any more", ""),
        ("gamma", "no daemon is running; last known cause: waits for 1 GPU", ""),
    ],
)
def test_why_is_three_lines_with_a_cause(home: Home, run_id: str, says: str, fault: str) -> None:
    [told] = records(trn(home, "why", run_id))
    assert says in told["sentence"]
    assert (told["fault"], told["cause"]["fault"]) == (fault, fault)
    sentence = " ".join(without_colour(shown(home, "why", run_id)).split())
    assert says in sentence
    assert sentence.endswith(".")


SCREENS = [
    block for block in read_blocks(ROOT / "docs" / "cli-registry.md") if block.info.startswith("screen: ")
]


@pytest.mark.parametrize("block", SCREENS, ids=lambda block: block.info)
def test_the_screens_in_the_docs_are_what_a_terminal_shows(home: Home, block: Block) -> None:
    """Line by line; `…` in the page stands for anything."""
    words = block.info.removeprefix("screen: trn ").split()
    lines = without_colour(shown(home, *words)).splitlines()
    patterns = block.text.splitlines()
    assert len(lines) == len(patterns), lines
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.fullmatch(".*".join(map(re.escape, pattern.split("…"))), line), (line, pattern)


def test_the_screens_are_not_lost() -> None:
    assert {block.info.split()[2] for block in SCREENS} == {"list", "status", "why"}


def test_a_prefix_of_several_runs_is_refused_with_their_names(home: Home) -> None:
    for verb in ("status", "why"):
        done = trn(home, verb, "alpha")
        assert done.returncode == 2
        assert "'alpha' is the beginning of several runs: alpha-1, alpha-2" in done.stderr
        assert records(done) == [{"event": "error", "code": "invalid-argument", "message": done.stderr[5:-1]}]


def test_errors_are_one_line_and_a_code_and_never_a_traceback(home: Home, tmp_path: Path) -> None:
    broken = Home(tmp_path / "broken")
    broken.make()
    broken.registry.write_bytes(b"no database at all" * 1000)
    for done, code in (
        (trn(home, "nonsense"), 2),
        (trn(home, "list", "--limit", "-1"), 2),
        (trn(home, "status", "nobody"), 4),
        (trn(broken, "list"), 5),
        (trn(broken, "why", "x"), 5),
    ):
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        assert [record["event"] for record in records(done)] == ["error"]


def test_a_reader_that_has_enough_is_no_error(home: Home) -> None:
    done = subprocess.run(
        f"set -o pipefail; '{TRN}' --home '{home.root}' list | head -n 1",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("has_log", [True, False])
def test_a_home_that_cannot_be_written_can_be_read(tmp_path: Path, has_log: bool) -> None:
    """As on a disk that was mounted read-only: SQLite cannot make its own files there."""
    home = Home(tmp_path / "home")
    fill(home)
    if not has_log:  # as a backup is
        for path in (home.registry, home.metrics):
            with contextlib.closing(sqlite3.connect(path)) as connection:
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    for path in home.root.glob("*.db*"):
        path.chmod(0o444)
    home.root.chmod(0o555)
    # Root may write everywhere; without two of its powers it may not.
    bound = (
        "import ctypes, os, sys; [ctypes.CDLL(None).prctl(24, power, 0, 0, 0) for power in (1, 2)];"
        " os.execv(sys.argv[1], sys.argv[1:])"
    )
    try:
        prefix = [sys.executable, "-c", bound]
        touched = subprocess.run(
            [*prefix, "/usr/bin/touch", str(home.root / "new")], check=False, timeout=DEADLINE_S
        )
        assert touched.returncode != 0, "this test needs a folder that it cannot write into"
        for words in (["list"], ["status", "alpha-1"], ["why", "alpha-1"]):
            done = subprocess.run(
                [*prefix, TRN, "--home", str(home.root), *words],
                capture_output=True,
                text=True,
                timeout=DEADLINE_S,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            last = records(done)[-1]
            assert last["run_id"] == "alpha-1"
            if words[0] == "status":
                assert last["metrics"]["train/loss"]["last"] == 0.25
    finally:
        home.root.chmod(0o755)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_completes_verbs_and_run_ids(home: Home, shell: str) -> None:
    script = trn(home, _TRN_COMPLETE=f"{shell}_source")
    assert (script.returncode, "_TRN_COMPLETE" in script.stdout) == (0, True)

    def complete(words: str, last: str, index: int) -> str:
        environ = {
            "_TRN_COMPLETE": f"{shell}_complete",
            "COMP_WORDS": words,
            "COMP_CWORD": last if shell == "fish" else str(index),
        }
        return trn(home, **environ).stdout

    assert re.findall(r"\b(?:list|status|why)\b", complete("trn wh", "wh", 1))[:1] == ["why"]
    answer = complete("trn status al", "al", 2)
    assert "alpha-1" in answer
    assert "alpha-2" in answer
    assert "beta-1" not in answer


def test_the_daemon_is_started_asked_and_stopped(live_home: Home) -> None:
    down = trn(live_home, "daemon", "status")
    assert (down.returncode, records(down)[0]["is_up"]) == (5, False)
    [started] = records(trn(live_home, "daemon", "start"))
    assert started["event"] == "daemon_started"
    [again] = records(trn(live_home, "daemon", "start"))
    assert (again["event"], again["pid"]) == ("daemon_already_running", started["pid"])
    up = trn(live_home, "daemon", "status")
    [status] = records(up)
    assert (up.returncode, status["is_up"], status["pid"]) == (0, True, started["pid"])
    assert {"version", "addresses", "runs_by_state", "launcher", "warnings"} <= status.keys()
    assert f"pid {started['pid']}" in without_colour(shown(live_home, "daemon", "status"))
    [stopped] = records(trn(live_home, "daemon", "stop"))
    assert (stopped["event"], stopped["pid"]) == ("daemon_stopped", started["pid"])
    assert records(trn(live_home, "daemon", "stop"))[0]["event"] == "daemon_not_running"


def test_notes_and_tags_of_a_run_are_changed_and_shown(live_home: Home) -> None:
    fill(live_home)
    [before] = records(trn(live_home, "tag", "alpha-1"))
    assert (before["event"], before["is_changed"], before["tags"]) == (
        "run_labels",
        False,
        {"team": "vision"},
    )
    done = trn(live_home, "tag", "alpha-1", "stage=final", "group=g1", "--remove", "team", "--remove", "none")
    [line] = records(done)
    assert (line["is_changed"], line["tags"]) == (True, {"stage": "final", "group": "g1"})
    assert done.stderr.strip() == "alpha-1 has no tag 'none'"
    assert [run["run_id"] for run in records(trn(live_home, "list", "--tag", "group=g1"))] == ["alpha-1"]
    [line] = records(trn(live_home, "note", "alpha-1", "-", stdin="best so far\nlr was too high before\n"))
    assert line["notes"] == "best so far\nlr was too high before"
    screen = without_colour(shown(live_home, "status", "alpha-1"))
    assert "tags: group=g1  stage=final" in screen
    assert "  lr was too high before" in screen
    [status] = records(trn(live_home, "status", "alpha-1"))
    assert (status["notes"], status["tags"]) == (line["notes"], line["tags"])
    refused = trn(live_home, "tag", "alpha-1", "=x")
    assert (refused.returncode, "expected 1 to 128 printable characters" in refused.stderr) == (3, True)
    assert trn(live_home, "tag", "alpha-1", "stage").returncode == 2
    [line] = records(trn(live_home, "note", "alpha-1", "--name", "Baseline, 3 layers"))
    assert (line["run_id"], line["name"]) == ("alpha-1", "Baseline, 3 layers")
    assert records(trn(live_home, "status", "alpha-1"))[0]["name"] == "Baseline, 3 layers"
    assert trn(live_home, "note", "alpha-1", "--name", "two\nlines").returncode == 3
    assert records(trn(live_home, "note", "alpha-1", ""))[0]["notes"] == ""
    assert "alpha-1 has no notes" in shown(live_home, "note", "alpha-1")


def test_ten_that_need_a_daemon_at_once_get_the_same_one(live_home: Home) -> None:
    with ThreadPoolExecutor(10) as threads:
        found = list(threads.map(lambda _: records(trn(live_home, "daemon", "start")), range(10)))
    assert len({answer[0]["pid"] for answer in found}) == 1
    assert [answer[0]["event"] for answer in found].count("daemon_started") == 1
    assert "Traceback" not in (live_home.root / "daemon.out").read_text()


def test_a_daemon_that_refuses_is_quoted(live_home: Home) -> None:
    live_home.make()
    live_home.settings.write_text("nonsense = 1\n")
    done = trn(live_home, "daemon", "start")
    assert done.returncode == 5
    assert "unknown field `nonsense`" in done.stderr


@pytest.mark.parametrize(("asked", "kept"), [(None, None), ("DEBUG", "DEBUG")])
def test_a_daemon_does_not_inherit_how_little_the_command_lets_grpc_print(
    live_home: Home, monkeypatch: pytest.MonkeyPatch, asked: str | None, kept: str | None
) -> None:
    """Its workers get what it has: an author's own gRPC prints as it always does."""
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    started = trn(live_home, "daemon", "start", **({"GRPC_VERBOSITY": asked} if asked else {}))
    pid = records(started)[0]["pid"]
    pairs = Path(f"/proc/{pid}/environ").read_text().split("\0")
    assert dict(pair.split("=", 1) for pair in pairs if pair).get("GRPC_VERBOSITY") == kept


def test_a_home_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = trn(Home(tmp_path / "file" / "home"), "daemon", "start")
    assert done.returncode == 5
    assert "cannot be written" in done.stderr


def wait_for_no_daemon(home: Home) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while find_daemon(home) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_a_dead_daemon_left_is_no_daemon_and_another_takes_its_place(live_home: Home) -> None:
    first = DaemonProcess(live_home.root, is_bare=True)
    first.wait_ready()
    assert find_daemon(live_home) is not None
    first.kill()
    assert live_home.daemon_info.exists()
    wait_for_no_daemon(live_home)  # the launcher that it was just starting has its socket until its exec
    second, is_new = ensure_daemon(live_home, idle_exit_s=0.4)
    assert (is_new, second.pid != first.pid) == (True, True)
    wait_for_no_daemon(live_home)  # nobody asks anything of it: it leaves


def test_a_pid_that_is_not_the_listener_is_never_signalled(live_home: Home) -> None:
    daemon = DaemonProcess(live_home.root, is_bare=True)
    info = daemon.wait_ready()
    with subprocess.Popen(["sleep", "600"]) as bystander:
        text = live_home.daemon_info.read_text().replace(str(info.pid), str(bystander.pid))
        live_home.daemon_info.write_text(text)
        assert records(trn(live_home, "daemon", "stop"))[0]["event"] == "daemon_not_running"
        assert bystander.poll() is None
        bystander.kill()
    assert daemon.is_running()


def test_a_daemon_of_another_version_is_named(live_home: Home) -> None:
    daemon = DaemonProcess(live_home.root, is_bare=True)
    info = daemon.wait_ready()
    text = live_home.daemon_info.read_text().replace(f'"{info.version}"', '"0.0.9"')
    live_home.daemon_info.write_text(text)
    for verb in ("start", "status"):
        assert "the daemon is trn 0.0.9 and this is trn" in trn(live_home, "daemon", verb).stderr


def test_no_daemon_in_time_is_said_with_where_to_look(live_home: Home) -> None:
    with pytest.raises(UnavailableError, match=r"no daemon of .* answers after 0 s: see .*daemon\.log"):
        ensure_daemon(live_home, patience_s=0)


def test_the_exit_codes_in_the_docs_are_the_codes() -> None:
    from trn.cli.exit_codes import ExitCode

    rows = table_rows(ROOT / "docs" / "cli-registry.md", "What all commands share")
    assert {int(row[0]): code_words(row[1])[0] for row in rows} == {
        code.value: code.name for code in ExitCode
    }


def test_the_options_and_columns_of_list_in_the_docs_are_all_that_there_are() -> None:
    from trn.cli.verbs.list_runs import COLUMNS, SORTS, command

    rows = {
        code_words(row[0])[0].split()[0]: row[1]
        for row in table_rows(ROOT / "docs" / "cli-registry.md", "trn list")
    }
    assert rows.keys() == {parameter.opts[0] for parameter in command.params} - {"--json", "--format"}
    for option, names in (("--columns", COLUMNS), ("--sort", SORTS)):
        assert {word for word in code_words(rows[option]) if "/" not in word and "." not in word} == set(
            names
        )
