"""A stream whose truth changes: it asks a served model, and sends what was right as feedback some requests later.

    python stream.py --before before.parquet      # rows from before the stream, for the first training
    python stream.py serving.json --seconds 40    # the output of `trn serve --detach --json`

Each second it prints the error of the answers and which model gave them. It sends feedback until the server has it, also
across restarts of the server.
"""

import argparse
import http.client
import json
import time
from collections import deque
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

ROWS = 16  # of a request
LABELS_AFTER = 10  # requests
DRIFT_PER_S = 0.05
PAUSE_S = 0.02  # between requests
PATIENCE_S = 30.0  # for a server that is being restarted


def truth(x: Any, phase: float) -> Any:
    return np.sin(2 * x[:, 0] + phase) * np.cos(x[:, 1] - phase)


def draw_rows(random: np.random.Generator, num_rows: int) -> Any:
    return random.uniform(-1.5, 1.5, size=(num_rows, 2)).astype("float32")


class ServedModel:
    """`POST` to a server. It asks again while the server cannot be reached or refuses for now."""

    def __init__(self, url: str, bearer: str) -> None:
        self._where = urlsplit(url)
        self._headers = {"Authorization": f"Bearer {bearer}", "Content-Type": "application/json"}
        self._connection: http.client.HTTPConnection | None = None
        self.num_repeats = 0

    def post(self, path: str, rows: list[dict[str, Any]]) -> tuple[Any, http.client.HTTPMessage]:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                if self._connection is None:
                    assert self._where.hostname is not None
                    self._connection = http.client.HTTPConnection(
                        self._where.hostname, self._where.port, timeout=10
                    )
                self._connection.request("POST", path, json.dumps({"rows": rows}), self._headers)
                answer = self._connection.getresponse()
                content = answer.read()
                if answer.status == 200:
                    return json.loads(content), answer.headers
                if answer.status not in (429, 500, 503):
                    raise SystemExit(f"{path}: {answer.status} {content.decode()}")
            except (OSError, http.client.HTTPException):
                self._connection = None
            if time.monotonic() > deadline:
                raise SystemExit(f"{path}: no answer for {PATIENCE_S:g} s")
            self.num_repeats += 1
            time.sleep(0.05)


def follow(model: ServedModel, seconds: float, num_models: int | None) -> dict[str, Any]:
    """Until the time is over, or so many models have answered."""
    random = np.random.default_rng(2)
    waiting: deque[list[dict[str, Any]]] = deque()  # labels that are not known yet
    errors: list[float] = []  # of this second
    versions: list[str] = []  # in their order
    counts = {"requests": 0, "accepted": 0, "repeated": 0}
    started, second = time.monotonic(), 0

    def send_feedback() -> None:
        answer, _ = model.post("/v1/feedback", waiting.popleft())
        assert not answer["unknown"], answer  # an answered request that the server does not know
        counts["accepted"] += answer["accepted"]
        counts["repeated"] += answer["repeated"]  # it was there, but its answer was lost

    while (now := time.monotonic() - started) < seconds and len(versions) != num_models:
        x, phase = draw_rows(random, ROWS), DRIFT_PER_S * now
        answer, headers = model.post("/v1/predict", [{"x": row.tolist()} for row in x])
        y = truth(x, phase)
        errors.append(float(np.mean((np.array([row["y"] for row in answer["rows"]]) - y) ** 2)))
        version = f"{headers['X-Trn-Run']}@{headers['X-Trn-Step']}"
        if version not in versions[-1:]:
            versions.append(version)
            print(f"{now:5.1f} s  {version} answers", flush=True)
        request_id = headers["X-Request-Id"]
        waiting.append([{"request_id": request_id, "row": row, "y": float(y[row])} for row in range(ROWS)])
        counts["requests"] += 1
        if len(waiting) > LABELS_AFTER:
            send_feedback()
        if now >= second + 1:
            second = int(now)
            error = float(np.mean(errors))
            print(f"{second:5d} s  error {error:.4f}  {'#' * min(50, int(error * 1000))}", flush=True)
            errors.clear()
        time.sleep(PAUSE_S)
    while waiting:
        send_feedback()
    return {**counts, "models": versions, "repeats": model.num_repeats}


def write_before(path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    x = draw_rows(np.random.default_rng(1), 2_000)
    column = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), 2)
    pq.write_table(pa.table({"x": column, "y": truth(x, 0).astype("float32")}), path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("serving", nargs="?", type=Path, help="what `trn serve --detach --json` printed")
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--models", type=int, metavar="N", help="end when N models have answered")
    parser.add_argument("--before", type=Path, help="write the first training data here, and do nothing else")
    options = parser.parse_args()
    if options.before is not None:
        write_before(options.before)
        return
    if options.serving is None:
        parser.error("name the file that `trn serve --detach --json` wrote")
    serving = json.loads(options.serving.read_text())
    model = ServedModel(serving["url"], serving.get("bearer", ""))
    print(json.dumps(follow(model, options.seconds, options.models)))


if __name__ == "__main__":
    main()
