"""One run and all that is known of it, read without a daemon."""

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from gen_worker.contract.checkpoints.choice import check_quickly, choose_newest, scan
from trn.cli.reading.explanation import Checkpoint, Surroundings
from trn.cli.reading.registry_view import older_release, open_read_only, unreadable
from trn.core.artifacts.records import ArtifactRecord
from trn.core.errors import NotFoundError
from trn.core.home import Home
from trn.core.runs import SERVER, AttemptRecord, LineagePart, RunRecord, RunState
from trn.core.serving.records import Promotion, ServedModel
from trn.executors.local.liveness import find_gone
from trn.registry.base import ReadableRegistry
from trn.registry.connection import is_older
from trn.registry.families import FIRST
from trn.registry.metrics import Extremes, MetricReader, RepeatedSteps, Series, line_of_descent
from trn.registry.reader import RegistryReader

PAGE = 1000
MAX_REFUSED = 5  # shown with a run
MAX_PROMOTIONS = 20


class FoundRun(NamedTuple):
    """A run, its attempts, its line of descent (the oldest run first, itself last), and the newest of its family."""

    run: RunRecord
    attempts: list[AttemptRecord]
    lineage: list[LineagePart]
    newest: str = ""

    @property
    def as_typed(self) -> RunRecord:
        """The run under the id that means it on a command line: the first of a family is `family.1` once there are
        newer ones.
        """
        run = self.run
        is_older = run.member == 1 and self.newest not in ("", run.run_id)
        return msgspec.structs.replace(run, run_id=f"{run.run_id}{FIRST}") if is_older else run


class ShownArtifacts(NamedTuple):
    """The newest video and sample that are present, and files that were refused, the newest first."""

    newest: list[ArtifactRecord]
    refused: list[ArtifactRecord]


class FoundMetrics(NamedTuple):
    """The metrics of a run by name: its points, merged to few, and the extremes of all of them."""

    series: dict[str, Series]
    extremes: dict[str, Extremes]
    curves: dict[str, Series]  # of its whole line of descent
    repeated: RepeatedSteps = RepeatedSteps()


def find_metrics(home: Home, found: FoundRun, *, max_points: int) -> FoundMetrics:
    """None where there is no file of them, or it cannot be read."""
    run_id = found.run.run_id
    with contextlib.suppress(sqlite3.Error), open_metrics(home) as reader:
        if reader is not None:
            series = {series.name: series for series in reader.query(run_id, max_points=max_points)}
            line = reader.query_line(line_of_descent(found.lineage), max_points=max_points)
            curves = {curve.name: curve for curve in line}
            return FoundMetrics(series, reader.extremes(run_id), curves, reader.repeated_steps(run_id))
    return FoundMetrics({}, {}, {})


def find_curve(home: Home, found: FoundRun, name: str, *, max_points: int) -> Series | None:
    """One metric of its whole line of descent; None as in `find_metrics`."""
    with contextlib.suppress(sqlite3.Error), open_metrics(home) as reader:
        if reader is not None:
            line = line_of_descent(found.lineage)
            return next(iter(reader.query_line(line, [name], max_points)), None)
    return None


@contextlib.contextmanager
def open_metrics(home: Home) -> Iterator[MetricReader | None]:
    """The home's metric points; None where no run has reported any yet."""
    if not home.metrics.exists():
        yield None
        return
    connection = open_read_only(str(home.metrics))
    connection.row_factory = sqlite3.Row
    with contextlib.closing(MetricReader(connection)) as reader:
        yield reader


def find_run(home: Home, run_id: str, *, is_exact: bool = False) -> FoundRun:
    """The run that is meant, by the rules of the daemon. NotFoundError, AmbiguousError, RegistryError."""
    if not home.registry.exists():
        raise NotFoundError(f"there is no run {run_id!r}: nothing was ever submitted to {home.root}")
    with open_registry(home) as reader:
        run = reader.find(run_id, is_exact=is_exact)
        newest = reader.find(run.family).run_id
        return FoundRun(run, reader.attempts(run.run_id), reader.lineage(run), newest)


def find_artifacts(home: Home, run_id: str, *, kind: str = "", state: str = "") -> list[ArtifactRecord]:
    """All of them, the newest first."""
    found: list[ArtifactRecord] = []
    before: tuple[int, str] | None = None
    with open_registry(home) as reader:
        while page := reader.artifacts(run_id, kind=kind, state=state, before=before, limit=PAGE):
            found += page
            before = page[-1].seq, page[-1].artifact_id
    return found


def find_shown_artifacts(home: Home, run: RunRecord) -> ShownArtifacts:
    """What a look at the run shows of them."""
    with open_registry(home) as reader:
        named = (run.newest_video, run.newest_sample)
        newest = [reader.artifact(artifact_id) for artifact_id in named if artifact_id]
        refused = reader.artifacts(run.run_id, state="refused", limit=MAX_REFUSED)
    return ShownArtifacts(newest, refused if run.num_refused_artifacts else [])


def require_known(home: Home, run_ids: Sequence[str]) -> None:
    """NotFoundError or AmbiguousError for the first that means no run, unless it was removed before."""
    for run_id in run_ids:
        try:
            find_run(home, run_id)
        except NotFoundError:
            if not home.registry.exists():
                raise
            with open_registry(home) as reader:
                if not reader.was_removed(run_id):
                    raise


def look_around(home: Home, found: FoundRun, at_ms: int) -> Surroundings:
    """What its explanation takes besides: of the registry, the executor and the run's folder. RegistryError."""
    run = found.run
    if run.state is RunState.PENDING:
        with open_registry(home) as reader:
            devices: dict[str, list[str]] = {}
            for slot in reader.slots():
                if slot["run_id"]:
                    devices.setdefault(slot["run_id"], []).append(slot["device_id"])
            holdings = reader.holdings()
            return Surroundings(
                devices=devices,
                cpus={row["run_id"]: row["cpus"] for row in holdings},
                memory_mb={row["run_id"]: row["memory_mb"] for row in holdings},
                num_ahead=reader.num_ahead(run, at_ms),
                checkpoint=find_checkpoint(home.run(run.run_id).checkpoints, run.run_id, run.nonce),
            )
    if run.kind == SERVER:
        return Surroundings(worker_gone=_find_gone(found), served=find_served(home, run.run_id)[0])
    folder = home.run(run.run_id).checkpoints
    return Surroundings(
        worker_gone=_find_gone(found),
        checkpoint=find_checkpoint(folder, run.run_id, run.nonce),
        unsound=find_unsound(folder, run.run_id) if run.state is RunState.COMPLETED else "",
    )


def find_served(home: Home, run_id: str) -> tuple[ServedModel | None, list[Promotion]]:
    """What that server's name answers with, and its promotions, the newest first; None where another has its name, or the
    run is no server."""
    with open_registry(home) as reader:
        try:
            served = reader.served_by(run_id)
        except NotFoundError:
            return None, []
        return served, reader.promotions(served.name, MAX_PROMOTIONS)


def _find_gone(found: FoundRun) -> str:
    """How we know that the process of its newest attempt does not live; of a worker in another pool nothing is known."""
    newest = found.attempts[-1] if found.attempts else None
    if newest is None or newest.ended_ms is not None or not newest.worker or not found.run.needs.is_local:
        return ""
    return _say_gone(newest)


def _say_gone(attempt: AttemptRecord) -> str:
    match find_gone(attempt.worker):
        case "ended":
            return f"its process {attempt.pid} has ended"
        case "rebooted":
            return f"its process {attempt.pid} was started before this machine was, or on another"
        case None:
            return ""


def find_unsound(folder: Path, run_id: str) -> str:
    """Which values of the newest checkpoint are not finite; empty: none, or there is no checkpoint."""
    infos = [info for info in scan(folder)[0] if info.meta.run_id == run_id]
    return infos[0].reason if infos and not infos[0].verified else ""


def find_checkpoint(folder: Path, run_id: str, nonce: str = "") -> Checkpoint | None:
    """What a resume takes, if its bytes are what their sizes promise: the worker reads them, and may pass it over."""
    with contextlib.suppress(OSError):
        newest = choose_newest(folder, check_quickly, of_run=run_id, nonce=nonce).taken
        return None if newest is None else Checkpoint(path=str(newest.meta_path), step=newest.step)
    return None


@contextlib.contextmanager
def open_registry(home: Home) -> Iterator[ReadableRegistry]:
    """The home's registry, without a daemon, also in a home that cannot be written. RegistryError."""
    try:
        connection = open_read_only(str(home.registry))
        connection.row_factory = sqlite3.Row
        with contextlib.closing(RegistryReader(connection)) as reader:
            if is_older(connection, "trn.registry.migrations"):
                raise older_release(home)
            yield reader
    except sqlite3.Error as fault:
        raise unreadable(home, fault) from fault
