"""Take the pictures of the page: make real runs, open the page in Chromium, save its main views.

`python docs/record_page.py` trains the examples in a temporary folder, kills one worker, and writes PNG files to docs/images/:
each view 1440 and 390 pixels wide, in light and dark. It needs Chromium and the packages of the extra `dev`.
"""

import argparse
import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
TRN = str(Path(sys.executable).with_name("trn"))
TIMEOUT_S = 120.0
LOOK_EVERY_S = 0.02
NUM_COLOURS = 256
PHONE_HEIGHT = 844
SETTLED_MS = 1500  # charts, small curves and the first picture of a video
SETTINGS = """
sweep_s = 0.5
[inventory]
cpus = 4
devices = []
"""
ARGUMENTS = [
    "--no-sandbox",
    "--headless=new",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
]


class View(NamedTuple):
    name: str
    path: str
    height: int  # on a desktop: as much as the view needs
    shows: str  # a text of the whole view
    hover: str = ""  # the chart that the pointer is at


VIEWS = (
    View("runs", "/", 480, "digits-long"),
    View("run", "/runs/digits-killed", 640, "train/loss", "train/loss"),
    View("compare", "/compare?run=digits&run=digits-slow&run=digits-killed", 870, "learning_rate"),
    View("videos", "/runs/cartpole?tab=media", 820, "cartpole"),
    View("log", "/runs/digits-killed?tab=log", 400, "resumed"),
    View("machine", "/machine", 670, "digits-next"),
    View("submit", "/submit?from=digits", 760, "This job would be accepted."),
)


class Recorder:
    """Runs of the examples in a home of their own. A context: at its end nothing of it runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.home.mkdir()
        (self.home / "settings.toml").write_text(SETTINGS)
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("TRN_", "TRAINER_"))
        }
        self._environ = {**inherited, "TRN_HOME": str(self.home), "TRN_CACHE_DIR": str(folder / "cache")}

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        for run in self.trn("list", "--json"):
            if run.get("state") in ("RUNNING", "PENDING", "DISPATCHING"):
                self.trn("cancel", run["run_id"], "--json")
                self.wait(run["run_id"])
        for stopped in self.trn("daemon", "stop", "--json"):
            for pid in stopped.get("launcher_pids", []):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)

    def trn(self, *words: str) -> list[dict[str, Any]]:
        done = subprocess.run(
            [TRN, *words], cwd=self.folder, env=self._environ, capture_output=True, text=True, check=False
        )
        return [json.loads(line) for line in done.stdout.splitlines()]

    def submit(self, project: str, run_id: str, **changes: Any) -> None:
        """The example's job with changes; those of `hyperparams` are within it."""
        job = yaml.safe_load((self.folder / project / "job.yaml").read_text())
        job["hyperparams"] |= changes.pop("hyperparams", {})
        path = self.folder / "jobs" / f"{run_id}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({**job, "run_id": run_id, **changes}))
        self.trn("run", "--detach", "--json", "--code", str(self.folder / project), "--config", str(path))

    def wait(self, run_id: str) -> None:
        self.trn("wait", run_id, "--json")

    def kill_worker_at(self, run_id: str, step: int) -> None:
        folder = self.home / "runs" / run_id
        wait_until(lambda: f'"step":{step},' in read_text(folder / "metrics" / "events.jsonl"))
        os.kill(json.loads((folder / "attempts" / "1.json").read_bytes())["pid"], signal.SIGKILL)


def read_text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def wait_until(holds: Any) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        if time.monotonic() > deadline:
            raise SystemExit(f"it did not happen within {TIMEOUT_S:g} s")
        time.sleep(LOOK_EVERY_S)


def make_runs(recorder: Recorder) -> None:
    for name, project in (("first_minute", "digits"), ("cartpole", "cartpole")):
        shutil.copytree(
            EXAMPLES / name, recorder.folder / project, ignore=shutil.ignore_patterns("__pycache__")
        )
    sys.path.insert(0, str(EXAMPLES / "first_minute"))
    from digits import write_digits

    write_digits(
        recorder.folder / "data" / "train", num_files=4, rows_per_file=2_500, row_group_size=500, seed=1
    )
    tags = {"model": "cnn"}
    recorder.submit("cartpole", "cartpole", max_steps=60, tags={"task": "control"})
    recorder.submit("digits", "digits", tags=tags)
    recorder.wait("digits")
    recorder.submit("digits", "digits-slow", hyperparams={"learning_rate": 0.001}, tags=tags)
    recorder.submit("digits", "digits-broken", hyperparams={"learning_rate": -1}, tags=tags)
    recorder.wait("digits-slow")
    recorder.submit("digits", "digits-killed", retry={"max_attempts": 3, "backoff_s": 0}, tags=tags)
    recorder.kill_worker_at("digits-killed", 355)
    for run_id in ("digits-killed", "digits-broken", "cartpole"):
        recorder.wait(run_id)
    resources = {"devices": ["cpu"], "cpus": 4}
    recorder.submit(
        "digits", "digits-long", max_steps=60_000, metric_every=10, tags=tags, resources=resources
    )
    recorder.submit("digits", "digits-next", tags=tags, resources=resources)
    events = recorder.home / "runs" / "digits-long" / "metrics" / "events.jsonl"
    wait_until(lambda: '"step":800,' in read_text(events))


@contextlib.contextmanager
def open_browser() -> Iterator[Browser]:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        raise SystemExit("there is no chromium: install it, with Debian's `apt-get install chromium`")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


def take_pictures(recorder: Recorder, out: Path) -> None:
    out.mkdir(exist_ok=True)
    expect.set_options(timeout=TIMEOUT_S * 1000)
    with open_browser() as browser:
        for suffix, width in (("", 1440), ("-phone", 390)):
            for scheme in ("light", "dark"):
                context = browser.new_context(color_scheme=scheme, reduced_motion="reduce")
                page = context.new_page()
                (answer,) = recorder.trn("ui", "--json")
                page.goto(answer["url"])
                for view in VIEWS:
                    page.set_viewport_size(
                        {"width": width, "height": PHONE_HEIGHT if suffix else view.height}
                    )
                    show(page, answer["address"], view)
                    dark = "-dark" if scheme == "dark" else ""
                    save(page.screenshot(), out / f"page-{view.name}{suffix}{dark}.png")
                context.close()


def show(page: Page, address: str, view: View) -> None:
    page.goto(address + view.path)
    main = page.get_by_role("main")
    expect(main).to_contain_text(view.shows)
    expect(main.get_by_text("Loading")).to_have_count(0)
    if page.locator("video").count() > 0:
        page.evaluate(
            "() => { for (const video of document.querySelectorAll('video')) video.currentTime = 1; }"
        )
        page.wait_for_function(
            "() => [...document.querySelectorAll('video')].every((one) => !one.seeking && one.readyState >= 2)"
        )
    if view.hover:
        chart = page.get_by_role("figure", name=view.hover, exact=True)
        expect(chart.locator(".readout")).not_to_be_empty()
        box = chart.locator(".over").bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] * 0.62, box["y"] + box["height"] / 2)
    page.wait_for_timeout(SETTLED_MS)


def save(png: bytes, path: Path) -> None:
    """With few colours: a page has no more, and the file is a third."""
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    small = picture.quantize(NUM_COLOURS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    small.save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images", help="folder to write to")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="trn-", ignore_cleanup_errors=True) as temporary,
        Recorder(Path(temporary)) as recorder,
    ):
        make_runs(recorder)
        take_pictures(recorder, options.out.resolve())


if __name__ == "__main__":
    main()
