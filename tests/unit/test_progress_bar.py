"""Claims about the progress bar: what a terminal and a pipe are left with, and that the loop pays nothing."""

import io
import logging
import os
import pty
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest
from hand_built_run import HandBuiltRun

from gen_worker.errors import TrainingCanceled
from gen_worker.trainer.callbacks import progress_bar
from gen_worker.trainer.callbacks.callback_list import CallbackList
from gen_worker.trainer.callbacks.progress_bar import ProgressBar

SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"
DEADLINE_S = 60.0


class Terminal:
    """A real terminal: what is written to `stream` is read, as a person would see it, by a thread."""

    def __init__(self) -> None:
        self._main, side = pty.openpty()
        self.stream: TextIO = os.fdopen(side, "w", encoding="utf-8")
        self._seen = ""
        self._grown = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while True:
            try:
                piece = os.read(self._main, 65536)
            except OSError:  # the other side is closed
                return
            with self._grown:
                self._seen += piece.decode("utf-8", "replace")
                self._grown.notify_all()

    def wait_for(self, text: str) -> None:
        with self._grown:
            assert self._grown.wait_for(lambda: text in self._seen, DEADLINE_S), self._seen[-500:]

    def close(self) -> str:
        """All that was written to it."""
        if not self.stream.closed:
            self.stream.close()
        self._thread.join(DEADLINE_S)
        os.close(self._main)
        return self._seen


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "160")
    made = Terminal()
    yield made
    if not made.stream.closed:
        made.close()


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@pytest.mark.parametrize("error", [None, TrainingCanceled("asked to stop")])
def test_a_terminal_is_left_with_its_cursor_and_a_whole_last_line(
    terminal: Terminal, error: Exception | None
) -> None:
    bar = ProgressBar(refresh_s=0.01, stream=terminal.stream)
    run = HandBuiltRun([bar], end_step=40, samples_per_step=8).begin()
    terminal.wait_for("step 0/40")
    run.handle.ctx.progress.step = 20
    run.emit({"train/loss": 0.125})
    terminal.wait_for("step 20/40")
    terminal.wait_for("loss 0.125")
    terminal.wait_for("samples/s")
    terminal.wait_for(" left")
    run.validate({"val/loss": 0.5}, during=lambda: terminal.wait_for("validating"))
    terminal.wait_for("val/loss 0.5")
    run.handle.ctx.progress.step = 39
    run.end(error)
    seen = terminal.close()
    assert seen.count(HIDE_CURSOR) == seen.count(SHOW_CURSOR) == 1
    assert seen.rfind(SHOW_CURSOR) > seen.rfind("step 39/40")
    last = plain(seen).rstrip("\r\n").rpartition("\r")[2]
    assert last.startswith("step 39/40")
    assert ("done" if error is None else "ended with TrainingCanceled") in last
    assert plain(seen).endswith("\r\n")


def test_a_run_whose_end_is_not_known_has_a_bar_without_an_end(terminal: Terminal) -> None:
    bar = ProgressBar(refresh_s=0.01, stream=terminal.stream)
    run = HandBuiltRun([bar]).begin()
    terminal.wait_for("step 0 ")
    run.handle.ctx.progress.step = 7
    terminal.wait_for("step 7 ")
    terminal.wait_for("steps/s")
    run.end()
    seen = plain(terminal.close())
    assert "done" in seen
    assert " left" not in seen


def test_what_others_write_to_the_terminal_goes_above_the_bar(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    handler = logging.StreamHandler(terminal.stream)
    logger = logging.getLogger("gen_worker")
    logger.addHandler(handler)
    try:
        run = HandBuiltRun([ProgressBar(refresh_s=0.01)], end_step=4).begin()
        terminal.wait_for("step 0/4")
        logger.warning("a line of the log")
        print("a line of the author's", file=sys.stderr)
        run.end()
        assert handler.stream is terminal.stream
        assert sys.stderr is terminal.stream
    finally:
        logger.removeHandler(handler)
    lines = plain(terminal.close()).replace("\r\n", "\n").replace("\r", "\n").splitlines()
    assert "a line of the log" in lines
    assert "a line of the author's" in lines
    assert lines[-1].startswith("step 0/4")


def test_standard_output_stays_its_own_where_it_is_no_terminal(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    run = HandBuiltRun([ProgressBar(refresh_s=0.01)]).begin()
    terminal.wait_for("step 0")
    print('{"event": "job_completed"}')
    assert sys.stdout.getvalue() == '{"event": "job_completed"}\n'
    run.end()


def test_a_pipe_gets_whole_lines_the_first_and_the_last_at_least(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("w") as stream:
        run = HandBuiltRun([ProgressBar(stream=stream)], end_step=200, samples_per_step=2)
        run.begin()
        for _ in range(150):
            run.end_batch()
        run.emit({"train/loss": 1.5})
        run.state.stop_reason = "the loss is flat"
        run.end()
    first, *_, last = path.read_text().splitlines()
    assert re.match(r"step \d+/200 \(\d+%\)  epoch 0", first)
    assert last.startswith("step 150/200 (75%)  epoch 0  loss 1.5")
    assert last.endswith("stopped: the loss is flat")
    assert "\x1b" not in path.read_text()


def test_a_pipe_gets_no_line_that_says_nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_bar, "PIPE_REFRESH_S", 0.001)
    stream = io.StringIO()
    run = HandBuiltRun([ProgressBar(stream=stream)]).begin()
    looks = 0
    enough = threading.Event()
    read = run.state._rows_at

    def counted(step: int) -> int | None:
        nonlocal looks
        looks += 1
        if looks == 20:
            enough.set()
        return read(step)

    run.state._rows_at = counted
    assert enough.wait(DEADLINE_S)
    run.end()
    assert [line.split("  ")[0] for line in stream.getvalue().splitlines()] == ["step 0", "step 0"]
    assert stream.getvalue().endswith("done\n")


def test_a_stream_that_is_closed_meanwhile_harms_nobody(tmp_path: Path) -> None:
    stream = (tmp_path / "log").open("w")
    run = HandBuiltRun([ProgressBar(stream=stream)]).begin()
    stream.close()
    run.end_batch()
    run.end()


def test_only_the_main_process_shows_it_and_no_batch_pays_for_it() -> None:
    stream = io.StringIO()
    bar = ProgressBar(stream=stream)
    assert not CallbackList([bar]).has_batch_hooks
    run = HandBuiltRun([bar], rank=1, world_size=2).begin()
    run.end()
    assert stream.getvalue() == ""


def test_the_speed_is_that_of_the_last_while_and_starts_anew_after_a_rollback() -> None:
    now_s = 0.0
    run = HandBuiltRun([], end_step=1000, samples_per_step=10)
    facts = progress_bar._Facts(run.handle, clock=lambda: now_s)
    assert facts.read() == ["epoch 0"]
    now_s, run.handle.ctx.progress.step = 10.0, 100
    assert facts.read() == ["epoch 0", "100 samples/s", "1:30 left"]
    for _ in range(40):  # ten times as slow
        now_s += 1.0
        run.handle.ctx.progress.step += 1
        found = facts.read()
    assert found == ["epoch 0", "10 samples/s", "14:20 left"]
    run.handle.ctx.progress.step = 50
    assert facts.read() == ["epoch 0"]
