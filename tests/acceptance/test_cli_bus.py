"""`trn daemon --event-bus`, as an operator types it. No server is needed: a daemon starts while its bus is away."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
from daemon_process import DEADLINE_S, end_everything

pytestmark = pytest.mark.usefixtures("without_torch")
TRN = str(Path(sys.executable).with_name("trn"))


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    home = tmp_path / "home"
    yield home
    end_everything(home)


def trn(home: Path, *words: str) -> tuple[int, dict[str, Any], str]:
    """(exit code, the last line as JSON, all that was said)."""
    environ = {**os.environ, "TRN_HOME": str(home)}
    done = subprocess.run(
        [TRN, *words], env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    last = done.stdout.splitlines()[-1] if done.stdout.strip() else "{}"
    return done.returncode, json.loads(last), done.stdout + done.stderr


def test_a_daemon_with_a_bus_starts_without_a_verb_and_shows_no_password(home: Path, tmp_path: Path) -> None:
    socket = tmp_path / "none.sock"
    code, started, said = trn(home, "daemon", "--event-bus", f"unix://me:s3cret@{socket}?maxlen=50")
    shown = f"unix://{socket}?maxlen=50"
    assert (code, started["event"], started["event_bus"]) == (0, "daemon_started", shown)
    texts = [said]
    for words in (
        ["daemon", "start", "--event-bus", f"unix://me:s3cret@{socket}?maxlen=50"],  # the same
        ["daemon", "start"],
    ):
        code, again, said = trn(home, *words)
        assert (code, again["event"]) == (0, "daemon_already_running")
        texts.append(said)
    code, refused, said = trn(home, "daemon", "start", "--event-bus", "redis://:s3cret@elsewhere")
    assert (code, refused["code"]) == (6, "failed-precondition"), said
    assert f"runs with {shown}, not with redis://elsewhere" in refused["message"]
    assert "trn daemon stop" in refused["message"]
    texts.append(said)
    code, status, said = trn(home, "daemon", "status")
    assert (code, status["is_up"], status["event_bus"]) == (0, True, shown)
    texts.append(said)
    pid = started["pid"]
    texts.append(Path(f"/proc/{pid}/cmdline").read_bytes().decode())
    texts += [
        path.read_text(errors="replace")
        for path in home.iterdir()
        if path.suffix in (".log", ".json", ".out")
    ]
    assert trn(home, "daemon", "stop")[0] == 0
    assert [text for text in texts if "s3cret" in text] == []


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["daemon"], 2, "Start, stop and inspect the daemon"),
        (["daemon", "--event-bus", "redis://host", "status"], 2, "--event-bus goes after the command"),
        (["daemon", "start", "--event-bus", "s3cret"], 3, "the event bus is no URL"),
        (["daemon", "start", "--event-bus", "kafka://:s3cret@host"], 5, "known schemes: redis, rediss, unix"),
        (["daemon", "start", "--event-bus", "redis://:s3cret@host?maxlen=x"], 5, "maxlen='x'"),
        (["daemon", "start", "--event-bus", "redis://:s3cret@host/x?no_such_option=1"], 5, "redis://host/x"),
    ],
)
def test_what_cannot_be_is_refused_in_words(home: Path, words: list[str], code: int, expected: str) -> None:
    found, _, said = trn(home, *words)
    assert expected in said
    assert found == code, said
    assert "s3cret" not in said
    assert not (home / "daemon.json").exists()
