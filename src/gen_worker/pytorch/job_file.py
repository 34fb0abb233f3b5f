"""A config file as a job: profile and `--set` applied, defaults set, paths made absolute."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from gen_worker.contract.documents import parse_document, read_document, render_value, shorten_faults
from gen_worker.contract.files.durable import replace_file
from gen_worker.contract.job.rules import RUNNER, apply_profile, parse_job_spec
from gen_worker.contract.job.run_ids import run_id_from
from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.errors import SpecError, StartupError
from gen_worker.trainer.datasets.job_content import texts_in

JOB_FILE = "job.json"

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+:")
_REF = re.compile(r"(?P<module>[^\W\d]\w*)[\w.]*:[\w.]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """A job whose file is valid. Its data was not read."""

    config_path: Path
    document: dict[str, Any]
    job: TrainingJobSpec


def read_job_file(
    config_path: Path,
    *,
    profile: str | None = None,
    settings: Sequence[str] = (),
    weights: Path | None = None,
) -> JobFile:
    """The job of a config file, or one SpecError with all faults. Imports torch to check names."""
    source = str(config_path)
    data = read_document(config_path)
    if profile is not None:
        data = apply_profile(data, profile, source=source)
    if not isinstance(data, dict):
        raise SpecError(
            source, [f"the document is {render_value(data)}, expected an object with the fields of a job"]
        )
    document: dict[str, Any] = dict(data)
    apply_settings(document, settings)
    if weights is not None:
        document["weights"] = str(weights.absolute())
    document.setdefault("trainer", RUNNER)
    document.setdefault("run_id", run_id_from(config_path.stem))
    _make_paths_absolute(document, config_path.absolute().parent)
    return JobFile(
        config_path=config_path, document=document, job=_check_document(document, source, config_path)
    )


def write_job_file(job_file: JobFile, folder: Path) -> Path:
    """The job as the worker will read it, written atomically into the run's folder."""
    path = folder / JOB_FILE
    run_id = job_file.job.run_id
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if path.exists():
            found = read_document(path)
            other = found.get("run_id") if isinstance(found, dict) else None
            if other not in (None, run_id):
                raise StartupError(
                    f"{folder} is the folder of run {other!r}, not of {run_id!r}: choose another with --output"
                )
        content = msgspec.json.format(msgspec.json.encode(job_file.document), indent=2) + b"\n"
        replace_file(path, content, sync="none", mode=0o600)
    except OSError as error:
        raise StartupError(f"the job cannot be written to {path}: {error.strerror or error}") from error
    return path.absolute()


def apply_settings(document: dict[str, Any], settings: Sequence[str]) -> None:
    """Apply settings such as `hyperparams.learning_rate=1e-4` in order; values are YAML."""
    for setting in settings:
        path, equals, text = setting.partition("=")
        names = path.split(".")
        if not equals or not all(names):
            raise SpecError(
                "--set", [f"found {render_value(setting)}, expected key=value such as max_steps=100"]
            )
        value = parse_document(text, format_="yaml", source=f"--set {path}") if text.strip() else ""
        _assign(document, names, value, setting)


def _assign(holder: Any, names: list[str], value: object, setting: str) -> None:
    for depth, name in enumerate(names):
        is_last = depth == len(names) - 1
        if isinstance(holder, list) and name.isdecimal() and int(name) < len(holder):
            if is_last:
                holder[int(name)] = value
            else:
                holder = holder[int(name)]
        elif isinstance(holder, dict):
            if is_last:
                holder[name] = value
            else:
                holder = holder.setdefault(name, {})
        else:
            before = ".".join(names[:depth])
            raise SpecError(
                "--set", [f"{setting}: `{before}` is {render_value(holder)} and has no field `{name}`"]
            )


def _check_document(document: dict[str, Any], source: str, config_path: Path) -> TrainingJobSpec:
    from gen_worker.pytorch.sections import read_runner_config

    faults: list[str] = []
    job: TrainingJobSpec | None = None
    try:
        job = parse_job_spec(document, source=source)
    except SpecError as error:
        faults = error.faults
    if document.get("trainer") == RUNNER:  # another class has settings of its own
        sample_every = document.get("sample_every")
        try:
            read_runner_config(
                document.get("hyperparams", {}),
                source=source,
                sample_every=sample_every if type(sample_every) is int else 0,
            )
        except SpecError as error:
            faults = faults + error.faults
    if faults or job is None:
        refused = SpecError(source, shorten_faults(faults))
        for name in _modules_beside(config_path, document.get("hyperparams")):
            folder = config_path.absolute().parent
            refused.add_note(f"{name}.py is in {folder}: start there, or set PYTHONPATH={folder}")
        raise refused
    return job


def _modules_beside(config_path: Path, hyperparams: object) -> list[str]:
    """Modules that `hyperparams` name, that Python does not find, and that are in the config's folder."""
    refs = (found for text in texts_in(hyperparams) if (found := _REF.fullmatch(text)))
    return [
        name
        for name in dict.fromkeys(ref["module"] for ref in refs)
        if config_path.with_name(f"{name}.py").exists()
        and name not in sys.modules
        and find_spec(name) is None
    ]


def _make_paths_absolute(document: dict[str, Any], folder: Path) -> None:
    """Paths of a config are relative to its folder; the job is written to another one."""

    def path(value: Any) -> Any:
        return str(folder / value) if isinstance(value, str) and value else value

    def ref(value: Any) -> Any:
        return path(value) if isinstance(value, str) and not _SCHEME.match(value) else value

    def change(holder: Any, name: str, how: Any) -> None:
        if isinstance(holder, dict) and name in holder:
            value = holder[name]
            holder[name] = [how(item) for item in value] if isinstance(value, list) else how(value)

    def inside(name: str) -> Any:
        """A copy of the object `name`, so that the config is not changed."""
        if isinstance(document.get(name), dict):
            document[name] = dict(document[name])
        return document.get(name)

    change(inside("dataset"), "parquet_paths", path)
    for held_out in ("validation", "test"):
        part = inside(held_out)
        if isinstance(part, dict) and isinstance(part.get("dataset"), dict):
            part["dataset"] = dict(part["dataset"])
            change(part["dataset"], "parquet_paths", path)
    change(document, "weights", path)
    change(document, "resume_checkpoint_path", path)
    inputs = inside("inputs")
    for name in ("base_model_ref", "dataset_parquet_refs", "resume_checkpoint_ref"):
        change(inputs, name, ref)
