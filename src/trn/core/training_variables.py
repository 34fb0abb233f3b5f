"""Environment variables that matter to a training: what is computed, how fast, with which files and accounts."""

import hashlib
import re
from collections.abc import Mapping

# Any of these may differ between two shells, and nobody sees it.
PREFIXES = (
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
NAMES = frozenset({"LD_LIBRARY_PATH", "LD_PRELOAD", "TMPDIR"})
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
    return (name.startswith(PREFIXES) or name in NAMES) and name not in NOT_OF_A_TRAINING


def needs_fresh_start(wanted: Mapping[str, str], inherited: Mapping[str, str]) -> bool:
    """Whether a process that has its libraries loaded already would not obey what is `wanted`."""
    return any(
        name.startswith(READ_AT_START) and name not in TAKES_EFFECT_LATE and inherited.get(name) != value
        for name, value in wanted.items()
    )


def fingerprint(value: str, salt: str) -> str:
    """Tells whether two values are equal without telling either."""
    return hashlib.sha256(f"{salt}\0{value}".encode(errors="surrogateescape")).hexdigest()[:32]
