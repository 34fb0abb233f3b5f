"""What a person sees of a run: how far it is, what happened, how it ended; and nothing that a worker could forge."""

import io
import json
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from trn.client.cli.logs import find_tail
from trn.client.render import (
    MAX_WAITING_LINES,
    LogLines,
    RunView,
    Screen,
    clean,
    conclude,
    show_duration,
    show_log_line,
    show_number,
)
from trn.proto.records import Run

BEGIN_MS = 1_000_000


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
    assert view.facts() == ["20/100", "loss 0.25", "0:40 left", "epoch 3", "2 steps/s"]
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
    assert [line.plain for line in told] == [
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


def test_log_lines_are_short_and_what_the_end_says_is_not_said_twice() -> None:
    shown = show_log_line("2026-01-02 16:00:49,582 WARNING my.module: careful")
    assert shown is not None
    assert shown.plain == "16:00:49 careful"
    assert show_log_line("2026-01-02 16:00:49,582 INFO gen_worker.runtime: completed at step 5: x") is None
    plain = show_log_line("print of the author")
    assert plain is not None
    assert plain.plain == "print of the author"


def test_log_bytes_become_whole_lines_whatever_their_pieces() -> None:
    text = "first\nsecond é\nlast".encode()
    for size in range(1, len(text)):
        lines = LogLines()
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        told = [line for piece in pieces for line in lines.take(piece)]
        assert [*told, *lines.rest()] == ["first", "second é", "last"]
    late = LogLines(is_begun_in_the_middle=True)
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
        line = show_log_line(f"line {number}")
        assert line is not None
        screen.add([line])
    screen.view.take_run(make_run(state="COMPLETED", ended_ms=1))
    screen.finish(1.0)
    shown = file.getvalue().splitlines()
    assert shown[0] == "… 100 lines more, see trn logs"
    assert shown[1] == "line 100"
    assert shown[-2] == f"line {MAX_WAITING_LINES + 99}"
    assert shown[-1].startswith("digits-1  completed")


def test_the_end_says_what_to_do_next() -> None:
    view = RunView(
        make_run(state="FAILED", reason="the step failed\nat line 3", step=7, end_step=10, ended_ms=1)
    )
    view.take_events(lines_of({"event": "checkpoint", "step": 6, "path": "p"}))
    assert conclude(view, 75).plain.splitlines() == [
        "digits-1  failed at step 7 of 10, after 1:15",
        "  the step failed; at line 3",
        "  trn logs digits-1",
        "  trn resume digits-1    goes on from step 6",
    ]
    view.take_run(msgspec.structs.replace(view.run, state="COMPLETED"))
    assert "\n" not in conclude(view, 75).plain


def test_numbers_and_durations_are_short() -> None:
    assert [show_number(value) for value in (0.123456, 15.0, 12345.6, 1e-7, 3e12, "nan", 0)] == [
        "0.1235",
        "15",
        "12,346",
        "1.000e-07",
        "3.000e+12",
        "nan",
        "0",
    ]
    assert [show_duration(seconds) for seconds in (0, 7.4, 75, 3605, 180_000)] == [
        "0:00",
        "0:07",
        "1:15",
        "1:00:05",
        "2 d 2 h",
    ]


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
