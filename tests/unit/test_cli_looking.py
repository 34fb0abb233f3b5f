"""`trn list`, `status` and `why` over homes made by hand, in this process: what they say is true of the home."""

import itertools
import json
import math
import os
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from gen_worker.contract.process_identity import ProcessIdentity, boot_id, read_process
from trn.cli import command_table as verbs
from trn.cli.following.follow import describe
from trn.cli.output import Output
from trn.cli.verbs import list_runs
from trn.core.causes import Cause, failure
from trn.core.digest import run_digest
from trn.core.home import Home
from trn.core.runs import PREDICTION, SERVER, Needs, RunState
from trn.daemon.outlets.bus_publisher import _encode_record
from trn.daemon.outlets.log_lines import job_ended
from trn.registry.base import Ending, NewRun
from trn.registry.connection import open_writer
from trn.registry.metrics import MetricStore
from trn.registry.sqlite import RunRegistry

SUBMITTED_MS = 1_760_000_000_000

COMPLETED = Cause(id="completed")
WAITS_FOR_GPU = Cause(id="waits-for-gpu", waits_for=("gpu",), values={"gpus": 1})


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
            self.registry.launched(
                run_id, 1, worker=ProcessIdentity(boot, pid, start_ticks).ref, pid=pid
            ).result()

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

    def end(self, run_id: str, state: RunState, cause: Cause = COMPLETED) -> None:
        self.registry.end(run_id, 1, Ending(state=state, cause=cause)).result()

    def save(
        self, run_id: str, step: int, *, num_bytes: int = 3, is_final: bool = False, is_finite: bool = True
    ) -> Path:
        folder = self.home.run(run_id).checkpoints
        folder.mkdir(parents=True, exist_ok=True)
        name = "final" if is_final else f"step-{step:08d}"
        (folder / f"{name}.pt").write_bytes(b"abc")
        files = [{"name": f"{name}.pt", "size_bytes": num_bytes, "hash": "sha256:0"}]
        meta = {"step": step, "final": is_final, "files": files, "verified": is_finite}
        rest = {"schema_version": "trainer_checkpoint.v1", "run_id": run_id, "attempt": 1, "epoch": 0}
        path = folder / f"{name}.meta.json"
        path.write_text(json.dumps(meta | rest))
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


def test_a_loss_that_is_no_number_is_told_by_its_word_everywhere(
    made: HandMade, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = {"first": 2.0, "nan": math.nan, "inf": math.inf, "low": -math.inf, "last": 1.0}
    metrics = MetricStore(made.home.metrics)
    for run_id, loss in losses.items():
        made.submit(run_id)
        made.start(run_id, pid=77)
        made.follow(run_id, 1, train_loss=0.5)
        made.registry.follow(
            run_id, 1, offset=200, last_seq=10, step=2, heartbeat_ms=1, metrics={"train/loss": loss}
        ).result()
        points = [(1, 1, "train/loss", 1, 0.5, 1), (2, 1, "train/loss", 2, loss, 2)]
        metrics.add(run_id, offset=200, last_seq=2, points=points).result()
    metrics.close()
    by_loss = made.ask("list", "--sort", "train/loss")
    assert [(run["run_id"], run["metrics"]["train/loss"]) for run in by_loss] == [
        ("low", "-inf"),
        ("last", 1.0),
        ("first", 2.0),
        ("inf", "inf"),
        ("nan", "nan"),
    ]
    for words, said in ((["train/los"], ": did you mean train/loss?"), (["tags.no"], "\n")):
        assert verbs.run(["--home", str(made.home.root), "list", "--sort", *words]) == 0
        told = made._capsys.readouterr().err
        assert f"none of 5 runs has {words[0]} to sort by{said}" in told
    backwards = [run["run_id"] for run in made.ask("list", "--sort", "train/loss", "--reverse")]
    assert backwards == ["inf", "first", "last", "low", "nan"]
    table = made.show("list", "--columns", "id,train/loss", "--sort", "train/loss")
    assert [line.split()[1] for line in table.splitlines()[1:]] == ["-inf", "1", "2", "inf", "nan"]
    for run_id, word in (("nan", "nan"), ("inf", "inf"), ("low", "-inf")):
        [record] = made.ask("status", run_id)
        assert record["metrics"]["train/loss"]["last"] == word
        assert record["metrics"]["train/loss"]["min"] == 0.5
        assert f"train/loss  {word:>11}          0.5" in made.show("status", run_id)
        made.end(run_id, RunState.COMPLETED)
        run = made.registry.get(run_id)
        capsys.readouterr()
        Output().record({"event": "job_completed", **describe(run)})  # as a followed run ends
        for line in (capsys.readouterr().out, job_ended(run, "/", ""), _encode_record(run)):
            assert json.loads(line, parse_constant=_refuse)["metrics"] == {"train/loss": word}


@pytest.mark.parametrize("is_saved", [True, False])
def test_a_resume_is_promised_from_what_was_saved_and_from_nothing_else(
    made: HandMade, is_saved: bool
) -> None:
    made.submit("r")
    made.start("r", pid=77)
    made.follow("r", 9)
    made.end("r", RunState.FAILED, failure("train-step", step=9, error="ValueError: no"))
    if is_saved:
        made.save("r", 5)
        made.save("r", 8)
        made.save("r", 9, num_bytes=4)  # cut short: a resume passes it over
        made.save("r", 10, is_finite=False)  # NaN: the same
    else:
        made.home.run("r").checkpoints.mkdir(parents=True)  # as a run has it that ended before it saved
    [told] = made.ask("why", "r")
    [record] = made.ask("status", "r")
    screen = made.show("status", "r", num_columns=200)
    if is_saved:
        assert "`trn resume r` continues from step 8 (step-00000008.meta.json)" in told["remedy"]
        path = made.home.run("r").checkpoints / "step-00000008.meta.json"
        assert record["checkpoint"] == {"path": str(path), "step": 8}
        assert f"saved    step 8 in {path}\n" in screen
    else:
        assert "`trn resume r` starts at step 0: it saved no checkpoint" in told["remedy"]
        assert record["checkpoint"] is None
        assert "saved    " not in screen
    assert f"resume   {told['remedy'].removeprefix('fix the code, then ')}\n" in screen


@pytest.mark.parametrize(
    ("config", "step", "end_step", "command"),
    [
        ({"max_steps": 40}, 40, 40, "trn resume r --set max_steps=…"),
        ({"epochs": 2}, 40, 40, "trn resume r --set epochs=…"),
        ({"max_steps": 40}, 30, 40, "trn resume r"),  # stopped early: there is more to do
        ({"max_steps": 2, "mock_batches": [1, 2, 3]}, 2, 2, "trn resume r --set max_steps=…"),
        ({"mock_batches": [1, 2, 3]}, 3, 3, ""),  # they are one pass
    ],
)
def test_a_complete_run_goes_on_only_where_more_is_asked_of_it(
    made: HandMade, config: dict[str, Any], step: int, end_step: int, command: str
) -> None:
    """As the daemon's resume refuses it."""
    made.submit("r", config=config)
    made.start("r", pid=77)
    made.follow("r", step, end_step)
    made.end("r", RunState.COMPLETED)
    assert "trn resume" not in made.show("status", "r")
    path = made.save("r", step, is_final=True)
    screen = made.show("status", "r", num_columns=200)
    assert ("trn resume" in screen) is bool(command)
    assert not command or f"resume   `{command}` continues from step {step} ({path.name})\n" in screen


def test_a_worker_that_is_gone_is_not_said_to_train(made: HandMade) -> None:
    pid = os.getpid()
    process = read_process(pid)
    assert process is not None
    for run_id, ticks, boot in (
        ("lives", process.start_ticks, boot_id()),
        ("gone", process.start_ticks + 1, boot_id()),
        ("before", process.start_ticks, "another boot"),
    ):
        made.submit(run_id)
        made.start(run_id, pid=pid, start_ticks=ticks, boot=boot)
    assert f"runs as process {pid}" in made.show("status", "lives")
    assert "runs as process" not in made.show("status", "gone")
    [lives], [gone], [before] = (made.ask("why", run_id) for run_id in ("lives", "gone", "before"))
    assert "no daemon watches it" in lives["sentence"]
    for told, why in ((gone, f"process {pid} has ended"), (before, "before this machine was, or on another")):
        assert "its end is not recorded yet" in told["sentence"]
        assert why in told["sentence"]
        assert (told["next"], told["remedy"]) == (
            "the next daemon records it and may retry",
            "`trn daemon start`",
        )


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
            lambda: made.registry.set_cause("adder-0", WAITS_FOR_GPU).result(),  # not in the table
            lambda: made.registry.set_cause("adder-2", WAITS_FOR_GPU).result(),
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


def test_who_holds_what_a_run_waits_for_and_how_many_come_before_it(
    made: HandMade, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trn.client.daemon_start.find_daemon", lambda _home: object())
    for run_id, cpus in (("wide", 3), ("slim", 1)):
        made.submit(run_id, needs=Needs(cpus=cpus))
        made.start(run_id, pid=77)
    made.submit("urgent", priority=9)
    made.submit("older")
    made.submit("r", needs=Needs(cpus=2))
    made.submit("younger")
    [fresh] = made.ask("why", "r")
    assert fresh["why"] == "queued; 2 runs are ahead in the queue"
    assert fresh["next"] == "it starts by itself"
    made.registry.set_cause("r", Cause(id="waits-for-cpu", waits_for=("cpu",), values={"cpus": 2})).result()
    [told] = made.ask("why", "r")
    assert (
        told["why"] == "waits for 2 CPUs, held by slim (1 CPU), wide (3 CPUs); 2 runs are ahead in the queue"
    )
    assert "`trn cancel slim`" in told["remedy"]


def test_every_file_of_a_run_is_listed_and_each_kind_has_its_name(made: HandMade, tmp_path: Path) -> None:
    copies, events = tmp_path / "copies", tmp_path / "events.jsonl"
    made.submit("r", log_dir=str(copies), event_log=str(events))
    made.submit("r.2")  # its own log looks like one of r's
    made.home.run("r.2").root.mkdir(parents=True)
    made.start("r", pid=77)
    made.end("r", RunState.COMPLETED)
    day = made.home.logs.day(SUBMITTED_MS)
    copied = copies / day.relative_to(made.home.logs.root)
    names = (
        "r.1.log.jsonl.gz",
        "r.2.log.jsonl",
        "r.3.log.jsonl",
        "r~1.log.jsonl.gz",
        "r~2.log.jsonl",
        "r.log.jsonl",
    )
    for folder in (day, copied):
        folder.mkdir(parents=True)
    for path in (*(day / name for name in names), copied / "r.log.jsonl"):
        path.touch()
    [record] = made.ask("status", "r.1")
    own = [str(day / name) for name in names if name != "r.2.log.jsonl"]
    assert record["log_files"] == [*own, str(copied / "r.log.jsonl"), str(events)]
    screen = made.show("status", "r.1", num_columns=300)
    assert f"  lines    {own[-1]} and 4 before it\n" in screen
    assert f"  copy     {copied / 'r.log.jsonl'}\n" in screen
    assert f"  events   {events}\n" in screen


def test_a_resumed_run_is_shown_with_its_whole_line_of_descent(made: HandMade) -> None:
    store = MetricStore(made.home.metrics)
    try:
        for run_id, first, last, more in (
            ("r", 1, 60, {}),
            ("r.2", 51, 100, {"parent_run_id": "r", "start_step": 50}),
        ):
            made.submit("r", config={"max_steps": last}, **more)
            made.start(run_id, pid=77)
            made.follow(run_id, last, last)
            made.end(run_id, RunState.COMPLETED)
            points = [(step, 1, "train/loss", step, 1.0 / step, 1) for step in range(first, last + 1)]
            store.add(run_id, offset=1, last_seq=last, points=points).result()
        [record] = made.ask("status", "r", "--lineage")
        assert record["run_id"] == "r.2"
        assert (record["family"], record["start_step"]) == ("r", 50)
        assert record["lineage"] == [
            {"run_id": "r", "from_step": 0, "to_step": 50},
            {"run_id": "r.2", "from_step": 50, "to_step": None},
        ]
        assert record["curves"]["train/loss"]["steps"] == list(range(1, 101))
        assert record["metrics"]["train/loss"]["num_points"] == 50, "the run's own"
        assert "curves" not in made.ask("status", "r")[0]
        screen = made.show("status", "r")
        assert "continues r from step 50" in screen
        assert "train/loss\n  r to step 50, r.2\n" in screen
        assert "┊" in screen
        alone = made.show("status", "r", "--no-lineage")
        assert "┊" not in alone
        assert "r to step 50" not in alone
        older = made.show("status", "r.1")
        assert "r.2 is the newest run of its family" in older
        assert "trn logs r.1\n" in older, "what is to be typed means this run"
        assert made.ask("why", "r.1")[0]["run_id"] == "r"
        made.submit("other")
        listed = made.show("list", "--families", num_columns=120).splitlines()
        assert [line.split()[:2] for line in listed] == [
            ["ID", "STATE"],
            ["other", "PENDING"],
            ["r", "COMPLETED"],
            ["└", "r.2"],
        ]
        assert listed[3].count("┊") == 1
        records = made.ask("list", "--families")
        assert [(run["run_id"], run["family"], run["start_step"]) for run in records][1:] == [
            ("r", "r", 0),
            ("r.2", "r", 50),
        ]
        columns = made.show("list", "--columns", "id,family,start,curve").splitlines()
        assert columns[0].split() == ["ID", "FAMILY", "START", "CURVE"]
    finally:
        store.close()


def test_list_does_not_take_a_lost_registry_for_a_home_without_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = Home(tmp_path / "home")
    home.make()
    for folder, words in ((home.runs, "no runs yet"), (home.run("r").root, "registry.db is missing, but")):
        folder.mkdir(parents=True, exist_ok=True)
        assert verbs.run(["--home", str(home.root), "list"]) == 0
        assert words in capsys.readouterr().err


def test_a_registry_of_an_older_release_is_said_to_be_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = Home(tmp_path / "old")
    home.make()
    connection = open_writer(home.registry)
    for name in ("0001_start.sql", "0002_outbox.sql"):
        connection.executescript(files("trn.registry.migrations").joinpath(name).read_text())
    connection.close()
    for words in (["list"], ["status", "x"]):
        assert verbs.run(["--home", str(home.root), *words]) != 0
        assert "older trn: `trn daemon start` brings it up to date" in capsys.readouterr().err


def test_a_registry_that_lacks_only_the_newest_migration_is_said_to_be_of_an_older_release(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = Home(tmp_path / "old")
    home.make()
    scripts = sorted(item.name for item in files("trn.registry.migrations").iterdir() if item.name[0] == "0")
    connection = open_writer(home.registry)
    for name in scripts[:-1]:
        connection.executescript(files("trn.registry.migrations").joinpath(name).read_text())
    connection.execute(f"PRAGMA user_version = {len(scripts) - 1}")
    connection.close()
    for words in (["status", "x"], ["why", "x"]):
        assert verbs.run(["--home", str(home.root), *words]) != 0
        assert "older trn: `trn daemon start` brings it up to date" in capsys.readouterr().err


def test_which_value_is_the_best_is_said_where_that_is_known(made: HandMade) -> None:
    made.submit("r", config={"early_stopping": {"metric": "val/accuracy", "mode": "max"}})
    made.start("r", pid=77)
    metrics = MetricStore(made.home.metrics)
    names = ("train/loss", "val/accuracy", "train/lr")
    points = [(step, 1, name, step, float(step), 1) for step in (1, 2, 3) for name in names]
    metrics.add("r", offset=100, last_seq=3, points=points).result()
    metrics.close()
    [record] = made.ask("status", "r")
    best = {
        name: (found["best"], found["best_is"], found["best_step"])
        for name, found in record["metrics"].items()
    }
    assert best == {
        "train/loss": (1.0, "min", 1),
        "val/accuracy": (3.0, "max", 3),
        "train/lr": (None, "", None),
    }
    lines = made.show("status", "r").splitlines()
    losses, rates = [line for line in lines if line.startswith("  train/l")]
    assert losses.endswith("min at step 1")
    assert rates.split()[-1] == "-"
    narrow = " ".join(made.show("status", "r", num_columns=40).split())
    assert "val/accuracy last 3, min 1, max 3, best max at step 3" in narrow
    assert "train/lr last 3, min 1, max 3 val" in narrow


def test_the_best_of_very_many_points_is_found_with_its_first_step(made: HandMade) -> None:
    made.submit("r")
    made.start("r", pid=77)
    metrics = MetricStore(made.home.metrics)
    values = [5.0, float("inf"), 1.0, float("nan"), 1.0, *(2.0 for _ in range(2000)), 3.0]
    points = [(step, 1, "val/loss", step, value, 1) for step, value in enumerate(values, start=1)]
    metrics.add("r", offset=100, last_seq=len(values), points=points).result()
    metrics.close()
    found = made.ask("status", "r")[0]["metrics"]["val/loss"]
    assert (found["min"], found["max"], found["best_step"], found["last"]) == (1.0, 5.0, 3, 3.0)


def test_a_run_that_trained_steps_twice_says_whether_it_was_exact(made: HandMade) -> None:
    metrics = MetricStore(made.home.metrics)
    for run_id, again in (("once", None), ("same", 2.0), ("other", 2.5)):
        made.submit(run_id)
        made.start(run_id, pid=77)
        made.end(run_id, RunState.COMPLETED)
        points = [(step, 1, "train/loss", step, 2.0, 1) for step in range(1, 9)]
        if again is not None:
            points += [(step + 4, 2, "train/loss", step, again, 1) for step in range(5, 8)]
        metrics.add(run_id, offset=1, last_seq=12, points=points).result()
    metrics.close()
    found = {run_id: made.ask("status", run_id)[0]["repeated_steps"] for run_id in ("once", "same", "other")}
    assert found["once"] == {"exactness": None, "num_steps": 0, "num_dropped": 0, "drift": None}
    assert found["same"] == {"exactness": "exact", "num_steps": 3, "num_dropped": 0, "drift": None}
    assert found["other"]["exactness"] == "drifted"
    assert found["other"]["drift"] == {"step": 5, "name": "train/loss", "before": 2.0, "after": 2.5}
    assert "twice" not in made.show("status", "once")
    assert "  exact: 3 steps were trained twice, all metrics are equal\n" in made.show("status", "same")
    line = "  drifted at step 5: train/loss was 2.0 and is 2.5 after the resume\n"
    assert line in made.show("status", "other", num_columns=100)


def test_a_spike_is_drawn_however_many_points_there_are(made: HandMade) -> None:
    made.submit("r")
    made.start("r", pid=77)
    metrics = MetricStore(made.home.metrics)
    points = [(step, 1, "train/loss", step, 1.0 + 98 * (step == 5001), 1) for step in range(1, 20_001)]
    metrics.add("r", offset=1, last_seq=20_000, points=points).result()
    metrics.close()
    chart = made.show("status", "r").rpartition("train/loss\n")[2].splitlines()
    assert [line[6:].strip() for line in chart[:7]] == ["⢸"] * 7, "one line from top to bottom"
    assert chart[0].startswith("  99 │")


def test_metrics_of_an_older_release_are_not_silently_left_out(
    made: HandMade, capsys: pytest.CaptureFixture[str]
) -> None:
    made.submit("r")
    MetricStore(made.home.metrics).close()
    connection = open_writer(made.home.metrics)
    connection.execute("PRAGMA user_version = 1")
    connection.close()
    assert verbs.run(["--home", str(made.home.root), "status", "r"]) != 0
    assert "metrics.db was written by an older trn: `trn daemon start`" in capsys.readouterr().err


def test_hyperparameters_and_tags_are_columns_to_show_and_sort_by(made: HandMade) -> None:
    for run_id, hyperparams, tags in (
        ("a", {"lr": 0.1, "model": {"depth": 2}}, {"team": "x"}),
        ("b", {"lr": 0.02}, {}),
        ("c", {}, {"team": "w"}),
    ):
        made.submit(run_id, config={"hyperparams": hyperparams}, tags=tags)
    columns = "--columns=id,hyperparams.lr,hyperparams.model.depth,tags.team"
    rows = [line.split() for line in made.show("list", columns, "--sort=hyperparams.lr").splitlines()]
    assert rows[1:] == [["b", "0.02", "-", "-"], ["a", "0.1", "2", "x"]]
    assert [record["run_id"] for record in made.ask("list", "--sort", "tags.team")] == ["c", "a"]
    assert made.ask("list", "--sort", "hyperparams.lr", "--reverse")[0]["hyperparams"]["lr"] == 0.1


@pytest.mark.parametrize("num_columns", [40, 61, 110])
def test_no_word_is_cut_where_the_terminal_ends(made: HandMade, num_columns: int) -> None:
    made.submit("r", name="a run with a name of many words, as people give them")
    made.start("r", pid=77)
    made.follow("r", 9, 40)
    made.end("r", RunState.FAILED, failure("train-step", step=9, error=f"ValueError: {'many words ' * 20}"))
    made.save("r", 5)
    words = made.show("why", "r", num_columns=10_000).split()
    for verb in ("why", "status"):
        screen = made.show(verb, "r", num_columns=num_columns)
        for line in screen.splitlines():
            # A path is for copying: whole, also where it is too long.
            assert len(line) <= num_columns or str(made.home.root) in line, line
        assert " ".join(words) in " ".join(screen.split())
    assert len(screen.splitlines()) > 10


def test_compare_shows_what_differs_and_where_runs_diverge(made: HandMade) -> None:
    metrics = MetricStore(made.home.metrics)
    for run_id, lr, values in (
        ("a", 0.1, (3.0, 2.0, 1.0)),
        ("b", 0.2, (3.0, 2.0, 0.5)),
        ("c", 0.1, (3.0, 2.0, 1.0)),
    ):
        made.submit(run_id, config={"seed": 0, "hyperparams": {"lr": lr}, "name": run_id})
        points = [(step, 1, "train/loss", step, value, 1) for step, value in enumerate(values, start=1)]
        metrics.add(run_id, offset=100, last_seq=3, points=points).result()
    metrics.close()
    [record] = made.ask("compare", "a", "b")
    assert record["config"] == {"hyperparams.lr": [0.1, 0.2]}
    [divergence] = record["divergences"]
    assert (divergence["step"], divergence["values"], divergence["num_equal"]) == (3, [1.0, 0.5], 2)
    screen = " ".join(made.show("compare", "a", "b", "c").split())
    assert "hyperparams.lr 0.1 0.2 0.1" in screen
    assert "a and b: train/loss differs from step 3 on: 1.0 and 0.5 (equal at the 2 steps before)" in screen
    assert "a and c: none; all metrics are equal at the 3 steps that both have" in screen
    metrics = MetricStore(made.home.metrics)
    for run_id in ("d", "e"):
        made.submit(run_id)
        metrics.add(run_id, offset=100, last_seq=3, points=[(1, 1, "train/loss", 10, 3.0, 1)]).result()
    metrics.close()
    alone = " ".join(made.show("compare", "d", "e").split())
    assert "d and e: none; all metrics are equal at the only step that both have" in alone
    assert "unknown for a, b, c" in screen  # their code: none was frozen


@pytest.mark.parametrize(("part", "kind"), [("serving", SERVER), ("prediction", PREDICTION)])
def test_status_names_no_resume_of_a_run_that_does_not_train(made: HandMade, part: str, kind: str) -> None:
    made.submit("r", config={"mode": "inference", part: {}}, kind=kind)
    made.start("r", pid=77)
    made.end("r", RunState.FAILED, failure("killed", signal="SIGKILL"))
    assert "trn resume" not in made.show("status", "r")
    assert "trn resume" not in made.show("why", "r")


def test_rm_refuses_a_name_that_is_the_id_of_one_run_and_means_another(
    made: HandMade, capsys: pytest.CaptureFixture[str]
) -> None:
    made.submit("live", config={"seed": 1})
    made.submit("live", config={"seed": 2})
    assert verbs.run(["--home", str(made.home.root), "rm", "live"]) != 0
    assert "give live.1 or live.2" in "".join(capsys.readouterr())
    assert {run.run_id for run in made.registry.page()} == {"live", "live.2"}
