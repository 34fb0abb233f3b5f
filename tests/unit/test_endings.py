"""How attempts end: one table, one decision; a retry is worth it or not, and says why."""

import signal
from typing import Any

import pytest

from gen_worker.errors import Category, ExitCode
from trn.core.runs import AttemptRecord, RunRecord, RunState
from trn.daemon.endings import MAX_BACKOFF_S, MAX_INTERRUPTIONS, Wish, backoff_s, close_words, decide
from trn.daemon.event_file import Terminal
from trn.daemon.failures import FAILURES, rows
from trn.executors.base import WorkerExit
from trn.registry.sqlite import Ending

NOW_MS = 1_000_000


def run(**fields: Any) -> RunRecord:
    given: dict[str, Any] = {
        "run_id": "r",
        "digest": "sha256:1",
        "state": RunState.RUNNING,
        "reason": "",
        "config": {"retry": {"backoff_s": 10.0}},
        "submitted_ms": 0,
        "updated_ms": 0,
        "attempt": 1,
        "max_attempts": 3,
        "step": 7,
    }
    return RunRecord(**{**given, **fields})


def end(
    record: RunRecord | None = None,
    *,
    exit_code: int | None = None,
    terminal: Terminal | None = None,
    wish: Wish | None = None,
    before: list[AttemptRecord] | None = None,
    **fields: Any,
) -> Ending:
    worker_exit = WorkerExit(exit_code=exit_code, **fields)
    return decide(record or run(), before or [], worker_exit, terminal, wish, now_ms=NOW_MS)


def failed(category: str, error: str = "boom", step: int = 7) -> Terminal:
    return Terminal(event="failed", category=category, error=error, step=step)


COMPLETED = Terminal(event="completed", step=9)


def test_every_category_of_the_contract_has_a_row_and_every_row_its_reasons() -> None:
    assert set(Category) <= set(FAILURES)
    for row in rows():
        assert row.category in set(Category)
        assert row.words
        assert row.why
        assert row.counts or row.is_retried  # an interruption that is not retried would be a failure


@pytest.mark.parametrize("code", [0, 1, 14, 75, -signal.SIGKILL, -signal.SIGSEGV, None])
@pytest.mark.parametrize("is_cancel_wanted", [False, True])
def test_completed_wins_over_exit_codes_and_cancels(code: int | None, is_cancel_wanted: bool) -> None:
    ending = end(run(is_cancel_wanted=is_cancel_wanted), exit_code=code, terminal=COMPLETED)
    assert ending.state is RunState.COMPLETED
    assert ending.reason.startswith("completed at step 9")


def test_why_a_run_was_stopped_early_is_told_with_its_end() -> None:
    early = Terminal(event="completed", step=9, stop_reason="val/loss did not fall below 1")
    ending = end(exit_code=0, terminal=early)
    assert (ending.state, ending.stop_reason) == (RunState.COMPLETED, "val/loss did not fall below 1")
    assert ending.reason == "completed at step 9; stopped early: val/loss did not fall below 1"
    assert end(exit_code=0, terminal=COMPLETED).stop_reason == ""


def test_a_wanted_cancel_ends_the_run_and_says_how() -> None:
    record = run(is_cancel_wanted=True, cancel_reason="asked by ann", attempt=1)
    ending = end(record, exit_code=75, terminal=failed("cancelled"))
    assert (ending.state, ending.category) == (RunState.CANCELLED, "cancelled")
    assert ending.reason == "asked by ann; stopped at step 7"
    killed = Wish(cause="cancel", was_killed=True)
    assert "did not stop within grace, was killed" in end(record, exit_code=-9, wish=killed).reason
    never = decide(record, [], None, None, None, now_ms=NOW_MS)
    assert (never.state, never.reason) == (RunState.CANCELLED, "asked by ann; it had not started")
    other = end(record, exit_code=14, terminal=failed("train-step", "ValueError: x"))
    assert other.state is RunState.CANCELLED
    assert "ValueError: x" in other.reason


@pytest.mark.parametrize("category", ["startup", "input", "auth", "model-load", "timeout"])
def test_what_would_fail_the_same_again_is_not_retried(category: str) -> None:
    ending = end(exit_code=10, terminal=failed(category))
    assert (ending.state, ending.category) == (RunState.FAILED, category)
    assert "boom" in ending.cause


@pytest.mark.parametrize(
    ("fields", "category"),
    [
        ({"exit_code": 14, "terminal": failed("train-step")}, "train-step"),
        ({"exit_code": 15, "terminal": failed("upload")}, "upload"),
        ({"exit_code": -9, "is_out_of_memory": True}, "train-step"),
        ({"exit_code": None}, "train-step"),
        ({"exit_code": -signal.SIGSEGV}, "train-step"),
        ({"exit_code": 1}, "train-step"),
        ({"exit_code": -9, "wish": Wish(cause="heartbeat-timeout")}, "train-step"),
        ({"exit_code": -9, "wish": Wish(cause="start-timeout")}, "startup"),
    ],
)
def test_what_may_go_well_the_next_time_is_retried_and_counts(fields: dict[str, Any], category: str) -> None:
    ending = end(**fields)
    assert (ending.state, ending.category, ending.is_interruption) == (RunState.PENDING, category, False)
    assert ending.not_before_ms > NOW_MS
    last = end(run(attempt=3), **fields)
    assert (last.state, last.not_before_ms) == (RunState.FAILED, 0)
    assert "all 3 attempts failed" in last.reason


@pytest.mark.parametrize(
    "fields",
    [
        {"exit_code": 75, "terminal": failed("cancelled")},
        {"exit_code": -signal.SIGTERM},
        {"exit_code": None, "is_reboot": True},
        {"exit_code": None, "wish": Wish(cause="launch-failed", detail="no launcher")},
    ],
)
def test_an_interruption_uses_up_no_attempt_but_there_is_an_end_to_them(fields: dict[str, Any]) -> None:
    ending = end(run(attempt=1, max_attempts=1), **fields)
    assert (ending.state, ending.is_interruption) == (RunState.PENDING, True)
    after_two = end(
        run(attempt=3, num_interruptions=2, max_attempts=1), exit_code=14, terminal=failed("upload")
    )
    assert after_two.state is RunState.FAILED  # the first failure, and only one is allowed
    many = run(attempt=100, num_interruptions=MAX_INTERRUPTIONS - 1)
    assert end(many, **fields).state is RunState.FAILED


def test_an_attempt_that_never_had_a_process_is_an_interruption() -> None:
    ending = decide(run(max_attempts=1), [], None, None, None, now_ms=NOW_MS)
    assert (ending.state, ending.is_interruption) == (RunState.PENDING, True)


def test_the_same_failure_at_the_same_step_twice_in_a_row_is_not_tried_a_third_time() -> None:
    first = end(exit_code=14, terminal=failed("train-step"))
    before = AttemptRecord(
        run_id="r", number=1, launched_ms=0, ended_ms=1, category=first.category, cause=first.cause, step=7
    )
    record = run(attempt=2, max_attempts=9)
    again = end(record, exit_code=14, terminal=failed("train-step"), before=[before])
    assert again.state is RunState.FAILED
    assert "the same at step 7" in again.reason
    elsewhere = end(record, exit_code=14, terminal=failed("train-step", step=8), before=[before])
    assert elsewhere.state is RunState.PENDING
    otherwise = end(record, exit_code=14, terminal=failed("train-step", "bang"), before=[before])
    assert otherwise.state is RunState.PENDING


@pytest.mark.parametrize(
    ("worker_exit", "wish"),
    [
        (WorkerExit(exit_code=-9), Wish(cause="heartbeat-timeout", detail="silent for 61 s")),
        (WorkerExit(exit_code=-9, is_out_of_memory=True), None),
        (WorkerExit(is_reboot=True), None),
        (WorkerExit(exit_code=-signal.SIGSEGV), None),
        (WorkerExit(exit_code=-9), Wish(cause="time-limit")),
    ],
)
def test_the_decision_is_the_same_after_a_restart_that_forgot_the_wish(
    worker_exit: WorkerExit, wish: Wish | None
) -> None:
    record = run()
    category, error = close_words(record, worker_exit, wish)
    ours = Terminal(event="failed", category=category, error=error, step=7)
    before = decide(record, [], worker_exit, ours, wish, now_ms=NOW_MS)
    after = decide(record, [], worker_exit, ours, None, now_ms=NOW_MS)
    assert after == before


def test_a_worker_that_said_why_is_believed_though_it_crashed_on_its_way_out() -> None:
    ending = end(exit_code=-signal.SIGSEGV, terminal=failed("input", "no such file"))
    assert (ending.state, ending.category) == (RunState.FAILED, "input")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"exit_code": -signal.SIGSEGV}, "killed by SIGSEGV (invalid memory access)"),
        (
            {"exit_code": -signal.SIGKILL, "is_out_of_memory": True},
            "out of memory: the system killed it; use a smaller",
        ),
        ({"exit_code": -signal.SIGUSR1}, "killed by SIGUSR1"),
        ({"exit_code": -200}, "killed by signal 200"),
        ({"exit_code": 1}, "exit code 1 (bug): a traceback, if there was one, is in the log"),
        ({"exit_code": 0}, "exit code 0 (completed)"),
        ({"exit_code": 42}, "exit code 42: no exception ended it: code of the job did"),
        (
            {"exit_code": 3, "detail": "exit code 3"},
            "exit code 3: no exception ended it: code of the job did",
        ),
        ({"exit_code": 1, "detail": "its folder is gone"}, "ended without saying how: its folder is gone"),
        ({"exit_code": int(ExitCode.INPUT)}, "an input is not right: exit code 11 (input)"),
        ({"exit_code": None}, "nobody saw how"),
        ({"exit_code": None, "is_reboot": True}, "the machine went down under it"),
    ],
)
def test_causes_are_in_words(fields: dict[str, Any], words: str) -> None:
    assert words in end(**fields).cause


def test_the_backoff_doubles_up_to_an_hour_and_is_each_runs_own() -> None:
    waits = [backoff_s(run(), number) for number in range(1, 40)]
    for number, wait_s in enumerate(waits[:8]):
        assert 0.9 * 10 * 2**number <= wait_s <= 1.1 * 10 * 2**number
    assert max(waits) == MAX_BACKOFF_S
    assert backoff_s(run(), 1) == waits[0]
    assert len({backoff_s(run(digest=f"sha256:{number}"), 1) for number in range(20)}) == 20
    assert backoff_s(run(config={"retry": {"backoff_s": 0}}), 5) == 0
    assert [backoff_s(run(num_interruptions=number), 0) for number in (0, 1, 2, 50)] == [0, 1, 2, 60]
