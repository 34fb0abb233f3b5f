"""`trn status RUN`: everything about one run, from its home; no daemon is needed."""

import math
from typing import TYPE_CHECKING, Any

import click

from trn.client.cells import cell_width, pad, shorten
from trn.client.cli.durations import now_ms, say_ago, say_duration
from trn.client.cli.output import Output, json_option, plain
from trn.client.cli.registry_view import run_id_argument
from trn.core.home import Home

if TYPE_CHECKING:
    from trn.client.cli.explanation import Explanation
    from trn.client.cli.run_lookup import FoundRun
    from trn.core.runs import AttemptRecord
    from trn.registry.metrics import Series

DEFAULT_METRIC = "train/loss"
MAX_POINTS = 400  # of each metric: more than a terminal has dots
MAX_METRICS = 24
MIN_NAME_WIDTH = 12
MAX_CHART_WIDTH = 100

EPILOG = """\b
Examples:
  trn status mnist-1f2e
  trn status mnist --metric val/accuracy
  trn status mnist --json | jq .metrics
"""


@click.command("status", epilog=EPILOG, short_help="Show everything about one run.")
@run_id_argument
@click.option(
    "--metric", metavar="NAME", help=f"The metric of the chart (default: {DEFAULT_METRIC}, else the first)."
)
@json_option
@click.pass_obj
def command(home: Home, *, run_id: str, metric: str | None, is_json: bool) -> None:
    """Show a run: its state and why, its attempts, its metrics, its files; also while no daemon runs."""
    from trn.client.cli.explanation import explain
    from trn.client.cli.run_lookup import find_metrics, find_run
    from trn.client.daemon_start import find_daemon

    output = Output(is_json=is_json)
    found = find_run(home, run_id)
    at_ms = now_ms()
    told = explain(
        found.run,
        found.attempts,
        at_ms=at_ms,
        is_daemon_up=find_daemon(home) is not None,
        holders=found.holders,
    )
    series = find_metrics(home, found.run.run_id, max_points=MAX_POINTS)
    if metric is not None and metric not in series:
        raise click.BadParameter(
            f"the run has no metric {metric!r}: it has {', '.join(series) or 'none yet'}",
            param_hint="--metric",
        )
    if output.is_json:
        output.record(_record(home, found, told, series))
        return
    for line in [
        *_head(output, found, at_ms),
        plain(told.sentence),
        *_attempts(output, found, at_ms),
        *_metrics(output, series),
        *_chart(output, series, metric),
        *_files(output, home, found),
    ]:
        output.show(line)


def _extremes(series: "Series") -> dict[str, Any]:
    """The last value, and the least and the greatest of all numbers."""
    lows = [value for value in (series.lows or series.values) if math.isfinite(value)]
    highs = [value for value in (series.highs or series.values) if math.isfinite(value)]
    last = series.values[-1]
    return {
        "last": last if math.isfinite(last) else None,
        "least": min(lows, default=None),
        "greatest": max(highs, default=None),
        "step": series.steps[-1],
        "num_points": series.num_points,
    }


def _record(
    home: Home, found: "FoundRun", told: "Explanation", series: "dict[str, Series]"
) -> dict[str, Any]:
    import msgspec

    run: dict[str, Any] = msgspec.to_builtins(found.run)
    attempts = [msgspec.to_builtins(attempt) for attempt in found.attempts]
    return {
        **run,
        "why": {**told._asdict(), "sentence": told.sentence},
        "attempts": attempts,
        "metrics": {name: _extremes(points) for name, points in series.items()},
        "folder": str(home.run(found.run.run_id).root),
        "log_files": _line_files(home, found),
    }


def _head(output: Output, found: "FoundRun", at_ms: int) -> list[str]:
    run = found.run
    name = f"  {plain(run.name)}" if run.name else ""
    steps = f"step {run.step}"
    if run.end_step:
        steps += f" of {run.end_step} ({100 * run.step // run.end_step} %)"
    facts = [steps, f"submitted {say_ago(run.submitted_ms, at_ms)}"]
    if run.ended_ms is not None:
        facts.append(f"took {say_duration(run.ended_ms - run.submitted_ms)}")
    if run.devices:
        facts.append(f"on {', '.join(run.devices)}")
    if run.parent_run_id:
        facts.append(f"continues {run.parent_run_id}")
    title = output.paint(run.run_id, is_bold=True)
    return [f"{title}  {output.paint_state(run.state)}{name}", ", ".join(facts)]


def _attempts(output: Output, found: "FoundRun", at_ms: int) -> list[str]:
    if not found.attempts:
        return []
    lines = ["", output.paint("attempts", is_bold=True)]
    for attempt in found.attempts:
        took = say_duration((attempt.ended_ms or at_ms) - attempt.launched_ms)
        lines.append(f"  {attempt.number:>2}  {took:>7}  to step {attempt.step}  {plain(_ending(attempt))}")
    return lines


def _ending(attempt: "AttemptRecord") -> str:
    if attempt.ended_ms is None:
        return f"runs as process {attempt.pid}" if attempt.pid else "is being launched"
    code = "" if attempt.exit_code is None else f"exit {attempt.exit_code}: "
    return f"{code}{attempt.cause}"


def _metrics(output: Output, series: "dict[str, Series]") -> list[str]:
    if not series:
        return []
    shown = dict(list(series.items())[:MAX_METRICS])
    # On a narrow terminal long names give way, not the numbers.
    room = max(output.size[0] - 2 - 3 * 13, MIN_NAME_WIDTH)
    width = max(min(max(cell_width(plain(name)) for name in shown), room), len("metrics"))
    header = f"  {'metrics'.ljust(width)}  {'last':>11}  {'least':>11}  {'greatest':>11}"
    lines = ["", output.paint(header.replace("  metrics  ", "metrics    ", 1), is_bold=True)]
    for name, points in shown.items():
        found = _extremes(points)
        numbers = [f"{_number(found[key]):>11}" for key in ("last", "least", "greatest")]
        lines.append(f"  {pad(shorten(plain(name), width), width)}  {'  '.join(numbers)}")
    if len(series) > len(shown):
        lines.append(f"  … and {len(series) - len(shown)} more: --json has all")
    return lines


def _number(value: float | None) -> str:
    return "nan" if value is None else f"{value:.5g}"


def _chart(output: Output, series: "dict[str, Series]", metric: str | None) -> list[str]:
    from trn.client.terminal_chart import draw_chart

    chosen = metric or (DEFAULT_METRIC if DEFAULT_METRIC in series else next(iter(series), ""))
    if chosen not in series or len(series[chosen].steps) < 2:
        return []
    points = series[chosen]
    width = min(output.size[0] - 2, MAX_CHART_WIDTH)
    lines = draw_chart(points.steps, points.values, width=width, is_unicode=output.is_unicode)
    return ["", output.paint(plain(chosen), is_bold=True), *(f"  {line}" for line in lines)]


def _line_files(home: Home, found: "FoundRun") -> list[str]:
    """Its newest log for machines, in each folder that has one, and its event log."""
    from pathlib import Path

    from trn.core.home import LogFolder

    run = found.run
    folders = [home.logs, *([LogFolder(Path(run.log_dir))] if run.log_dir else [])]
    paths = [folder.run(run.run_id, run.updated_ms) for folder in folders]
    shown = [str(path) for path in paths if path.exists()]
    return shown + ([run.event_log] if run.event_log else [])


def _files(output: Output, home: Home, found: "FoundRun") -> list[str]:
    run, folder = found.run, home.run(found.run.run_id)
    lines = ["", output.paint("files", is_bold=True), f"  {folder.root}"]
    lines.append(f"  log      trn logs {run.run_id}")
    lines += [f"  lines    {path}" for path in _line_files(home, found)]
    if folder.checkpoints.is_dir() and any(folder.checkpoints.iterdir()):
        lines.append(f"  saved    {folder.checkpoints}")
        if run.state.is_terminal:
            lines.append(f"  go on    trn resume {run.run_id}")
    return lines
