"""A run handle whose loop is the test: what callbacks report, say and ask for is kept to be looked at."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.trainer.artifacts import SavedCheckpoint
from gen_worker.trainer.attempt.state import MetricsRecord, TrainerState
from gen_worker.trainer.callbacks.base import Callback, RunHandle
from gen_worker.trainer.callbacks.callback_list import CallbackList
from gen_worker.trainer.contracts import StepContext, StepResult


class HandBuiltRun:
    """Calls the hooks in the loop's order. `samples_per_step` None: batches have no rows."""

    def __init__(
        self,
        callbacks: Sequence[Callback],
        folder: Path = Path("nowhere"),
        *,
        trainer: Any = None,
        model_state: Any = None,
        optimizer: Any = None,
        step: int = 0,
        end_step: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        is_any_process: Any = bool,
        samples_per_step: int | None = None,
        **job: Any,
    ) -> None:
        self.callbacks = CallbackList(callbacks)
        self.reports: list[dict[str, float]] = []
        self.said: list[tuple[str, str]] = []
        spec = TrainingJobSpec(run_id="run-1", **{"checkpoint_every": 0, "mock_batches": []} | job)
        ctx = StepContext(job=spec, optimizer=optimizer, rank=rank, world_size=world_size)
        self.state = TrainerState()
        self.state.attach(
            ctx,
            rows_at=lambda at: None if samples_per_step is None else at * samples_per_step,
            callbacks=self.callbacks.state_dict,
        )
        ctx.progress.step = step
        self.handle = RunHandle(
            job=spec,
            ctx=ctx,
            trainer=trainer,
            state=self.state,
            model_state=model_state,
            folder=folder,
            end_step=end_step,
            emit=self.emit,
            write_log=lambda message, level: self.said.append((level, message)),
            is_any_process=is_any_process,
        )

    @property
    def step(self) -> int:
        return self.state.step

    @property
    def warnings(self) -> list[str]:
        return [message for level, message in self.said if level == "warning"]

    def begin(self) -> "HandBuiltRun":
        self.callbacks.call("on_train_begin", self.handle)
        return self

    def begin_batch(self) -> None:
        self.callbacks.call("on_batch_begin", self.handle, None)

    def end_batch(self, **metrics: Any) -> None:
        self.handle.ctx.progress.step += 1
        self.callbacks.call("on_batch_end", self.handle, None, StepResult(metrics=metrics))

    def emit(self, values: Mapping[str, float]) -> None:
        self.reports.append(dict(values))
        self.state.note(values)
        self.callbacks.call("on_metrics", self.handle, values)

    def validate(self, metrics: Mapping[str, float], during: Any = lambda: None) -> None:
        self.callbacks.call("on_validation_begin", self.handle)
        during()
        record = MetricsRecord(
            kind="validation", step=self.step, epoch=0, metrics=metrics, rows=7, duration_s=0.5
        )
        self.state.note(metrics)
        self.callbacks.call("on_validation_end", self.handle, record)
        self.callbacks.call("on_metrics", self.handle, metrics)

    def take_save(self) -> bool:
        """Was a checkpoint asked for since this was asked last?"""
        asked, self.handle.is_checkpoint_due = self.handle.is_checkpoint_due, False
        return asked

    def saved(self, name: str = "step.pt", *, final: bool = False) -> None:
        path = Path("checkpoints") / name
        checkpoint = SavedCheckpoint(
            path=path,
            meta_path=path.with_suffix(".meta.json"),
            step=self.step,
            final=final,
            verified=True,
            reason="",
            size_bytes=10,
            duration_s=0.1,
            blocked_s=0.0,
            removed=[],
            files=(),
        )
        self.callbacks.call("on_checkpoint", self.handle, checkpoint)

    def end(self, error: BaseException | None = None) -> None:
        if error is None:
            self.callbacks.call("on_train_end", self.handle)
        else:
            assert self.callbacks.call_all("on_exception", self.handle, error) == []
