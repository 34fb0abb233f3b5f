"""How attempts end: one table, one decision; a retry is worth it or not, and says why."""

import signal
from typing import Any

import pytest

from gen_worker.errors import Category, ExitCode
from trn.core.cause_words import FAILURE_WORDS, say_cause, say_what
from trn.core.causes import FAILURES, NO_CAUSE, Cause, failure
from trn.core.runs import AttemptRecord, RunRecord, RunState
from trn.daemon.dispatch.endings import (
    MAX_BACKOFF_S,
    MAX_INTERRUPTIONS,
    StopReason,
    backoff_s,
    close_fields,
    decide,
    interruption_backoff_s,
)
from trn.daemon.ingest.event_file import Terminal
from trn.executors.base import WorkerExit
from trn.registry.base import Ending


def run(**fields: Any) -> RunRecord:
    given: dict[str, Any] = {
        "run_id": "r",
        "digest": "sha256:1",
        "state": RunState.RUNNING,
        "cause": NO_CAUSE,
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
    stop_reason: StopReason | None = None,
    before: list[AttemptRecord] | None = None,
    saved_step: int = 0,
    lived_ms: int = 0,
    **fields: Any,
) -> Ending:
    worker_exit = WorkerExit(exit_code=exit_code, **fields)
    known = record or run(), before or []
    return decide(*known, worker_exit, terminal, stop_reason, saved_step=saved_step, lived_ms=lived_ms)


KILLED = failure("killed")


def ended(number: int, saved_step: int = 0, cause: Cause = KILLED, **fields: Any) -> AttemptRecord:
    times = {"launched_ms": 0, "ended_ms": 1, **fields}
    return AttemptRecord(run_id="r", number=number, cause=cause, saved_step=saved_step, **times)


def failed(category: str, error: str = "boom", step: int = 7, cause: str = "") -> Terminal:
    return Terminal(event="failed", category=category, error=error, step=step, cause=cause)


COMPLETED = Terminal(event="completed", step=9)


def test_every_category_has_a_row_and_every_row_its_words() -> None:
    assert set(Category) - {"cancelled"} <= set(FAILURES)
    assert set(FAILURE_WORDS) == set(FAILURES)
    for row in FAILURES.values():
        assert row.category in set(Category)
        assert FAILURE_WORDS[row.id].what
        assert FAILURE_WORDS[row.id].why


@pytest.mark.parametrize("code", [0, 1, 14, 75, -signal.SIGKILL, -signal.SIGSEGV, None])
@pytest.mark.parametrize("is_cancel_wanted", [False, True])
def test_completed_wins_over_exit_codes_and_cancels(code: int | None, is_cancel_wanted: bool) -> None:
    ending = end(run(is_cancel_wanted=is_cancel_wanted), exit_code=code, terminal=COMPLETED)
    assert ending.state is RunState.COMPLETED
    assert say_cause(ending.cause).startswith("completed at step 9")


def test_why_a_run_was_stopped_early_is_told_with_its_end() -> None:
    early = Terminal(event="completed", step=9, stop_reason="val/loss did not fall below 1")
    ending = end(exit_code=0, terminal=early)
    assert (ending.state, ending.stop_reason) == (RunState.COMPLETED, "val/loss did not fall below 1")
    assert say_cause(ending.cause) == "completed at step 9; stopped early: val/loss did not fall below 1"
    assert end(exit_code=0, terminal=COMPLETED).stop_reason == ""


def test_a_wanted_cancel_ends_the_run_and_says_how() -> None:
    record = run(is_cancel_wanted=True, cancel_reason="asked by ann", attempt=1)
    ending = end(record, exit_code=75, terminal=failed("cancelled"))
    assert (ending.state, ending.category) == (RunState.CANCELLED, "cancelled")
    assert say_cause(ending.cause) == "asked by ann; stopped at step 7"
    killed = StopReason(cause="cancel", was_killed=True)
    assert "killed at step 7, it did not stop within its grace period" in say_cause(
        end(record, exit_code=-9, stop_reason=killed).cause
    )
    never = decide(record, [], None, None, None, saved_step=0)
    assert (never.state, say_cause(never.cause)) == (RunState.CANCELLED, "asked by ann; it had not started")
    other = end(record, exit_code=14, terminal=failed("train-step", "ValueError: x"))
    assert other.state is RunState.CANCELLED
    assert "ValueError: x" in say_cause(other.cause)


def test_the_end_of_a_server_names_no_step_for_it_trains_nothing() -> None:
    wanted = server(is_cancel_wanted=True, cancel_reason="asked by ann")
    assert say_what(end(wanted, exit_code=75, terminal=failed("cancelled")).cause) == "asked by ann; stopped"
    assert "step" not in str(close_fields(wanted, WorkerExit(exit_code=-9), None)["error"])
    completed = end(server(), exit_code=0, terminal=COMPLETED)
    assert say_what(completed.cause) == "completed"
    assert "step" not in say_what(end(server(), exit_code=-9).cause)
    assert "step" not in str(close_fields(server(), WorkerExit(exit_code=-9), None)["error"])


@pytest.mark.parametrize("is_on_error", [False, True])
@pytest.mark.parametrize("category", ["startup", "input", "auth", "timeout"])
def test_what_would_fail_the_same_again_is_not_retried(category: str, is_on_error: bool) -> None:
    record = run(config={"retry": {"on_error": is_on_error}})
    ending = end(record, exit_code=10, terminal=failed(category), saved_step=5)
    assert (ending.state, ending.category) == (RunState.FAILED, category)
    assert "boom" in say_what(ending.cause)


# What was not the job's doing, and the category that its attempt is recorded with.
NOT_ITS_DOING: list[tuple[dict[str, Any], str]] = [
    ({"exit_code": -signal.SIGKILL}, "train-step"),
    ({"exit_code": -signal.SIGSEGV}, "train-step"),
    ({"exit_code": -signal.SIGUSR1}, "train-step"),
    ({"exit_code": -signal.SIGTERM}, "cancelled"),
    ({"exit_code": 75, "terminal": failed("cancelled")}, "cancelled"),
    ({"exit_code": -9, "is_out_of_memory": True}, "train-step"),
    ({"exit_code": None}, "train-step"),
    ({"exit_code": None, "is_reboot": True}, "cancelled"),
    ({"exit_code": -9, "stop_reason": StopReason(cause="heartbeat-timeout")}, "train-step"),
    ({"exit_code": -9, "stop_reason": StopReason(cause="start-timeout")}, "startup"),
    ({"exit_code": 15, "terminal": failed("upload")}, "upload"),
    ({"exit_code": 14, "terminal": failed("train-step", cause="connection")}, "train-step"),
    ({"exit_code": 11, "terminal": failed("input", cause="connection")}, "input"),
    ({"exit_code": 14, "terminal": failed("train-step", cause="out-of-memory")}, "train-step"),
    ({"exit_code": 14, "terminal": failed("train-step", cause="SIGKILL")}, "train-step"),
]


@pytest.mark.parametrize(("fields", "category"), NOT_ITS_DOING)
def test_what_was_not_the_jobs_doing_is_retried_by_default_at_once_after_progress(
    fields: dict[str, Any], category: str
) -> None:
    record = run(config={}, attempt=9)
    before = [ended(number) for number in range(1, 9)]  # however many
    ending = end(record, **fields, before=before, saved_step=5)
    assert (ending.state, ending.category, ending.is_interruption) == (RunState.PENDING, category, False)
    assert ending.delay_ms == 0
    assert say_cause(ending.cause).endswith("; retrying at once from step 5 (attempt 10)")


@pytest.mark.parametrize(("fields", "category"), NOT_ITS_DOING)
def test_without_progress_it_waits_and_the_third_attempt_in_a_row_is_the_last(
    fields: dict[str, Any], category: str
) -> None:
    record = run(config={}, attempt=5)
    before = [ended(1, 5), ended(2, 9), ended(3, 9)]
    ending = end(record, **fields, before=before, saved_step=9)
    assert (ending.state, ending.category) == (RunState.PENDING, category)
    assert ending.delay_ms > 10_000
    assert "from step 9 (attempt 6; 2 of 3 without a newer checkpoint)" in say_cause(ending.cause)
    last = end(record, **fields, before=[*before, ended(4, 9)], saved_step=9)
    assert (last.state, last.delay_ms) == (RunState.FAILED, 0)
    assert "not retried: 3 attempts without a newer checkpoint (retry.max_attempts is 3)" in say_cause(
        last.cause
    )
    further = end(record, **fields, before=[*before, ended(4, 9)], saved_step=10)
    assert (further.state, further.delay_ms) == (RunState.PENDING, 0)


def test_steps_that_were_trained_and_not_saved_are_no_progress() -> None:
    """Else a run that never saves, and is killed later each time, would be tried for ever."""
    before = [ended(1, step=100), ended(2, step=200)]
    ending = end(run(config={}, attempt=3, step=300), exit_code=-9, before=before)
    assert ending.state is RunState.FAILED


def test_a_checkpoint_that_is_lost_and_saved_again_is_no_progress() -> None:
    before = [ended(1, 100), ended(2, 50), ended(3, 100)]
    assert (
        end(run(config={}, attempt=4), exit_code=-9, before=before, saved_step=100).state is RunState.FAILED
    )


def test_no_attempt_follows_where_none_is_wanted() -> None:
    ending = end(run(max_attempts=0), exit_code=-9, saved_step=5)
    assert ending.state is RunState.FAILED
    assert "retry.max_attempts is 0" in say_cause(ending.cause)


def test_one_attempt_without_progress_is_all_where_one_is_asked_for() -> None:
    assert end(run(max_attempts=1), exit_code=-9).state is RunState.FAILED
    assert end(run(max_attempts=1), exit_code=-9, saved_step=5).state is RunState.PENDING


def test_a_kill_is_told_with_its_step_and_where_the_next_attempt_begins() -> None:
    ending = end(run(step=120), exit_code=-9, saved_step=100, detail="")
    assert (
        say_cause(ending.cause) == "killed by SIGKILL at step 120; retrying at once from step 100 (attempt 2)"
    )
    fresh = end(run(step=20, config={"retry": {"backoff_s": 0}}), exit_code=-9)
    assert say_cause(fresh.cause) == (
        "killed by SIGKILL at step 20; retrying at once from the start (attempt 2; 1 of 3 without a newer checkpoint)"
    )


@pytest.mark.parametrize(
    ("fields", "category"),
    [
        ({"exit_code": 14, "terminal": failed("train-step")}, "train-step"),
        ({"exit_code": 13, "terminal": failed("model-load")}, "model-load"),
        ({"exit_code": 1}, "train-step"),
        ({"exit_code": 3}, "train-step"),
    ],
)
def test_an_exception_of_the_authors_code_is_final_unless_on_error_is_asked_for(
    fields: dict[str, Any], category: str
) -> None:
    final = end(run(config={}), **fields, saved_step=5)
    assert (final.state, final.category) == (RunState.FAILED, category)
    record = run(config={"retry": {"on_error": True}})
    assert end(record, **fields, saved_step=5).delay_ms == 0
    assert end(record, **fields).delay_ms > 0
    last = end(record, **fields, before=[ended(1), ended(2)])
    assert last.state is RunState.FAILED


@pytest.mark.parametrize(
    "fields",
    [
        {
            "exit_code": None,
            "stop_reason": StopReason(cause="launch-failed", values={"detail": "no launcher"}),
        },
        {"exit_code": None, "stop_reason": StopReason(cause="trn-fault")},
    ],
)
def test_a_launch_that_failed_uses_up_no_attempt_but_there_is_an_end_to_them(fields: dict[str, Any]) -> None:
    ending = end(run(attempt=1, max_attempts=1), **fields)
    assert (ending.state, ending.is_interruption) == (RunState.PENDING, True)
    before = [ended(1, cause=failure("launch-failed")), ended(2, cause=failure("never-launched")), ended(3)]
    killed = end(run(attempt=4), exit_code=-9, before=before)
    assert "2 of 3 without a newer checkpoint" in say_cause(killed.cause)  # the third and this one
    many = run(attempt=100, num_interruptions=MAX_INTERRUPTIONS - 1)
    assert end(many, **fields).state is RunState.FAILED


def test_an_attempt_that_never_had_a_process_is_an_interruption() -> None:
    ending = decide(run(max_attempts=1), [], None, None, None, saved_step=0)
    assert (ending.state, ending.is_interruption) == (RunState.PENDING, True)


@pytest.mark.parametrize("cause", ["", "out-of-memory"])
def test_the_same_error_at_the_same_step_twice_in_a_row_ends_the_run(cause: str) -> None:
    record = run(attempt=2, max_attempts=9, config={"retry": {"on_error": True}})
    boom = failed("train-step", cause=cause)
    first = end(record, exit_code=14, terminal=boom, saved_step=5)
    assert first.state is RunState.PENDING
    before = ended(1, 5, first.cause, category=first.category, step=7)
    again = end(record, exit_code=14, terminal=boom, before=[before], saved_step=6)
    assert again.state is RunState.FAILED
    assert "the same error at step 7 twice in a row" in say_cause(again.cause)
    elsewhere = end(record, exit_code=14, terminal=failed("train-step", step=8, cause=cause), before=[before])
    assert elsewhere.state is RunState.PENDING
    otherwise = end(record, exit_code=14, terminal=failed("train-step", "bang", cause=cause), before=[before])
    assert otherwise.state is RunState.PENDING


def test_a_kill_or_a_broken_connection_at_the_same_step_is_no_error_of_the_job() -> None:
    for fields in (
        {"exit_code": -9},
        {"exit_code": 14, "terminal": failed("train-step", cause="connection")},
    ):
        first = end(run(max_attempts=9), **fields)
        before = ended(1, 0, first.cause, category=first.category, step=7)
        assert end(run(attempt=2, max_attempts=9), **fields, before=[before]).state is RunState.PENDING


@pytest.mark.parametrize(
    ("worker_exit", "stop_reason"),
    [
        (
            WorkerExit(exit_code=-9),
            StopReason(cause="heartbeat-timeout", values={"silent_s": 61, "limit_s": 60.0}),
        ),
        (WorkerExit(exit_code=-9, is_out_of_memory=True), None),
        (WorkerExit(is_reboot=True), None),
        (WorkerExit(exit_code=-signal.SIGSEGV), None),
        (WorkerExit(exit_code=-9), StopReason(cause="time-limit")),
    ],
)
def test_the_decision_is_the_same_after_a_restart_that_forgot_why_we_stopped_it(
    worker_exit: WorkerExit, stop_reason: StopReason | None
) -> None:
    record = run()
    fields = close_fields(record, worker_exit, stop_reason)
    cause = fields.pop("cause")
    named = {"cause": cause.id, "fault": cause.fault, "values": dict(cause.values)}
    ours = Terminal(event="failed", **fields, **named, closed_by="daemon", step=7)
    before = decide(record, [], worker_exit, ours, stop_reason, saved_step=5)
    after = decide(record, [], worker_exit, ours, None, saved_step=5)
    assert after == before


def test_a_worker_that_said_why_is_believed_though_it_crashed_on_its_way_out() -> None:
    ending = end(exit_code=-signal.SIGSEGV, terminal=failed("input", "no such file"))
    assert (ending.state, ending.category) == (RunState.FAILED, "input")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"exit_code": -signal.SIGSEGV}, "crashed with SIGSEGV at step 7: invalid memory access"),
        (
            {"exit_code": -signal.SIGKILL, "is_out_of_memory": True},
            "out of memory at step 7: the system killed the process",
        ),
        ({"exit_code": -signal.SIGUSR1}, "killed by SIGUSR1 at step 7"),
        ({"exit_code": -200}, "killed by signal 200"),
        ({"exit_code": 1}, "exit code 1 (bug); see the log for a traceback"),
        ({"exit_code": 0}, "exit code 0 (completed)"),
        ({"exit_code": 42}, "exit code 42; the job's code ended the process"),
        (
            {"exit_code": 1, "detail": "its folder is gone"},
            "process exited without a terminal event at step 7: its folder is gone",
        ),
        ({"exit_code": int(ExitCode.INPUT)}, "invalid input: exit code 11 (input)"),
        ({"exit_code": None}, "process exited; exit status unknown at step 7"),
        ({"exit_code": None, "is_reboot": True}, "the machine restarted"),
        (
            {"exit_code": 14, "terminal": failed("train-step", "Errno 104", cause="connection")},
            "connection lost at step 7: Errno 104",
        ),
    ],
)
def test_causes_are_in_words(fields: dict[str, Any], words: str) -> None:
    assert words in say_what(end(**fields).cause)


@pytest.mark.parametrize(
    "values", [{"signal": 3}, {"names": 5, "delay_s": "x"}, {"step": [], "text": {}}, {"limit_s": True}]
)
@pytest.mark.parametrize("closed_by", ["", "daemon"])
def test_values_that_a_worker_made_up_break_nothing(values: dict[str, Any], closed_by: str) -> None:
    forged = Terminal(
        event="failed", category="train-step", cause="killed", values=values, closed_by=closed_by
    )
    assert say_cause(end(exit_code=-9, terminal=forged).cause)


def test_the_backoff_doubles_up_to_five_minutes_and_is_each_runs_own() -> None:
    waits = [backoff_s(run(), number) for number in range(1, 40)]
    for number, wait_s in enumerate(waits[:5]):
        assert 0.9 * 10 * 2**number <= wait_s <= 1.1 * 10 * 2**number
    assert max(waits) == MAX_BACKOFF_S == 300
    assert backoff_s(run(), 1) == waits[0]
    assert len({backoff_s(run(digest=f"sha256:{number}"), 1) for number in range(20)}) == 20
    assert backoff_s(run(config={"retry": {"backoff_s": 0}}), 5) == 0
    waits = [interruption_backoff_s(run(num_interruptions=number)) for number in (0, 1, 2, 50)]
    assert waits == [0, 1, 2, 60]


def server(**fields: Any) -> RunRecord:
    return run(kind="server", **fields)


def test_a_server_that_answered_is_started_again_at_once_whatever_ended_it_and_for_ever() -> None:
    before = [ended(number, number, launched_ms=0, ended_ms=100_000) for number in range(1, 50)]
    for how in ({"exit_code": -signal.SIGKILL}, {"terminal": failed("train-step"), "exit_code": 1}):
        ending = end(server(attempt=50), before=before, saved_step=50, **how)
        assert (ending.state, ending.delay_ms) == (RunState.PENDING, 0)
        assert say_cause(ending.cause).endswith("retrying at once (attempt 51)")


def test_a_server_that_never_answered_is_given_up_after_its_attempts_and_not_for_its_own_error() -> None:
    refused = end(server(), exit_code=1, terminal=failed("model-load"))
    assert refused.state is RunState.FAILED
    second = end(server(attempt=2), exit_code=-signal.SIGKILL, before=[ended(1)])
    assert second.state is RunState.PENDING
    third = end(server(attempt=3), exit_code=-signal.SIGKILL, before=[ended(1), ended(2)])
    assert third.state is RunState.FAILED
    assert "3 attempts that did not become ready" in say_cause(third.cause)


def test_a_server_that_falls_again_and_again_soon_after_its_start_waits_before_the_next() -> None:
    delays = []
    for number in range(1, 12):
        before = [ended(each, each, launched_ms=0, ended_ms=3000) for each in range(1, number)]
        delays.append(end(server(attempt=number), exit_code=1, before=before, saved_step=number).delay_ms)
    assert delays == [0, 0, 0, 1000, 2000, 4000, 8000, 16_000, 32_000, 60_000, 60_000]
    long_lived = [*before, ended(11, 11, launched_ms=0, ended_ms=60_000)]
    assert end(server(attempt=12), exit_code=1, before=long_lived, saved_step=12).delay_ms == 0
    again = end(server(attempt=11), exit_code=1, before=before, saved_step=11, lived_ms=3_600_000)
    assert again.delay_ms == 0, "it has just answered for an hour"


def test_a_prediction_that_wrote_more_than_before_has_used_up_nothing() -> None:
    prediction = run(kind="prediction", attempt=2)
    assert end(prediction, exit_code=-signal.SIGKILL, before=[ended(1, 64)], saved_step=128).delay_ms == 0
    stalled = end(prediction, exit_code=-signal.SIGKILL, before=[ended(1, 64)], saved_step=64)
    assert stalled.delay_ms > 0
    assert "1 of 3 that wrote nothing" in say_cause(stalled.cause)
