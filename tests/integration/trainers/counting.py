"""A trainer without torch: numpy state, instant steps, and faults on request (`hyperparams`)."""

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np

from gen_worker.trainer import SampleRequest, StepContext, StepControlHints, StepResult


class Counting:
    def setup(self, ctx: StepContext) -> None:
        self.options = ctx.job.hyperparams
        self._fail_in("setup")

    def configure(self, ctx: StepContext) -> dict[str, Any]:
        self._fail_in("configure")
        return {"sum": 0.0, "weights": np.zeros(self.options.get("size", 4))}

    def prepare_batch(self, raw_batch: Any, state: dict[str, Any], ctx: StepContext) -> Any:
        if ctx.step + 1 == self.options.get("at_step"):
            self._fail_in("prepare_batch")
        return raw_batch

    def train_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> Any:
        value = float(batch) if isinstance(batch, int | float) else float(batch.num_rows)
        state["sum"] += value
        state["weights"] += value * np.random.standard_normal(len(state["weights"]))
        if ctx.step + 1 == self.options.get("at_step"):
            self._fail_in("train_step")
            if self.options.get("do") == "sigterm":
                os.kill(os.getpid(), signal.SIGTERM)
            elif self.options.get("do") == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.options.get("do") == "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            elif self.options.get("do") == "hang":
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(600)
            elif self.options.get("do") == "wait for the stop":
                while not ctx.is_canceled:
                    time.sleep(0.01)
            elif self.options.get("do") == "wrong result":
                return {"loss": 1.0}
            elif self.options.get("do") == "nan":
                state["weights"] *= np.nan
        control = StepControlHints(skip_cadence_emit=True) if self.options.get("quiet") else None
        return StepResult(metrics={"loss": state["sum"]}, control=control)

    def state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        self._fail_in("state_dict")
        return dict(state)

    def load_state_dict(self, state: dict[str, Any], payload: dict[str, Any], ctx: StepContext) -> None:
        self._fail_in("load_state_dict")
        state.update(payload)

    def _fail_in(self, hook: str) -> None:
        if self.options.get("fail_in") == hook:
            raise RuntimeError(f"{hook} went wrong")


class Sampling(Counting):
    def sample(
        self, *, state: Any, step: int, request: SampleRequest, output_dir: str, ctx: StepContext
    ) -> None:
        if self.options.get("do") == "kill in sample":
            os.kill(os.getpid(), signal.SIGKILL)
        np.random.standard_normal(100)  # must not move the training stream
        text = "" if self.options.get("empty_sample") else f"{request.prompts} {request.seed}"
        (Path(output_dir) / "sample.txt").write_text(text)


class OwnFiles(Counting):
    def save_checkpoint(
        self, *, state: Any, step: int, output_dir: str, final: bool, ctx: StepContext
    ) -> dict[str, Any]:
        np.random.standard_normal(10)  # must not move the training stream
        (Path(output_dir) / "own.txt").write_text(f"{step} {state['sum']}")
        return {"own_step": step}

    def load_checkpoint(
        self, *, state: Any, checkpoint_dir: str, payload: dict[str, Any], ctx: StepContext
    ) -> None:
        written = (Path(checkpoint_dir) / "own.txt").read_text()
        assert written == f"{payload['own_step']} {state['sum']}", written


class EmaSampling(Counting):
    """Swaps other weights in to sample, fails, and leaves them there."""

    def sample(
        self, *, state: Any, step: int, request: SampleRequest, output_dir: str, ctx: StepContext
    ) -> None:
        state["weights"] = np.full(4, -999.0)
        raise RuntimeError("sampling went wrong")


class PayloadOnly(Counting):
    """Its `save_checkpoint` writes no file: only what it returns must come back."""

    def save_checkpoint(
        self, *, state: Any, step: int, output_dir: str, final: bool, ctx: StepContext
    ) -> dict[str, Any]:
        return {"own_step": step}

    def load_checkpoint(
        self, *, state: Any, checkpoint_dir: str, payload: dict[str, Any], ctx: StepContext
    ) -> None:
        state["sum"] += 1000.0 * payload["own_step"]


class Forking(Counting):
    """Has a child process of its own that only SIGTERM ends."""

    def setup(self, ctx: StepContext) -> None:
        import multiprocessing

        super().setup(ctx)
        self.child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
        self.child.start()


class Speaking(Counting):
    """Fails with a text of the test's choice."""

    def train_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> Any:
        raise ValueError(self.options["text"].encode("ascii").decode("unicode_escape"))


class Careless(Counting):
    """Mistakes that are the author's, not the worker's."""

    def train_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> Any:
        if self.options["mistake"] == "sets the context":
            ctx.step = 3  # type: ignore[misc]
        return StepResult(0.5)  # type: ignore[arg-type]


class Spying(Counting):
    """Writes down what code of this worker, and a program that it starts, can find of its environment."""

    def setup(self, ctx: StepContext) -> None:
        found = [f"{name}={value}" for name, value in os.environ.items()]
        found.append(subprocess.run(["env"], capture_output=True, text=True, check=True).stdout)
        found += [Path(f"/proc/{process}/cmdline").read_text() for process in (os.getpid(), os.getppid())]
        Path(f"spied-{os.getpid()}.txt").write_text("\n".join(found))
        print(found)
        super().setup(ctx)
