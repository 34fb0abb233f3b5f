"""A trainer that witnesses what must never be: two processes of one run, or of one device, at once."""

import contextlib
import fcntl
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from gen_worker.launcher.process_family import MARK_FD
from gen_worker.trainer import StepContext, StepResult


class Witnessed:
    """`hyperparams`: witness (a folder), step_ms, fail_at, die_at, flood_bytes, is_deaf, leaves, num_values."""

    def setup(self, ctx: StepContext) -> None:
        self.options = ctx.job.hyperparams
        self.folder = Path(self.options["witness"])
        self.locks = [self.take(f"run-{ctx.job.run_id}", ctx)]
        for device in filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")):
            self.locks.append(self.take(f"device-{device}", ctx))
        if self.options.get("is_deaf"):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self.options.get("leaves"):
            leave()

    def take(self, name: str, ctx: StepContext) -> int:
        """Held until this process is gone, however it goes."""
        fd = os.open(self.folder / name, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with (self.folder / "violations").open("a") as file:
                file.write(f"{ctx.job.run_id}: {name} is held by another process\n")
        return fd

    def configure(self, ctx: StepContext) -> dict[str, Any]:
        return {"sum": 0}

    def prepare_batch(self, raw_batch: Any, state: dict[str, Any], ctx: StepContext) -> Any:
        return raw_batch

    def train_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> StepResult:
        state["sum"] += int(batch)
        step = ctx.step + 1
        if step == self.options.get("fail_at"):
            raise RuntimeError("this step always fails")
        if step == self.options.get("die_at") and not (self.folder / f"died-{ctx.job.run_id}").exists():
            (self.folder / f"died-{ctx.job.run_id}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.options.get("flood_bytes"):
            sys.stdout.write("x" * 79 + "\n")
            sys.stdout.write(("y" * 1023 + "\n") * (self.options["flood_bytes"] >> 10))
        time.sleep(self.options.get("step_ms", 0) / 1000)
        values = {f"value-{number}": float(step) for number in range(self.options.get("num_values", 0))}
        return StepResult(metrics={"loss": float(state["sum"]), **values})

    def state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        return dict(state)

    def load_state_dict(self, state: dict[str, Any], payload: dict[str, Any], ctx: StepContext) -> None:
        state.update(payload)


def leave() -> None:
    """Start a process that holds our locks and has nothing else of ours: neither parent, session, group nor mark."""
    middle = os.fork()
    if middle == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            with contextlib.suppress(OSError):
                os.close(MARK_FD)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            time.sleep(600)
        os._exit(0)
    os.waitpid(middle, 0)
