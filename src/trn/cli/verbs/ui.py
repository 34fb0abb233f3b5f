"""`trn ui`: the page and the HTTP API of this home. Starts the gateway, and a daemon if none runs."""

import os
import sys
from typing import TYPE_CHECKING

import click

from trn.cli.output import Output, json_option
from trn.core.errors import ConflictError
from trn.core.home import Home
from trn.core.version import VERSION

if TYPE_CHECKING:
    from trn.client.gateway_start import RunningGateway

EPILOG = """\b
Examples:
  trn ui
  trn ui --address 127.0.0.1:8080 --no-browser
  trn ui --json | jq -r .bearer
  trn ui --stop
"""

address_option = click.option(
    "--address",
    metavar="HOST:PORT",
    default="",
    help="Where it listens (default: [http] in settings.toml, else a free port of 127.0.0.1).",
)


@click.command("ui", epilog=EPILOG)
@address_option
@click.option("--no-browser", "is_silent", is_flag=True, help="Only print the address.")
@click.option("--stop", "is_stopped", is_flag=True, help="Stop the gateway. Runs continue.")
@json_option
@click.pass_obj
def command(home: Home, *, address: str, is_silent: bool, is_stopped: bool, is_json: bool | None) -> None:
    """Open the page: all runs, live, in a browser. Starts what is needed.

    The link logs one browser in, once, within five minutes. With --json: one object with `url` (for a browser) and
    `bearer` (for programs, as `Authorization: Bearer …`); opens nothing.
    """
    output = Output(is_json=is_json)
    if is_stopped:
        if address or is_silent:
            raise click.UsageError("--stop goes with no other option")
        _stop(home, output)
        return
    gateway = start_gateway(home, address=address)
    show_link(home, output, gateway, path="/", is_opened=not is_silent)


def start_gateway(home: Home, *, address: str = "") -> "RunningGateway":
    """The home's gateway, with a daemon. ConflictError where one runs at another address."""
    from trn.client.daemon_start import ensure_daemon
    from trn.client.gateway_start import ensure_gateway, stop_gateway

    ensure_daemon(home)
    gateway, is_new = ensure_gateway(home, address=address)
    if gateway.version != VERSION:  # of before an update: it holds nothing that could be lost
        stop_gateway(gateway, home)
        gateway, is_new = ensure_gateway(home, address=address)
    if address and not is_new and not _is_at(gateway, address):
        raise ConflictError(
            f"the gateway, pid {gateway.pid}, listens at {gateway.address}, not at {address}: `trn ui --stop`, then start"
            " it again"
        )
    return gateway


def _is_at(gateway: "RunningGateway", address: str) -> bool:
    host, _, port = address.rpartition(":")
    own_host, _, own_port = gateway.address.rpartition(":")
    same = {"localhost": "127.0.0.1"}
    return port in ("0", own_port) and same.get(host, host) == own_host


def show_link(home: Home, output: Output, gateway: "RunningGateway", *, path: str, is_opened: bool) -> None:
    """Print a link that logs a browser in, and open it where there is one."""
    url = gateway.draw_login().replace("/#", f"{path}#", 1)
    if output.is_json:
        output.record({"url": url, "bearer": gateway.bearer, "address": gateway.url, "pid": gateway.pid})
        return
    has_opened = is_opened and has_browser() and _open(home, url)
    output.show(url)
    output.show(
        "opened in the browser" if has_opened else "open it in a browser; it works once, within 5 minutes"
    )


def has_browser() -> bool:
    """Whether a browser would open on the screen of who typed this."""
    if os.environ.get("SSH_CONNECTION") or os.environ.get("SSH_TTY"):
        return False
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _open(home: Home, url: str) -> bool:
    """By a private file that leads there: the URL holds a token, and others can read command lines."""
    import html
    import webbrowser

    from gen_worker.contract.files.durable import replace_file

    page = home.root / "open.html"
    text = f'<meta http-equiv="refresh" content="0;url={html.escape(url)}">'
    replace_file(page, text.encode(), sync="none", mode=0o600)
    return webbrowser.open(page.as_uri())


def _stop(home: Home, output: Output) -> None:
    from trn.client.gateway_start import find_gateway, stop_gateway

    gateway = find_gateway(home)
    if gateway is None:
        output.event("gateway_not_running", home=str(home.root))
        output.show(f"no gateway runs for {home.root}")
        return
    stop_gateway(gateway, home)
    output.event("gateway_stopped", pid=gateway.pid)
    output.show(f"the gateway, pid {gateway.pid}, has stopped; runs continue")
