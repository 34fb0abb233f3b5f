"""Commands that stand beside ours: any that needs nothing, and those of Ray Jobs, which need a cluster."""

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from command_clock import BIN, spawn_ms
from environments import APART
from harness import Prepare, Round, Sample, scratch_dir
from ray_cluster import RayCluster, clock_command

RAY_JOB = (str(BIN / "ray"), "job")
ROUND_S = 120


def command(options: Mapping[str, Any]) -> Round:
    """One command that needs nothing; `is_apart`: of the environment apart, `refusal`: what it says as it fails."""
    program, *words = options["command"]
    folder = APART.bin if options.get("is_apart") else BIN
    whole = [sys.executable if program == "python" else str(folder / program), *words]
    refusal = options.get("refusal")
    exit_code = 1 if refusal else 0
    spawn_ms(whole, exit_code=exit_code)  # the page cache
    if refusal:
        said = subprocess.run(whole, capture_output=True, text=True, check=False).stderr.strip()
        if refusal not in said:
            last = said.rpartition("\n")[2]
            raise RuntimeError(f"it fails for another reason: {last}")
    return lambda: {"ms": spawn_ms(whole, exit_code=exit_code)}


# --- Ray Jobs ------------------------------------------------------------------------------------------------------


def ray_job_list(_options: Mapping[str, Any]) -> Round:
    def run() -> Sample:
        with _cluster_of_a_round() as cluster:
            words = [*RAY_JOB, "list", "--address", cluster.address]
            spawn_ms(words)  # what the dashboard does only once
            return {"ms": spawn_ms(words)}

    return run


def ray_job_submit(_options: Mapping[str, Any]) -> Round:
    """From the command's spawn until the job's code runs, by the job's own clock."""

    def run() -> Sample:
        clock = Path(tempfile.mkdtemp(dir=scratch_dir())) / "clock"
        with _cluster_of_a_round() as cluster:
            words = [
                *RAY_JOB,
                "submit",
                "--no-wait",
                "--address",
                cluster.address,
                "--submission-id",
                "timed",
            ]
            asked = time.monotonic_ns()
            spawn_ms([*words, "--", *clock_command(clock)])
            cluster.wait("timed")
        return {"ms": (int(clock.read_text()) - asked) / 1e6}

    return run


@contextmanager
def _cluster_of_a_round() -> Iterator[RayCluster]:
    """A cluster that has had a job. It uses the processor even when idle: the other sides are timed without one.

    What hangs is given up before the side is killed for it: the cluster of a killed driver lives on for a while.
    """
    signal.signal(signal.SIGALRM, _give_up)
    signal.alarm(ROUND_S)
    with RayCluster() as cluster:
        try:
            cluster.wait(cluster.submit([sys.executable, "-c", "pass"]))
            yield cluster
        finally:
            signal.alarm(0)


def _give_up(_number: int, _frame: object) -> None:
    raise TimeoutError(f"Ray is not done after {ROUND_S} s")


SIDES: dict[str, Prepare] = {
    "command": command,
    "ray_job_list": ray_job_list,
    "ray_job_submit": ray_job_submit,
}
