"""The environment variables of a worker, read once, only here."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gen_worker.contract.job.spec import UploadsSpec
from gen_worker.contract.subprocess_contract import (
    ARTIFACTS_DIR,
    TrainerSubprocessContractV1,
    find_cache_dir,
    read_subprocess_contract,
)
from gen_worker.errors import SpecError

if TYPE_CHECKING:
    from gen_worker.trainer.transfer.policy import TransferOptions

JOB_SPEC_PATH = "/app/.cozy/trainer_job.json"
TRUE_WORDS = ("1", "true", "yes", "on")
FALSE_WORDS = ("", "0", "false", "no", "off")


class RankEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """Which of a run's processes this one is, from torchrun."""

    rank: int
    local_rank: int
    world_size: int
    outcome_dir: Path | None = None  # set by the parent, which writes the terminal event of a failure
    parent: str | None = None  # its process, as `pid:start`


class WorkerEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is given besides its job."""

    job_spec_path: Path
    plugin: str | None = None
    checkpoints_dir: Path
    samples_dir: Path
    events_path: Path
    arrow_ipc_path: Path | None = None
    extra_env: dict[str, str] = {}
    cancel_file: Path | None = None
    is_cancelled: bool = False
    max_runtime_s: float | None = None
    is_orchestrated: bool = False
    is_isolated: bool = False
    returns_freed_memory: bool = False
    uploads: UploadsSpec = UploadsSpec()
    cache_dir: Path
    s3_endpoint: str | None = None
    s3_region: str | None = None
    gcs_endpoint: str | None = None
    capability_public_key: str | None = None
    process: RankEnvironment | None = None
    attempt: int | None = None  # the orchestrator's number of this attempt
    nonce: str = ""  # of the submission; this worker writes it into its files and events
    doorbell: str | None = None  # a datagram socket that is notified of new events
    base_dir: Path | None = None
    secret_names: tuple[str, ...] = ()  # variables whose values are masked in events and logs
    is_library: bool = False  # inside another program: a notebook, a script

    @property
    def job_dir(self) -> Path:
        """Where relative paths of the job start."""
        return self.base_dir or self.job_spec_path.parent

    def transfer_options(self) -> "TransferOptions":
        """For downloads and uploads."""
        from gen_worker.trainer.transfer.policy import ObjectStoreOptions, TransferOptions

        return TransferOptions(
            object_store=ObjectStoreOptions(
                s3_endpoint=self.s3_endpoint, s3_region=self.s3_region, gcs_endpoint=self.gcs_endpoint
            )
        )

    def resume_hint(self, run_id: str) -> str:
        """How to resume a stopped attempt. Under a daemon, running the job again would be another run."""
        if self.is_library:
            return "call train() again to continue"
        return f"`trn resume {run_id}` resumes" if self.doorbell else "run the job again to resume"


def read_environment(
    environ: Mapping[str, str] = os.environ, *, needs_job: bool = True, root: str = ARTIFACTS_DIR
) -> WorkerEnvironment:
    """SpecError with every fault at once. The capability token is not in the record: see `take_capability_token`.

    `root` is the default of TRAINER_ARTIFACTS_DIR.
    """
    faults: list[str] = []
    contract = _contract(environ)
    has_job = bool(contract or environ.get("TRAINER_JOB_SPEC_PATH"))
    if needs_job and not has_job and not Path(JOB_SPEC_PATH).exists():
        faults.append(
            f"TRAINER_JOB_SPEC_PATH is not set, and its default {JOB_SPEC_PATH} does not exist: set it to your job file"
        )
    folder = Path(environ.get("TRAINER_ARTIFACTS_DIR") or root)

    def place(name: str, default: Path) -> Path:
        return Path(environ.get(name) or default).absolute()

    environment = WorkerEnvironment(
        job_spec_path=place("TRAINER_JOB_SPEC_PATH", Path(JOB_SPEC_PATH)),
        plugin=environ.get("TRAINER_PLUGIN") or None,
        checkpoints_dir=place("TRAINER_CHECKPOINTS_DIR", folder / "checkpoints"),
        samples_dir=place("TRAINER_SAMPLES_DIR", folder / "samples"),
        events_path=place("TRAINER_EVENTS_PATH", folder / "metrics" / "events.jsonl"),
        cancel_file=Path(environ["TRAINER_CANCEL_FILE"]).absolute()
        if environ.get("TRAINER_CANCEL_FILE")
        else None,
        is_cancelled=_flag(environ, "TRAINER_CANCELLED", faults),
        max_runtime_s=_positive(environ, "TRAINER_MAX_RUNTIME_SECONDS", faults),
        is_orchestrated=_flag(environ, "TRAINER_ORCHESTRATED", faults),
        is_isolated=_flag(environ, "TRAINER_ISOLATED", faults),
        returns_freed_memory=_flag(environ, "TRAINER_RETURN_FREED_MEMORY", faults),
        uploads=UploadsSpec(
            metrics_url=environ.get("TRAINER_UPLOAD_METRICS_URL") or None,
            checkpoint_url=environ.get("TRAINER_UPLOAD_CHECKPOINT_URL") or None,
            sample_url=environ.get("TRAINER_UPLOAD_SAMPLE_URL") or None,
            terminal_url=environ.get("TRAINER_UPLOAD_TERMINAL_URL") or None,
        ),
        cache_dir=find_cache_dir(environ),
        s3_endpoint=environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL") or None,
        s3_region=environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or None,
        gcs_endpoint=environ.get("STORAGE_EMULATOR_HOST") or None,
        capability_public_key=environ.get("TRAINER_CAPABILITY_PUBLIC_KEY") or None,
        process=_process(environ, faults),
        attempt=_attempt(environ, faults),
        nonce=environ.get("TRAINER_RUN_NONCE", ""),
        doorbell=environ.get("TRAINER_DOORBELL") or None,
        base_dir=Path(environ["TRAINER_BASE_DIR"]).absolute() if environ.get("TRAINER_BASE_DIR") else None,
        secret_names=tuple(filter(None, environ.get("TRAINER_SECRET_ENV", "").split(","))),
    )
    if faults:
        raise SpecError("the worker's environment", faults)
    if contract is None:
        return environment
    return msgspec.structs.replace(
        environment,
        job_spec_path=Path(contract.job_spec_path).absolute(),
        plugin=contract.trainer_plugin,
        checkpoints_dir=Path(contract.checkpoints_dir).absolute(),
        samples_dir=Path(contract.samples_dir).absolute(),
        events_path=Path(contract.events_path).absolute(),
        arrow_ipc_path=Path(contract.arrow_ipc_path).absolute() if contract.arrow_ipc_path else None,
        extra_env=contract.extra_env,
        is_isolated=False,  # the contract is how an isolated worker is started
    )


def read_library_environment(folder: Path, environ: Mapping[str, str] = os.environ) -> WorkerEnvironment:
    """For a run inside another program: only the cache folder and the object stores come from the environment."""
    return WorkerEnvironment(
        job_spec_path=Path.cwd() / "job.json",  # relative paths are the caller's
        checkpoints_dir=folder / "checkpoints",
        samples_dir=folder / "samples",
        events_path=folder / "metrics" / "events.jsonl",
        cache_dir=find_cache_dir(environ),
        s3_endpoint=environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL") or None,
        s3_region=environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or None,
        gcs_endpoint=environ.get("STORAGE_EMULATOR_HOST") or None,
        is_library=True,
    )


def take_capability_token(environ: Mapping[str, str] = os.environ) -> str | None:
    """The token, removed from the process's environment: no child process or dump may contain it."""
    if environ is os.environ:
        return os.environ.pop("TRAINER_CAPABILITY_TOKEN", None) or None
    return environ.get("TRAINER_CAPABILITY_TOKEN") or None


def _process(environ: Mapping[str, str], faults: list[str]) -> RankEnvironment | None:
    """Only under torchrun: other tools set RANK with another meaning."""
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    numbers = {}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        text = environ.get(name, "")
        if not text.isdecimal():
            faults.append(f"{name}: found {text!r}, expected a number: start the worker with torchrun")
        else:
            numbers[name.lower()] = int(text)
    if len(numbers) < 3:
        return None
    folder = environ.get("GEN_WORKER_OUTCOME_DIR")
    return RankEnvironment(
        **numbers,
        outcome_dir=Path(folder) if folder else None,
        parent=environ.get("GEN_WORKER_PARENT") or None,
    )


def _contract(environ: Mapping[str, str]) -> TrainerSubprocessContractV1 | None:
    path = environ.get("TRAINER_CONTRACT_PATH")
    return read_subprocess_contract(path) if path else None


def _flag(environ: Mapping[str, str], name: str, faults: list[str]) -> bool:
    word = environ.get(name, "").strip().lower()
    if word not in TRUE_WORDS + FALSE_WORDS:
        faults.append(f"{name}: found {word!r}, expected 1 or 0")
    return word in TRUE_WORDS


def _positive(environ: Mapping[str, str], name: str, faults: list[str]) -> float | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        faults.append(f"{name}: found {text!r}, expected a number of seconds above 0")
        return None
    return value


def _attempt(environ: Mapping[str, str], faults: list[str]) -> int | None:
    text = environ.get("TRAINER_ATTEMPT", "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        faults.append(f"TRAINER_ATTEMPT: found {text!r}, expected a number above 0")
        return None
    return int(text)
