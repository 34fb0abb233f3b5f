"""Loggers besides the event file: a JSON-lines file, TensorBoard, MLflow, Weights & Biases.

Each logs the job's parameters once, metrics, validations, checkpoints and the run's status, in the background. A back
end that is slow or unreachable may lose records, but never delays a step.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from gen_worker.trainer.callbacks.background_logger import (
    BackgroundLogger,
    Ending,
    Entry,
    job_parameters,
    now_ms,
)
from gen_worker.trainer.callbacks.base import RunHandle
from gen_worker.trainer.events.event_tail import line_end_before

if TYPE_CHECKING:
    from gen_worker.trainer.callbacks.mlflow_sink import MLflowSink
    from gen_worker.trainer.callbacks.tensorboard_sink import TensorBoardSink
    from gen_worker.trainer.callbacks.wandb_sink import Mode, WandbSink


@dataclass(eq=False)
class JsonlLogger(BackgroundLogger):
    """One JSON object per line. The default path is `logs/metrics.jsonl` in the run's folder.

    Each line has `kind` (`begin`, `metrics`, `validation`, `checkpoint`, `end`), `step` and `time_ms`. A resumed run
    appends to the same file: the lines after a `begin` replace the steps above its own.
    """

    path: str | Path | None = None

    def make_sink(self, run: RunHandle) -> "_JsonlSink":
        path = run.folder / "logs" / "metrics.jsonl" if self.path is None else Path(self.path)
        return _JsonlSink(path, run.job.run_id, run.state.step, job_parameters(run.job))


@dataclass(eq=False)
class TensorBoardLogger(BackgroundLogger):
    """An event file for TensorBoard. The default folder is `tensorboard/` in the run's folder.

    Metrics are scalars; parameters, checkpoints and the end are texts. A resumed run adds a file to the same folder,
    which makes TensorBoard drop the steps that are trained again.
    """

    folder: str | Path | None = None

    def make_sink(self, run: RunHandle) -> "TensorBoardSink":
        from gen_worker.trainer.callbacks.tensorboard_sink import TensorBoardParts, TensorBoardSink

        parts = TensorBoardParts()
        folder = run.folder / "tensorboard" if self.folder is None else Path(self.folder)
        return TensorBoardSink(parts, folder, run.state.step, job_parameters(run.job))


@dataclass(eq=False)
class MLflowLogger(BackgroundLogger):
    """A run on an MLflow tracking server. The default URI is MLflow's own default.

    A resumed run continues the same MLflow run, also if it was killed before its first checkpoint. In this process
    MLflow's request timeout is 10 s, its retries are replaced by ours, and its telemetry is off, unless its
    environment variables are set.
    """

    tracking_uri: str | None = None
    experiment: str = "trn"
    run_name: str | None = None

    def __post_init__(self) -> None:
        self.mlflow_run_id: str | None = None  # public: saved with every checkpoint

    def make_sink(self, run: RunHandle) -> "MLflowSink":
        from gen_worker.trainer.callbacks.mlflow_sink import MLflowSink

        return MLflowSink(self, run)


@dataclass(eq=False)
class WandbLogger(BackgroundLogger):
    """A Weights & Biases run. The default `mode` is that of WANDB_MODE.

    The job is its config; `trainer/step` is the x axis of its charts. All attempts of a run continue one W&B run. Its
    files are in `wandb/` in the run's folder; `wandb sync` uploads an offline run.
    """

    project: str = "trn"
    entity: str | None = None
    run_name: str | None = None
    mode: "Mode | None" = None
    close_s: float = field(default=10.0, kw_only=True)

    def make_sink(self, run: RunHandle) -> "WandbSink":
        from gen_worker.trainer.callbacks.wandb_sink import WandbSink

        return WandbSink(self, run)


class AppendedFile:
    """A file that is only appended to. A write that failed half way is undone."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.size_bytes = os.fstat(self._fd).st_size

    def append(self, piece: bytes) -> None:
        left = memoryview(piece)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError:
            os.ftruncate(self._fd, self.size_bytes)
            raise
        self.size_bytes += len(piece)

    def cut_half_line(self) -> None:
        """Drop what a crash left after the last newline."""
        with open(self._fd, "rb", closefd=False) as file:
            end = line_end_before(file, self.size_bytes)
        if end < self.size_bytes:
            os.ftruncate(self._fd, end)
            self.size_bytes = end

    def close(self) -> None:
        os.close(self._fd)


class _JsonlSink:
    def __init__(self, path: Path, run_id: str, step: int, parameters: Mapping[str, Any]) -> None:
        self.name = f"the log {path}"
        self._path = path
        self._begin = {"kind": "begin", "step": step, "time_ms": now_ms(), "run_id": run_id}
        self._parameters = parameters
        self._file: AppendedFile | None = None

    def open(self) -> None:
        if self._file is None:
            file = AppendedFile(self._path)
            file.cut_half_line()
            self._file = file
        is_new = self._file.size_bytes == 0
        self._file.append(_line(self._begin | ({"parameters": self._parameters} if is_new else {})))

    def send(self, entries: Sequence[Entry]) -> int:
        assert self._file is not None
        self._file.append(b"".join(map(_entry_line, entries)))
        return len(entries)

    def close(self, ending: Ending) -> None:
        assert self._file is not None
        head = {"kind": "end", "step": ending.step, "time_ms": ending.time_ms}
        self._file.append(_line({**head, "status": ending.status, "reason": ending.reason}))
        self._file.close()


def _entry_line(entry: Entry) -> bytes:
    head = {"kind": entry.kind, "step": entry.step, "time_ms": entry.time_ms}
    return _line({**head, "values": entry.values} if entry.kind == "metrics" else {**head, **entry.values})


def _line(document: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode(_json_safe(document)) + b"\n"


def _json_safe(value: Any) -> Any:
    """NaN and infinity as text: JSON has no numbers for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, Mapping):
        return {name: _json_safe(item) for name, item in value.items()}
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    return value
