"""The peers' own files with the same runs and curves as ours. Runs in their environment: `script PEER FOLDER VIEW`.

Each is written as that peer stores it, in bulk: by its own functions where they are quick, else into the tables or
records that those would have written.
"""

import json
import os
import sqlite3
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METRIC = "train/loss"
SECOND_METRIC = "val/accuracy"
START_MS = 1_790_000_000_000
STEP_MS = 100
PROJECT = "bench"  # of trackio, and MLflow's experiment


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    num_runs: int
    num_points: int  # of each metric of each run
    has_second: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return (METRIC, SECOND_METRIC) if self.has_second else (METRIC,)


def name_run(number: int) -> str:
    return f"run-{number:05}"


def read_curve(number: int, num_points: int, name: str) -> list[float]:
    """A noisy curve that falls (or, of the second metric, rises); the same on every side."""
    import numpy as np

    rng = np.random.default_rng(number)
    part = np.arange(num_points) / max(num_points, 1)
    falling = (1.5 + number % 10 / 10) * np.exp(-4 * part) + 0.2 + 0.05 * rng.standard_normal(num_points)
    values: list[float] = (1 - falling / 3 if name == SECOND_METRIC else falling).tolist()
    return values


# --- TensorBoard: records of events --------------------------------------------------------------------------------


def write_tensorboard(folder: Path, view: View) -> None:
    for number in range(view.num_runs):
        run = folder / name_run(number)
        run.mkdir()
        with (run / f"events.out.tfevents.{START_MS // 1000}.bench").open("wb") as file:
            file.write(_frame([b"\x09" + bytes(8) + b"\x1a\x0dbrain.Event:2"]))
            for name in view.names:
                file.write(_scalars(name, read_curve(number, view.num_points, name)))


def _scalars(name: str, values: list[float]) -> bytes:
    """An Event for each value: wall time, step as a varint of four bytes, a summary with tag and simple_value."""
    import numpy as np

    count = len(values)
    steps = np.arange(count, dtype=np.uint32)
    tag = name.encode()
    value_size = 2 + len(tag) + 5
    head = (
        b"\x2a" + bytes([value_size + 2]) + b"\x0a" + bytes([value_size]) + b"\x0a" + bytes([len(tag)]) + tag
    )
    event = np.zeros((count, 9 + 5 + len(head) + 5), dtype=np.uint8)
    event[:, 0] = 0x09
    times = (START_MS + steps.astype("<f8") * STEP_MS) / 1000
    event[:, 1:9] = times.view(np.uint8).reshape(count, 8)
    event[:, 9] = 0x10
    for place in range(4):
        event[:, 10 + place] = (steps >> (7 * place) & 0x7F) | (0x80 if place < 3 else 0)
    event[:, 14 : 14 + len(head)] = np.frombuffer(head, dtype=np.uint8)
    event[:, -5] = 0x15
    event[:, -4:] = np.array(values, dtype="<f4").view(np.uint8).reshape(count, 4)
    return _frame(event)


def _frame(events: Any) -> bytes:
    """TFRecords: length, its checksum, data, its checksum. All events are of one length."""
    import numpy as np

    rows = np.array([list(event) for event in events], dtype=np.uint8) if isinstance(events, list) else events
    count, size = rows.shape
    length = np.frombuffer(size.to_bytes(8, "little"), dtype=np.uint8)
    head = np.concatenate([length, _checksum(length[None, :])[0]])
    return np.concatenate([np.tile(head, (count, 1)), rows, _checksum(rows)], axis=1).tobytes()


def _checksum(rows: Any) -> Any:
    """CRC-32C of each row, masked as TFRecords have it, as four bytes each."""
    import numpy as np

    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0x82F63B78), table >> 1).astype(np.uint32)
    crc = np.full(len(rows), 0xFFFFFFFF, dtype=np.uint32)
    for column in range(rows.shape[1]):
        crc = table[(crc ^ rows[:, column]) & 0xFF] ^ (crc >> 8)
    crc ^= np.uint32(0xFFFFFFFF)
    masked = ((crc >> 15) | (crc << 17)) + np.uint32(0xA282EAD8)
    return masked.astype("<u4").view(np.uint8).reshape(len(rows), 4)


# --- MLflow: tables of its SQLite store ----------------------------------------------------------------------------


def mlflow_run_id(number: int) -> str:
    return f"{number:032x}"


def write_mlflow(folder: Path, view: View) -> None:
    from mlflow import MlflowClient

    path = folder / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").create_experiment(
        PROJECT, artifact_location=f"file://{folder}/artifacts"
    )
    connection = sqlite3.connect(path)
    for setting in ("synchronous = OFF", "journal_mode = OFF", "cache_size = -1000000"):
        connection.execute(f"PRAGMA {setting}")
    experiment = connection.execute(
        "SELECT experiment_id FROM experiments WHERE name = ?", [PROJECT]
    ).fetchone()
    for number in range(view.num_runs):
        run_id, end_ms = mlflow_run_id(number), START_MS + view.num_points * STEP_MS
        columns = {
            "run_uuid": run_id,
            "name": name_run(number),
            "source_type": "LOCAL",
            "source_name": "bench",
            "entry_point_name": "",
            "user_id": "bench",
            "status": "FINISHED",
            "start_time": START_MS,
            "end_time": end_ms,
            "source_version": "",
            "lifecycle_stage": "active",
            "artifact_uri": f"file://{folder}/artifacts/{run_id}",
            "experiment_id": experiment[0],
        }
        places = ", ".join("?" for _ in columns)
        connection.execute(f"INSERT INTO runs ({', '.join(columns)}) VALUES ({places})", [*columns.values()])
        tags = {"mlflow.runName": name_run(number), "mlflow.user": "bench", "kind": f"kind-{number % 5}"}
        connection.executemany(
            "INSERT INTO tags (key, value, run_uuid) VALUES (?, ?, ?)",
            [(k, v, run_id) for k, v in tags.items()],
        )
        params = {"lr": "0.001", "seed": str(number)}
        connection.executemany(
            "INSERT INTO params (key, value, run_uuid) VALUES (?, ?, ?)",
            [(k, v, run_id) for k, v in params.items()],
        )
        for name in view.names:
            rows = [
                (name, value, START_MS + step * STEP_MS, run_id, step, 0)
                for step, value in enumerate(read_curve(number, view.num_points, name))
            ]
            insert = (
                "INSERT INTO {} (key, value, timestamp, run_uuid, step, is_nan) VALUES (?, ?, ?, ?, ?, ?)"
            )
            connection.executemany(insert.format("metrics"), rows)
            connection.execute(insert.format("latest_metrics"), rows[-1])
    connection.commit()
    connection.close()


# --- trackio -------------------------------------------------------------------------------------------------------


def write_trackio(folder: Path, view: View) -> None:
    os.environ["TRACKIO_DIR"] = str(folder)
    from datetime import UTC, datetime

    from trackio.sqlite_storage import SQLiteStorage

    times = [
        datetime.fromtimestamp((START_MS + step * STEP_MS) / 1000, UTC).isoformat()
        for step in range(view.num_points)
    ]
    for number in range(view.num_runs):
        curves = {name: read_curve(number, view.num_points, name) for name in view.names}
        SQLiteStorage.bulk_log(
            PROJECT,
            name_run(number),
            [{name: values[step] for name, values in curves.items()} for step in range(view.num_points)],
            steps=list(range(view.num_points)),
            timestamps=times,
            config={"lr": 1e-3, "seed": number},
        )


WRITERS: dict[str, Callable[[Path, View], None]] = {
    "tensorboard": write_tensorboard,
    "mlflow": write_mlflow,
    "trackio": write_trackio,
}

if __name__ == "__main__":
    WRITERS[sys.argv[1]](Path(sys.argv[2]), View(**json.loads(sys.argv[3])))
