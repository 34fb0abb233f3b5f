"""What the command says of a submit, to people and to programs; then it follows the run."""

import asyncio
from typing import TYPE_CHECKING, TypeVar

import click

from trn.cli.exit_codes import ExitCode
from trn.cli.following.follow import Follower, describe
from trn.cli.submitting.environment_options import describe_differences, say_differences
from trn.core.runs import NOT_TRAINED
from trn.core.terminal_text import plain

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from trn.cli.output import Output
    from trn.client.client import AsyncClient
    from trn.core.errors import ConflictError, InvalidRequestError
    from trn.core.home import Home
    from trn.proto.records import SubmitResult

SILENCE_S = 1.0
T = TypeVar("T")


async def answered(output: "Output", submission: "Awaitable[T]") -> T:
    """That submit, or check. A word is said where it takes a while: a daemon that has just started has to load torch for it."""
    waiting = asyncio.ensure_future(submission)
    try:
        if not (await asyncio.wait([waiting], timeout=SILENCE_S))[0]:
            output.say_first(
                "trn: the code is being imported; the first time after a start that takes some seconds"
            )
        return await waiting
    finally:
        waiting.cancel()


def say_answer(output: "Output", submission: "SubmitResult") -> None:
    """Before all else: that nothing is trained again, where an equal run answers."""
    for note in map(plain, submission.notes):
        if note.startswith(NOT_TRAINED):
            output.say_first(note)


async def report_and_follow(
    client: "AsyncClient",
    home: "Home",
    output: "Output",
    submission: "SubmitResult",
    *,
    is_detached: bool,
    is_json: bool | None,
) -> ExitCode:
    """Say which run it is, and follow it to its end. Detached: its id alone, unless JSON was asked for by name."""
    run = submission.run
    for note in map(plain, submission.notes):
        if not note.startswith(NOT_TRAINED):  # that was said first
            output.say(f"trn: {note}")
    say_differences(output, submission.env_differences)
    if is_detached and not is_json:
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
