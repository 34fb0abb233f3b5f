"""`trn daemon start|stop|status`: the daemon of a home. Workers run without it."""

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import click

from trn.cli.durations import Seconds, now_ms, say_duration
from trn.cli.exit_codes import ExitCode
from trn.cli.output import Output, json_option
from trn.cli.reading.registry_view import STATES, RegistryView, RunFilter
from trn.core.errors import ConflictError, RegistryError, TrnError, UnavailableError
from trn.core.home import Home
from trn.core.version import CHANGED

if TYPE_CHECKING:
    from trn.client.daemon_start import RunningDaemon
    from trn.proto.records import Health

ANSWER_PATIENCE_S = 5.0
STOP_PATIENCE_S = 30.0
LOOK_EVERY_S = 0.02
LAUNCHER_STAYS = "10 minutes"

event_bus_option = click.option(
    "--event-bus",
    metavar="URL",
    default="",
    help="Publish every event there: redis://host:port/db, rediss://…, unix://path, or a plug-in's scheme. Put a"
    " password into the home's settings.toml instead.",
)


EPILOG = """\b
Examples:
  trn daemon start
  trn daemon status
  trn daemon stop
"""


@click.group("daemon", epilog=EPILOG, invoke_without_command=True)
@event_bus_option
@click.pass_context
def command(ctx: click.Context, event_bus: str) -> None:
    """Start, stop and inspect the daemon of this home.

    `trn run` starts one if none runs. `trn daemon --event-bus URL` is `trn daemon start --event-bus URL`.
    """
    if event_bus and ctx.invoked_subcommand is not None:
        raise click.UsageError(f"--event-bus goes after the command: trn daemon {ctx.invoked_subcommand} …")
    if event_bus:
        ctx.invoke(start, idle_exit_s=None, event_bus=event_bus, http="", is_json=False, format_=None)
    elif ctx.invoked_subcommand is None:
        raise click.exceptions.NoArgsIsHelpError(ctx)


@command.command(
    epilog="\b\nExamples:\n  trn daemon start\n  trn --home /data/trn daemon start --idle-exit-s 600\n"
    "  trn daemon start --event-bus redis://localhost:6379/0\n  trn daemon start --http 127.0.0.1:8080\n"
)
@click.option(
    "--idle-exit-s",
    type=Seconds(min=0, min_open=True),
    metavar="N",
    help="Exit after N seconds without runs and calls (default: never).",
)
@event_bus_option
@click.option(
    "--http",
    metavar="HOST:PORT",
    default="",
    help="Keep the page and the HTTP API there (default: only while `trn ui` has started them).",
)
@json_option
@click.pass_obj
def start(home: Home, *, idle_exit_s: float | None, event_bus: str, http: str, is_json: bool | None) -> None:
    """Start the daemon in the background and wait until it answers. Does nothing if one runs."""
    from trn.client.daemon_start import ensure_daemon

    output = Output(is_json=is_json)
    wanted = _shown_bus(event_bus)
    daemon, is_new = ensure_daemon(home, idle_exit_s=idle_exit_s, event_bus=event_bus, http=http)
    if wanted not in ("", daemon.event_bus):
        raise ConflictError(
            f"the daemon, pid {daemon.pid}, runs with {daemon.event_bus or 'no event bus'}, not with {wanted}:"
            " `trn daemon stop`, then start it again; runs continue meanwhile"
        )
    if http not in ("", daemon.http):
        raise ConflictError(
            f"the daemon, pid {daemon.pid}, runs {f'with --http {daemon.http}' if daemon.http else 'without --http'},"
            f" not with {http}: `trn daemon stop`, then start it again; runs continue meanwhile"
        )
    if daemon.http:
        from trn.client.gateway_start import ensure_gateway

        page = ensure_gateway(home, address=daemon.http)[0].url  # or why there is none
    else:
        page = ""
    output.event("daemon_started" if is_new else "daemon_already_running", **_describe(home, daemon))
    output.show(
        f"the daemon {'started' if is_new else 'already runs'}: pid {daemon.pid}, {', '.join(daemon.addresses)}"
    )
    if page:
        output.show(f"the page is at {page}: `trn ui` logs a browser in")
    _warn_of_version(output, daemon)


@command.command(epilog="\b\nExamples:\n  trn daemon stop && trn daemon start\n")
@json_option
@click.pass_obj
def stop(home: Home, *, is_json: bool | None) -> None:
    """Stop the daemon. Workers continue, and the next daemon takes them over."""
    from gen_worker.contract.process_identity import is_process_alive
    from trn.client.daemon_start import find_daemon, is_daemon
    from trn.client.gateway_start import find_gateway, stop_gateway

    output = Output(is_json=is_json)
    daemon, gateway = find_daemon(home), find_gateway(home)
    if daemon is None:
        output.event("daemon_not_running", home=str(home.root))
        output.show(f"no daemon runs for {home.root}")
        return
    if not is_daemon(daemon.pid):
        raise UnavailableError(
            f"pid {daemon.pid} is not a daemon here: that of {home.root} may run in another container; stop it there"
        )
    try:
        os.kill(daemon.pid, signal.SIGTERM)
        os.kill(daemon.pid, signal.SIGCONT)  # a suspended process gets SIGTERM only after this
    except ProcessLookupError:
        pass
    except PermissionError as fault:
        raise UnavailableError(
            f"no permission to stop the daemon, pid {daemon.pid}: it belongs to another user"
        ) from fault
    deadline = time.monotonic() + STOP_PATIENCE_S
    while is_process_alive(daemon.pid):
        if time.monotonic() >= deadline:
            raise UnavailableError(
                f"the daemon, pid {daemon.pid}, has not stopped after {STOP_PATIENCE_S:g} s: see {home.daemon_log};"
                f" `kill -9 {daemon.pid}` is safe"
            )
        time.sleep(LOOK_EVERY_S)
    if gateway is not None:
        stop_gateway(gateway, home)  # it ends by itself, too, a moment later
    try:
        num_live = _count(home, "DISPATCHING", "RUNNING")
    except RegistryError as fault:  # the daemon has stopped anyway
        num_live = 0
        output.say(f"trn: {fault}")
    launchers = _find_launchers(home)
    output.event("daemon_stopped", pid=daemon.pid, num_live_runs=num_live, launcher_pids=launchers)
    output.show(f"the daemon, pid {daemon.pid}, has stopped")
    if gateway is not None:
        output.show(f"the gateway, pid {gateway.pid}, has stopped: the page is closed")
    if num_live:
        output.show(
            f"{num_live} run{'s continue' if num_live > 1 else ' continues'}; the next daemon takes over"
        )
    for pid in launchers:
        output.show(
            f"its launcher, pid {pid}, waits {LAUNCHER_STAYS} for the next daemon, then exits;"
            f" `kill {pid}` ends it after its last run"
        )


@command.command(
    epilog="\b\nExamples:\n  trn daemon status\n  trn daemon status --json | jq .runs_by_state\n"
)
@json_option
@click.pass_obj
def status(home: Home, *, is_json: bool | None) -> ExitCode:
    """Show whether the daemon is up, and its state. Exits with 5 if none answers."""
    from trn.client.daemon_start import find_daemon, silence_of
    from trn.client.gateway_start import find_gateway

    output = Output(is_json=is_json)
    daemon, gateway = find_daemon(home), find_gateway(home)
    page = "" if gateway is None else gateway.url
    if daemon is None:
        counts = {state: num for state in STATES if (num := _count(home, state))}
        output.record({"is_up": False, "home": str(home.root), "runs_by_state": counts})
        output.show(f"{output.paint('down', 'red')}: no daemon runs for {home.root}")
        output.show(f"runs      {_say_counts(counts)}")
        output.show("start it  trn daemon start")
        return ExitCode.UNAVAILABLE
    try:
        health = _ask(home)
    except TrnError:
        what, remedy = silence_of(daemon)
        output.record({"is_up": False, **_describe(home, daemon), "warnings": [f"{what}: {remedy}"]})
        output.show(f"{output.paint('silent', 'red')}: {what}; runs continue meanwhile")
        output.show(f"fix it    {remedy}; `kill -9 {daemon.pid}` is safe too")
        output.show(f"see       {home.daemon_log}")
        return ExitCode.UNAVAILABLE
    output.record(
        {
            "is_up": True,
            **_describe(home, daemon),
            "runs_by_state": health.runs_by_state,
            "launcher": health.launcher,
            "num_watchers": health.num_watchers,
            "page": page,
            "warnings": list(health.warnings),
        }
    )
    up_ms = now_ms() - daemon.started_ms
    output.show(
        f"{output.paint('up', 'green')} for {say_duration(up_ms)}, pid {daemon.pid}, trn {daemon.version}"
    )
    output.show(f"home      {home.root}")
    output.show(f"address   {', '.join(daemon.addresses)}")
    if daemon.event_bus:
        output.show(f"bus       {daemon.event_bus}")
    output.show(f"runs      {_say_counts(health.runs_by_state)}")
    output.show(f"launcher  {health.launcher}")
    output.show(f"watchers  {health.num_watchers}")
    if page:
        output.show(f"page      {page} (`trn ui` logs a browser in)")
    for warning in health.warnings:
        output.show(f"{output.paint('warning', 'yellow')}   {warning}")
    if CHANGED not in health.warnings:
        _warn_of_version(output, daemon)
    return ExitCode.OK


def _ask(home: Home) -> "Health":
    from trn.client.sync_client import Client

    with Client(home.root, patience_s=0, timeout_s=ANSWER_PATIENCE_S) as client:
        return client.health()


def _describe(home: Home, daemon: "RunningDaemon") -> dict[str, Any]:
    said = {name: value for name, value in daemon._asdict().items() if not name.startswith("source_")}
    return {**said, "addresses": list(daemon.addresses), "home": str(home.root)}


def _shown_bus(url: str) -> str:
    """The URL without its password. InvalidRequestError if it is not valid."""
    from trn.core.bus_url import read_bus_url

    return read_bus_url(url).shown if url else ""


def _warn_of_version(output: Output, daemon: "RunningDaemon") -> None:
    if warning := daemon.version_warning:
        output.say(f"trn: {warning}")


def _find_launchers(home: Home) -> list[int]:
    """Pids of the home's live launchers, which outlive the daemon."""
    import json

    from gen_worker.contract.process_identity import is_process_alive

    pids = []
    for path in sorted(home.launcher.glob("*.json")):
        try:
            pids.append(int(json.loads(path.read_bytes())["pid"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # it has just exited
    return [pid for pid in pids if is_process_alive(pid)]


def _count(home: Home, *states: str) -> int:
    view = RegistryView(home)
    try:
        return view.num_runs(RunFilter(states=states))
    finally:
        view.close()


def _say_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{num} {state.lower()}" for state, num in counts.items() if num) or "none yet"
