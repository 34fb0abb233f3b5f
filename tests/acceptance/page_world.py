"""A home with runs of every kind, a daemon and a gateway, for tests of the page."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import trn

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
from daemon_process import DEADLINE_S, DaemonProcess
from gateway_process import GatewayWorld

TRAINERS = Path(__file__).parents[1] / "integration" / "trainers"
EVIL = "<img src=x onerror=alert(1)>"
EVIL_LINES = [
    "<script>alert(2)</script>",
    '"><svg onload=alert(3)>',
    "javascript:alert(4)",
    "warning: a needle in the log",
]
EVIL_FILE = "<img src=x onerror=alert(5)>.txt"
NUM_STEPS = 60


class PageWorld(GatewayWorld):
    """`straight` and `other` have ended and differ in one hyperparameter, `broken` has failed, `evil` has names of code."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "home")
        self.folder = folder

    def add_runs(self) -> None:
        film, page = make_film(self.folder / "film.mp4"), self.folder / "page.html"
        page.write_text(EVIL_LINES[0])
        samples = {
            "sample_every": 20,
            "hyperparams": {"names": ["val/accuracy"], "samples": [str(film), str(page)]},
        }
        text = self.folder / EVIL_FILE
        text.write_text(EVIL_LINES[0])
        evil = {"lines": EVIL_LINES, "num_lines": 50, "names": [EVIL], "samples": [str(text)]}
        self.start("straight", **samples, tags={"kind": "good"})
        self.start("other", hyperparams={"scale": 1.5}, tags={"kind": "bad"})
        self.start("broken", hyperparams={"fail_at": 30})
        self.start("evil", name=EVIL, tags={EVIL: EVIL}, group=EVIL, sample_every=60, hyperparams=evil)
        for run_id in ("straight", "other", "broken", "evil"):
            self.wait_end(run_id)

    def submit(self, run_id: str, num_steps: int | None = NUM_STEPS, **more: Any) -> None:
        self.start(run_id, num_steps, **more)
        self.wait_end(run_id)

    def start(self, run_id: str, num_steps: int | None = NUM_STEPS, **more: Any) -> None:
        with trn.Client(self.home.root) as client:
            client.submit(make_job(run_id, num_steps, **more), base_dir=TRAINERS, code_dir=TRAINERS)

    def wait_end(self, run_id: str) -> str:
        with trn.Client(self.home.root) as client:
            return client.wait(run_id, DEADLINE_S).state

    def start_daemon(self) -> None:
        self.daemon = DaemonProcess(self.home.root, is_bare=True)
        self.daemon.wait_ready()

    def gate(self, run_id: str) -> "Gate":
        return Gate(self.folder / f"{run_id}.gate")

    def make_link(self) -> str:
        """As `trn ui` makes it: it logs in one browser, once."""
        url: str = self.send("POST", "/login-tokens").data["url"]
        return url


class Gate:
    """The last step that a run may train."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.write_text("0")

    def open_to(self, step: int) -> None:
        self.path.write_text(str(step))


def make_job(run_id: str, num_steps: int | None, **more: Any) -> dict[str, Any]:
    """Without a number of steps, `more` says how long it trains."""
    batches = {} if num_steps is None else {"mock_batches": list(range(num_steps))}
    return {
        "run_id": run_id,
        "trainer": "shown:Shown",
        **batches,
        "metric_every": 1,
        "checkpoint_every": 20,
        "resources": {"devices": ["cpu"]},
        **more,
    }


def make_film(path: Path) -> Path:
    """A second of video that browsers play."""
    import imageio_ffmpeg

    width, height = 64, 48
    writer = imageio_ffmpeg.write_frames(str(path), (width, height), fps=10, macro_block_size=1)
    writer.send(None)
    for number in range(10):
        writer.send(bytes((number * 20, 80, 200 - number * 15)) * (width * height))
    writer.close()
    return path


def run_trn(world: GatewayWorld, *words: str) -> str:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("trn")), "--home", str(world.home.root), *words],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    return done.stdout
