"""The installed `trn` as a process: datasets, the machine, the certificate of a trainer class."""

import hashlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

TRN = str(Path(sys.executable).parent / "trn")
DEADLINE_S = 240


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    folder = tmp_path / "digits"
    folder.mkdir()
    for number in range(4):
        ids = list(range(10 * number, 10 * number + 10 + number))
        pq.write_table(
            pa.table({"id": ids, "name": [str(i) for i in ids]}), folder / f"part-{number}.parquet"
        )
    return folder


def trn(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "TRN_HOME": str(folder / "home"), "TMPDIR": str(folder)}
    return subprocess.run(
        [TRN, *words],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def only_record(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    (line,) = done.stdout.splitlines()
    record: dict[str, Any] = json.loads(line)
    return record


def at_a_terminal(*words: str, folder: Path, **environ: str) -> str:
    main, other = pty.openpty()
    process = subprocess.Popen(
        [TRN, *words],
        cwd=folder,
        env={**os.environ, "TRN_HOME": str(folder / "home"), "TERM": "xterm", **environ},
        stdin=other,
        stdout=other,
        stderr=other,
    )
    os.close(other)
    shown = b""
    try:
        while chunk := os.read(main, 65536):
            shown += chunk
    except OSError:  # how a terminal says that the other side is closed
        pass
    os.close(main)
    process.wait(DEADLINE_S)
    return shown.decode()


def test_an_indexed_folder_verifies(digits: Path, tmp_path: Path) -> None:
    done = trn("dataset", "index", "digits", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    indexed = only_record(done)
    assert (indexed["event"], indexed["rows"], indexed["num_shards"]) == ("dataset_indexed", 46, 4)
    assert indexed["bytes"] == sum(path.stat().st_size for path in digits.glob("*.parquet"))
    assert [column["name"] for column in indexed["columns"]] == ["id", "name"]
    kept = json.loads((digits / "index.json").read_text())
    assert [shard["rows"] for shard in kept["shards"]] == [10, 11, 12, 13]

    done = trn("dataset", "verify", "digits", "--workers", "3", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    verified = only_record(done)
    assert (verified["event"], verified["digest"]) == ("dataset_verified", indexed["digest"])


def test_the_columns_of_a_folder_are_shown_with_the_shape_of_a_row(tmp_path: Path) -> None:
    (tmp_path / "pixels").mkdir()
    pixels = pa.FixedSizeListArray.from_arrays(pa.array(range(8), pa.uint8()), 4)
    table = pa.table({"pixels": pixels, "words": [[1], []], "label": [0, 1]})
    pq.write_table(table, tmp_path / "pixels" / "0.parquet")
    done = trn("dataset", "index", "pixels", "--format", "table", folder=tmp_path)
    assert "columns  pixels (uint8[4]), words (int64[any]), label (int64)" in done.stdout


def test_verify_says_which_file_differs_and_how(digits: Path, tmp_path: Path) -> None:
    assert trn("dataset", "index", "digits", folder=tmp_path).returncode == 0
    (digits / "part-0.parquet").unlink()
    flipped = bytearray((digits / "part-1.parquet").read_bytes())
    flipped[10] ^= 1
    (digits / "part-1.parquet").write_bytes(flipped)
    (digits / "part-2.parquet").write_bytes((digits / "part-3.parquet").read_bytes())
    (digits / "part-9.parquet").write_bytes((digits / "part-3.parquet").read_bytes())
    done = trn("dataset", "verify", "digits", folder=tmp_path)
    assert done.returncode == 1
    damaged = only_record(done)
    assert damaged["event"] == "dataset_damaged"
    faults = {fault["path"]: fault for fault in damaged["faults"]}
    assert faults.keys() == {"part-0.parquet", "part-1.parquet", "part-2.parquet"}
    assert faults["part-0.parquet"]["problem"] == "missing"
    assert faults["part-1.parquet"]["problem"] == "content"
    assert faults["part-1.parquet"]["expected"] != faults["part-1.parquet"]["found"]
    assert "13 rows, expected 12" in faults["part-2.parquet"]["message"]
    assert damaged["unlisted"] == ["part-9.parquet"]
    assert "part-1.parquet: content changed" in done.stderr


def test_verify_reads_every_byte_also_of_what_was_verified_before(digits: Path, tmp_path: Path) -> None:
    """A disk that rots leaves a file's times as they are."""
    path = digits / "part-1.parquet"
    assert trn("dataset", "index", "digits", folder=tmp_path).returncode == 0
    assert trn("dataset", "verify", "digits", folder=tmp_path).returncode == 0
    status = path.stat()
    flipped = bytearray(path.read_bytes())
    flipped[10] ^= 1
    with path.open("r+b") as file:
        file.write(flipped)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert trn("dataset", "verify", "digits", folder=tmp_path).returncode == 1


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("index", "nowhere"), "nowhere: no such folder"),
        (("index", "empty"), "the folder has no *.parquet file"),
        (("verify", "digits"), "has no index.json: create it with `trn dataset index digits`"),
        (("index", "broken"), "part-0.parquet"),
    ],
)
def test_what_cannot_be_indexed_or_verified_is_refused_with_words(
    words: tuple[str, str], reason: str, digits: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "part-0.parquet").write_bytes(b"PAR1 and no more")
    done = trn("dataset", *words, folder=tmp_path)
    assert done.returncode == 3
    assert reason in done.stderr
    assert "Traceback" not in done.stderr
    refused = only_record(done)
    assert refused["event"] == "dataset_rejected"
    assert reason in refused["error"]


def test_a_terminal_sees_progress_and_a_summary(digits: Path, tmp_path: Path) -> None:
    shown = at_a_terminal("dataset", "index", "digits", folder=tmp_path)
    assert "100 %" in shown
    assert "4 shards, 46 rows" in shown
    assert "{" not in shown
    assert "\x1b[32m" not in at_a_terminal("dataset", "index", "digits", folder=tmp_path, NO_COLOR="1")


def test_the_doctor_speaks_to_programs_and_to_people(tmp_path: Path) -> None:
    done = trn("doctor", "--json", folder=tmp_path)
    report = only_record(done)
    levels = {finding["check"]: finding["level"] for finding in report["findings"]}
    assert done.returncode == (1 if "error" in levels.values() else 0)
    assert {"interpreter", "packages", "torch", "disk", "disk-speed", "open-files", "clock"} <= levels.keys()
    assert not (tmp_path / "home").exists()
    shown = at_a_terminal("doctor", folder=tmp_path, NO_COLOR="1")
    assert "interpreter" in shown
    assert "This machine" in shown
    assert "\x1b[3" not in shown


def test_the_doctor_ends_with_1_where_the_home_cannot_be_written(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        home = "/proc/trn"  # root may write everywhere else
    else:
        (tmp_path / "closed").mkdir(mode=0o500)
        home = str(tmp_path / "closed" / "home")
    done = trn("--home", home, "doctor", folder=tmp_path)
    assert done.returncode == 1
    report = only_record(done)
    assert not report["is_ready"]
    assert any(finding["level"] == "error" and finding["remedy"] for finding in report["findings"])


TRAINERS = '''
import random
import time

from gen_worker.trainer import StepResult

WORDS = {"alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"}


class Sound:
    """Draws from the global generator, which is saved for it."""

    def setup(self, ctx):
        self.num_steps = 0
        self.rng = random.Random(3)

    def configure(self, ctx):
        return {"w": 1.0}

    def prepare_batch(self, raw_batch, state, ctx):
        return float(raw_batch if isinstance(raw_batch, int) else raw_batch.column("id")[0].as_py())

    def train_step(self, prepared_batch, state, ctx):
        state["w"] = 0.9 * state["w"] + 0.01 * prepared_batch + self.push(ctx)
        return StepResult(metrics={"loss": state["w"]})

    def push(self, ctx):
        return random.random()

    def state_dict(self, state):
        return {"w": state["w"]}

    def load_state_dict(self, state, payload, ctx):
        state["w"] = payload["w"]


class OwnGenerator(Sound):
    def push(self, ctx):
        return self.rng.random()


class OwnCounter(Sound):
    def push(self, ctx):
        self.num_steps += 1
        return 1.0 / self.num_steps


class Hurried(Sound):
    def push(self, ctx):
        return time.perf_counter() % 1.0


class Unordered(Sound):
    def push(self, ctx):
        total = 0.0
        for word in WORDS:
            total = 0.5 * total + len(word) + ord(word[0])
        return total


class Opaque(Sound):
    def state_dict(self, state):
        return {"w": object()}


class WantsRows(Sound):
    def prepare_batch(self, raw_batch, state, ctx):
        return raw_batch["rows"]


class Careless(Sound):
    def train_step(self, prepared_batch, state, ctx):
        return {"loss": 1.0}


class Slow(Sound):
    def push(self, ctx):
        open("slow", "w").close()
        time.sleep(1000)


class Incomplete:
    def setup(self, ctx):
        pass
'''


@pytest.fixture
def trainers(tmp_path: Path) -> Path:
    (tmp_path / "trainers.py").write_text(TRAINERS)
    return tmp_path


def test_a_sound_trainer_passes_with_a_kill_on_the_boundary_of_an_epoch(digits: Path, trainers: Path) -> None:
    job = {"run_id": "any", "dataset": {"parquet_paths": ["digits"], "batch_size": 10, "shuffle": True}}
    (trainers / "job.json").write_text(json.dumps({**job, "epochs": 1}))
    done = trn(
        *("check", "trainers:Sound", "--config", "job.json", "--output", "certificate"), folder=trainers
    )
    assert done.returncode == 0, done.stdout + done.stderr
    certificate = only_record(done)
    assert certificate["is_sound"]
    assert [check["check"] for check in certificate["checks"]] == ["hooks", "state", "resume"]
    kinds = [kill["kind"] for kill in certificate["kills"]]
    assert sorted(kinds) == ["checkpoint", "mid-save", "step"]
    source = trainers / "trainers.py"
    assert certificate["code"] == {str(source): hashlib.sha256(source.read_bytes()).hexdigest()}
    assert certificate["measures"].keys() >= {"loop_s_per_step", "rss_growth_bytes_per_step", "checkpoint_s"}
    kept = json.loads((trainers / "certificate" / "certificate.json").read_text())
    assert kept == certificate
    assert "trainers:Sound is sound" in (trainers / "certificate" / "certificate.txt").read_text()


@pytest.mark.parametrize(
    ("symbol", "cause", "word"),
    [
        ("OwnGenerator", "unsaved-rng", "self.rng"),
        ("OwnCounter", "outside-state-dict", "self.num_steps"),
        ("Hurried", "wall-clock", "wall clock"),
        ("Unordered", "set-order", "order of a set"),
    ],
)
def test_an_unsound_trainer_is_found_with_its_cause(
    symbol: str, cause: str, word: str, trainers: Path
) -> None:
    done = trn("check", f"trainers:{symbol}", "--json", folder=trainers)
    assert done.returncode == 1, done.stdout + done.stderr
    certificate = only_record(done)
    assert not certificate["is_sound"]
    assert certificate["cause"]["cause"] == cause, certificate
    assert word in certificate["cause"]["message"]
    assert certificate["cause"]["remedy"]
    assert certificate["parting"]["step"] > 0
    kept = Path(certificate["folder"])
    assert kept.parent == trainers / "home" / "checks"
    assert json.loads((kept / "certificate.json").read_text()) == certificate
    assert {path.name for path in kept.iterdir()} >= {"certificate.txt", "straight.log", "killed.log"}
    assert not list(trainers.glob("trn-check-*")), "the runs themselves are gone"
    assert f"trainers:{symbol} is NOT sound; kept in {kept}" in done.stderr


def test_a_class_that_cannot_train_or_save_is_told_so(trainers: Path) -> None:
    done = trn("check", "trainers:Incomplete", folder=trainers)
    assert done.returncode == 1
    (hooks,) = only_record(done)["checks"]
    assert "missing" in hooks["message"]
    done = trn("check", "trainers:Opaque", folder=trainers)
    assert done.returncode == 1
    assert only_record(done)["checks"][-1]["check"] == "straight"
    assert "object" in only_record(done)["checks"][-1]["message"]
    done = trn("check", "trainers:Careless", folder=trainers)
    assert done.returncode == 1, "no other data would help"
    message = only_record(done)["checks"][-1]["message"]
    assert "train_step returned dict, expected StepResult" in message
    assert f"(at {trainers / 'trainers.py'}:" in message


def test_what_is_not_there_could_not_be_tried(trainers: Path) -> None:
    for name in ("nothere:X", "trainers:Nobody"):
        done = trn("check", name, folder=trainers)
        assert (done.returncode, only_record(done)["event"]) == (3, "certificate_rejected")
    assert not (trainers / "home").exists()


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("words", [("doctor",), ("check", "trainers:Slow"), ("dataset", "verify", "digits")])
def test_ctrl_c_ends_a_tool_without_a_word_and_leaves_nothing(
    words: tuple[str, ...], digits: Path, trainers: Path
) -> None:
    assert trn("dataset", "index", "digits", folder=trainers).returncode == 0
    before = sorted(trainers.rglob("*"))
    environ = {**os.environ, "TRN_HOME": str(trainers / "home"), "TMPDIR": str(trainers)}
    process = subprocess.Popen(
        [TRN, *words],
        cwd=trainers,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + DEADLINE_S
    while not (tools := children_of(process.pid)):
        assert time.monotonic() < deadline
        assert process.poll() is None
    if words[0] == "check":
        while not (trainers / "slow").exists():  # a worker of the tool is in its first step
            assert time.monotonic() < deadline
            time.sleep(0.01)
        (trainers / "slow").unlink()
        tools += children_of(tools[0])
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, said = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, "Traceback" in said) == (130, False), said
    assert [pid for pid in tools if Path(f"/proc/{pid}").exists()] == []
    left = [path for path in sorted(trainers.rglob("*")) if "__pycache__" not in path.parts]
    assert left == [path for path in before if "__pycache__" not in path.parts]


def test_a_class_that_does_not_take_mock_batches_is_asked_for_a_job(trainers: Path) -> None:
    done = trn("check", "trainers:WantsRows", folder=trainers)
    assert done.returncode == 3
    assert "--config" in only_record(done)["error"]
    assert "--config" in done.stderr


def test_a_folder_with_something_in_it_is_not_touched(trainers: Path) -> None:
    (trainers / "mine").mkdir()
    (trainers / "mine" / "notes.txt").write_text("keep")
    done = trn("check", "trainers:Sound", "--output", "mine", folder=trainers)
    assert done.returncode == 3
    assert [path.name for path in (trainers / "mine").iterdir()] == ["notes.txt"]
