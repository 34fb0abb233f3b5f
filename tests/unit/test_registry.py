"""The registry: submits are idempotent and durable, a run and its slots are claimed together, terminal is final."""

import json
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from trn.cli import command_table as verbs
from trn.core.causes import Cause, failure
from trn.core.digest import run_digest
from trn.core.errors import AmbiguousError, ConflictError, NotFoundError, RegistryError, UnavailableError
from trn.core.home import Home, find_home
from trn.core.runs import OWNERS, TERMINAL, TRANSITIONS, Needs, RunState, require_transition
from trn.daemon.__main__ import main as daemon_main
from trn.registry.base import Ending, NewRun
from trn.registry.connection import back_up, check_integrity, migrate, open_reader, open_writer
from trn.registry.named_queries import queries
from trn.registry.reader import RegistryReader
from trn.registry.sqlite import RunRegistry
from trn.registry.writer import RegistryWriter

WAITS = Cause(id="waits-for-gpu", waits_for=("gpu",), values={"gpus": 1})


@pytest.fixture(params=["file", "memory"])
def registry(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RunRegistry]:
    """The registry, and its fake: both keep the same promises."""
    registry = RunRegistry(tmp_path / "registry.db" if request.param == "file" else None)
    registry.set_slots(["cuda:0", "cuda:1"]).result()
    yield registry
    registry.close()


@pytest.fixture
def in_file(tmp_path: Path) -> Iterator[RunRegistry]:
    registry = RunRegistry(tmp_path / "registry.db")
    yield registry
    registry.close()


def new(run_id: str, **changes: Any) -> NewRun:
    config = {"trainer": "a:B", "seed": changes.pop("seed", run_id)}
    return NewRun(run_id=run_id, digest=run_digest(config), config=config, **changes)


def ended(state: RunState, **fields: Any) -> Ending:
    return Ending(state=state, cause=failure("killed", signal="SIGKILL"), **fields)


def test_an_option_without_a_column_is_kept_with_the_run(registry: RunRegistry) -> None:
    registry.submit(new("one", log_dir="/logs")).result()
    kept = """UPDATE runs SET log_dir = '', options = '{"event_log": "/e", "of a newer release": 1}'"""
    registry.writer.write(lambda connection: connection.execute(kept))
    run = registry.get("one")
    assert (run.log_dir, run.event_log) == ("", "/e")
    assert registry.page()[0].event_log == "/e"


def test_any_reader_can_ask_what_changed_since(tmp_path: Path) -> None:
    registry = RunRegistry(tmp_path / "registry.db")
    other = RegistryReader(tmp_path / "registry.db")
    first, _ = registry.submit(new("one")).result()
    registry.submit(new("two")).result()
    assert other.last_change() == registry.last_change() == 2
    assert [run.run_id for run in other.changed(first.change)] == ["two"]
    with pytest.raises(NotFoundError):
        registry.want_cancel("missing", "enough").result()
    registry.want_cancel("one", "enough").result()
    registry.remove(["one"]).result()
    removed = other.last_change()
    assert (removed, other.changed(removed)) == (5, [])
    other.close()
    registry.close()
    registry = RunRegistry(tmp_path / "registry.db")
    third, _ = registry.submit(new("three")).result()
    assert third.change == removed + 1
    registry.close()


def test_a_registry_in_memory_is_its_own_and_readable_by_other_threads() -> None:
    one, other = RunRegistry(None), RunRegistry(None)
    one.submit(new("one")).result()
    assert other.page() == []
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(lambda: [run.run_id for run in one.reader().page()]).result() == ["one"]
    one.close()
    other.close()


def test_an_equal_submit_returns_the_run_that_exists(registry: RunRegistry) -> None:
    first, existed = registry.submit(new("one", seed=1)).result()
    assert not existed
    assert (first.state, first.config["seed"]) == (RunState.PENDING, 1)
    again, existed = registry.submit(new("two", seed=1)).result()
    assert existed
    assert again.run_id == "one"
    other, existed = registry.submit(new("two", seed=1), force_new=True).result()
    assert not existed
    assert other.run_id == "two"


@pytest.mark.parametrize("state", [RunState.FAILED, RunState.CANCELLED])
def test_a_run_that_failed_or_was_cancelled_never_answers_and_never_blocks(
    registry: RunRegistry, state: RunState
) -> None:
    first, _ = registry.submit(new("one")).result()
    registry.claim("one", []).result()
    again, existed = registry.submit(new("one")).result()
    assert (again.run_id, existed) == ("one", True), "it is alive"
    registry.end("one", 1, ended(state)).result()
    assert registry.answers_to(first.digest) == []
    second, existed = registry.submit(new("one")).result()
    assert (second.run_id, existed) == ("one.2", False)
    registry.claim("one.2", []).result()
    registry.end("one.2", 1, ended(RunState.COMPLETED)).result()
    third, existed = registry.submit(new("one")).result()
    assert (third.run_id, existed) == ("one.2", True)


def test_a_run_that_is_being_cancelled_does_not_answer_and_one_that_completed_before_its_cancel_does(
    registry: RunRegistry,
) -> None:
    registry.submit(new("one")).result()
    registry.claim("one", []).result()
    registry.want_cancel("one", "enough").result()
    second, existed = registry.submit(new("one")).result()
    assert (second.run_id, existed) == ("one.2", False)
    registry.claim("one.2", []).result()
    registry.want_cancel("one.2", "too late").result()
    registry.end("one.2", 1, ended(RunState.COMPLETED)).result()
    third, existed = registry.submit(new("one")).result()
    assert (third.run_id, existed) == ("one.2", True)


def test_a_stale_run_does_not_answer_and_an_older_one_whose_result_stands_does(registry: RunRegistry) -> None:
    for name in ("one", "one.2"):
        registry.submit(new("one"), force_new=True).result()
        registry.claim(name, []).result()
        registry.end(name, 1, ended(RunState.COMPLETED)).result()
    found, existed = registry.submit(new("one"), stale={"one.2"}).result()
    assert (found.run_id, existed) == ("one", True)
    found, existed = registry.submit(new("one"), stale={"one", "one.2"}).result()
    assert (found.run_id, existed) == ("one.3", False)


def test_a_repeat_of_a_submission_returns_the_run_that_it_made_also_when_that_has_failed(
    registry: RunRegistry,
) -> None:
    for is_another in (False, True):
        name = f"one-{is_another}"
        first, _ = registry.submit(new(name, submission_id=name), force_new=is_another).result()
        registry.want_cancel(first.run_id, "enough").result()
        again, existed = registry.submit(new(name, submission_id=name), force_new=is_another).result()
        assert (again.run_id, again.state, existed) == (name, RunState.CANCELLED, False)
    assert registry.counts() == {"CANCELLED": 2}
    with pytest.raises(ConflictError, match="'one-True' made run one-True, which is another job"):
        registry.submit(new("two", submission_id="one-True")).result()


def test_the_digest_is_of_what_is_asked_for_and_not_of_who_asks() -> None:
    config = {"trainer": "a:B", "hyperparams": {"x": 1, "y": 2}}
    same = {"hyperparams": {"y": 2, "x": 1}, "trainer": "a:B", "run_id": "r", "tags": {"a": "b"}}
    assert run_digest(config) == run_digest(same)
    assert run_digest(config) != run_digest(config, code_identity="sha256:1")
    assert run_digest(config) != run_digest({**config, "seed": 1})
    assert run_digest(config) != run_digest(
        config, base_dir="/elsewhere"
    )  # its relative paths mean other data
    for name in ("family", "parent_run_id", "data", "environment"):
        assert run_digest(config) != run_digest(config, **{name: "another"})


def test_a_run_and_its_slots_are_claimed_together_or_not_at_all(registry: RunRegistry) -> None:
    for name in ("one", "two"):
        registry.submit(new(name, needs=Needs(gpus=1, cpus=2, memory_mb=100))).result()
    attempt = registry.claim("one", ["cuda:0"]).result()
    assert (attempt.number, attempt.devices) == (1, ("cuda:0",))
    with pytest.raises(ConflictError, match="cuda:0 is not free"):
        registry.claim("two", ["cuda:1", "cuda:0"]).result()
    two = registry.get("two")
    assert (two.state, two.attempt) == (RunState.PENDING, 0)
    assert [slot["run_id"] for slot in registry.slots()] == ["one", None]
    assert registry.held() == (2, 100)
    with pytest.raises(ConflictError, match="cannot become DISPATCHING"):
        registry.claim("one", []).result()


def test_slots_are_freed_exactly_once_on_every_way_out(registry: RunRegistry) -> None:
    for number, state in enumerate([*sorted(TERMINAL), RunState.PENDING]):
        name = f"run-{number}"
        registry.submit(new(name, needs=Needs(gpus=1))).result()
        registry.claim(name, ["cuda:0"]).result()
        registry.launched(name, 1, worker="b/7/8", pid=7).result()
        assert registry.get(name).state is RunState.RUNNING
        registry.end(name, 1, ended(state)).result()
        assert registry.slots()[0]["run_id"] is None
        registry.submit(new(f"next-{number}")).result()
        registry.claim(f"next-{number}", ["cuda:0"]).result()
        repeated = registry.end(name, 1, ended(RunState.FAILED)).result()  # a reply that was lost
        assert repeated.state is state
        assert registry.slots()[0]["run_id"] == f"next-{number}"
        registry.end(f"next-{number}", 1, ended(RunState.FAILED)).result()


def test_terminal_states_never_change(registry: RunRegistry) -> None:
    registry.submit(new("one")).result()
    run, was_live = registry.want_cancel("one", "not needed").result()
    assert (run.state, was_live, run.reason) == (RunState.CANCELLED, True, "not needed; it had not started")
    run, was_live = registry.want_cancel("one", "again").result()
    assert (was_live, run.reason) == (False, "not needed; it had not started")
    with pytest.raises(ConflictError):
        registry.claim("one", []).result()
    for state in TERMINAL:
        assert TRANSITIONS[state] == frozenset()
        for other in RunState:
            with pytest.raises(ConflictError, match="final"):
                require_transition("one", state, other)
    assert set(OWNERS) == set(RunState) - TERMINAL


def test_notes_and_tags_change_in_any_state_and_every_watcher_can_see_it(registry: RunRegistry) -> None:
    registry.submit(new("one", tags={"team": "a", "group": "g1"})).result()
    before = registry.get("one")
    run = registry.set_labels("one", tags={"team": "b", "new": "1"}, removed_tags=["group", "none"]).result()
    assert (run.tags, run.notes) == ({"team": "b", "new": "1"}, "")
    assert [(item.run_id, item.tags) for item in registry.changed(before.change)] == [("one", run.tags)]
    registry.want_cancel("one", "enough").result()
    run = registry.set_labels("one", notes="kept\nafter its end").result()
    assert (run.state, run.tags, run.notes) == (
        RunState.CANCELLED,
        {"team": "b", "new": "1"},
        "kept\nafter its end",
    )
    assert run.updated_ms == registry.get("one").ended_ms, "it is about the run's life"
    assert registry.page(tags={"team": "b"})[0].notes == run.notes
    assert registry.page(tags={"group": "g1"}) == []
    assert registry.set_labels("one", notes=run.notes, tags={"new": "1"}).result().change == run.change
    assert registry.set_labels("one", notes="", tags={"group": "g2"}).result().notes == ""
    assert registry.page(tags={"group": "g2"})[0].change > run.change
    renamed = registry.set_labels("one", name="Baseline").result()
    assert (renamed.run_id, renamed.name, renamed.tags) == (
        "one",
        "Baseline",
        {"team": "b", "new": "1", "group": "g2"},
    )
    assert renamed.digest == run.digest
    with pytest.raises(NotFoundError):
        registry.set_labels("missing", notes="x").result()


def test_a_cancel_of_a_running_run_is_recorded_as_wanted(registry: RunRegistry) -> None:
    registry.submit(new("one")).result()
    registry.claim("one", []).result()
    run, was_live = registry.want_cancel("one", "stop it").result()
    assert (run.state, was_live, run.is_cancel_wanted) == (RunState.DISPATCHING, True, True)
    assert run.cancel_reason == "stop it"


def test_a_retry_is_another_attempt_and_waits_for_its_backoff(registry: RunRegistry) -> None:
    registry.submit(new("one", max_attempts=3)).result()
    registry.claim("one", []).result()
    registry.end("one", 1, ended(RunState.PENDING, delay_ms=5, exit_code=14, category="train-step")).result()
    run = registry.get("one")
    assert (run.state, run.not_before_ms) == (RunState.PENDING, run.updated_ms + 5)
    assert registry.claim("one", []).result().number == 2
    assert [(item.number, item.exit_code) for item in registry.attempts("one")] == [(1, 14), (2, None)]


def test_events_are_taken_in_exactly_once(registry: RunRegistry) -> None:
    registry.submit(new("one")).result()
    registry.claim("one", []).result()
    for _ in range(2):  # the second is a repetition after a lost reply
        registry.follow(
            "one", 1, offset=100, last_seq=4, step=10, heartbeat_ms=9, metrics={"train/loss": 0.5}
        ).result()
    change = registry.get("one").change
    registry.follow("one", 1, offset=50, last_seq=2, step=5, heartbeat_ms=1, metrics={"x": 1.0}).result()
    run = registry.get("one")
    assert (run.step, run.last_seq, run.metrics, run.change) == (10, 4, {"train/loss": 0.5}, change)
    registry.follow(
        "one", 1, offset=200, last_seq=8, step=20, heartbeat_ms=3, metrics={"val/loss": 1.0}, end_step=50
    ).result()
    run = registry.get("one")
    assert (run.step, run.end_step) == (20, 50)
    assert run.metrics == {"train/loss": 0.5, "val/loss": 1.0}


def test_runs_are_found_by_a_prefix_that_is_unique(registry: RunRegistry) -> None:
    for name in ("abc-1", "abc-2", "b"):
        registry.submit(new(name)).result()
    assert registry.find("abc-1").run_id == "abc-1"
    assert registry.find("b").run_id == "b"
    with pytest.raises(AmbiguousError, match="abc-1, abc-2"):
        registry.find("abc")
    with pytest.raises(NotFoundError, match="'x'"):
        registry.find("x")
    with pytest.raises(NotFoundError):
        registry.find("")
    with pytest.raises(NotFoundError):
        registry.get("abc-")


def test_pages_and_queue_have_their_order(registry: RunRegistry) -> None:
    for number in range(7):
        registry.submit(new(f"run-{number}", priority=number % 2, name=f"n{number}")).result()
    queue = [run.run_id for run in registry.queue(1 << 62, 10)]
    assert queue == [f"run-{number}" for number in (1, 3, 5, 0, 2, 4, 6)]
    seen: list[str] = []
    before = None
    while page := registry.page(limit=3, before=before):
        seen += [run.run_id for run in page]
        before = (page[-1].submitted_ms, page[-1].run_id)
    assert sorted(seen) == sorted(queue)
    assert len(seen) == 7
    assert [run.run_id for run in registry.page(name="n3")] == ["run-3"]
    assert registry.page(states=[RunState.RUNNING]) == []
    assert registry.counts() == {"PENDING": 7}


def test_changes_can_be_replayed_from_any_of_them(registry: RunRegistry) -> None:
    registry.submit(new("one")).result()
    start = registry.last_change()
    registry.submit(new("two")).result()
    registry.claim("one", []).result()
    changed = registry.changed(start)
    assert [run.run_id for run in changed] == ["two", "one"]
    assert changed[-1].change == registry.last_change()


def test_a_burst_of_submits_shares_commits_and_one_that_fails_takes_no_other_with_it(
    registry: RunRegistry,
) -> None:
    before = registry.writer.num_commits
    blocked = threading.Event()
    registry.writer.between(lambda: blocked.wait(10) and None)
    futures = [registry.submit(new(f"run-{number}")) for number in range(50)]
    futures.insert(25, registry.submit(new("run-3", seed="other", submission_id="twice")))
    futures.insert(26, registry.submit(new("run-4", seed="another", submission_id="twice")))
    blocked.set()
    results = [future.exception() for future in futures]
    assert [isinstance(item, ConflictError) for item in results].count(True) == 1
    assert registry.counts() == {"PENDING": 51}
    assert registry.writer.num_commits - before <= 3


def test_an_acknowledged_submit_survives_a_killed_process(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from trn.registry.sqlite import RunRegistry; from trn.registry.base import NewRun\n"
        "registry = RunRegistry(Path(sys.argv[1]))\n"
        "for number in range(1000):\n"
        "    registry.submit(NewRun(run_id=f'r{number}', digest=str(number), config={})).result()\n"
        "    print(number, flush=True)\n"
        "    if number == 37: os.kill(os.getpid(), 9)\n"
    )
    path = tmp_path / "registry.db"
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False
    )
    acknowledged = [int(line) for line in done.stdout.split()]
    assert acknowledged[-1] == 37
    registry = RunRegistry(path)
    assert {run.run_id for run in registry.page(limit=1000)} >= {f"r{number}" for number in acknowledged}
    assert check_integrity(path) == []
    registry.close()


def test_a_registry_of_a_newer_release_is_refused_and_an_older_one_is_migrated(tmp_path: Path) -> None:
    path = tmp_path / "registry.db"
    RunRegistry(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(RegistryError, match="schema 99 and this release knows"):
        RunRegistry(path)
    connection = open_writer(tmp_path / "old.db")
    assert migrate(connection, "trn.registry.migrations") >= 1
    assert migrate(connection, "trn.registry.migrations") >= 1
    connection.close()


def test_runs_from_before_families_are_families_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "registry.db"
    connection = open_writer(path)
    folder = files("trn.registry.migrations")
    for name in ("0001_start.sql", "0002_outbox.sql"):
        connection.executescript(folder.joinpath(name).read_text())
    connection.execute("PRAGMA user_version = 2")
    connection.executemany(
        "INSERT INTO runs (run_id, digest, state, reason, config, name, priority, parent_run_id, snapshot, base_dir,"
        " interpreter, submitted_ms, updated_ms, max_attempts, needs, tags, change)"
        " VALUES (?, 'd', ?, '', '{}', '', 0, '', '', '', '', ?, 1, 1, '{}', '{}', ?)",
        [("old", "COMPLETED", 1, 1), ("old.2", "FAILED", 2, 2), ("child", "CANCELLED", 3, 3)],
    )
    connection.execute(
        "INSERT INTO attempts (run_id, number, launched_ms, last_heartbeat_ms, devices, boot_id, pid, start_ticks)"
        " VALUES ('old', 1, 1, 1, '[]', 'b', 7, 9)"
    )
    connection.close()
    registry = RunRegistry(path)
    try:
        assert (registry.attempts("old")[0].worker, registry.last_change()) == ("b/7/9", 3)
        assert [(run.run_id, run.family, run.member) for run in registry.page()] == [
            ("child", "child", 1),
            ("old.2", "old.2", 1),
            ("old", "old", 1),
        ]
        assert registry.find("old").run_id == "old"
        added, _ = registry.submit(new("old")).result()
        assert added.run_id == "old.3", "an id that somebody gave by hand is passed over"
        assert registry.find("old").run_id == "old.3"
        assert registry.find("old.2").run_id == "old.2"
        assert check_integrity(path) == []
    finally:
        registry.close()


def test_readers_answer_without_a_daemon_and_cannot_write(in_file: RunRegistry, tmp_path: Path) -> None:
    in_file.submit(new("one")).result()
    reader = RegistryReader(tmp_path / "registry.db")
    assert reader.get("one").state is RunState.PENDING
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader._read.execute("DELETE FROM runs")
    reader.close()
    with pytest.raises(NotFoundError, match="nothing was ever submitted"):
        RegistryReader(tmp_path / "none.db")


def test_checkpoint_and_backup(in_file: RunRegistry, tmp_path: Path) -> None:
    in_file.submit(new("one")).result()
    busy, _, _ = in_file.checkpoint_wal()
    assert busy == 0
    back_up(tmp_path / "registry.db", tmp_path / "copy.db")
    copy = RegistryReader(tmp_path / "copy.db")
    assert copy.get("one").run_id == "one"
    copy.close()


def test_a_full_disk_is_told_and_nothing_half_happened(tmp_path: Path) -> None:
    connection = open_writer(tmp_path / "small.db")
    connection.execute("CREATE TABLE t (x BLOB)")
    connection.execute("PRAGMA max_page_count = 4")
    writer = RegistryWriter(connection)

    def fill(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO t VALUES (zeroblob(100000))")

    with pytest.raises((UnavailableError, sqlite3.OperationalError), match="full"):
        writer.write(fill)
    assert writer.write(lambda connection: connection.execute("SELECT count(*) FROM t").fetchone()[0]) == 0
    writer.close()
    with pytest.raises(UnavailableError, match="closed"):
        writer.submit(fill)


def test_every_query_is_one_that_sqlite_understands(registry: RunRegistry) -> None:
    for name, statement in queries().items():
        names = set(re.findall(r":(\w+)", statement))
        registry.writer.write(
            lambda connection, s=statement, n=names: connection.execute(
                f"EXPLAIN {s}", dict.fromkeys(n, "")
            ).fetchall()
        )
        assert statement, name


def test_threads_that_make_a_home_at_once_do_not_trip_over_each_other(tmp_path: Path) -> None:
    home, faults = Home(tmp_path / "home"), []

    def make() -> None:
        for _ in range(300):
            try:
                home.make()
            except UnavailableError as fault:
                faults.append(fault)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []


def test_the_home_is_private_and_its_names_cannot_lead_out_of_it(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.make()
    assert home.root.stat().st_mode & 0o777 == 0o700
    for name in ("../x", "a/b", "", ".hidden", "a..b", "x" * 200, "a\n"):
        with pytest.raises(Exception, match="is no run id"):
            home.run(name)
    assert home.run("ok-1.2").root == home.root / "runs" / "ok-1.2"
    assert find_home({"TRN_HOME": str(tmp_path)}) == tmp_path


class RegistryMachine(RuleBasedStateMachine):
    """Any order of calls: at most one live attempt of a run, no slot shared or leaked, terminal is final."""

    runs = Bundle("runs")

    def __init__(self) -> None:
        super().__init__()
        import tempfile

        self.folder = tempfile.TemporaryDirectory()
        self.registry = RunRegistry(Path(self.folder.name) / "registry.db")
        self.registry.set_slots(["g0", "g1", "g2"]).result()
        self.number = 0
        self.finals: dict[str, str] = {}

    def teardown(self) -> None:
        self.registry.close()
        self.folder.cleanup()

    @rule(target=runs)
    def submit(self) -> str:
        self.number += 1
        run, _ = self.registry.submit(new(f"run-{self.number}")).result()
        return run.run_id

    def attempt_of(self, run_id: str) -> int:
        return self.registry.get(run_id).attempt

    @rule(run_id=runs, devices=st.lists(st.sampled_from(["g0", "g1", "g2"]), unique=True))
    def claim(self, run_id: str, devices: list[str]) -> None:
        self.registry.claim(run_id, devices).exception()

    @rule(run_id=runs)
    def launched(self, run_id: str) -> None:
        self.registry.launched(run_id, self.attempt_of(run_id), worker="b/1/", pid=1).exception()

    @rule(run_id=runs, state=st.sampled_from([*sorted(TERMINAL), RunState.PENDING]))
    def end(self, run_id: str, state: RunState) -> None:
        self.registry.end(run_id, self.attempt_of(run_id), ended(state)).exception()

    @rule(run_id=runs)
    def cancel(self, run_id: str) -> None:
        self.registry.want_cancel(run_id, "x").result()

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        held: dict[str, str] = {
            slot["device_id"]: slot["run_id"] for slot in self.registry.slots() if slot["run_id"]
        }
        for run in self.registry.page(limit=1000):
            live = [item for item in self.registry.attempts(run.run_id) if item.ended_ms is None]
            is_live = run.state in (RunState.DISPATCHING, RunState.RUNNING)
            assert len(live) == is_live
            assert sorted(live[0].devices if live else ()) == sorted(
                device for device, holder in held.items() if holder == run.run_id
            )
            if run.run_id in self.finals:
                assert run.state == self.finals[run.run_id]
            if run.state.is_terminal:
                self.finals[run.run_id] = run.state


TestRegistryMachine = RegistryMachine.TestCase
TestRegistryMachine.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)


def test_events_are_taken_in_once_whatever_is_repeated_and_places_lead_back_to_them(
    registry: RunRegistry,
) -> None:
    registry.submit(new("one")).result()
    registry.claim("one", []).result()

    def follow(offset: int, last_seq: int, step: int) -> None:
        registry.follow(
            "one", 1, offset=offset, last_seq=last_seq, step=step, heartbeat_ms=0, metrics={}
        ).result()

    follow(300_000, 10, 1)
    follow(300_000, 10, 99)  # repeated after a lost reply
    follow(310_000, 12, 2)
    follow(900_000, 40, 3)
    run = registry.get("one")
    assert (run.step, run.last_seq, run.event_offset) == (3, 40, 900_000)
    assert registry.event_place("one", 9) == (0, 0)
    assert registry.event_place("one", 12) == (10, 300_000)
    assert registry.event_place("one", 1000) == (40, 900_000)
    registry.rewind("one", 500_000).result()
    assert registry.event_place("one", 1000) == (10, 300_000)
    assert registry.get("one").last_seq == 40


def test_a_run_in_its_backoff_is_not_in_the_queue_until_that_is_over(registry: RunRegistry) -> None:
    registry.submit(new("one")).result()
    registry.claim("one", []).result()
    retry = Ending(state=RunState.PENDING, cause=failure("killed"), delay_ms=60_000, is_interruption=True)
    over_ms = registry.end("one", 1, retry).result().not_before_ms
    assert registry.queue(over_ms - 1, 10) == []
    assert registry.next_backoff_ms(over_ms - 1) == over_ms
    assert [run.run_id for run in registry.queue(over_ms, 10)] == ["one"]
    assert registry.next_backoff_ms(over_ms) is None
    assert registry.get("one").num_interruptions == 1


@pytest.mark.parametrize("back_s", [60, 5 * 3600, 365 * 24 * 3600])
def test_a_backoff_from_before_the_clock_was_put_back_is_over(registry: RunRegistry, back_s: int) -> None:
    registry.submit(new("one")).result()
    registry.claim("one", []).result()
    retry = Ending(state=RunState.PENDING, cause=failure("killed"), delay_ms=60_000)
    now_ms = registry.end("one", 1, retry).result().updated_ms
    assert registry.queue(now_ms, 10) == []
    back_ms = now_ms - back_s * 1000
    assert [run.run_id for run in registry.queue(back_ms, 10)] == ["one"]
    assert registry.next_backoff_ms(back_ms) is None
    registry.set_cause("one", WAITS).result()
    assert [run.run_id for run in registry.queue(back_ms, 10)] == ["one"]


def test_a_backoff_counts_from_the_end_as_it_is_recorded(tmp_path: Path) -> None:
    """Decided before the clock was put back and recorded after it: the run does not wait for the old time."""
    clock = [10_000_000]
    registry = RunRegistry(tmp_path / "registry.db", clock_ms=lambda: clock[0])
    try:
        registry.submit(new("one")).result()
        registry.claim("one", []).result()
        retry = Ending(state=RunState.PENDING, cause=failure("killed"), delay_ms=500)
        clock[0] -= 3_600_000
        registry.end("one", 1, retry).result()
        assert [run.run_id for run in registry.queue(clock[0] + 500, 10)] == ["one"]
    finally:
        registry.close()


def test_a_change_that_nobody_waits_for_any_more_does_not_end_the_writer(registry: RunRegistry) -> None:
    import concurrent.futures

    begun, gate = threading.Event(), threading.Event()
    held = registry.writer.between(lambda: begun.set() or gate.wait())
    begun.wait()
    dropped = registry.submit(new("dropped"))
    assert dropped.cancel()
    gate.set()
    concurrent.futures.wait([held])
    registry.submit(new("kept")).result()
    assert [run.run_id for run in registry.page()] == ["kept"]


def test_a_cancel_that_comes_while_a_retry_is_decided_still_cancels(registry: RunRegistry) -> None:
    registry.submit(new("one")).result()
    registry.claim("one", []).result()
    registry.want_cancel("one", "enough").result()
    retry = Ending(state=RunState.PENDING, cause=failure("killed"))
    run = registry.end("one", 1, retry).result()
    assert (run.state, run.reason) == (RunState.CANCELLED, "enough")


def test_a_reader_that_holds_the_log_delays_no_submit(in_file: RunRegistry, tmp_path: Path) -> None:
    in_file.submit(new("one")).result()
    reader = open_reader(tmp_path / "registry.db")
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM runs").fetchall()
    in_file.submit(new("two")).result()
    busy, _, _ = in_file.checkpoint_wal()  # with the busy timeout this would wait half a minute
    assert busy == 1
    in_file.submit(new("three")).result(10)
    reader.close()


def test_no_kind_of_run_hides_another_in_the_queue(registry: RunRegistry) -> None:
    for number in range(80):
        registry.submit(new(f"gpu-{number:02}", needs=Needs(gpus=1))).result()
    registry.submit(new("cpu", needs=Needs())).result()
    found = [run.run_id for run in registry.queue(1 << 62, 8)]
    assert found == [*(f"gpu-{number:02}" for number in range(8)), "cpu"]


def test_what_is_no_database_is_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "registry.db"
    path.write_bytes(b"this is no database" * 1000)
    with pytest.raises(RegistryError, match="cannot be used"):
        RunRegistry(path)


def test_lists_leave_out_what_was_asked_for_unless_asked(registry: RunRegistry) -> None:
    registry.submit(new("one")).result()
    assert registry.page()[0].config == {}
    assert registry.changed(0)[0].config == {}
    assert registry.page(with_config=True)[0].config == registry.get("one").config != {}


def test_a_damaged_registry_is_told_with_the_commands_that_put_a_sound_backup_in_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = Home(tmp_path / "home")
    home.make()
    RunRegistry(home.registry).close()
    assert daemon_main(["--home", str(home.root), "backup", str(home.backups / "1")]) == 0
    assert daemon_main(["--home", str(home.root), "check"]) == 0
    assert "registry.db: ok\nmetrics.db: does not exist yet" in capsys.readouterr().out
    (home.backups / "2").mkdir()
    for path in (home.registry, home.backups / "2" / "registry.db"):
        path.write_bytes(b"no database at all" * 1000)
    with pytest.raises(RegistryError, match=f"python -m trn.daemon --home {home.root} check"):
        RunRegistry(home.registry)
    assert daemon_main(["--home", str(home.root), "check"]) == 1
    out, err = capsys.readouterr()
    assert "registry.db: 1 error\n  - file is not a database" in out
    assert f"mv {home.registry} {home.registry}.damaged" in err
    assert f"cp -p {home.backups / '1'}/*.db" in err
    assert verbs.run(["--home", str(home.root), "list"]) == 5
    out, err = capsys.readouterr()
    assert json.loads(out)["code"] == "unavailable"
    assert f"`python -m trn.daemon --home {home.root} check` looks through it" in err
    shutil.rmtree(home.backups)
    assert daemon_main(["--home", str(home.root), "check"]) == 1
    assert "has no good one" in capsys.readouterr().err


def test_a_run_that_is_being_cancelled_says_so_until_it_has_ended(registry: RunRegistry) -> None:
    registry.submit(new("one")).result()
    registry.claim("one", []).result()
    registry.want_cancel("one", "not needed").result()
    registry.launched("one", 1, worker="w", pid=7).result()
    run = registry.get("one")
    assert (run.state, run.cause.id) == (RunState.RUNNING, "cancelling")
    assert run.reason == "attempt 1 is being stopped: not needed"


@pytest.mark.parametrize("is_another", [False, True])
def test_an_id_that_was_drawn_is_drawn_again_where_a_run_has_it(
    registry: RunRegistry, is_another: bool
) -> None:
    drawn = iter(["one", "two.2", "free"])
    registry.submit(new("one")).result()
    registry.submit(new("two")).result()
    registry.submit(new("two", seed=2)).result()
    made, existed = registry.submit(
        new("two", seed=3), force_new=is_another, draw_id=lambda: next(drawn)
    ).result()
    assert (made.run_id, made.family, made.config["run_id"], existed) == ("free", "free", "free", False)
    equal, existed = registry.submit(new("one"), draw_id=lambda: next(drawn)).result()
    assert (equal.run_id, existed) == ("one", True), "an equal run answers before an id is looked at"
