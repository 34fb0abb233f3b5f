"""Model workers answer with the bits of their version, whatever other rows, workers and versions do."""

import json
import os
import pickle
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from model_processes import DEADLINE_S, Worker, open_parent, train, version_of
from worker_process import TRAINERS

from gen_worker.contract.process_identity import is_process_alive, read_process
from gen_worker.errors import ModelLoadError
from gen_worker.inference.messages import (
    Answers,
    CloseStream,
    ColumnData,
    ColumnType,
    MoreItems,
    OpenStream,
    Part,
    Raised,
    StreamEnd,
    StreamItem,
    Work,
)
from gen_worker.inference.model.parent import ModelOptions, ModelParent

RAISES, KILLS, SHORT, ONE_NUMBER, EATS = 1001.0, 1002.0, 1003.0, 1004.0, 1005.0  # as `serving.py` has them
HAS_NO_TEXT, HAS_MUCH_TEXT, FORKS, OTHER_BYTES, WIDE = 2001.0, 2002.0, 2003.0, 2004.0, 2005.0  # `Misbehaves`
ROWS = np.random.default_rng(1).standard_normal((64, 4)).astype("float32")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def meta(place: Path) -> Path:
    return train(place)


@pytest.fixture(scope="module")
def log(place: Path) -> Path:
    return place / "models.log"


@pytest.fixture(scope="module")
def parent(log: Path) -> Iterator[ModelParent]:
    with open_parent(log) as parent:
        yield parent


@pytest.fixture(scope="module")
def shared(parent: ModelParent, meta: Path) -> Iterator[Worker]:
    worker = Worker(parent, version_of(meta))
    worker.ready()
    yield worker
    worker.close()


def with_first(value: float, rows: int = 4) -> "np.ndarray[Any, Any]":
    """Rows of which the last one begins with that value."""
    x = ROWS[:rows].copy()
    x[-1, 0] = value
    return x


def wait_gone(pid: int) -> None:
    fd = os.pidfd_open(pid)
    try:
        assert select.select([fd], [], [], 120)[0]
    finally:
        os.close(fd)


# What a worker says first.


def test_ready_says_what_the_model_reads_and_answers(parent: ModelParent, meta: Path) -> None:
    worker = Worker(parent, version_of(meta), ModelOptions(max_batch_rows=20))
    ready = worker.ready()
    assert ready.inputs == (ColumnType(name="x", dtype="float32", dims=(4,)),)  # without the label
    assert ready.outputs == (
        ColumnType(name="y", dtype="float32"),
        ColumnType(name="is_high", dtype="bool"),
        ColumnType(name="name", dtype="string"),
    )
    assert ready.can_stream
    assert sorted(ready.probe_ms) == [1, 8, 20]
    assert is_process_alive(ready.pid)
    worker.close()
    assert worker.end().exit_code == 0


def test_pandas_is_imported_for_texts_before_a_worker_is_ready_and_never_for_numbers(
    meta: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pyarrow does, at many places; it takes longer than to load the model."""
    (tmp_path / "pandas.py").write_text("import os; open(os.environ['SEEN'], 'w').close(); raise ImportError")
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with open_parent(tmp_path / "log") as parent:
        worker = Worker(parent, version_of(meta, "serving:ReusesMemory"), ModelOptions(max_batch_rows=20))
        worker.ready()
        batch = pa.record_batch({"x": pa.FixedSizeListArray.from_arrays(pa.array(ROWS[:5].reshape(-1)), 4)})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as stream:
            stream.write_batch(batch)
        content = sink.getvalue().to_pybytes()
        part = Part(num_rows=5, encoding="ipc", size_bytes=len(content))
        (by_arrow,) = worker.ask_parts((part,), [content], 8)
        (by_json,) = worker.ask(ROWS[:5])
        assert by_arrow["y"].tobytes() == by_json["y"].tobytes()
        assert not (tmp_path / "seen").exists()
        Worker(parent, version_of(meta)).ready()  # it answers also a text
        assert (tmp_path / "seen").exists()


def test_every_shape_was_called_before_a_worker_is_ready(parent: ModelParent, meta: Path) -> None:
    worker = Worker(parent, version_of(meta, "serving:NeedsFirstCall"))
    worker.ready()
    (answer,) = worker.ask(ROWS[:1])
    assert answer["seen"] == ["1,2,8,32"]  # 2: two rows were tried with and without the label
    worker.close()


@pytest.mark.parametrize(
    ("trainer", "category", "words"),
    [
        ("serving:NoPredict", "startup", "has no `predict`"),
        ("serving:Missing", "startup", "Missing"),
        ("serving:FailsToLoad", "model-load", "the state does not fit"),
        ("serving:DiesLoading", "model-load", "was killed by SIGSEGV"),
        ("serving:Forgets", "model-load", "serving_state returned None"),
        ("serving:NamesNothing", "startup", "label_columns names 'z', but the training data has x, y"),
    ],
)
def test_a_version_that_cannot_serve_says_why(
    parent: ModelParent, meta: Path, trainer: str, category: str, words: str
) -> None:
    worker = Worker(parent, version_of(meta, trainer))
    refusal = worker.refusal()
    assert refusal.category == category
    assert words in refusal.words
    assert worker.end().exit_code == 1
    worker.close()


# Hash first.


def test_weights_that_do_not_match_their_hash_are_never_loaded(parent: ModelParent, meta: Path) -> None:
    folder = meta.parent.with_name("damaged")
    shutil.copytree(meta.parent, folder)
    data = folder / "final.pt"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    refusal = Worker(parent, version_of(folder / "final.meta.json", base_dir=str(meta.parents[2]))).refusal()
    assert refusal.category == "input"
    assert "final.pt" in refusal.words


def test_a_large_checkpoint_is_read_beside_the_authors_code_verified_and_its_model_is_forked(
    parent: ModelParent, place: Path
) -> None:
    meta = train(place / "large", run_id="large", trainer="serving:Large")
    version = version_of(meta, "serving:Large")
    first = Worker(parent, version)
    loaded = first.ready()
    other = Worker(parent, version)
    assert other.ready().load_ms == loaded.load_ms
    assert len(children_of(loaded.pid)) == 1  # its template: the thread that read has ended
    answers = [worker.ask(ROWS[:3])[0] for worker in (first, other)]
    assert answers[0]["ballast"].tobytes() == answers[1]["ballast"].tobytes()
    assert answers[0]["y"].tobytes() == answers[1]["y"].tobytes()
    data = meta.with_name("final.pt")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    parent.retire(version.facts)
    refusal = Worker(parent, version).refusal()
    assert (refusal.category, "final.pt" in refusal.words) == ("input", True)
    first.close(), other.close()


def test_a_checkpoint_that_was_replaced_since_it_was_chosen_is_refused(
    parent: ModelParent, meta: Path
) -> None:
    refusal = Worker(parent, version_of(meta, weights_hash="sha256:" + "0" * 64)).refusal()
    assert refusal.category == "input"
    assert "it was replaced since" in refusal.words


def test_a_checkpoint_with_a_pickle_in_its_data_runs_no_code(parent: ModelParent, meta: Path) -> None:
    """Even one whose hashes all fit: the data file is read by the meta's offsets, never unpickled."""
    folder = meta.parent.with_name("pickled")
    shutil.copytree(meta.parent, folder)
    witness = folder / "witness"

    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (witness,))

    data = folder / "final.pt"
    data.write_bytes(pickle.dumps(Evil()))
    refusal = Worker(parent, version_of(folder / "final.meta.json", base_dir=str(meta.parents[2]))).refusal()
    assert refusal.category == "input"
    assert not witness.exists()


# Bits.


def test_a_rows_bits_depend_on_neither_place_nor_neighbours(shared: Worker) -> None:
    (alone,) = shared.ask(ROWS[:1], shape=8)
    for place in range(8):
        x = ROWS[10:18].copy()
        x[place] = ROWS[0]
        (answer,) = shared.ask(x, shape=8)
        assert answer["y"][place].tobytes() == alone["y"][0].tobytes()


def test_the_parts_of_a_batch_are_answered_one_by_one_in_their_order(shared: Worker) -> None:
    (together,) = shared.ask(ROWS[:8], shape=8)
    parts = shared.ask(ROWS[:3], ROWS[3:4], ROWS[4:8], shape=8)
    assert [len(part["y"]) for part in parts] == [3, 1, 4]
    assert np.concatenate([part["y"] for part in parts]).tobytes() == together["y"].tobytes()
    assert [name for part in parts for name in part["name"]] == together["name"]


def test_all_workers_of_a_version_answer_with_the_same_bits(
    parent: ModelParent, meta: Path, shared: Worker
) -> None:
    other = Worker(parent, version_of(meta))
    other.ready()
    assert other.ask(ROWS[:20])[0]["y"].tobytes() == shared.ask(ROWS[:20])[0]["y"].tobytes()
    other.close()


def test_arrow_goes_in_and_out_with_the_same_bits(shared: Worker) -> None:
    batch = pa.record_batch({"x": pa.FixedSizeListArray.from_arrays(pa.array(ROWS[:5].reshape(-1)), 4)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    content = sink.getvalue().to_pybytes()
    part = Part(num_rows=5, encoding="ipc", size_bytes=len(content), answer="ipc")
    (answer,) = shared.ask_parts((part,), [content], 8)
    table = pa.ipc.open_stream(answer["ipc"]).read_all()
    (columns,) = shared.ask(ROWS[:5], shape=8)
    assert table.column("y").to_numpy().tobytes() == columns["y"].tobytes()
    assert table.column("name").to_pylist() == columns["name"]


# Rows that do harm.


def test_a_batch_that_raises_is_answered_with_its_error_and_the_next_one_with_values(
    shared: Worker, log: Path
) -> None:
    raised = shared.ask(with_first(RAISES))
    assert isinstance(raised, Raised)
    assert raised.kind == "error"
    assert "this row cannot be predicted" in raised.words
    (answer,) = shared.ask(ROWS[:4])
    assert len(answer["y"]) == 4
    text = log.read_text()
    assert raised.error_id in text
    assert "Traceback" in text[text.index(raised.error_id) :]


@pytest.fixture(scope="module")
def misbehaving(parent: ModelParent, meta: Path) -> Iterator[Worker]:
    worker = Worker(parent, version_of(meta, "serving:Misbehaves"))
    worker.ready()
    yield worker
    worker.close()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (HAS_NO_TEXT, "HasNoText: no text: its __str__ and __repr__ raise"),
        (HAS_MUCH_TEXT, "ValueError: muchmuch"),
    ],
)
def test_an_exception_is_an_error_of_its_batch_whatever_its_text_is(
    misbehaving: Worker, value: float, words: str
) -> None:
    raised = misbehaving.ask(with_first(value))
    assert isinstance(raised, Raised)
    assert (raised.kind, raised.words[: len(words)]) == ("error", words)
    assert len(raised.words) < 100_000
    assert len(misbehaving.ask(ROWS[:4])[0]["y"]) == 4


def test_a_process_that_predict_forks_does_not_answer_in_its_place(misbehaving: Worker, log: Path) -> None:
    """Its answer would be that of a later batch, or end up in the middle of one."""
    assert len(misbehaving.ask(with_first(FORKS))[0]["y"]) == 4
    for count in (3, 5, 7):
        assert len(misbehaving.ask(ROWS[:count])[0]["y"]) == count
    (child,) = re.findall(r"^child (\d+)$", log.read_text(), re.MULTILINE)
    deadline = time.monotonic() + DEADLINE_S
    while is_process_alive(int(child)):
        assert time.monotonic() < deadline, "it waits for work"
        time.sleep(0.01)


@pytest.mark.parametrize("value", [OTHER_BYTES, WIDE])
def test_numbers_of_any_bytes_are_answered(misbehaving: Worker, value: float) -> None:
    (answer,) = misbehaving.ask(with_first(value))
    assert answer["y"].tolist() == [0, 1, 2, 3]
    assert answer["y"].dtype.name in ("float32", "float64")


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        (SHORT, "row_count", "7 values of 'y' for 8 rows"),
        (ONE_NUMBER, "row_count", "one value of 'y', expected one a row"),
    ],
)
def test_a_wrong_number_of_rows_is_an_error_of_the_whole_batch(
    shared: Worker, value: float, kind: str, words: str
) -> None:
    raised = shared.ask(ROWS[:2], with_first(value))
    assert isinstance(raised, Raised)
    assert raised.kind == kind
    assert words in raised.words


def test_rows_that_do_not_fit_the_columns_are_an_error_of_the_request(shared: Worker) -> None:
    short = np.zeros((2, 3), "float32")
    raised = shared.ask(short)
    assert isinstance(raised, Raised)
    assert raised.kind == "input"
    assert "column 'x': a row has the shape [3], expected [4]" in raised.words


def test_bytes_that_are_not_arrow_are_an_error_of_the_request(shared: Worker) -> None:
    content = b"\x80\x04\x95" + os.urandom(64)
    part = Part(num_rows=5, encoding="ipc", size_bytes=len(content), answer="ipc")
    raised = shared.ask_parts((part,), [content], 8)
    assert isinstance(raised, Raised)
    assert raised.kind == "input"


def test_a_row_that_kills_its_worker_hurts_no_other_worker(
    parent: ModelParent, meta: Path, shared: Worker
) -> None:
    victim = Worker(parent, version_of(meta))
    pid = victim.ready().pid
    with pytest.raises(AssertionError, match="the worker ended"):
        victim.ask(with_first(KILLS))
    end = victim.end()
    assert end.signal == "SIGKILL"
    assert end.exit_code is None
    assert not is_process_alive(pid)
    assert len(shared.ask(ROWS[:3])[0]["y"]) == 3
    again = Worker(parent, version_of(meta))
    assert again.ready().load_ms > 0
    assert again.ask(ROWS[:3])[0]["y"].tobytes() == shared.ask(ROWS[:3])[0]["y"].tobytes()
    again.close()
    victim.close()


def test_a_batch_that_takes_too_much_memory_is_an_error_and_the_worker_lives(
    parent: ModelParent, meta: Path
) -> None:
    worker = Worker(parent, version_of(meta), ModelOptions(memory_mb=256))
    worker.ready()
    raised = worker.ask(with_first(EATS))
    assert isinstance(raised, Raised)
    assert raised.kind == "error"
    assert "MemoryError" in raised.words
    assert len(worker.ask(ROWS[:3])[0]["y"]) == 3
    worker.close()


def test_a_worker_that_hangs_is_killed_by_its_id(parent: ModelParent, meta: Path) -> None:
    worker = Worker(parent, version_of(meta))
    worker.ready()
    parent.kill(worker.link.worker_id)
    assert worker.receive() is None
    assert worker.end().signal == "SIGKILL"
    parent.kill(worker.link.worker_id)  # it is gone: nothing happens
    worker.close()


# Processes.


def test_workers_are_forked_from_a_template_that_has_loaded_once(
    parent: ModelParent, meta: Path, log: Path
) -> None:
    version = version_of(meta, "serving:WritesItself")
    workers = [Worker(parent, version) for _ in range(3)]
    load_ms = {worker.ready().load_ms for worker in workers}
    assert len(load_ms) == 1
    answers = [worker.ask(ROWS[:2])[0] for worker in workers]
    assert len({int(answer["pid"][0]) for answer in answers}) == 3
    assert {int(answer["parent"][0]) for answer in answers} == {parent.pid}
    assert {int(answer["threads"][0]) for answer in answers} == {1}
    assert {int(answer["os_threads"][0]) for answer in answers} == {1}
    assert not any(answer["has_gradients"][0] for answer in answers)
    for worker in workers:
        worker.close()


def test_a_worker_gets_the_threads_that_it_is_given(parent: ModelParent, meta: Path) -> None:
    worker = Worker(parent, version_of(meta, "serving:WritesItself"), ModelOptions(num_threads=2))
    ready = worker.ready()
    assert sorted(ready.probe_ms) == [1, 8, 32]  # probed with its own threads, after the fork
    assert int(worker.ask(ROWS[:2])[0]["threads"][0]) == 2
    worker.close()


def test_a_version_that_cannot_be_forked_is_loaded_by_each_worker(
    parent: ModelParent, meta: Path, log: Path
) -> None:
    version = version_of(meta, "serving:StartsThreads")
    workers = [Worker(parent, version) for _ in range(2)]
    load_ms = {worker.ready().load_ms for worker in workers}
    assert len(load_ms) == 2
    bits = {worker.ask(ROWS[:5])[0]["y"].tobytes() for worker in workers}
    assert len(bits) == 1
    assert "are not forked: it has 2 threads" in log.read_text()
    for worker in workers:
        worker.close()
        assert worker.end().exit_code == 0


def test_versions_never_share_a_process_or_its_code(parent: ModelParent, meta: Path, tmp_path: Path) -> None:
    """Two versions whose classes have the same name answer from their own folders."""
    code = tmp_path / "code"
    shutil.copytree(TRAINERS, code, ignore=shutil.ignore_patterns("__pycache__"))
    old = Worker(parent, version_of(meta, "serving:WritesItself"))
    new = Worker(parent, version_of(meta, "serving:WritesItself", code_dir=str(code), base_dir=str(tmp_path)))
    old.ready(), new.ready()
    (one,), (other,) = old.ask(ROWS[:1]), new.ask(ROWS[:1])
    assert one["file"] == [str(TRAINERS / "serving.py")]
    assert other["file"] == [str(code / "serving.py")]
    assert one["cwd"] == [str(meta.parents[2])]
    assert other["cwd"] == [str(tmp_path)]
    assert one["pid"][0] != other["pid"][0]
    old.close(), new.close()


def test_a_retired_template_ends_and_its_workers_go_on(parent: ModelParent, place: Path) -> None:
    meta = train(place / "retired", run_id="retired")
    worker = Worker(parent, version_of(meta))
    first = worker.ready()
    parent.retire(version_of(meta).facts)
    assert len(worker.ask(ROWS[:3])[0]["y"]) == 3
    again = Worker(parent, version_of(meta))
    assert again.ready().load_ms != first.load_ms  # loaded once more
    worker.close(), again.close()


def test_a_process_that_is_kept_ahead_loads_the_next_version_with_the_same_code_and_no_other(
    meta: Path, tmp_path: Path
) -> None:
    with open_parent(tmp_path / "ahead.log") as parent:
        first = Worker(parent, version_of(meta))
        known = [first.ready().pid]
        expected = first.ask(ROWS[:3])[0]["y"]
        second = Worker(parent, version_of(meta.with_name("step-00000003.meta.json")))
        known.append(second.ready().pid)
        ahead = wait_for_child(parent.pid, known)
        parent.retire(version_of(meta).facts)
        again = Worker(parent, version_of(meta))
        assert again.ready().pid == ahead
        assert again.ask(ROWS[:3])[0]["y"].tobytes() == expected.tobytes()
        known.append(ahead)
        ahead = wait_for_child(parent.pid, known)
        config = {**version_of(meta).config, "env": {"ANOTHER": "1"}}
        other = Worker(parent, version_of(meta, config=config))
        assert other.ready().pid != ahead
        deadline = time.monotonic() + DEADLINE_S
        while ahead in children_of(parent.pid):
            assert time.monotonic() < deadline
            time.sleep(0.005)


def wait_for_child(pid: int, known: list[int]) -> int:
    """The pid of one that is not known."""
    deadline = time.monotonic() + DEADLINE_S
    while not (found := [child for child in children_of(pid) if child not in known]):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found[0]


def test_a_worker_that_takes_the_place_of_the_first_one_is_forked(
    parent: ModelParent, place: Path, log: Path
) -> None:
    """Also where that one was killed: the template is its child, and outlives it."""
    meta = train(place / "killed", run_id="killed")
    first = Worker(parent, version_of(meta))
    loaded = first.ready()
    expected = first.ask(ROWS[:3])[0]["y"].tobytes()
    os.kill(loaded.pid, signal.SIGKILL)
    assert first.end().signal == "SIGKILL"
    for _ in range(2):
        other = Worker(parent, version_of(meta))
        assert other.ready().load_ms == loaded.load_ms  # not loaded again
        assert other.ask(ROWS[:3])[0]["y"].tobytes() == expected
        other.close()


def test_a_version_that_is_prepared_is_loaded_once(parent: ModelParent, place: Path) -> None:
    version = version_of(train(place / "prepared", run_id="prepared"))
    before = set(children_of(parent.pid))
    parent.prepare(version, ModelOptions())
    parent.prepare(version, ModelOptions())
    worker = Worker(parent, version)
    pid = worker.ready().pid
    assert set(children_of(parent.pid)) - before == {pid}
    worker.close()


def test_a_version_that_cannot_be_prepared_is_refused_when_a_worker_is_asked_for(
    parent: ModelParent, meta: Path
) -> None:
    version = version_of(meta, "serving:FailsToLoad")
    parent.prepare(version, ModelOptions())
    assert "the state does not fit" in Worker(parent, version).refusal().words


def test_where_the_template_was_killed_too_the_version_is_loaded_again(
    parent: ModelParent, place: Path
) -> None:
    meta = train(place / "lost", run_id="lost")
    first = Worker(parent, version_of(meta))
    loaded = first.ready()
    template = wait_for_child(loaded.pid, [])
    os.kill(template, signal.SIGKILL)
    other = Worker(parent, version_of(meta))
    assert other.ready().load_ms != loaded.load_ms
    assert other.ask(ROWS[:3])[0]["y"].tobytes() == first.ask(ROWS[:3])[0]["y"].tobytes()
    first.close(), other.close()


def children_of(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(text) for text in path.read_text().split()]


def test_nothing_is_left_of_a_server_that_is_killed(meta: Path, tmp_path: Path) -> None:
    """`ModelParent.start` in a process of its own, which is then killed."""
    script = tmp_path / "server.py"
    script.write_text(
        "import json, sys, time\n"
        "from gen_worker.inference.model.parent import ModelOptions, ModelParent\n"
        "from gen_worker.inference.frames import from_worker_decoder, receive_frame\n"
        "from gen_worker.contract.job.model_version import ModelVersion\n"
        "import msgspec\n"
        "version = msgspec.json.decode(sys.argv[1], type=ModelVersion)\n"
        "parent = ModelParent.start()\n"
        "assert 'torch' not in sys.modules and 'pyarrow' not in sys.modules\n"
        "link = parent.launch(version, ModelOptions())\n"
        "link.socket.setblocking(True)\n"
        "ready, _ = receive_frame(link.socket, from_worker_decoder)\n"
        "assert 'torch' not in sys.modules and 'pyarrow' not in sys.modules\n"
        "print(json.dumps([parent.pid, ready.pid]), flush=True)\n"
        "time.sleep(600)\n"
    )
    argument = msgspec.json.encode(version_of(meta)).decode()
    with subprocess.Popen(
        [sys.executable, str(script), argument], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        pids = json.loads(server.stdout.readline())
        template = wait_for_child(pids[1], [])
        waiting = [os.pidfd_open(pid) for pid in (*pids, template)]
        server.kill()
    for fd in waiting:
        assert select.select([fd], [], [], 120)[0]
        os.close(fd)


def test_signals_are_left_to_the_server(shared: Worker, parent: ModelParent) -> None:

    for pid in [parent.pid, *children_of(parent.pid)]:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(pid, number)
    assert len(shared.ask(ROWS[:3])[0]["y"]) == 3


def test_a_model_parent_must_be_started_before_any_thread(tmp_path: Path) -> None:
    script = (
        "import threading\n"
        "from gen_worker.inference.model.parent import ModelParent\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "ModelParent.start()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "must be started first: this process has 2 threads" in done.stderr


def test_the_end_of_the_model_parent_is_an_error_that_names_the_signal(tmp_path: Path) -> None:
    with open_parent(tmp_path / "log") as parent:
        os.kill(parent.pid, 9)

        assert select.select([parent], [], [], 120)[0]
        with pytest.raises(ModelLoadError, match="the parent of the model workers ended: SIGKILL") as found:
            parent.read_ends()
        assert found.value.cause == "SIGKILL"


# Streams.


def open_stream(worker: Worker, stream: int, count: float, credit: int = 2000) -> None:
    x = np.full((1, 4), count, "float32")
    data = ColumnData(name="x", encoding="packed", size_bytes=x.nbytes, dtype="float32", dims=(4,))
    worker.send(
        OpenStream(stream=stream, part=Part(num_rows=1, columns=(data,)), credit=credit), [x.tobytes()]
    )


def test_a_stream_sends_item_by_item_and_batches_are_answered_between(
    parent: ModelParent, meta: Path
) -> None:
    worker = Worker(parent, version_of(meta))
    worker.ready()
    open_stream(worker, 1, 5)
    numbers = []
    while True:
        frame = worker.receive()
        assert frame is not None
        message, content = frame
        if isinstance(message, StreamEnd):
            break
        assert isinstance(message, StreamItem)
        numbers.append(json.loads(bytes(content))["number"])
    assert numbers == [0, 1, 2, 3, 4]
    assert message == StreamEnd(stream=1)
    open_stream(worker, 2, 1000)
    data = ColumnData(name="x", encoding="packed", size_bytes=16, dtype="float32", dims=(4,))

    worker.send(Work(batch=9, shape=1, parts=(Part(num_rows=1, columns=(data,)),)), [ROWS[0].tobytes()])
    seen = []
    while True:
        frame = worker.receive()
        assert frame is not None
        seen.append(frame[0])
        if isinstance(frame[0], StreamEnd):
            break
    assert any(isinstance(message, Answers) and message.batch == 9 for message in seen[:-1])
    assert seen[-1].kind == "error"  # type: ignore[union-attr]
    assert "no more" in seen[-1].words  # type: ignore[union-attr]
    worker.close()


def test_a_stream_sends_no_more_than_its_reader_takes(parent: ModelParent, meta: Path) -> None:
    worker = Worker(parent, version_of(meta))
    worker.ready()
    open_stream(worker, 4, 5, credit=2)
    messages = []
    for credit in (2, 2):
        for _ in range(credit):
            frame = worker.receive()
            assert frame is not None
            messages.append(frame[0])
        # A batch is answered while the stream waits: nothing of the stream is between.
        assert len(worker.ask(ROWS[:3])[0]["y"]) == 3
        worker.send(MoreItems(stream=4, credit=2))
    assert all(isinstance(message, StreamItem) for message in messages)
    frame = worker.receive()
    assert frame is not None
    assert isinstance(frame[0], StreamItem)
    frame = worker.receive()
    assert frame is not None
    assert frame[0] == StreamEnd(stream=4)
    worker.close()


def test_a_stream_that_nobody_reads_any_more_is_closed(parent: ModelParent, meta: Path, log: Path) -> None:
    worker = Worker(parent, version_of(meta))
    worker.ready()
    open_stream(worker, 3, 800)
    frame = worker.receive()
    assert frame is not None
    assert isinstance(frame[0], StreamItem)
    worker.send(CloseStream(stream=3))
    while isinstance(frame[0], StreamItem):
        frame = worker.receive()
        assert frame is not None
    assert frame[0] == StreamEnd(stream=3)
    assert "stream of 800 closed" in log.read_text()  # the author's `finally` ran
    worker.close()


# Contracts of the class.


def test_annotated_records_go_in_and_out(parent: ModelParent, meta: Path) -> None:
    worker = Worker(parent, version_of(meta, "serving:FromRecords"))
    ready = worker.ready()
    assert ready.inputs == (
        ColumnType(name="x", dtype="float64", dims=(None,)),
        ColumnType(name="label", dtype="string"),
        ColumnType(name="weight", dtype="float64", is_nullable=True),
    )
    values = {"x": [[1.0, 2.0], [3.0]], "label": ["a", "b"], "weight": [None, 2.0]}
    encoded = {name: msgspec.msgpack.encode(column) for name, column in values.items()}
    part = Part(
        num_rows=2,
        columns=tuple(
            ColumnData(name=name, encoding="values", size_bytes=len(content))
            for name, content in encoded.items()
        ),
    )
    (answer,) = worker.ask_parts((part,), list(encoded.values()), 8)
    assert answer["total"].tolist() == [3.0, 6.0]
    assert answer["label"] == ["a", "b"]
    worker.close()


def test_serving_state_replaces_the_state(parent: ModelParent, meta: Path, shared: Worker) -> None:
    worker = Worker(parent, version_of(meta, "serving:Shrinks"))
    worker.ready()
    assert worker.ask(ROWS[:3])[0]["y"].tobytes() == shared.ask(ROWS[:3])[0]["y"].tobytes()
    worker.close()


def test_a_class_may_name_its_labels(parent: ModelParent, meta: Path) -> None:
    worker = Worker(parent, version_of(meta, "serving:Names"))
    assert [column.name for column in worker.ready().inputs] == ["x"]
    worker.close()


def test_a_model_is_served_after_its_training_data_is_gone(parent: ModelParent, place: Path) -> None:
    meta = train(place / "moved", run_id="moved")
    (place / "moved" / "data" / "train.parquet").unlink()
    worker = Worker(parent, version_of(meta))
    ready = worker.ready()
    assert ready.inputs == (ColumnType(name="x", dtype="float32", dims=(4,)),)
    assert sorted(ready.probe_ms) == [1, 8, 32]
    worker.close()


def test_the_memory_of_workers_is_that_of_their_template(parent: ModelParent, meta: Path) -> None:
    """Copy on write: a further worker costs what it changes, not the model and the libraries again."""
    version = version_of(meta)
    workers = [Worker(parent, version) for _ in range(2)]
    for worker in workers:
        ready = worker.ready()
        worker.ask(ROWS[:8])
        private_kb = sum(
            int(line.split()[1])
            for line in Path(f"/proc/{ready.pid}/smaps_rollup").read_text().splitlines()
            if line.startswith("Private_")
        )
        whole_kb = int(
            next(
                line.split()[1]
                for line in Path(f"/proc/{ready.pid}/smaps_rollup").read_text().splitlines()
                if line.startswith("Rss:")
            )
        )
        assert private_kb < whole_kb / 3
        worker.close()


def test_every_model_process_is_reaped(parent: ModelParent, meta: Path) -> None:
    worker = Worker(parent, version_of(meta))
    pid = worker.ready().pid
    worker.close()
    worker.end()
    assert read_process(pid) is None
