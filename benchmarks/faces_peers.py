"""TensorBoard, MLflow's UI and trackio, each serving the same runs: a server that is stopped while others are measured."""

import atexit
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from environments import APART
from faces_browser import open_cold
from faces_data import Sizes, prepare
from faces_peer_data import METRIC, PROJECT, View, mlflow_run_id, name_run
from harness import Prepare, Round, Sample

START_S = 100.0
LOOK_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """How it is started on a folder, where its views are, and how they are seen to be painted."""

    command: Callable[[Path, int], list[str]]
    url: Callable[[str, View], str]
    is_painted: Mapping[str, str]
    environ: Callable[[Path, int], dict[str, str]] = lambda _folder, _port: {}
    is_loaded: Callable[[str, View], bool] = lambda _address, _view: True


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=START_S) as answer:
        return json.loads(answer.read())


# --- TensorBoard ---------------------------------------------------------------------------------------------------


def _tensorboard_is_loaded(address: str, view: View) -> bool:
    """Whether its first and its last run are read to their ends; it reads in the background."""
    tags = _get(f"{address}/data/plugin/scalars/tags")
    if len(tags) < view.num_runs:
        return False
    for number in (0, view.num_runs - 1):
        asked = urllib.parse.urlencode({"run": name_run(number), "tag": METRIC})
        points = _get(f"{address}/data/plugin/scalars/scalars?{asked}")
        if not points or points[-1][1] != view.num_points - 1:
            return False
    return True


TENSORBOARD = Peer(
    command=lambda folder, port: [
        str(APART.bin / "tensorboard"),
        "--logdir",
        str(folder),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ],
    url=lambda _name, _view: "/",
    is_painted={
        "table": 'return hasRows(document.querySelectorAll("tb-data-table-content-row"))',
        "chart": 'return [...document.querySelectorAll("line-chart canvas")].some((canvas) => hasCurve(canvas, 0))',
        "overlay": 'return [...document.querySelectorAll("line-chart canvas")].some((canvas) => hasCurve(canvas, 0))',
    },
    is_loaded=_tensorboard_is_loaded,
)


# --- MLflow --------------------------------------------------------------------------------------------------------


def _mlflow_url(name: str, view: View) -> str:
    if name == "table":
        return "/#/experiments/1/runs"
    if name == "chart":
        return f"/#/experiments/1/runs/{mlflow_run_id(0)}/model-metrics"
    asked = {
        "runs": [mlflow_run_id(number) for number in range(view.num_runs)],
        "metric": METRIC,
        "experiments": ["1"],
        "plot_metric_keys": [METRIC],
    }
    return "/#/metric?" + "&".join(f"{k}={urllib.parse.quote(json.dumps(v))}" for k, v in asked.items())


MLFLOW = Peer(
    command=lambda folder, port: [
        str(APART.bin / "mlflow"),
        "server",
        "--backend-store-uri",
        f"sqlite:///{folder}/mlflow.db",
        "--workers",
        "1",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ],
    url=_mlflow_url,
    is_painted={
        "table": 'return hasRows(document.querySelectorAll("[role=row]"))',
        "chart": 'return hasPath(document.querySelectorAll(".js-line"))',
        "overlay": 'return hasPath(document.querySelectorAll(".js-line"))',
    },
)


# --- trackio -------------------------------------------------------------------------------------------------------

TRACKIO = Peer(
    command=lambda _folder, _port: [
        str(APART.bin / "trackio"),
        "show",
        "--project",
        PROJECT,
        "--host",
        "127.0.0.1",
    ],
    environ=lambda folder, port: {
        "TRACKIO_DIR": str(folder),
        "GRADIO_SERVER_PORT": str(port),
        "BROWSER": "/bin/true",
    },
    url=lambda name, _view: f"/{'runs' if name == 'table' else 'metrics'}?project={PROJECT}",
    is_painted={
        "table": 'return hasRows(document.querySelectorAll("tr"))',
        "chart": 'return [...document.querySelectorAll("canvas.marks")].some((canvas) => hasCurve(canvas))',
        "overlay": 'return [...document.querySelectorAll("canvas.marks")].some((canvas) => hasCurve(canvas))',
    },
)

PEERS = {"tensorboard": TENSORBOARD, "mlflow": MLFLOW, "trackio": TRACKIO}


class Server:
    """A peer's processes; stopped by a signal except within `running`."""

    def __init__(self, command: list[str], environ: Mapping[str, str], address: str) -> None:
        if not Path(command[0]).exists():
            raise RuntimeError(f"there is no {Path(command[0]).name} here")
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        atexit.register(self._close)
        self._wait(lambda: self._answers(address), "it does not answer")

    def _answers(self, address: str) -> bool:
        with suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(address, timeout=START_S).close()
            return True
        return False

    def _wait(self, is_ready: Callable[[], bool], fault: str) -> None:
        deadline = time.monotonic() + START_S
        while not is_ready():
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended with {self._process.returncode}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{fault} within {START_S:g} s")
            time.sleep(LOOK_S)

    def wait_loaded(self, is_loaded: Callable[[], bool]) -> None:
        self._wait(is_loaded, "its data is not loaded")

    def signal(self, number: int) -> None:
        root = psutil.Process(self._process.pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.Error):
                process.send_signal(number)

    def _close(self) -> None:
        with suppress(psutil.Error):
            self.signal(signal.SIGKILL)
        self._process.wait()


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def peer_view(options: Mapping[str, Any]) -> Round:
    """A cold open of one of its views, its server being warm and its data loaded."""
    peer, name, sizes = PEERS[options["peer"]], options["view"], Sizes(**options["sizes"])
    folder, view, port = prepare(options["peer"], name, sizes), sizes.view(name), _free_port()
    address = f"http://127.0.0.1:{port}"
    server = Server(peer.command(folder, port), peer.environ(folder, port), address)
    server.wait_loaded(lambda: peer.is_loaded(address, view))

    def open_view() -> Sample:
        server.signal(signal.SIGCONT)
        try:
            return open_cold(
                f"{address}{peer.url(name, view)}", peer.is_painted[name], timeout_s=options["timeout_s"]
            )
        finally:
            server.signal(signal.SIGSTOP)

    server.signal(signal.SIGSTOP)
    return open_view


SIDES: dict[str, Prepare] = {"peer_view": peer_view}
