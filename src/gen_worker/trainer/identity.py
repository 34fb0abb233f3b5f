"""What a checkpoint says about where it came from: the job, the author's code, the data."""

import hashlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from gen_worker.trainer.batch_source import BatchSource
from gen_worker.trainer.contracts import TrainerPlugin, TrainingJobSpec
from gen_worker.trainer.job_spec import spec_digest


def describe_identity(job: TrainingJobSpec, trainer: TrainerPlugin, source: BatchSource) -> dict[str, Any]:
    """Plain JSON; equal runs have equal identities."""
    manifest = getattr(source, "manifest", None)
    return {
        "config_digest": spec_digest(job),
        "code": _code_identity(type(trainer)),
        "dataset_manifest": None if manifest is None else msgspec.json.decode(manifest.to_json()),
    }


def changes_since(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What a resumed run does differently, in words; allowed, but never without a word."""
    changes = []
    if saved.get("config_digest") not in (None, now["config_digest"]):
        changes.append("the job changed")
    if saved.get("code") not in (None, now["code"]):
        changes.append(f"the code of {now['code']['trainer']} changed")
    return changes


def _code_identity(trainer_class: type) -> dict[str, Any]:
    identity: dict[str, Any] = {"trainer": f"{trainer_class.__module__}:{trainer_class.__qualname__}"}
    try:
        path = Path(inspect.getfile(trainer_class))
        identity["file"] = path.name
        identity["digest"] = "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, TypeError):
        identity["file"] = None  # made in memory: a notebook, a test
    return identity
