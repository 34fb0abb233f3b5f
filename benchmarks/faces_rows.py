"""The rows of the page's topic: what is asked, and what was measured beside it."""

from bars import Bar, Row, build_row
from harness import Measurements

PAGE, TENSORBOARD, MLFLOW, TRACKIO = "trn", "TensorBoard", "MLflow", "trackio"
PEERS = {TENSORBOARD: "tensorboard", MLFLOW: "mlflow", TRACKIO: "trackio"}  # as they are shown -> their data
VIEWS = {view: {name: f"{name}, {view}" for name in (PAGE, *PEERS)} for view in ("table", "chart", "overlay")}
CODE = "trn, all views"
LIVE = "trn, a live run"
FLOOD = "trn, 1,000 points/s"
GATEWAY = "the gateway"
BESIDE = "the daemon beside a gateway"
LIST = "GET /api/v1/runs?limit=100"

PAINTED = (
    "a new browser with an empty profile, from the start of the navigation to the end of the first frame in which {}"
    " are in the window, by a script that looks before each frame; servers are warm and their data is loaded. Ours includes the"
    " login by link"
)


def build_rows(measured: Measurements) -> list[Row]:
    return [*_view_rows(measured), *_live_rows(measured), *_gateway_rows(measured)]


def _view_rows(measured: Measurements) -> list[Row]:
    def row(
        view: str, what: str, unit: str, key: str, bar: Bar | None, note: str = "", *, is_beside: bool = True
    ) -> Row:
        names = VIEWS[view]
        beside = [names[peer] for peer in PEERS] if is_beside else []
        return build_row(
            measured, what=what, unit=unit, key=key, ours=names[PAGE], beside=beside, bar=bar, note=note
        )

    table = "page, cold open of a home with 1,000 runs → table painted"
    chart = "page, one run with 1 M points → chart painted"
    overlay = "page, 100 runs × 100 k points overlaid → painted"
    return [
        build_row(
            measured,
            what="page code sent to the browser",
            unit="kB",
            key="code_kb",
            ours=CODE,
            beside=[VIEWS["table"][peer] for peer in PEERS],
            bar=Bar(limit=90),
            note="documents, scripts and styles, compressed; ours of all views, the peers' of their table of runs alone",
        ),
        row("table", table, "ms", "ms", Bar(limit=500), PAINTED.format("five rows or more with their names")),
        row(
            "table",
            f"{table}, against the fastest peer",
            "ms",
            "ms",
            Bar(limit=1 / 3, against=tuple(VIEWS["table"][peer] for peer in PEERS), text="the fastest peer"),
        ),
        row("table", f"{table}: sent", "kB", "sent_kb", None),
        row("chart", chart, "ms", "ms", Bar(limit=400), PAINTED.format("the curve's pixels")),
        row("chart", f"{chart}: sent", "kB", "sent_kb", Bar(limit=200)),
        row(
            "overlay",
            overlay,
            "ms",
            "ms",
            Bar(limit=1500),
            "as above; all runs in one chart. MLflow's is its page that compares the metric of several runs",
        ),
        row("overlay", f"{overlay}: sent", "kB", "sent_kb", Bar(limit=1500)),
    ]


def _live_rows(measured: Measurements) -> list[Row]:
    def row(what: str, unit: str, key: str, ours: str, bar: Bar | None = None, note: str = "") -> Row:
        return build_row(measured, what=what, unit=unit, key=key, ours=ours, bar=bar, note=note)

    flood = "page open on a run that writes 1,000 points/s"
    return [
        row(
            "metric written by the worker → pixel changed",
            "ms",
            "ms",
            LIVE,
            Bar(limit=250),
            "from the event's own time to the end of the frame in which the chart's picture is another one; a real worker,"
            " a point every 0.7 s, the median of a run's points",
        ),
        row("metric written by the worker → pixel changed, the slowest of a run", "ms", "max_ms", LIVE),
        row(
            f"{flood} for 60 s: the browser",
            "% of a core",
            "percent",
            FLOOD,
            Bar(limit=25),
            "user and system time of all processes of the browser; one metric, a step every millisecond",
        ),
        row(
            f"{flood}: memory of the browser, the last quarter against the second",
            "×",
            "resident_growth",
            FLOOD,
            Bar(limit=1.05),
            "resident, of all its processes",
        ),
        row(f"{flood}: growth of the page's own objects", "MB", "heap_growth_mb", FLOOD, Bar(limit=2)),
        row(
            f"{flood}: points of the newest window that are missing",
            "",
            "num_missing",
            FLOOD,
            Bar(limit=0),
            "zoomed in to the newest 300 steps and the next 500 while it writes; the steps in the chart's own CSV",
        ),
    ]


def _gateway_rows(measured: Measurements) -> list[Row]:
    def row(
        what: str, unit: str, key: str, ours: str, bar: Bar, beside: tuple[str, ...] = (), note: str = ""
    ) -> Row:
        return build_row(
            measured, what=what, unit=unit, key=key, ours=ours, beside=beside, bar=bar, note=note
        )

    unchanged = Bar(limit=1.1)
    note = "of one round: a new daemon with a gateway and an open stream, against one without; submits take turns"
    return [
        row(
            "gateway: spawn → first answer", "s", "s", GATEWAY, Bar(limit=0.6), note="beside a running daemon"
        ),
        row(
            "gateway: resident, idle",
            "MB",
            "resident_mb",
            GATEWAY,
            Bar(limit=70),
            note="1,000 runs; it has served files, a list and a stream, which has ended",
        ),
        row("daemon: resident, with a gateway", "× without", "resident_ratio", BESIDE, unchanged, note=note),
        row("daemon: a durable submit, with a gateway", "× without", "submit_ratio", BESIDE, unchanged),
        row("daemon: start, with a gateway", "× without", "start_ratio", BESIDE, unchanged),
        row(
            "GET /api/v1/runs?limit=100 at 10,000 runs",
            "/s",
            "per_s",
            LIST,
            Bar(limit=500, at_least=True),
            note="8 clients in one process, each with a connection of its own; whole answers, gzip, no If-None-Match",
        ),
    ]
