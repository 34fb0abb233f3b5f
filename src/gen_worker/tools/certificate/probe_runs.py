"""The runs of a certificate: real workers in their own folders, with or without kills and resumes."""

import os
import random
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from gen_worker.contract import failpoints
from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.errors import Category, WorkerError
from gen_worker.tools.certificate.trace import CODE_NAME, PLAN_NAME, KillKind, Moment, Plan, read_trace

STRAIGHT_HASH_SEED = 1
# How errors begin that no other data would avoid.
BREACHES = ("train_step returned ", "StepResult.", "SystemExit")
MID_SAVE = "checkpoint.staged=kill"  # the state is copied, its file is not there yet


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """One kill of a worker."""

    kind: KillKind
    step: int
    words: str

    @property
    def is_at_epoch_end(self) -> bool:
        return self.kind in ("checkpoint", "epoch-end")


class ProbeFailedError(WorkerError):
    """A worker ended unexpectedly."""


class OwnFaultError(WorkerError):
    """The trainer class itself failed: other data would not help."""

    def __init__(self, message: str, *, has_place: bool) -> None:
        super().__init__(message)
        self.has_place = has_place  # the text names a line of the author's code


@dataclass(slots=True, kw_only=True)
class ProbeRun:
    """One run in its folder. Each attempt resumes the one before it."""

    folder: Path
    job: TrainingJobSpec
    base_dir: Path
    attempts: list[int] = field(default_factory=list, init=False)  # exit codes

    def run_attempt(self, plan: Plan, *, hash_seed: int) -> int:
        """Train once; the exit code, below 0 for a signal. Blocks."""
        self.folder.mkdir(parents=True, exist_ok=True)
        job_path = self.folder / "job.json"
        job_path.write_bytes(msgspec.json.encode(self.job))
        (self.folder / PLAN_NAME).write_bytes(msgspec.json.encode(plan))
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TRAINER_")}
        environ = {
            **inherited,
            "WORKER_MODE": "trainer",
            "TRAINER_JOB_SPEC_PATH": str(job_path),
            "TRAINER_ARTIFACTS_DIR": str(self.folder),
            "TRAINER_BASE_DIR": str(self.base_dir),
            "PYTHONHASHSEED": str(hash_seed),
            failpoints.ENV: MID_SAVE if plan.kill == "mid-save" else "",
        }
        command = [sys.executable, "-P", "-m", "gen_worker.entrypoint"]
        with (self.folder / "worker.log").open("ab") as log:
            done = subprocess.run(command, env=environ, stdout=log, stderr=log, check=False)
        self.attempts.append(done.returncode)
        return done.returncode

    def run_straight(self, *, save_step: int = 0, hash_seed: int = STRAIGHT_HASH_SEED) -> list[Moment]:
        """To the end in one attempt; its trace."""
        code = self.run_attempt(Plan(save_step=save_step), hash_seed=hash_seed)
        if code != 0:
            raise ProbeFailedError(self.explain(code))
        return self.trace()

    def run_killed(self, kills: list[Kill], *, save_step: int) -> list[Moment]:
        """Be killed at each of `kills`, then finish; the trace of all attempts. Each has its own hash seed.

        The run may end before the last kill: see `num_kills`.
        """
        plans = [Plan(save_step=save_step, kill=kill.kind, kill_step=kill.step) for kill in kills]
        for number, plan in enumerate([*plans, Plan(save_step=save_step)]):
            code = self.run_attempt(plan, hash_seed=STRAIGHT_HASH_SEED + 1 + number)
            if code == 0:
                break
            if code != -signal.SIGKILL or plan.kill == "none":
                raise ProbeFailedError(f"attempt {number + 1}: {self.explain(code)}")
        return self.trace()

    @property
    def num_kills(self) -> int:
        return self.attempts.count(-signal.SIGKILL)

    def trace(self) -> list[Moment]:
        return read_trace(self.folder)

    def code(self) -> dict[str, str]:
        """The author's files that it imported, with their hashes; empty where it did not end."""
        try:
            return msgspec.json.decode((self.folder / CODE_NAME).read_bytes(), type=dict[str, str])
        except FileNotFoundError:
            return {}

    def checkpoints(self) -> list[tuple[float, int]]:
        """(duration_s, size_bytes) of each that was reported."""
        found = [event for event in self._events() if event.get("event") == "checkpoint"]
        return [(float(event["duration_s"]), int(event["size_bytes"])) for event in found]

    def is_own_fault(self, *, is_data_theirs: bool) -> bool:
        """Whether the trainer class caused the failure. With mock data: only errors that no data would avoid."""
        failed = [event for event in self._events() if event.get("event") == "failed"]
        if not failed:
            return False
        category, error = str(failed[-1]["category"]), str(failed[-1]["error"])
        if is_data_theirs:
            return category == Category.TRAIN_STEP or "(at " in error
        return category == Category.TRAIN_STEP and error.startswith(BREACHES)

    @property
    def has_place(self) -> bool:
        """Whether the last reported error names a line of the author's code."""
        failed = [event for event in self._events() if event.get("event") == "failed"]
        return bool(failed) and "place" in (failed[-1].get("values") or {})

    def explain(self, code: int) -> str:
        """How a worker ended: its reported error, else the last line of its log."""
        failed = [event for event in self._events() if event.get("event") == "failed"]
        if failed:
            return f"{failed[-1]['category']}: {failed[-1]['error']}"
        log = (self.folder / "worker.log").read_text(errors="replace").strip().splitlines()
        return f"the worker exited with code {code}: {log[-1] if log else 'its log is empty'}"

    def _events(self) -> list[dict[str, Any]]:
        try:
            lines = (self.folder / "metrics" / "events.jsonl").read_bytes().splitlines()
        except FileNotFoundError:
            return []
        events = []
        for line in lines:
            try:
                events.append(msgspec.json.decode(line, type=dict))
            except msgspec.DecodeError:
                continue  # half a line, left by a kill
        return events


def plan_kills(
    num_steps: int, steps_per_epoch: int | None, checkpoint_every: int, *, seed: int
) -> tuple[list[Kill], int]:
    """Three kills in their order, and the step of an additional save (0: none).

    One at a random step, one during a save, one at the end of an epoch, or at a second random step where no epoch ends.
    """
    draw = random.Random(seed)
    mid_save = Kill(kind="mid-save", step=0, words="during its next save")

    def at_random(low: int, high: int) -> Kill:
        step = draw.randint(low, max(low, high))
        return Kill(kind="step", step=step, words=f"after step {step}")

    boundary = steps_per_epoch if steps_per_epoch and steps_per_epoch <= num_steps else 0

    def at_boundary(kind: KillKind, saved: str) -> Kill:
        return Kill(kind=kind, step=boundary, words=f"at the epoch boundary, step {boundary}, {saved}")

    if boundary and boundary <= num_steps // 2:
        random_kill = at_random(boundary + 1, num_steps - 1)
        return [at_boundary("checkpoint", "saved"), random_kill, mid_save], boundary
    early = at_random(min(checkpoint_every + 1, num_steps - 1), min(2 * checkpoint_every, num_steps - 1))
    if boundary == num_steps:
        return [early, mid_save, at_boundary("epoch-end", "not saved")], 0
    if boundary:
        return [early, mid_save, at_boundary("checkpoint", "saved")], boundary
    return [early, mid_save, at_random(min(early.step + 1, num_steps - 1), num_steps - 1)], 0
