"""`trn list`: the runs of a home, from its registry; no daemon is needed."""

import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import click

from trn.cli.completion import complete_names
from trn.cli.durations import now_ms, parse_since, say_ago, say_duration
from trn.cli.exit_codes import ExitCode
from trn.cli.output import Output, json_option
from trn.cli.reading.registry_view import STATES, RegistryView, RunFilter, RunRow
from trn.client.screen.cells import cell_width, pad, shorten
from trn.core.home import Home
from trn.core.terminal_text import plain, shield

REDRAW_S = 1.0
DEFAULT_LIMIT = 50
MAX_NAME_WIDTH = 32
DEFAULT_COLUMNS = "id,state,name,step,age,took,reason"
FAMILY_COLUMNS = ["id", "state", "start", "step", "age", "curve"]
GIVES_WAY = ("took", "name", "age", "reason")  # on a narrow terminal, in this order
MIN_LAST_WIDTH = 8
HYPERPARAMS, TAGS = "hyperparams.", "tags."
_OWN_COLUMNS = "a metric (train/loss), a hyperparameter (hyperparams.lr) or a tag (tags.team)"
# An alternate screen keeps what was on the terminal before; it comes back at the end.
ENTER_SCREEN, LEAVE_SCREEN, CLEAR = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l", "\x1b[H\x1b[2J"

EPILOG = """\b
Examples:
  trn list --state running --state pending
  trn list --name mnist --since 2h --sort train/loss --columns id,state,train/loss
  trn list --sort hyperparams.lr --columns id,hyperparams.lr,tags.team,val/loss
  trn list --families
  trn list --watch
  trn list --json | jq -r .run_id
"""


def _steps(run: RunRow) -> str:
    if run.kind == "server":
        return "-"  # it counts seconds
    return f"{run.step}/{run.end_step}" if run.end_step else str(run.step)


def _took_ms(run: RunRow, at_ms: int) -> int:
    return (run.ended_ms or at_ms) - run.submitted_ms


COLUMNS: dict[str, Callable[[RunRow, int], str]] = {
    "id": lambda run, _at: run.run_id,
    "state": lambda run, _at: run.state,
    "name": lambda run, _at: shorten(plain(run.name), MAX_NAME_WIDTH),
    "step": lambda run, _at: _steps(run),
    "attempt": lambda run, _at: str(run.attempt),
    "priority": lambda run, _at: str(run.priority),
    "age": lambda run, at: say_ago(run.submitted_ms, at),
    "updated": lambda run, at: say_ago(run.updated_ms, at),
    "took": lambda run, at: say_duration(_took_ms(run, at)),
    "devices": lambda run, _at: ",".join(run.record()["devices"]) or "-",
    "tags": lambda run, _at: plain(" ".join(f"{key}={value}" for key, value in run.record()["tags"].items())),
    "parent": lambda run, _at: run.parent_run_id or "-",
    "kind": lambda run, _at: run.kind,
    "serves": lambda run, _at: run.serves or "-",
    "url": lambda run, _at: run.url or "-",
    "family": lambda run, _at: run.family,
    "start": lambda run, _at: str(run.start_step),
    "curve": lambda _run, _at: "",  # drawn by the table: it needs the metrics
    "reason": lambda run, _at: plain(run.reason),
}
TO_THE_RIGHT = {"step", "start", "attempt", "priority", "age", "updated", "took"}
SORTS: dict[str, Callable[[RunRow], tuple[object, ...]]] = {
    "submitted": lambda run: (-run.submitted_ms,),
    "updated": lambda run: (-run.updated_ms,),
    "name": lambda run: (run.name,),
    "state": lambda run: (STATES.index(run.state) if run.state in STATES else len(STATES),),
    "step": lambda run: (-run.step,),
    "took": lambda run: (-_took_ms(run, now_ms()),),
    "priority": lambda run: (-run.priority,),
}


def _parse_columns(_ctx: click.Context, _parameter: click.Parameter, text: str) -> list[str]:
    columns = [word.strip() for word in text.split(",") if word.strip()]
    unknown = [word for word in columns if word not in COLUMNS and not _is_of_the_run(word)]
    if unknown or not columns:
        raise click.BadParameter(
            f"no column {', '.join(unknown) or 'is named'}: there are {', '.join(COLUMNS)}, {_OWN_COLUMNS}"
        )
    return columns


def _is_of_the_run(word: str) -> bool:
    """Whether it names what a job or its trainer class named: a metric, a hyperparameter, a tag."""
    return "/" in word or word.startswith((HYPERPARAMS, TAGS))


def _parse_sort(_ctx: click.Context, _parameter: click.Parameter, text: str) -> str:
    if text not in SORTS and not _is_of_the_run(text):
        raise click.BadParameter(f"runs cannot be sorted by {text!r}: by {', '.join(SORTS)}, {_OWN_COLUMNS}")
    return text


def _parse_since(_ctx: click.Context, _parameter: click.Parameter, text: str | None) -> int:
    if text is None:
        return 0
    try:
        return parse_since(text, now_ms())
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is no time: expected 90s, 15m, 2h, 3d, 1w or an ISO date"
        ) from None


@click.command("list", epilog=EPILOG, short_help="Show the runs.")
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice(STATES, case_sensitive=False),
    help="May be repeated.",
)
@click.option("--name", default="", metavar="TEXT", help="Runs whose name has this in it.")
@click.option("--tag", default="", metavar="KEY[=VALUE]", help="Runs with this tag.")
@click.option("--since", callback=_parse_since, metavar="WHEN", help="Submitted since: 2h, 3d, 2026-01-31.")
@click.option(
    "--sort",
    callback=_parse_sort,
    shell_complete=complete_names(SORTS),
    default="submitted",
    show_default=True,
    metavar="BY",
    help=f"{', '.join(SORTS)}, {_OWN_COLUMNS}; the smallest first.",
)
@click.option("--reverse", is_flag=True, help="The other way round.")
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=DEFAULT_LIMIT,
    show_default=True,
    help="At most so many; 0: all.",
)
@click.option(
    "--columns",
    callback=_parse_columns,
    shell_complete=complete_names(COLUMNS, is_list=True),
    default=DEFAULT_COLUMNS,
    show_default=True,
    metavar="A,B,…",
    help=f"Also: attempt, priority, updated, devices, tags, parent, kind, serves, url, family, start, curve, {_OWN_COLUMNS}. JSON has all.",
)
@click.option(
    "--families",
    "is_by_family",
    is_flag=True,
    help="Runs of one family together, each below the one it continues, with the curve of its whole line of descent.",
)
@click.option("--watch", "is_watched", is_flag=True, help="Redraw as they change, until Ctrl-C.")
@json_option
@click.pass_obj
def command(
    home: Home,
    *,
    states: tuple[str, ...],
    name: str,
    tag: str,
    since: int,
    sort: str,
    reverse: bool,
    limit: int,
    columns: list[str],
    is_by_family: bool,
    is_watched: bool,
    is_json: bool | None,
) -> ExitCode:
    """Show the runs, the newest first; also while no daemon runs."""
    output = Output(is_json=is_json)
    table = _Table(
        view=RegistryView(home),
        output=output,
        which=RunFilter(states=states, name=name, tag=tag, since_ms=since),
        sort=sort,
        is_reversed=reverse,
        limit=limit,
        columns=FAMILY_COLUMNS if is_by_family and columns == DEFAULT_COLUMNS.split(",") else columns,
        is_by_family=is_by_family,
    )
    try:
        if not is_watched:
            table.print_once()
            return ExitCode.OK
        if output.is_json:
            table.stream()
        table.watch()
    except KeyboardInterrupt:  # how one leaves
        return ExitCode.INTERRUPTED
    finally:
        table.view.close()


class _Table:
    """What was asked for, and how it is shown."""

    def __init__(
        self,
        *,
        view: RegistryView,
        output: Output,
        which: RunFilter,
        sort: str,
        is_reversed: bool,
        limit: int,
        columns: list[str],
        is_by_family: bool,
    ) -> None:
        self.view = view
        self._is_by_family = is_by_family
        self._depths: dict[str, int] = {}
        self._output = output
        self._which = which
        self._sort = sort
        self._is_reversed = is_reversed
        self._limit = limit
        self._columns = columns
        self._hyperparams: dict[str, dict[str, Any]] = {}

    def print_once(self) -> None:
        runs = self._read()
        for run in runs:
            self._output.record(self._record(run))
        if not runs:
            self._output.say(self._nothing())
            return
        for line in self._lines(runs):
            self._output.show(line)
        num_runs = self.view.num_runs(self._which) if len(runs) == self._limit else len(runs)
        if num_runs > len(runs):
            self._output.say(f"{len(runs)} of {num_runs} runs: --limit 0 shows all")

    def stream(self) -> NoReturn:
        """Each run of the table, in its order; then each again whenever it changes, and those that come into it."""
        seen: dict[str, int] = {}
        last_change = -1
        while True:
            if (change := self.view.last_change()) != last_change:
                last_change = change
                fresh = [run for run in self._read() if seen.get(run.run_id) != run.change]
                if seen:
                    fresh.sort(key=lambda run: run.change)
                for run in fresh:
                    self._output.record(self._record(run))
                    seen[run.run_id] = run.change
            time.sleep(REDRAW_S)

    def watch(self) -> NoReturn:
        sys.stdout.write(ENTER_SCREEN)
        try:
            while True:
                _, num_lines = self._output.size
                runs = self._read()
                lines = self._lines(runs) if runs else [self._nothing()]
                if len(lines) > num_lines - 1:
                    lines = [*lines[: num_lines - 2], f"… and {len(lines) - num_lines + 2} more"]
                sys.stdout.write(CLEAR + shield("\n".join(lines)))
                sys.stdout.flush()
                time.sleep(REDRAW_S)
        finally:
            sys.stdout.write(LEAVE_SCREEN)
            sys.stdout.flush()

    def _read(self) -> list[RunRow]:
        runs = self._choose()
        if self._is_by_family:
            from trn.cli.reading.descent import sort_by_family

            ordered = sort_by_family(runs)
            runs = [run for _, run in ordered]
            self._depths = {run.run_id: depth for depth, run in ordered}
        if self._output.is_json or any(column.startswith(HYPERPARAMS) for column in self._columns):
            self._hyperparams = self.view.hyperparams([run.run_id for run in runs])
        return runs

    def _record(self, run: RunRow) -> dict[str, Any]:
        return {**run.record(), "hyperparams": self._hyperparams.get(run.run_id, {})}

    def _choose(self) -> list[RunRow]:
        is_in_order = self._sort == "submitted" and not self._is_reversed
        if is_in_order:
            return self.view.heads(self._which, limit=self._limit or -1)
        runs = self.view.heads(self._which)
        if self._sort in SORTS:
            runs.sort(key=SORTS[self._sort])
            if self._is_reversed:
                runs.reverse()  # also where two are equal
        else:
            if self._sort.startswith(HYPERPARAMS):
                self._hyperparams = self.view.hyperparams([run.run_id for run in runs])
            runs = _sorted_by([(self._value(run, self._sort), run) for run in runs], self._is_reversed)
        return runs[: self._limit or None]

    def _nearest(self, runs: list[RunRow]) -> str:
        import msgspec

        from gen_worker.contract.document_schema import nearest_name

        known = {name for run in runs for name in msgspec.json.decode(run.metrics or "{}")}
        nearest = nearest_name(self._sort, sorted(known))
        return f": did you mean {nearest}?" if nearest else ""

    def _nothing(self) -> str:
        if self._sort not in SORTS and (runs := self.view.heads(self._which)):
            return f"none of {len(runs)} runs has {self._sort} to sort by{self._nearest(runs)}"
        if self.view.num_runs(RunFilter()):
            return "no runs match these filters: `trn list` without filters shows all"
        home = self.view.home
        if not home.registry.exists() and home.runs.is_dir() and any(home.runs.iterdir()):
            return (
                f"{home.registry} is missing, but {home.runs} has runs: stop the daemon, put the file or a backup in its place,"
                " and start the daemon again: see `Backup and check` in docs/daemon.md"
            )
        return "no runs yet: `trn run --config job.yaml` starts one"

    def _lines(self, runs: list[RunRow]) -> list[str]:
        at_ms = now_ms()
        cells = {column: [self._cell(run, column, at_ms) for run in runs] for column in self._columns}
        widths = {column: max(map(cell_width, (column, *cells[column]))) for column in cells}
        if self._columns == DEFAULT_COLUMNS.split(","):
            self._make_room(widths)
        *others, last = widths
        room = self._output.size[0] - sum(widths[column] + 2 for column in others)
        widths[last] = max(min(widths[last], room), len(last), MIN_LAST_WIDTH)
        header = self._line({column: column.upper() for column in widths}, widths)
        rows = [{column: cells[column][index] for column in widths} for index in range(len(runs))]
        lines = [self._output.paint(header, is_bold=True)]
        return lines + [self._line(row, widths, run.state) for row, run in zip(rows, runs, strict=True)]

    def _make_room(self, widths: dict[str, int]) -> None:
        """Leave out columns that were not asked for until the others fit into the terminal."""
        for column in GIVES_WAY:
            *others, last = widths
            least = sum(widths[other] + 2 for other in others) + min(widths[last], MIN_LAST_WIDTH)
            if least > self._output.size[0]:
                del widths[column]

    def _line(self, cells: dict[str, str], widths: dict[str, int], state: str = "") -> str:
        shown = []
        for column, width in widths.items():
            is_right = column in TO_THE_RIGHT or "/" in column or column.startswith(HYPERPARAMS)
            text = pad(shorten(cells[column], width), width, to_the_right=is_right)
            shown.append(self._output.paint_state(state, text) if state and column == "state" else text)
        return "  ".join(shown).rstrip()

    def _cell(self, run: RunRow, column: str, at_ms: int) -> str:
        if column == "curve":
            from trn.cli.reading.descent import draw_curve

            return draw_curve(self.view.home, run.run_id, is_unicode=self._output.is_unicode) or "-"
        if column == "id" and (depth := self._depths.get(run.run_id, 0)):
            return f"{'  ' * (depth - 1)}{'└ ' if self._output.is_unicode else '- '}{run.run_id}"
        if column in COLUMNS:
            return COLUMNS[column](run, at_ms)
        value = self._value(run, column)
        if value is None:
            return "-"
        is_metric = "/" in column and not column.startswith((HYPERPARAMS, TAGS))
        return f"{float(value):.4g}" if is_metric or isinstance(value, float) else plain(str(value))

    def _value(self, run: RunRow, column: str) -> Any:
        """What the run has under that name; None where it has nothing."""
        if column.startswith(TAGS):
            return run.record()["tags"].get(column.removeprefix(TAGS))
        if not column.startswith(HYPERPARAMS):
            return run.record()["metrics"].get(column)
        found: Any = self._hyperparams.get(run.run_id, {})
        whole = column.removeprefix(HYPERPARAMS)
        if isinstance(found, dict) and whole in found:
            return found[whole]
        for name in whole.split("."):
            found = found.get(name) if isinstance(found, dict) else None
        return found


def _sorted_by(found: list[tuple[Any, RunRow]], is_reversed: bool) -> list[RunRow]:
    """Numbers, then texts, then NaN, which is neither smaller nor larger; what a run has not leaves it out."""
    numbers: list[tuple[float, RunRow]] = []
    texts: list[tuple[str, RunRow]] = []
    last: list[RunRow] = []
    for value, run in found:
        if value is None:
            continue
        if value == "nan":
            last.append(run)
            continue
        try:
            numbers.append((float(value), run))
        except (TypeError, ValueError):
            texts.append((str(value), run))
    numbers.sort(key=lambda pair: pair[0], reverse=is_reversed)
    texts.sort(key=lambda pair: pair[0], reverse=is_reversed)
    return [*(run for _, run in numbers), *(run for _, run in texts), *last]
