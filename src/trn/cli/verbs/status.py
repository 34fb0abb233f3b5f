"""`trn status RUN`: everything about one run, from its home; no daemon is needed."""

import itertools
from typing import TYPE_CHECKING, Any

import click

from trn.cli.durations import now_ms, say_ago, say_duration
from trn.cli.output import Output, json_option
from trn.cli.reading.registry_view import run_id_argument
from trn.client.screen.cells import cell_width, pad, shorten, wrap
from trn.client.screen.figures import show_number
from trn.core.home import Home
from trn.core.terminal_text import plain

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from trn.cli.reading.explanation import Checkpoint, Explanation
    from trn.cli.reading.run_lookup import FoundMetrics, FoundRun, ShownArtifacts
    from trn.core.artifacts.records import ArtifactRecord
    from trn.core.home import LogFolder
    from trn.core.runs import AttemptRecord, RunRecord
    from trn.core.serving.records import Promotion, ServedModel
    from trn.registry.metrics import Series

DEFAULT_METRIC, SERVER_METRIC = "train/loss", "serve/requests_per_s"
MAX_POINTS = 400  # of each metric: more than a terminal has dots
MAX_METRICS = 24
MIN_NAME_WIDTH = 12
MAX_CHART_WIDTH = 100
LINES, COPY, EVENTS = "lines", "copy", "events"  # the home's log for machines, that of --log-dir, --event-log
LABEL_WIDTH = 7
MAX_PROMOTIONS = 8  # shown; --json has more
DAY_MS, MAX_DAYS = 24 * 3600 * 1000, 400

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
@click.option(
    "--lineage/--no-lineage",
    "is_lineage",
    default=None,
    help="The chart of the whole line of descent with its seams (default), or of this run alone. With --json --lineage"
    " its points are there, too, as `curves`.",
)
@json_option
@click.pass_obj
def command(
    home: Home, *, run_id: str, metric: str | None, is_lineage: bool | None, is_json: bool | None
) -> None:
    """Show a run: its state and why, its attempts, its metrics, its files; also while no daemon runs."""
    from trn.cli.reading.explanation import explain
    from trn.cli.reading.run_lookup import (
        find_metrics,
        find_run,
        find_served,
        find_shown_artifacts,
        look_around,
    )
    from trn.client.daemon_start import find_daemon

    output = Output(is_json=is_json)
    found, at_ms, daemon = find_run(home, run_id), now_ms(), find_daemon(home)
    if daemon is not None and (warning := daemon.version_warning):
        output.say(f"trn: {warning}")
    around = look_around(home, found, at_ms)
    told = explain(
        found.as_typed, found.attempts, at_ms=at_ms, is_daemon_up=daemon is not None, around=around
    )
    metrics = find_metrics(home, found, max_points=MAX_POINTS)
    artifacts = find_shown_artifacts(home, found.run)
    if is_lineage is False:
        metrics, found = metrics._replace(curves=metrics.series), found._replace(lineage=found.lineage[-1:])
    if metric is not None and metric not in metrics.curves:
        raise click.BadParameter(
            f"the run has no metric {metric!r}: it has {', '.join(metrics.curves) or 'none yet'}",
            param_hint="--metric",
        )
    served, promotions = find_served(home, found.run.run_id)
    if output.is_json:
        curves = {"curves": _curves(metrics)} if is_lineage else {}
        refused = {"refused_artifacts": [_refusal(artifact) for artifact in artifacts.refused]}
        record = _record(home, found, told, metrics, around.checkpoint)
        output.record({**record, **_served_record(served, promotions), **refused, **curves})
        return
    width = output.size[0]
    for line in [
        *_head(output, found, at_ms),
        *(part for words in told.lines for part in wrap(plain(words), width)),
        *_served(output, served, promotions, at_ms),
        *_attempts(output, found, metrics, around.worker_gone, at_ms),
        *_metrics(output, found.run, metrics),
        *_chart(output, found, metrics.curves, metric),
        *_files(output, home, found, around.checkpoint, artifacts),
        *_warnings(output, found, artifacts),
    ]:
        output.show(line)


def _summarize(run: "RunRecord", name: str, metrics: "FoundMetrics") -> dict[str, Any]:
    """The last value, the min and the max of all finite ones, and which of these is the best, where that is known."""
    series, extremes = metrics.series[name], metrics.extremes[name]
    which = _which_is_best(run, name)
    values = {"min": extremes.min_value, "max": extremes.max_value}
    steps = {"min": extremes.min_step, "max": extremes.max_step}
    return {
        "last": series.values[-1],
        **values,
        "best": values.get(which),
        "best_is": which,
        "best_step": steps.get(which),
        "step": series.steps[-1],
        "num_points": series.num_points,
    }


def _which_is_best(run: "RunRecord", name: str) -> str:
    """`min` or `max`: as the job's early stopping has it, the min of a loss; empty where it is not known."""
    stopping = run.config.get("early_stopping")
    if isinstance(stopping, dict) and stopping.get("metric", "val/loss") == name:
        return "max" if stopping.get("mode") == "max" else "min"
    return "min" if "loss" in name.rpartition("/")[2].lower() else ""


def _record(
    home: Home,
    found: "FoundRun",
    told: "Explanation",
    metrics: "FoundMetrics",
    checkpoint: "Checkpoint | None",
) -> dict[str, Any]:
    import msgspec

    run: dict[str, Any] = msgspec.to_builtins(found.run)
    attempts = [{**msgspec.to_builtins(attempt), "reason": attempt.reason} for attempt in found.attempts]
    return {
        **run,
        "reason": found.run.reason,
        "why": {**told.record(), "run_id": found.run.run_id},
        "attempts": attempts,
        "repeated_steps": {
            "exactness": metrics.repeated.exactness or None,
            **msgspec.to_builtins(metrics.repeated),
        },
        "metrics": {name: _summarize(found.run, name, metrics) for name in metrics.series},
        "folder": str(home.run(found.run.run_id).root),
        "log_files": [path for paths in _line_files(home, found).values() for path in paths],
        "checkpoint": None if checkpoint is None else checkpoint._asdict(),
        "lineage": msgspec.to_builtins(found.lineage),
    }


def _curves(metrics: "FoundMetrics") -> dict[str, Any]:
    from trn.core.number_words import with_words

    return {
        name: {"steps": curve.steps, "values": with_words(curve.values)}
        for name, curve in metrics.curves.items()
    }


def _head(output: Output, found: "FoundRun", at_ms: int) -> list[str]:
    from trn.core.runs import PREDICTION, SERVER

    run = found.run
    steps = "a server" if run.kind == SERVER else f"step {run.step}"
    if run.kind == PREDICTION:
        steps = f"a prediction, {steps}"
    if run.end_step:
        steps += f" of {run.end_step} ({100 * run.step // run.end_step} %)"
    facts = [steps, f"submitted {say_ago(run.submitted_ms, at_ms)}"]
    if run.ended_ms is not None:
        facts.append(f"took {say_duration(run.ended_ms - run.submitted_ms)}")
    if run.devices:
        facts.append(f"on {', '.join(run.devices)}")
    if not run.needs.is_local:
        facts.append(f"in the pool {run.needs.pool}")
    if run.parent_run_id:
        facts.append(f"continues {run.parent_run_id} from step {run.start_step}")
    if found.newest not in ("", run.run_id):
        facts.append(f"{found.newest} is the newest run of its family")
    width, name = output.size[0], plain(run.name)
    title = f"{output.paint(run.run_id, is_bold=True)}  {output.paint_state(run.state)}"
    if name and cell_width(f"{run.run_id}  {run.state}  {name}") <= width:
        title, name = f"{title}  {name}", ""
    tags = "  ".join(f"{plain(key)}={plain(value)}" for key, value in sorted(run.tags.items()))
    notes = [part for line in run.notes.splitlines() for part in wrap(f"  {plain(line)}", width, indent=2)]
    return [
        title,
        *(wrap(name, width) if name else ()),
        *wrap(", ".join(facts), width),
        *(wrap(f"tags: {tags}", width, indent=6) if tags else ()),
        *(["notes:", *notes] if notes else ()),
    ]


def _served_record(served: "ServedModel | None", promotions: "list[Promotion]") -> dict[str, Any]:
    import msgspec

    if served is None:
        return {}
    return {"served": msgspec.to_builtins(served), "promotions": msgspec.to_builtins(promotions)}


def _served(
    output: Output, served: "ServedModel | None", promotions: "list[Promotion]", at_ms: int
) -> list[str]:
    """What its name answers with, and how that came about."""
    from trn.cli.following.served import say_promotion, say_request

    if served is None:
        return []
    facts, command = [], ""
    is_over = served.state in ("COMPLETED", "FAILED", "CANCELLED")
    if served.live is not None:
        facts.append(f"{served.live.label}  weights {served.live.weights_hash.removeprefix('sha256:')[:12]}")
    if served.second is not None:
        share = f" for {served.percent:g} % of the requests" if served.second_is == "split" else ""
        facts.append(f"{served.second_is}: {served.second.label}{share}")
    if served.previous is not None:
        back = "" if is_over else f" (`trn rollback {served.name}` goes back)"
        facts.append(f"before: {served.previous.label}{back}")
    if served.is_ready and served.state == "RUNNING":
        facts.append(f"at {served.url}")
        command = say_request(served.url, served.bearer_file)
    lines = ["", output.paint(f"{'served' if is_over else 'serves'} as {served.name}", is_bold=True)]
    lines += [part for fact in facts for part in wrap(f"  {plain(fact)}", output.size[0], indent=4)]
    lines += [f"  {plain(command)}"] if command else []  # in one line, to be copied
    if promotions:
        lines += ["", output.paint("promotions", is_bold=True)]
    for promotion in promotions[:MAX_PROMOTIONS]:
        who = f" by {plain(promotion.by)}" if promotion.by else ""
        first, *more = say_promotion(promotion)
        words = first.removeprefix(f"{promotion.name}: ")
        line = f"  {promotion.number:>2}  {say_ago(promotion.asked_ms, at_ms):>7}{who}: {words}"
        lines += wrap(plain(line), output.size[0], indent=6)
        lines += [
            part
            for text in more
            if "gate" in text
            for part in wrap(f"    {plain(text)}", output.size[0], indent=6)
        ]
    return lines


def _attempts(
    output: Output, found: "FoundRun", metrics: "FoundMetrics", worker_gone: str, at_ms: int
) -> list[str]:
    from trn.core.runs import SERVER

    if not found.attempts:
        return []
    lines = ["", output.paint("attempts", is_bold=True)]
    for attempt in found.attempts:
        took = say_duration((attempt.ended_ms or at_ms) - attempt.launched_ms)
        steps = "" if found.run.kind == SERVER else f"to step {attempt.step}  "
        line = f"  {attempt.number:>2}  {took:>7}  {steps}{plain(_ending(attempt, worker_gone))}"
        lines += wrap(line, output.size[0], indent=6)
    if text := metrics.repeated.text:
        lines += wrap(f"  {plain(text)}", output.size[0], indent=4)
    return lines


def _ending(attempt: "AttemptRecord", worker_gone: str) -> str:
    if attempt.ended_ms is None:
        return worker_gone or (f"runs as process {attempt.pid}" if attempt.pid else "is being launched")
    code = "" if attempt.exit_code is None else f"exit {attempt.exit_code}: "
    return f"{code}{attempt.reason}"


def _metrics(output: Output, run: "RunRecord", metrics: "FoundMetrics") -> list[str]:
    if not metrics.series:
        return []
    shown = list(metrics.series)[:MAX_METRICS]
    found = {plain(name): _summarize(run, name, metrics) for name in shown}
    # On a narrow terminal long names give way, not the numbers; on a very narrow one the table does.
    room = output.size[0] - 2 - 3 * 13 - 2 - max(len(_say_best(values)) for values in found.values())
    lines = _narrow_metrics(output, found) if room < MIN_NAME_WIDTH else _wide_metrics(output, found, room)
    if len(metrics.series) > len(shown):
        lines.append(f"  … and {len(metrics.series) - len(shown)} more: --json has all")
    return lines


def _wide_metrics(output: Output, found: dict[str, dict[str, Any]], room: int) -> list[str]:
    width = max(min(max(map(cell_width, found)), room), len("metrics"))
    header = f"  {'metrics'.ljust(width)}  {'last':>11}  {'min':>11}  {'max':>11}  best"
    lines = ["", output.paint(header.replace("  metrics  ", "metrics    ", 1), is_bold=True)]
    for name, values in found.items():
        numbers = "  ".join(f"{_number(values[key]):>11}" for key in ("last", "min", "max"))
        lines.append(f"  {pad(shorten(name, width), width)}  {numbers}  {_say_best(values)}")
    return lines


def _narrow_metrics(output: Output, found: dict[str, dict[str, Any]]) -> list[str]:
    lines = ["", output.paint("metrics", is_bold=True)]
    for name, values in found.items():
        words = [f"{key} {_number(values[key])}" for key in ("last", "min", "max")]
        if values["best_is"]:
            words.append(f"best {_say_best(values)}")
        lines += wrap(f"  {name}  {', '.join(words)}", output.size[0], indent=4)
    return lines


def _say_best(values: dict[str, Any]) -> str:
    """Which of the two is the best value, and its first step."""
    if not values["best_is"] or values["best"] is None:
        return "-"
    return f"{values['best_is']} at step {values['best_step']}"


def _number(value: float | None) -> str:
    return "-" if value is None else show_number(value)


def _chart(output: Output, found: "FoundRun", series: "dict[str, Series]", metric: str | None) -> list[str]:
    from trn.client.screen.terminal_chart import draw_chart

    known = (name for name in (DEFAULT_METRIC, SERVER_METRIC) if name in series)
    chosen = metric or next(known, next(iter(series), ""))
    if chosen not in series or len(series[chosen].steps) < 2:
        return []
    points = series[chosen]
    width = min(output.size[0] - 2, MAX_CHART_WIDTH)
    seams = [part.from_step for part in found.lineage[1:]]
    drawn = [(step, value) for step, *values in _with_extremes(points) for value in values]
    steps, values = zip(*drawn, strict=True)
    lines = draw_chart(steps, values, width=width, is_unicode=output.is_unicode, seams=seams)
    title = [output.paint(plain(chosen), is_bold=True)]
    if seams:
        whose = [f"{part.run_id} to step {part.to_step}" for part in found.lineage[:-1]]
        title += wrap(f"  {', '.join([*whose, found.run.run_id])}", output.size[0], indent=2)
    return ["", *title, *(f"  {line}" for line in lines)]


def _with_extremes(points: "Series") -> "Iterator[tuple[Any, ...]]":
    """Of a merged point also the min and the max: a line through last values would not show a spike."""
    if points.lows:
        return zip(points.steps, points.lows, points.highs, points.values, strict=True)
    return zip(points.steps, points.values, strict=True)


def _line_files(home: Home, found: "FoundRun") -> dict[str, list[str]]:
    """Its logs for machines, the newest last: those of the home, of its `--log-dir`, and its event log."""
    from pathlib import Path

    from trn.core.home import LogFolder

    run = found.run
    named = {LINES: home.logs} | ({COPY: LogFolder(Path(run.log_dir))} if run.log_dir else {})
    files = {label: [str(path) for path in _day_logs(home, folder, run)] for label, folder in named.items()}
    files[EVENTS] = [run.event_log] if run.event_log else []
    return {label: paths for label, paths in files.items() if paths}


def _day_logs(home: Home, folder: "LogFolder", run: "RunRecord") -> "Iterator[Path]":
    """Of each of its days: those that were renamed because they were long enough, then the one that is written.

    Those of a day that is over may be compressed.
    """
    from trn.core.home import FULL, LOG_SUFFIX

    last_ms = max(run.updated_ms, now_ms() if not run.state.is_terminal else 0)
    days = range(max(run.submitted_ms, last_ms - MAX_DAYS * DAY_MS), last_ms + DAY_MS, DAY_MS)
    for path in dict.fromkeys(folder.run(run.run_id, min(at_ms, last_ms)) for at_ms in days):
        for sign in (".", FULL):  # releases before families wrote `<run>.1`
            for number in itertools.count(1):
                renamed = _as_it_is(path.with_name(f"{run.run_id}{sign}{number}{LOG_SUFFIX}"))
                if renamed is None:
                    break
                if (
                    sign == FULL or not home.run(f"{run.run_id}.{number}").root.exists()
                ):  # else it is that run's
                    yield renamed
        if newest := _as_it_is(path):
            yield newest


def _as_it_is(path: "Path") -> "Path | None":
    packed = path.with_name(f"{path.name}.gz")
    return path if path.exists() else packed if packed.exists() else None


def _files(
    output: Output,
    home: Home,
    found: "FoundRun",
    checkpoint: "Checkpoint | None",
    artifacts: "ShownArtifacts",
) -> list[str]:
    from pathlib import Path

    from gen_worker.contract.sizes import show_bytes
    from trn.cli.reading.explanation import how_to_resume, where_it_resumes
    from trn.core.runs import PREDICTION

    run, folder = found.as_typed, home.run(found.run.run_id)
    lines = ["", output.paint("files", is_bold=True), f"  {folder.root}"]
    facts = [("log", f"trn logs {run.run_id}")]
    if found.run.kind == PREDICTION and (out := (found.run.config.get("prediction") or {}).get("out")):
        facts.append(("out", plain(str(Path(found.run.base_dir, out)))))
    for label, paths in _line_files(home, found).items():
        before = f" and {len(paths) - 1} before it" if len(paths) > 1 else ""
        facts.append((label, f"{paths[-1]}{before}"))
    if checkpoint is not None:
        facts.append(("saved", f"step {checkpoint.step} in {checkpoint.path}"))
    for artifact in artifacts.newest:
        size = show_bytes(artifact.size_bytes)
        facts.append((artifact.kind, f"step {artifact.step}: {plain(shorten(artifact.name, 60))} ({size})"))
    is_worth_it = run.attempt and (checkpoint is not None or run.state != "COMPLETED")
    if run.state.is_terminal and is_worth_it and (how := how_to_resume(run)):
        facts.append(("resume", f"`{how}` {where_it_resumes(run, checkpoint)}"))
    for label, words in facts:
        lines += wrap(f"  {label:<{LABEL_WIDTH}}  {words}", output.size[0], indent=LABEL_WIDTH + 4)
    return lines


def _warnings(output: Output, found: "FoundRun", artifacts: "ShownArtifacts") -> list[str]:
    """Files of the run that were refused."""
    number = found.run.num_refused_artifacts
    if not number:
        return []
    lines = ["", output.paint("warnings", "yellow", is_bold=True)]
    for artifact in artifacts.refused:
        words = f"{artifact.kind} {shorten(artifact.name, 60)} was refused as an artifact: {artifact.reason}"
        lines += wrap(f"  {plain(words)}", output.size[0], indent=4)
    if number > len(artifacts.refused):
        lines.append(
            f"  … and {number - len(artifacts.refused)} more: `trn artifacts {found.as_typed.run_id}`"
        )
    return lines


def _refusal(artifact: "ArtifactRecord") -> dict[str, Any]:
    import msgspec

    shown = {name: getattr(artifact, name) for name in ("artifact_id", "kind", "step", "name", "reason")}
    return {**shown, "cause": msgspec.to_builtins(artifact.cause)}
