"""A job of `mode: inference` as it is submitted -> the job as it is queued: with its model, its class and its names.

`serving.checkpoint` and `prediction.checkpoint` may be RUN[@…]. What the run that saved the checkpoint decided is taken
from it: code, interpreter and the variables of its job. A server has a name, by which it is promoted; one server at a time
has it.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from gen_worker.contract.files.hashes import hash_file
from gen_worker.contract.files.regular import read_regular
from gen_worker.contract.job.model_version import ModelVersion
from gen_worker.contract.job.rules import lay_over
from gen_worker.contract.job.run_ids import MAX_RUN_ID, RUN_ID
from gen_worker.errors import Fault, SpecError
from trn.core.errors import InvalidRequestError
from trn.core.runs import LOCAL_POOL, RunRecord
from trn.daemon.intake.submission import Submission, parse_job, read_config
from trn.daemon.serving.model_choice import ChosenModel, ModelChoice, as_document
from trn.proto.methods import is_loopback

INFERENCE, SERVING, PREDICTION = "inference", "serving", "prediction"
_PREFIX = {SERVING: "serve-", PREDICTION: "predict-"}  # of the ids of their runs
_MODE = b'"inference"'
PARTS = "predictions.json"
# Of the config of the run before: where its data came from, and where it began.
_NOT_OF_THE_NEXT = (
    "run_id",
    "profiles",
    "mock_batches",
    "resume_checkpoint_path",
    "resume_non_finite",
    "resume_older",
)


class InferenceJobs:
    """One for a daemon."""

    def __init__(self, choice: ModelChoice, *, max_config_bytes: int) -> None:
        self._choice = choice
        self._max_config_bytes = max_config_bytes

    async def complete(self, submission: Submission) -> tuple[Submission, list[str]]:
        """(what to queue, notes about its model); a job that trains is returned as it is. InvalidRequestError with all
        faults, NotFoundError for an unknown run."""
        if _MODE not in submission.config_json:
            return submission, []
        config = read_config(submission.config_json, max_config_bytes=self._max_config_bytes)
        kind = kind_of_job(config)
        section = config.get(kind) if kind else None
        if not isinstance(section, dict):
            return submission, []  # the rules of the job say what is wrong
        text = section.get("checkpoint")
        if section.get("version") is not None or not isinstance(text, str) or not text:
            return msgspec.structs.replace(submission, config_json=_encode(_named(config, kind, section))), []
        faults = list(_faults(config, kind))
        try:
            chosen = await self._choice.find(text, base_dir=submission.base_dir)
        except InvalidRequestError as refusal:
            known = [*_field_faults(config), *faults]
            raise _refuse(refusal, f"{kind}.checkpoint", known) from refusal
        faults += _trainer_faults(config, chosen)
        faults += _next_run_faults(config, chosen)
        if faults:
            raise InvalidRequestError("the job is not valid", [*_field_faults(config), *faults])
        return self._filled(submission, config, kind, chosen), list(chosen.notes)

    def _filled(
        self, submission: Submission, config: dict[str, Any], kind: str, chosen: ChosenModel
    ) -> Submission:
        run, version = chosen.run, chosen.version
        section = {name: value for name, value in config[kind].items() if name != "checkpoint"}
        section["version"] = as_document(version)
        env = {**(run.config.get("env") or {}), **(config.get("env") or {})}
        filled = {**config, kind: section, **({"env": env} if env else {})}
        return msgspec.structs.replace(
            submission,
            config_json=_encode(_named(filled, kind, section, family=run.family)),
            snapshot=run.snapshot,
            frozen_from=run.frozen_from,
            interpreter=run.interpreter,
        )


def kind_of_job(config: Mapping[str, Any]) -> str:
    """`serving` or `prediction`; empty for one that trains."""
    if config.get("mode") != INFERENCE:
        return ""
    return next((kind for kind in (SERVING, PREDICTION) if config.get(kind) is not None), "")


def read_version(config: Mapping[str, Any]) -> ModelVersion | None:
    """What a job serves at first, or predicts with. None where it holds none that can be read."""
    kind = kind_of_job(config)
    found = config[kind].get("version") if kind and isinstance(config[kind], Mapping) else None
    try:
        return None if found is None else msgspec.convert(found, ModelVersion)
    except msgspec.ValidationError:
        return None


def without_version(config: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked of a server, besides which model it serves: two that are equal there are one server."""
    section = {
        name: value for name, value in config[SERVING].items() if name not in ("version", "checkpoint")
    }
    without = ("run_id", "tags", "group", "profiles", "trainer")
    return {**{name: value for name, value in config.items() if name not in without}, SERVING: section}


def _named(config: dict[str, Any], kind: str, section: dict[str, Any], family: str = "") -> dict[str, Any]:
    """With its class, and the id and the name that it has where none is given."""
    version = section.get("version")
    found = version if isinstance(version, dict) else {}
    named = dict(config)
    if named.get("trainer") is None and isinstance(found.get("trainer"), str):
        named["trainer"] = found["trainer"]
    own = named.get("run_id")
    base = named.get("name") if kind == SERVING else None
    base = base or (own if kind == SERVING else "") or family or found.get("run_id")
    if not isinstance(base, str) or not base:
        return named
    if own is None:
        named["run_id"] = f"{_PREFIX[kind]}{base}"[:MAX_RUN_ID]
    if kind == SERVING:
        named["name"] = base
    return named


def _faults(config: Mapping[str, Any], kind: str) -> list[Fault]:
    """What a daemon asks of it beside the rules of the job."""
    faults = []
    resources = config.get("resources")
    pool = resources.get("pool") if isinstance(resources, dict) else None
    if pool not in (None, LOCAL_POOL):
        message = f"found {pool!r}, but models are served and predicted with on the daemon's own machine: leave it out"
        faults.append(Fault(message, path="resources.pool", kind="device"))
    if kind != SERVING:
        return faults
    name, address = config.get("name"), config[SERVING].get("address")
    if isinstance(name, str) and (not RUN_ID.match(name) or len(_PREFIX[SERVING] + name) > MAX_RUN_ID):
        message = (
            f"found {name[:60]!r}, expected letters, digits, '.', '_' and '-': a served model is called by it"
        )
        faults.append(Fault(message, path="name", kind="value", found=name[:60]))
    if isinstance(address, str) and not address.startswith("unix:") and ":" in address:
        host = address.rpartition(":")[0]
        if not is_loopback(host):
            message = (
                f"found {address!r}, but requests would travel in the clear: use 127.0.0.1 or a Unix socket, with a proxy"
                " that has TLS before it"
            )
            faults.append(Fault(message, path="serving.address", kind="value", found=address))
    return faults


def _trainer_faults(config: Mapping[str, Any], chosen: ChosenModel) -> Iterator[Fault]:
    """Of a class that is not the one which saved the checkpoint: the code that is loaded is the one of that run."""
    given, own = config.get("trainer"), chosen.version.trainer
    if isinstance(given, str) and given != own:
        message = f"found {given!r}, but {chosen.version.label} was trained by {own!r}: leave it out"
        yield Fault(message, path="trainer", kind="value", found=given)


def _next_run_faults(config: Mapping[str, Any], chosen: ChosenModel) -> Iterator[Fault]:
    """Of the run that feedback would submit: found now, and not when there are rows enough."""
    serving = config.get(SERVING)
    feedback = serving.get("feedback") if isinstance(serving, dict) else None
    if not isinstance(feedback, dict) or all(
        feedback.get(rule) is None for rule in ("rows", "max_age_s", "metric")
    ):
        return
    changes = feedback.get("train")
    if not isinstance(changes, dict | None):
        return  # the rules of the job say so
    for fault in _field_faults(make_next_config(chosen.version, changes or {}, ["feedback.parquet"])):
        place = "serving.feedback.train"
        yield Fault(f"the run that feedback would train: {fault}", path=place, kind=fault.kind)


def _field_faults(config: Mapping[str, Any]) -> list[Fault]:
    try:
        parse_job({"trainer": "module:symbol", **config, "run_id": config.get("run_id") or "run"})
    except SpecError as fault:
        return [Fault.of(item) for item in fault.faults]
    return []


def _refuse(refusal: InvalidRequestError, path: str, known: list[Fault]) -> InvalidRequestError:
    reasons = refusal.faults or [Fault(refusal.reason)]
    own = [
        Fault(f"{refusal.reason}: {reason}" if refusal.faults else str(reason), path=path, kind="file")
        for reason in reasons
    ]
    return InvalidRequestError("the job is not valid", [*own, *known])


def _encode(config: dict[str, Any]) -> bytes:
    return msgspec.json.encode(config)


def make_next_config(
    version: ModelVersion, changes: Mapping[str, Any], files: list[str], left_out: Collection[str] = ()
) -> dict[str, Any]:
    """The job of the run that saved the version, with changes, that trains on these files too and begins at its weights."""
    own = {name: value for name, value in version.config.items() if name not in _NOT_OF_THE_NEXT}
    config = lay_over(own, changes)
    dataset = dict(config.get("dataset") or {})
    inherited = [path for path in dataset.get("parquet_paths") or () if path not in left_out]
    paths = list(dict.fromkeys([*inherited, *files]))  # those of earlier feedback once
    return {**config, "dataset": {**dataset, "parquet_paths": paths}, "weights": version.checkpoint}


def find_missing_output(run: RunRecord) -> str:
    """Why what a completed prediction wrote does not stand any more; empty where it does. Blocks.

    A part is hashed where it was written after the list of parts, which a prediction writes last.
    """
    out = Path(run.base_dir or "/") / str(run.config[PREDICTION].get("out", ""))
    try:
        parts = msgspec.json.decode(read_regular(out / PARTS), type=_Parts)
    except (OSError, msgspec.MsgspecError):
        return f"its output is gone from {out}"
    if parts.run_id != run.run_id:
        return f"{parts.run_id} has predicted into {out} since"
    listed_ns = _stat(out / PARTS)[1]
    for part in parts.parts:
        size_bytes, written_ns = _stat(out / part.name)
        is_same = size_bytes == part.size_bytes
        if is_same and part.hash and written_ns >= listed_ns:
            is_same = _hash(out / part.name) == part.hash
        if not is_same:
            return f"{part.name} is gone from {out}, or has changed"
    return ""


class _Part(msgspec.Struct):
    name: str
    size_bytes: int
    hash: str = ""


class _Parts(msgspec.Struct):
    """The list of its parts that a prediction writes last, as far as it is looked at here."""

    run_id: str
    parts: list[_Part]


def _stat(path: Path) -> tuple[int, int]:
    """(size, time of the last write in ns)."""
    try:
        found = path.stat()
    except OSError:
        return -1, 0
    return found.st_size, found.st_mtime_ns


def _hash(path: Path) -> str:
    try:
        return hash_file(path)
    except OSError:
        return ""
