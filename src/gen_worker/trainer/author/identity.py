"""The identity in a checkpoint: the job, the author's code, the data."""

import base64
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from gen_worker.contract.job.rules import spec_digest
from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.contract.screen_repr import name_some
from gen_worker.trainer.author.code_identity import code_changes, describe_code
from gen_worker.trainer.contracts import TrainerPlugin
from gen_worker.trainer.steps.batch_source import BatchSource

OWN_SCHEMA = "dataset_schema"  # an Arrow IPC schema message, base64
DATA_READ = "dataset_content"  # checksums of what was read so far; unlike the rest, it grows
# These always differ in a resume.
_OF_EACH_RUN = (
    "run_id",
    "resume_checkpoint_path",
    "resume_from_latest",
    "resume_non_finite",
    "resume_older",
    "inputs.resume_checkpoint_ref",
)


def describe_identity(job: TrainingJobSpec, trainer: TrainerPlugin, source: BatchSource) -> dict[str, Any]:
    """Plain JSON; equal runs have equal identities."""
    manifest = getattr(source, "manifest", None)
    identity = {
        "config_digest": spec_digest(job),
        "job_digest": _digest_of_any_run(job),
        "config": _shown_config(job),
        "code": describe_code(type(trainer)),
        "dataset_manifest": None if manifest is None else msgspec.json.decode(manifest.to_json()),
    }
    schema: Any = getattr(source, "schema", None)
    if manifest is None and hasattr(
        schema, "serialize"
    ):  # own data that has Arrow columns: what a request will have
        identity[OWN_SCHEMA] = base64.b64encode(schema.serialize().to_pybytes()).decode()
    return identity


def changes_since(
    saved: Mapping[str, Any], now: Mapping[str, Any], *, unsaid: Collection[str] = ()
) -> list[str]:
    """What differs in a resumed run, as text. Without the fields `unsaid`."""
    changes = []
    if is_job_changed(saved, now):
        changes += _job_changes(saved, now, unsaid)
    return changes + code_changes(saved, now)


def is_job_changed(saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether the job differs, apart from run id and resume point."""
    is_other = saved.get("config_digest") not in (None, now["config_digest"])
    return is_other and saved.get("job_digest") != now["job_digest"]


def changed_fields(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted name in the job -> (old value, new value); None also where it was not given."""
    config = saved.get("config")
    if config is None:
        return {}
    defaults = _flat(_shown_config(TrainingJobSpec(run_id="any")))  # an older release has fewer fields
    was, is_ = defaults | _flat(config), defaults | _flat(now["config"])
    names = sorted(name for name in {*was, *is_} if was.get(name) != is_.get(name))
    return {name: (was.get(name), is_.get(name)) for name in names if name not in _OF_EACH_RUN}


def _shown_config(job: TrainingJobSpec) -> dict[str, Any]:
    """The job without fields that may be secret or large, or do not affect training."""
    shown: dict[str, Any] = msgspec.to_builtins(job)
    for name in ("env", "uploads", "profiles", "mock_batches", "tags", "group"):
        shown.pop(name)
    return shown


def _digest_of_any_run(job: TrainingJobSpec) -> str:
    """Of the whole job, apart from run id and resume point."""
    inputs = msgspec.structs.replace(job.inputs, resume_checkpoint_ref=None)
    return spec_digest(
        msgspec.structs.replace(
            job,
            run_id="any",
            resume_checkpoint_path=None,
            resume_from_latest=True,
            resume_non_finite=False,
            resume_older=False,
            inputs=inputs,
        )
    )


def describe_change(name: str, was: Any, is_: Any) -> str:
    return f"{name} was {show_value(was)}, is now {show_value(is_)}"


def show_value(value: Any) -> str:
    return "not set" if value is None else f"{value!r:.80}"


def _job_changes(saved: Mapping[str, Any], now: Mapping[str, Any], unsaid: Collection[str]) -> list[str]:
    if saved.get("config") is None:
        return ["the job changed"]
    changed = changed_fields(saved, now)
    if not changed:  # a field that `_shown_config` leaves out; older checkpoints do not show it
        return ["the job changed"] if "job_digest" in saved else []
    shown = [describe_change(name, was, is_) for name, (was, is_) in changed.items() if name not in unsaid]
    if not shown:
        return []
    return [f"the job changed: {name_some(shown, separator='; ')}"]


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """By dotted names. An empty object counts as missing."""
    found: dict[str, Any] = {}
    for name, item in value.items():
        found |= _flat(item, f"{prefix}{name}.") if isinstance(item, dict) else {f"{prefix}{name}": item}
    return found
