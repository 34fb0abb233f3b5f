"""`trn dataset index|verify DIR`: index a dataset folder, and verify it against its index."""

import sys
from typing import Any

import click

from trn.cli.completion import complete_folder
from trn.cli.exit_codes import ExitCode
from trn.cli.output import Output, json_option
from trn.core.terminal_text import plain

GROUP_EPILOG = """\b
Examples:
  trn dataset index data/digits
  trn dataset verify data/digits
"""
INDEX_EPILOG = """\b
Examples:
  trn dataset index data/digits
  trn dataset index data/digits --json | jq .rows
"""
VERIFY_EPILOG = """\b
Examples:
  trn dataset verify data/digits
  trn dataset verify data/digits --json | jq .faults

\b
Exits with 0 if all files match the index, 1 if one differs.
"""


@click.group(epilog=GROUP_EPILOG)
def command() -> None:
    """Index and verify folders of parquet files."""


def workers_option(function: Any) -> Any:
    return click.option(
        "--workers",
        type=click.IntRange(min=1),
        metavar="N",
        help="Number of threads (default: by processors).",
    )(function)


@command.command(epilog=INDEX_EPILOG)
@click.argument("folder", metavar="DIR", shell_complete=complete_folder)
@workers_option
@json_option
def index(folder: str, workers: int | None, is_json: bool | None) -> int:
    """Write schema.json and index.json: every shard with its rows, bytes and hash."""
    return _run("index", folder, workers, Output(is_json=is_json))


@command.command(epilog=VERIFY_EPILOG)
@click.argument("folder", metavar="DIR", shell_complete=complete_folder)
@workers_option
@json_option
def verify(folder: str, workers: int | None, is_json: bool | None) -> int:
    """Hash every shard again and report which differ from the index, and how."""
    return _run("verify", folder, workers, Output(is_json=is_json))


def _run(action: str, folder: str, workers: int | None, output: Output) -> int:
    from trn.cli.worker_tool import reading_records

    is_watched = sys.stderr.isatty()
    options = [] if workers is None else ["--workers", str(workers)]
    code = ExitCode.INTERRUPTED  # until there is a result
    with reading_records("dataset", [action, *options, "--", folder]) as records:
        for record in records:
            event = record["event"]
            if event == "dataset_progress":
                if is_watched:
                    click.echo(f"\r\x1b[K{_bar(record)}", err=True, nl=False)
                continue
            if is_watched:
                click.echo("\r\x1b[K", err=True, nl=False)
            output.record(record)
            code = _tell(event, record, output)
    return code


def _bar(record: dict[str, Any]) -> str:
    done, total = record["done_bytes"], max(record["total_bytes"], 1)
    filled = 24 * done // total
    return f"[{'#' * filled}{'.' * (24 - filled)}] {100 * done // total:3d} % {plain(record['path'])[-40:]}"


def _type_of(column: dict[str, Any]) -> str:
    """With the shape of a row: `uint8[28, 28]`, `int64[any]`."""
    shape = column["shape"]
    if shape is None:
        return str(column["dtype"])
    return f"{column['dtype']}[{', '.join('any' if size is None else str(size) for size in shape)}]"


def _tell(event: str, record: dict[str, Any], output: Output) -> ExitCode:
    if event == "dataset_rejected":
        output.say("\n".join(map(plain, f"trn: {record['error']}".splitlines())))
        return ExitCode.REFUSED
    for path in record.get("unlisted", ()):
        output.say(f"{plain(path)}: is not in the index and is not read; to add it, index the folder again")
    from gen_worker.contract.sizes import show_bytes

    sums = f"{record['num_shards']} shards, {record['rows']} rows, {show_bytes(record['bytes'])}"
    if event == "dataset_damaged":
        for fault in record["faults"]:
            output.say(f"{plain(fault['path'])}: {fault['message']}")
        output.say(
            f"trn: {len(record['faults'])} of {record['num_shards']} shards of {record['folder']} differ: restore them, or"
            f" accept the change with `trn dataset index {record['folder']}`"
        )
        return ExitCode.FAILED_RUN
    columns = ", ".join(f"{column['name']} ({_type_of(column)})" for column in record["columns"])
    done = "indexed" if event == "dataset_indexed" else "verified"
    output.show(f"{output.paint(done, 'green')} {record['folder']}: {sums}")
    output.show(f"  columns  {plain(columns)}")
    output.show(f"  digest   {record['digest']}")
    return ExitCode.OK
