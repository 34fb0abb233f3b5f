"""Reads what a faulty time of a model server left behind, and says what is not as promised.

It believes nobody: what clients got is compared with what the checkpoints compute here, with the server's events, and with
the registry. The promises, whatever struck:

- Every request ends: with one answer on its own connection, a refusal, or the end of a connection whose server was ended.
- Every answer has the bits that its version's checkpoint gives for the batch shape in the answer's header.
- On one connection versions follow each other as they were promoted: none before its promotion, none after the next one.
- No version whose gate failed ever answers.
- A row that does no harm is never refused as one that does; one that always does is never answered.
- What the registry says of a promotion is what the server's event says. Each number is finished once.
- At the end nothing waits, the live version is the registry's, and all processes of the server are gone after a cancel.

What it allows: 429, 503 and missed deadlines, where they were asked for or a server was ended; and the end of a connection
that a kill of its server or model parent explains.
"""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from fault_checker import Report
from serving_clients import MAX_BATCH_ROWS, NEVER_ANSWERED, Record, Request

from gen_worker.contract.checkpoints.choice import read_named
from gen_worker.contract.process_identity import ProcessIdentity
from gen_worker.inference.shapes import batch_shapes
from gen_worker.trainer.checkpoints.store import CheckpointStore
from trn.core.serving.records import Promotion, PromotionState

# Refusals that may come to a request without harm.
ALLOWED = {"queue_full", "unavailable", "deadline"}


@dataclass(slots=True, kw_only=True)
class ServerEnd:
    """From the signal to its server or model parent until the server is gone, and its socket with it."""

    began: float
    ended: float = math.inf

    def explains(self, request: Request) -> bool:
        return self.began <= request.ended_at and request.connected_at <= self.ended


@dataclass(kw_only=True)
class Times:
    """What the strikes and the end of the harness leave for the checker."""

    ends: list["ServerEnd"] = field(default_factory=list)
    processes: set[ProcessIdentity] = field(default_factory=set)  # of the server, in all its attempts
    never: set[str] = field(default_factory=set)  # labels of versions that no gate lets through


def check(
    record: Record, times: Times, events: Path, checkpoints: dict[str, Path], promotions: Sequence[Promotion]
) -> Report:
    """`checkpoints`: label -> .meta.json, of all versions that there are."""
    report = Report()
    report.faults += record.stuck
    report.counts.update(record.counts)
    lines = [json.loads(line) for line in events.read_bytes().splitlines()]
    history = _check_events(lines, promotions, report)
    _check_requests(record, times, report)
    _check_versions(record, history, times, report)
    _check_bits(record, checkpoints, report)
    _check_processes(times, report)
    return report


def _check_events(
    lines: Sequence[dict[str, Any]], promotions: Sequence[Promotion], report: Report
) -> list[set[str]]:
    """Which labels answered, one set after the other."""
    first = next(line["version"] for line in lines if line["event"] == "ready")
    history = [{_label(first)}]
    ends: dict[int, dict[str, Any]] = {}
    last = 0
    for line in lines:
        if line["event"] not in ("promoted", "promotion_refused"):
            continue
        number = line["number"]
        said = {name: line.get(name) for name in ("event", "version", "previous", "second", "cause")}
        if ends.setdefault(number, said) != said:
            report.faults.append(f"promotion {number} ended twice: {ends[number]} and {said}")
        if number < last:
            report.faults.append(f"promotion {number} ended after {last}")
        if line["event"] == "promoted" and number > last:
            answering = {_label(line["version"])}
            if line["action"] == "split":
                answering.add(_label(line["second"]))
            history.append(answering)
        last = max(last, number)
    report.counts["attempts of the server"] = len({line["attempt"] for line in lines})
    for promotion in promotions:
        report.counts[f"promotions that were {promotion.state}"] += 1
        if promotion.cause:
            report.counts[f"refused for {promotion.cause}"] += 1
        event = ends.get(promotion.number)
        wanted = {PromotionState.DONE: "promoted", PromotionState.REFUSED: "promotion_refused"}
        found = None if event is None else event["event"]
        if promotion.state == PromotionState.WANTED:
            report.faults.append(f"promotion {promotion.number} never ended")
        elif found != wanted.get(PromotionState(promotion.state)):
            report.faults.append(f"promotion {promotion.number} is {promotion.state}, its event is {found}")
    return history


def _label(version: dict[str, Any]) -> str:
    return f"{version['run_id']}@{version['step']}"


def _check_requests(record: Record, times: Times, report: Report) -> None:
    ids = set()
    for request in record.requests:
        ids.add(request.request_id)
        name = request.request_id
        if request.fault:
            report.faults.append(f"{name}: {request.fault}")
        if request.has_left:
            continue
        report.counts[f"requests with {request.status or 'a cut connection'}"] += 1
        if request.status == 0:
            if not request.ended_at:
                report.faults.append(f"{name} never ended")
            elif not any(end.explains(request) for end in times.ends):
                report.faults.append(f"{name}: its connection was cut, and nobody had ended its server")
        elif request.status == 200:
            report.counts["rows that were answered"] += len(request.rows)
            if request.harm == NEVER_ANSWERED:
                report.faults.append(f"{name} was answered, with a row that raises or kills")
            if len(request.values) != len(request.rows):
                report.faults.append(f"{name}: {len(request.values)} answers for {len(request.rows)} rows")
        elif request.error == "deadline" and request.deadline_ms is None:
            report.faults.append(f"{name}: it had no deadline, and missed it")
        elif request.error not in ALLOWED and not request.harm:
            report.faults.append(f"{name}: {request.status} {request.error}, and its rows do no harm")
    report.counts["requests"] = len(record.requests)
    if len(ids) != len(record.requests):
        report.faults.append("two requests have the same id")


def _check_versions(record: Record, history: list[set[str]], times: Times, report: Report) -> None:
    """Answers of one connection walk through the history, and never back."""
    connections: dict[int, list[Request]] = defaultdict(list)
    for request in record.requests:
        if request.status == 200:
            connections[request.connection].append(request)
            if request.label in times.never:
                report.faults.append(
                    f"{request.request_id} was answered by {request.label}, which was refused"
                )
    report.counts["switches"] = len(history) - 1
    report.counts["versions that answered"] = len(
        {request.label for requests in connections.values() for request in requests}
    )
    for requests in connections.values():
        place = 0
        for request in requests:
            while place < len(history) and request.label not in history[place]:
                place += 1
            if place == len(history):
                report.faults.append(f"{request.request_id}: {request.label} answered when another was live")
                break


def _check_bits(record: Record, checkpoints: dict[str, Path], report: Report) -> None:
    """What the class and the checkpoint give here, at the shape of the header."""
    answered: dict[str, list[Request]] = defaultdict(list)
    for request in record.requests:
        if request.status == 200:
            answered[request.label].append(request)
    shapes = batch_shapes(MAX_BATCH_ROWS)
    for label, requests in answered.items():
        if label not in checkpoints:
            report.faults.append(f"{label} answered, and there is no such checkpoint")
            continue
        info = read_named(checkpoints[label])
        assert not isinstance(info, dict)
        model = OfflineModel(checkpoints[label])
        for request in requests:
            if request.weights != info.meta.data.hash:
                report.faults.append(f"{request.request_id}: {request.weights} is not the hash of {label}")
            if request.shape not in shapes:
                report.faults.append(f"{request.request_id}: the shape {request.shape} is none of {shapes}")
                continue
            wanted = model.predict(request.rows, request.shape)
            found = np.array(request.values, "float32")
            report.counts["answers whose bits were compared"] += 1
            if found.shape != wanted.shape or (found != wanted).any():
                others = [shape for shape in shapes if (model.predict(request.rows, shape) == found).all()]
                report.faults.append(
                    f"{request.request_id}: other bits than those of {label} at shape {request.shape}"
                    f" ({len(found)} rows; they are those of {others or 'no shape'})"
                )


class OfflineModel:
    """The class and the checkpoint, in this process."""

    def __init__(self, checkpoint: Path) -> None:
        from soaked import Soaked

        self._trainer = Soaked()
        ctx: Any = SimpleNamespace(job=SimpleNamespace(hyperparams={}))
        self._trainer.setup(ctx)
        self._state = self._trainer.configure(ctx)
        stored = CheckpointStore(checkpoint.parent).load(checkpoint)
        self._trainer.load_state_dict(self._state, dict(stored.state), ctx)
        self._state["model"].eval()

    def predict(self, rows: "np.ndarray[Any, Any]", shape: int) -> "np.ndarray[Any, Any]":
        import torch

        found = []
        with torch.inference_mode():
            for start in range(0, len(rows), shape):
                piece = rows[start : start + shape]
                padded = np.concatenate([piece, np.repeat(piece[-1:], shape - len(piece), axis=0)])
                answer = self._trainer.answer(torch.from_numpy(padded), self._state)
                found.append(answer[: len(piece)].numpy())
        return np.concatenate(found)


def _check_processes(times: Times, report: Report) -> None:
    report.counts["processes of the server"] = len(times.processes)
    for process in times.processes:
        if process.is_alive():
            report.faults.append(f"process {process.pid} of the server is still there")
