"""`python -m gen_worker.tools.certificate MODULE:SYMBOL --output DIR`: is a trainer class sound, and does it resume exactly?

It trains a few steps in one attempt, then the same steps with three kills and resumes, in real workers, and compares
batches, losses and state step by step. Where they differ, further runs look for the cause. Stdout is JSON lines:
`certificate_progress`, then one `certificate` (also kept in the folder) or `certificate_rejected`.
"""

import argparse
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gen_worker.contract.job.rules import read_job_spec
from gen_worker.contract.job.spec import CheckpointsSpec, RetrySpec, TrainingJobSpec, UploadsSpec
from gen_worker.contract.sizes import show_bytes
from gen_worker.errors import PluginError, SpecError, StartupError, WorkerError
from gen_worker.tools.certificate.causes import (
    Cause,
    Divergence,
    explain_resume,
    explain_set_order,
    explain_unrepeatable,
    find_divergence,
    first_difference,
)
from gen_worker.tools.certificate.notes import find_notes, measure
from gen_worker.tools.certificate.probe_runs import (
    STRAIGHT_HASH_SEED,
    Kill,
    OwnFaultError,
    ProbeFailedError,
    ProbeRun,
    plan_kills,
)
from gen_worker.tools.certificate.trace import Moment, Plan, StepTrace, StoppedClock
from gen_worker.tools.program import print_record
from gen_worker.trainer.api import load_trainer_plugin
from gen_worker.trainer.author.hooks import source_line
from gen_worker.trainer.author.plugin_import import find_symbol, import_author_module, split_ref

VERSION = "trainer_certificate.v1"
DEFAULT_STEPS, MIN_STEPS, MAX_DEFAULT_STEPS = 12, 6, 200
TRACE = f"{StepTrace.__module__}:{StepTrace.__name__}"
CLOCK = f"{StoppedClock.__module__}:{StoppedClock.__name__}"
MAX_LOG_BYTES = 64 << 10  # that is kept of a run


class Check(msgspec.Struct, frozen=True, kw_only=True):
    check: str
    is_passed: bool
    message: str


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """The result. `is_sound`: every check passed."""

    event: str = "certificate"
    schema_version: str = VERSION
    trainer: str
    is_sound: bool
    folder: str
    num_steps: int = 0
    code: dict[str, str] = {}  # file of the author's -> SHA-256: it says nothing about other code
    checks: list[Check]
    kills: list[Kill] = []
    divergence: Divergence | None = msgspec.field(
        default=None, name="parting"
    )  # its name since the first release
    cause: Cause | None = None
    notes: list[str] = []
    measures: dict[str, float] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """A trainer class, the job to train it on, and the folder for the runs."""

    trainer: str
    job: TrainingJobSpec
    base_dir: Path
    folder: Path
    kept: Path  # where the certificate is kept
    has_config: bool
    is_fixed_length: bool  # the caller named the steps
    seed: int = 0

    def run(self) -> Certificate:
        """Blocks for minutes. WorkerError where the class cannot be loaded, or does not train on this data."""
        require_symbol(self.trainer)
        try:
            plugin = load_trainer_plugin(self.trainer)
        except PluginError as fault:
            check = Check(check="hooks", is_passed=False, message=str(fault))
            return self._certificate(None, [], [check])
        checks = [Check(check="hooks", is_passed=True, message="all hooks exist and are callable")]
        try:
            straight_run = self._train_straight()
        except OwnFaultError as fault:
            message = str(fault) if fault.has_place else f"{fault} (at {source_line(plugin.train_step)})"
            checks.append(Check(check="straight", is_passed=False, message=message))
            return self._certificate(None, [], checks)
        straight, job = straight_run.trace(), straight_run.job
        if straight_run.attempts[-1] != 0:
            message = straight_run.explain(straight_run.attempts[-1])
            checks.append(Check(check="straight", is_passed=False, message=message))
            return self._certificate(straight_run, straight, checks)
        planned, save_step = plan_kills(
            straight[-1].step, straight[0].steps_per_epoch, job.checkpoint_every, seed=self.seed
        )
        _tell_progress(f"the same steps with kills: {'; '.join(kill.words for kill in planned)}")
        killed_run = self._probe("killed", job)
        try:
            killed = killed_run.run_killed(planned, save_step=save_step)
        except ProbeFailedError as fault:
            checks.append(Check(check="resume", is_passed=False, message=str(fault)))
            return self._certificate(straight_run, straight, checks, planned[: killed_run.num_kills])
        kills = planned[: killed_run.num_kills]
        divergence = find_divergence(straight, killed)
        checks += _judge(straight, killed, len(kills), divergence)
        cause = None if divergence is None else self._find_cause(job, straight, killed, divergence)
        notes = find_notes(straight, killed, kills, divergence)
        if len(kills) < len(planned):
            notes.append(f"the run ended before it could be killed {planned[len(kills)].words}")
        return self._certificate(straight_run, straight, checks, kills, divergence, cause, notes)

    def _train_straight(self) -> ProbeRun:
        """A run that trained at least a step, whatever came then; ProbeFailedError where it did not."""
        run = self._try_straight(self.job)
        per_epoch = run.trace()[0].steps_per_epoch or 0
        is_short = (self.job.max_steps or 0) <= per_epoch <= MAX_DEFAULT_STEPS
        if run.attempts == [0] and self.job.mock_batches is None and is_short and not self.is_fixed_length:
            shutil.rmtree(run.folder)
            # Long enough to include the end of an epoch.
            return self._try_straight(_with_steps(self.job, per_epoch + max(4, per_epoch // 4)))
        return run

    def _try_straight(self, job: TrainingJobSpec) -> ProbeRun:
        _tell_progress(f"{job.max_steps} steps without a kill")
        run = self._probe("straight", job)
        code = run.run_attempt(Plan(), hash_seed=STRAIGHT_HASH_SEED)
        if any(moment.kind == "step" for moment in run.trace()):
            return run
        if run.is_own_fault(is_data_theirs=self.has_config):
            raise OwnFaultError(run.explain(code), has_place=run.has_place)
        if self.has_config:
            raise ProbeFailedError(run.explain(code))
        raise ProbeFailedError(
            f"{self.trainer} does not train on the mock batches 0, 1, 2, …: {run.explain(code)}\n"
            "give a job with data for it: --config JOB"
        )

    def _find_cause(
        self, job: TrainingJobSpec, straight: list[Moment], killed: list[Moment], divergence: Divergence
    ) -> Cause:
        _tell_progress(
            f"the runs differ at step {divergence.step} in {divergence.name}: looking for the cause"
        )
        try:
            again = self._probe("again", job).run_straight()
            if find_divergence(straight, again) is not None:
                stopped = msgspec.structs.replace(job, callbacks=[CLOCK, *job.callbacks])
                pair = [self._probe(name, stopped).run_straight() for name in ("stopped-1", "stopped-2")]
                is_equal = find_divergence(pair[0], pair[1]) is None
                return explain_unrepeatable(straight, again, agrees_when_stopped=is_equal)
            hashed_run = self._probe("hash-seed", job)
            hashed = find_divergence(straight, hashed_run.run_straight(hash_seed=STRAIGHT_HASH_SEED + 1))
        except ProbeFailedError as fault:  # keep what was found so far
            return Cause(
                cause="unknown",
                message="a run that looks for the cause failed",
                evidence=[str(fault)],
                remedy="read the logs of the runs, and try again",
            )
        return explain_resume(straight, killed, divergence) if hashed is None else explain_set_order(hashed)

    def _probe(self, name: str, job: TrainingJobSpec) -> ProbeRun:
        return ProbeRun(folder=self.folder / name, job=job, base_dir=self.base_dir)

    def _certificate(
        self,
        run: ProbeRun | None,
        straight: list[Moment],
        checks: list[Check],
        kills: Sequence[Kill] = (),
        divergence: Divergence | None = None,
        cause: Cause | None = None,
        notes: Sequence[str] = (),
    ) -> Certificate:
        return Certificate(
            trainer=self.trainer,
            is_sound=all(check.is_passed for check in checks),
            folder=str(self.kept),
            num_steps=straight[-1].step if straight else 0,
            code={} if run is None else run.code(),
            checks=checks,
            kills=list(kills),
            divergence=divergence,
            cause=cause,
            notes=list(notes),
            measures={} if run is None else measure(straight, run.checkpoints()),
        )


def make_job(trainer: str, config: Path | None, num_steps: int | None) -> TrainingJobSpec:
    """The job of `config` with few steps and without uploads, or a job of mock batches."""
    steps = num_steps or DEFAULT_STEPS
    if config is None:
        job = TrainingJobSpec(run_id="certificate", mock_batches=list(range(steps)))
    else:
        job = read_job_spec(config)
        if job.resources.processes * job.resources.nodes > 1:
            raise SpecError(str(config), ["resources.processes: this check needs 1 process: set it to 1"])
        if job.mock_batches is not None:
            steps = min(steps, len(job.mock_batches))
    if steps < MIN_STEPS:
        raise StartupError(f"{steps} steps are too few for three kills: expected at least {MIN_STEPS}")
    job = msgspec.structs.replace(
        job,
        run_id="certificate",
        trainer=trainer,
        metric_every=1,
        sample_every=0,
        epochs=None,
        early_stopping=None,
        fast_dev_run=0,
        callbacks=[*job.callbacks, TRACE],
        uploads=UploadsSpec(),
        resume_from_latest=True,
        checkpoints=CheckpointsSpec(format=job.checkpoints.format),
        retry=RetrySpec(),
        time_limit_s=None,
        test=None,
    )
    return _with_steps(job, steps)


def _with_steps(job: TrainingJobSpec, num_steps: int) -> TrainingJobSpec:
    return msgspec.structs.replace(job, max_steps=num_steps, checkpoint_every=max(2, num_steps // 4))


def _judge(
    straight: list[Moment], killed: list[Moment], num_kills: int, divergence: Divergence | None
) -> list[Check]:
    num_resumes, lost = _find_lost(killed)
    num_steps = straight[-1].step
    missing = {m.step for m in straight if m.kind == "step"} - {m.step for m in killed if m.kind == "step"}
    if divergence is not None:
        message = (
            f"the runs differ at step {divergence.step} of attempt {divergence.attempt} in {divergence.name}:"
            f" {divergence.found}, expected {divergence.expected}"
        )
    elif missing:
        message = f"the killed run never trained step {min(missing)}"
    elif not num_resumes:
        message = f"{num_kills} kills and no resume: nothing could be compared"
    else:
        message = f"{num_steps} steps with {num_kills} kills equal {num_steps} steps without: batches, losses, state"
    return [
        Check(
            check="state",
            is_passed=not lost,
            message=lost or f"equal to what was saved after each of {num_resumes} resumes",
        ),
        Check(
            check="resume", is_passed=divergence is None and not missing and num_resumes > 0, message=message
        ),
    ]


def _find_lost(killed: list[Moment]) -> tuple[int, str]:
    """(number of resumes, what differed from the saved value after one; empty: nothing)."""
    last: dict[int, Moment] = {}
    num_resumes, lost = 0, ""
    for moment in killed:
        if moment.kind == "step":
            last[moment.step] = moment
        elif moment.step in last:
            num_resumes += 1
            name = first_difference(_digests(last[moment.step]), _digests(moment))
            if name is not None and not lost:
                lost = f"{name} of step {moment.step} differs after load_state_dict from what was saved"
    return num_resumes, lost


def _digests(moment: Moment) -> dict[str, str]:
    return {path: leaf.digest for path, leaf in moment.state.items()}


def render_text(certificate: Certificate) -> str:
    verdict = "sound" if certificate.is_sound else "NOT sound"
    lines = [f"{certificate.trainer} is {verdict}"]
    lines += [
        f"  {'ok  ' if check.is_passed else 'FAIL'}  {check.check}: {check.message}"
        for check in certificate.checks
    ]
    lines += [f"  killed {kill.words}" for kill in certificate.kills]
    if certificate.cause is not None:
        lines.append(f"  likely cause: {certificate.cause.cause}: {certificate.cause.message}")
        lines += [f"    - {evidence}" for evidence in certificate.cause.evidence]
        lines.append(f"    what to do: {certificate.cause.remedy}")
    lines += [f"  note: {note}" for note in certificate.notes]
    measures = certificate.measures
    if measures:
        growth = measures["rss_growth_bytes_per_step"]
        lines.append(
            f"  a step takes {measures['author_s_per_step'] * 1e3:.2f} ms in your code and"
            f" {measures['loop_s_per_step'] * 1e3:.2f} ms in the loop; memory {show_bytes(measures['rss_bytes'])},"
            f" {'-' if growth < 0 else '+'}{show_bytes(abs(growth))} a step"
        )
    if "checkpoint_s" in measures:
        size = show_bytes(measures["checkpoint_bytes"])
        lines.append(f"  a checkpoint takes {measures['checkpoint_s']:.3f} s ({size})")
    lines.append(f"  kept in {certificate.folder}")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """0: sound; 1: not sound; the exit code of a worker where the check could not run."""
    parser = argparse.ArgumentParser(prog="python -m gen_worker.tools.certificate", description=__doc__)
    parser.add_argument("trainer", metavar="MODULE:SYMBOL")
    parser.add_argument("--config", type=Path, metavar="JOB")
    parser.add_argument("--steps", type=int, metavar="N")
    parser.add_argument("--seed", type=int, default=0, help="of the random kill (0)")
    parser.add_argument("--output", type=Path, metavar="DIR", required=True, help="a new folder for the runs")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep certificate and logs there (default: with the runs)"
    )
    asked = parser.parse_args(arguments)
    folder: Path = asked.output.absolute()
    kept: Path = (asked.keep or asked.output).absolute()
    try:
        if folder.exists() and any(folder.iterdir()):
            raise StartupError(f"{folder} is not empty: give a new folder")
        _require_writable(kept)
        config: Path | None = asked.config and asked.config.absolute()
        examination = Examination(
            trainer=asked.trainer,
            job=make_job(asked.trainer, config, asked.steps),
            base_dir=Path.cwd() if config is None else config.parent,
            folder=folder,
            kept=kept,
            has_config=config is not None,
            is_fixed_length=asked.steps is not None,
            seed=asked.seed,
        )
        certificate = examination.run()
        text = render_text(certificate)
        _keep(certificate, text, kept, folder)
    except WorkerError as fault:
        print_record({"event": "certificate_rejected", "trainer": asked.trainer, "error": str(fault)})
        return int(fault.exit_code)
    print_record({**msgspec.to_builtins(certificate), "text": text})
    return 0 if certificate.is_sound else 1


def require_symbol(trainer: str) -> None:
    """PluginError where there is no such module or symbol, or it cannot be imported."""
    module_name, symbol = split_ref(trainer)
    module = import_author_module(module_name)
    if symbol is not None:
        find_symbol(module, symbol)


def _keep(certificate: Certificate, text: str, kept: Path, runs: Path) -> None:
    """Write the certificate as JSON and text, and the end of the logs of runs in another folder."""
    mask = os.umask(0o077)  # a new home is readable by its owner alone
    try:
        place = (
            kept if kept.exists() else kept.with_name(f".{kept.name}")
        )  # it appears with all that is in it
        place.mkdir(parents=True, exist_ok=True)
        (place / "certificate.json").write_bytes(
            msgspec.json.format(msgspec.json.encode(certificate)) + b"\n"
        )
        (place / "certificate.txt").write_text(text + "\n")
        for log in sorted(runs.glob("*/worker.log")) if runs != kept else ():
            (place / f"{log.parent.name}.log").write_bytes(log.read_bytes()[-MAX_LOG_BYTES:])
        if place != kept:
            place.rename(kept)
    except OSError as fault:
        raise StartupError(_not_kept(kept, str(fault.strerror))) from fault
    finally:
        os.umask(mask)


def _require_writable(kept: Path) -> None:
    nearest = next(place for place in (kept, *kept.parents) if place.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise StartupError(_not_kept(kept, f"{nearest} cannot be written"))


def _not_kept(kept: Path, why: str) -> str:
    return f"the certificate cannot be written to {kept}: {why}; give another folder with --output"


def _tell_progress(message: str) -> None:
    print_record({"event": "certificate_progress", "message": message})
