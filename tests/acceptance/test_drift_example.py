"""The example of a changing stream runs as documented, and loses nothing while its server is killed."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from command_line import DEADLINE_S
from daemon_process import end_everything
from documents import ROOT, read_blocks

ROWS_OF_A_REQUEST = 16
pytestmark = pytest.mark.usefixtures("warm_launchers")


def test_a_served_model_follows_a_changing_stream_and_loses_no_feedback_when_its_server_is_killed(
    tmp_path: Path,
) -> None:
    folder, home = tmp_path / "drift", tmp_path / "home"
    shutil.copytree(ROOT / "examples" / "drift", folder, ignore=shutil.ignore_patterns("__pycache__"))
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("TRAINER_")},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TRN_HOME": str(home),
    }

    def shell(commands: str) -> None:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", commands],
            cwd=folder,
            env=environ,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    (commands,) = [
        block.text
        for block in read_blocks(ROOT / "docs" / "examples.md")
        if "cd examples/drift\n" in block.text
    ]
    before, stream, after = re.split(r"(?m)^(python stream.py serving.json .*)\n", commands)
    try:
        shell(before.replace("cd examples/drift\n", ""))
        command = [sys.executable, *stream.replace("--seconds 40", "--seconds 200 --models 4").split()[1:]]
        with subprocess.Popen(
            command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as streaming:
            assert streaming.stdout is not None
            lines: list[str] = []
            for line in streaming.stdout:
                lines.append(line)
                if "drift.2@300 answers" in line:
                    server = json.loads((home / "runs" / "serve-drift" / "attempts" / "1.json").read_text())
                    os.kill(server["pid"], signal.SIGKILL)
        assert streaming.returncode == 0, "".join(lines)
        done = json.loads(lines[-1])
        assert done["models"][:2] == ["drift@400", "drift.2@300"]
        assert len(done["models"]) == 4, "the gate may have refused one between them"
        assert done["repeats"] > 0, "the server was killed"
        assert done["accepted"] + done["repeated"] == done["requests"] * ROWS_OF_A_REQUEST
        shell(f"{after}\ntrn wait serve-drift || true")
    finally:
        end_everything(home)
    parts = (home / "runs" / "serve-drift" / "serving" / "feedback").glob("*.parquet")
    rows = pq.read_table([str(path) for path in parts])
    assert rows.num_rows == done["requests"] * ROWS_OF_A_REQUEST, "each row once"
    assert rows.column_names == ["x", "y"], "the training schema"
