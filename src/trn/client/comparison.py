"""What differs between runs: config, code, packages, data, metrics, and the first step at which two runs diverge.

`read_facts` gathers what a home knows of a run, without a daemon, and the metric store says how far two curves agree; the
rest is pure.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from gen_worker.contract.checkpoints.choice import scan
from gen_worker.contract.files.regular import read_regular
from trn.core.errors import TrnError
from trn.core.home import Home
from trn.core.runs import RunRecord
from trn.core.snapshots import SnapshotStore
from trn.registry.metrics import Agreement, MetricReader

MIN_THINNED = 3  # points: the last one is among them

# Each run has its own; they do not change the training.
_OWN_FIELDS = ("run_id", "name", "tags", "profiles", "resume_checkpoint_path", "resume_from_latest")


class RunFacts(NamedTuple):
    """What is compared of a run. None: unknown, or no longer in the home."""

    run: RunRecord
    code: Mapping[str, str] | None  # path -> digest of its content
    packages: Mapping[str, str] | None  # name -> version
    python: str | None
    data: Mapping[str, str] | None  # path -> rows, size and digest
    newest: Mapping[str, float]  # metric -> its last value


class Divergence(NamedTuple):
    """The first step at which a metric of two runs differs."""

    runs: tuple[str, str]
    metric: str
    step: int
    values: tuple[float, float]
    num_equal: int  # steps before it that both have, with the same value


class Comparison(NamedTuple):
    """Only what differs; values are in the order of the runs, None where a run does not have it."""

    runs: tuple[str, ...]
    config: dict[str, list[Any]]
    code: dict[str, list[str | None]]
    packages: dict[str, list[str | None]]
    data: dict[str, list[str | None]]
    metrics: dict[str, list[float | None]]  # all of them: the last value
    divergences: list[Divergence]  # of each run and the first
    num_common: list[int]  # steps at which the first and each other run have a metric in common
    unknown: dict[str, list[str]]  # part -> runs for which it is unknown


def read_facts(home: Home, run: RunRecord, metrics: MetricReader | None) -> RunFacts:
    """Blocks: reads the run's folder and its metric points."""
    folder = home.run(run.run_id)
    report = _read_json(folder.report)
    packages, python = report.get("packages"), report.get("python")
    series = [] if metrics is None else metrics.query(run.run_id, max_points=MIN_THINNED)
    return RunFacts(
        run=run,
        code=_read_code(home, run.snapshot),
        packages=None if packages is None else dict(_split_package(item) for item in packages),
        python=None if not isinstance(python, dict) else str(python.get("version", "")),
        data=_read_data(folder.checkpoints),
        newest={found.name: found.values[-1] for found in series},
    )


def agree(metrics: MetricReader | None, one: RunRecord, other: RunRecord) -> Agreement:
    """Blocks: walks the points of both. Without a store they have no step in common."""
    return Agreement() if metrics is None else metrics.compare(one.run_id, other.run_id)


def compare(runs: Sequence[RunFacts], agreements: Sequence[Agreement]) -> Comparison:
    """Of two runs or more; `agreements` are those of the first run and each other."""
    flat = [_flat(_without_own(facts.run.config)) for facts in runs]
    pythons: list[Mapping[str, str] | None] = [
        None if facts.packages is None else {**facts.packages, "python": facts.python or ""} for facts in runs
    ]
    first = runs[0].run.run_id
    divergences = [
        Divergence((first, other.run.run_id), found.metric, found.step, found.values, found.num_equal)
        for other, found in zip(runs[1:], agreements, strict=True)
        if found.metric
    ]
    names = sorted({name for facts in runs for name in facts.newest})
    parts: dict[str, list[Mapping[str, str] | None]] = {
        "code": [facts.code for facts in runs],
        "packages": pythons,
        "data": [facts.data for facts in runs],
    }
    return Comparison(
        runs=tuple(facts.run.run_id for facts in runs),
        config=_differences(flat),
        code=_differences(parts["code"]),
        packages=_differences(parts["packages"]),
        data=_differences(parts["data"]),
        metrics={name: [facts.newest.get(name) for facts in runs] for name in names},
        divergences=divergences,
        num_common=[found.num_common for found in agreements],
        unknown={
            part: missing
            for part, found in parts.items()
            if (missing := [facts.run.run_id for facts, it in zip(runs, found, strict=True) if it is None])
        },
    )


def _differences(parts: Sequence[Mapping[str, Any] | None]) -> dict[str, list[Any]]:
    """Names whose values differ; unknown parts are not compared."""
    known = [part for part in parts if part is not None]
    names = sorted({name for part in known for name in part})
    return {
        name: [None if part is None else part.get(name) for part in parts]
        for name in names
        if any(part.get(name) != known[0].get(name) for part in known[1:])
    }


def _without_own(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in _OWN_FIELDS}


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, item in value.items():
        found |= _flat(item, f"{prefix}{name}.") if isinstance(item, dict) else {f"{prefix}{name}": item}
    return found


def _read_code(home: Home, snapshot: str) -> dict[str, str] | None:
    with contextlib.suppress(TrnError, OSError):
        if snapshot:
            return {
                file.path: file.sha256[:12] for file in SnapshotStore(home.snapshots).manifest(snapshot).files
            }
    return None


def _read_data(checkpoints: Path) -> dict[str, str] | None:
    """Of the manifest that a checkpoint carries."""
    with contextlib.suppress(OSError):
        for info in scan(checkpoints)[0]:
            identity = msgspec.json.decode(info.meta.identity)
            manifest = identity.get("dataset_manifest") if isinstance(identity, dict) else None
            if isinstance(manifest, dict):
                return dict(_data_files(manifest))
    return None


def _data_files(manifest: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for item in manifest.get("files", ()):
        rows = sum(item.get("group_rows", ()))
        yield (
            str(item.get("path")),
            f"{rows} rows, {item.get('size_bytes')} bytes, {str(item.get('footer_digest'))[:12]}",
        )


def _read_json(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        found = msgspec.json.decode(read_regular(path))
        if isinstance(found, dict):
            return found
    return {}


def _split_package(text: str) -> tuple[str, str]:
    name, _, version = text.partition("==")
    return name, version
