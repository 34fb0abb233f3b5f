"""What a worker of `mode: inference` is asked for: a contract file, a job, or two variables."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from gen_worker.contract.documents import read_document
from gen_worker.contract.job.rules import parse_job_spec
from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.errors import SpecError
from gen_worker.trainer.attempt.runtime_env import JOB_SPEC_PATH, WorkerEnvironment, read_environment

ROOT = "/tmp/serving"  # noqa: S108  (as that of training, and apart from it)
CHECKPOINT, ADDRESS = "INFERENCE_CHECKPOINT_PATH", "INFERENCE_ADDRESS"
RUN_ID = "serving"  # of a server without a job
_SOURCE = "the worker's environment"


def read_inference_job(environ: Mapping[str, str]) -> tuple[WorkerEnvironment, TrainingJobSpec]:
    """SpecError with every fault at once. Where there is no contract, the two variables win over the job's fields."""
    has_contract = bool(environ.get("TRAINER_CONTRACT_PATH"))
    checkpoint, address = environ.get(CHECKPOINT), environ.get(ADDRESS)
    has_job = has_contract or bool(environ.get("TRAINER_JOB_SPEC_PATH"))
    if not has_job and not checkpoint:
        if not Path(JOB_SPEC_PATH).exists():
            raise SpecError(
                _SOURCE,
                [
                    f"neither {CHECKPOINT} nor TRAINER_JOB_SPEC_PATH is set: set the first to the .meta.json of a"
                    " checkpoint, or the second to a job of mode inference"
                ],
            )
        has_job = True
    environment = read_environment(environ, needs_job=has_job, root=ROOT)
    if not has_job:
        # Relative paths of the job that trained are not known any more: they start here.
        environment = msgspec.structs.replace(environment, base_dir=environment.base_dir or Path.cwd())
        document: Any = {"run_id": RUN_ID, "mode": "inference", "trainer": environment.plugin}
        source = _SOURCE
    else:
        document = read_document(environment.job_spec_path)
        source = str(environment.job_spec_path)
    if not has_contract and isinstance(document, dict):
        document = _with_variables(document, checkpoint, address)
    job = parse_job_spec(document, source=source)
    if job.mode != "inference":
        raise SpecError(
            source,
            [f'mode: found "{job.mode}", but this worker serves: start it with WORKER_MODE={job.mode}'],
        )
    if environment.process is not None and job.serving is not None:
        raise SpecError(
            _SOURCE, ["a server is one process: start it without torchrun, and set `serving.replicas`"]
        )
    return environment, job


def _with_variables(document: dict[str, Any], checkpoint: str | None, address: str | None) -> dict[str, Any]:
    section = document.get("serving")
    if document.get("prediction") is not None or not (section is None or isinstance(section, dict)):
        return document
    serving = dict(section or {})
    if checkpoint:
        serving.pop("version", None)
        serving["checkpoint"] = os.path.abspath(checkpoint)  # noqa: PTH100  (links stay)
    if address:
        serving["address"] = address
    return {**document, "serving": serving} if serving else document
