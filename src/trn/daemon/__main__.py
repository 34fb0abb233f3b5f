"""`python -m trn.daemon`: serve a home, or check and back up its registry."""

import argparse
import asyncio
import os
import time
from pathlib import Path

from trn.core.bus_url import EVENT_BUS_VARIABLE
from trn.core.errors import TrnError, UnavailableError
from trn.core.home import Home, find_home
from trn.core.program import leave, refuse, set_up_log
from trn.core.settings import read_address, read_settings, refuse_open_http

MAX_BACKUPS = 5  # that are checked


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    home = Home(options.home.expanduser().absolute() if options.home else find_home())
    try:
        return int(options.do(home, options))
    except (TrnError, OSError) as fault:
        return refuse(home, fault)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trn.daemon", description=__doc__)
    parser.add_argument(
        "--home", type=Path, help="the daemon's folder (default: $TRN_HOME, else the platform's)"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="run the daemon in the foreground, until SIGTERM or Ctrl-C")
    serve.add_argument(
        "--idle-exit-s",
        type=_read_seconds,
        metavar="N",
        help="exit after N seconds without a run and without a call",
    )
    serve.add_argument(
        "--event-bus",
        metavar="URL",
        help=f"publish every event there, e.g. redis://localhost:6379/0 (default: ${EVENT_BUS_VARIABLE}, which is hidden"
        " from other users, else event_bus in the settings)",
    )
    serve.add_argument(
        "--http",
        metavar="HOST:PORT",
        help="keep the page and the HTTP API there (default: [http] in the settings; without an address, `trn ui` starts them)",
    )
    serve.add_argument(
        "--quiet",
        action="store_true",
        help="log only to daemon.log; stderr has only the reason why it does not start",
    )
    serve.set_defaults(do=_serve)
    check = commands.add_parser("check", help="check both databases with SQLite; also while the daemon runs")
    check.set_defaults(do=_check)
    backup = commands.add_parser(
        "backup", help="copy both databases consistently; also while the daemon runs"
    )
    backup.add_argument("folder", type=Path, nargs="?", help="default: a new folder in the home's backups")
    backup.set_defaults(do=_back_up)
    return parser


def _read_seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):  # nan neither
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return seconds


def _serve(home: Home, options: argparse.Namespace) -> int:
    # The daemon itself never forks; gRPC's fork handlers would disturb the start of the launcher.
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"
    import msgspec

    from gen_worker.contract.failpoints import arm_from_env

    arm_from_env()
    settings = read_settings(home.settings)
    if options.idle_exit_s is not None:
        settings = msgspec.structs.replace(settings, idle_exit_s=options.idle_exit_s)
    event_bus = os.environ.pop(EVENT_BUS_VARIABLE, "")  # it may hold a password: not for workers
    if options.event_bus or event_bus:
        settings = msgspec.structs.replace(settings, event_bus=options.event_bus or event_bus)
    if options.http:
        http = msgspec.structs.replace(settings.http, address=options.http)
        settings = msgspec.structs.replace(settings, http=http)
    if settings.http.address:
        from trn.proto.methods import is_loopback

        host, _ = read_address(settings.http.address)
        if not is_loopback(host) and not (settings.http.certificate or settings.http.private_key):
            raise refuse_open_http(settings.http.address, home.settings)
    home.make()
    set_up_log(home.daemon_log, is_quiet=options.quiet)
    from trn.daemon.app import TrainerDaemon

    asyncio.run(TrainerDaemon(home, settings).serve())
    return 0


def _check(home: Home, _options: argparse.Namespace) -> int:
    from trn.registry.connection import check_integrity

    if not home.registry.exists():
        raise UnavailableError(f"{home.registry} does not exist: nothing was submitted here")
    damaged = []
    for path in (home.registry, home.metrics):
        faults = check_integrity(path) if path.exists() else []
        result = f"{len(faults)} error{'s' if len(faults) > 1 else ''}" if faults else "ok"
        print(f"{path.name}: {result if path.exists() else 'does not exist yet'}")  # noqa: T201
        for fault in faults:
            print(f"  - {fault}")  # noqa: T201
        damaged += [path] if faults else []
    if damaged:
        raise UnavailableError(_repair_text(home, damaged))
    return 0


def _repair_text(home: Home, damaged: list[Path]) -> str:
    """What to type. Nothing is deleted: damaged files are moved aside."""
    from trn.registry.connection import check_integrity

    candidates = sorted(home.backups.glob(f"*/{home.registry.name}"), reverse=True)[:MAX_BACKUPS]
    good = [path.parent for path in candidates if not check_integrity(path)]
    lines = [f"damaged in {home.root}: {' and '.join(path.name for path in damaged)}. What to do:"]
    lines += [f"  trn --home {home.root} daemon stop"]
    for path in damaged:
        lines += [f"  mv {path} {path}.damaged; rm -f {path}-wal {path}-shm"]
    if home.registry not in damaged:
        lines.append(
            "Then start the daemon again: it reads the metric points of the newest runs from their events."
        )
        return "\n".join(lines)
    if good:
        lines.append(f"  cp -p {good[0]}/*.db {home.root}/")
        others = ", ".join(path.name for path in good[1:])
        lines.append(f"Then start the daemon again. Other good backups: {others or 'none'}.")
    else:
        lines.append(
            f"Then restore your own copy: {home.backups} has no good one. Without a copy, the runs' folders are still"
            " complete, and `trn resume --checkpoint META` continues from their checkpoints."
        )
    return "\n".join(lines)


def _back_up(home: Home, options: argparse.Namespace) -> int:
    from trn.registry.connection import back_up

    folder = options.folder or home.backups / time.strftime("%Y%m%d-%H%M%S")
    if not home.registry.exists():
        raise UnavailableError(f"{home.registry} does not exist: nothing was submitted here")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for path in (home.registry, home.metrics):
        target = folder / path.name
        if not path.exists():
            continue
        if target.exists():
            raise UnavailableError(f"{target} exists: give another folder")
        back_up(path, target)
    print(f"backed up to {folder}")  # noqa: T201
    return 0


if __name__ == "__main__":
    leave(main())
