"""What a run writes to its event file comes out on stdout: every whole line once, and no half one."""

import os
import subprocess
import sys
import threading
from pathlib import Path

from gen_worker.pytorch.event_mirror import EventMirror


class Reader:
    """Reads a pipe to its end, on a thread."""

    def __init__(self) -> None:
        self._out, self.fd = os.pipe()
        self._content = b""
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with os.fdopen(self._out, "rb") as file:
            self._content = file.read()

    def finish(self) -> bytes:
        os.close(self.fd)
        self._thread.join()
        return self._content


def test_only_what_comes_after_the_start_is_mirrored(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"seq":1}\n{"seq":2}\n{"half')
    reader = Reader()
    with EventMirror(path, reader.fd):
        # The worker drops the half line when it starts, then goes on.
        with path.open("r+b") as file:
            file.truncate(len(b'{"seq":1}\n{"seq":2}\n'))
        with path.open("ab") as file:
            file.write(b'{"seq":3}\n{"seq":4}\n{"seq":5')
    assert reader.finish() == b'{"seq":3}\n{"seq":4}\n'


def test_lines_of_any_length_arrive_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    lines = b"".join(b"%d" % size * size + b"\n" for size in (1, 70_000, 3, 65_535, 65_536, 200_001, 2))
    reader = Reader()
    with EventMirror(path, reader.fd):  # the file is not there yet
        path.write_bytes(lines)
    assert reader.finish() == lines


def test_a_reader_that_left_does_not_end_the_run(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    out, fd = os.pipe()
    os.close(out)
    with EventMirror(path, fd):
        path.write_bytes(b"{}\n" * 10)
    os.close(fd)


def test_a_start_in_a_file_without_a_whole_line_begins_at_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"x" * 100_000)
    reader = Reader()
    with EventMirror(path, reader.fd):
        path.write_bytes(b"{}\n")
    assert reader.finish() == b"{}\n"


def test_asking_for_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, gen_worker.pytorch_runner as runner, gen_worker.pytorch.config;"
        "runner.main(['--help']);"
        "sys.exit(bool({'torch', 'pyarrow', 'numpy', 'torchmetrics', 'PIL'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "python -m gen_worker.pytorch_runner --config config.yaml" in done.stdout


def test_the_runner_reference_is_fresh() -> None:
    script = Path(__file__).parents[2] / "docs" / "generate_runner_reference.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"run `python docs/generate_runner_reference.py`\n{done.stderr}"
