"""Named places where a test can kill the process or make an operation fail.

`GEN_WORKER_FAILPOINTS="checkpoint.data_synced=kill@2,events.write=enospc"` kills the process the second time it
passes the first place and raises ENOSPC at the second. Unset, as always outside tests, a failpoint is one
falsy check. The crash harness tests every name in `ALL`.
"""

import errno
import os
import signal
from collections import Counter

ENV = "GEN_WORKER_FAILPOINTS"

# Every durable step of the worker, in order.
ALL: tuple[str, ...] = (
    "events.write",
    "events.written",
    "events.synced",
    "checkpoint.staged",
    "checkpoint.data_written",
    "checkpoint.data_synced",
    "checkpoint.author_files",
    "checkpoint.set_aside",
    "checkpoint.data_renamed",
    "checkpoint.meta_written",
    "checkpoint.meta_synced",
    "checkpoint.meta_renamed",
    "checkpoint.reread",
    "checkpoint.retention",
)

# Every step of a promotion in a model server, and of feedback on its way into parquet.
MODEL_SERVER: tuple[str, ...] = (
    "promotion.loaded",
    "promotion.gated",
    "promotion.commit",
    "promotion.committed",
    "promotion.switched",
    "promotion.refused",
    "promotion.told",
    "feedback.written",
    "feedback.synced",
    "feedback.part_written",
    "feedback.part_renamed",
    "feedback.keys_written",
    "feedback.log_removed",
    "feedback.due_written",
    "feedback.due_told",
)

# The daemon's start, every commit of it, and every step of an attempt.
ORCHESTRATOR: tuple[str, ...] = (
    "daemon.announce",
    "registry.before_commit",
    "registry.committed",
    "registry.told",
    "ingest.read",
    "ingest.committed",
    "artifacts.checked",
    "artifacts.recorded",
    "attempt.claimed",
    "attempt.files_written",
    "attempt.launched",
    "attempt.exited",
    "attempt.drained",
    "attempt.closed",
    "attempt.ended",
    "logs.write",
    "logs.written",
    "logs.synced",
    "logs.committed",
)

# With an event bus.
BUS: tuple[str, ...] = ("bus.published", "bus.meant", "bus.obeyed")

# Every step of a promotion, and of the training run that feedback asks for.
SERVING: tuple[str, ...] = (
    "promotion.recorded",
    "promotion.written",
    "promotion.signalled",
    "feedback.submitted",
    "feedback.settled_written",
)

# Of a prediction: a part, and the list of all parts.
PREDICTION: tuple[str, ...] = (
    "prediction.part_written",
    "prediction.part_renamed",
    "prediction.parts_listed",
)

_armed: dict[str, tuple[str, int]] = {}
_passed: Counter[str] = Counter()


def arm(text: str) -> None:
    """Arm only these: `name=action[@nth]`, comma separated."""
    _armed.clear()
    _passed.clear()
    for item in filter(None, text.split(",")):
        name, _, action = item.partition("=")
        action, _, nth = action.partition("@")
        if action not in ("kill", "enospc"):
            raise ValueError(f"failpoint {item!r}: the action is {action!r}, expected kill or enospc")
        _armed[name] = (action, int(nth or 1))


def failpoint(name: str) -> None:
    if not _armed or name not in _armed:
        return
    action, nth = _armed[name]
    _passed[name] += 1
    if _passed[name] != nth:
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise OSError(errno.ENOSPC, f"failpoint {name}: no space left on device")


def arm_from_env() -> None:
    """Called once by each process that a worker is made of."""
    arm(os.environ.get(ENV, ""))
