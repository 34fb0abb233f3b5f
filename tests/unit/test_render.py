"""What a person sees of a run: how far it is, what happened, how it ended; and nothing that a worker could forge."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from rich.text import Text

from gen_worker.errors import mark_report
from trn.cli.verbs.logs import find_tail
from trn.client.screen.figures import show_duration, show_number, show_rate
from trn.client.screen.render import HELD_S, MAX_WAITING_LINES, Screen
from trn.client.screen.run_view import MAX_REASON_LINES, RunView, conclude
from trn.client.screen.worker_log import Line, WholeLines, WorkerLog
from trn.core.cause_words import say_cause
from trn.core.causes import failure
from trn.core.terminal_text import clean
from trn.proto.records import Run

BEGIN_MS = 1_000_000


@pytest.fixture(autouse=True)
def a_terminal_that_can_move_its_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the one is that the tests were started in."""
    monkeypatch.setenv("TERM", "xterm-256color")


def make_run(**fields: Any) -> Run:
    return Run(**{"run_id": "digits-1", "digest": "d", "state": "RUNNING", "reason": "", **fields})


def lines_of(*events: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(event).encode() + b"\n" for event in events)


def metric(step: int, at_s: float, **values: float | str) -> dict[str, Any]:
    named = {name.replace("_", "/", 1): value for name, value in values.items()}
    return {"event": "metrics", "step": step, "timestamp_ms": BEGIN_MS + int(at_s * 1000), "values": named}


def test_the_bar_says_how_far_how_fast_and_how_long() -> None:
    view = RunView(make_run(devices=("cuda:0", "cuda:1"), end_step=100))
    view.take_events(lines_of(metric(10, 0, train_loss=0.5)))
    view.take_events(lines_of(metric(20, 5, train_loss=0.25), {"event": "heartbeat", "step": 20, "epoch": 3}))
    assert view.facts() == ["20/100", "loss 0.25", "0:40 left", "epoch 4", "2 steps/s"]
    view.take_events(lines_of(metric(20, 5, throughput_samples_per_s=1234.5)))
    view.take_events(lines_of({"event": "checkpoint", "step": 15, "path": "p"}))
    assert view.facts()[-2:] == ["1,234 samples/s", "saved 15"]
    assert view.title().plain == "digits-1  running on cuda:0, cuda:1"


def test_a_run_that_waits_says_for_what() -> None:
    run = make_run(state="PENDING", reason="waits for cuda:0, which digits-0 holds")
    assert RunView(run).title().plain == "digits-1  pending  waits for cuda:0, which digits-0 holds"


def test_validation_results_and_new_attempts_are_lines() -> None:
    view = RunView(make_run())
    begun = {"event": "started", "attempt": 1, "max_steps": 9}
    assert view.take_events(lines_of(begun, metric(1, 0, train_loss=1.0))) == []
    validation = {
        "event": "validation",
        "step": 5,
        "rows": 1000,
        "values": {"val/loss": 0.31, "val/acc": "nan"},
    }
    told = view.take_events(lines_of(validation, {**begun, "attempt": 2}))
    assert [line.text.plain for line in told] == [
        "step 5  validation  val/loss 0.31  val/acc nan  (1,000 rows)",
        "attempt 2 begins",
    ]


def test_an_event_that_is_not_understood_is_passed_over() -> None:
    view = RunView(make_run())
    odd = lines_of({"event": "log", "step": {"x": 1}, "values": 3}, {"event": "new-kind", "step": 4})
    assert view.take_events(b"half a li\n" + odd) == []
    assert view.step == 4


def test_the_bar_never_is_wider_than_the_terminal() -> None:
    view = RunView(make_run(run_id="a-long-name-" * 12, end_step=1_000_000))
    view.take_events(lines_of(metric(10, 0, train_loss=0.5), metric(900, 9, train_loss=0.123456)))
    for width in (20, 40, 60, 80, 200):
        file = io.StringIO()
        console = Console(file=file, width=width, force_terminal=True, color_system=None)
        console.print(view.draw(width))
        shown = file.getvalue().rstrip("\n").split("\n")
        assert len(shown) == 2
        assert all(len(line) <= width for line in shown)


def test_text_of_a_worker_cannot_move_the_cursor() -> None:
    assert clean("\x1b[2J\x1b]0;title\x07red \x1b[31mtext\x1b[0m\x08\x00") == "red text"
    assert clean("10 %\r50 %\r100 %") == "100 %"
    assert clean("progress\r") == "progress"
    assert "\x1b" not in clean("\x1b")


def show(text: str) -> list[str]:
    return [line.text.plain for line in WorkerLog().take(text.encode() + b"\n")]


def test_log_lines_are_short_and_what_the_end_says_is_not_said_twice() -> None:
    assert show("2026-01-02 16:00:49,582 WARNING my.module: careful") == ["16:00:49 careful"]
    assert show("2026-01-02 16:00:49,582 INFO gen_worker.end: completed at step 5: x") == []
    assert show("2026-01-02 16:00:49,582 INFO gen_worker.news: line@5 answers at http://x") == []
    assert show("print of the author") == ["print of the author"]
    assert (
        show(mark_report("cancelled: cancelled by SIGTERM\nsaved at step 3: `trn resume r` continues")) == []
    )


def test_of_a_traceback_the_authors_frames_are_shown_and_its_error_once() -> None:
    log = """\
2026-01-02 16:00:49,582 ERROR gen_worker.runtime: the attempt failed
Traceback (most recent call last):
  File "/lib/site-packages/gen_worker/trainer/loop.py", line 216, in _advance
    result = train_step(prepare_batch(raw_batch, state, ctx), state, ctx)
             ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/code/mine.py", line 46, in train_step
    raise RuntimeError("no\\nway")
RuntimeError: no
way
saved at step 3: `trn resume r` goes on
gen_worker: train-step: RuntimeError: no
gen_worker: way (at /code/mine.py:46, in train_step)
gen_worker: saved at step 3: `trn resume r` goes on
print of the author"""
    assert show(log) == [
        "16:00:49 the attempt failed",
        "Traceback (most recent call last):",
        '  File "/code/mine.py", line 46, in train_step',
        '    raise RuntimeError("no\\nway")',
        "RuntimeError: no",
        "way",
        "saved at step 3: `trn resume r` goes on",
        "print of the author",
    ]


def test_log_bytes_become_whole_lines_whatever_their_pieces() -> None:
    text = "first\nsecond é\nlast".encode()
    for size in range(1, len(text)):
        lines = WholeLines()
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        told = [line for piece in pieces for line in lines.take(piece)]
        assert [*told, *lines.rest()] == ["first", "second é", "last"]
    late = WholeLines(is_begun_in_the_middle=True)
    assert late.take(b"rd of a line\nwhole\n") == ["whole"]


def test_a_thousand_events_a_second_are_drawn_a_few_times() -> None:
    now_s = [0.0]
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system=None)
    screen = Screen(RunView(make_run(end_step=1000)), console, clock=lambda: now_s[0])
    screen.start()
    num_drawn = 0
    for step in range(1000):
        before = len(file.getvalue())
        screen.add(screen.view.take_events(lines_of(metric(step, step / 1000, train_loss=1.0))))
        screen.redraw()
        num_drawn += len(file.getvalue()) > before
        now_s[0] += 0.001
    screen.pause()
    assert 1 <= num_drawn <= 10


def test_a_flood_of_lines_is_cut_and_counted_and_ends_with_the_newest() -> None:
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system=None)
    screen = Screen(RunView(make_run()), console)
    for number in range(MAX_WAITING_LINES + 100):
        screen.add(WorkerLog().take(f"line {number}\n".encode()))
    screen.view.take_run(make_run(state="COMPLETED", ended_ms=1))
    screen.finish(1.0)
    shown = file.getvalue().splitlines()
    assert shown[0] == "… 100 more lines: see trn logs and trn watch --json"
    assert shown[1] == "line 100"
    assert shown[-2] == f"line {MAX_WAITING_LINES + 99}"
    assert shown[-1].startswith("digits-1  completed")


def test_a_log_record_is_wrapped_between_words_and_a_print_is_not() -> None:
    file = io.StringIO()
    screen = Screen(RunView(make_run()), Console(file=file, width=40, force_terminal=True, color_system=None))
    record = (
        "2026-01-02 16:00:49,582 WARNING gen_worker.events: learning_rat was given, but nothing read it; did"
    )
    printed = "words of the author " * 4
    screen.add(WorkerLog().take(f"{record} you mean learning_rate?\n{printed}\n\n".encode()))
    screen.add([Line(text=Text("attempt 1 ended: killed by SIGKILL at step 5500"), is_event=True)])
    screen.view.take_run(make_run(state="COMPLETED", ended_ms=1))
    screen.finish(1.0)
    assert [line.rstrip() for line in file.getvalue().splitlines()[:7]] == [
        "attempt 1 ended: killed by SIGKILL at",
        "step 5500",
        "16:00:49 learning_rat was given, but",
        "         nothing read it; did you mean",
        "         learning_rate?",
        printed.rstrip(),
        "",
    ]


def test_the_end_says_what_to_do_next() -> None:
    view = RunView(
        make_run(state="FAILED", reason="the step failed\nat line 3", step=7, end_step=10, ended_ms=1)
    )
    view.take_events(lines_of({"event": "checkpoint", "step": 6, "path": "p"}))
    assert conclude(view, 75).plain.splitlines() == [
        "digits-1  failed at step 7 of 10, after 1:15",
        "  the step failed",
        "  at line 3",
        "  trn logs digits-1",
        "  trn resume digits-1    continues from step 6",
    ]
    view.take_run(msgspec.structs.replace(view.run, state="COMPLETED"))
    assert "\n" not in conclude(view, 75).plain


def test_the_end_of_a_run_shows_the_first_lines_of_a_long_error() -> None:
    run = make_run(state="FAILED", reason="\n".join(f"fault {number}" for number in range(1000)), ended_ms=1)
    lines = conclude(RunView(run), 75).plain.splitlines()
    assert lines[1:-1] == [*(f"  fault {number}" for number in range(MAX_REASON_LINES)), "  …"]


def test_the_end_of_a_run_that_was_stopped_early_shows_why() -> None:
    run = make_run(state="COMPLETED", step=7, end_step=9, ended_ms=1, stop_reason="val/loss did not fall")
    assert conclude(RunView(run), 75).plain.splitlines() == [
        "digits-1  completed at step 7 of 9, after 1:15",
        "  stopped early: val/loss did not fall",
    ]


def test_the_end_of_a_completed_run_shows_its_test_results() -> None:
    metrics = {"train/loss": 0.5, "test/loss": 0.25, "test/accuracy": 0.75}
    view = RunView(make_run(state="COMPLETED", step=7, end_step=7, ended_ms=1, metrics=metrics))
    assert conclude(view, 75).plain.splitlines() == [
        "digits-1  completed at step 7 of 7, after 1:15, loss 0.5",
        "  test  test/accuracy 0.75  test/loss 0.25",
    ]


def test_numbers_and_durations_are_short() -> None:
    assert [show_number(value) for value in (0.123456, 15.0, 12345.6, 1e-7, 3e12, None, 0)] == [
        "0.1235",
        "15",
        "12,346",
        "1.000e-07",
        "3.000e+12",
        "nan",
        "0",
    ]
    assert [show_rate(per_s) for per_s in (9.954, 0.0521, 129_834.2)] == ["9.95", "0.0521", "129,834"]
    assert [show_duration(seconds) for seconds in (0, 7.9, 75, 3605, 180_000)] == [
        "0:00",
        "0:07",
        "1:15",
        "1:00:05",
        "2 d 2 h",
    ]


def begins(step: int, **fields: Any) -> dict[str, Any]:
    return {"event": "log", "message": "training from …", "step": step, **fields}


def test_the_epoch_is_that_of_the_newest_step_and_not_of_the_last_heartbeat() -> None:
    view = RunView(make_run(end_step=630))
    place = {"epoch": 0, "batch": 0, "epochs": 10, "steps_per_epoch": 63, "rows_per_step": 32}
    view.take_events(lines_of(begins(0, **place), {"event": "heartbeat", "step": 300, "epoch": 4}))
    shown = []
    for step in (0, 1, 63, 64, 600, 630):
        view.take_events(lines_of(metric(step, 0)))
        shown.append(view.facts()[1])
    assert shown == [f"epoch {epoch}/10" for epoch in (1, 1, 1, 2, 10, 10)]
    view.take_events(lines_of(begins(500, epoch=9, batch=32)))  # rolled back; the data went on
    assert "epoch 10/10" in view.facts()
    view.take_events(lines_of({"event": "started", "attempt": 2}, begins(63, **{**place, "epoch": 1})))
    view.take_events(lines_of(metric(100, 0)))
    assert "epoch 2/10" in view.facts()


def test_one_pass_has_no_epochs_to_tell_apart() -> None:
    view = RunView(make_run(end_step=10))
    view.take_events(lines_of(begins(0, epoch=0, batch=0, epochs=1, steps_per_epoch=10), metric(5, 0)))
    assert view.facts() == ["5/10"]


def test_samples_are_counted_where_a_steps_rows_are_known() -> None:
    view = RunView(make_run(end_step=100))
    at_ms = {"timestamp_ms": BEGIN_MS}
    view.take_events(lines_of(begins(0, epoch=0, batch=0, rows_per_step=32, **at_ms)))
    view.take_events(lines_of(metric(20, 4)))
    assert view.facts() == ["20/100", "0:16 left", "160 samples/s"]


def test_an_attempt_that_ended_is_told_with_its_cause_and_what_follows() -> None:
    view = RunView(make_run(end_step=100, attempt=1), clock_ms=lambda: BEGIN_MS)
    begun = {"event": "started", "attempt": 1, "max_steps": 100}
    view.take_events(lines_of(begun, metric(10, 0, train_loss=0.5), metric(20, 5, train_loss=0.5)))
    assert "2 steps/s" in view.facts()
    error = "killed by SIGKILL at step 120"
    assert view.take_events(lines_of({"event": "failed", "attempt": 1, "step": 20, "error": error})) == []
    outlook = {"outlook": "backoff", "delay_s": 10.0, "next_attempt": 2, "from_step": 100}
    stalled = {"num_stalled": 1, "max_attempts": 3}
    killed = replace(
        failure("killed", signal="SIGKILL", step=120, **outlook, **stalled), next_attempt_ms=BEGIN_MS + 8000
    )
    waits = make_run(
        state="PENDING",
        attempt=1,
        end_step=100,
        reason=say_cause(killed),
        cause=killed,
    )
    told = [*view.take_run(waits), *view.take_run(waits)]
    assert [line.text.plain for line in told] == [
        "attempt 1 ended: killed by SIGKILL at step 120; retrying in 10 s from step 100"
        " (attempt 2; 1 of 3 without a newer checkpoint)"
    ]
    assert view.title().plain == "digits-1  pending  attempt 2 in 0:08"
    assert view.facts() == ["20/100", "loss 0.5"], "no speed of a run that waits"
    told = view.take_events(lines_of({**begun, "attempt": 2}))
    assert [line.text.plain for line in told] == ["attempt 2 begins"]


def test_an_attempt_whose_wait_nobody_saw_is_told_from_its_events() -> None:
    view = RunView(make_run())
    ended = {"event": "failed", "attempt": 1, "error": "killed by SIGKILL at step 9"}
    told = view.take_events(lines_of({"event": "started", "attempt": 1}, ended))
    told += view.take_events(lines_of({"event": "started", "attempt": 2}))
    late = make_run(state="PENDING", attempt=1, cause=replace(failure("killed"), next_attempt_ms=1))
    told += view.take_run(late)
    assert [line.text.plain for line in told] == [
        "attempt 1 ended: killed by SIGKILL at step 9",
        "attempt 2 begins",
    ]


def test_an_absent_daemon_is_said_below_the_bar_and_nothing_old_is_shown_as_new() -> None:
    view = RunView(make_run(end_step=100))
    view.take_events(lines_of(metric(10, 0), metric(20, 5)))
    view.absence = "the daemon was stopped; the run continues meanwhile"
    file = io.StringIO()
    Console(file=file, width=80).print(view.draw(80))
    assert file.getvalue().splitlines()[-1].strip() == view.absence
    assert view.facts() == ["20/100"]


def test_lines_of_the_log_and_of_events_stand_in_the_order_of_their_time() -> None:
    now_s = [0.0]
    file = io.StringIO()
    console = Console(file=file, width=80, color_system=None)
    screen = Screen(RunView(make_run()), console, clock=lambda: now_s[0])

    def log(at_ms: int, text: str) -> Line:
        return Line(text=Text(text), at_ms=at_ms)

    def event(at_ms: int, text: str) -> Line:
        return Line(text=Text(text), at_ms=at_ms, is_event=True)

    def shown() -> list[str]:
        screen._flush()
        return file.getvalue().splitlines()

    screen.hold(1.0)
    screen.add([event(3000, "three"), event(6000, "six")])
    screen.add([log(1000, "one"), log(1000, "two"), log(4000, "four")])
    assert shown() == []
    now_s[0] = 1.0
    assert shown() == ["one", "two", "three", "four", "six"]
    screen.add([event(8000, "eight")])
    assert shown()[5:] == []  # the log comes by a slower way
    screen.add([log(7000, "seven")])
    assert shown()[5:] == ["seven"]
    now_s[0] += HELD_S
    assert shown()[6:] == ["eight"]


def test_the_last_lines_of_a_log_are_found_whatever_its_size(tmp_path: Path) -> None:
    path = tmp_path / "worker.log"
    assert find_tail(path, 3) == 0
    for text in (
        b"",
        b"one",
        b"one\n",
        b"one\ntwo",
        b"\n\n\n",
        b"a\n" * 100_000 + b"end",
        b"x" * 200_000 + b"\n",
    ):
        path.write_bytes(text)
        for num_lines in (0, 1, 2, 5):
            expected = text.splitlines(keepends=True)[-num_lines:] if num_lines else []
            assert text[find_tail(path, num_lines) :] == b"".join(expected)
