"""A run in a real notebook kernel: the bar, Ctrl-C, and what is left in memory afterwards."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

jupyter_client = pytest.importorskip("jupyter_client", reason="jupyter_client is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")

DEADLINE_S = 120.0

SETUP = """
import threading
import numpy as np
from gen_worker.trainer import ProgressBar, StepResult, Trainer, TrainerConfig

class Walk:
    holds = False
    pause = threading.Event()
    def setup(self, ctx): ...
    def configure(self, ctx):
        return {"weight": np.zeros(2)}
    def prepare_batch(self, raw_batch, state, ctx):
        return raw_batch
    def train_step(self, batch, state, ctx):
        if ctx.step == 5 and self.holds:
            print("waiting at step 5", flush=True)
            while not ctx.is_canceled:
                self.pause.wait(0.01)
        state["weight"] += np.random.standard_normal(2)
        return StepResult(metrics={"loss": float(abs(state["weight"]).sum())})
    def validate_step(self, batch, state, ctx):
        return {"loss": float(state["weight"].sum())}
    def state_dict(self, state):
        return dict(state)
    def load_state_dict(self, state, payload, ctx):
        state.update(payload)

def make(folder, walk):
    config = TrainerConfig(max_steps=12, metric_every=1, checkpoint_every=0)
    return Trainer(walk, config, train_data=[[1.0]] * 4, validation_data=[[1.0]], folder=folder,
                   callbacks=[ProgressBar(refresh_s=0.02)])
"""


class Kernel:
    """One real kernel: runs cells and keeps every message that they caused."""

    def __init__(self) -> None:
        self._manager = jupyter_client.KernelManager(kernel_name="python3", transport="ipc")
        # Where it knows of pytest, a kernel leaves the output of file descriptors alone.
        environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        self._manager.start_kernel(env=environment)
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=DEADLINE_S)

    def run(self, code: str, *, interrupt_at: str | None = None) -> "Cell":
        cell = Cell()
        message_id = self._client.execute(code)
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            message = self._client.get_iopub_msg(timeout=DEADLINE_S)
            if message["parent_header"].get("msg_id") != message_id:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                return cell
            cell.take(kind, content)
            if interrupt_at is not None and interrupt_at in cell.streams["stdout"]:
                interrupt_at = None
                self._manager.interrupt_kernel()
        raise AssertionError(f"the cell did not end: {cell.streams}")

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
        self._manager.cleanup_resources()


class Cell:
    def __init__(self) -> None:
        self.streams = {"stdout": "", "stderr": ""}
        self.bars: dict[str, list[str]] = {}  # by display id: what was shown, one after the other
        self.updates = 0
        self.result = ""
        self.html = ""
        self.error: list[str] | None = None

    def take(self, kind: str, content: dict[str, Any]) -> None:
        if kind == "stream":
            self.streams[content["name"]] += content["text"]
        elif kind in ("display_data", "update_display_data"):
            self.bars.setdefault(content["transient"]["display_id"], []).append(content["data"]["text/html"])
            self.updates += kind == "update_display_data"
        elif kind == "execute_result":
            self.result = content["data"]["text/plain"]
            self.html = content["data"].get("text/html", "")
        elif kind == "error":
            self.error = content["traceback"]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path_factory.mktemp("jupyter")))
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        made = Kernel()
        yield made
        made.close()


def test_a_run_in_a_kernel_has_a_bar_can_be_interrupted_and_resumes(kernel: Kernel, tmp_path: Path) -> None:
    assert kernel.run(SETUP).error is None

    cell = kernel.run(f"make({str(tmp_path / 'whole')!r}, Walk()).train()")
    assert cell.error is None, cell.error
    (shown,) = cell.bars.values()
    assert cell.updates == len(shown) - 1 >= 1  # one output, replaced in place
    assert 'value="12" max="12"' in shown[-1]
    assert "done" in shown[-1]
    assert "<table>" in cell.html
    assert "train/loss" in cell.result
    assert cell.streams["stderr"] == ""

    folder = str(tmp_path / "parts")
    kernel.run(f"walk = Walk(); walk.holds = True; trainer = make({folder!r}, walk)")
    cell = kernel.run("trainer.train()", interrupt_at="waiting at step 5")
    assert cell.error == [
        "TrainingCanceled: cancelled by SIGINT",
        "saved at step 6: call train() again to continue from there",
    ]
    assert cell.streams["stderr"].splitlines() == [
        "gen_worker: stopping after this step; Ctrl-C again stops without saving"
    ]
    assert "ended with TrainingCanceled" in next(iter(cell.bars.values()))[-1]

    assert kernel.run("trainer.state.step, bool(trainer.model_state['weight'].any())").result == "(6, True)"
    assert kernel.run("trainer.validate().step").result == "6"
    assert len(kernel.run("trainer").result.splitlines()) <= 20
    assert kernel.run("walk.holds = False; trainer.train().step").result == "12"
    same = f"trainer.model_state['weight'].tolist() == Trainer.load({str(tmp_path / 'whole')!r})['weight'].tolist()"
    assert kernel.run(same).result == "True"


def test_nothing_of_ipython_is_imported_outside_a_kernel() -> None:
    code = (
        "import sys\n"
        "from gen_worker.trainer.callbacks.progress_bar import _choose_view\n"
        "print(type(_choose_view(None, 1.0)[0]).__name__, 'IPython' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "_LineView False\n"
