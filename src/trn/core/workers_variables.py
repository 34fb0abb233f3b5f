"""What a worker's environment has that no daemon or launcher may inherit.

Whoever starts one may be a worker itself; then its launcher's workers would be taken for that worker's own.
"""

from collections.abc import Mapping

PREFIXES = ("TRAINER_", "TORCHELASTIC_")
NAMES = frozenset(
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
        name: value for name, value in environ.items() if name not in NAMES and not name.startswith(PREFIXES)
    }
