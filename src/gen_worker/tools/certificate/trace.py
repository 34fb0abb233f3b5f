"""Callbacks of a certified run: one records every step, one stops the author's clock.

A worker reads `plan.json` in the run's folder and appends to `trace.jsonl`. A plan may end with SIGKILL. At the end it writes
`code.json`: what it trained.
"""

import contextlib
import datetime
import os
import signal
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from gen_worker.tools.certificate.digest import Leaf, describe_hidden, describe_tree, digest_batch
from gen_worker.trainer.author.code_identity import hash_author_files
from gen_worker.trainer.callbacks.base import Callback, RunHandle
from gen_worker.trainer.compute.repro import to_float_scalar
from gen_worker.trainer.contracts import StepResult
from gen_worker.trainer.model_runtime import capture_rng, restore_rng

if TYPE_CHECKING:
    from gen_worker.trainer.artifacts import SavedCheckpoint

PLAN_NAME, TRACE_NAME, CODE_NAME = "plan.json", "trace.jsonl", "code.json"
KillKind = Literal["none", "step", "checkpoint", "epoch-end", "mid-save"]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """An additional save, and a kill."""

    save_step: int = 0
    kill: KillKind = "none"  # mid-save is done by a failpoint
    kill_step: int = 0


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the trace: an attempt that begins at `step`, or a committed step."""

    kind: Literal["begin", "step"]
    step: int
    state: dict[str, Leaf]
    hidden: dict[str, Leaf]
    rng: dict[str, Leaf]
    steps_per_epoch: int | None = None
    batch: str = ""
    metrics: dict[str, str] = {}  # in hexadecimal: every bit
    rss_bytes: int = 0
    author_s: float = 0.0
    loop_s: float = 0.0


class StepTrace(Callback):
    """Writes a line for each step. Leaves the random streams unchanged."""

    _path: Path
    _plan: Plan
    _batch: str = ""
    _began_s: float = 0.0
    _left_s: float = 0.0  # when the last hook here returned
    _loop_s: float = 0.0

    def on_train_begin(self, run: RunHandle) -> None:
        self._path = run.folder / TRACE_NAME
        self._plan = msgspec.json.decode((run.folder / PLAN_NAME).read_bytes(), type=Plan)
        self._write(self._moment("begin", run))
        self._left_s = time.perf_counter()

    def on_batch_begin(self, run: RunHandle, batch: Any) -> None:  # noqa: ARG002
        self._loop_s = time.perf_counter() - self._left_s
        self._batch = digest_batch(batch)
        self._began_s = time.perf_counter()

    def on_batch_end(self, run: RunHandle, batch: Any, result: StepResult) -> None:  # noqa: ARG002
        author_s = time.perf_counter() - self._began_s
        moment = msgspec.structs.replace(
            self._moment("step", run),
            batch=self._batch,
            metrics=_metrics(result),
            rss_bytes=_rss_bytes(),
            author_s=author_s,
            loop_s=self._loop_s,
        )
        self._write(moment)
        plan, step = self._plan, run.ctx.step
        if step == plan.save_step:
            run.save_checkpoint()
        if plan.kill == "step" and step >= plan.kill_step:
            _die()
        self._left_s = time.perf_counter()

    def on_epoch_end(self, run: RunHandle) -> None:
        if self._plan.kill == "epoch-end" and run.ctx.step >= self._plan.kill_step:
            _die()

    def on_checkpoint(self, run: RunHandle, checkpoint: "SavedCheckpoint") -> None:  # noqa: ARG002
        if self._plan.kill == "checkpoint" and checkpoint.step >= self._plan.kill_step:
            _die()

    def on_train_end(self, run: RunHandle) -> None:
        (run.folder / CODE_NAME).write_bytes(msgspec.json.encode(hash_author_files()))

    def _moment(self, kind: Literal["begin", "step"], run: RunHandle) -> Moment:
        rng = capture_rng()
        state = describe_tree(run.trainer.state_dict(run.model_state), "state_dict")
        hidden = describe_hidden(run.trainer, run.model_state)
        restore_rng(rng)
        return Moment(
            kind=kind,
            step=run.ctx.step,
            state=state,
            hidden=hidden,
            rng=describe_tree(rng, "rng"),
            steps_per_epoch=run.steps_per_epoch,
        )

    def _write(self, moment: Moment) -> None:
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(moment) + b"\n")


def read_trace(folder: Path) -> list[Moment]:
    """The lines in order. All are whole: a kill comes after a write."""
    try:
        lines = (folder / TRACE_NAME).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    decoder = msgspec.json.Decoder(Moment)
    return [decoder.decode(line) for line in lines]


def _metrics(result: StepResult) -> dict[str, str]:
    """Those that are numbers; the loop reports the others."""
    values: dict[str, str] = {}
    for name, value in result.metrics.items():
        with contextlib.suppress(TypeError, ValueError):
            values[name] = to_float_scalar(value).hex()
    return values


def _rss_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class StoppedClock(Callback):
    """Gives the author's modules a clock that advances by one second per call."""

    def __init__(self) -> None:
        clock = _Clock()
        for module in _author_modules():
            for name, value in list(vars(module).items()):
                if (stand_in := clock.stand_in(value)) is not None:
                    setattr(module, name, stand_in)


class _Clock:
    def __init__(self) -> None:
        self._now_s = 1_700_000_000
        names = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
        self._functions: dict[Any, Any] = {getattr(time, name): self._read for name in names}
        self._functions |= {getattr(time, f"{name}_ns"): self._read_ns for name in names}
        clock = self

        class StoppedDatetime(datetime.datetime):
            @classmethod
            def now(cls, tz: datetime.tzinfo | None = None) -> "StoppedDatetime":
                return cls.fromtimestamp(clock._read(), tz)

            @classmethod
            def utcnow(cls) -> "StoppedDatetime":
                return cls.fromtimestamp(clock._read(), datetime.UTC).replace(tzinfo=None)

        self._datetime = StoppedDatetime
        own = {
            name: self._functions.get(value, value) for name, value in vars(time).items() if callable(value)
        }
        self._time_module = SimpleNamespace(**own)
        self._datetime_module = SimpleNamespace(**{**vars(datetime), "datetime": StoppedDatetime})

    def stand_in(self, value: Any) -> Any:
        """The replacement of a value; None where it is no clock."""
        if value is time:
            return self._time_module
        if value is datetime:
            return self._datetime_module
        if value is datetime.datetime:
            return self._datetime
        is_function = callable(value) and getattr(value, "__module__", None) == "time"
        return self._functions.get(value) if is_function else None

    def _read(self) -> float:
        self._now_s += 1
        return float(self._now_s)

    def _read_ns(self) -> int:
        return int(self._read()) * 1_000_000_000


def _author_modules() -> list[ModuleType]:
    """Modules that are not of Python, of an installed package, or ours."""
    ours = str(Path(__file__).parents[2])
    outside = (sys.prefix, sys.base_prefix, ours)
    return [
        module
        for module in list(sys.modules.values())
        if (file := getattr(module, "__file__", None)) and not file.startswith(outside)
    ]
