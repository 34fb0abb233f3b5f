"""What is asked for -> a run that can be queued, or every fault of it. Pure but for the names and the nonce that it
draws: nothing is looked up or written.

What it is equal to is found out after that, see `run_identity`.

A run that no machine of ours could ever hold is refused here, with the most that it could ask for.
"""

import contextlib
import io
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gen_worker.contract.documents import MAX_DEPTH, parse_document
from gen_worker.contract.job.rules import name_runner, parse_job_spec, rule_faults
from gen_worker.contract.job.run_ids import slug_from
from gen_worker.contract.job.spec import API_VERSION, ResourcesSpec, TrainingJobSpec
from gen_worker.contract.redaction import Secret
from gen_worker.errors import Fault, SpecError
from trn.core import variables
from trn.core.errors import InfeasibleError, InvalidRequestError
from trn.core.home import require_run_id
from trn.core.runs import LOCAL_POOL, PREDICTION, SERVER, TRAINING, Needs, RunOptions
from trn.core.variables import is_variable_name
from trn.daemon.dispatch.placement import kind_of
from trn.daemon.machine.devices import Inventory
from trn.registry.base import NewRun

MAX_PRIORITY = 1000
MAX_TEXT = 4096  # of a path, a name, an identity
MAX_SECRET = 64 << 10
NONCE_BYTES = 8
CPU = "cpu"
_SOURCE = "the job"
_IS_ODD = re.compile(rb"\\u|\d{19}")  # what plain data might not hold


class Submission(RunOptions, frozen=True, kw_only=True):
    """What a submit or a resume gives: the message `Submission` of the proto, and what the daemon finds for a resume."""

    config_json: bytes
    code_identity: str = ""
    force_new: bool = False  # a new run even if an equal one exists
    is_dry_run: bool = False
    is_import_tried: bool = False  # load its code first
    takes_refusal: bool = False  # a refusal is an answer, not an error
    secret_env: Mapping[str, Secret] = {}
    caller_env: Mapping[str, str] = {}  # fingerprints, made with the salt
    caller_salt: str = ""
    family: str = ""  # of a resume without a run_id, set by the daemon; empty: a name is drawn


def read_submission(
    submission: Submission,
    *,
    inventory: Inventory,
    max_config_bytes: int,
    pools: Sequence[str] = (LOCAL_POOL,),
) -> NewRun:
    """The run to queue, but for its digest. InvalidRequestError with all faults; InfeasibleError where it could never
    start."""
    config = name_runner(read_config(submission.config_json, max_config_bytes=max_config_bytes))
    config = _without_secrets(config, submission.secret_env)
    faults = [*_request_faults(submission), *_variable_faults(config)]
    if config.get("run_id") is None:
        config.pop("run_id", None)
        named = {**config, "run_id": submission.family or make_run_id(config)}
    else:
        named = config
    try:
        job = parse_job(named)
    except SpecError as fault:
        raise InvalidRequestError(f"{_SOURCE} is not valid", [*fault.faults, *faults]) from fault
    if job.trainer is None:
        message = "not given, expected the trainer class as module:symbol"
        faults.append(Fault(message, path="trainer", kind="missing", expected="module:symbol"))
    faults += _pool_faults(job.resources, pools)
    if faults:
        raise InvalidRequestError(f"{_SOURCE} is not valid", faults)
    require_run_id(job.run_id)
    needs = needs_of(job, inventory)
    check_fit(job, needs, inventory)
    return NewRun(
        **{name: getattr(submission, name) for name in RunOptions.__struct_fields__},
        run_id=job.run_id,
        digest="",
        config=config,
        name=job.name or "",
        max_attempts=job.retry.max_attempts,
        needs=needs,
        tags=job.tags if job.group is None else {**job.tags, "group": job.group},
        secret_env=tuple(sorted(submission.secret_env)),
        nonce=_random.hex(NONCE_BYTES),
        kind=SERVER if job.serving is not None else PREDICTION if job.prediction is not None else TRAINING,
        served_name="" if job.serving is None else job.name or job.run_id,
    )


def read_config(config_json: bytes, *, max_config_bytes: int) -> dict[str, Any]:
    """The plain data of a config: bounded in size and depth."""
    if len(config_json) > max_config_bytes:
        raise InvalidRequestError(
            f"the config has {len(config_json)} bytes, at most {max_config_bytes} are taken: put data into files and"
            " name them, or raise max_config_bytes in the settings"
        )
    simple = _read_simple(config_json)
    if simple is not None:
        return simple
    try:
        config = parse_document(config_json.decode(), format_="json", source=_SOURCE)
    except UnicodeDecodeError as fault:
        raise InvalidRequestError(f"the config is not UTF-8 text: byte {fault.start}") from fault
    except SpecError as fault:
        raise InvalidRequestError(f"{_SOURCE} is not valid", fault.faults) from fault
    if not isinstance(config, dict):
        raise InvalidRequestError("the config is no object: expected one with the fields of a job")
    return config


def _read_simple(config_json: bytes) -> dict[str, Any] | None:
    """The usual config, as our clients write it: then what came is what would be written again, byte for byte, and so
    has no name twice and no number that lost a digit. None: it takes the long way, which says what is wrong.
    """
    if config_json.count(b"{") + config_json.count(b"[") > MAX_DEPTH or _IS_ODD.search(config_json):
        return None
    try:
        config = msgspec.json.decode(config_json)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    is_as_written = isinstance(config, dict) and msgspec.json.encode(config) == config_json
    return config if is_as_written else None


def parse_job(config: dict[str, Any]) -> TrainingJobSpec:
    """The job in plain data, or a SpecError with every fault.

    A good one is converted at once; only what msgspec or a rule refuses takes the long way, which finds all faults.
    """
    if config.get("trainer_api_version", API_VERSION) == API_VERSION:
        with contextlib.suppress(msgspec.ValidationError):
            job = msgspec.convert(config, TrainingJobSpec)
            if next(rule_faults(config), None) is None:
                return job
    return parse_job_spec(config, source=_SOURCE)


def make_run_id(config: dict[str, Any]) -> str:
    """A readable name that no run has."""
    name = config.get("name") or str(config.get("trainer") or "").rpartition(":")[2] or "run"
    return f"{slug_from(str(name)) or 'run'}-{_random.hex(4)}"


class _RandomBytes:
    """Of the system, many at a time: a call of it for each name and nonce took a tenth of a submit. Any thread; not for
    forks."""

    def __init__(self) -> None:
        self._drawn = io.BytesIO()

    def hex(self, size_bytes: int) -> str:
        found = self._drawn.read(size_bytes)
        if len(found) < size_bytes:
            self._drawn = drawn = io.BytesIO(os.urandom(4096))
            found = drawn.read(size_bytes)
        return found.hex()


_random = _RandomBytes()


def needs_of(job: TrainingJobSpec, inventory: Inventory) -> Needs:
    """What the run holds while it runs. Where the job says nothing: a GPU for each process, as far as there are any.

    What another pool than `local` has is not known here: there a run gets the GPUs that it asks for.
    """
    wanted = job.resources
    devices: tuple[str, ...] = ()
    gpus = 0
    if wanted.device_names is not None:
        devices = tuple(dict.fromkeys(name for name in wanted.device_names if name != CPU))
    elif wanted.gpus is not None:
        gpus = wanted.gpus
    elif wanted.pool == LOCAL_POOL:
        gpus = min(wanted.processes, most_gpus([device.device_id for device in inventory.devices]))
    return Needs(
        devices=devices,
        gpus=gpus,
        cpus=wanted.cpus or max(wanted.processes, 1 if job.serving is None else job.serving.replicas),
        memory_mb=wanted.memory_mb or 0,
        pool=wanted.pool,
    )


def most_gpus(device_ids: list[str]) -> int:
    """How many GPUs one run can have: they are of one kind."""
    kinds = [kind_of(device_id) for device_id in device_ids]
    return max(map(kinds.count, kinds), default=0)


def check_fit(job: TrainingJobSpec, needs: Needs, inventory: Inventory) -> None:
    """InfeasibleError with every reason why it could never start here, and the most that it could ask for."""
    device_ids = [device.device_id for device in inventory.devices]
    faults = []
    if needs.is_local:
        faults = find_misfits(needs, device_ids, cpus=inventory.cpus, memory_mb=inventory.memory_mb)
    num_gpus, processes = len(needs.devices) or needs.gpus, job.resources.processes
    is_shared_on_purpose = num_gpus == 1 and (job.resources.devices or job.resources.gpus)
    if not faults and 0 < num_gpus < processes and not is_shared_on_purpose:
        message = (
            f"{processes} processes need a GPU each and get {num_gpus}: ask for at most {num_gpus}, or for the CPU with"
            ' resources.devices ["cpu"]'
        )
        faults.append(_device_fault("processes", message))
    if faults:
        where = "this machine" if needs.is_local else f"the pool {needs.pool}"
        raise InfeasibleError(f"{where} can never run it", faults)


def find_misfits(needs: Needs, device_ids: list[str], *, cpus: int, memory_mb: int) -> list[Fault]:
    """Why needs exceed all that there is; empty where they would fit if nothing else ran."""
    faults = []
    unknown = [name for name in needs.devices if name not in device_ids]
    if unknown:
        there = ", ".join(device_ids) or "no GPU"
        instead = (
            "name one of those, or any with resources.gpus"
            if device_ids
            else f'use ["{CPU}"], or leave it out'
        )
        message = f"asks for {', '.join(unknown)}, this machine has {there}: {instead}"
        faults.append(_device_fault("devices", message))
    elif len({kind_of(name) for name in needs.devices}) > 1:
        faults.append(_device_fault("devices", "names GPUs of several kinds, a run can have only one kind"))
    most = most_gpus(device_ids)
    if needs.gpus > most:
        instead = f"{most}: ask for at most {most}"
        if not most:
            instead = f'none: leave it out, or set resources.devices to ["{CPU}"]'
        faults.append(
            _device_fault(
                "gpus",
                f"asks for {needs.gpus} GPU{'' if needs.gpus == 1 else 's'}, this machine has {instead}",
            )
        )
    if needs.cpus > cpus:
        message = (
            f"asks for {needs.cpus} CPUs, this machine has {cpus}: ask for at most {cpus} (default: the number of"
            " processes)"
        )
        faults.append(_device_fault("cpus", message))
    if needs.memory_mb > memory_mb:
        message = f"asks for {needs.memory_mb} MB, this machine has {memory_mb}: ask for at most {memory_mb}"
        faults.append(_device_fault("memory_mb", message))
    return faults


def _pool_faults(wanted: ResourcesSpec, pools: Sequence[str]) -> list[Fault]:
    """Of what a job asks for by place: a pool that is not there, a device by name in another pool, several nodes."""
    faults = []
    is_local = wanted.pool == LOCAL_POOL
    if wanted.pool not in pools:
        others = [name for name in pools if name != LOCAL_POOL]
        message = (
            f"found {wanted.pool!r}, but this daemon has only {LOCAL_POOL}, its own machine: leave it out"
        )
        if others:
            message = f"found {wanted.pool!r}, but the pools of this daemon are {', '.join(pools)}: name one of those"
        faults.append(_device_fault("pool", message))
    elif not is_local and any(name != CPU for name in wanted.device_names or ()):
        message = (
            f"names devices of the daemon's machine, but the run is for the pool {wanted.pool}: ask for a number of"
            " GPUs with resources.gpus"
        )
        faults.append(_device_fault("devices", message))
    if wanted.nodes > 1:
        where = "its own machine only" if is_local else "one machine only"
        message = (
            f"found {wanted.nodes}, but this daemon starts the workers of a run on {where}: set it to 1, or"
            " start the worker with torchrun on each node"
        )
        faults.append(_device_fault("nodes", message))
    return faults


def _device_fault(name: str, message: str) -> Fault:
    return Fault(message, path=f"resources.{name}", kind="device")


def _without_secrets(config: dict[str, Any], secret_env: Mapping[str, Secret]) -> dict[str, Any]:
    """The config, without variables whose values are given as secrets: those win, and must not be recorded."""
    env = config.get("env")
    if not isinstance(env, dict) or not any(name in secret_env for name in env):
        return config
    return {**config, "env": {name: value for name, value in env.items() if name not in secret_env}}


def _variable_faults(config: dict[str, Any]) -> list[Fault]:
    env = config.get("env")
    faults = []
    for name, value in env.items() if isinstance(env, dict) else ():
        if not isinstance(name, str) or not isinstance(value, str):
            continue  # reported as a fault of the job's fields
        if "=" in name or "\0" in name + value:
            message = f"{name[:60]!r} cannot be a variable: expected a name without `=`, and no NUL in name or value"
            faults.append(Fault(message, path="env", kind="value", found=name[:60]))
        elif instead := variables.instead_of(name):
            message = f"trn sets this variable for every worker: {instead}"
            faults.append(Fault(message, path=f"env.{name}", kind="rule"))
    return faults


def _request_faults(submission: Submission) -> list[Fault]:
    faults = []
    if not -MAX_PRIORITY <= submission.priority <= MAX_PRIORITY:
        expected = f"a number from -{MAX_PRIORITY} to {MAX_PRIORITY}"
        faults.append(Fault.of_value("priority", str(submission.priority), expected))
    for name in ("base_dir", "frozen_from", "interpreter", "log_dir", "event_log"):
        path: str = getattr(submission, name)
        if path and (not path.startswith("/") or "\0" in path or len(path) > MAX_TEXT):
            faults.append(Fault.of_value(name, f"{path[:60]!r}", "an absolute path"))
    for name, secret in submission.secret_env.items():
        if not is_variable_name(name) or name.startswith(variables.WORKER_PREFIXES):
            message = f"{name[:60]!r} is no name for a variable of a worker"
            faults.append(Fault(message, path="secret_env", kind="value", found=name[:60]))
        elif "\0" in secret.reveal() or len(secret.reveal()) > MAX_SECRET:
            message = f"its value holds a NUL, or more than {MAX_SECRET} characters"
            faults.append(Fault(message, path=f"secret_env.{name}", kind="value"))
    for name in ("code_identity", "snapshot", "parent_run_id", "submission_id"):
        if (length := len(getattr(submission, name))) > MAX_TEXT:
            message = f"has {length} characters, expected at most {MAX_TEXT}"
            faults.append(Fault(message, path=name, kind="value"))
    return faults
