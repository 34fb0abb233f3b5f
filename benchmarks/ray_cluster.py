"""A Ray cluster of this machine, on loopback and in a folder of its own, and what is asked of Ray Jobs there."""

import atexit
import os
import secrets
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path

from daemon_session import DEADLINE_S, end_processes, find_everything

USER_CODE = "import sys, time; open(sys.argv[1], 'w').write(str(time.monotonic_ns()))"


def clock_command(clock: Path) -> list[str]:
    """A job that does nothing but write down when its code began."""
    return [sys.executable, "-c", USER_CODE, str(clock)]


class RayCluster:
    """Started by its making, with this process as its driver; a context that leaves no process and no file."""

    def __init__(self) -> None:
        import ray
        from ray.job_submission import JobSubmissionClient

        # Not in the scratch folder: its sockets' paths must be short.
        self._folder = Path(tempfile.mkdtemp(prefix="bench-ray-"))
        atexit.register(self.close)  # also when the start fails
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ.setdefault(
            "RAY_AUTH_TOKEN", secrets.token_hex(32)
        )  # else one is written into the user's home
        context = ray.init(
            include_dashboard=True, _temp_dir=str(self._folder), dashboard_port=0, log_to_driver=False
        )
        self.address = f"http://{context.dashboard_url}"
        self._client = JobSubmissionClient(self.address)

    def submit(self, command: list[str]) -> str:
        job_id: str = self._client.submit_job(entrypoint=shlex.join(command))
        return job_id

    def wait(self, job_id: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not (status := self._client.get_job_status(job_id)).is_terminal():
            if time.monotonic() > deadline:
                raise TimeoutError(f"Ray's job is {status}")
            time.sleep(0.02)
        if str(status) != "SUCCEEDED":
            raise RuntimeError(f"Ray's job is {status}: {self._client.get_job_info(job_id).message}")

    def close(self) -> None:
        import ray

        atexit.unregister(self.close)
        processes = find_everything(
            self._folder
        )  # before its root goes: a worker's own words do not name the folder
        ray.shutdown()
        end_processes(processes)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> "RayCluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
