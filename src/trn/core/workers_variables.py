"""What a worker's environment has that no daemon or launcher may inherit.

Whoever starts one may be a worker itself; then its launcher's workers would be taken for that worker's own.
"""

from collections.abc import Mapping

PREFIXES = ("TRAINER_", "TORCHELASTIC_")
NAMES = frozenset(
    {
        "GEN_WORKER_PROCESS",
        "GEN_WORKER_OUTCOME_DIR",
        "GEN_WORKER_LAUNCHER",
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


def without_workers_variables(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value for name, value in environ.items() if name not in NAMES and not name.startswith(PREFIXES)
    }
