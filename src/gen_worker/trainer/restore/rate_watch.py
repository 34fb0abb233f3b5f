"""A learning rate of 0 while steps remain: nothing is learnt any more, and one warning says so."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gen_worker.trainer.restore.optimizer_options import ConfiguredOptions, learning_rates
from gen_worker.trainer.steps.parts import LoopReporter


@dataclass(slots=True, kw_only=True)
class RateWatch:
    """Looks where metrics are emitted. `is_told`: the warning was given, or one at the start stood in for it."""

    is_told: bool = False
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
        """Two reports in a row with a rate of 0 in all groups; a warm-up may begin at 0."""
        if self.is_told or (end_step is not None and step >= end_step):
            return
        rates = learning_rates(options.optimizers) or [values.get("train/lr", 1.0)]
        if any(rates):
            self._since = None
        elif self._since is None:
            self._since = step
        else:
            self.is_told = True
            end = "" if end_step is None else f" of {end_step}"
            reporter.log(
                f"the learning rate has been 0 since step {self._since} or earlier (now at step {step}{end}): the weights"
                " no longer change. Make the schedule longer (total_steps), or end the run earlier (max_steps)",
                level="warning",
            )
