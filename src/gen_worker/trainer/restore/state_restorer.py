"""Makes the author's state: fresh, from a checkpoint, or rolled back while training."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gen_worker.errors import SpecError
from gen_worker.trainer.author.author_state import fill_from_checkpoint, prepare_state
from gen_worker.trainer.author.identity import changes_since, describe_change
from gen_worker.trainer.author.read_tracking import ReadTracker
from gen_worker.trainer.author.state_parts import find_parts
from gen_worker.trainer.checkpoints.store import Checkpoint
from gen_worker.trainer.compute.repro import seed_everything
from gen_worker.trainer.contracts import StepContext, TrainerPlugin
from gen_worker.trainer.model_runtime import restore_rng
from gen_worker.trainer.processes.group import Processes
from gen_worker.trainer.restore.infinite_parts import find_infinite_parts
from gen_worker.trainer.restore.optimizer_options import (
    ConfiguredOptions,
    OptionChange,
    learning_rates,
)
from gen_worker.trainer.restore.resumed_hyperparams import KEPT_OPTIONS, Resumption, fill_and_apply
from gen_worker.trainer.steps.parts import LoopReporter

KEPT_SCHEDULE = "schedule_steps"  # in the loop state of a checkpoint
Level = Literal["info", "warning"]
_MAX_SHOWN = 5


@dataclass(slots=True, kw_only=True)
class RateWatch:
    """Warns once when the learning rate stays 0 while steps remain."""

    is_reported: bool = False
    _since: int | None = field(default=None, init=False)

    def look(
        self,
        options: ConfiguredOptions,
        values: Mapping[str, float],
        *,
        step: int,
        end_step: int | None,
        reporter: LoopReporter,
    ) -> None:
        """Called when metrics are emitted. Two calls in a row with a rate of 0: a warm-up may start at 0."""
        if self.is_reported or (end_step is not None and step >= end_step):
            return
        rates = learning_rates(options.optimizers)
        first = next(rates, None)
        if first is None:
            first = values.get("train/lr", 1.0)
        if first or any(rates):
            self._since = None
        elif self._since is None:
            self._since = step
        else:
            self.is_reported = True
            end = "" if end_step is None else f" of {end_step}"
            reporter.log(
                f"the learning rate has been 0 since step {self._since} or earlier (now at step {step}{end}): the weights"
                " do not change any more. Make the schedule longer (total_steps), or the run shorter (max_steps)",
                level="warning",
            )


@dataclass(slots=True, kw_only=True)
class StateRestorer:
    """Of one attempt. `options` of the optimizers are known once `make` has returned."""

    trainer: TrainerPlugin
    ctx: StepContext
    identity: Mapping[str, Any] = field(default_factory=dict)
    is_library: bool = True
    options: ConfiguredOptions = field(default_factory=ConfiguredOptions, init=False)
    infinite_parts: frozenset[str] = field(default=frozenset(), init=False)
    reads: ReadTracker = field(init=False)
    rate_watch: RateWatch = field(default_factory=RateWatch, init=False)
    notes: list[tuple[Level, str]] = field(default_factory=list, init=False)  # to be logged

    def __post_init__(self) -> None:
        self.reads = ReadTracker(ctx=self.ctx, is_library=self.is_library)

    def make(self, checkpoint: Checkpoint | None) -> Any:
        """The state to train with. RNG states come last, after all hooks."""
        state = self.configure()
        if checkpoint is None:
            self._load_weights(state)
            self._note_schedule(None)
            self._seed_fresh()
            return state
        resumption, applied = self.fill(state, checkpoint)
        self._note_changes(checkpoint, resumption, applied)
        self._note_schedule(checkpoint)
        if "seed" in resumption.fields:  # of shuffled data the cursor would have been refused
            self._seed_apart(step=checkpoint.step)
        else:
            self._restore_streams(checkpoint)
        return state

    def configure(self) -> Any:
        """A fresh state; records the options of its optimizers."""
        trainer, ctx = self.trainer, self.ctx
        state = prepare_state(trainer, ctx)
        self.infinite_parts = find_infinite_parts(state, trainer)
        self.options = ConfiguredOptions.of(
            state=state, optimizer=ctx.optimizer, scheduler=ctx.scheduler, trainer=trainer
        )
        return state

    def make_to_evaluate(self, load: Callable[[], Checkpoint | None]) -> Any:
        """The state for an evaluation: changed settings need no effect. `load` is called after `configure`."""
        state = prepare_state(self.trainer, self.ctx)
        checkpoint = load()
        if checkpoint is None:
            self._load_weights(state)
            self._seed_fresh()
        else:
            fill_from_checkpoint(self.trainer, state, self.ctx, checkpoint)
            self._restore_streams(checkpoint)
        self.reads.close(self.trainer)
        return state

    def fill(self, state: Any, checkpoint: Checkpoint) -> tuple[Resumption, list[OptionChange]]:
        """Load into a state that `configure` made. Changed settings take effect, or InputError."""
        resumption = Resumption.between(checkpoint.identity, self.identity)
        applied = fill_and_apply(
            self.trainer, state, self.ctx, checkpoint, options=self.options, resumption=resumption
        )
        return resumption, applied

    def saved_facts(self) -> dict[str, Any]:
        """For the loop state of a checkpoint."""
        return {KEPT_OPTIONS: self.options.describe(), KEPT_SCHEDULE: self._schedule_steps()}

    def report_unread(self, reporter: LoopReporter, processes: Processes) -> None:
        """After the first step: report settings that were never read. An error if the job is `strict`."""
        read_now = [text for name, text in self.reads.later.items() if self.reads.has_read(name)]
        unread = processes.from_main(self.reads.close(self.trainer))  # another process may read less
        if unread and self.ctx.job.strict:
            raise SpecError(f"the job of run {self.ctx.job.run_id} is strict", unread)
        for text in (*read_now, *unread):
            reporter.log(text, level="warning")

    def watch_rate(self, values: Mapping[str, float], end_step: int | None, reporter: LoopReporter) -> None:
        """Called when metrics are emitted."""
        self.rate_watch.look(self.options, values, step=self.ctx.step, end_step=end_step, reporter=reporter)

    def _load_weights(self, state: Any) -> None:
        """The job's `weights`, if the class has not read them."""
        path = self.reads.unread_weights
        if path is None:
            return
        from gen_worker.trainer.restore.weights import load_into_modules

        modules = dict(find_parts(_has_weights, {"state": state})) or dict(
            find_parts(_has_weights, {"trainer": self.trainer})
        )
        load_into_modules(modules, path)
        self.notes.append(("info", f"loaded the weights of {path} into {', '.join(modules)}"))

    def _note_changes(
        self, checkpoint: Checkpoint, resumption: Resumption, applied: list[OptionChange]
    ) -> None:
        """Changed hyperparameters are reported once they are read."""
        for name, (was, now) in resumption.hyperparams.items():
            if not self.reads.has_read(name):
                self.reads.later[name] = (
                    f"since the checkpoint the job changed: {describe_change(f'hyperparams.{name}', was, now)}"
                )
        unread = [f"hyperparams.{name}" for name in self.reads.later]
        for change in changes_since(checkpoint.identity, self.identity, unsaid=unread):
            self.notes.append(("warning", f"since the checkpoint {change}"))
        changed = [
            f"{part.optimizer} {part.name} {part.was} → {part.now}" for part in applied if part.group == 0
        ]
        if changed:
            self.notes.append(
                ("info", f"optimizer options set after the load: {'; '.join(changed[:_MAX_SHOWN])}")
            )

    def _schedule_steps(self) -> int | None:
        """The last step of the schedule; None where unknown."""
        return max((part.steps for part in self.reads.run_length.schedules), default=None)

    def _note_schedule(self, checkpoint: Checkpoint | None) -> None:
        """Report a schedule whose length changed, or that ends before the run."""
        steps, planned = self._schedule_steps(), self.ctx.total_steps
        was = None if checkpoint is None else checkpoint.loop.get(KEPT_SCHEDULE)
        rates = list(learning_rates(self.options.optimizers))
        if was is not None and steps is not None and was != steps:
            rate = f"; learning rate continues at {max(rates):.6g}" if rates else ""
            self.notes.append(("info", f"schedule: {was} → {steps} steps{rate}"))
        for part in self.reads.run_length.schedules:
            if (
                part.setting is not None
                and planned is not None
                and part.steps < planned
                and not part.final_ratio
            ):
                self.rate_watch.is_reported = True
                self.notes.append(
                    (
                        "warning",
                        f"the learning rate is 0 from step {part.steps} on: {part.setting} is {part.steps}, but the run"
                        f" has {planned} steps. Set {part.setting} to {planned}, or leave it out to use the length of"
                        " the run",
                    )
                )

    def _seed_fresh(self) -> None:
        if self.ctx.rank > 0:
            self._seed_apart()

    def _restore_streams(self, checkpoint: Checkpoint) -> None:
        rank, rng = self.ctx.rank, checkpoint.rng
        streams: Any = rng.get("ranks", [rng]) if rng else []
        if rank < len(streams):
            restore_rng(streams[rank])
        elif self.ctx.world_size > 1:
            self._seed_apart(step=checkpoint.step)

    def _seed_apart(self, step: int = 0) -> None:
        """From here on each process has its own random numbers; all have built the same model."""
        from gen_worker.trainer.processes.distributed import own_seed

        seed = own_seed(self.ctx.job.seed, self.ctx.rank, step)
        seed_everything(seed, torch="torch" in sys.modules)


def _has_weights(value: Any) -> bool:
    """A torch module with something to load."""
    return hasattr(type(value), "named_modules") and bool(value.state_dict())
