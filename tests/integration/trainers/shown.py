"""A trainer for pictures and pages: smooth curves, chosen lines in the log, samples. It trains as far as a file allows."""

import math
import shutil
import time
from pathlib import Path
from typing import Any

from gen_worker.trainer import SampleRequest, StepContext, StepResult

LOOK_EVERY_S = 0.01


class Shown:
    """`hyperparams`: gate (a file with the last step that may be trained), scale, fail_at, names (further metrics),
    lines (printed at the first step), num_lines (printed at each step), samples (files to copy)."""

    def setup(self, ctx: StepContext) -> None:
        self.options = ctx.job.hyperparams

    def configure(self, ctx: StepContext) -> dict[str, Any]:
        return {"sum": 0}

    def prepare_batch(self, raw_batch: Any, state: dict[str, Any], ctx: StepContext) -> Any:
        return raw_batch

    def train_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> StepResult:
        step = ctx.step + 1
        self.wait_at_gate(step, ctx)
        if step == self.options.get("fail_at"):
            raise RuntimeError("this step always fails")
        for line in self.options.get("lines", []) if step == 1 else []:
            print(line, flush=True)
        for number in range(self.options.get("num_lines", 0)):
            print(f"step {step}, line {number}", flush=True)
        state["sum"] += int(batch)
        loss = self.options.get("scale", 1.0) * math.exp(-step / 40) * (1 + 0.05 * math.sin(step * 1.7))
        others = {name: loss * (number + 2) for number, name in enumerate(self.options.get("names", []))}
        return StepResult(metrics={"loss": loss, "lr": 1e-3 * (1 - step / 1000), **others})

    def wait_at_gate(self, step: int, ctx: StepContext) -> None:
        gate = self.options.get("gate")
        while gate is not None and not ctx.is_canceled and int(Path(gate).read_text() or 0) < step:
            time.sleep(LOOK_EVERY_S)

    def sample(
        self, *, state: dict[str, Any], step: int, request: SampleRequest, output_dir: str, ctx: StepContext
    ) -> None:
        for path in self.options.get("samples", []):
            shutil.copyfile(path, Path(output_dir, Path(path).name))

    def state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        return dict(state)

    def load_state_dict(self, state: dict[str, Any], payload: dict[str, Any], ctx: StepContext) -> None:
        state.update(payload)
