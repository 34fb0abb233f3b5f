"""Job documents -> TrainingJobSpec: profiles, rules that join fields, and the digest of what was asked for."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from gen_worker.contract.document_schema import convert_document, nearest_name, with_intended_names
from gen_worker.contract.documents import read_document, render_value, require_plain
from gen_worker.contract.files.hashes import hash_bytes
from gen_worker.contract.job.inference_rules import SECTIONS, inference_faults
from gen_worker.contract.job.run_ids import run_id_from
from gen_worker.contract.job.spec import API_VERSION, JOB_DEFAULTS, DatasetSpec, TrainingJobSpec
from gen_worker.contract.screen_repr import changed_fields
from gen_worker.errors import Fault, SpecError

RUNNER = "gen_worker.pytorch_runner:PyTorchTrainer"
_OF_THE_RUNNER = frozenset({"model", "columns", "loss"})  # fields of `hyperparams` that it cannot do without


def read_job_spec(path: str | Path, *, profile: str | None = None) -> TrainingJobSpec:
    """The job in a JSON, YAML or TOML file, with one of its profiles applied if asked; else a SpecError."""
    data = read_document(path)
    if profile is not None:
        data = apply_profile(data, profile, source=str(path))
    return parse_job_spec(data, source=str(path))


def parse_job_spec(data: object, *, source: str) -> TrainingJobSpec:
    """The job in plain data, or one SpecError with every fault in it."""
    require_plain(data, source=source)
    document = name_runner(_require_object(data, source))
    version = document.get("trainer_api_version", API_VERSION)
    if version != API_VERSION:
        # Another version may mean anything by its fields: judging them by ours would only mislead.
        message = (
            f"found {render_value(version)}, but this worker reads only "
            f'"{API_VERSION}": use a worker of that version or rewrite the document as {API_VERSION}'
        )
        raise SpecError(source, [_fault("trainer_api_version", message)])
    broken_rules = list(rule_faults(with_intended_names(document, TrainingJobSpec)))
    return convert_document(document, TrainingJobSpec, source=source, more_faults=broken_rules)


def name_runner(document: dict[str, Any], *, path: Path | None = None) -> dict[str, Any]:
    """The document; where it names no trainer class and its `hyperparams` are those of a config for the PyTorch
    runner, a copy that names the runner. So a config for the runner is a job, and is called like its file.
    """
    hyperparams = document.get("hyperparams")
    if document.get("trainer") is not None or not isinstance(hyperparams, dict):
        return document
    if len(_OF_THE_RUNNER & hyperparams.keys()) < 2:
        return document
    file_name = {} if path is None else {"run_id": run_id_from(path.stem)}
    return {**file_name, **document, "trainer": RUNNER}


def apply_profile(data: object, name: str, *, source: str = "job") -> dict[str, Any]:
    """The document with `profiles[name]` laid over it, objects merged key by key; `profiles` itself is spent."""
    require_plain(data, source=source)
    document = _require_object(data, source)
    profiles = document.get("profiles") or {}
    if not isinstance(profiles, dict):
        raise SpecError(source, [f"profiles: found {render_value(profiles)}, expected an object of profiles"])
    if name not in profiles:
        nearest = nearest_name(name, list(profiles))
        known = ", ".join(profiles) if profiles else "none"
        hint = f"did you mean `{nearest}`?" if nearest else f"the document has {known}"
        raise SpecError(source, [f"profiles: unknown profile `{name}`: {hint}"])
    overlay = profiles[name]
    if not isinstance(overlay, dict):
        raise SpecError(source, [f"profiles.{name}: found {render_value(overlay)}, expected an object"])
    if "profiles" in overlay:
        raise SpecError(source, [f"profiles.{name}.profiles: a profile cannot hold profiles"])
    base = {key: value for key, value in document.items() if key != "profiles"}
    return _merge(base, overlay)


def lay_over(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """`overlay` over `base`, objects key by key; null takes a field away."""
    merged = dict(base)
    for key, value in overlay.items():
        below = merged.get(key)
        if value is None:
            merged.pop(key, None)
        elif isinstance(below, Mapping) and isinstance(value, Mapping):
            merged[key] = lay_over(below, value)
        else:
            merged[key] = value
    return merged


def spec_digest(spec: TrainingJobSpec) -> str:
    """`sha256:…` over the canonical JSON of the spec.

    Fields at their default are left out, so that a default written out or not, and a release that adds a
    field, give the same digest. `profiles` are left out too: one was applied before, or none.
    """
    import json

    asked_for = _without_defaults(spec)
    asked_for.pop("profiles", None)
    require_plain(asked_for, source=f"job {spec.run_id}")
    canonical = json.dumps(
        asked_for, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return hash_bytes(canonical.encode())


def _require_object(data: object, source: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise SpecError(
            source, [f"the document is {render_value(data)}, expected an object with the fields of a job"]
        )
    return data


def _merge(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in overlay.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _without_defaults(record: msgspec.Struct) -> dict[str, Any]:
    return {
        field.encode_name: _without_defaults(value) if isinstance(value, msgspec.Struct) else value
        for field, value in changed_fields(record)
    }


def rule_faults(document: dict[str, Any]) -> Iterator[Fault]:
    """Faults between fields. Judged on the raw document, so that they join the faults within fields."""
    if document.get("mode") == "inference":
        yield from inference_faults(document)
    else:
        for section in SECTIONS:
            if document.get(section) is not None:
                yield _fault(section, 'given, but only `mode: "inference"` reads it')
        yield from _training_faults(document)
        yield from find_unreported(document)
    resources, artifacts = _section(document, "resources"), _section(document, "artifacts")
    inputs = _section(document, "inputs")
    if resources.get("devices") is not None and resources.get("gpus") is not None:
        yield _both_fault("resources.devices", "resources.gpus")
    if document.get("resume_checkpoint_path") is not None and inputs.get("resume_checkpoint_ref") is not None:
        yield _both_fault("resume_checkpoint_path", "inputs.resume_checkpoint_ref")
    if document.get("group") is not None and _section(document, "tags").get("group") is not None:
        yield _fault(
            "group",
            "given together with the tag `group`, expected one of the two: a group is kept as that tag",
        )
    if artifacts.get("keep_best") and not artifacts.get("keep_last"):
        yield _fault(
            "artifacts.keep_best",
            f"found {render_value(artifacts['keep_best'])}, but `artifacts.keep_last` is 0, which keeps all: "
            "set `artifacts.keep_last` to 1 or more",
        )
    run_id = document.get("run_id")
    if isinstance(run_id, str) and (run_id == "." or ".." in run_id or run_id.endswith("\n")):
        yield Fault.of_value(
            "run_id", render_value(run_id), 'one without ".." and line ends', ": it names a folder"
        )


def _training_faults(document: dict[str, Any]) -> Iterator[Fault]:
    max_steps, mock_batches = document.get("max_steps"), document.get("mock_batches")
    dataset, validate_every = _section(document, "dataset"), document.get("validate_every")
    if max_steps is None and mock_batches is None and document.get("epochs") is None:
        yield _fault(
            "max_steps",
            "neither it nor `epochs` is given, expected one of them (only `mock_batches` needs neither)",
        )
    yield from _data_source_faults(dataset, _section(document, "inputs"), mock_batches)
    if dataset:
        yield from _own_data_faults("dataset", dataset)
    for name in ("validation", "test"):
        if isinstance(held_out := _section(document, name).get("dataset"), dict):
            yield from _own_data_faults(f"{name}.dataset", held_out)
    if dataset.get("generated") and max_steps is None:
        yield _fault(
            "max_steps",
            "not given, but `dataset.generated` has no end of an epoch: expected a number of steps",
        )
    if validate_every not in (None, 0) and _section(document, "validation").get("dataset") is None:
        yield _fault(
            "validate_every",
            f"found {render_value(validate_every)}, but there is nothing to validate on: "
            "give `validation.dataset` or set it to 0",
        )


def find_unreported(document: dict[str, Any]) -> Iterator[Fault]:
    """Faults of what needs a metric that nothing reports."""
    silence, is_validated = _say_silence(document), document.get("validate_every") not in (None, 0)
    if document.get("early_stopping") is not None:
        metric = _section(document, "early_stopping").get("metric")
        is_of_training = isinstance(metric, str) and metric.startswith("train/")
        if is_of_training and silence:
            yield _fault(
                "early_stopping.metric",
                f"found {render_value(metric)}, but {silence}: no step reports it. Set a smaller `metric_every`, "
                "for example 10",
            )
        if not is_of_training and not is_validated:
            shown = "the default `val/loss`" if metric is None else render_value(metric)
            yield _fault(
                "early_stopping.metric",
                f"found {shown}, but nothing is validated: "
                'set `validate_every`, or watch a metric that starts with "train/"',
            )
    if not silence or is_validated:
        return
    for section, default in (
        ("checkpoints", JOB_DEFAULTS.checkpoints),
        ("artifacts", JOB_DEFAULTS.artifacts),
    ):
        num_best = _section(document, section).get("keep_best")
        if num_best not in (None, 0, default.keep_best):
            yield _fault(
                f"{section}.keep_best",
                f"found {render_value(num_best)}, but {silence} and nothing is validated: no metric says which is "
                "best. Set a smaller `metric_every`, for example 10",
            )


def _say_silence(document: dict[str, Any]) -> str:
    """Why no step of the run reports metrics; empty where one does."""
    every, end = document.get("metric_every"), document.get("max_steps")
    every = JOB_DEFAULTS.metric_every if every is None else every
    if document.get("fast_dev_run"):  # which reports each step
        return ""
    if every == 0:
        return "`metric_every` is 0"
    if isinstance(every, int) and isinstance(end, int) and every > end:
        return f"`metric_every` is {every}, and `max_steps` is {end}"
    return ""


_NOTHING: dict[str, Any] = {}


def _section(document: dict[str, Any], name: str) -> dict[str, Any]:
    """The object under that name; an empty one where there is none."""
    found = document.get(name)
    return found if isinstance(found, dict) else _NOTHING


def _both_fault(one: str, other: str) -> Fault:
    return _fault(one, f"given together with `{other}`, expected at most one of the two")


def _fault(path: str, message: str) -> Fault:
    return Fault(message, path=path, kind="rule")


_NO_DATA = DatasetSpec()


def _own_data_faults(place: str, dataset: dict[str, Any]) -> Iterator[Fault]:
    """Of `source`, with which fields that are about parquet files mean nothing."""
    source = dataset.get("source")
    if source is None:
        if dataset.get("args"):
            yield _fault(f"{place}.args", f"given without `{place}.source`, which alone would take them")
        if place != "dataset" and not dataset.get("parquet_paths"):
            yield _fault(place, f"there is no data, expected `{place}.parquet_paths` or `{place}.source`")
        return
    if isinstance(source, str) and ":" not in source:
        yield Fault.of_value(f"{place}.source", render_value(source), "module:symbol")
    if place != "dataset" and dataset.get("parquet_paths"):
        yield _fault(
            f"{place}.parquet_paths", f"given together with `{place}.source`, expected only one of the two"
        )
    for name in ("columns", "decode_cache", "readahead"):
        if dataset.get(name, default := getattr(_NO_DATA, name)) != default:
            remedy = (
                ": for parallel reading, let it be a DataLoader with num_workers"
                if name == "readahead"
                else ""
            )
            yield _fault(
                f"{place}.{name}",
                f"given together with `{place}.source`, but it is for parquet files{remedy}",
            )


def _data_source_faults(
    dataset: dict[str, Any], inputs: dict[str, Any], mock_batches: Any
) -> Iterator[Fault]:
    sources = {
        "dataset.parquet_paths": dataset.get("parquet_paths"),
        "inputs.dataset_parquet_refs": inputs.get("dataset_parquet_refs"),
        "dataset.generated": dataset.get("generated"),
        "dataset.source": dataset.get("source"),
    }
    found = [name for name, value in sources.items() if value]
    if mock_batches is not None:
        found.append("mock_batches")
    if len(found) == 1:
        return
    choices = "`dataset.parquet_paths`, `dataset.source`, `inputs.dataset_parquet_refs`, `dataset.generated` or `mock_batches`"
    if not found:
        yield _fault("dataset", f"there is no data, expected one of {choices}")
    else:
        others = " and ".join(f"`{name}`" for name in found[1:])
        yield _fault(found[0], f"given together with {others}, expected only one of {choices}")
