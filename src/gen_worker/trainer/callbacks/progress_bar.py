"""A progress bar in notebooks and terminals, occasional lines in pipes. It costs the loop nothing."""

import contextlib
import contextvars
import html
import importlib
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any, TextIO

from gen_worker.trainer.attempt.state import MetricsRecord
from gen_worker.trainer.callbacks.base import Callback, RunHandle

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger("gen_worker.progress")

PIPE_REFRESH_S = 5.0
RATE_OVER_S = 30.0
END_WAIT_S = 2.0  # for a terminal that takes no more output


class _View:
    """Shows the state of a run. Used by one thread, from `start` to `stop`."""

    def start(self) -> None: ...
    def show(self, step: int, end_step: int | None, facts: list[str]) -> None: ...
    def stop(self) -> None: ...


class ProgressBar(Callback):
    """Shows step, epoch, loss, throughput, time left and the newest validation, in the main process.

    A background thread reads the run's state: every `refresh_s` in notebooks and terminals. In a pipe or a file it
    writes a line every 5 s if something changed. The first and the last state are always shown.
    """

    _only_watches = True

    def __init__(self, refresh_s: float = 0.25, stream: TextIO | None = None) -> None:
        """`stream` defaults to stderr."""
        self.refresh_s = refresh_s
        self._stream = stream
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._note = ""

    def on_train_begin(self, run: RunHandle) -> None:
        if not run.is_main:
            return
        view, refresh_s = _choose_view(self._stream, self.refresh_s)
        if view is None:
            return
        self._ended = threading.Event()
        self._note = ""
        # In the caller's context: a notebook finds the cell of the bar there.
        self._thread = threading.Thread(
            target=contextvars.copy_context().run,
            args=(self._draw_forever, run, view, refresh_s, self._ended),
            name="progress",
            daemon=True,
        )
        self._thread.start()

    def on_validation_begin(self, run: RunHandle) -> None:  # noqa: ARG002
        self._note = "validating"

    def on_validation_end(self, run: RunHandle, record: MetricsRecord) -> None:  # noqa: ARG002
        self._note = ""

    def on_train_end(self, run: RunHandle) -> None:
        self._end("done" if run.state.stop_reason is None else f"stopped: {run.state.stop_reason}")

    def on_exception(self, run: RunHandle, error: BaseException) -> None:  # noqa: ARG002
        self._end(f"ended with {type(error).__name__}")

    def _end(self, note: str) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._note = note
            self._ended.set()
            thread.join(END_WAIT_S)

    def _draw_forever(self, run: RunHandle, view: _View, refresh_s: float, ended: threading.Event) -> None:
        facts = _Facts(run)
        try:
            view.start()
            try:
                is_last = False
                while True:
                    view.show(run.state.step, run.end_step, facts.read(self._note))
                    if is_last:
                        return
                    is_last = ended.wait(refresh_s)
            finally:
                view.stop()
        except (OSError, ValueError):
            logger.debug("the stream of the progress bar is closed", exc_info=True)


class _Facts:
    """The state of a run in words. Measures throughput between readings."""

    def __init__(self, run: RunHandle, clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._clock = clock
        self._readings: deque[tuple[float, int, int | None]] = deque()

    def read(self, note: str = "") -> list[str]:
        run, state = self._run, self._run.state
        now_s, step, samples = self._clock(), state.step, state.samples_seen
        readings = self._readings
        if readings and step < readings[-1][1]:
            readings.clear()  # rolled back
        readings.append((now_s, step, samples))
        while len(readings) > 2 and readings[0][0] < now_s - RATE_OVER_S:
            readings.popleft()
        first_s, first_step, first_samples = readings[0]
        passed_s = now_s - first_s
        steps_per_s = (step - first_step) / passed_s if passed_s > 0 else 0.0
        facts = [f"epoch {state.epoch}"]
        metrics = state.metrics.copy()  # the loop may add one meanwhile
        loss = metrics.get("train/loss")
        if loss is not None:
            facts.append(f"loss {loss:.4g}")
        if steps_per_s > 0:
            if samples is not None and first_samples is not None:
                facts.append(f"{(samples - first_samples) / passed_s:,.4g} samples/s")
            else:
                facts.append(f"{steps_per_s:,.4g} steps/s")
            if run.end_step is not None and step < run.end_step:
                facts.append(f"{_duration((run.end_step - step) / steps_per_s)} left")
        held_out = [(name, value) for name, value in metrics.items() if name.startswith("val/")]
        if held_out:
            name, value = next((item for item in held_out if item[0] == "val/loss"), held_out[0])
            facts.append(f"{name} {value:.4g}")
        if note:
            facts.append(note)
        return facts


class _LineView(_View):
    """For pipes and files: whole lines, without repeats."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown = ""

    def show(self, step: int, end_step: int | None, facts: list[str]) -> None:
        share = f"/{end_step} ({step / max(end_step, 1):.0%})" if end_step is not None else ""
        key = f"{step} {facts[-1]}"
        if key != self._shown:
            self._shown = key
            self._stream.write(f"step {step}{share}  {'  '.join(facts)}\n")
            self._stream.flush()


class _BarView(_View):
    """For terminals. Drawn by our thread; rich starts none of its own.

    Other output to the same terminal is printed above the bar: rich redirects `sys.stdout` and `sys.stderr`, and we
    redirect log handlers that hold the terminal.
    """

    def __init__(self, console: "Console") -> None:
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        facts = Column(no_wrap=True, overflow="ellipsis")
        self._progress = Progress(
            TextColumn("step {task.fields[place]}", markup=False, table_column=Column(no_wrap=True)),
            BarColumn(),
            TextColumn("{task.fields[facts]}", markup=False, table_column=facts),
            console=console,
            auto_refresh=False,
            redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),  # a pipe keeps its output
            redirect_stderr=console.file is sys.stderr,
        )
        self._stream: IO[str] = console.file
        self._handlers: list[logging.StreamHandler[Any]] = []
        self._task = self._progress.add_task("", total=None, visible=False, place="", facts="")

    def start(self) -> None:
        is_stderr = self._stream is sys.stderr
        self._progress.start()
        if is_stderr:
            for handler in (*logging.root.handlers, *logging.getLogger("gen_worker").handlers):
                if isinstance(handler, logging.StreamHandler) and handler.stream is self._stream:
                    handler.setStream(sys.stderr)  # by now rich's
                    self._handlers.append(handler)

    def show(self, step: int, end_step: int | None, facts: list[str]) -> None:
        place = f"{step}" if end_step is None else f"{step}/{end_step}"
        self._progress.update(
            self._task,
            completed=step,
            total=end_step,
            visible=True,
            place=place,
            facts="  ".join(facts),
            refresh=True,
        )

    def stop(self) -> None:
        for handler in self._handlers:
            handler.setStream(self._stream)
        with contextlib.suppress(OSError, ValueError):
            self._progress.stop()


class _NotebookView(_View):
    """For IPython kernels: one output of the cell, updated in place, as HTML and as text."""

    def __init__(self) -> None:
        self._display: Any = importlib.import_module("IPython.display").display
        self._handle: Any = None
        self._shown = ""

    def show(self, step: int, end_step: int | None, facts: list[str]) -> None:
        text = f"step {step}{'' if end_step is None else f'/{end_step}'}  {'  '.join(facts)}"
        if text == self._shown:
            return
        self._shown = text
        share = "" if end_step is None else f' value="{step}" max="{max(end_step, 1)}"'
        bar = f'<progress style="width: 20em"{share}></progress> {html.escape(text)}'
        bundle = {"text/html": f"<div>{bar}</div>", "text/plain": text}
        if self._handle is None:
            self._handle = self._display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


def _is_in_kernel() -> bool:
    """Never imports IPython: in a kernel it is loaded."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


def _choose_view(stream: TextIO | None, refresh_s: float) -> tuple[_View | None, float]:
    if stream is None and _is_in_kernel():
        return _NotebookView(), refresh_s
    stream = stream or sys.stderr
    if stream is None:  # a process may have no stderr
        return None, refresh_s
    if stream.isatty():
        from rich.console import Console

        console = Console(file=stream)
        if console.is_terminal and not console.is_dumb_terminal:
            return _BarView(console), refresh_s
    return _LineView(stream), PIPE_REFRESH_S


def _duration(seconds: float) -> str:
    minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest_s:02}" if hours else f"{minutes}:{rest_s:02}"
