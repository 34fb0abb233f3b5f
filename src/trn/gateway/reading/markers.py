"""What happened to a run, as marks on the axis of its curves: attempts, kills, resumes, checkpoints, validations."""

from bisect import bisect_right
from typing import Any

import msgspec

from trn.core.errors import NotFoundError
from trn.core.runs import SERVER, AttemptRecord, RunRecord
from trn.core.serving.records import PromotionState
from trn.registry.metrics import MetricReader
from trn.registry.reader import RegistryReader

MAX_CHECKPOINTS = 1000
MAX_VALIDATIONS = 1000
MAX_PROMOTIONS = 1000
SERVER_METRIC = "serve/requests_per_s"


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """`kind`: attempt, resume, kill, end, checkpoint, validation, best or promotion."""

    kind: str
    step: int
    time_ms: int  # 0: not known
    attempt: int = 0
    text: str = ""
    artifact_id: str = ""  # of a checkpoint that is still there


def read_markers(run: RunRecord, registry: RegistryReader, metrics: MetricReader | None) -> list[Marker]:
    """By step."""
    found = [*_of_attempts(run, registry.attempts(run.run_id)), *_of_checkpoints(run, registry)]
    if metrics is not None:
        found += _of_validations(run, metrics)
        found += _of_best(run, metrics)
        if run.kind == SERVER:
            found += _of_promotions(run, registry, metrics)
    return sorted(found, key=lambda marker: (marker.step, marker.time_ms))


def _of_attempts(run: RunRecord, attempts: list[AttemptRecord]) -> list[Marker]:
    found: list[Marker] = []
    begin = run.start_step
    for attempt in attempts:
        is_first = attempt is attempts[0]
        is_continued = not is_first or bool(run.parent_run_id and run.start_step)
        text = f"attempt {attempt.number} continues from step {begin}" if is_continued else "attempt 1 starts"
        found.append(
            Marker(
                kind="resume" if is_continued else "attempt",
                step=begin,
                time_ms=attempt.launched_ms,
                attempt=attempt.number,
                text=text,
            )
        )
        if attempt.ended_ms is not None:
            is_last = attempt is attempts[-1] and run.state.is_terminal
            text = (run.reason if is_last else attempt.reason) or attempt.reason
            found.append(
                Marker(
                    kind="end" if is_last else "kill",
                    step=attempt.step,
                    time_ms=attempt.ended_ms,
                    attempt=attempt.number,
                    text=text,
                )
            )
            begin = attempt.saved_step or begin
    return found


def _of_checkpoints(run: RunRecord, registry: RegistryReader) -> list[Marker]:
    return [
        Marker(
            kind="checkpoint",
            step=artifact.step,
            time_ms=artifact.created_ms,
            attempt=artifact.attempt,
            text=artifact.name,
            artifact_id=artifact.artifact_id if artifact.is_present else "",
        )
        for artifact in registry.artifacts(run.run_id, kind="checkpoint", limit=MAX_CHECKPOINTS)
    ]


def _of_validations(run: RunRecord, metrics: MetricReader) -> list[Marker]:
    name = next((name for name in sorted(run.metrics) if name.startswith("val/")), "")
    if not name:
        return []
    found = metrics.query(run.run_id, [name], max_points=MAX_VALIDATIONS)
    return [
        Marker(kind="validation", step=step, time_ms=at_ms, text=name)
        for series in found
        for step, at_ms in zip(series.steps, series.timestamps_ms, strict=True)
    ]


def _of_best(run: RunRecord, metrics: MetricReader) -> list[Marker]:
    """By the metric that checkpoints are ranked by."""
    stopping: Any = run.config.get("early_stopping")
    stopping = stopping if isinstance(stopping, dict) else {}
    names = [stopping.get("metric"), "val/loss", "train/loss"]
    name = next((name for name in names if isinstance(name, str) and name in run.metrics), "")
    extremes = metrics.extremes(run.run_id).get(name) if name else None
    if extremes is None:
        return []
    is_max = stopping.get("metric") == name and stopping.get("mode") == "max"
    step, value = (
        (extremes.max_step, extremes.max_value) if is_max else (extremes.min_step, extremes.min_value)
    )
    if step is None:
        return []
    at_ms = next((series.timestamps_ms[0] for series in metrics.query(run.run_id, [name], step, step)), 0)
    return [
        Marker(
            kind="best", step=step, time_ms=at_ms, text=f"{'max' if is_max else 'min'} {name}: {value:.6g}"
        )
    ]


def _of_promotions(run: RunRecord, registry: RegistryReader, metrics: MetricReader) -> list[Marker]:
    """Of its own that were done. A server's steps are seconds; each is at the newest step that was reported before it."""
    try:
        served = registry.served_by(run.run_id)
    except NotFoundError:
        return []
    series = next(iter(metrics.query(run.run_id, [SERVER_METRIC], max_points=MAX_VALIDATIONS)), None)
    times_ms, steps = ([], []) if series is None else (series.timestamps_ms, series.steps)
    found = []
    for promotion in registry.promotions(served.name, MAX_PROMOTIONS):
        if promotion.run_id != run.run_id or promotion.state != PromotionState.DONE or not promotion.ended_ms:
            continue
        place = bisect_right(times_ms, promotion.ended_ms)
        version = "" if promotion.version is None else f" {promotion.version.label}"
        text = f"{promotion.action}{version}{f' by {promotion.by}' if promotion.by else ''}"
        found.append(
            Marker(
                kind="promotion", step=steps[place - 1] if place else 0, time_ms=promotion.ended_ms, text=text
            )
        )
    return found
