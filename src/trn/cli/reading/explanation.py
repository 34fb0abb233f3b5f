"""Why a run is where it is: what, why and what next, made from what the registry and the run's folder hold. Pure."""

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

import msgspec

from trn.cli.durations import say_duration
from trn.cli.reading.remedies import find_remedy
from trn.core.cause_words import say_cause, say_what
from trn.core.causes import CPU, DOCTOR, GPU, MEMORY, NO_CAUSE, NOT_RETRIED, Cause
from trn.core.runs import PREDICTION, SERVER, TRAINING, AttemptRecord, RunRecord, RunState
from trn.core.serving.records import ServedModel

SILENT_MS = 30_000
DEFAULT_GRACE_S = 60.0
MAX_HOLDERS = 5
START_DAEMON = "`trn daemon start`"
MODEL_LOAD = "model-load"
BEFORE_STEP_1 = frozenset({"startup", "input", MODEL_LOAD})  # a resume that ends so repeats itself
CHECKPOINTS = "checkpoints"  # below a run's folder
LAST_LOSS = "its last train/loss is {}"
STOP_AT_NAN = "the callback gen_worker.trainer.callbacks:NonFiniteGuard stops such a run, or goes back"
PREDICT_AGAIN = "submit it again: what it has written is kept"


class Explanation(NamedTuple):
    """Three short lines: `what` happens, `why` (with whose `fault`), and what is `next` or what to do (`remedy`)."""

    run_id: str
    state: str
    what: str
    why: str = ""
    fault: str = ""  # job, machine, trn; empty: no fault
    next: str = ""  # what happens without anybody's doing
    remedy: str = ""  # what a person can do
    cause: Cause = NO_CAUSE

    @property
    def lines(self) -> list[str]:
        whose = f" (fault: {self.fault})" if self.fault else ""
        why = f"Why: {_end(f'{self.why}{whose}')}" if self.why else ""
        following = "; ".join(part for part in (self.next, self.remedy) if part)
        next_ = f"Next: {_end(following)}" if following else ""
        return [line for line in (_end(f"{self.run_id} {self.what}"), why, next_) if line]

    def record(self) -> dict[str, Any]:
        """For JSON."""
        sentence = " ".join(self.lines)
        return {**self._asdict(), "cause": msgspec.to_builtins(self.cause), "sentence": sentence}


class Checkpoint(NamedTuple):
    """The newest that a resume would look at first."""

    path: str
    step: int


class Surroundings(NamedTuple):
    """What a run's own record does not say. `devices`, `cpus` and `memory_mb` are held now, by these runs."""

    devices: Mapping[str, Sequence[str]] = {}
    cpus: Mapping[str, int] = {}
    memory_mb: Mapping[str, int] = {}
    num_ahead: int = 0  # of the runs that wait
    worker_gone: str = ""  # how we know that its process does not live, in words
    checkpoint: Checkpoint | None = None
    unsound: str = ""  # why a resume passes over the newest one that was saved: values that are not finite
    served: ServedModel | None = None  # of a server, the newest of its name


NOTHING_KNOWN = Surroundings()


def explain(
    run: RunRecord,
    attempts: Sequence[AttemptRecord],
    *,
    at_ms: int,
    is_daemon_up: bool,
    around: Surroundings = NOTHING_KNOWN,
) -> Explanation:
    if run.state is RunState.PENDING:
        return _pending(run, attempts, at_ms=at_ms, is_daemon_up=is_daemon_up, around=around)
    if run.state in (RunState.DISPATCHING, RunState.RUNNING):
        return _live(run, attempts, at_ms=at_ms, is_daemon_up=is_daemon_up, around=around)
    took = say_duration((run.ended_ms or at_ms) - run.submitted_ms)
    if run.kind == SERVER:
        return _ended_server(run, took, around.served)
    if run.state is RunState.COMPLETED:
        early = f"stopped early: {run.stop_reason}" if run.stop_reason else ""
        what, loss = f"completed at step {run.step} after {took}", run.metrics.get("train/loss", 0.0)
        spoilt = "" if math.isfinite(loss) else LAST_LOSS.format(loss)
        unsound = f"its newest checkpoint has {around.unsound}" if around.unsound else ""
        why = "; ".join(filter(None, (early, spoilt, unsound)))
        return _say(run, what, why=why, remedy=STOP_AT_NAN if spoilt or unsound else "")
    if run.state is RunState.CANCELLED:
        remedy = PREDICT_AGAIN
        if run.kind != PREDICTION:
            resumed = f"`{how_to_resume(run)}` {where_it_resumes(run, around.checkpoint)}"
            remedy = resumed if run.attempt else "submit it again to train it"
        return _say(
            run, f"was cancelled at step {run.step} after {took}", why=say_what(run.cause), remedy=remedy
        )
    of = f" of {run.end_step}" if run.end_step else ""
    is_plain = run.cause.values.get("outlook") == NOT_RETRIED  # whose fault it is says why
    return _say(
        run,
        f"failed at step {run.step}{of} after {took} ({_count_attempts(run)})",
        why=say_what(run.cause) if is_plain else say_cause(run.cause),
        fault=run.cause.fault,
        remedy=_remedy(run, _last_cause(run, attempts), around),
    )


def _ended_server(run: RunRecord, took: str, served: ServedModel | None) -> Explanation:
    what = f"{'was' if run.state is RunState.CANCELLED else ''} {run.state.lower()} after {took}".strip()
    why, again = say_what(run.cause), how_to_serve(run, served)
    if run.state is not RunState.FAILED:
        return _say(run, what, why=why, remedy=again)
    if run.cause.id == MODEL_LOAD:  # the same would fail again: its code was frozen when it was trained
        again = _how_to_correct(run)
    remedy = f"`trn logs {run.run_id}` shows its output; {again}" if again else ""
    return _say(
        run,
        f"{what} ({_count_attempts(run)})",
        why=say_cause(run.cause),
        fault=run.cause.fault,
        remedy=remedy,
    )


def _how_to_correct(run: RunRecord) -> str:
    """What makes a checkpoint with other code than that which a server could not load."""
    version = (run.config.get("serving") or {}).get("version")
    if not isinstance(version, dict):
        return ""
    source, code = version.get("run_id"), shlex.quote(run.frozen_from or run.base_dir or ".")
    return (
        f"its code is that of {source}: correct it, then `trn resume {source} --code {code} --set max_steps=…` saves a"
        " checkpoint with it"
    )


def how_to_serve(run: RunRecord, served: ServedModel | None) -> str:
    """What serves again what an ended server served last, or at first where more is not known; empty without that."""
    if served is not None and served.run_id == run.run_id and served.live is not None:
        return f"`trn serve {served.live.label} --name {run.name}` serves it again"
    version = (run.config.get("serving") or {}).get("version")
    if not isinstance(version, dict):
        return ""
    return f"`trn serve {version.get('run_id')}@{version.get('step')} --name {run.name}` serves it again"


def how_to_resume(run: RunRecord) -> str:
    """The command that continues an ended run. One that did all that was asked of it has to be given more.

    Empty where there is no more that could be asked for (mock batches are one pass), and of a run that does not train.
    """
    if run.kind != TRAINING:
        return ""
    if run.state is not RunState.COMPLETED or (run.end_step is not None and run.step < run.end_step):
        return f"trn resume {run.run_id}"
    batches, max_steps = run.config.get("mock_batches"), run.config.get("max_steps")
    if isinstance(batches, list) and len(batches) <= run.step:
        return ""
    is_by_steps = isinstance(max_steps, int) and max_steps <= run.step
    return f"trn resume {run.run_id} --set {'max_steps' if is_by_steps else 'epochs'}=…"


def where_it_resumes(run: RunRecord, checkpoint: Checkpoint | None) -> str:
    """What a resume of it does, as a verb."""
    if checkpoint is not None:
        return f"continues from step {checkpoint.step} ({checkpoint.path.rpartition('/')[2]})"
    start = run.config.get("resume_checkpoint_path")
    if start:
        return f"starts at {start} again: it saved no checkpoint"
    return "starts at step 0: it saved no checkpoint"


def _pending(
    run: RunRecord,
    attempts: Sequence[AttemptRecord],
    *,
    at_ms: int,
    is_daemon_up: bool,
    around: Surroundings,
) -> Explanation:
    cause = run.cause
    what = f"has been pending for {say_duration(at_ms - run.submitted_ms)}"
    fault = cause.fault or (_last_cause(run, attempts).fault if run.attempt else "")
    if not is_daemon_up:
        why = f"no daemon is running; last known cause: {run.reason}"
        return _say(run, what, why=why, fault=fault, remedy=START_DAEMON)
    if run.not_before_ms > at_ms:
        number = cause.values.get("next_attempt", run.attempt + 1)
        when = f"attempt {number} starts in {say_duration(run.not_before_ms - at_ms)}"
        return _say(run, what, why=say_what(cause), fault=fault, next=when)
    if DOCTOR in cause.waits_for:
        next_ = "checked again every two minutes and when packages change; `trn doctor` shows the details"
        return _say(run, what, why=say_what(cause), fault=fault, next=next_)
    holders = _find_holders(cause, around)
    why = run.reason
    if holders:
        why += f", held by {_list(holders)}"
    if around.num_ahead:
        why += f"; {around.num_ahead} {'run is' if around.num_ahead == 1 else 'runs are'} ahead in the queue"
    first = next(iter(holders), "")
    if cause.id == "waits-for-disk":
        remedy = (
            "free some space there, with `trn prune` for example, or lower `min_free_bytes` in settings.toml"
        )
        return _say(run, what, why=why, fault=fault, next="it starts when there is room", remedy=remedy)
    return _say(
        run,
        what,
        why=why,
        fault=fault,
        next="it starts by itself",
        remedy=f"`trn cancel {first}` would free resources now" if first else "",
    )


def _find_holders(cause: Cause, around: Surroundings) -> dict[str, str]:
    """The runs that hold what it waits for, and how much each of them."""
    held: dict[str, list[str]] = {}
    wanted = set(cause.waits_for)
    for run_id, device_ids in around.devices.items():
        if GPU in wanted or wanted & set(device_ids):
            held.setdefault(run_id, []).extend(device_ids)
    if CPU in wanted:
        for run_id, cpus in around.cpus.items():
            held.setdefault(run_id, []).append(f"{cpus} CPU{'' if cpus == 1 else 's'}")
    if MEMORY in wanted:
        for run_id, memory_mb in around.memory_mb.items():
            if memory_mb:
                held.setdefault(run_id, []).append(f"{memory_mb} MB")
    return {run_id: f"{run_id} ({', '.join(words)})" for run_id, words in held.items()}


def _list(holders: Mapping[str, str]) -> str:
    more = f" and {len(holders) - MAX_HOLDERS} more" if len(holders) > MAX_HOLDERS else ""
    return ", ".join(list(holders.values())[:MAX_HOLDERS]) + more


def _live(
    run: RunRecord,
    attempts: Sequence[AttemptRecord],
    *,
    at_ms: int,
    is_daemon_up: bool,
    around: Surroundings,
) -> Explanation:
    of = f" of {run.end_step}" if run.end_step else ""
    where = "" if run.kind == SERVER else f" at step {run.step}{of}"
    newest = attempts[-1] if attempts else None
    number = f"attempt {run.attempt}"
    start_daemon = "" if is_daemon_up else f"{START_DAEMON}: no daemon watches it"
    if around.worker_gone:
        what = f"has stopped{where} ({number}); its end is not recorded yet"
        next_ = "the daemon is recording it" if is_daemon_up else "the next daemon records it and may retry"
        return _say(
            run, what, why=around.worker_gone, next=next_, remedy="" if is_daemon_up else START_DAEMON
        )
    if run.is_cancel_wanted:
        what = f"is stopping{where}"
        does = "answers what was asked" if run.kind == SERVER else "saves"
        next_ = f"it {does} and exits within its grace period, else it is killed" if is_daemon_up else ""
        return _say(run, what, why=run.cancel_reason or "cancelled", next=next_, remedy=start_daemon)
    if run.state is RunState.DISPATCHING:
        next_ = "it starts by itself" if is_daemon_up else "the next daemon finds out whether it started"
        return _say(run, f"is starting ({number})", next=next_, remedy="" if is_daemon_up else START_DAEMON)
    since = f" for {say_duration(at_ms - newest.launched_ms)}" if newest is not None else ""
    what = f"{'has been' if since else 'is'} running{since}: {number}, {_say_work(run, of, around)}"
    over_ms = _over_limit_ms(run, newest, at_ms)
    if over_ms > 0:
        return _say_over(run, what, over_ms, is_daemon_up=is_daemon_up)
    silent_ms = at_ms - newest.last_heartbeat_ms if newest is not None and newest.last_heartbeat_ms else 0
    if silent_ms > SILENT_MS and is_daemon_up:
        why = f"no heartbeat for {say_duration(silent_ms)}"
        next_ = f"killed and retried at the heartbeat timeout; `trn logs {run.run_id}` shows its output"
        return _say(run, what, why=why, next=next_)
    return _say(run, what, remedy=start_daemon)


def _say_work(run: RunRecord, of: str, around: Surroundings) -> str:
    """How far it is; of a server, what it answers with and where."""
    if run.kind != SERVER:
        return f"step {run.step}{of}"
    served = around.served
    if served is None or served.run_id != run.run_id or not served.is_ready or served.live is None:
        return "not ready yet"
    return f"serves {served.live.label} at {served.url}"


def _over_limit_ms(run: RunRecord, newest: AttemptRecord | None, at_ms: int) -> int:
    """For how long its time limit is over; its worker counts from a little later than we do."""
    limit_s = run.config.get("time_limit_s")
    if newest is None or not isinstance(limit_s, int | float):
        return 0
    return at_ms - newest.launched_ms - round(limit_s * 1000)


def _say_over(run: RunRecord, what: str, over_ms: int, *, is_daemon_up: bool) -> Explanation:
    """The worker stops by itself at the end of the step; a step that does not end it leaves, after its grace."""
    limit_s, grace_s = run.config["time_limit_s"], run.config.get("grace_s", DEFAULT_GRACE_S)
    remedies = [] if is_daemon_up else [START_DAEMON]
    if run.kind == TRAINING:
        remedies.append(f"`trn resume {run.run_id} --set time_limit_s=…`")
    return _say(
        run,
        what,
        why=f"its time limit of {limit_s:g} s ended {say_duration(over_ms)} ago",
        next=f"it stops after this {'step' if run.kind == TRAINING else 'batch'}, or is stopped after its grace period of"
        f" {grace_s:g} s; not retried",
        remedy=", then ".join(remedies),
    )


def _last_cause(run: RunRecord, attempts: Sequence[AttemptRecord]) -> Cause:
    ended = next((attempt for attempt in reversed(attempts) if attempt.ended_ms is not None), None)
    return run.cause if ended is None else ended.cause


def _remedy(run: RunRecord, cause: Cause, around: Surroundings) -> str:
    if run.kind == PREDICTION:
        return f"`trn logs {run.run_id}` shows its output; {PREDICT_AGAIN}"
    # A resume uses the code that was frozen when the run was submitted, unless the fixed code is asked for.
    folder = run.frozen_from or run.base_dir
    code = f" --code {shlex.quote(folder)}" if run.snapshot and folder else ""
    if cause.id in BEFORE_STEP_1 and around.checkpoint is None and (source := _resumed_from(run)):
        return (
            f"correct the {'job' if cause.id == 'input' else 'job or its code'}, then"
            f" `trn resume {source}{'' if cause.id == 'input' else code} --set …`;"
            f" `trn resume {run.run_id}` would repeat what this run was started with"
        )
    resumes = where_it_resumes(run, around.checkpoint)
    secrets = " ".join(f"--env {name}" for name in cause.values.get("names", ()))
    template = find_remedy(cause.id, str(cause.values.get("signal", "")))
    return template.format(run_id=run.run_id, resumes=resumes, code=code, secrets=secrets)


def _resumed_from(run: RunRecord) -> str:
    """The run whose checkpoint a resume started from; a parent that saved none is passed over."""
    path = PurePath(str(run.config.get("resume_checkpoint_path") or ""))
    is_of_a_run = (
        bool(run.parent_run_id) and path.parts[-4:-3] == ("runs",) and path.parent.name == CHECKPOINTS
    )
    return path.parts[-3] if is_of_a_run else ""


def _count_attempts(run: RunRecord) -> str:
    return f"{run.attempt} attempt{'' if run.attempt == 1 else 's'}"


def _end(words: str) -> str:
    return words if words.endswith((".", "!", "?")) else f"{words}."


def _say(
    run: RunRecord,
    what: str,
    *,
    why: str = "",
    fault: str = "",
    next: str = "",  # noqa: A002
    remedy: str = "",
) -> Explanation:
    return Explanation(run.run_id, run.state.value, what, why, fault, next, remedy, run.cause)
