"""Our page in a browser: views of a home, a run that is live, and a run that writes a thousand points a second."""

import atexit
import itertools
import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

import faces_gateway_sides
import faces_peers
import trn
from daemon_session import DEADLINE_S, POLL_S, Daemon
from faces_browser import AFTER_MS, Visit, browser_processes, open_cold, visit, wait_painted
from faces_data import OURS, Sizes, prepare
from faces_peer_data import name_run
from harness import HERE, Prepare, Round, Sample, serve
from trn.client.gateway_start import RunningGateway, ensure_gateway
from trn.core.home import Home

MB = 1e6
CURVE = 'return [...document.querySelectorAll("figure.chart canvas")].some((canvas) => hasCurve(canvas))'
IS_PAINTED = {
    "table": 'return hasRows(document.querySelectorAll(".runs-table tbody tr"))',
    "chart": CURVE,
    "overlay": CURVE,
}


class Page:
    """A home with its daemon, its gateway and a client; ended with the side's interpreter."""

    def __init__(self, root: Path) -> None:
        self.daemon = Daemon(root)
        atexit.register(self.daemon.close)
        self.daemon.wait_announced()
        self.home = self.daemon.home
        self.client = trn.Client(root, patience_s=0)  # blocking: a browser keeps this thread's event loop
        atexit.register(self.client.close)
        self.gateway: RunningGateway = ensure_gateway(self.home)[0]

    def warm(self) -> None:
        """Until its launcher has everything imported."""
        self.client.wait(self.submit("daemon_trainers:Trivial", mock_batches=[1]), DEADLINE_S)

    def submit(self, trainer: str, **fields: Any) -> str:
        return self.client.submit(self.daemon.job(trainer, **fields), base_dir=HERE).run.run_id

    def start(self, trainer: str, **fields: Any) -> str:
        """A run that does not end by itself; it trains when this returns."""
        run_id = self.submit(trainer, dataset={"generated": True}, metric_every=1, **fields)
        deadline = time.monotonic() + DEADLINE_S
        while (run := self.client.get(run_id)).state != "RUNNING":
            if run.is_terminal or time.monotonic() > deadline:
                raise RuntimeError(f"the run is {run.state}: {run.reason}")
            time.sleep(POLL_S)
        return run_id

    def link(self, path: str) -> str:
        """As `trn ui` makes it: it logs one browser in."""
        return self.gateway.draw_login().replace("/#", f"{path}#", 1)


def _path(view: str, sizes: Sizes) -> str:
    if view == "table":
        return "/"
    if view == "chart":
        return f"/runs/{name_run(0)}"
    return "/compare?" + "&".join(f"run={name_run(number)}" for number in range(sizes.num_overlaid))


def own_view(options: Mapping[str, Any]) -> Round:
    """A cold open of one of our views; the browser is not logged in before."""
    name, sizes = options["view"], Sizes(**options["sizes"])
    page = Page(prepare(OURS, name, sizes))
    return lambda: open_cold(page.link(_path(name, sizes)), IS_PAINTED[name])


def code(options: Mapping[str, Any]) -> Round:
    """All views, one after the other, in one browser: what code it was sent."""
    sizes = Sizes(**options["sizes"])
    page = Page(prepare(OURS, "table", sizes))

    def open_all() -> Sample:
        with visit(IS_PAINTED["table"]) as opened:
            opened.page.goto(page.link("/"))
            wait_painted(opened.page)
            compared = f"/compare?run={name_run(0)}&run={name_run(1)}"
            for path in (f"/runs/{name_run(0)}", compared, "/machine", "/submit"):
                opened.page.goto(f"{page.gateway.url}{path}")
                opened.page.wait_for_selector("h1")
                opened.page.wait_for_timeout(AFTER_MS)
            return {"code_kb": opened.traffic.code_kb}

    return open_all


# --- a run that is live --------------------------------------------------------------------------------------------

# Notes the time of each frame in which the picture became another one.
CHANGES = """() => {
  const canvas = document.querySelector("figure.chart canvas");
  const ink = canvas.getContext("2d");
  let before = "";
  window.__changesMs = [];
  const look = () => {
    const { data } = ink.getImageData(0, 0, canvas.width, canvas.height);
    let sum = 0;
    for (let i = 0; i < data.length; i += 4) sum = (Math.imul(sum, 31) + data[i] + data[i + 3]) | 0;
    if (sum !== before) {
      before = sum;
      setTimeout(() => window.__changesMs.push(Date.now()), 0);
    }
    requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
}"""


def live(options: Mapping[str, Any]) -> Round:
    """From a point's own time, at which the worker wrote it, to the end of the frame that shows it."""
    page = Page(Path(options["home"]))
    page.warm()
    gap_s, num_points = options["gap_ms"] / 1e3, options["num_points"]

    def follow() -> Sample:
        run_id = page.start(
            "faces_trainers:Beating", max_steps=100_000, hyperparams={"gap_ms": options["gap_ms"]}
        )
        with visit(CURVE) as opened:
            opened.page.goto(page.link(f"/runs/{run_id}"))
            wait_painted(opened.page)
            opened.page.evaluate(CHANGES)
            opened.page.wait_for_timeout(1e3 * gap_s * (num_points + 2))
            changes_ms: list[float] = opened.page.evaluate("window.__changesMs")
        page.client.cancel(run_id)
        latencies = match_changes(_read_times(page.home, run_id), changes_ms)
        if len(latencies) < num_points // 2:
            raise RuntimeError(f"{len(latencies)} of {num_points} points were seen within {gap_s:g} s")
        return {
            "ms": statistics.median(latencies),
            "max_ms": max(latencies),
            "num_seen": len(latencies),
        }

    return follow


def match_changes(written_ms: list[float], changes_ms: list[float]) -> list[float]:
    """How long after each point the picture changed; the first change is of the watch's own start."""
    found = []
    for begun, next_begun in itertools.pairwise(written_ms):
        later = [at for at in changes_ms[1:] if begun <= at < next_begun]
        if later and begun >= changes_ms[0]:
            found.append(later[0] - begun)
    return found


def _read_times(home: Home, run_id: str) -> list[float]:
    lines = home.run(run_id).events.read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return [event["timestamp_ms"] for event in events if event["event"] in ("metric", "metrics")]


# --- a run that writes much ----------------------------------------------------------------------------------------

ZOOM = """([low, high]) => {
  history.replaceState(history.state, "", `${location.pathname}?zoom=${low}~${high}`);
  dispatchEvent(new PopStateEvent("popstate", { state: history.state }));
}"""
NAME = "value-0"
BEFORE, AFTER = 300, 500  # steps of the newest window: known when one zooms in, and yet to come


def flood(options: Mapping[str, Any]) -> Round:
    """A page that is open while the run writes: the browser's processor time and memory, and every point of its newest
    window."""
    folder = Path(options["home"])
    page = Page(folder / "home")
    page.warm()
    rate, seconds = options["points_per_s"], options["seconds"]
    numbers = itertools.count()

    def follow() -> Sample:
        go = folder / f"go-{next(numbers)}"
        run_id = page.start(
            "daemon_trainers:Chattering",
            max_steps=rate * (seconds + 60),
            hyperparams={"points_per_s": rate, "go": str(go)},
        )
        with visit(CURVE) as opened:
            opened.page.goto(page.link(f"/runs/{run_id}"))
            go.touch()
            wait_painted(opened.page)
            opened.page.wait_for_timeout(2_000)  # its own start is over
            first = page.client.get(run_id)
            sample = _watch_browser(opened, seconds)
            last = page.client.get(run_id)
            sample["num_missing"] = _count_missing(opened, rate)
        page.client.cancel(run_id)
        sample["points_per_s"] = 1e3 * (last.step - first.step) / (last.updated_ms - first.updated_ms)
        if sample["points_per_s"] < 0.9 * rate:
            raise RuntimeError(f"the run wrote {sample['points_per_s']:.0f} points/s, not {rate}")
        return sample

    return follow


def _watch_browser(opened: Visit, seconds: float) -> Sample:
    processes = browser_processes()
    resident: list[float] = []
    heap_before = _read_heap(opened)
    started, before_s = time.monotonic(), _used_s(processes)
    while time.monotonic() - started < seconds:
        opened.page.wait_for_timeout(1_000)
        resident.append(sum(process.memory_info().rss for process in processes) / MB)
    percent = 100 * (_used_s(processes) - before_s) / (time.monotonic() - started)
    part = max(len(resident) // 4, 1)
    first, last = (
        statistics.median(resident[part : 2 * part] or resident),
        statistics.median(resident[-part:]),
    )
    return {
        "percent": percent,
        "resident_mb": last,
        "resident_growth": last / first,
        "heap_growth_mb": _read_heap(opened) - heap_before,
    }


def _used_s(processes: list[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def _read_heap(opened: Visit) -> float:
    """Of the page's own objects, after a collection."""
    opened.session.send("HeapProfiler.collectGarbage")
    size: float = opened.session.send("Runtime.getHeapUsage")["usedSize"]
    return size / MB


def _count_missing(opened: Visit, rate: int) -> float:
    """Zooms in to the newest points while more come, and compares what the page has with the run's steps."""
    newest = max(_save_points(opened))
    low, high = newest - BEFORE, newest + AFTER
    opened.page.evaluate(ZOOM, [low, high])
    opened.page.wait_for_timeout(1e3 * AFTER / rate + 3_000)
    shown = {step for step in _save_points(opened) if low <= step <= high}
    return high - low + 1 - len(shown)


def _save_points(opened: Visit) -> list[int]:
    """The steps in the chart's own CSV."""
    opened.page.get_by_label(f"Menu of {NAME}").click()
    with opened.page.expect_download(timeout=1e3 * DEADLINE_S) as waiting:
        opened.page.get_by_text("Save as CSV").click()
    lines = waiting.value.path().read_text().splitlines()
    return [int(line.partition(",")[0]) for line in lines[1:]]


SIDES: dict[str, Prepare] = {
    **faces_peers.SIDES,
    **faces_gateway_sides.SIDES,
    "own_view": own_view,
    "code": code,
    "live": live,
    "flood": flood,
}

if __name__ == "__main__":
    serve(SIDES)
