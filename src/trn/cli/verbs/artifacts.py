"""`trn artifacts RUN`: the files that a run's events named; lists and saves them. No daemon is needed."""

from typing import TYPE_CHECKING, Any

import click

from trn.cli.durations import now_ms, say_ago
from trn.cli.output import Output, json_option
from trn.cli.reading.registry_view import run_id_argument
from trn.client.screen.cells import cell_width, pad, shorten
from trn.core.home import Home
from trn.core.terminal_text import plain

if TYPE_CHECKING:
    from pathlib import Path

    from trn.core.artifacts.records import ArtifactRecord

KINDS = ("checkpoint", "sample", "video", "file")
MAX_ROWS = 40
HASH_CHARS = 12
ID_CHARS = 10  # enough to name it
HEADS = ("step", "attempt", "kind", "size", "sha256", "made", "id", "name")
NUMBERS = {"step", "attempt", "size"}

EPILOG = """\b
Examples:
  trn artifacts cartpole --kind video
  trn artifacts cartpole --save a3f09c last.mp4
  trn artifacts cartpole --kind sample --out samples/
  trn artifacts cartpole --json | jq -r .sha256
"""


@click.command("artifacts", epilog=EPILOG)
@run_id_argument
@click.option("--kind", type=click.Choice(KINDS), help="Only these.")
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    metavar="N",
    help=f"Show the newest N; 0: all (default: {MAX_ROWS}).",
)
@click.option(
    "--save", nargs=2, metavar="ID PATH", help="Save one artifact; its id may be shortened. `-` is stdout."
)
@click.option("--out", metavar="DIR", help="Save all that are present below DIR.")
@json_option
@click.pass_obj
def command(
    home: Home,
    *,
    run_id: str,
    kind: str | None,
    limit: int | None,
    save: tuple[str, str] | None,
    out: str | None,
    is_json: bool | None,
) -> None:
    """List and save the files of a run.

    These are its checkpoints, samples, videos and other files that an event named, with step, size and SHA-256; newest
    first. JSON has all of them. A saved file is compared with its SHA-256.
    """
    from trn.cli.reading.run_lookup import find_artifacts, find_run

    if save is not None and out is not None:
        raise click.UsageError("--save and --out exclude each other")
    run = find_run(home, run_id).run
    found = find_artifacts(home, run.run_id, kind=kind or "")
    output = Output(is_json=is_json)
    if save is not None:
        _save_one(output, home, found, *save)
    elif out is not None:
        _save_all(output, home, [artifact for artifact in found if artifact.is_present], out)
    else:
        _list(output, found, limit)


def _list(output: Output, found: "list[ArtifactRecord]", limit: int | None) -> None:
    most = limit or len(found) if limit is not None or output.is_json else MAX_ROWS
    for artifact in found[:most]:
        output.record({"event": "artifact", **_record(artifact)})
    if output.is_json:
        return
    if not found:
        output.show("no artifacts match")
        return
    rows = [HEADS, *(_row(artifact) for artifact in found[:most])]
    widths = [max(cell_width(row[column]) for row in rows) for column in range(len(HEADS) - 1)]
    room = max(output.size[0] - sum(widths) - 2 * len(widths), 8)
    are_there = [True, *(artifact.is_present for artifact in found[:most])]
    for number, (row, is_there) in enumerate(zip(rows, are_there, strict=True)):
        cells = [
            pad(cell, width, to_the_right=head in NUMBERS)
            for cell, width, head in zip(row, widths, HEADS, strict=False)
        ]
        line = "  ".join([*cells, _shorten_start(row[-1], room)]).rstrip()
        output.show(output.paint(line, is_bold=number == 0, is_dim=not is_there))
    if len(found) > most:
        output.show(f"… and {len(found) - most} older: --limit 0 shows all")
    _show_refused(output, found)


def _shorten_start(name: str, width: int) -> str:
    """The end of a file's name tells more than its start."""
    if cell_width(name) <= width:
        return name
    while cell_width(name) > width - 1:
        name = name[1:]
    return f"…{name}"


def _show_refused(output: Output, found: "list[ArtifactRecord]") -> None:
    refused = [artifact for artifact in found if artifact.state == "refused"]
    if refused:
        output.show()
        output.show(output.paint("refused", "yellow", is_bold=True))
    for artifact in refused[:MAX_ROWS]:
        output.show_wrapped(f"  {artifact.artifact_id[:ID_CHARS]}  {plain(say_refused(artifact))}", indent=4)
    if len(refused) > MAX_ROWS:
        output.show(f"  … and {len(refused) - MAX_ROWS} more: --json has all")


def say_refused(artifact: "ArtifactRecord") -> str:
    return f"{artifact.kind} of step {artifact.step}, {shorten(artifact.name, 60)}: {artifact.reason}"


def _row(artifact: "ArtifactRecord") -> tuple[str, ...]:
    from gen_worker.contract.sizes import show_bytes

    size = show_bytes(artifact.size_bytes) if artifact.size_bytes else "-"
    checksum = artifact.sha256[:HASH_CHARS] if artifact.is_present else str(artifact.state)
    made = say_ago(artifact.created_ms, now_ms())
    return (
        str(artifact.step),
        str(artifact.attempt),
        artifact.kind,
        size,
        checksum,
        made,
        artifact.artifact_id[:ID_CHARS],
        plain(artifact.name),
    )


def _record(artifact: "ArtifactRecord") -> dict[str, Any]:
    """Every field but those of the home's own."""
    import msgspec

    fields: dict[str, Any] = msgspec.to_builtins(artifact)
    del fields["path"], fields["stamp"], fields["seq"]
    return {**fields, "is_present": artifact.is_present, "reason": artifact.reason}


def _save_one(
    output: Output, home: Home, found: "list[ArtifactRecord]", artifact_id: str, target: str
) -> None:
    import sys
    from pathlib import Path

    from trn.core.errors import AmbiguousError, NotFoundError

    meant = [artifact for artifact in found if artifact.artifact_id.startswith(artifact_id)]
    if len(meant) > 1:
        raise AmbiguousError(f"{artifact_id!r} is the beginning of {len(meant)} artifacts: give more of it")
    if not meant:
        raise NotFoundError(
            f"the run has no artifact with the id {artifact_id!r}: `trn artifacts RUN` lists the ids"
        )
    if target == "-":
        _copy(home, meant[0], sys.stdout.buffer)
        return
    path = Path(target)
    _save(output, home, meant[0], path / meant[0].name if path.is_dir() else path)


def _save_all(output: Output, home: Home, found: "list[ArtifactRecord]", folder: str) -> None:
    """As they lie in the run's folder; a checkpoint with its meta file, without which it cannot be resumed."""
    from pathlib import Path

    from trn.core.artifacts.files import find_checkpoint_meta
    from trn.core.errors import ConflictError

    root = Path(folder)
    taken = [path for path in (root / artifact.path for artifact in found) if path.exists()]
    if taken:
        raise ConflictError(f"{taken[0]} exists: give another folder, or remove it")
    for artifact in found:
        path = root / artifact.path
        path.parent.mkdir(parents=True, exist_ok=True)
        _save(output, home, artifact, path)
        if artifact.kind == "checkpoint":
            meta = find_checkpoint_meta(home, artifact)
            path.with_name(meta.name).write_bytes(meta.read_bytes())
    output.show(f"{len(found)} saved below {plain(folder)}" if found else "no artifacts match")


def _save(output: Output, home: Home, artifact: "ArtifactRecord", path: "Path") -> None:
    from gen_worker.contract.files.durable import replacing
    from trn.core.errors import ConflictError

    if path.exists():
        raise ConflictError(f"{path} exists: give another path, or remove it")
    with replacing(path, sync="none") as file:
        _copy(home, artifact, file)
    fields = {"artifact_id": artifact.artifact_id, "size_bytes": artifact.size_bytes}
    output.event("artifact_saved", **fields, path=str(path))
    output.show(f"saved {plain(str(path))}")


def _copy(home: Home, artifact: "ArtifactRecord", target: Any) -> None:
    """ConflictError where the bytes are not those that were recorded."""
    import hashlib
    import os

    from trn.core.artifacts.files import changed_error, open_artifact

    digest = hashlib.sha256()
    with os.fdopen(open_artifact(home, artifact), "rb", buffering=0) as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
            target.write(piece)
    if digest.hexdigest() != artifact.sha256:
        raise changed_error(artifact)
