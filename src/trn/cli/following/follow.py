"""Follow one run to its end: a progress bar at a terminal, JSON lines elsewhere. Survives restarts of the daemon."""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import asdict
from importlib import import_module
from typing import TYPE_CHECKING, Any

from trn.cli.exit_codes import ExitCode, exit_code_of_state
from trn.cli.following.daemon_watch import Absence, DaemonWatch, say_absence, start_daemon
from trn.cli.following.interruption import Interruption, StopReason
from trn.cli.output import say
from trn.core.errors import UnavailableError
from trn.core.terminal_text import shield_json

if TYPE_CHECKING:
    from trn.cli.output import Output
    from trn.client.client import AsyncClient
    from trn.client.screen.render import Screen
    from trn.core.home import Home
    from trn.core.runs import RunRecord
    from trn.proto.records import Run

PATIENCE_S = 3.0
CANCEL_PATIENCE_S = 30.0  # for a daemon to record it
TAIL_BYTES = 4096  # of the log of a run that was already running


def resolve(home: "Home", run_id: str, *, is_exact: bool = False) -> "RunRecord":
    """The run of that id, from the registry: no daemon is started for an unknown run."""
    from trn.cli.reading.run_lookup import find_run

    return find_run(home, run_id, is_exact=is_exact).run


@contextlib.asynccontextmanager
async def connected(home: "Home") -> AsyncIterator["AsyncClient"]:
    """A client of the home's daemon, which is started if none runs. `DaemonWatch` does the long waiting."""
    from trn.client.client import AsyncClient

    daemon = await start_daemon(home)
    if warning := daemon.version_warning:
        say(f"trn: {warning}")
    # The first call would import it and block the loop, which a snapshot runs beside.
    await asyncio.to_thread(import_module, "grpc.aio")
    # Not closed: that takes time, and the process ends anyway.
    yield AsyncClient(home.root, patience_s=PATIENCE_S)


class Follower:
    """One followed run. `is_ours`: Ctrl-C may cancel the run, not only stop following."""

    def __init__(
        self, client: "AsyncClient", home: "Home", output: "Output", run: "Run", *, is_ours: bool
    ) -> None:
        self._client, self._output = client, output
        self._run = run
        self._is_ours = is_ours
        self._seq = 0
        self._change = 0
        self._log_at: int | None = None
        self._screen: Screen | None = None
        self._daemon = DaemonWatch(client, home, self._take_absence)
        self._cancelled = asyncio.Event()
        self._is_cancel_recorded = False

    async def follow(self) -> ExitCode:
        """Until the run's end, or a reason to stop; the exit code says how it ended."""
        is_drawn = not self._output.is_json
        interruption = Interruption(
            is_ours=self._is_ours,
            can_ask=is_drawn and sys.stdout.isatty(),
            cancel=self._want_cancel,
            pause=self._pause,
            go_on=self._go_on,
        )
        try:
            with interruption.heard():
                if is_drawn:
                    self._draw()
                reason = await self._follow_until(interruption.stop)
        except BrokenPipeError:
            # The reader is gone; the run continues. The interpreter must not fail on its last flush.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return ExitCode.OK
        except UnavailableError as fault:
            if self._run.is_terminal:
                raise
            raise UnavailableError(f"{fault}\n{self._say_what_it_does()}") from None
        finally:
            self._pause()
        return self._conclude(reason)

    def _draw(self) -> None:
        from trn.client.screen.render import HELD_S, Screen
        from trn.client.screen.run_view import RunView

        # Log lines of the client would be written across the bar.
        logging.getLogger("trn.client").setLevel(logging.ERROR)
        self._screen = Screen(RunView(self._run))
        if self._run.is_terminal:
            self._screen.hold(float("inf"))  # everything comes at once
        elif self._run.last_seq:
            self._screen.hold(HELD_S)
        self._screen.start()

    async def _follow_until(self, stop: asyncio.Future[StopReason]) -> StopReason | None:
        """None: the run has ended."""
        try:
            return await self._follow_in_tasks(stop)
        except BaseExceptionGroup as faults:
            raise faults.exceptions[0] from None  # the others were cancelled because of it

    async def _follow_in_tasks(self, stop: asyncio.Future[StopReason]) -> StopReason | None:
        async with asyncio.TaskGroup() as group:
            end = group.create_task(self._take_events())
            tasks = [group.create_task(self._cancel_when_wanted())]
            if self._screen is not None:
                tasks += [
                    group.create_task(work)
                    for work in (self._take_changes(), self._take_log(), self._redraw())
                ]
            tasks.append(group.create_task(self._daemon.watch_over()))
            either: list[asyncio.Future[Any]] = [end, stop]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if end.done() and not end.cancelled() and end.exception() is None and self._screen is not None:
                # The last lines of the log may come a moment after the last event.
                await asyncio.wait([tasks[2]], timeout=2.0)
            if self._cancelled.is_set():  # the user was promised that the run is cancelled
                await asyncio.wait([tasks[0]], timeout=PATIENCE_S)
            for task in (end, *tasks):
                task.cancel()
        return stop.result() if stop.done() else None

    async def _take_events(self) -> None:
        async with aclosing(
            self._daemon.following(
                lambda: self._client.event_lines(self._run.run_id, after_seq=self._seq, is_exact=True)
            )
        ) as batches:
            async for lines in batches:
                if self._screen is None:
                    # A pipe gets the unchanged bytes.
                    shown = shield_json(lines.decode()).encode() if sys.stdout.isatty() else lines
                    sys.stdout.buffer.write(shown if shown.endswith(b"\n") else shown + b"\n")
                    sys.stdout.buffer.flush()
                else:
                    self._screen.add(self._screen.view.take_events(lines))
                self._seq = _last_seq(lines, self._seq)
        async with aclosing(self._daemon.following(self._final)) as runs:
            async for run in runs:
                self._take_run(run)

    async def _final(self) -> AsyncGenerator["Run", None]:
        yield await self._client.wait(self._run.run_id, is_exact=True)

    async def _take_changes(self) -> None:
        def again() -> AsyncGenerator["Run", None]:
            return self._client.watch(after_change=self._change, run_ids=[self._run.run_id], is_exact=True)

        async with aclosing(self._daemon.following(again)) as runs:
            async for run in runs:
                self._take_run(run)

    def _take_run(self, run: "Run") -> None:
        self._run, self._change = run, max(self._change, run.change)
        if self._screen is not None:
            self._screen.add(self._screen.view.take_run(run))

    def _take_absence(self, absence: Absence | None) -> None:
        if self._screen is None:
            say_absence(absence)
            return
        view = self._screen.view
        meanwhile = f"the run {self._does} meanwhile"
        view.absence = (
            "" if absence is None else "; ".join(filter(None, (absence.what, meanwhile, absence.remedy)))
        )
        self._screen.changed()

    async def _take_log(self) -> None:
        from trn.client.screen.worker_log import WorkerLog

        assert self._screen is not None
        is_late = self._run.step > 0 or self._run.is_terminal
        log = WorkerLog()

        def again() -> AsyncGenerator[Any, None]:
            is_tail = self._log_at is None and is_late
            return self._client.logs(
                self._run.run_id,
                is_followed=True,
                offset=self._log_at or 0,
                tail_bytes=TAIL_BYTES if is_tail else 0,
                is_exact=True,
            )

        async with aclosing(self._daemon.following(again)) as chunks:
            async for chunk in chunks:
                if self._log_at is None and chunk.offset > 0:
                    log = WorkerLog(is_begun_in_the_middle=True)
                self._log_at = chunk.offset + len(chunk.data)
                self._screen.add(log.take(chunk.data))
        self._screen.add(log.rest())

    async def _redraw(self) -> None:
        from trn.client.screen.render import REDRAW_S

        assert self._screen is not None
        while True:
            self._screen.redraw()
            await asyncio.sleep(REDRAW_S)

    def _want_cancel(self) -> None:
        when = " as soon as a daemon answers" if self._daemon.absence else ""
        self._output.say(
            f"cancelling {self._run.run_id}{when}; Ctrl-C again leaves without waiting for its end"
        )
        self._daemon.need()
        self._cancelled.set()

    async def _cancel_when_wanted(self) -> None:
        await self._cancelled.wait()

        async def cancel() -> AsyncGenerator["Run", None]:
            yield (await self._client.cancel(self._run.run_id, "cancelled with Ctrl-C", is_exact=True))[0]

        try:
            async with (
                asyncio.timeout(CANCEL_PATIENCE_S),
                aclosing(self._daemon.following(cancel)) as runs,
            ):
                async for run in runs:
                    self._is_cancel_recorded = True
                    self._take_run(run)
        except TimeoutError:
            why = await self._daemon.explain()
            raise UnavailableError(": ".join(filter(None, why))) from None

    def _pause(self) -> None:
        if self._screen is not None:
            self._screen.pause()

    def _go_on(self) -> None:
        if self._screen is not None:
            self._screen.start()

    def _conclude(self, reason: StopReason | None) -> ExitCode:
        run = self._run
        if reason is not None and not run.is_terminal:
            if self._is_ours or self._screen is not None:
                self._output.say(self._say_what_it_does())
            return ExitCode.INTERRUPTED if reason is StopReason.LEAVE else ExitCode.OK
        if self._screen is not None:
            self._screen.finish(((run.ended_ms or run.updated_ms) - run.submitted_ms) / 1000)
        self._output.record({"event": f"job_{run.state.lower()}", **describe(run)})
        return exit_code_of_state(run.state)

    @property
    def _does(self) -> str:
        """In a pipe only the run's first state and its events are known."""
        return "waits" if self._run.state == "PENDING" and not self._seq else "continues"

    def _say_what_it_does(self) -> str:
        run_id, does = self._run.run_id, self._does
        if self._is_cancel_recorded:
            return f"{run_id} is being cancelled; to see its end: trn watch {run_id}"
        if self._cancelled.is_set():
            return f"{run_id} {does} and is not cancelled, because no daemon recorded it; to cancel it: trn cancel {run_id}"
        return f"{run_id} {does}; to follow it again: trn watch {run_id}"


def describe(run: "Run | RunRecord") -> dict[str, Any]:
    """The fields of a run in all events of the command line."""
    return {
        "run_id": run.run_id,
        "state": run.state,
        "reason": run.reason,
        "cause": asdict(run.cause),
        "stop_reason": run.stop_reason,
        "name": run.name,
        "attempt": run.attempt,
        "step": run.step,
        "end_step": run.end_step,
        "metrics": run.metrics,
        "devices": list(run.devices),
        "parent_run_id": run.parent_run_id,
        "family": run.family,
        "start_step": run.start_step,
        "digest": run.digest,
        "submitted_ms": run.submitted_ms,
        "ended_ms": run.ended_ms,
    }


def _last_seq(lines: bytes, before: int) -> int:
    import msgspec

    last = lines.rstrip(b"\n").rpartition(b"\n")[2]
    with contextlib.suppress(msgspec.MsgspecError, KeyError, TypeError):
        return int(msgspec.json.decode(last)["seq"])
    return before
