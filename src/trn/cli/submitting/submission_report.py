"""Submits a run, reports the answer to people and programs, and follows the run."""

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

import click

from trn.cli.exit_codes import ExitCode
from trn.cli.following.follow import Follower, describe
from trn.cli.submitting.submit_options import describe_differences, say_differences, say_kept
from trn.core.terminal_text import plain

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from trn.cli.output import Output
    from trn.client.client import AsyncClient
    from trn.client.code.frozen_code import FrozenCode
    from trn.client.wire_requests import SubmitOptions
    from trn.core.errors import ConflictError, InvalidRequestError
    from trn.core.home import Home
    from trn.proto.records import SubmitResult

SILENCE_S = 1.0
T = TypeVar("T")


async def answered(output: "Output", submission: "Awaitable[T]") -> T:
    """The answer; says so if it takes a while, because a new daemon has to import torch first."""
    waiting = asyncio.ensure_future(submission)
    try:
        if not (await asyncio.wait([waiting], timeout=SILENCE_S))[0]:
            output.say_first("trn: importing the code; this takes some seconds after the start of a daemon")
        return await waiting
    finally:
        waiting.cancel()


async def submit_and_follow(
    client: "AsyncClient",
    home: "Home",
    output: "Output",
    request: "Awaitable[SubmitResult]",
    asked: "SubmitOptions",
    options: dict[str, Any],
    code: "FrozenCode",
) -> ExitCode:
    """Submit, say which run it is, and follow it to its end. Detached: print its id, unless JSON was asked for."""
    with output.holding_lines():
        for line in code.lines():
            output.say(line)
        try:
            submission = await answered(output, request)
        except asyncio.CancelledError:  # Ctrl-C: the daemon may have taken it
            output.say(
                "trn: stopped before the daemon answered: `trn list` shows whether a run was submitted"
            )
            raise
        notes = [plain(note) for note in submission.notes]
        if (
            submission.existed and notes
        ):  # an equal run answers: the first note says so, before all other lines
            output.say_first(notes.pop(0))
    say_kept(output, asked, submission)
    for note in notes:
        output.say(f"trn: {note}")
    say_differences(output, submission.env_differences)
    run, is_detached = submission.run, options["is_detached"]
    if is_detached and not options["is_json"]:
        click.echo(run.run_id)  # for `RUN=$(trn run --detach …)`
        return ExitCode.OK
    output.record(
        {
            "event": "job_submitted",
            "existed": submission.existed,
            "notes": list(submission.notes),
            **describe(run),
            "env_differences": describe_differences(submission.env_differences),
        }
    )
    if is_detached:
        return ExitCode.OK
    return await Follower(client, home, output, run, is_ours=True).follow()


def report_rejection(output: "Output", error: "InvalidRequestError | ConflictError", what: str) -> ExitCode:
    """Show every fault of a job that was refused: words to people, words and data to programs."""
    from gen_worker.errors import Fault
    from trn.core.errors import InfeasibleError, InvalidRequestError

    reason, faults, code = str(error), [Fault(str(error))], "conflict"
    if isinstance(error, InvalidRequestError):
        reason, faults = error.reason, error.faults or [Fault(error.reason)]
        code = "infeasible" if isinstance(error, InfeasibleError) else "invalid"
    output.say("\n".join(map(plain, f"trn: {error}".splitlines())))
    output.event(
        "job_rejected",
        job=what,
        code=code,
        reason=reason,
        faults=[str(fault) for fault in faults],
        fault_details=[fault.to_data() for fault in faults],
    )
    return ExitCode.REFUSED
