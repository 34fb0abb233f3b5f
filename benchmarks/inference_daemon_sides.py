"""Sides of the topic `inference` that use a daemon: `trn serve`, promotions, `trn predict`, and the same work by hand."""

import itertools
import json
import shutil
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from command_clock import BIN, spawn_ms
from daemon_session import Session
from gen_worker.contract.files.hashes import hash_file
from harness import Round, Sample, SideError, serve
from inference_load import Load
from inference_work import SMALL, make_model, write_rows

TRN = str(BIN / "trn")
NAME, TRAINED = "bench", "trained"
NUM_STEPS = 6  # so many versions: more than the server keeps loaded
LARGE_MB = 100
LOAD_S = 600.0  # longer than the swaps of a round may take
BATCH_ROWS = 32


class World:
    """A warm daemon with a run that saved a checkpoint at each step."""

    def __init__(self, folder: Path, *, num_steps: int = NUM_STEPS, **hyperparams: Any) -> None:
        self.session = Session(folder / "home", settings="[inventory]\ncpus = 16\n")
        self.session.warm()
        self.folder = folder
        self.data = folder / "train.parquet"
        write_rows(self.data, SMALL)
        job = {
            "run_id": TRAINED,
            "trainer": "inference_work:Mlp",
            "max_steps": num_steps,
            "checkpoint_every": 1,
            "checkpoints": {"keep_last": 0},
            "hyperparams": {"width": SMALL, **hyperparams},
            "dataset": {"parquet_paths": [str(self.data)], "batch_size": 32},
            "resources": {"devices": ["cpu"]},
        }
        daemon, client = self.session.daemon, self.session.client
        self.session.run(daemon.submit(client, job))
        self.session.run(daemon.wait_state(client, TRAINED, "COMPLETED"))

    def data_of(self, step: int) -> Path:
        return self.session.daemon.home.run(TRAINED).checkpoints / f"step-{step:08d}.pt"

    def serve(self, name: str, step: int = 1) -> float:
        words = [TRN, "serve", f"{TRAINED}@{step}", "--name", name, "--cpu-only", "--detach", "--json"]
        return spawn_ms(words, home=self.session.folder, cwd=self.folder)

    def cancel(self, name: str) -> None:
        client = self.session.client
        run_id = f"serve-{name}"
        self.session.run(client.cancel(run_id))
        self.session.run(client.wait(run_id))

    def promote(self, step: int) -> float:
        """Milliseconds from the call to its outcome."""

        async def ask() -> None:
            client = self.session.client
            ended = await client.wait_promotion(await client.promote(NAME, f"{TRAINED}@{step}"))
            if ended.state != "done":
                raise SideError(f"the promotion is {ended.state}: {ended.words}")

        begun = time.perf_counter()
        self.session.run(ask())
        return 1000 * (time.perf_counter() - begun)


def serve_ready(options: Mapping[str, Any]) -> Round:
    world = World(Path(options["home"]), num_steps=1)
    numbers = itertools.count()

    def run() -> Sample:
        name = f"n{next(numbers)}"
        taken_ms = world.serve(name)
        world.cancel(name)
        return {"ms": taken_ms}

    run()
    return run


def swap(options: Mapping[str, Any]) -> Round:
    """Promotions one after the other, while wrk asks: it is stopped after the last one."""
    world = World(Path(options["home"]))
    world.serve(NAME)
    served = world.session.run(world.session.client.get_served(NAME)).served
    bearer = Path(served.bearer_file).read_text().strip()
    load = Load(path="/v1/predict", bearer=bearer, seconds=LOAD_S, **options["load"])
    steps = itertools.cycle([*range(2, NUM_STEPS + 1), 1])

    def run() -> Sample:
        wrk = load.start(port=int(served.url.rpartition(":")[2]))
        taken = [world.promote(next(steps)) for _ in range(options["num_swaps"])]
        found = load.stop(wrk)
        return {
            "swap_ms": statistics.median(taken),
            "slowest_ms": max(taken),
            "failed": found["failed"],
            "p99_ms": found["p99_us"] / 1000,
        }

    return run


def swap_large(options: Mapping[str, Any]) -> Round:
    world = World(Path(options["home"]), num_steps=4, ballast_mb=LARGE_MB)
    world.serve(NAME)
    steps = itertools.cycle([2, 3, 4, 1])
    world.promote(next(steps))

    def run() -> Sample:
        step = next(steps)
        world.data_of(step).read_bytes()  # as a checkpoint that was just saved: it is in memory
        return {"ms": world.promote(step)}

    return run


def read_large(options: Mapping[str, Any]) -> Round:
    folder = Path(options["home"])
    folder.mkdir()
    path = folder / "large.bin"
    path.write_bytes(np.random.default_rng(0).bytes(LARGE_MB << 20))

    def run() -> Sample:
        begun = time.perf_counter()
        hash_file(path)
        path.read_bytes()
        return {"ms": 1000 * (time.perf_counter() - begun)}

    run()
    return run


def predict(options: Mapping[str, Any]) -> Round:
    """Rows a second from the first row to the last part, by the clock of the run's events."""
    world = World(Path(options["home"]), num_steps=1)
    rows = world.folder / "rows.parquet"
    write_rows(rows, SMALL, options["num_rows"])
    numbers = itertools.count()
    home = world.session.daemon.home

    def run() -> Sample:
        out = world.folder / f"out-{next(numbers)}"
        known = set(home.runs.iterdir())
        words = [
            TRN,
            "predict",
            f"{TRAINED}@1",
            "--data",
            str(rows),
            "--out",
            str(out),
            "--cpu-only",
            "--json",
        ]
        spawn_ms(words, home=world.session.folder, cwd=world.folder)
        (made,) = set(home.runs.iterdir()) - known
        lines = (made / "metrics" / "events.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        first = next(event for event in events if event["event"] == "log" and event.get("end_step"))
        (last,) = [event for event in events if event["event"] == "completed"]
        shutil.rmtree(out)
        seconds = (last["timestamp_ms"] - first["timestamp_ms"]) / 1000
        return {"rows_per_s": options["num_rows"] / seconds}

    return run


def predict_by_hand(options: Mapping[str, Any]) -> Round:
    """What one writes in a notebook: read a row group, predict it in batches, write a file."""
    folder = Path(options["home"])
    folder.mkdir()
    path = folder / "rows.parquet"
    write_rows(path, SMALL, options["num_rows"])
    torch.set_num_threads(1)
    model = make_model(SMALL).eval()

    def run() -> Sample:
        out = folder / "out"
        out.mkdir()
        begun = time.perf_counter()
        with torch.inference_mode(), pq.ParquetFile(path) as file:
            for number in range(file.num_row_groups):
                column = file.read_row_group(number, columns=["x"]).column("x").combine_chunks()
                x = torch.from_numpy(column.flatten().to_numpy().reshape(-1, SMALL))
                answers = torch.cat([model(batch) for batch in x.split(BATCH_ROWS)]).numpy()
                logits = pa.FixedSizeListArray.from_arrays(pa.array(answers.reshape(-1)), answers.shape[1])
                pq.write_table(pa.table({"logits": logits}), out / f"{number}.parquet")
        seconds = time.perf_counter() - begun
        shutil.rmtree(out)
        return {"rows_per_s": options["num_rows"] / seconds}

    run()
    return run


SIDES = {
    "serve": serve_ready,
    "swap": swap,
    "swap_large": swap_large,
    "read_large": read_large,
    "predict": predict,
    "predict_by_hand": predict_by_hand,
}

if __name__ == "__main__":
    serve(SIDES)
