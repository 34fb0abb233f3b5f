"""The forks of a launcher: their start, the clients that wait for them, and their end.

A child is reaped only after its exit file was written.
"""

import contextlib
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import msgspec

from gen_worker.contract.process_identity import boot_id, read_process
from gen_worker.errors import Fault
from gen_worker.launcher.attempt_records import (
    AttemptRecord,
    ExitRecord,
    ForeignRecordError,
    claim,
    exit_path,
    read_record,
    record_path,
    write_exit,
)
from gen_worker.launcher.channel import Channel
from gen_worker.launcher.messages import (
    Close,
    Closed,
    Ended,
    Launch,
    Launched,
    Refused,
    Tried,
    TryImports,
    WorkerPlan,
)
from gen_worker.launcher.process_family import end_family
from gen_worker.launcher.worker import StartReport

REPORT_BYTES = 4096
MAX_REPORT_READS = 16  # before others are served
MAX_REPORT_BYTES = 1 << 20  # more are ignored
IMPORTED_PATIENCE_S = 1.0  # blocks the launcher


def say(text: str) -> None:
    """A line in the launcher's log. Never fails, and leaves nothing in a buffer that a fork would copy."""
    line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} launcher {os.getpid()}: {text}\n"
    with contextlib.suppress(OSError):
        os.write(2, line.encode(errors="backslashreplace"))


Reply = Callable[[Channel, msgspec.Struct], None]
_Key = tuple[str, int, str]  # run, attempt, nonce


@dataclass(slots=True)
class Child:
    """A fork and its request. `waiting`: the clients to answer."""

    request: Launch | Close | TryImports
    report_fd: int
    waiting: list[tuple[Channel, int]] = field(default_factory=list)
    deadline: float | None = None
    is_late: bool = False
    reported: bytes = b""
    is_settled: bool = False
    is_claimed: bool = False
    error: str = ""

    @property
    def plan(self) -> WorkerPlan:
        return self.request.plan

    @property
    def is_worker(self) -> bool:
        return isinstance(self.request, Launch)

    @property
    def key(self) -> _Key:
        return _key(self.plan)

    def read_reports(self) -> bool:
        """Read the pipe; True once it is closed. An author's module may write there too, without end."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(MAX_REPORT_READS):
                data = os.read(self.report_fd, REPORT_BYTES)
                if not data:
                    return True
                if len(self.reported) < MAX_REPORT_BYTES:
                    self.reported += data
        return False

    def reports(self) -> list[StartReport]:
        """Its valid reports; other bytes are ignored."""
        found = []
        for line in self.reported.splitlines():
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                found.append(msgspec.json.decode(line, type=StartReport))
        return found


class Children:
    """`reply` answers one client, `announce` sends to all. Used from the launcher's one thread."""

    def __init__(
        self, selector: selectors.BaseSelector, reply: Reply, announce: Callable[[Ended], None]
    ) -> None:
        self._selector = selector
        self._reply = reply
        self._announce = announce
        self._by_pid: dict[int, Child] = {}
        self._never: set[_Key] = set()  # attempts that failed to start, without a record of it
        self._unwritten: list[tuple[Path, ExitRecord]] = []
        self._oom_kills = _count_oom_kills()

    def __len__(self) -> int:
        return len(self._by_pid)

    @property
    def is_busy(self) -> bool:
        """Whether `look_after` is due soon."""
        return bool(self._unwritten) or any(not child.is_worker for child in self._by_pid.values())

    def workers(self) -> dict[int, Child]:
        return {pid: child for pid, child in self._by_pid.items() if child.is_worker}

    def find_starting(self, plan: WorkerPlan) -> Child | None:
        key = _key(plan)
        found = (child for child in self.workers().values() if not child.is_settled and child.key == key)
        return next(found, None)

    def is_hopeless(self, plan: WorkerPlan) -> bool:
        return _key(plan) in self._never

    def fork(self, request: Launch | Close | TryImports, become: Callable[[int], NoReturn]) -> Child:
        read_fd, write_fd = os.pipe()  # both close on exec
        os.set_blocking(read_fd, False)
        with contextlib.suppress(OSError):  # the disk may be full
            sys.stderr.flush()
        # A signal to the child must not run the launcher's handlers in it.
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = os.fork()
            if pid == 0:
                try:
                    become(write_fd)
                finally:
                    os._exit(1)
        except OSError:
            os.close(read_fd)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
            os.close(write_fd)
        child = Child(request, read_fd)
        self._by_pid[pid] = child
        self._selector.register(read_fd, selectors.EVENT_READ, lambda: self._hear(pid, child))
        return child

    def _hear(self, pid: int, child: Child) -> None:
        """Read reports until the child, or its exec, closes the pipe."""
        if not child.read_reports():
            return
        if isinstance(child.request, TryImports):
            self._selector.unregister(child.report_fd)  # its exit is part of the answer
        else:
            self._settle(pid, child)

    def _settle(self, pid: int, child: Child, exit_code: int | None = None) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(child.report_fd)
        os.close(child.report_fd)
        child.is_settled = True
        reports = child.reports()
        child.error = " ".join(report.error for report in reports if report.error)
        is_done = any(report.is_done for report in reports)
        waiting, child.waiting = child.waiting, []
        if isinstance(child.request, Close):
            detail = child.error or ("" if is_done else "the process that writes it died")
            for channel, id_ in waiting:
                self._reply(channel, Closed(id=id_, is_closed=is_done, detail=detail))
            return
        if isinstance(child.request, TryImports):
            faults = tuple(fault for report in reports for fault in report.faults)
            problem = child.error
            if child.is_late:
                problem = "the import timed out"
            elif exit_code == -signal.SIGKILL and not is_done:
                problem = "the importing process was killed"
            elif not is_done and not problem:
                how = "" if exit_code is None else f": {_describe(exit_code)}"
                faults = (
                    Fault(f"importing it ends the process{how}", path="trainer", kind="code").to_data(),
                )
            for channel, id_ in waiting:
                self._reply(channel, Tried(id=id_, faults=faults, problem=problem))
            return
        try:
            record = read_record(record_path(child.plan.attempt_dir, child.plan.number), child.plan.nonce)
            child.is_claimed = record is not None and not record.abandoned and record.pid == pid
        except ForeignRecordError as fault:
            record, child.error = AttemptRecord(abandoned=True), child.error or str(fault)
        if record is None:  # it died, or the disk refuses: it must not start later
            record = self.give_up(child.plan)
        for channel, id_ in waiting:
            self._reply(channel, as_reply(id_, record, child.error))

    def give_up(self, plan: WorkerPlan) -> AttemptRecord:
        path = record_path(plan.attempt_dir, plan.number)
        given_up = AttemptRecord(nonce=plan.nonce, abandoned=True)
        try:
            return given_up if claim(path, given_up) else read_record(path, plan.nonce) or given_up
        except ForeignRecordError:
            return given_up
        except OSError:
            self._never.add(_key(plan))
            return given_up

    def reap(self) -> None:
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            is_signal = ended.si_code != os.CLD_EXITED
            child = self._by_pid.pop(ended.si_pid, None)
            if child is not None:
                self._note_end(ended.si_pid, child, -ended.si_status if is_signal else ended.si_status)
            os.waitpid(ended.si_pid, 0)  # only now: the exit file is written

    def _note_end(self, pid: int, child: Child, exit_code: int) -> None:
        if not child.is_settled:
            child.read_reports()
            self._settle(pid, child, exit_code)
        if isinstance(child.request, TryImports):
            _end_what_was_imported(pid)
        if not child.is_claimed:
            return
        is_out_of_memory = exit_code == -signal.SIGKILL and self._look_for_oom_kills()
        record = ExitRecord(
            exit_code=exit_code,
            is_out_of_memory=is_out_of_memory,
            detail=child.error,
            nonce=child.plan.nonce,
        )
        self._unwritten.append((exit_path(child.plan.attempt_dir, child.plan.number), record))
        self._write_exits()
        ended = Ended(run_id=child.plan.run_id, number=child.plan.number, pid=pid, exit=record)
        self._announce(ended)

    def _write_exits(self) -> None:
        waiting, self._unwritten = self._unwritten, []
        for path, record in waiting:
            try:
                write_exit(path, record)
            except FileNotFoundError:
                continue  # the run's folder was removed
            except OSError as fault:
                say(f"{path} cannot be written: {fault}")
                self._unwritten.append((path, record))

    def _look_for_oom_kills(self) -> bool:
        before, self._oom_kills = self._oom_kills, _count_oom_kills()
        return self._oom_kills > before

    def look_after(self) -> None:
        if self._unwritten:
            self._write_exits()
        self._look_for_oom_kills()
        for pid, child in self._by_pid.items():
            if child.deadline is not None and time.monotonic() > child.deadline:
                child.deadline, child.is_late = None, True
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)  # each has a session of its own


def _key(plan: WorkerPlan) -> _Key:
    return plan.run_id, plan.number, plan.nonce


def as_reply(id_: int, record: AttemptRecord, error: str = "") -> Launched | Refused:
    if error or record.abandoned:
        return Refused(id=id_, message=error or "the attempt was given up before its worker started")
    return Launched(id=id_, boot_id=record.boot_id, pid=record.pid, start_ticks=record.start_ticks)


def _end_what_was_imported(pid: int) -> None:
    """Kill what the author's modules started. Before the process is reaped."""
    try:
        state = read_process(pid)
        if state is not None:
            end_family(pid, state.start_ticks, boot_id(), patience_s=IMPORTED_PATIENCE_S)
    except OSError as fault:
        say(f"processes of the import check with pid {pid} may be left: {fault}")


def _describe(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return f"killed by {name}"


def _count_oom_kills() -> int:
    """How many processes the kernel has killed for memory since boot."""
    total = 0
    for path in (Path("/proc/vmstat"), Path("/sys/fs/cgroup/memory.events")):
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                if line.startswith("oom_kill "):
                    total += int(line.split()[1])
    return total
