"""`trn compare RUN RUN…`: what differs between runs. Needs no daemon."""

from typing import TYPE_CHECKING, Any

import click

from trn.cli.output import Output, json_option
from trn.cli.reading.registry_view import complete_run_id
from trn.client.screen.cells import cell_width, pad, shorten, wrap
from trn.client.screen.figures import show_number
from trn.core.home import Home
from trn.core.terminal_text import plain

if TYPE_CHECKING:
    from trn.client.comparison import Comparison, Divergence

MIN_RUNS = 2
MAX_CELL = 28
MAX_ROWS = 40
NOTHING = "-"
_EMPTY = {
    "config": "the same config",
    "code": "the same code",
    "packages": "the same packages",
    "data": "the same data",
}

EPILOG = """\b
Examples:
  trn compare mnist mnist.2
  trn compare mnist-1f2e mnist-9ab0 --json | jq .divergences
"""


@click.command("compare", epilog=EPILOG)
@click.argument("run_ids", metavar="RUN RUN…", nargs=-1, required=True, shell_complete=complete_run_id)
@json_option
@click.pass_obj
def command(home: Home, *, run_ids: tuple[str, ...], is_json: bool | None) -> None:
    """Show what differs between runs: config, code, packages, data, metrics, and where they diverge.

    Only what differs is shown. Each run is compared with the first. Needs no daemon.
    """
    from trn.cli.reading.run_lookup import find_run, open_metrics
    from trn.client.comparison import agree, compare, read_facts

    if len(run_ids) < MIN_RUNS:
        raise click.UsageError(f"only one run is given, {run_ids[0]!r}: give at least two")
    found = [find_run(home, run_id).run for run_id in run_ids]
    repeated = {run.run_id for run in found if [other.run_id for other in found].count(run.run_id) > 1}
    if repeated:
        raise click.UsageError(f"a run is given twice: {', '.join(sorted(repeated))}")
    with open_metrics(home) as metrics:
        facts = [read_facts(home, run, metrics) for run in found]
        agreements = [agree(metrics, found[0], other) for other in found[1:]]
    comparison = compare(facts, agreements)
    output = Output(is_json=is_json)
    output.event("comparison", **_record(comparison))
    for line in _lines(output, comparison):
        output.show(line)


def _record(comparison: "Comparison") -> dict[str, Any]:
    divergences = [found._asdict() for found in comparison.divergences]
    return {**comparison._asdict(), "divergences": divergences}


def _lines(output: Output, comparison: "Comparison") -> list[str]:
    lines: list[str] = []
    for part in _EMPTY:
        lines += _part(output, comparison, part)
    lines += _metrics(output, comparison)
    lines += ["", output.paint("divergence", is_bold=True)]
    diverged = {found.runs[1]: found for found in comparison.divergences}
    for other, num_common in zip(comparison.runs[1:], comparison.num_common, strict=True):
        words = _say_divergence(comparison.runs[0], other, diverged.get(other), num_common)
        lines += wrap(f"  {words}", output.size[0], indent=4)
    return lines[1:]


def _part(output: Output, comparison: "Comparison", part: str) -> list[str]:
    found: dict[str, list[Any]] = getattr(comparison, part)
    lines = ["", output.paint(part, is_bold=True)]
    if missing := comparison.unknown.get(part):
        lines += wrap(f"  unknown for {', '.join(missing)}", output.size[0], indent=4)
    if not found:
        is_known = len(missing or ()) <= len(comparison.runs) - MIN_RUNS
        return [*lines, f"  {_EMPTY[part]}"] if is_known else lines
    rows = [[plain(name), *(_show(value) for value in values)] for name, values in found.items()]
    return lines + _table(output, comparison.runs, rows)


def _metrics(output: Output, comparison: "Comparison") -> list[str]:
    lines = ["", output.paint("metrics, last value", is_bold=True)]
    if not comparison.metrics:
        return [*lines, "  none"]
    rows = [
        [plain(name), *(NOTHING if value is None else show_number(value) for value in values)]
        for name, values in comparison.metrics.items()
    ]
    return lines + _table(output, comparison.runs, rows)


def _table(output: Output, runs: tuple[str, ...], rows: list[list[str]]) -> list[str]:
    shown = [["", *runs], *([shorten(cell, MAX_CELL) for cell in row] for row in rows[:MAX_ROWS])]
    widths = [max(cell_width(row[column]) for row in shown) for column in range(len(runs) + 1)]
    lines = [
        f"  {'  '.join(pad(cell, width) for cell, width in zip(row, widths, strict=True))}".rstrip()
        for row in shown
    ]
    if len(rows) > MAX_ROWS:
        lines.append(f"  … and {len(rows) - MAX_ROWS} more: --json has all")
    return [shorten(line, output.size[0]) for line in lines]


def _say_divergence(one: str, other: str, found: "Divergence | None", num_common: int) -> str:
    if found is None and not num_common:
        return f"{one} and {other}: they have no metric at the same step"
    if found is None:
        where = "the only step" if num_common == 1 else f"the {num_common} steps"
        return f"{one} and {other}: none; all metrics are equal at {where} that both have"
    values = " and ".join(repr(value) for value in found.values)
    before = (
        f"equal at {'the step' if found.num_equal == 1 else f'the {found.num_equal} steps'} before"
        if found.num_equal
        else "the first step that both have"
    )
    return f"{one} and {other}: {plain(found.metric)} differs from step {found.step} on: {values} ({before})"


def _show(value: Any) -> str:
    return NOTHING if value is None else plain(value if isinstance(value, str) else str(value))
