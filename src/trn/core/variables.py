"""Environment variables: those that matter to a training, and those of a worker that nothing else may inherit."""

import hashlib
import re
from collections.abc import Mapping

# A process that starts a daemon or launcher may be a worker itself: these must not reach another worker.
WORKER_PREFIXES = ("TRAINER_", "TORCHELASTIC_")
WORKER_NAMES = frozenset(
    {
        "GEN_WORKER_PROCESS",
        "GEN_WORKER_OUTCOME_DIR",
        "GEN_WORKER_PARENT",
        "WORKER_MODE",
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
)

# Which GPUs a worker sees: those that its run holds.
DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
# What the daemon sets for a worker, with what to use instead. In a job's `env` it would be without effect, or do harm.
_INSTEAD = {
    **dict.fromkeys(DEVICE_VARIABLES, "choose devices with `resources.devices` or --devices"),
    "TRAINER_PLUGIN": "name the class in `trainer`",
    **dict.fromkeys(
        (
            "GEN_WORKER_PARENT",
            "GEN_WORKER_OUTCOME_DIR",
            "GEN_WORKER_PROCESS",
            "TRAINER_ARTIFACTS_DIR",
            "TRAINER_ATTEMPT",
            "TRAINER_BASE_DIR",
            "TRAINER_CHECKPOINTS_DIR",
            "TRAINER_CONTRACT_PATH",
            "TRAINER_DOORBELL",
            "TRAINER_EVENTS_PATH",
            "TRAINER_JOB_SPEC_PATH",
            "TRAINER_SAMPLES_DIR",
            "TRAINER_SECRET_ENV",
            "WORKER_MODE",
        ),
        "leave it out",
    ),
}


def instead_of(name: str) -> str | None:
    """What to use instead of a variable that the daemon sets for its workers; None for all others."""
    return _INSTEAD.get(name)


def without_workers_variables(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if name not in WORKER_NAMES and not name.startswith(WORKER_PREFIXES)
    }


# Any of these may differ between two shells without a sign.
TRAINING_PREFIXES = (
    *(
        "CUDA_",
        "CUBLAS_",
        "CUDNN_",
        "NVIDIA_",
        "NCCL_",
        "HIP_",
        "ROCR_",
        "HSA_",
        "MIOPEN_",
        "TRITON_",
        "XLA_",
    ),
    *("OMP_", "MKL_", "KMP_", "OPENBLAS_", "GOMP_", "BLIS_", "MALLOC_", "ARROW_", "NUMEXPR_"),
    *(
        "TORCH",
        "PYTORCH_",
        "HF_",
        "HUGGINGFACE_",
        "TRANSFORMERS_",
        "TOKENIZERS_",
        "WANDB_",
        "MLFLOW_",
        "PYTHON",
    ),
)
TRAINING_NAMES = frozenset({"LD_LIBRARY_PATH", "LD_PRELOAD", "TMPDIR"})
# What only starts or describes an interpreter: the worker has its own, by other means.
NOT_OF_A_TRAINING = frozenset({"PYTHONSAFEPATH", "PYTHONSTARTUP", "PYTHON_BASIC_REPL", "PYTHON_HISTORY"})
# Libraries that a warm worker has loaded before it is forked read these when they are loaded.
READ_AT_START = (
    *("OMP_", "MKL_", "KMP_", "OPENBLAS_", "GOMP_", "BLIS_", "MALLOC_", "GLIBC_", "LD_", "ARROW_", "NPY_"),
    *("TORCH", "PYTORCH_", "ATEN_", "PYTHON"),
)
TAKES_EFFECT_LATE = frozenset({"OMP_NUM_THREADS", "PYTHONPATH"})  # a fork sees to these
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def is_variable_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def matters(name: str) -> bool:
    """Whether a training may come out another way because of it."""
    return (name.startswith(TRAINING_PREFIXES) or name in TRAINING_NAMES) and name not in NOT_OF_A_TRAINING


def needs_fresh_start(wanted: Mapping[str, str], inherited: Mapping[str, str]) -> bool:
    """Whether a process that has its libraries loaded already would not obey what is `wanted`."""
    return any(
        name.startswith(READ_AT_START) and name not in TAKES_EFFECT_LATE and inherited.get(name) != value
        for name, value in wanted.items()
    )


def fingerprint(value: str, salt: str) -> str:
    """Tells whether two values are equal without telling either."""
    return hashlib.sha256(f"{salt}\0{value}".encode(errors="surrogateescape")).hexdigest()[:32]
