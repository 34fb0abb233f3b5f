"""Where metrics go besides the event file: a JSON-lines file, TensorBoard, MLflow, Weights & Biases.

All of them log the job's parameters once, metrics, validations, checkpoints and how the run ended, from the main
process, in the background: a back end that is slow or away costs records after a while, and never a step.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from gen_worker.trainer.callbacks.appended_file import AppendedFile
from gen_worker.trainer.callbacks.background_logger import (
    CLOSE_S,
    MAX_PENDING,
    BackgroundLogger,
    Ending,
    Entry,
    job_parameters,
    now_ms,
)
from gen_worker.trainer.callbacks.base import RunHandle

if TYPE_CHECKING:
    from gen_worker.trainer.callbacks.mlflow_sink import MLflowSink
    from gen_worker.trainer.callbacks.tensorboard_sink import TensorBoardSink
    from gen_worker.trainer.callbacks.wandb_sink import Mode, WandbSink


class JsonlLogger(BackgroundLogger):
    """One JSON object a line, in `logs/metrics.jsonl` below the run's folder where no path is given.

    Each line has `kind` (`begin`, `metrics`, `validation`, `checkpoint`, `end`), `step` and `time_ms`. A resumed run
    goes on in the same file: what follows a `begin` replaces the steps above its own.
    """

    def __init__(
        self, path: str | Path | None = None, *, max_pending: int = MAX_PENDING, close_s: float = CLOSE_S
    ) -> None:
        super().__init__(max_pending=max_pending, close_s=close_s)
        self.path = None if path is None else str(path)

    def make_sink(self, run: RunHandle) -> "_JsonlSink":
        path = run.folder / "logs" / "metrics.jsonl" if self.path is None else Path(self.path)
        return _JsonlSink(path, run.job.run_id, run.state.step, job_parameters(run.job))


class TensorBoardLogger(BackgroundLogger):
    """An event file for TensorBoard, in `tensorboard/` below the run's folder where none is given.

    Metrics are scalars; parameters, checkpoints and the end are texts. A resumed run adds a file to the same folder,
    which makes TensorBoard forget the steps that are trained again.
    """

    def __init__(
        self, folder: str | Path | None = None, *, max_pending: int = MAX_PENDING, close_s: float = CLOSE_S
    ) -> None:
        super().__init__(max_pending=max_pending, close_s=close_s)
        self.folder = None if folder is None else str(folder)

    def make_sink(self, run: RunHandle) -> "TensorBoardSink":
        from gen_worker.trainer.callbacks.tensorboard_sink import TensorBoardParts, TensorBoardSink

        parts = TensorBoardParts()
        folder = run.folder / "tensorboard" if self.folder is None else Path(self.folder)
        return TensorBoardSink(parts, folder, run.state.step, job_parameters(run.job))


class MLflowLogger(BackgroundLogger):
    """A run of an MLflow tracking server. Without a URI it is the one that MLflow itself would take.

    A resumed run goes on in the same MLflow run; so does one that was killed before its first checkpoint.
    For this process, MLflow's request timeout is set to 10 s, its own retries are replaced by ours, and its usage
    telemetry is off, unless its environment variables say otherwise.
    """

    def __init__(
        self,
        tracking_uri: str | None = None,
        experiment: str = "trn",
        run_name: str | None = None,
        *,
        max_pending: int = MAX_PENDING,
        close_s: float = CLOSE_S,
    ) -> None:
        super().__init__(max_pending=max_pending, close_s=close_s)
        self.tracking_uri = tracking_uri
        self.experiment = experiment
        self.run_name = run_name
        self.mlflow_run_id: str | None = None  # public: saved with every checkpoint

    def make_sink(self, run: RunHandle) -> "MLflowSink":
        from gen_worker.trainer.callbacks.mlflow_sink import MLflowSink

        return MLflowSink(
            run,
            tracking_uri=self.tracking_uri,
            experiment=self.experiment,
            run_name=self.run_name,
            run_id=self.mlflow_run_id,
            on_run_id=partial(setattr, self, "mlflow_run_id"),
        )


class WandbLogger(BackgroundLogger):
    """A run of Weights & Biases. Without `mode`, WANDB_MODE says whether it is online or offline.

    The job is its config, and `trainer/step` is the axis of its charts. All attempts of a run continue one W&B run. The
    files of W&B are in `wandb/` below the run's folder; `wandb sync` uploads those of an offline run.
    """

    def __init__(
        self,
        project: str = "trn",
        entity: str | None = None,
        run_name: str | None = None,
        mode: "Mode | None" = None,
        *,
        max_pending: int = MAX_PENDING,
        close_s: float = 10.0,
    ) -> None:
        super().__init__(max_pending=max_pending, close_s=close_s)
        self.project = project
        self.entity = entity
        self.run_name = run_name
        self.mode = mode

    def make_sink(self, run: RunHandle) -> "WandbSink":
        from gen_worker.trainer.callbacks.wandb_sink import WandbSink

        return WandbSink(
            run,
            project=self.project,
            entity=self.entity,
            run_name=self.run_name,
            mode=self.mode,
            finish_timeout_s=max(self.close_s - 1.0, 1.0),
        )


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
    """JSON has no word for NaN and the infinities; a string keeps what null would lose."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, Mapping):
        return {name: _json_safe(item) for name, item in value.items()}
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    return value
