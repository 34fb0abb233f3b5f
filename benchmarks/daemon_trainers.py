"""What the daemon's workers train in these benchmarks: nothing, as quickly or as steadily as is asked for."""

import time
from pathlib import Path
from typing import Any

from gen_worker.trainer import StepContext, StepResult

POLL_S = 0.002


def note_time(path: str | Path) -> None:
    """This moment of the clock that all processes of a machine share; the file is there whole or not at all."""
    path = Path(path)
    part = path.with_name(f"{path.name}.part")
    part.write_text(str(time.monotonic_ns()))
    part.rename(path)


class Trivial:
    """One number is its state. A base for the others."""

    def setup(self, ctx: StepContext) -> None:
        self.options: dict[str, Any] = dict(ctx.job.hyperparams)

    def configure(self, ctx: StepContext) -> dict[str, Any]:
        return {"sum": 0}

    def prepare_batch(self, raw_batch: Any, state: dict[str, Any], ctx: StepContext) -> Any:
        return raw_batch

    def train_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> StepResult:
        state["sum"] += 1
        return StepResult(metrics={"sum": float(state["sum"])})

    def state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        return dict(state)

    def load_state_dict(self, state: dict[str, Any], payload: dict[str, Any], ctx: StepContext) -> None:
        state.update(payload)


class Holding(Trivial):
    """Keeps its resources until it is cancelled."""

    def train_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> StepResult:
        time.sleep(0.2)
        return StepResult()


class Clocked(Trivial):
    """Each step says when it began; a step every `step_ms`."""

    def train_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> StepResult:
        time.sleep(self.options["step_ms"] / 1000)
        return StepResult(metrics={"at": time.monotonic()})


class Chattering(Trivial):
    """`num_values` points a step. Begins when the file `go` is there; `points_per_s` paces it, notes are left at
    `first` and `last`."""

    def setup(self, ctx: StepContext) -> None:
        super().setup(ctx)
        self.names = [f"value-{number}" for number in range(self.options.get("num_values", 1))]
        self.rate = self.options.get("points_per_s", 0) / len(self.names)
        self.began = 0.0

    def train_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> StepResult:
        if not self.began:
            self.wait_for_go()
        elif self.rate:
            ahead_s = ctx.step / self.rate - (time.monotonic() - self.began)
            if ahead_s > POLL_S:
                time.sleep(ahead_s)
        if ctx.step + 1 == ctx.job.max_steps and "last" in self.options:
            note_time(self.options["last"])
        return StepResult(metrics=dict.fromkeys(self.names, float(ctx.step)))

    def wait_for_go(self) -> None:
        while not Path(self.options["go"]).exists():
            time.sleep(POLL_S)
        self.began = time.monotonic()
        if "first" in self.options:
            note_time(self.options["first"])
