"""From the section of a job to the version that it names."""

from pathlib import Path
from typing import Any

import msgspec

from gen_worker.contract.checkpoints.choice import CheckpointInfo, read_named, require_finite
from gen_worker.contract.job.model_version import ModelVersion
from gen_worker.contract.job.spec import PredictionSpec, ServingSpec, TrainingJobSpec
from gen_worker.contract.serving import read_live
from gen_worker.errors import CheckpointError, SpecError, StartupError
from gen_worker.inference.model.orders import ModelOptions, threads_of_worker


def find_version(
    section: ServingSpec | PredictionSpec, *, trainer: str | None, base_dir: Path
) -> ModelVersion:
    """CheckpointError where its checkpoint cannot be served. Its data was not read."""
    if section.version is not None:
        read_checkpoint(section.version)
        return section.version
    assert section.checkpoint is not None, "a rule of the job"
    return _version_of(base_dir / section.checkpoint, trainer=trainer, base_dir=base_dir)


def find_served(job: TrainingJobSpec, folder: Path) -> ModelVersion | None:
    """What a server will load first, as far as that is known without its checkpoint."""
    version = job.serving.version if job.serving is not None else None
    if version is None:
        return None
    try:
        live = read_live(folder)
    except StartupError:
        return None
    return version if live is None or live.origin != version.facts else live.version


def model_options(job: TrainingJobSpec) -> ModelOptions:
    """How the model workers of a server compute."""
    assert job.serving is not None, "a rule of the job"
    return ModelOptions(
        max_batch_rows=job.serving.max_batch_rows,
        num_threads=threads_of_worker(job.resources.cpus, job.serving.replicas),
        devices=tuple(job.resources.device_names or ()),
    )


def read_checkpoint(version: ModelVersion) -> CheckpointInfo:
    """The meta of its checkpoint. CheckpointError where it is missing, or is not that of the version any more."""
    info = _read(Path(version.checkpoint))
    if info.meta.data.hash != version.weights_hash or info.step != version.step:
        raise CheckpointError(
            f"{version.checkpoint} has changed: step {info.step} with the data {info.meta.data.hash}, expected step"
            f" {version.step} with {version.weights_hash}"
        )
    return info


def read_if_there(version: ModelVersion) -> CheckpointInfo | None:
    """As `read_checkpoint`; None where that cannot be read any more."""
    try:
        return read_checkpoint(version)
    except CheckpointError:
        return None


def _read(path: Path) -> CheckpointInfo:
    named = read_named(path)
    if isinstance(named, dict):
        raise CheckpointError(f"{path} is a plain state: expected a checkpoint, by its .meta.json")
    try:
        require_finite(named)
    except CheckpointError as fault:
        raise CheckpointError(f"{named.meta_path} cannot be served: it is {fault}") from fault
    return named


def _version_of(path: Path, *, trainer: str | None, base_dir: Path) -> ModelVersion:
    """Of a checkpoint alone: what is known of its run is in its identity."""
    info = _read(path)
    identity: dict[str, Any] = msgspec.json.decode(info.meta.identity)
    config: dict[str, Any] = identity.get("config") or {"run_id": info.meta.run_id}
    trainer = trainer or config.get("trainer") or (identity.get("code") or {}).get("trainer")
    if not trainer:
        raise SpecError(
            str(path),
            [
                "it does not name its trainer class: set TRAINER_PLUGIN, or `trainer` in the job, to module:symbol"
            ],
        )
    return ModelVersion(
        run_id=info.meta.run_id,
        step=info.step,
        weights_hash=info.meta.data.hash,
        checkpoint=str(info.meta_path.absolute()),
        trainer=trainer,
        config={**config, "trainer": trainer},
        base_dir=str(base_dir),
    )
