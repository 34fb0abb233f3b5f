"""Words of the tools: what an option refuses, what a line says, what is answered without a daemon."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.shell_completion import BashComplete, FishComplete, ZshComplete

from gen_worker.tools import dataset as dataset_tool
from trn.cli import command_table as verbs
from trn.cli.submitting.submit_options import read_submit_options
from trn.cli.verbs.daemon import _find_launchers
from trn.cli.verbs.logs import LineSink
from trn.client import daemon_start
from trn.client.daemon_start import RunningDaemon
from trn.core.bus_url import read_bus_url
from trn.core.errors import InvalidRequestError
from trn.core.home import Home
from trn.core.runs import RunState
from trn.core.version import VERSION
from trn.registry.base import NewRun
from trn.registry.sqlite import RunRegistry


@pytest.fixture
def ended(tmp_path: Path) -> Home:
    """A home with one cancelled run, whose log has three lines, and no daemon."""
    home = Home(tmp_path / "home")
    home.make()
    registry = RunRegistry(home.registry)
    registry.submit(NewRun(run_id="one", digest="d", config={"trainer": "a:B"})).result()
    registry.want_cancel("one", "by a test").result()
    registry.close()
    home.run("one").root.mkdir(parents=True)
    home.run("one").log.write_bytes("first\nzwö\xff\n".encode("latin-1") + b"no end")
    return home


def test_a_log_is_its_own_bytes_and_objects_with_offsets_where_asked(
    ended: Home, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    content = ended.run("one").log.read_bytes()
    assert verbs.run(["--home", str(ended.root), "logs", "one"]) == 0
    assert capfdbinary.readouterr().out == content
    assert verbs.run(["--home", str(ended.root), "logs", "one", "--json"]) == 0
    lines = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    assert [line["line"] for line in lines] == ["first", "zw\ufffd\ufffd", "no end"]
    assert [line["offset"] for line in lines] == [0, 6, 11]
    assert {line["event"] for line in lines} == {"log"}
    assert all(content[line["offset"] :].startswith(line["line"][:2].encode()) for line in lines)


def test_a_line_that_comes_in_pieces_is_one_object(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    sink = LineSink(100)
    for piece in (b"a", b"b\nc", b"\n\nd"):
        sink(piece)
    sink.end()
    told = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    assert [(line["offset"], line["line"]) for line in told] == [
        (100, "ab"),
        (103, "c"),
        (105, ""),
        (106, "d"),
    ]


LONG_LINE = """
import io, json, sys
from trn.cli.verbs.logs import LineSink

sys.stdout = io.TextIOWrapper(io.BytesIO())
sink = LineSink(0)
for _ in range(1 << 20):
    sink(b"x" * 64)
sink(b"\\nnext")
sink.end()
first, second = map(json.loads, sys.stdout.buffer.getvalue().splitlines())
assert len(first["line"]) == 64 << 20 and second == {"event": "log", "offset": (64 << 20) + 1, "line": "next"}
"""


def test_a_line_of_64_mb_costs_no_more_than_its_length() -> None:
    # With a copy of the line for each piece it would take hours.
    subprocess.run([sys.executable, "-c", LONG_LINE], check=True, timeout=300)


def test_a_cancel_of_an_ended_run_is_answered_without_a_daemon(
    ended: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verbs.run(["--home", str(ended.root), "cancel", "one"]) == 6
    told = json.loads(capsys.readouterr().out)
    assert (told["event"], told["was_live"], told["state"]) == ("cancel_wanted", False, RunState.CANCELLED)
    assert not (ended.root / "daemon.out").exists()


@pytest.mark.parametrize("words", [["daemon", "start", "--idle-exit-s"], ["wait", "one", "--timeout"]])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_seconds_are_finite(
    tmp_path: Path, words: list[str], value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verbs.run(["--home", str(tmp_path / "home"), *words, value]) == 2
    assert f"{value} is not a number of seconds" in capsys.readouterr().err
    assert not (tmp_path / "home").exists()


def test_an_empty_place_for_lines_is_refused_and_is_not_the_current_folder() -> None:
    given = {"env_pairs": (), "env_files": (), "secret_pairs": (), "priority": 0, "force_new": False}
    with pytest.raises(InvalidRequestError) as refusal:
        read_submit_options({**given, "log_dir": "", "event_log": "", "env_pairs": ["NOT_SET_HERE"]})
    assert refusal.value.faults == [
        "--log-dir: empty path, expected a folder",
        "--event-log: empty path, expected a file",
        "--env NOT_SET_HERE: not set in this environment: set it, or give NOT_SET_HERE=VALUE",
    ]
    asked = read_submit_options({**given, "log_dir": None, "event_log": None})
    assert (asked["log_dir"], asked["event_log"]) == ("", "")


@pytest.mark.parametrize("url", ["redis://localhost:99999/0", "redis://me:secret@[::1]:70000"])
def test_a_port_out_of_range_is_said_so_and_shows_nothing_else(url: str) -> None:
    with pytest.raises(InvalidRequestError, match="port is out of range: expected 0 to 65535") as refusal:
        read_bus_url(url)
    assert "secret" not in str(refusal.value)


def test_a_port_that_is_none_is_no_matter_of_range() -> None:
    with pytest.raises(InvalidRequestError, match="is no URL"):
        read_bus_url("redis://:p#ss/w@host:12")


def test_the_launchers_that_live_are_found(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.make()
    for name, pid in (("a", os.getpid()), ("b", 1 << 29)):
        (home.launcher / f"{name}.json").write_text(json.dumps({"pid": pid}))
    (home.launcher / "c.json").write_text("{")
    assert _find_launchers(home) == [os.getpid()]


def test_a_broken_index_is_told_with_what_to_do(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "index.json").write_text('{"schema_version": "dataset_index.v1"}')
    assert dataset_tool.main(["verify", str(tmp_path)]) == 10
    told: dict[str, Any] = msgspec.json.decode(capfd.readouterr().out)
    assert f"create it again: `trn dataset index {tmp_path}`" in told["error"]


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("statsu", "no such command 'statsu'", "did you mean `trn status`?"),
        (
            "run -d",
            "no job is given: `trn run job.yaml`, or `trn run module:Symbol --set max_steps=100`",
            "`trn run -h` shows the usage",
        ),
        (
            "run job.yaml -c other.yaml",
            "the job is given twice: job.yaml and --config other.yaml",
            "`trn run -h` shows the usage",
        ),
        (
            "list --json --format table",
            "--json and --format table exclude each other",
            "`trn list -h` shows the usage",
        ),
        ("list --home /x", "no such option '--home'", "before the command: `trn --home /x list`"),
        ("list --limit x", "invalid value for '--limit'", "`trn list -h` shows the usage"),
        ("", "no command was given after `trn`", "`trn -h` lists them"),
        ("daemon", "no command was given after `trn daemon`", "`trn daemon -h` lists them"),
    ],
)
def test_a_command_line_that_is_wrong_is_one_line_and_a_hint(
    line: str, message: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verbs.run(line.split()) == 2
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told["message"].startswith(message)
    assert hint in told["hint"]
    if not line.endswith("daemon") and line:
        assert err == f"trn: {told['message']}\n  {told['hint']}\n"


def completions(home: Path, *words: str) -> list[tuple[str, str]]:
    complete = BashComplete(verbs.group, {}, "trn", "_TRN_COMPLETE")
    found = complete.get_completions(["--home", str(home), *words[:-1]], words[-1])
    return [(item.type, item.value) for item in found]


def test_the_shell_is_told_what_fits(ended: Home, tmp_path: Path) -> None:
    registry = RunRegistry(ended.registry)
    registry.submit(NewRun(run_id="other", digest="e", config={"trainer": "a:B"})).result()
    registry.close()
    assert completions(ended.root, "cancel", "o") == [("plain", "other")], "the one has ended"
    assert {value for _, value in completions(ended.root, "status", "o")} == {"one", "other"}
    assert completions(ended.root, "dataset", "verify", "d") == [("dir", "d")]
    assert completions(ended.root, "check", "--config", "j") == [("file", "j")]
    assert completions(ended.root, "run", "--config", "j") == [("file", "j")]
    job = tmp_path / "job.yaml"
    job.write_text("profiles: {long: {}, large: {}, short: {}}")
    profiles = completions(ended.root, "run", "--config", str(job), "--profile", "l")
    assert [value for _, value in profiles] == ["large", "long"]
    assert completions(ended.root, "run", "--config", "nowhere.yaml", "--profile", "l") == []
    assert ("plain", "submitted") in completions(ended.root, "list", "--sort", "su")
    assert completions(ended.root, "list", "--columns", "id,stat") == [("plain", "id,state")]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_scripts_of_completion_are_sound(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    kind = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}[shell]
    script = tmp_path / "script"
    script.write_text(kind(verbs.group, {}, "trn", "_TRN_COMPLETE").source())
    subprocess.run([shell, "-n", script], check=True, timeout=60)


def test_a_daemon_whose_registry_is_damaged_is_stopped_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = Home(tmp_path / "home")
    home.make()
    home.registry.write_bytes(b"no database at all" * 1000)
    stand_in = [sys.executable, "-c", "import time; time.sleep(1000)", "trn.daemon"]
    with subprocess.Popen(stand_in) as process:
        try:
            deadline = time.monotonic() + 60
            while not daemon_start.is_daemon(
                process.pid
            ):  # for a moment after its exec it has no command line
                assert time.monotonic() < deadline
            daemon = RunningDaemon(pid=process.pid, version=VERSION, addresses=(), started_ms=0)
            monkeypatch.setattr(daemon_start, "find_daemon", lambda _home: daemon)
            assert verbs.run(["--home", str(home.root), "daemon", "stop"]) == 0
        finally:
            process.kill()
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert (told["event"], told["num_live_runs"], told["launcher_pids"]) == ("daemon_stopped", 0, [])
    assert "cannot be read: file is not a database" in err
