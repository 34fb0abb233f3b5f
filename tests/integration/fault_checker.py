"""Reads everything that a faulty time left behind and says what is not as promised.

It believes nobody: the registry is compared with the run folders, both with what clients were told, and what workers
themselves witnessed with all of them.
"""

import contextlib
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from trn.core.home import Home
from trn.core.runs import TERMINAL, RunRecord
from trn.registry.connection import check_integrity
from trn.registry.metrics import MetricReader
from trn.registry.reader import RegistryReader


@dataclass
class History:
    """What clients saw."""

    asked: set[str] = field(default_factory=set)  # names of runs that were submitted, answered or not
    acknowledged: dict[str, str] = field(default_factory=dict)  # name -> run id, as the reply said
    ended: dict[str, str] = field(default_factory=dict)  # run id -> the first final state that anyone saw
    changed_after_end: list[str] = field(default_factory=list)
    events: dict[str, list[bytes]] = field(default_factory=dict)  # run id -> lines, as a watcher got them
    cancelled: set[str] = field(default_factory=set)

    def saw(self, run_id: str, state: str) -> None:
        """Anyone saw that run in that state."""
        first = self.ended.get(run_id)
        if first is None:
            if state in TERMINAL:
                self.ended[run_id] = state
        elif first != state:
            self.changed_after_end.append(f"{run_id}: {first} became {state}")


@dataclass
class Report:
    faults: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        width = max(map(len, self.counts), default=0)
        lines = [f"  {name:<{width}}  {number:>8,}" for name, number in self.counts.items()]
        found = [f"  - {fault}" for fault in self.faults[:40]] or ["  nothing was lost"]
        return "\n".join(["what was checked", *lines, "what was found", *found])


def check(home: Home, history: History, witness: Path) -> Report:
    """Every promise, over all that is there. The daemon may be up or down; no run may be live any more."""
    report = Report()
    for path in (home.registry, home.metrics):
        report.faults += [f"{path.name}: {fault}" for fault in check_integrity(path)]
    with contextlib.closing(RegistryReader(home.registry)) as registry:
        runs = _all_runs(registry)
        _check_submits(runs, history, report)
        _check_slots(registry, report)
        with contextlib.closing(MetricReader(home.metrics)) as metrics:
            for run in runs:
                _check_run(home, run, registry, metrics, history, report)
    report.faults += history.changed_after_end
    violations = witness / "violations"
    if violations.exists():
        report.faults += violations.read_text().splitlines()
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


def _check_slots(registry: RegistryReader, report: Report) -> None:
    slots = registry.slots()
    report.counts["slots"] = len(slots)
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
    history.saw(run.run_id, run.state)
    if run.state not in TERMINAL:
        report.faults.append(f"{run.run_id} is {run.state}: {run.reason}")
    open_attempts = [one.number for one in registry.attempts(run.run_id) if one.ended_ms is None]
    if open_attempts:
        report.faults.append(f"{run.run_id}: attempts {open_attempts} never ended")
    path = home.run(run.run_id).events
    lines = path.read_bytes().splitlines() if path.exists() else []
    events = [json.loads(line) for line in lines]
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
    if run.state == "COMPLETED" and not (events and events[-1]["event"] == "completed"):
        report.faults.append(f"{run.run_id}: COMPLETED, and its last event says otherwise")
    _check_points(run, events, metrics, report)
    seen = history.events.get(run.run_id)
    if seen is not None:
        report.counts["events seen by watchers"] += len(seen)
        if seen != lines:
            report.faults.append(f"{run.run_id}: a watcher saw {len(seen)} events, and not those in the file")


def _check_points(
    run: RunRecord, events: list[dict[str, object]], metrics: MetricReader, report: Report
) -> None:
    """The newest value of each step is what the charts show, each once."""
    wanted: dict[str, dict[int, object]] = {}
    for event in events:
        if event["event"] == "metric":
            wanted.setdefault(str(event["name"]), {})[int(str(event["step"]))] = event["value"]
        elif event["event"] == "metrics":
            values = event["values"]
            assert isinstance(values, dict)
            for name, value in values.items():
                wanted.setdefault(name, {})[int(str(event["step"]))] = value
    found = {
        series.name: dict(zip(series.steps, series.values, strict=True))
        for series in metrics.query(run.run_id)
    }
    report.counts["metric points"] += sum(map(len, found.values()))
    found = {name: points for name, points in found.items() if name in wanted}
    if found != wanted:
        report.faults.append(f"{run.run_id}: its metric points are not those of its events")
