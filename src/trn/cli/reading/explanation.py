"""Why a run is where it is: one causal sentence, made of what the registry and the run's folder hold. Pure."""

import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trn.cli.durations import say_duration
from trn.cli.reading.faults import find_blame
from trn.core.runs import AttemptRecord, RunRecord, RunState

SILENT_MS = 30_000
NOT_READY = "cannot start on a GPU yet"  # as the daemon's readiness begins; a test holds them together
BARRED = (
    "cannot start ",
    "the disk of ",
)  # as the dispatcher begins where room for one run is not what is missing
DEFAULT_GRACE_S = 60.0
MAX_HOLDERS = 5


class Explanation(NamedTuple):
    """`what` happens and why, whose `fault` it is (job, machine, trn; empty: nobody's), what is `next`, what to do."""

    run_id: str
    state: str
    what: str
    fault: str
    next: str
    remedy: str

    @property
    def sentence(self) -> str:
        whose = {"job": "the job's own fault", "machine": "the machine's fault", "trn": "our fault"}
        parts = [f"{self.run_id} {self.what}", whose.get(self.fault, ""), self.next, self.remedy]
        return "; ".join(part for part in parts if part) + "."


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
    if run.state is RunState.COMPLETED:
        what = f"completed: it reached step {run.step} after {took}"
        if run.stop_reason:
            what = f"completed: stopped early at step {run.step} after {took}: {run.stop_reason}"
        return _say(run, what, next="nothing is left to do")
    if run.state is RunState.CANCELLED:
        remedy = f"`{how_to_resume(run)}` {where_it_resumes(run, around.checkpoint)}" if run.attempt else ""
        what = f"was cancelled: {run.reason}"
        return _say(run, what, next="it is final", remedy=remedy or "submit it again to train it")
    fault, remedy = _blame(run, attempts, around)
    what = run.reason if run.reason.startswith("failed ") else f"failed: {run.reason}"
    return _say(run, what, fault=fault, next="it is final", remedy=remedy)


def how_to_resume(run: RunRecord) -> str:
    """The command that goes on from an ended run. One that did all that was asked of it has to be given more.

    Empty where there is no more that could be asked for: mock batches are one pass.
    """
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
        return f"goes on from step {checkpoint.step} ({checkpoint.path.rpartition('/')[2]})"
    begins = run.config.get("resume_checkpoint_path")
    if begins:
        return f"begins at {begins}, as it did: it saved no checkpoint of its own"
    return "starts at step 0: it saved no checkpoint"


def _pending(
    run: RunRecord,
    attempts: Sequence[AttemptRecord],
    *,
    at_ms: int,
    is_daemon_up: bool,
    around: Surroundings,
) -> Explanation:
    waited = say_duration(at_ms - run.submitted_ms)
    fault = _blame(run, attempts, around)[0] if run.attempt else ""
    if not is_daemon_up:
        what = f"is pending since {waited} and no daemon runs that could start it; it last said: {run.reason}"
        return _say(
            run, what, fault=fault, next="nothing happens until one does", remedy="`trn daemon start`"
        )
    if run.not_before_ms > at_ms:
        when = f"its next attempt follows in {say_duration(run.not_before_ms - at_ms)}"
        return _say(
            run, f"is pending: {run.reason}", fault=fault, next=when, remedy="nothing needs to be done"
        )
    if run.reason.startswith(NOT_READY):
        return _say(
            run,
            f"is pending since {waited}: {run.reason}",
            fault="machine",
            next="it is looked at again every two minutes, and as soon as the packages of its interpreter change",
            remedy="`trn doctor` shows what this machine can do",
        )
    holders = _find_holders(run, around)
    known = [f"held by {_list(holders)}"] if holders else []
    if around.num_ahead:
        is_one = around.num_ahead == 1
        known.append(f"{around.num_ahead} waiting {'run comes' if is_one else 'runs come'} before it")
    what = f"is pending since {waited}: {run.reason}"
    if known:
        what += f" ({'; '.join(known)})"
    is_barred = run.reason.startswith(BARRED)
    next_ = f"it starts by itself as soon as {'that is over' if is_barred else 'there is room for it'}"
    first = next(iter(holders), "")
    remedy = f"wait, or cancel what holds it: `trn cancel {first}`" if first else "nothing needs to be done"
    return _say(run, what, fault=fault, next=next_, remedy=remedy)


def _find_holders(run: RunRecord, around: Surroundings) -> dict[str, str]:
    """The runs that hold what its reason names, and how much each of them."""
    wanted = run.reason.partition(": ")[0] if run.reason.startswith("waits for") else ""
    held: dict[str, list[str]] = {}
    if "GPU" in wanted or any(device_id in wanted for device_id in run.needs.devices):
        for run_id, device_ids in around.devices.items():
            held.setdefault(run_id, []).extend(device_ids)
    if "CPU" in wanted:
        for run_id, cpus in around.cpus.items():
            held.setdefault(run_id, []).append(f"{cpus} CPU{'' if cpus == 1 else 's'}")
    if "memory" in wanted:
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
    newest = attempts[-1] if attempts else None
    number = f"attempt {run.attempt}"
    if around.worker_gone:
        at = f"{number}, last seen at step {run.step}{of}: {around.worker_gone}"
        return _say_gone(run, at, is_daemon_up=is_daemon_up)
    watched = "" if is_daemon_up else "`trn daemon start`: until then it trains on and nobody looks after it"
    if run.is_cancel_wanted:
        what = f"is being stopped at step {run.step}{of}: {run.cancel_reason or 'cancelled'}"
        next_ = "it saves and ends within its grace, else it is killed"
        return _say(run, what, next=next_ if is_daemon_up else "", remedy=watched)
    if run.state is RunState.DISPATCHING:
        what = f"is starting: {number} is being launched"
        if not is_daemon_up:
            next_ = "no daemon runs: the next one finds out whether it was"
            return _say(run, what, next=next_, remedy="`trn daemon start`")
        return _say(run, what, next="it goes on by itself", remedy="nothing needs to be done")
    since = f" for {say_duration(at_ms - newest.launched_ms)}" if newest is not None else ""
    what = f"runs{since}, {number}, at step {run.step}{of}"
    over_ms = _over_limit_ms(run, newest, at_ms)
    if over_ms > 0:
        return _say_over(run, what, over_ms, is_daemon_up=is_daemon_up)
    silent_ms = at_ms - newest.last_heartbeat_ms if newest is not None and newest.last_heartbeat_ms else 0
    if silent_ms > SILENT_MS and is_daemon_up:
        what += f", no heartbeat for {say_duration(silent_ms)}"
        next_ = "it is killed and retried when its heartbeat timeout is over"
        return _say(run, what, next=next_, remedy=f"`trn logs {run.run_id}` shows what it does")
    return _say(
        run,
        what,
        next="it goes on by itself" if is_daemon_up else "",
        remedy=watched or "nothing needs to be done",
    )


def _say_gone(run: RunRecord, what: str, *, is_daemon_up: bool) -> Explanation:
    if is_daemon_up:
        return _say(run, f"is ending: {what}", next="the daemon is recording how", remedy="look again soon")
    return _say(
        run,
        f"trains no more, and its end is not recorded yet: {what}",
        next="the next daemon records how it ended, and tries it again where that is worth it",
        remedy="`trn daemon start`",
    )


def _over_limit_ms(run: RunRecord, newest: AttemptRecord | None, at_ms: int) -> int:
    """For how long its time limit is over; its worker counts from a little later than we do."""
    limit_s = run.config.get("time_limit_s")
    if newest is None or not isinstance(limit_s, int | float):
        return 0
    return at_ms - newest.launched_ms - round(limit_s * 1000)


def _say_over(run: RunRecord, what: str, over_ms: int, *, is_daemon_up: bool) -> Explanation:
    """The worker stops by itself at the end of the step; a step that does not end it leaves, after its grace."""
    limit_s, grace_s = run.config["time_limit_s"], run.config.get("grace_s", DEFAULT_GRACE_S)
    next_ = (
        f"it ends as soon as this step does, or without it when its grace of {grace_s:g} s is over, too"
        f"{' (the daemon kills it if it then still runs)' if is_daemon_up else ''}; it is not tried again"
    )
    return _say(
        run,
        f"{what}; its time limit of {limit_s:g} s is over since {say_duration(over_ms)}",
        next=next_,
        remedy=f"{'' if is_daemon_up else '`trn daemon start` records its end; '}then"
        f" `trn resume {run.run_id} --set time_limit_s=…` gives it more time",
    )


def _blame(run: RunRecord, attempts: Sequence[AttemptRecord], around: Surroundings) -> tuple[str, str]:
    ended = next((attempt for attempt in reversed(attempts) if attempt.ended_ms is not None), None)
    cause = ended.cause if ended is not None else run.reason
    # What was frozen when it was submitted is not what was mended since.
    folder = run.frozen_from or run.base_dir
    code = f" --code {shlex.quote(folder)}" if run.snapshot and folder else ""
    resumes = where_it_resumes(run, around.checkpoint)
    blame = find_blame(cause, run.run_id, resumes=resumes, code=code)
    return ("", f"`trn logs {run.run_id}` has the details") if blame is None else blame


def _say(run: RunRecord, what: str, *, fault: str = "", next: str = "", remedy: str = "") -> Explanation:  # noqa: A002
    return Explanation(run.run_id, run.state.value, what, fault, next, remedy)
