"""What stands beside the daemon: limits made by hand, a cold worker, Ray Jobs and submitit. One process per side."""

import asyncio
import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from daemon_session import DEADLINE_S
from gen_worker.contract.subprocess_contract import TrainerSubprocessContractV1
from harness import HERE, Prepare, Round, Sample, scratch_dir
from ray_cluster import USER_CODE, RayCluster, clock_command

PAYLOAD = b"x" * 200


def _clocks() -> Any:
    folder = Path(tempfile.mkdtemp(dir=scratch_dir()))
    return (folder / str(number) for number in range(1_000_000))


def cold_worker(_options: Mapping[str, Any]) -> Round:
    """The same worker and trainer as the daemon's, started as a command."""
    clocks = _clocks()

    def start() -> Sample:
        clock = next(clocks)
        folder = clock.with_suffix(".run")
        folder.mkdir()
        job = {
            "trainer_api_version": "v1",
            "run_id": folder.name,
            "trainer": "daemon_torch_trainer:FirstStep",
            "mock_batches": [1, 2, 3],
            "checkpoint_every": 0,
            "resources": {"devices": ["cpu"]},
            "hyperparams": {"clock": str(clock)},
        }
        contract = TrainerSubprocessContractV1(
            trainer_plugin="daemon_torch_trainer:FirstStep",
            job_spec_path=str(folder / "job.json"),
            checkpoints_dir=str(folder / "checkpoints"),
            samples_dir=str(folder / "samples"),
            events_path=str(folder / "metrics" / "events.jsonl"),
        )
        (folder / "job.json").write_text(json.dumps(job))
        (folder / "contract.json").write_bytes(msgspec.json.encode(contract))
        environ = {
            **os.environ,
            "WORKER_MODE": "trainer",
            "TRAINER_CONTRACT_PATH": str(folder / "contract.json"),
            "PYTHONPATH": str(HERE),
        }
        asked = time.monotonic_ns()
        subprocess.run(
            [sys.executable, "-P", "-m", "gen_worker.entrypoint"], env=environ, cwd=HERE, check=True
        )
        return {"ms": (int(clock.read_text()) - asked) / 1e6}

    return start


def import_torch(_options: Mapping[str, Any]) -> Round:
    clocks = _clocks()

    def start() -> Sample:
        clock = next(clocks)
        asked = time.monotonic_ns()
        subprocess.run([sys.executable, "-c", f"import torch; {USER_CODE}", str(clock)], check=True)
        return {"ms": (int(clock.read_text()) - asked) / 1e6}

    return start


def warm_fork(_options: Mapping[str, Any]) -> Round:
    """No queue, no record, no events: a process with torch, pyarrow and the worker's runtime forks, and the child
    makes the model and begins a step."""
    import pyarrow.parquet  # noqa: F401
    import torch

    import daemon_torch_trainer
    import gen_worker.trainer.runtime  # noqa: F401

    batch = torch.ones(8, 16)
    daemon_torch_trainer.make_state()  # torch imports more when its first optimizer is made

    def start() -> Sample:
        reader, writer = os.pipe()
        asked = time.monotonic_ns()
        pid = os.fork()
        if pid == 0:
            state = daemon_torch_trainer.make_state()
            began = time.monotonic_ns()
            daemon_torch_trainer.step(batch, state)
            os.write(writer, str(began).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as told:
            began = int(told.read())
        os.waitpid(pid, 0)
        return {"ms": (began - asked) / 1e6}

    return start


# --- Ray Jobs ------------------------------------------------------------------------------------------------------


def ray_jobs(options: Mapping[str, Any]) -> Round:
    jobs, clocks = RayCluster(), _clocks()

    def start() -> float:
        clock = next(clocks)
        asked = time.monotonic_ns()
        jobs.wait(jobs.submit(clock_command(clock)))
        return (int(clock.read_text()) - asked) / 1e6

    def burst(num_runs: int) -> None:
        for job_id in [jobs.submit(clock_command(next(clocks))) for _ in range(num_runs)]:
            jobs.wait(job_id)

    start()
    return _starts_then_burst(start, burst, options)


def _starts_then_burst(
    start: Callable[[], float], burst: Callable[[int], None], options: Mapping[str, Any]
) -> Round:
    """A start each round, and in the last one the burst too: what is slow to set up is set up once."""
    numbers = iter(range(1, 1_000_000))

    def take() -> Sample:
        sample = {"ms": start()}
        if next(numbers) == options["num_rounds"]:
            started = time.perf_counter()
            burst(options["num_runs"])
            sample["runs_per_s"] = options["num_runs"] / (time.perf_counter() - started)
        return sample

    return take


# --- submitit ------------------------------------------------------------------------------------------------------


def submitit_jobs(options: Mapping[str, Any]) -> Round:
    import submitit

    executor = submitit.LocalExecutor(folder=tempfile.mkdtemp(dir=scratch_dir()))

    def start() -> float:
        asked = time.monotonic_ns()
        began: int = executor.submit(time.monotonic_ns).result()
        return (began - asked) / 1e6

    def burst(num_runs: int) -> None:
        for job in [executor.submit(time.monotonic_ns) for _ in range(num_runs)]:
            job.result()

    return _starts_then_burst(start, burst, options)


# --- one event a message -------------------------------------------------------------------------------------------


def single_events(options: Mapping[str, Any]) -> Round:
    """A grpc.aio server and one client process with so many streams, a message for each event: what one would write
    first."""
    address = f"unix:{tempfile.mkdtemp(prefix='bench-floor-')}/socket"
    num_streams, num_events = options["num_watchers"], options["num_single_events"]
    server = subprocess.Popen([sys.executable, __file__, address, str(num_events)])
    atexit.register(shutil.rmtree, Path(address.removeprefix("unix:")).parent, ignore_errors=True)
    atexit.register(server.wait)
    atexit.register(server.terminate)

    async def read() -> float:
        import grpc.aio

        async with grpc.aio.insecure_channel(address) as channel:
            await asyncio.wait_for(channel.channel_ready(), DEADLINE_S)
            call: Any = channel.unary_stream("/bench.Floor/Events")

            async def count() -> int:
                return len([1 async for _message in call(b"")])

            started = time.perf_counter()
            counts = await asyncio.gather(*(count() for _ in range(num_streams)))
            return sum(counts) / (time.perf_counter() - started)

    return lambda: {"events_per_s": asyncio.run(read())}


async def _serve_single(address: str, num_events: int) -> None:
    import grpc
    import grpc.aio

    async def events(_request: bytes, _context: object) -> AsyncIterator[bytes]:
        for _ in range(num_events):
            yield PAYLOAD

    server = grpc.aio.server()
    handlers: dict[str, Any] = {"Events": grpc.unary_stream_rpc_method_handler(events)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Floor", handlers),))
    server.add_insecure_port(address)
    await server.start()
    await server.wait_for_termination()


SIDES: dict[str, Prepare] = {
    "cold_worker": cold_worker,
    "import_torch": import_torch,
    "warm_fork": warm_fork,
    "ray_jobs": ray_jobs,
    "submitit_jobs": submitit_jobs,
}

if __name__ == "__main__":  # the other end of `single_events`
    asyncio.run(_serve_single(sys.argv[1], int(sys.argv[2])))
