"""How each process of a run ended: one small file each, and the failure that the others followed from."""

import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from gen_worker.contract.files.durable import replace_file
from gen_worker.contract.process_identity import is_process_alive, start_ticks
from gen_worker.errors import EXIT_CODE_BY_CATEGORY, Category, Cause
from gen_worker.trainer.attempt.runtime_env import RankEnvironment

AGENT_FILE = "agent.json"
_CATEGORY_BY_CODE = {int(code): category for category, code in EXIT_CODE_BY_CATEGORY.items()}


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one process, reported by itself. No category: it completed."""

    rank: int
    category: Category | None = None
    error: str = ""
    cause: str = ""  # see `failure.find_cause`
    is_agreed: bool = False  # all processes ended so, at the same step
    at_ns: int = 0


class AgentFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one process, seen by torchrun."""

    rank: int
    exit_code: int
    at_s: float = 0.0


class Root(msgspec.Struct, frozen=True, kw_only=True):
    """The failure that the others followed from."""

    rank: int
    category: Category
    error: str
    cause: str = ""
    is_exit: bool = False  # no process reported it: `error` says how the process ended


def report_start(process: RankEnvironment | None) -> None:
    """Record the pid of this process: its parent relays signals to it, and stops it if it is left behind."""
    if process is not None and process.outcome_dir is not None:
        pid = os.getpid()
        _write(process.outcome_dir / f"rank-{process.rank}.pid", f"{pid}:{start_ticks(pid) or ''}".encode())


def read_main(folder: Path) -> int | None:
    """The pid of the main process, if it lives."""
    return _living_pid(folder / "rank-0.pid")


def read_living(folder: Path) -> list[int]:
    found = (_living_pid(path) for path in folder.glob("rank-*.pid"))
    return [pid for pid in found if pid is not None]


def _living_pid(path: Path) -> int | None:
    try:
        pid, _, ticks = path.read_text().partition(":")
    except FileNotFoundError:
        return None
    return int(pid) if is_process_alive(int(pid), int(ticks) if ticks else None) else None


def leave_outcome(
    process: RankEnvironment | None,
    category: Category | None,
    error: str = "",
    *,
    cause: str = "",
    is_agreed: bool = False,
) -> None:
    """Record how this process ends."""
    if process is not None and process.outcome_dir is not None:
        outcome = Outcome(
            rank=process.rank,
            category=category,
            error=error,
            cause=cause,
            is_agreed=is_agreed,
            at_ns=time.time_ns(),
        )
        _write(process.outcome_dir / f"rank-{process.rank}.json", msgspec.json.encode(outcome))


def leave_agent_failures(folder: Path, failures: Sequence[AgentFailure]) -> None:
    _write(folder / AGENT_FILE, msgspec.json.encode(failures))


def read_outcomes(folder: Path) -> dict[int, Outcome]:
    """By rank; a killed process has none."""
    found = (msgspec.json.decode(path.read_bytes(), type=Outcome) for path in folder.glob("rank-*.json"))
    return {outcome.rank: outcome for outcome in found}


def read_agent_failures(folder: Path) -> list[AgentFailure]:
    path = folder / AGENT_FILE
    return msgspec.json.decode(path.read_bytes(), type=list[AgentFailure]) if path.exists() else []


def choose_root(outcomes: Mapping[int, Outcome], failures: Sequence[AgentFailure]) -> Root | None:
    """The earliest failure that no other process caused: a reported error or a kill. Else the earliest lost connection.

    None where nothing was recorded. A process that torchrun stopped ended later than the failure it was stopped for.
    """
    causes = [_reported(item) for item in outcomes.values() if item.category and not _is_of_another(item)]
    killed = {item.rank for item in failures if item.exit_code < 0} - outcomes.keys()
    causes += [_seen(item) for item in failures if item.rank in killed and item.exit_code != -signal.SIGTERM]
    lost = [_reported(item) for item in outcomes.values() if item.category and _is_of_another(item)]
    others = [_seen(item) for item in failures if item.rank not in outcomes]
    for found in (causes, lost, others):
        if found:
            return min(found, key=lambda item: item[0])[1]
    return None


def _is_of_another(outcome: Outcome) -> bool:
    return outcome.cause == Cause.CONNECTION


def _reported(outcome: Outcome) -> tuple[float, Root]:
    assert outcome.category is not None
    root = Root(rank=outcome.rank, category=outcome.category, error=outcome.error, cause=outcome.cause)
    return outcome.at_ns / 1e9, root


def _seen(failure: AgentFailure) -> tuple[float, Root]:
    category = _CATEGORY_BY_CODE.get(failure.exit_code, Category.TRAIN_STEP)
    name = ""
    if failure.exit_code < 0:
        name = signal.Signals(-failure.exit_code).name
        error = f"was killed by {name}{': out of memory?' if name == 'SIGKILL' else ''}"
    else:
        error = f"exited with code {failure.exit_code}"
    return failure.at_s, Root(rank=failure.rank, category=category, error=error, cause=name, is_exit=True)


def _write(path: Path, content: bytes) -> None:
    with contextlib.suppress(FileNotFoundError):  # the parent exited and removed its folder
        replace_file(path, content, sync="none")
