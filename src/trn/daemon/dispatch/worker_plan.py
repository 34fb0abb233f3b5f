"""An attempt -> all that starts its worker: the plan, the contract and the job file. Built purely, printable, then done."""

import shlex
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from gen_worker.contract.files.durable import replace_file
from gen_worker.contract.installed_packages import is_same_python
from gen_worker.contract.subprocess_contract import TrainerSubprocessContractV1
from gen_worker.frozen_imports import frozen_variables
from trn.core.home import RunFolder
from trn.core.runs import TRAINING, RunRecord
from trn.core.variables import needs_fresh_start
from trn.executors.base import LaunchPlan

ENTRY = (
    "-P",
    "-m",
    "gen_worker.entrypoint",
)  # -P: neither the folder nor the script is on the import path by itself


class WorkerFiles(msgspec.Struct, frozen=True, kw_only=True):
    """A plan, and what has to be in the run's folder before it is launched."""

    plan: LaunchPlan
    contract: TrainerSubprocessContractV1
    job: dict[str, Any]


def build_plan(
    run: RunRecord,
    number: int,
    folder: RunFolder,
    *,
    device_ids: Sequence[str],
    devices_env: Mapping[str, str],
    doorbell: str,
    python: str,
    launcher_python: str,
    is_detected: bool = True,
    inherited: Mapping[str, str] = MappingProxyType({}),
) -> WorkerFiles:
    """Attempt `number` of the run on those devices. `python` is for runs that name no interpreter.

    Only a worker of the launcher's own interpreter can be warm, and only where its `env` holds nothing that loaded
    libraries would not obey; `inherited` is what every worker has in its environment. `is_detected` is False where the devices are the
    settings' word: then the worker takes what it finds instead of being told. So does one of another pool, which gets
    nothing that is true of this machine only.
    """
    interpreter = run.interpreter or python
    given = _variables(run.config)
    env = {
        **given,
        "WORKER_MODE": run.config.get("mode") or "trainer",
        "TRAINER_CONTRACT_PATH": str(folder.contract),
        "TRAINER_ATTEMPT": str(number),
        **({"TRAINER_DOORBELL": doorbell, **devices_env} if run.needs.is_local else {}),
    }
    if run.nonce:
        env["TRAINER_RUN_NONCE"] = run.nonce
    if run.base_dir:
        env["TRAINER_BASE_DIR"] = run.base_dir
    if run.secret_env:
        env["TRAINER_SECRET_ENV"] = ",".join(run.secret_env)  # whose values the worker masks in what it tells
    if _resources(run.config).get("cpus") is not None:
        env.setdefault("OMP_NUM_THREADS", str(run.needs.cpus))
    plan = LaunchPlan(
        run_id=run.run_id,
        number=number,
        argv=(interpreter, *ENTRY),
        env=env,
        cwd=run.base_dir or str(folder.root),
        code_dir=str(folder.code) if run.snapshot else run.base_dir,
        frozen_from=run.frozen_from if run.snapshot else "",
        log_path=str(folder.log),
        attempt_dir=str(folder.attempts),
        checkpoints_dir=str(folder.checkpoints),
        events_path=str(folder.events),
        trainer=run.config.get("trainer") or "",
        nonce=run.nonce,
        devices=tuple(device_ids),
        cpus=run.needs.cpus,
        memory_mb=run.needs.memory_mb,
        gpus=0 if run.needs.is_local else run.needs.gpus,
        is_warm=is_same_python(interpreter, launcher_python) and not needs_fresh_start(given, inherited),
        # As the worker will decide it; to guess wrong costs it a moment, no more.
        is_writer_wanted=run.kind == TRAINING
        and (run.config.get("checkpoint_every") != 0 or bool(run.config.get("callbacks"))),
    )
    contract = TrainerSubprocessContractV1(
        trainer_plugin=run.config.get("trainer") or "",
        job_spec_path=str(folder.job),
        checkpoints_dir=str(folder.checkpoints),
        samples_dir=str(folder.samples),
        events_path=str(folder.events),
    )
    if run.needs.is_local:
        job = with_devices(run.config, device_ids, is_detected=is_detected)
    else:
        job = without_gpus(run.config)
    return WorkerFiles(plan=plan, contract=contract, job=job)


def with_devices(
    config: Mapping[str, Any], device_ids: Sequence[str], *, is_detected: bool = True
) -> dict[str, Any]:
    """The job as its worker sees it: the GPUs that it holds are the only ones there, and numbered from 0.

    torch calls a ROCm device `cuda` too.
    """
    resources = dict(_resources(config))
    asked = resources.pop("devices", None)
    if isinstance(asked, str):
        asked = [asked]
    resources.pop("gpus", None)
    seen = {device_id: f"cuda:{index}" for index, device_id in enumerate(device_ids)}
    if not device_ids:
        resources["devices"] = ["cpu"]
    elif is_detected:
        resources["devices"] = [seen.get(name, name) for name in asked] if asked else list(seen.values())
    return {**config, "resources": resources}


def without_gpus(config: Mapping[str, Any]) -> dict[str, Any]:
    """The job as a worker in another pool sees it: the GPUs that its executor gave it are those that it finds."""
    resources = dict(_resources(config))
    if resources.pop("gpus", None) == 0:
        resources["devices"] = ["cpu"]
    return {**config, "resources": resources}


def write_attempt_files(files: WorkerFiles, folder: RunFolder) -> None:
    """Put the job and the contract in their place, each whole or not at all. Blocks; safe to repeat."""
    folder.attempts.mkdir(parents=True, exist_ok=True)
    for path, content in ((folder.job, files.job), (folder.contract, files.contract)):
        text = msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"
        # Not synced: after a power cut the worker is gone too, and the next attempt writes them again.
        replace_file(path, text, sync="none")


def render_plan(plan: LaunchPlan) -> str:
    """As a person would type it."""
    lines = [f"cd {shlex.quote(plan.cwd)}"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in sorted(plan.env.items())]
    if plan.code_dir:
        lines.append(f'export PYTHONPATH={shlex.quote(plan.code_dir)}"${{PYTHONPATH:+:$PYTHONPATH}}"')
        lines += [
            f"export {name}={shlex.quote(value)}"
            for name, value in frozen_variables(plan.frozen_from, plan.code_dir).items()
        ]
    lines.append(f"{shlex.join(plan.argv)} >> {shlex.quote(plan.log_path)} 2>&1")
    return "\n".join(lines)


def encode_files(files: WorkerFiles) -> bytes:
    """The whole of it as JSON, with the shell's view beside it: what a dry run answers."""
    shell = {"shell": render_plan(files.plan)}
    return msgspec.json.encode({**msgspec.to_builtins(files), **shell})


def _variables(config: Mapping[str, Any]) -> dict[str, str]:
    found = config.get("env")
    return dict(found) if isinstance(found, Mapping) else {}


def _resources(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = config.get("resources")
    return found if isinstance(found, Mapping) else {}
