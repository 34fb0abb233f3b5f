"""Reads everything that a faulty time left behind and says what is not as promised.

It believes nobody: the registry is compared with the run folders, both with what clients were told, and what workers
themselves witnessed with all of them. The promises, whatever struck:

- Acknowledged submits are runs that exist, one for each, also where the reply was lost and the submit repeated.
- No run ran twice at once, no slot was shared: every worker holds a lock of its run and of each of its devices.
- No slot, CPU or memory is still held; no attempt is still open; every run has ended.
- Terminal states never changed, whoever looked.
- A run's file has its events 1, 2, 3…, each attempt in it ends with exactly one terminal event, the registry has taken in
  all of it, the metric store has its points, and a watcher has seen just these lines.
- Each checkpoint that an event named is an artifact, once, and its file has the recorded bytes for as long as it is there.
- COMPLETED means that the last event says so, that no step's metric is missing, and that every one has the value that a
  time without faults gives: what was resumed was resumed exactly.
- CANCELLED is only what somebody cancelled. FAILED is only what was made to fail, or had no room.
- No attempt followed as many in a row without progress as the run may have.
- Nobody else was touched: a process that has got a worker's pid still runs, undisturbed.

A full disk may cost time and attempts, not truth; points of metrics may come later, not never. A submit that cannot be
written is refused, and then there is no such run. What a worker could not write was never an event: it gets no number,
and the next attempt does that step again. A save that does not fit, and a start that finds no room, end their attempt as
`disk-full`, which is tried again: FAILED for want of space is as promised only if its reason says so.

The wall clock proves nothing here: it was moved. No promise of this list speaks of time.
"""

import contextlib
import json
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gen_worker.contract.files.hashes import hash_descriptor
from gen_worker.contract.process_identity import read_process
from trn.core.artifacts.files import open_artifact
from trn.core.errors import TrnError
from trn.core.home import Home
from trn.core.runs import TERMINAL, AttemptRecord, RunRecord
from trn.daemon.dispatch.endings import count_stalled, is_counted
from trn.registry.connection import check_integrity
from trn.registry.metrics import MetricReader
from trn.registry.reader import RegistryReader

LOSS = "train/loss"
MAX_FAULTS_SHOWN = 40


@dataclass
class History:
    """What clients asked for and saw."""

    asked: dict[str, int] = field(
        default_factory=dict
    )  # name -> steps, of what was submitted, answered or not
    doomed: set[str] = field(default_factory=set)  # names of runs that were made to fail
    acknowledged: dict[str, str] = field(default_factory=dict)  # name -> run id, as the reply said
    ended: dict[str, tuple[str, int]] = field(
        default_factory=dict
    )  # run id -> a final state that anyone saw, its change
    changed_after_end: list[str] = field(default_factory=list)
    events: dict[str, list[bytes]] = field(default_factory=dict)  # run id -> lines, as a watcher got them
    cancelled: set[str] = field(default_factory=set)  # run ids that somebody wanted to end
    foreign: set[str] = field(default_factory=set)  # run ids that got a checkpoint of another run
    bystanders: dict[int, int] = field(default_factory=dict)  # pid -> start ticks, of who got a worker's pid

    def ask(self, config: dict[str, Any]) -> None:
        num_steps = len(config["mock_batches"])
        self.asked[config["name"]] = num_steps
        if config["hyperparams"].get("fail_at", num_steps + 1) <= num_steps:
            self.doomed.add(config["name"])

    def saw(self, run_id: str, state: str, change: int) -> None:
        """Anyone saw that run in that state, as of that change; a slow watcher may see late what was before."""
        if state in TERMINAL:
            self.ended.setdefault(run_id, (state, change))
        ended, ended_at = self.ended.get(run_id, (state, change))
        if state != ended and (state in TERMINAL or change > ended_at):
            self.changed_after_end.append(f"{run_id}: {ended} became {state}")


@dataclass
class Report:
    faults: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    struck: Counter[str] = field(default_factory=Counter)  # kind of fault -> how often
    left_out: dict[str, str] = field(default_factory=dict)  # kind of fault -> why it could not be had here

    def __str__(self) -> str:
        width = max(map(len, [*self.counts, *self.struck]), default=0)
        counts = [f"  {name:<{width}}  {number:>8,}" for name, number in self.counts.items()]
        struck = [
            f"  {name:<{width}}  {'left out' if name in self.left_out else f'{number:,}':>8}"
            for name, number in self.struck.items()
        ]
        reasons = [f"  {name} was left out: {reason}" for name, reason in self.left_out.items()]
        found = [f"  - {fault}" for fault in self.faults[:MAX_FAULTS_SHOWN]] or ["  nothing was lost"]
        return "\n".join(
            ["what was checked", *counts, "what struck", *struck, *reasons, "what was found", *found]
        )


def check(home: Home, history: History, witness: Path) -> Report:
    """Every promise, over all that is there. The daemon may be up or down; no run may be live any more."""
    report = Report()
    for path in (home.registry, home.metrics):
        report.faults += [f"{path.name}: {fault}" for fault in check_integrity(path)]
    with contextlib.closing(RegistryReader(home.registry)) as registry:
        runs = _all_runs(registry)
        _check_submits(runs, history, report)
        _check_slots(registry, witness, report)
        with contextlib.closing(MetricReader(home.metrics)) as metrics:
            for run in runs:
                _check_run(home, run, registry, metrics, history, report)
    report.faults += history.changed_after_end
    violations = witness / "violations"
    if violations.exists():
        report.faults += violations.read_text().splitlines()
    _check_bystanders(history, report)
    return report


def _all_runs(registry: RegistryReader) -> list[RunRecord]:
    runs: list[RunRecord] = []
    before = None
    while page := registry.page(before=before, limit=500):
        runs += page
        before = (page[-1].submitted_ms, page[-1].run_id)
    return runs


def _check_submits(runs: list[RunRecord], history: History, report: Report) -> None:
    by_name = Counter(run.name for run in runs)
    ids = {run.run_id for run in runs}
    report.counts["runs that were asked for"] = len(history.asked)
    report.counts["acknowledged submits"] = len(history.acknowledged)
    report.counts["runs in the registry"] = len(runs)
    for name, run_id in history.acknowledged.items():
        if run_id not in ids:
            report.faults.append(f"{name}: acknowledged as {run_id}, and there is no such run")
    for name, number in by_name.items():
        if number > 1:
            report.faults.append(f"{name}: {number} runs for one submit")
        if name not in history.asked:
            report.faults.append(f"{name}: nobody asked for it")


def _check_slots(registry: RegistryReader, witness: Path, report: Report) -> None:
    slots = registry.slots()
    report.counts["slots"] = len(slots)
    report.counts["slots that workers were seen on"] = len([*witness.glob("device-*")])
    report.faults += [
        f"slot {slot['device_id']} is still held by {slot['run_id']}" for slot in slots if slot["run_id"]
    ]
    if registry.held() != (0, 0):
        report.faults.append(f"{registry.held()} (cpus, memory) are still held")


def _check_run(
    home: Home,
    run: RunRecord,
    registry: RegistryReader,
    metrics: MetricReader,
    history: History,
    report: Report,
) -> None:
    report.counts[f"ended as {run.state}"] += 1
    report.counts["attempts"] += run.attempt
    history.saw(run.run_id, run.state, run.change)
    if run.state not in TERMINAL:
        report.faults.append(f"{run.run_id} is {run.state}: {run.reason}")
    open_attempts = [one.number for one in registry.attempts(run.run_id) if one.ended_ms is None]
    if open_attempts:
        report.faults.append(f"{run.run_id}: attempts {open_attempts} never ended")
    _check_progress(run, registry.attempts(run.run_id), report)
    path = home.run(run.run_id).events
    lines = path.read_bytes().splitlines() if path.exists() else []
    events = [json.loads(line) for line in lines]
    _check_ending(run, events, history, report)
    report.counts["events in files"] += len(events)
    if [event["seq"] for event in events] != list(range(1, len(events) + 1)):
        report.faults.append(f"{run.run_id}: its file has a gap")
    if run.last_seq != len(events):
        report.faults.append(f"{run.run_id}: {len(events)} events in its file, {run.last_seq} taken in")
    ends = Counter(event["attempt"] for event in events if event["event"] in ("completed", "failed"))
    if any(number > 1 for number in ends.values()):
        report.faults.append(f"{run.run_id}: an attempt with two terminal events: {dict(ends)}")
    if set(ends) != {event["attempt"] for event in events}:
        report.faults.append(f"{run.run_id}: an attempt without a terminal event")
    _check_points(run, events, metrics, report)
    _check_artifacts(home, run, events, registry, history, report)
    seen = history.events.get(run.run_id)
    if seen is not None:
        report.counts["events seen by watchers"] += len(seen)
        if seen != lines:
            report.faults.append(f"{run.run_id}: a watcher saw {len(seen)} events, and not those in the file")


def _check_progress(run: RunRecord, attempts: list[AttemptRecord], report: Report) -> None:
    for index, one in enumerate(attempts[:-1]):  # each of which was followed by another
        num_stalled = count_stalled(attempts[:index], one.saved_step)
        if is_counted(one) and num_stalled >= run.max_attempts:
            report.faults.append(f"{run.run_id}: tried again after {num_stalled} attempts without progress")


def _check_ending(run: RunRecord, events: list[dict[str, Any]], history: History, report: Report) -> None:
    """It ended as it had to, and what it trained is what it would have trained without faults."""
    if run.state == "CANCELLED" and run.run_id not in history.cancelled:
        report.faults.append(f"{run.run_id}: CANCELLED, and nobody asked for it")
    if run.state == "FAILED" and run.name not in history.doomed:
        report.counts["ended as FAILED for want of space"] += 1
        if "space" not in run.reason:
            report.faults.append(f"{run.run_id}: FAILED, and had no cause to: {run.reason}")
    losses = {
        event["step"]: event["value"]
        for event in events
        if event["event"] == "metric" and event["name"] == LOSS
    }
    wrong = {step: loss for step, loss in losses.items() if loss != step * (step - 1) / 2}  # 0 + 1 + 2 + …
    if wrong:
        report.faults.append(f"{run.run_id}: losses that are not what it was to train: {wrong}")
    if run.state == "COMPLETED":
        if run.name in history.doomed:
            report.faults.append(f"{run.run_id}: COMPLETED, and was made to fail")
        if not (events and events[-1]["event"] == "completed"):
            report.faults.append(f"{run.run_id}: COMPLETED, and its last event says otherwise")
        missing = set(range(1, history.asked.get(run.name, 0) + 1)) - set(losses)
        if missing:
            report.faults.append(f"{run.run_id}: COMPLETED, without a metric of steps {sorted(missing)}")


def _check_bystanders(history: History, report: Report) -> None:
    report.counts["bystanders with a worker's pid"] = len(history.bystanders)
    for pid, start_ticks in history.bystanders.items():
        state = read_process(pid)
        if state is None or state.is_ended or state.start_ticks != start_ticks:
            report.faults.append(f"process {pid} is not ours, and was ended")
        elif state.letter == "T":
            report.faults.append(f"process {pid} is not ours, and was stopped")


def _check_artifacts(
    home: Home,
    run: RunRecord,
    events: list[dict[str, Any]],
    registry: RegistryReader,
    history: History,
    report: Report,
) -> None:
    """Each checkpoint that an event named is recorded once, and those that are there have the bytes that are recorded.

    A checkpoint of another run may have got the name of the run's own just before that was looked at.
    """
    found = registry.artifacts(run.run_id, limit=1000)
    wanted = [(event["seq"], event["step"]) for event in events if event["event"] == "checkpoint"]
    report.counts["artifacts"] += len(found)
    if sorted((artifact.seq, artifact.step) for artifact in found) != wanted:
        report.faults.append(f"{run.run_id}: {len(wanted)} checkpoints, {len(found)} artifacts")
    for artifact in found:
        is_foreign = run.run_id in history.foreign and artifact.cause.id == "artifact-no-checkpoint"
        if artifact.state == "refused" and not is_foreign:
            report.faults.append(f"{run.run_id}: {artifact.name} was refused: {artifact.reason}")
        elif artifact.is_present:
            try:
                fd = open_artifact(home, artifact)
            except TrnError as fault:
                report.faults.append(f"{run.run_id}: {artifact.name} is recorded as present: {fault}")
                continue
            if hash_descriptor(fd) != f"sha256:{artifact.sha256}":
                report.faults.append(f"{run.run_id}: {artifact.name} has another hash than is recorded")
            os.close(fd)


def _check_points(
    run: RunRecord, events: list[dict[str, Any]], metrics: MetricReader, report: Report
) -> None:
    """The newest value of each step is what the charts show, each once."""
    wanted: dict[str, dict[int, object]] = {}
    attempts: dict[str, int] = {}
    for event in events:
        values = {event["name"]: event["value"]} if event["event"] == "metric" else event.get("values", {})
        if event["event"] not in ("metric", "metrics"):
            continue
        for name, value in values.items():
            points, step = wanted.setdefault(str(name), {}), int(str(event["step"]))
            if (
                attempts.get(name, event["attempt"]) != event["attempt"]
            ):  # it begins again where that one resumed
                points = wanted[name] = {old: points[old] for old in points if old < step}
            attempts[name] = event["attempt"]
            points[step] = value
    found = {
        series.name: dict(zip(series.steps, series.values, strict=True))
        for series in metrics.query(run.run_id)
    }
    report.counts["metric points"] += sum(map(len, found.values()))
    found = {name: points for name, points in found.items() if name in wanted}
    if found != wanted:
        differing = {
            f"{name} at step {step}": (wanted.get(name, {}).get(step), found.get(name, {}).get(step))
            for name in wanted | found
            for step in wanted.get(name, {}) | found.get(name, {})
            if wanted.get(name, {}).get(step) != found.get(name, {}).get(step)
        }
        report.faults.append(
            f"{run.run_id}: its metric points are not those of its events: (event, point) {differing}"
        )
