"""Checkpoints of runs that a test can serve, without a worker and without torch: a meta with its digest, and its data."""

import hashlib
import json
import time
from pathlib import Path
from typing import Any

from trn.core.runs import RunRecord


def save_checkpoint(
    folder: Path, run: RunRecord, step: int, *, metric: tuple[str, float] | None = None, **fields: Any
) -> Path:
    """As a worker commits one. The path of its meta."""
    folder.mkdir(parents=True, exist_ok=True)
    data = f"weights of {run.run_id} at step {step}".encode()
    name = f"step-{step:08d}"
    (folder / f"{name}.pt").write_bytes(data)
    document = {
        "schema_version": "trainer_checkpoint.v1",
        "run_id": run.run_id,
        "nonce": run.nonce,
        "attempt": 1,
        "step": step,
        "epoch": 0,
        "final": False,
        "verified": True,
        "created_ms": time.time_ns() // 1_000_000,
        "metric": None if metric is None else {"name": metric[0], "value": metric[1], "mode": "min"},
        "files": [
            {
                "name": f"{name}.pt",
                "size_bytes": len(data),
                "hash": f"sha256:{hashlib.sha256(data).hexdigest()}",
            }
        ],
        **fields,
    }
    covered = json.dumps(document).removesuffix("}").encode()
    digest = hashlib.sha256(covered).hexdigest().encode()
    path = folder / f"{name}.meta.json"
    path.write_bytes(covered + b',"digest":"sha256:' + digest + b'"}\n')
    return path
