"""`python -m trn.gateway`: serve the page and the HTTP API of a home. `trn ui` starts it."""

import argparse
import asyncio
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from trn.core.errors import TrnError
from trn.core.home import Home, find_home
from trn.core.program import leave, refuse, set_up_log
from trn.core.settings import read_settings


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trn.gateway", description=__doc__)
    parser.add_argument(
        "--home", type=Path, help="the daemon's folder (default: $TRN_HOME, else the platform's)"
    )
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="default: `http` in the settings, else a free port of 127.0.0.1",
    )
    parser.add_argument("--quiet", action="store_true", help="log only to gateway.log")
    options = parser.parse_args(arguments)
    home = Home(options.home.expanduser().absolute() if options.home else find_home())
    try:
        return _serve(home, options.address, is_quiet=options.quiet)
    except (TrnError, OSError) as fault:
        return refuse(home, fault)
    except BaseExceptionGroup as group:
        causes = list(_causes(group))
        cause = causes[0]
        if len(causes) > 1 or not isinstance(cause, TrnError | OSError):
            raise
        return refuse(home, cause)


def _causes(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """Of its tasks."""
    for fault in group.exceptions:
        if isinstance(fault, BaseExceptionGroup):
            yield from _causes(fault)
        else:
            yield fault


def _serve(home: Home, address: str | None, *, is_quiet: bool) -> int:
    os.umask(0o077)  # all that it writes is its owner's alone
    settings = read_settings(home.settings)
    home.make()
    set_up_log(home.gateway_log, is_quiet=is_quiet)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    from trn.gateway.app import Gateway

    asyncio.run(Gateway(home, settings.http, address or "").serve())
    return 0


if __name__ == "__main__":
    leave(main())
