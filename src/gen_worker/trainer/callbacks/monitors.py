"""Monitoring callbacks: learning rates, throughput, NaN and infinite losses."""

import math
from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any, Literal, get_args

from gen_worker.errors import StartupError, TrainStepError
from gen_worker.trainer.callbacks.base import Callback, RunHandle
from gen_worker.trainer.callbacks.state_copy import copy_state, nonfinite_names, nonfinite_part
from gen_worker.trainer.compute.repro import to_float_scalar
from gen_worker.trainer.contracts import StepResult

WINDOW_STEPS = 1024  # a power of two: the ring is indexed with a mask
_MASK = WINDOW_STEPS - 1

Action = Literal["stop", "skip", "rollback"]

# One metric under all names that an author may return it by.
_ALIASES = {"loss": ("loss", "train_loss", "train/loss")}


def has_train_values(values: Mapping[str, float]) -> bool:
    """Are these the metrics of a training step? They are named `train/…`, or have no slash."""
    return any(name.startswith("train/") or "/" not in name for name in values)


class LearningRateMonitor(Callback):
    """Reports `lr/<name or index>` of every parameter group with the metrics of a step."""

    def on_metrics(self, run: RunHandle, values: Mapping[str, float]) -> None:
        if not has_train_values(values):
            return  # also its own report
        rates = dict(_rates(getattr(run.ctx.optimizer, "param_groups", None) or ()))
        if rates:
            run.report(rates)


def _rates(groups: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    names = [str(group.get("name", index)) for index, group in enumerate(groups)]
    for index, (name, group) in enumerate(zip(names, groups, strict=True)):
        unique = name if names.count(name) == 1 else f"{name}-{index}"
        yield f"lr/{unique}", to_float_scalar(group["lr"])


class ThroughputMonitor(Callback):
    """Reports `throughput/…` of the steps since the last report, with the metrics of a step, at most every `report_s`.

    `samples_per_s`, `steps_per_s`, `data_wait_share` (share of the time spent waiting for batches), and `step_p50_s`,
    `step_p95_s`, `step_p99_s` over at most the newest 1024 steps. Times are measured on the host, which may run ahead
    of a device.

    Validation, saves and samples are not counted. List this callback last, so that it sees saves of other callbacks.
    """

    # Slots and one list: the two batch hooks together take less than a microsecond.
    __slots__ = (
        "_begun_s",
        "_busy_s",
        "_ended_s",
        "_num_steps",
        "_pause_at",
        "_pauses_every",
        "_report_s",
        "_samples_before",
        "_times_s",
        "_waited_s",
    )

    _only_watches = True

    def __init__(self, report_s: float = 1.0) -> None:
        self._report_s = report_s
        self._times_s = [0.0] * WINDOW_STEPS
        self._pauses_every: tuple[int, ...] = ()
        self._samples_before: int | None = None
        self._num_steps = 0
        self._pause_at = -1  # the step of the window after which the loop saves or samples
        self._busy_s = 0.0
        self._waited_s = 0.0
        self._begun_s = 0.0
        self._ended_s = 0.0  # 0: the time until the next batch is not counted as waiting

    def on_train_begin(self, run: RunHandle) -> None:
        job = run.job
        self._pauses_every = tuple(every for every in (job.checkpoint_every, job.sample_every) if every)
        self._samples_before = run.state.samples_seen
        self._ended_s = 0.0
        self._begin_window(run.state.step)

    def on_batch_begin(self, run: RunHandle, batch: Any) -> None:  # noqa: ARG002
        now = perf_counter()
        if self._ended_s:
            self._waited_s += now - self._ended_s
        self._begun_s = now

    def on_batch_end(self, run: RunHandle, batch: Any, result: StepResult) -> None:  # noqa: ARG002
        now = perf_counter()
        duration_s = now - self._begun_s
        number = self._num_steps
        self._times_s[number & _MASK] = duration_s
        self._num_steps = number + 1
        self._busy_s += duration_s
        if number == self._pause_at:
            self._ended_s = 0.0
            self._pause_at = self._next_pause(run.state.step, number + 1)
        else:
            self._ended_s = 0.0 if run.is_checkpoint_due or run.rollback else now

    def on_metrics(self, run: RunHandle, values: Mapping[str, float]) -> None:
        is_due = self._num_steps and self._busy_s + self._waited_s >= self._report_s
        if is_due and has_train_values(values):
            report = self._measure(run)
            self._begin_window(run.state.step)
            run.report(report)
        if self._ended_s:
            self._ended_s = 0.0 if run.is_checkpoint_due else perf_counter()

    def on_validation_begin(self, run: RunHandle) -> None:  # noqa: ARG002
        self._ended_s = 0.0  # until the next step: a callback may request a save after it

    def on_epoch_end(self, run: RunHandle) -> None:  # noqa: ARG002
        self._ended_s = 0.0

    def _begin_window(self, step: int) -> None:
        self._num_steps = 0
        self._busy_s = 0.0
        self._waited_s = 0.0
        self._pause_at = self._next_pause(step, 0)

    def _next_pause(self, step: int, number: int) -> int:
        """The next step of the window at a cadence. `step` is committed, `number` is next."""
        return min((number + every - step % every - 1 for every in self._pauses_every), default=-1)

    def _measure(self, run: RunHandle) -> dict[str, float]:
        num_steps = self._num_steps
        total_s = max(self._busy_s + self._waited_s, 1e-9)
        times_s = sorted(self._times_s[: min(num_steps, WINDOW_STEPS)])
        report = {
            "throughput/steps_per_s": num_steps / total_s,
            "throughput/data_wait_share": self._waited_s / total_s,
        }
        for percent in (50, 95, 99):
            report[f"throughput/step_p{percent}_s"] = times_s[math.ceil(len(times_s) * percent / 100) - 1]
        before, now = self._samples_before, run.state.samples_seen
        if before is not None and now is not None and now >= before:
            report["throughput/samples_per_s"] = (now - before) / total_s
        self._samples_before = now
        return report


class NonFiniteGuard(Callback):
    """Checks the loss every `every` steps and acts if it is NaN or infinite. Reading a tensor waits for its device.

    `stop` ends the run. `rollback` restores the newest checkpoint. `skip` restores a copy of the state from the last
    good check. The copy is in memory, on the state's device, and is checked for NaN and infinity. With `every=1` only
    the bad batch is skipped, and every step makes a copy.

    The run fails after `max_skips` restores without getting past the bad step. `metric` is one or several names that
    `train_step` returns. All processes act together.
    """

    def __init__(
        self,
        action: Action = "stop",
        every: int = 1,
        metric: str | Sequence[str] = "loss",
        max_skips: int = 10,
    ) -> None:
        if action not in get_args(Action):
            raise StartupError(
                f"NonFiniteGuard: action is {action!r}, expected {', '.join(get_args(Action))}"
            )
        if every < 1:
            raise StartupError(f"NonFiniteGuard: every is {every}, expected at least 1 step")
        self.action: Action = action
        self.every = every
        self.metric = metric
        self.max_skips = max_skips
        self.num_skips = 0  # in total
        self.num_in_a_row = 0  # without getting past `bad_step`
        self.bad_step = 0
        names = (metric,) if isinstance(metric, str) else metric
        self._names = tuple(_ALIASES.get(name, (name,)) for name in names)
        self._copy: Any = None
        self._copy_step = 0
        self._ignored: frozenset[str] = frozenset()
        self._is_missing_logged = False

    def on_train_begin(self, run: RunHandle) -> None:
        self._copy = None
        if self.action == "skip":
            state = run.trainer.state_dict(run.model_state)
            # Not finite from the start, such as an attention mask: that is intended.
            self._ignored = frozenset(nonfinite_names(state))
            self._keep(run, state)

    def on_batch_end(self, run: RunHandle, batch: Any, result: StepResult) -> None:
        step = run.state.step
        if step % self.every:
            return
        fault = self._fault_of(run, result.metrics)
        is_bad = self._is_anywhere(run, fault is not None)
        if not is_bad and self.action == "skip":
            state = run.trainer.state_dict(run.model_state)
            bad = [name for name in nonfinite_names(state) if name not in self._ignored]
            if bad:
                fault = f"{bad[0]} of the state is not finite"
            is_bad = self._is_anywhere(run, bool(bad))
            if not is_bad:
                self._keep(run, state)
        if is_bad:
            from gen_worker.trainer.processes.empty_shares import short_batch_in_words

            fault = fault or "another process found a NaN or infinite value"
            share = short_batch_in_words(batch, run.ctx)  # any process may be the one that reports
            self._act(run, step, fault if share is None else f"{fault} ({share})")
        elif self.num_in_a_row and step >= self.bad_step:
            self.num_in_a_row = 0

    def _fault_of(self, run: RunHandle, metrics: Mapping[str, Any]) -> str | None:
        for aliases in self._names:
            for name in aliases:
                if name in metrics:
                    part = nonfinite_part(metrics[name])
                    if part is not None:
                        return f"{name} is {part}"
                    break
            else:
                self._log_missing(run, aliases[0], metrics)
        return None

    def _log_missing(self, run: RunHandle, wanted: str, metrics: Mapping[str, Any]) -> None:
        if self._is_missing_logged:
            return
        self._is_missing_logged = True
        found = ", ".join(map(repr, metrics)) or "nothing"
        run.log(
            f"NonFiniteGuard checks {wanted!r}, which train_step did not return (it returned {found}). It has no"
            " effect. Set `metric` to a returned name",
            "warning",
        )

    def _is_anywhere(self, run: RunHandle, flag: bool) -> bool:
        return run.any_process(flag) if run.ctx.world_size > 1 else flag

    def _keep(self, run: RunHandle, state: Mapping[str, Any]) -> None:
        self._copy = copy_state(state, self._copy)
        self._copy_step = run.state.step

    def _act(self, run: RunHandle, step: int, fault: str) -> None:
        if self.action == "stop":
            raise TrainStepError(
                f"{fault} at step {step}: check the data and the learning rate, or use NonFiniteGuard(action='skip')"
                " or 'rollback' to continue without these batches"
            )
        self.bad_step = max(step, self.bad_step) if self.num_in_a_row else step
        self.num_in_a_row += 1
        if self.num_in_a_row > self.max_skips:
            raise TrainStepError(
                f"{fault} at step {step}. Restoring {self.max_skips} times (max_skips) did not get past step"
                f" {self.bad_step}: lower the learning rate, or check the data"
            )
        self.num_skips += 1
        count = f"{self.num_in_a_row} of at most {self.max_skips} times in a row, {self.num_skips} in total"
        if self.action == "skip":
            run.log(f"{fault} at step {step}: restoring step {self._copy_step} ({count})", "warning")
            # A copy of the copy: training may change the loaded state in place, and it may be needed again.
            run.roll_back(copy_state(self._copy), step=self._copy_step)
        else:
            run.log(f"{fault} at step {step}: restoring the newest checkpoint ({count})", "warning")
            run.roll_back()
