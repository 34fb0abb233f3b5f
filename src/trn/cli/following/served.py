"""Waiting for what a server says: that it is ready, and what became of a promotion."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec

from trn.cli.exit_codes import ExitCode
from trn.cli.following.daemon_watch import DaemonWatch
from trn.cli.output import Output
from trn.core.causes import QUEUED
from trn.core.errors import UnavailableError
from trn.core.serving.records import Promotion, PromotionState, ServedModel
from trn.core.terminal_text import plain

if TYPE_CHECKING:
    from trn.client.client import AsyncClient
    from trn.core.home import Home
    from trn.proto.records import Run


async def wait_ready(
    client: "AsyncClient", home: "Home", output: Output, run: "Run"
) -> "tuple[ServedModel | None, Run]":
    """What is served, once its server answers; None where it ended before that. Says what it waits for."""
    said = run.cause

    def again() -> "AsyncGenerator[Run, None]":
        return client.watch(run_ids=[run.run_id], is_exact=True)

    async with aclosing(DaemonWatch(client, home).following(again)) as changes:
        async for changed in changes:
            if changed.is_terminal:
                return None, changed
            if changed.state == "PENDING" and changed.cause not in (said, QUEUED):
                said = changed.cause
                output.say(f"trn: {run.run_id}: {plain(changed.reason)}; Ctrl-C stops waiting")
            if changed.state == "RUNNING":
                served = (await client.get_served(run.run_id, limit=1)).served
                if served.run_id == run.run_id and served.is_ready:
                    return served, changed
    raise UnavailableError("the daemon ended the watch")


def show_served(output: Output, home: "Home", served: ServedModel) -> None:
    """Where it answers, and how it is asked."""
    live = "" if served.live is None else plain(served.live.label)
    output.event(
        "serving",
        name=served.name,
        run_id=served.run_id,
        url=served.url,
        bearer=read_bearer(home, served),
        bearer_file=served.bearer_file,
        version=msgspec.to_builtins(served.live),
    )
    output.show(f"{output.paint(served.name, is_bold=True)} answers with {live} at {plain(served.url)}")
    output.show(f"  {plain(say_request(served.url, served.bearer_file))}")


def read_bearer(home: "Home", served: ServedModel) -> str:
    """The secret that requests need; empty where they need none, or it cannot be read here.

    An event names its file, so only one in the folder of the server's run is read.
    """
    from pathlib import Path

    path = Path(served.bearer_file)
    if not served.bearer_file or not path.resolve().is_relative_to(home.run(served.run_id).root.resolve()):
        return ""
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


def say_request(url: str, bearer_file: str) -> str:
    """A command that asks the server what it answers with."""
    import shlex

    if url.startswith("unix:"):
        return f"curl --unix-socket {shlex.quote(url.removeprefix('unix:'))} http://localhost/openapi.json"
    secret = f' -H "Authorization: Bearer $(cat {shlex.quote(bearer_file)})"' if bearer_file else ""
    return f"curl{secret} {url}/openapi.json"


async def report_promotion(
    client: "AsyncClient", home: "Home", output: Output, promotion: Promotion, *, is_waited: bool
) -> ExitCode:
    """Say what was recorded or, if it is waited for, what became of it."""
    if not is_waited:
        output.event("promotion_wanted", **msgspec.to_builtins(promotion))
        output.show(
            f"{promotion.name}: promotion {promotion.number} is recorded; `trn status {promotion.run_id}` shows it"
        )
        return ExitCode.OK

    async def end() -> AsyncGenerator[Promotion, None]:
        yield await client.wait_promotion(promotion)

    async with aclosing(DaemonWatch(client, home).following(end)) as ends:
        async for found in ends:
            return _report_end(output, found)
    raise AssertionError("a wait that ends has a promotion")


def _report_end(output: Output, promotion: Promotion) -> ExitCode:
    fields: dict[str, Any] = msgspec.to_builtins(promotion)
    output.event(f"promotion_{promotion.state}", **fields)
    if promotion.state == PromotionState.DONE:
        for line in say_promotion(promotion):
            output.show_wrapped(line, indent=2)
        return ExitCode.OK
    for line in say_promotion(promotion):
        output.say(f"trn: {line}" if not line.startswith(" ") else line)
    return ExitCode.FAILED_RUN


def say_promotion(promotion: Promotion) -> list[str]:
    """What it asked for and what became of it, for people."""
    what = say_action(promotion)
    name = promotion.name
    if promotion.state == PromotionState.WANTED:
        return [f"{name}: {what} is under way"]
    if promotion.state == PromotionState.REPLACED:
        return [f"{name}: {what} was replaced by a later promotion before it was done"]
    if promotion.state == PromotionState.REFUSED:
        return [
            f"{name}: {what} was refused: {plain(promotion.words)}",
            "  nothing changed: the model before it answers",
            *_say_gate(promotion),
        ]
    done = {
        "promote": f"{name} answers with {_label(promotion)}",
        "rollback": f"{name} answers with {_label(promotion)} again",
        "shadow": f"{name}: {_label(promotion)} answers as a shadow; its answers are compared and not sent",
        "split": f"{name}: {_label(promotion)} answers {promotion.percent:g} % of the requests",
        "single": f"{name}: the live model alone answers",
    }.get(promotion.action, f"{name}: {what} is done")
    before = ""
    if promotion.action in ("promote", "rollback") and promotion.previous is not None:
        before = f" (before: {promotion.previous.label})"
    return [f"{done}{before}", *_say_gate(promotion)]


def say_action(promotion: Promotion) -> str:
    """`mnist@300`, `mnist@300 as a shadow`…"""
    return {
        "promote": _label(promotion),
        "rollback": f"the rollback to {_label(promotion)}",
        "shadow": f"{_label(promotion)} as a shadow",
        "split": f"{_label(promotion)} for {promotion.percent:g} % of the requests",
        "single": "the end of the shadow or split",
    }.get(promotion.action, promotion.action)


def _label(promotion: Promotion) -> str:
    return "the model before" if promotion.version is None else promotion.version.label


def _say_gate(promotion: Promotion) -> list[str]:
    """The gate's figures, on one line."""
    from trn.client.screen.figures import show_number

    shown = [
        f"{plain(str(name))} {show_number(value) if isinstance(value, int | float) else plain(str(value))}"
        for name, value in (promotion.gate or {}).items()
        if isinstance(value, int | float | str) and not isinstance(value, bool)
    ]
    return [f"  gate: {', '.join(shown)}"] if shown else []
