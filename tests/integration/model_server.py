"""Real model servers in folders of their own: versions to serve, requests, and what a daemon would write and read."""

import http.client
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from worker_process import DEADLINE_S, TRAINERS, Run, WarmParent, write_rows

from gen_worker.contract.checkpoints.choice import read_named
from gen_worker.contract.job.model_version import ModelVersion
from gen_worker.contract.process_identity import is_process_alive
from gen_worker.contract.serving import LIVE, WANTED, LiveModel, WantedModel, read_live, write_document

JSON = {"Content-Type": "application/json"}
POLL_S = 0.005


def train_versions(
    folder: Path, *, steps: int = 6, run_id: str = "trained", **job: Any
) -> dict[int, ModelVersion]:
    """A run with a checkpoint at each step: step -> version."""
    run = Run(
        folder,
        run_id=run_id,
        trainer="served:Served",
        max_steps=steps,
        checkpoint_every=1,
        metric_every=1,
        checkpoints={"keep_last": 0},
        dataset={"parquet_paths": [str(write_rows(folder / "train.parquet"))], "batch_size": 10},
        validate_every=1,
        validation={"dataset": {"parquet_paths": [str(folder / "train.parquet")]}},
        **job,
    )
    done = run.work()
    assert done.returncode == 0, done.stderr
    paths = [run.checkpoints / f"step-{step:08d}.meta.json" for step in range(1, steps + 1)]
    return {step: version_of(path, run.job) for step, path in enumerate(paths, start=1)}


def version_of(path: Path, config: dict[str, Any]) -> ModelVersion:
    info = read_named(path)
    assert not isinstance(info, dict)
    return ModelVersion(
        run_id=info.meta.run_id,
        step=info.step,
        weights_hash=info.meta.data.hash,
        checkpoint=str(path),
        trainer=config["trainer"],
        config=config,
        base_dir=str(path.parent.parent.parent),
    )


def with_settings(version: ModelVersion, **hyperparams: Any) -> ModelVersion:
    """The same checkpoint, whose class has other settings."""
    return msgspec.structs.replace(version, config={**version.config, "hyperparams": hyperparams})


class Reply:
    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = dict(response.getheaders())
        self.body = response.read()

    @property
    def data(self) -> Any:
        return json.loads(self.body)

    @property
    def version(self) -> tuple[str, int, str]:
        """As its headers say."""
        return self.headers["X-Trn-Run"], int(self.headers["X-Trn-Step"]), self.headers["X-Trn-Weights"]


class Server:
    """One run of mode inference, through any number of attempts."""

    def __init__(self, folder: Path, version: ModelVersion, **serving: Any) -> None:
        self.folder = folder
        self.job: dict[str, Any] = {
            "run_id": "served",
            "mode": "inference",
            "trainer": version.trainer,
            "serving": {"version": msgspec.to_builtins(version), **serving},
            "heartbeat_s": 1.0,
            "grace_s": 30.0,
        }
        self.pid = 0
        self.url = ""
        self._seen = 0  # events of earlier attempts

    @property
    def serving(self) -> Path:
        return self.folder / "artifacts" / "serving"

    @property
    def live(self) -> LiveModel:
        live = read_live(self.serving)
        assert live is not None
        return live

    def launch(self, **env: str) -> None:
        """Start an attempt."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "job.json").write_text(json.dumps(self.job))
        self._seen = len(self.events())
        environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "PYTHONPATH": str(TRAINERS),
            "WORKER_MODE": "inference",
            "TRAINER_JOB_SPEC_PATH": str(self.folder / "job.json"),
            "TRAINER_ARTIFACTS_DIR": str(self.folder / "artifacts"),
            **env,
        }
        stdout, stderr = str(self.folder / "stdout.log"), str(self.folder / "stderr.log")
        request = {"env": environ, "cwd": str(self.folder), "stdout": stdout, "stderr": stderr}
        self.pid = WarmParent.shared().start(request)

    def start(self, **env: str) -> "Server":
        """Start an attempt, and wait until it is ready."""
        self.launch(**env)
        assert self.wait_ready(), f"the server ended before it was ready: {self.log}"
        return self

    def wait_ready(self) -> bool:
        """False where the attempt ended before."""
        ready = self._wait_event("ready")
        self.url = ready["url"] if ready else ""
        return ready is not None

    def wait(self) -> int:
        """The exit code of the attempt."""
        pid, self.pid = self.pid, 0
        return WarmParent.shared().wait(pid)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End the attempt, and return its exit code."""
        if not self.pid:
            return 0
        os.kill(self.pid, number)
        return self.wait()

    @property
    def log(self) -> str:
        return (self.folder / "stderr.log").read_text()

    # What a daemon does.

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        path = self.folder / "artifacts" / "metrics" / "events.jsonl"
        if not path.exists():
            return []
        whole = path.read_bytes().rpartition(b"\n")[0]
        found = [json.loads(line) for line in whole.splitlines()]
        return [event for event in found if not kinds or event["event"] in kinds]

    def wait_event(
        self, *kinds: str, that: Callable[[dict[str, Any]], bool] = lambda _event: True
    ) -> dict[str, Any]:
        """Of this attempt."""
        found = self._wait_event(*kinds, that=that)
        assert found is not None, f"the server ended without {kinds}: {self.log}"
        return found

    def _wait_event(
        self, *kinds: str, that: Callable[[dict[str, Any]], bool] = lambda _event: True
    ) -> dict[str, Any] | None:
        """None where the attempt ended without one."""
        found: list[dict[str, Any]] = []

        def look() -> bool:
            is_alive = is_process_alive(self.pid)  # asked first: what it wrote before its end is found
            found[:] = [
                event for event in self.events()[self._seen :] if event["event"] in kinds and that(event)
            ]
            return bool(found) or not is_alive

        wait_until(look, f"no event {kinds}")
        return found[0] if found else None

    def want(self, wanted: WantedModel) -> None:
        write_document(self.serving / WANTED, wanted)
        os.kill(self.pid, signal.SIGUSR1)

    def ask(self, action: str, version: ModelVersion | None = None, **fields: Any) -> dict[str, Any]:
        """Ask for it, and return the event that says what became of it."""
        number = max((self.live.number, self._last_wanted)) + 1
        self.want(WantedModel(number=number, action=action, version=version, **fields))
        return self.wait_event("promoted", "promotion_refused", that=lambda event: event["number"] == number)

    def wait_told(self, number: int) -> None:
        """Until an attempt said what became of it."""
        kinds = ("promoted", "promotion_refused")
        wait_until(
            lambda: any(event["number"] == number for event in self.events(*kinds)), f"nothing about {number}"
        )

    @property
    def _last_wanted(self) -> int:
        path = self.serving / WANTED
        return json.loads(path.read_text())["number"] if path.exists() else 0

    # What a client does.

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=DEADLINE_S)

    @property
    def bearer(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {(self.serving / 'bearer').read_text().strip()}"}

    def post(
        self, path: str, body: Any, connection: http.client.HTTPConnection | None = None, **headers: str
    ) -> Reply:
        own = connection or self.connect()
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            own.request("POST", path, json.dumps(body), {**JSON, **self.bearer, **names})
            return Reply(own.getresponse())
        finally:
            if connection is None:
                own.close()

    def predict(self, *rows: list[float], **headers: str) -> Reply:
        return self.post(
            "/v1/predict", {"rows": [{"x": row} for row in rows or [[1.0, 2.0, 3.0, 4.0]]]}, **headers
        )


def wait_until(is_true: Callable[[], bool], why: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_true():
        assert time.monotonic() < deadline, why
        time.sleep(POLL_S)


__all__ = ["LIVE", "WANTED", "Reply", "Server", "train_versions", "version_of", "wait_until", "with_settings"]
