"""`trn list`, `status` and `why` over homes made by hand, in this process: what they say is true of the home."""

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trn.client.cli import list_runs, verbs
from trn.client.cli.output import Output
from trn.core.digest import run_digest
from trn.core.home import Home
from trn.core.runs import RunState
from trn.registry.sqlite import Ending, NewRun, RunRegistry

SUBMITTED_MS = 1_760_000_000_000


class HandMade:
    """A home that no daemon serves, and the command over it."""

    def __init__(self, home: Home, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> None:
        self.home = home
        self._capsys = capsys
        self._patch = patch
        home.make()
        ticks = itertools.count(SUBMITTED_MS)
        self.registry = RunRegistry(home.registry, clock_ms=lambda: next(ticks))

    def submit(self, run_id: str, *, config: dict[str, Any] | None = None, **more: Any) -> None:
        config = {"trainer": "a:B", "seed": run_id, **(config or {})}
        new = NewRun(run_id=run_id, digest=run_digest(config), config=config, **more)
        self.registry.submit(new).result()

    def start(self, run_id: str, *, pid: int = 0, start_ticks: int | None = 1, boot: str = "b") -> None:
        self.registry.claim(run_id, []).result()
        if pid:
            self.registry.launched(run_id, 1, boot_id=boot, pid=pid, start_ticks=start_ticks).result()

    def follow(self, run_id: str, step: int, end_step: int | None = None, **metrics: float) -> None:
        named = {name.replace("_", "/"): value for name, value in metrics.items()}
        self.registry.follow(
            run_id,
            1,
            offset=100,
            last_seq=9,
            step=step,
            heartbeat_ms=1,
            metrics=named,
            end_step=end_step,
        ).result()

    def end(self, run_id: str, state: RunState, cause: str) -> None:
        self.registry.end(run_id, 1, Ending(state=state, reason=cause, cause=cause)).result()

    def save(self, run_id: str, step: int, *, num_bytes: int = 3, is_final: bool = False) -> Path:
        folder = self.home.run(run_id).checkpoints
        folder.mkdir(parents=True, exist_ok=True)
        name = "final" if is_final else f"step-{step:08d}"
        (folder / f"{name}.pt").write_bytes(b"abc")
        meta = {"step": step, "final": is_final, "files": [{"name": f"{name}.pt", "size_bytes": num_bytes}]}
        path = folder / f"{name}.meta.json"
        path.write_text(json.dumps(meta))
        return path

    def ask(self, *words: str) -> list[dict[str, Any]]:
        """In a pipe."""
        self._capsys.readouterr()
        code = verbs.run(["--home", str(self.home.root), *words])
        out, err = self._capsys.readouterr()
        assert code == 0, err
        return [json.loads(line, parse_constant=_refuse) for line in out.splitlines()]

    def show(self, *words: str, num_columns: int = 100) -> str:
        """At a terminal without colour."""
        self._capsys.readouterr()
        with self._patch.context() as patch:
            patch.setenv("NO_COLOR", "1")
            patch.setattr(sys.stdout, "isatty", lambda: True)
            patch.setattr(Output, "size", (num_columns, 24))
            code = verbs.run(["--home", str(self.home.root), *words])
        out, err = self._capsys.readouterr()
        assert code == 0, err
        return out


def _refuse(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


@pytest.fixture
def made(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    hand_made = HandMade(Home(tmp_path / "home"), capsys, monkeypatch)
    yield hand_made
    hand_made.registry.close()


def test_a_prefix_of_many_runs_says_how_many_it_does_not_name(
    made: HandMade, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(8):
        made.submit(f"r-{number}")
    assert verbs.run(["--home", str(made.home.root), "why", "r-"]) == 2
    assert "several runs: r-0, r-1, r-2, r-3, r-4 and 3 more; give more of it" in capsys.readouterr().err


def test_watching_in_a_pipe_keeps_to_the_table_and_its_order(
    made: HandMade, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(4):
        made.submit(f"adder-{number}", name="adder")
    made.submit("other")
    rounds = iter(
        [
            lambda: made.registry.set_reason("adder-0", "waits for 1 GPU").result(),  # not in the table
            lambda: made.registry.set_reason("adder-2", "waits for 1 GPU").result(),
            lambda: made.submit("adder-4", name="adder"),
        ]
    )

    def sleep(_seconds: float) -> None:
        step: Callable[[], object] | None = next(rounds, None)
        if step is None:
            raise KeyboardInterrupt
        step()

    monkeypatch.setattr(list_runs.time, "sleep", sleep)
    words = ["--home", str(made.home.root), "list", "--watch", "--limit", "2", "--name", "adder"]
    assert verbs.run(words) == 130
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["run_id"] for line in lines] == ["adder-3", "adder-2", "adder-2", "adder-4"]
