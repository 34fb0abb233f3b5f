"""A run's name, tags, metrics, error and log, and the names of files, at a real terminal: they are shown, not obeyed."""

import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_cli_registry import Terminal, end_everything, new_run, trn

from trn.core.artifacts.files import check_file
from trn.core.artifacts.records import NamedFile
from trn.core.causes import failure
from trn.core.home import Home
from trn.core.runs import RunState
from trn.registry.base import Ending
from trn.registry.metrics import MetricStore
from trn.registry.sqlite import RunRegistry

pytestmark = pytest.mark.usefixtures("without_torch")
EVIL = "gpj\u202e.\x1b[2J\x1b]0;owned\x07\x9b5m\u2066\u200bX"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    home = Home(tmp_path_factory.mktemp("hostile") / "home")
    home.make()
    registry = RunRegistry(home.registry)
    metrics = MetricStore(home.metrics)
    for run_id in ("bad-1", "bad-2"):
        new = new_run(run_id, name=f"name {EVIL}", tags={"team": EVIL})
        new.config["hyperparams"] = {"mode": EVIL + run_id, EVIL: 1}
        registry.submit(new).result()
        registry.claim(run_id, []).result()
        registry.launched(run_id, 1, worker="b/77/1", pid=77).result()
        last = {f"val/{EVIL}": 1.0, "train/loss": 1.0}
        video = NamedFile(
            artifact_id=f"a-{run_id}",
            seq=1,
            attempt=1,
            step=3,
            kind="video",
            path=f"{EVIL}<b>.mp4",
            created_ms=1,
        )
        registry.follow(
            run_id,
            1,
            offset=9,
            last_seq=9,
            step=3,
            heartbeat_ms=1,
            metrics=last,
            end_step=9,
            named_files=[video],
        ).result()
        checked = check_file(home, registry.artifact(video.artifact_id), "", may_be_gone=False)
        registry.settle_artifacts(run_id, [checked]).result()
        points = [(seq, 1, f"val/{EVIL}", seq, 1.0 / seq, 1000 + seq) for seq in range(1, 4)]
        metrics.add(run_id, offset=9, last_seq=3, points=points).result()
        cause = f"RuntimeError: {EVIL}"
        ending = Ending(
            state=RunState.FAILED,
            cause=failure("train-step", error=cause),
            category="train-step",
            exit_code=14,
        )
        registry.end(run_id, 1, ending).result()
        registry.set_labels(run_id, notes=f"{EVIL}\n{EVIL}").result()
        home.run(run_id).root.mkdir(parents=True, exist_ok=True)
        home.run(run_id).log.write_bytes(f"first {EVIL} line\nlast line\n".encode())
    metrics.close()
    registry.close()
    return home


@pytest.mark.parametrize(
    "words",
    [
        ("list",),
        ("list", "--columns", f"id,name,tags,reason,hyperparams.mode,val/{EVIL}"),
        ("status", "bad-1"),
        ("why", "bad-1"),
        ("tag", "bad-1"),
        ("tag", "bad-1", EVIL),
        ("note", "bad-1"),
        ("wait", "bad-1"),
        ("compare", "bad-1", "bad-2"),
        ("artifacts", "bad-1"),
        ("artifacts", "bad-1", "--json"),
        ("artifacts", "bad-1", "--save", EVIL, "x"),
        ("logs", "bad-1"),
        ("logs", "bad-1", "--json"),
        ("status", "bad-1", "--json"),
        ("status", EVIL),
        ("run", f"{EVIL}.yaml"),
        ("resume", "--checkpoint", f"{EVIL}.meta.json"),
        (EVIL,),
    ],
    ids=ascii,
)
def test_no_command_passes_on_what_a_terminal_obeys(home: Home, words: tuple[str, ...]) -> None:
    terminal = Terminal(home, *words)
    terminal.end()
    screen = re.sub(r"\x1b\[[0-9;]*m", "", terminal.screen)  # our colours
    harmful = {char for char in screen if unicodedata.category(char) in ("Cc", "Cf")} - set("\r\n\t")
    assert not harmful, ascii(screen)
    assert "gpj" in screen or words[0] == "list"


def test_a_pipe_gets_the_bytes_of_the_log(home: Home) -> None:
    assert trn(home, "logs", "bad-1").stdout == f"first {EVIL} line\nlast line\n"


@pytest.fixture
def live_home(tmp_path: Path) -> Iterator[Home]:
    yield Home(tmp_path / "home")
    end_everything(tmp_path / "home")


def test_the_names_of_files_that_were_left_out_are_harmless(live_home: Home, tmp_path: Path) -> None:
    (tmp_path / f"{EVIL.replace('/', '')}.pem").write_text("x")
    (tmp_path / "job.json").write_text('{"trainer": "missing:Trainer", "max_steps": 1, "mock_batches": [1]}')
    terminal = Terminal(live_home, "run", "--code", str(tmp_path), "--dry-run", str(tmp_path / "job.json"))
    terminal.end()
    screen = re.sub(r"\x1b\[[0-9;]*m", "", terminal.screen)
    assert ".pem: it looks like a secret" in screen
    assert not {char for char in screen if unicodedata.category(char) in ("Cc", "Cf")} - set("\r\n\t")
