"""Executes commands from the bus, `submit` and `cancel`, with the calls of the API.

Each takes effect exactly once. A command is acknowledged after its reply. After a crash or a lost connection it is read
again, and finds the run that it submitted (by a submission id made from the command's id) or chose to cancel (which is
durable before that run is cancelled).

Who can write commands can run code here, like who can open the daemon's socket.
"""

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Mapping
from typing import Protocol

from gen_worker.contract.doubling_delay import DoublingDelay
from gen_worker.contract.failpoints import failpoint
from trn.core.errors import BusUnavailableError, InvalidRequestError
from trn.core.runs import RunRecord
from trn.daemon.api.service import Cancelled, as_trn_error
from trn.daemon.intake.intake import Submitted
from trn.daemon.intake.submission import Submission
from trn.daemon.outlets.event_bus import BusCommand, CommandStream
from trn.daemon.outlets.threaded_part import ThreadedPart
from trn.registry.writer import committed

logger = logging.getLogger("trn.bus")

READ_S = 4.0  # how long a read waits; stopping the daemon closes its connection
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 5.0  # while commands cannot be read
MAX_REPLY_TO = 512
MAX_COMMAND_BYTES = 4 << 20  # the same as a call of the API

_ALWAYS = {"command", "reply_to", "request_id"}
FIELDS = {
    "submit": _ALWAYS | {"config", "base_dir", "code_identity", "interpreter", "priority", "another"},
    "cancel": _ALWAYS | {"run_id", "reason"},
}


class Calls(Protocol):
    """The calls of the service that commands use. From the loop's thread."""

    num_calls: int

    async def submit_run(self, submission: Submission) -> Submitted: ...

    async def cancel_run(self, run_id: str, *, reason: str = "", is_exact: bool = False) -> Cancelled: ...

    def find(self, run_id: str, *, is_exact: bool = False) -> RunRecord: ...


class CancelTargets(Protocol):
    """The run that each cancel command chose, durable: `BusCancels`."""

    def recall(self, command_id: str, asked: str) -> str: ...

    def remember(self, command_id: str, asked: str, run_id: str) -> "concurrent.futures.Future[None]": ...


class BusCommands(ThreadedPart):
    """Reads in its own thread and executes in the loop's."""

    thread_name = "bus-commands"
    stop_s = 3.0

    def __init__(self, *, stream: CommandStream, calls: Calls, cancels: CancelTargets, shown: str) -> None:
        super().__init__()
        self._stream = stream
        self._cancels = cancels
        self._calls = calls
        self._shown = shown
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        logger.info("commands are read from %s: who can write there can run code here", self._shown)
        await super().run()

    def work(self, stop: threading.Event) -> None:
        pause = DoublingDelay(FIRST_PAUSE_S, MAX_PAUSE_S)
        while not stop.is_set():
            try:
                for command in self._stream.read(READ_S):
                    if stop.is_set():
                        return  # the next daemon reads it again
                    self._answer(command)
                pause.reset()
            except Exception as fault:
                if not isinstance(fault, BusUnavailableError):  # which the publisher reports
                    logger.exception("commands from %s cannot be read; will try again", self._shown)
                stop.wait(pause.next_s())

    def _answer(self, command: BusCommand) -> None:
        assert self._loop is not None
        if not command.fields:  # it was deleted before it was read
            self._stream.answer(command, "", {})
            return
        try:
            reply = asyncio.run_coroutine_threadsafe(self.execute(command), self._loop).result()
        except concurrent.futures.CancelledError:
            return  # the loop ends; the next daemon reads it again
        failpoint("bus.obeyed")
        try:
            self._stream.answer(command, _reply_to(command.fields), reply)
        except InvalidRequestError as fault:
            logger.warning("command %s: %s", command.command_id, fault)

    async def execute(self, command: BusCommand) -> dict[str, str]:
        """Execute it and return the reply. In the loop's thread."""
        fields = command.fields
        head = {"request_id": fields.get("request_id") or command.command_id}
        name = fields.get("command", "")
        self._calls.num_calls += 1  # counts as use: the daemon does not exit as idle
        try:
            _require_fields(name, fields)
            done = await (self._submit(command) if name == "submit" else self._cancel(command))
        except Exception as fault:
            error = as_trn_error(fault, f"bus command {name}")
            return {**head, "ok": "0", "code": error.code, "error": str(error)}
        return {**head, "ok": "1", **done}

    async def _submit(self, command: BusCommand) -> dict[str, str]:
        fields = command.fields
        request = Submission(
            config_json=fields.get("config", "").encode(),
            base_dir=fields.get("base_dir", ""),
            code_identity=fields.get("code_identity", ""),
            interpreter=fields.get("interpreter", ""),
            priority=_read_priority(fields),
            force_new=_read_flag(fields),
            submission_id=f"bus-{command.command_id}",
        )
        answer = await self._calls.submit_run(request)
        assert answer.run is not None  # a refusal is raised
        return {"run_id": answer.run.run_id, "existed": str(int(answer.existed))}

    async def _cancel(self, command: BusCommand) -> dict[str, str]:
        asked = command.fields.get("run_id", "")
        meant = self._cancels.recall(command.command_id, asked)
        if not meant:
            meant = self._calls.find(asked).run_id
            await committed(self._cancels.remember(command.command_id, asked, meant))
            failpoint("bus.meant")
        reason = command.fields.get("reason", "")
        answer = await self._calls.cancel_run(meant, reason=reason, is_exact=True)
        return {"run_id": answer.run.run_id, "was_live": str(int(answer.was_live))}


def _reply_to(fields: Mapping[str, str]) -> str:
    """Empty: the default stream; also if the name is too long."""
    asked = fields.get("reply_to", "")
    return asked if len(asked) <= MAX_REPLY_TO else ""


def _require_fields(name: str, fields: Mapping[str, str]) -> None:
    if name not in FIELDS:
        raise InvalidRequestError(f"unknown command {name[:60]!r}; expected {' or '.join(sorted(FIELDS))}")
    size_bytes = sum(len(value.encode()) for value in fields.values())
    if size_bytes > MAX_COMMAND_BYTES:
        raise InvalidRequestError(
            f"the command {name} has {size_bytes} bytes, expected at most {MAX_COMMAND_BYTES}"
        )
    unknown = sorted(fields.keys() - FIELDS[name])
    if unknown:
        raise InvalidRequestError(
            f"unknown field of {name}: {', '.join(word[:60] for word in unknown[:10])}; expected"
            f" {', '.join(sorted(FIELDS[name]))}"
        )


def _read_flag(fields: Mapping[str, str]) -> bool:
    text = fields.get("another", "0")
    if text not in ("0", "1"):
        raise InvalidRequestError(f"another is {text[:20]!r}, expected 0 or 1")
    return text == "1"


def _read_priority(fields: Mapping[str, str]) -> int:
    text = fields.get("priority", "0")
    try:
        # The message holds 32 bits; the limit of priorities is checked later.
        return max(-(1 << 31), min((1 << 31) - 1, int(text[:20])))
    except ValueError:
        raise InvalidRequestError(f"priority is {text[:20]!r}, expected a whole number") from None
