"""How each process of a run ended: small files in a folder that the launcher made, and what they say together."""

import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from gen_worker.errors import Category
from gen_worker.trainer.lease import start_ticks
from gen_worker.trainer.runtime_env import RankEnvironment

AGENT_FILE = "agent.json"
MAIN_PID_FILE = "main.pid"
# What a process says when it is another one that is gone.
_PEER_LOST = (
    "closed by peer",
    "connection reset",
    "connection refused",
    "broken pipe",
    "timed out",
    "out of reach",
)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one process, as it tells it itself. No category: it completed."""

    rank: int
    category: Category | None = None
    error: str = ""
    is_agreed: bool = False  # all processes ended so, at the same step
    at_ns: int = 0


class AgentFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one process, as torch's launcher saw it."""

    rank: int
    exit_code: int
    at_s: float = 0.0


class Root(msgspec.Struct, frozen=True, kw_only=True):
    """The failure that the others followed from."""

    rank: int
    category: Category
    error: str


def report_start(process: RankEnvironment | None) -> None:
    """Let the launcher know whom to pass a signal on to."""
    if process is not None and process.outcome_dir is not None and process.rank == 0:
        pid = os.getpid()
        _write(process.outcome_dir / MAIN_PID_FILE, f"{pid}:{start_ticks(pid) or ''}".encode())


def leave_outcome(
    process: RankEnvironment | None, category: Category | None, error: str = "", *, is_agreed: bool = False
) -> None:
    """Tell the launcher how this process ends."""
    if process is not None and process.outcome_dir is not None:
        outcome = Outcome(
            rank=process.rank, category=category, error=error, is_agreed=is_agreed, at_ns=time.time_ns()
        )
        _write(process.outcome_dir / f"rank-{process.rank}.json", msgspec.json.encode(outcome))


def leave_agent_failures(folder: Path, failures: Sequence[AgentFailure]) -> None:
    _write(folder / AGENT_FILE, msgspec.json.encode(failures))


def read_outcomes(folder: Path) -> dict[int, Outcome]:
    """By rank; a process that was killed left none."""
    found = (msgspec.json.decode(path.read_bytes(), type=Outcome) for path in folder.glob("rank-*.json"))
    return {outcome.rank: outcome for outcome in found}


def read_agent_failures(folder: Path) -> list[AgentFailure]:
    path = folder / AGENT_FILE
    return msgspec.json.decode(path.read_bytes(), type=list[AgentFailure]) if path.exists() else []


def choose_root(outcomes: Mapping[int, Outcome], failures: Sequence[AgentFailure]) -> Root | None:
    """A process that was killed comes first, since it could not say so; then the earliest that does not complain
    of another one; then the earliest. None where nobody left a word.
    """
    for failure in sorted(failures, key=lambda item: item.at_s):
        if failure.rank not in outcomes and failure.exit_code < 0 and failure.exit_code != -signal.SIGTERM:
            name = signal.Signals(-failure.exit_code).name
            hint = ": out of memory?" if name == "SIGKILL" else ""
            return Root(rank=failure.rank, category=Category.TRAIN_STEP, error=f"was killed by {name}{hint}")
    failed = sorted((item for item in outcomes.values() if item.category), key=lambda item: item.at_ns)
    failed.sort(key=lambda item: any(word in item.error.lower() for word in _PEER_LOST))
    for outcome in failed:
        assert outcome.category is not None
        return Root(rank=outcome.rank, category=outcome.category, error=outcome.error)
    for failure in sorted(failures, key=lambda item: item.at_s):
        return Root(
            rank=failure.rank,
            category=Category.TRAIN_STEP,
            error=f"ended with exit code {failure.exit_code}",
        )
    return None


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    temporary.replace(path)
