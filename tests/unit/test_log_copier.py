"""Every event and every line of output is in the logs, whatever happens on the way; repeats have the same key."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from logged_runs import (
    DAY_MS,
    LoggedRuns,
    copy_all,
    drop_repeats,
    outputs,
    read_lines,
    read_whole_lines,
    seqs,
)

from gen_worker.contract import failpoints
from trn.core.runs import RunState
from trn.core.settings import Settings

OUTPUT = b"loading\nstep 1 \xff\n" + "größer\n".encode() + b"the last has no end"
NAMES = (
    "logs.write",
    "logs.written",
    "logs.synced",
    "logs.committed",
    "registry.before_commit",
    "registry.committed",
)


@pytest.fixture
def make_runs(tmp_path: Path) -> Iterator[Callable[..., LoggedRuns]]:
    made: list[LoggedRuns] = []

    def make(name: str = "home", **settings: Any) -> LoggedRuns:
        made.append(LoggedRuns(tmp_path / name, **settings))
        return made[-1]

    yield make
    for runs in made:
        runs.close()


@pytest.fixture
def runs(make_runs: Callable[..., LoggedRuns]) -> LoggedRuns:
    return make_runs()


def check(
    runs: LoggedRuns, run_id: str, output: bytes = OUTPUT, *, root: Path | None = None, is_exact: bool = True
) -> None:
    """All of the run is in the day logs below that folder, in order; without repeats where nothing failed."""
    found = runs.day_log(run_id, root)
    lines = drop_repeats(found)
    assert not is_exact or lines == found
    told = [line for line in lines if "seq" in line]
    assert told == [json.loads(line) for line in runs.events(run_id)]
    printed = outputs(lines)
    assert [line["message"] for line in printed] == output.decode("utf-8", "backslashreplace").splitlines()
    ends = [line["offset"] + line["size_bytes"] for line in printed]
    assert [line["offset"] for line in printed] == [0, *ends][: len(printed)]


def check_event_log(runs: LoggedRuns, path: Path, *run_ids: str, is_exact: bool = True) -> None:
    """The file has each run's events between its two job lines; without repeats where nothing failed."""
    found = read_lines(path)
    lines = drop_repeats(found)
    assert not is_exact or lines == found
    for run_id in run_ids:
        ours = [line for line in lines if line["run_id"] == run_id]
        assert ours[1:-1] == [json.loads(line) for line in runs.events(run_id)]
        assert ours[0]["event"] == "job_submitted"
        assert ours[-1]["event"] == "job_completed"
    assert len(lines) == sum(len(runs.events(run_id)) + 2 for run_id in run_ids)


def test_a_run_is_in_the_homes_logs_in_its_folder_and_in_its_event_log(
    runs: LoggedRuns, tmp_path: Path
) -> None:
    folder, event_log = tmp_path / "not" / "there", tmp_path / "yet" / "events.jsonl"
    runs.train("a", output=OUTPUT, log_dir=str(folder), event_log=str(event_log), tags={"team": "x"})
    assert runs.copy() == []
    for root in (runs.home.logs.root, folder):
        assert (root / "2024" / "10" / "04" / "a.log.jsonl").is_file()
        check(runs, "a", root=root)
        assert runs.index(root) == [("a", "job_submitted"), ("a", "job_completed")]
    check_event_log(runs, event_log, "a")
    end = json.loads(read_whole_lines(event_log)[-1])
    assert (end["state"], end["step"], end["metrics"], end["final_checkpoint"], end["tags"]) == (
        "COMPLETED",
        5,
        {"train/loss": 0.5},
        "/checkpoints/final.meta.json",
        {"team": "x"},
    )


def test_what_is_told_again_and_again_is_written_once(runs: LoggedRuns) -> None:
    runs.submit("a")
    runs.start("a")
    with runs.copier() as copier:
        copy_all(copier)
    for _ in range(3):
        runs.say("a", "metric", "metric")
        runs.print("a", b"x\n")
        runs.copy()
        runs.copy()
    runs.end("a", RunState.FAILED)
    runs.copy()
    check(runs, "a", b"x\nx\nx\n")
    assert runs.index() == [("a", "job_submitted"), ("a", "job_failed")]


def test_output_of_a_run_that_goes_on_waits_for_its_newline_and_knows_its_attempt(runs: LoggedRuns) -> None:
    runs.submit("a", max_attempts=2)
    runs.start("a")
    runs.print("a", b"one\nhalf a li")
    runs.say("a", "started")
    runs.copy()
    assert [line["message"] for line in outputs(runs.day_log("a"))] == ["one"]
    runs.end("a", RunState.PENDING)
    runs.start("a")
    runs.print("a", b"two\n")
    runs.say("a", "started", attempt=2)
    runs.copy()
    found = [(line["attempt"], line["message"]) for line in outputs(runs.day_log("a"))]
    assert found == [(1, "one"), (1, "half a li"), (2, "two")]


@pytest.mark.parametrize("name", NAMES)
def test_a_daemon_that_is_killed_at_any_step_loses_nothing_and_repeats_have_the_same_key(
    name: str, make_runs: Callable[..., LoggedRuns], tmp_path: Path
) -> None:
    nth = 0
    is_killed = True
    while is_killed:
        nth += 1
        folder = tmp_path / str(nth)
        runs = make_runs(f"{nth}/home", max_log_bytes=4096)
        event_log = folder / "events.jsonl"
        for run_id in ("a", "b"):
            runs.submit(run_id, event_log=str(event_log))
            runs.start(run_id)
        runs.say("a", *["metric"] * 40)
        is_killed = runs.copy_and_die(f"{name}=kill@{nth}")
        for run_id in ("a", "b"):
            runs.say(run_id, "metric")
            runs.print(run_id, OUTPUT)
            runs.say(run_id, "completed")
            runs.end(run_id)
        is_killed = runs.copy_and_die(f"{name}=kill@{nth}") or is_killed
        runs.copy()
        for run_id in ("a", "b"):
            check(runs, run_id, is_exact=False)
        check_event_log(runs, event_log, "a", "b", is_exact=False)
        ends = [(run_id, event) for run_id in ("a", "b") for event in ("job_completed", "job_submitted")]
        assert sorted(set(runs.index())) == ends
        runs.close()
    assert nth > 2


def test_a_rename_that_was_the_last_thing_a_daemon_did_loses_and_doubles_nothing(
    make_runs: Callable[..., LoggedRuns],
) -> None:
    runs = make_runs(max_log_bytes=4096)
    runs.submit("a")
    runs.start("a")
    runs.say("a", *["metric"] * 60)
    runs.copy()
    runs.say("a", *["metric"] * 60)
    assert runs.copy_and_die("logs.renamed=kill")
    runs.copy()
    check(runs, "a", b"")
    assert len(list(runs.home.logs.day(runs.now_ms).iterdir())) == 2


def test_a_half_line_that_a_full_disk_left_is_ended_and_written_again_wherever_it_was_cut(
    make_runs: Callable[..., LoggedRuns], tmp_path: Path
) -> None:
    def world(name: str) -> tuple[LoggedRuns, list[Path]]:
        runs = make_runs(name)
        event_log = tmp_path / f"{name}.jsonl"
        for run_id in ("a", "b"):
            runs.train(run_id, num_events=1, output=OUTPUT, event_log=str(event_log))
        logs = runs.home.logs
        return runs, [logs.run("a", runs.now_ms), logs.jobs_index, event_log]

    whole, paths = world("0")
    whole.copy()
    contents = [path.read_bytes() for path in paths]
    for cut in range(1, max(map(len, contents)), 197):
        runs, paths = world(str(cut))
        runs.now_ms += 777  # and with it the time of the output
        for path, content in zip(paths, contents, strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            told = content.replace(b"/0/runs/", f"/{cut}/runs/".encode())
            path.write_bytes(told[: min(cut, len(told) - 1)])
        kept = [path.read_bytes() for path in paths]
        runs.copy()
        for path, begun in zip(paths, kept, strict=True):
            assert path.read_bytes().startswith(begun)
            assert len(read_whole_lines(path)) - len(read_lines(path)) <= 1
        check(runs, "a", is_exact=False)
        check(runs, "b", is_exact=False)
        check_event_log(runs, paths[2], "a", "b", is_exact=False)
        assert len(set(runs.index())) == 4
        runs.close()


def test_a_disk_that_is_full_is_waited_for_and_nothing_is_lost(runs: LoggedRuns, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        filler = disk / "filler"
        filler.write_bytes(b"x" * (40 << 10))
        event_log = disk / "events.jsonl"
        with runs.copier() as copier:
            pass
        runs.train("a", num_events=300, output=OUTPUT, event_log=str(event_log))
        with runs.copier() as copier:
            copy_all(copier)
            [warning] = copier.warnings
            assert warning.startswith(f"{event_log} cannot be written: No space left")
            check(runs, "a")  # the others are not harmed
            written = event_log.read_bytes()
            assert len(written) > 0
            assert copier.copy() is not None
            assert event_log.read_bytes() == written  # it is not yet time to try again
            filler.unlink()
            runs.now += 1
            copy_all(copier)
            assert copier.warnings == []
        assert event_log.read_bytes().startswith(written)
        check_event_log(runs, event_log, "a", is_exact=False)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_below_the_least_room_nothing_is_copied_and_later_everything(
    make_runs: Callable[..., LoggedRuns],
) -> None:
    runs = make_runs(min_free_bytes=1 << 60)
    runs.train("a", output=OUTPUT)
    assert all("less than" in warning for warning in runs.copy())
    assert not runs.home.logs.jobs_index.exists()
    runs.settings = Settings(min_free_bytes=0)
    assert runs.copy() == []
    check(runs, "a")


def test_an_event_log_that_cannot_be_written_harms_no_other_and_is_caught_up(
    runs: LoggedRuns, tmp_path: Path
) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("in the way")
    runs.train("a", output=OUTPUT, event_log=str(blocker / "events.jsonl"))
    for number in range(3):
        runs.train(f"b{number}", event_log=str(tmp_path / "good.jsonl"))
    assert len(runs.copy()) == 1
    check_event_log(runs, tmp_path / "good.jsonl", "b0", "b1", "b2")
    check(runs, "a")
    blocker.unlink()
    assert runs.copy() == []  # by the next daemon, long after the run ended
    check_event_log(runs, blocker / "events.jsonl", "a")
    assert len(runs.index()) == 8


def test_a_run_whose_folder_cannot_be_read_stops_no_other_run_in_the_same_event_log(
    runs: LoggedRuns, tmp_path: Path
) -> None:
    event_log = tmp_path / "events.jsonl"
    for run_id in ("bad", "good"):
        runs.train(run_id, event_log=str(event_log))
    events = runs.home.run("bad").events
    events.rename(tmp_path / "aside")
    os.mkfifo(events)
    with runs.copier() as copier:
        copy_all(copier)
        assert copier.warnings == [
            f"{events.parent.parent} cannot be read: it is a FIFO, expected a regular file; will try again"
        ]
        assert seqs([line for line in read_lines(event_log) if line["run_id"] == "good"]) == [1, 2, 3, 4, 5]
        (tmp_path / "aside").replace(events)
        runs.now += 1
        copy_all(copier)
        assert copier.warnings == []
    check_event_log(runs, event_log, "bad", "good")


def test_pauses_between_two_tries_grow_and_end_with_the_trouble(runs: LoggedRuns, tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("in the way")
    runs.train("a", event_log=str(blocker / "events.jsonl"))
    with runs.copier() as copier:
        pauses = []
        for _ in range(8):
            copy_all(copier)
            pause = copier.copy()
            assert pause is not None
            pauses.append(pause)
            runs.now += pause
        assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
        blocker.unlink()
        assert copier.copy() is None


def test_a_run_that_goes_on_over_midnight_gets_another_file(runs: LoggedRuns) -> None:
    runs.submit("a")
    runs.start("a")
    runs.say("a", "started")
    runs.copy()
    runs.now_ms += DAY_MS
    runs.say("a", "completed")
    runs.copy()
    assert [
        len(read_whole_lines(runs.home.logs.run("a", at_ms))) for at_ms in (runs.now_ms - DAY_MS, runs.now_ms)
    ] == [1, 1]


def test_a_crash_before_midnight_repeats_lines_in_the_file_of_the_next_day(runs: LoggedRuns) -> None:
    runs.submit("a")
    runs.start("a")
    runs.say("a", "started", "metric")
    assert runs.copy_and_die("logs.synced=kill")
    runs.now_ms += DAY_MS
    runs.say("a", "metric")
    runs.copy()
    assert seqs(runs.day_log("a")) == [1, 2, 1, 2, 3]
    check(runs, "a", b"", is_exact=False)


def test_a_file_is_renamed_between_two_lines_and_a_tailer_gets_each_of_them_once(
    make_runs: Callable[..., LoggedRuns],
) -> None:
    runs = make_runs(max_log_bytes=4096)
    folder = runs.home.logs.day(runs.now_ms)
    tailer = Tailer(folder)
    runs.submit("a")
    runs.start("a")
    for number in range(40):
        runs.say("a", *["metric"] * 5)
        runs.print("a", b"line %d\n" % number)
        runs.copy()
        tailer.read()
    assert len(list(folder.iterdir())) > 5
    assert all(path.stat().st_size < 6000 for path in folder.iterdir())
    told = [json.loads(line) for line in tailer.lines]
    assert seqs(told) == list(range(1, 201))
    assert [line["message"] for line in outputs(told)] == [f"line {number}" for number in range(40)]
    assert told == runs.day_log("a")


class Tailer:
    """Follows files by their inode, as Vector and Fluentd do: a new name is no new file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[int, int] = {}
        self.lines: list[bytes] = []

    def read(self) -> None:
        found = [(entry.inode(), Path(entry.path)) for entry in os.scandir(self._folder)]
        known = [item for item in found if item[0] in self._offsets]
        for inode, path in [*known, *(item for item in found if item not in known)]:
            with path.open("rb") as file:
                file.seek(self._offsets.get(inode, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offsets[inode] = self._offsets.get(inode, 0) + len(whole)
            self.lines += whole.splitlines()


def test_the_index_is_renamed_when_it_is_long_enough(make_runs: Callable[..., LoggedRuns]) -> None:
    runs = make_runs(max_log_bytes=4096)
    for number in range(12):
        runs.train(f"run-{number}", num_events=0)
        runs.copy()
    names = sorted(path.name for path in runs.home.logs.jobs_index.parent.iterdir())
    assert names[0] == "index.1.jsonl"
    assert names[-1] == "index.jsonl"
    assert [run_id for run_id, event in runs.index() if event == "job_completed"] == [
        f"run-{n}" for n in range(12)
    ]
    assert len(runs.index()) == 24


def test_an_event_log_that_logrotate_took_away_goes_on_in_a_new_file(
    runs: LoggedRuns, tmp_path: Path
) -> None:
    event_log, taken = tmp_path / "events.jsonl", tmp_path / "events.jsonl.1"
    runs.submit("a", event_log=str(event_log))
    runs.start("a")
    with runs.copier() as copier:
        copy_all(copier)
    runs.say("a", "started")
    with runs.copier() as copier:
        copy_all(copier)
        event_log.rename(taken)
        copy_all(copier)
    runs.say("a", "completed")
    runs.copy()
    assert [json.loads(line)["event"] for line in read_whole_lines(taken)] == ["job_submitted", "started"]
    assert [json.loads(line)["event"] for line in read_whole_lines(event_log)] == ["completed"]


def test_somebody_elses_lines_in_an_event_log_stay_and_ours_begin_below(
    runs: LoggedRuns, tmp_path: Path
) -> None:
    event_log = tmp_path / "events.jsonl"
    event_log.write_bytes(b"a title\nand half a")
    runs.train("a", event_log=str(event_log))
    runs.copy()
    lines = event_log.read_bytes().splitlines()
    assert lines[:2] == [b"a title", b"and half a"]
    assert lines[3:-1] == runs.events("a")
    assert len(read_whole_lines(event_log)) - len(read_lines(event_log)) == 2


def test_an_event_log_that_is_no_regular_file_is_not_waited_for(runs: LoggedRuns, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    runs.train("a", output=OUTPUT, event_log=str(pipe))
    assert runs.copy() == [f"{pipe} cannot be written: it is a FIFO, expected a regular file; will try again"]
    check(runs, "a")


def test_runs_that_ended_before_there_were_logs_are_left_alone_and_live_ones_are_copied_whole(
    runs: LoggedRuns,
) -> None:
    runs.registry.writer.write(lambda connection: connection.execute("DELETE FROM outbox_cursors"))
    runs.train("old")
    runs.submit("live")
    runs.start("live")
    runs.say("live", "started", "metric")
    runs.copy()
    runs.say("live", "completed")
    runs.end("live")
    runs.copy()
    check(runs, "live", b"")
    assert {run_id for run_id, _ in runs.index()} == {"live"}


def test_runs_that_were_copied_are_not_looked_at_again_also_where_their_logs_were_deleted(
    runs: LoggedRuns,
) -> None:
    for number in range(5):
        runs.train(f"run-{number}", output=OUTPUT)
    runs.copy()
    shutil.rmtree(runs.home.logs.root)
    with runs.copier() as copier:
        assert copier.copy() is None
    assert not runs.home.logs.root.exists()
    runs.train("new", output=OUTPUT)
    runs.copy()
    check(runs, "new")
    assert len(runs.index()) == 2


def test_a_registry_that_refuses_the_places_costs_nothing_but_another_look(
    runs: LoggedRuns,
) -> None:
    with runs.copier() as copier:
        copy_all(copier)
        runs.train("a", output=OUTPUT)
        failpoints.arm("registry.before_commit=enospc")
        try:
            with pytest.raises(OSError, match="failpoint"):
                copier.copy()
        finally:
            failpoints.arm("")
        copy_all(copier)
    check(runs, "a")
    assert len(runs.index()) == 2


def test_many_lines_take_several_rounds_and_others_have_their_turn(runs: LoggedRuns) -> None:
    runs.submit("loud")
    runs.start("loud")
    runs.print("loud", b"%s\n" % (b"x" * 999) * 6000)
    runs.say("loud", "started")
    runs.train("quiet")
    with runs.copier() as copier:
        assert copier.copy() == 0
        assert len(outputs(runs.day_log("loud"))) < 6000
        assert runs.index()[-1] == ("quiet", "job_completed")
        copy_all(copier)
    assert len(outputs(runs.day_log("loud"))) == 6000
