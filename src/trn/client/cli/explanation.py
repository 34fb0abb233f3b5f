"""Why a run is where it is: one causal sentence, made of what the registry holds. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from trn.client.cli.durations import say_duration
from trn.client.cli.faults import find_blame
from trn.core.runs import AttemptRecord, RunRecord, RunState

SILENT_MS = 30_000
NOT_READY = "cannot start on a GPU yet"  # as the daemon's readiness begins; a test holds them together


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


def explain(
    run: RunRecord,
    attempts: Sequence[AttemptRecord],
    *,
    at_ms: int,
    is_daemon_up: bool,
    holders: Sequence[str] = (),
) -> Explanation:
    """`holders` are the runs that hold devices now."""
    if run.state is RunState.PENDING:
        return _pending(run, attempts, at_ms=at_ms, is_daemon_up=is_daemon_up, holders=holders)
    if run.state in (RunState.DISPATCHING, RunState.RUNNING):
        return _live(run, attempts, at_ms=at_ms, is_daemon_up=is_daemon_up)
    took = say_duration((run.ended_ms or at_ms) - run.submitted_ms)
    if run.state is RunState.COMPLETED:
        return _say(run, f"completed: it reached step {run.step} after {took}", next="nothing is left to do")
    if run.state is RunState.CANCELLED:
        remedy = f"`trn resume {run.run_id}` goes on from its newest checkpoint" if run.attempt else ""
        what = f"was cancelled: {run.reason}"
        return _say(run, what, next="it is final", remedy=remedy or "submit it again to train it")
    fault, remedy = _blame(run, attempts)
    what = run.reason if run.reason.startswith("failed ") else f"failed: {run.reason}"
    return _say(run, what, fault=fault, next="it is final", remedy=remedy)


def _pending(
    run: RunRecord,
    attempts: Sequence[AttemptRecord],
    *,
    at_ms: int,
    is_daemon_up: bool,
    holders: Sequence[str],
) -> Explanation:
    waited = say_duration(at_ms - run.submitted_ms)
    fault = _blame(run, attempts)[0] if run.attempt else ""
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
    held = f" (held by {', '.join(dict.fromkeys(holders))})" if holders and "waits for" in run.reason else ""
    what = f"is pending since {waited}: {run.reason}{held}"
    remedy = (
        f"wait, or cancel what holds it: `trn cancel {holders[0]}`" if held else "nothing needs to be done"
    )
    return _say(run, what, fault=fault, next="it starts by itself as soon as that is free", remedy=remedy)


def _live(
    run: RunRecord, attempts: Sequence[AttemptRecord], *, at_ms: int, is_daemon_up: bool
) -> Explanation:
    of = f" of {run.end_step}" if run.end_step else ""
    newest = attempts[-1] if attempts else None
    number = f"attempt {run.attempt} of {run.max_attempts + run.num_interruptions}"
    watched = "" if is_daemon_up else "`trn daemon start`: until then it trains on and nobody looks after it"
    if run.is_cancel_wanted:
        what = f"is being stopped at step {run.step}{of}: {run.cancel_reason or 'cancelled'}"
        next_ = "it saves and ends within its grace, else it is killed"
        return _say(run, what, next=next_ if is_daemon_up else "", remedy=watched)
    if run.state is RunState.DISPATCHING:
        what = f"is starting: {number} is being launched"
        return _say(run, what, next="it goes on by itself", remedy=watched or "nothing needs to be done")
    silent_ms = at_ms - newest.last_heartbeat_ms if newest is not None and newest.last_heartbeat_ms else 0
    if silent_ms > SILENT_MS and is_daemon_up:
        what = (
            f"runs, {number}, at step {run.step}{of}, and gave no sign of life for {say_duration(silent_ms)}"
        )
        next_ = (
            "it is ended when its heartbeat timeout is over, and another attempt follows if it has one left"
        )
        return _say(run, what, next=next_, remedy=f"`trn logs {run.run_id}` shows what it does")
    since = f" for {say_duration(at_ms - newest.launched_ms)}" if newest is not None else ""
    what = f"runs{since}, {number}, at step {run.step}{of}"
    return _say(
        run,
        what,
        next="it goes on by itself" if is_daemon_up else "",
        remedy=watched or "nothing needs to be done",
    )


def _blame(run: RunRecord, attempts: Sequence[AttemptRecord]) -> tuple[str, str]:
    ended = next((attempt for attempt in reversed(attempts) if attempt.ended_ms is not None), None)
    blame = find_blame(ended.cause if ended is not None else run.reason, run.run_id)
    return ("", f"`trn logs {run.run_id}` has the details") if blame is None else blame


def _say(run: RunRecord, what: str, *, fault: str = "", next: str = "", remedy: str = "") -> Explanation:  # noqa: A002
    return Explanation(run.run_id, run.state.value, what, fault, next, remedy)
