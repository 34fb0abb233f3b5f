"""A prediction as an attempt of a run: row groups handed out to model workers, and the list of the parts at the end.

A worker that dies gets its row group back in another one, once. What an earlier attempt wrote is verified and kept.
"""

import contextlib
import re
import select
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from gen_worker.contract.failpoints import failpoint
from gen_worker.contract.files.durable import make_folder, replace_file
from gen_worker.contract.files.hashes import hash_bytes
from gen_worker.contract.job.model_version import ModelVersion, VersionFacts
from gen_worker.contract.job.spec import PredictionSpec, TrainingJobSpec
from gen_worker.contract.process_identity import is_process_alive
from gen_worker.errors import Category, InputError, ModelLoadError, TrainStepError, WorkerError
from gen_worker.inference.frames import FrameReader, from_worker_decoder, send_frame
from gen_worker.inference.messages import (
    FromWorker,
    GroupComputed,
    GroupDone,
    GroupProgress,
    NotReady,
    PredictGroup,
    Raised,
    Ready,
)
from gen_worker.inference.model.orders import ModelOptions, WorkerEnd, threads_of_worker
from gen_worker.inference.model.parent import ModelLink, ModelParent
from gen_worker.trainer.attempt.runtime_env import WorkerEnvironment
from gen_worker.trainer.attempt.session import AttemptSession
from gen_worker.trainer.job_lifecycle import raise_stop

PARTS = "predictions.json"
RECEIVE_BYTES = 1 << 18
LOOK_EVERY_S = 0.2
METRIC_EVERY_S = 2.0
MAX_DEATHS = 2  # of workers, over one row group
_TEMPORARY = re.compile(r"\..+\.parquet\.(?P<pid>\d+)-[0-9a-f]+\.tmp")


class PartRecord(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    source: str  # path of the input file
    group: int
    rows: int
    size_bytes: int
    hash: str


class PartList(msgspec.Struct, frozen=True, kw_only=True):
    """`predictions.json`: the parts that belong together, in the order of the input's rows. Written last."""

    schema_version: str = "predictions.v1"
    run_id: str
    version: VersionFacts
    batch_rows: int
    rows: int
    parts: tuple[PartRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    path: str
    number: int
    rows: int


@dataclass(slots=True, kw_only=True)
class _Worker:
    link: ModelLink
    frames: FrameReader[FromWorker]
    task: int | None = None  # the number of the group that it computes
    writing: int | None = None  # and of the one before, whose part it writes meanwhile
    is_ready: bool = False
    rows: int = 0  # of both, so far


def run(
    environment: WorkerEnvironment,
    job: TrainingJobSpec,
    session: AttemptSession,
    version: ModelVersion,
    parent: ModelParent,
) -> None:
    """Predict all row groups and complete the session. `parent` was started before the session's threads. Blocks.

    `started` and authorization are the caller's. A stop request ends the workers at once; whole parts stay.
    """
    assert job.prediction is not None
    prediction = _Prediction(
        environment=environment,
        job=job,
        spec=job.prediction,
        session=session,
        version=version,
        parent=parent,
    )
    try:
        prediction.run()
    finally:
        for worker in prediction.workers.values():
            worker.link.close()


@dataclass(slots=True, kw_only=True)
class _Prediction:
    environment: WorkerEnvironment
    job: TrainingJobSpec
    spec: PredictionSpec
    session: AttemptSession
    version: ModelVersion
    parent: ModelParent
    groups: list[_Group] = field(default_factory=list)
    waiting: deque[int] = field(default_factory=deque)  # numbers of groups
    deaths: dict[int, int] = field(default_factory=dict)
    done: dict[int, GroupDone] = field(default_factory=dict)
    workers: dict[int, _Worker] = field(default_factory=dict)  # by worker id
    rows_done: int = 0  # of whole parts
    rows_computed: int = 0  # of those that this attempt made

    def run(self) -> None:
        session = self.session
        session.phase = Category.INPUT
        out = self.environment.job_dir / self.spec.out
        try:
            make_folder(out)
        except OSError as fault:
            raise InputError(f"prediction.out: {out} cannot be created: {fault.strerror}") from fault
        remove_leftovers(out)
        session.phase = Category.MODEL_LOAD
        num_workers = self.job.resources.processes
        self._launch()  # the first loads the model; the others are its copies
        session.phase = Category.INPUT
        files = self._find_groups()
        session.phase = Category.MODEL_LOAD
        ready = self._wait_for_model()
        session.phase = Category.INPUT
        self._check_columns(files, ready)
        for _ in range(min(num_workers, len(self.groups)) - 1):
            self._launch()
        session.phase = Category.TRAIN_STEP
        total = sum(group.rows for group in self.groups)
        session.reporter.log(
            f"predicting {total} rows in {len(self.groups)} row groups with {self.version.label}",
            step=0,
            end_step=total,
        )
        self._work(out)
        self._list_parts(out, total)
        session.progress.step = total
        session.complete(
            out=str(out),
            rows=total,
            parts=len(self.groups),
            parts_kept=sum(done.was_there for done in self.done.values()),
        )

    def _find_groups(self) -> "list[tuple[str, list[str]]]":
        """Fills `groups`. Returns each file with the names of its columns. InputError with every fault."""
        from gen_worker.trainer.datasets.parquet_paths import (
            expand_parquet_paths,
            reads_output,
            say_output_is_read,
        )
        from gen_worker.trainer.datasets.schema import raise_input_faults
        from gen_worker.trainer.feed.manifest import read_footer

        faults: list[str] = []
        base = self.environment.job_dir
        named, out = [str(base / path) for path in self.spec.parquet_paths], str(base / self.spec.out)
        faults += (say_output_is_read(path, out) for path in named if reads_output(path, out))
        paths = expand_parquet_paths(named, faults)
        files = []
        for path in paths:
            footer = read_footer(path)
            if isinstance(footer, str):
                faults.append(footer)
                continue
            files.append((path, list(footer.schema.names)))
            for number, rows in enumerate(footer.record.group_rows):
                if rows:
                    self.groups.append(_Group(path=path, number=number, rows=rows))
        if not faults and not self.groups:
            faults.append("the files have no rows")
        if faults:
            raise_input_faults("prediction.parquet_paths", faults)
        self.waiting.extend(range(len(self.groups)))
        return files

    def _wait_for_model(self) -> Ready:
        (worker,) = self.workers.values()
        while True:
            for message in self._receive():
                if isinstance(message[1], Ready):
                    return message[1]
            if worker.link.worker_id not in self.workers:
                raise ModelLoadError("the model worker ended before it was ready")

    def _check_columns(self, files: "list[tuple[str, list[str]]]", ready: Ready) -> None:
        from gen_worker.trainer.datasets.schema import column_faults, raise_input_faults

        answered = [column.name for column in ready.outputs if column.name in self.spec.columns]
        if answered:
            raise InputError(
                f"prediction.columns: the model answers a column {answered[0]!r}, so the input's cannot be copied: leave it"
                " out"
            )
        wanted = [*(column.name for column in ready.inputs), *self.spec.columns]
        if not wanted:
            return
        faults = [
            fault
            for path, names in files
            for fault in column_faults(list(dict.fromkeys(wanted)), names, path)
        ]
        if faults:
            raise_input_faults("prediction.parquet_paths", faults)

    def _launch(self) -> None:
        processes = self.job.resources.processes
        devices = self.job.resources.device_names
        options = ModelOptions(
            max_batch_rows=self.spec.batch_rows,
            num_threads=threads_of_worker(self.job.resources.cpus, processes),
            device=devices[len(self.workers) % len(devices)] if devices else None,
        )
        link = self.parent.launch(self.version, options)
        self.workers[link.worker_id] = _Worker(link=link, frames=FrameReader(from_worker_decoder))

    def _work(self, out: Path) -> None:
        """Until every row group has its part."""
        made_by = self._made_by()
        started_s = metric_s = time.monotonic()
        self._hand_out(out, made_by)
        while len(self.done) < len(self.groups):
            for worker, message in self._receive():
                match message:
                    case GroupProgress(rows=rows):
                        worker.rows = self._rows_written_by(worker) + rows
                    case GroupComputed(batch=batch):
                        worker.task, worker.writing = None, batch
                        worker.rows = self._rows_written_by(worker)
                    case GroupDone():
                        self._note_done(worker, message)
                    case Raised():
                        raise self._fault(message)
                    case _:
                        pass
            self._hand_out(out, made_by)
            computing = sum(worker.rows for worker in self.workers.values())
            self.session.progress.step = self.rows_done + computing
            now_s = time.monotonic()
            if now_s - metric_s > METRIC_EVERY_S or len(self.done) == len(self.groups):
                metric_s = now_s
                rate = (self.rows_computed + computing) / max(now_s - started_s, 1e-9)
                self.session.reporter.metric("predict/rows_per_s", rate, self.session.progress.step)

    def _hand_out(self, out: Path, made_by: str) -> None:
        for worker in self.workers.values():
            if worker.is_ready and worker.task is None and self.waiting:
                worker.task = task = self.waiting.popleft()
                group = self.groups[task]
                order = PredictGroup(
                    batch=task,
                    path=group.path,
                    group=group.number,
                    out=str(out),
                    batch_rows=self.spec.batch_rows,
                    columns=tuple(self.spec.columns),
                    made_by=made_by,
                )
                worker.link.socket.setblocking(True)
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its end comes as an event
                    send_frame(worker.link.socket, order)
                worker.link.socket.setblocking(False)

    def _note_done(self, worker: _Worker, done: GroupDone) -> None:
        self.done[done.batch] = done
        if worker.writing == done.batch:
            worker.writing = None
        else:  # it was there
            worker.task = None
        worker.rows = max(worker.rows - done.rows, 0)
        self.rows_done += done.rows
        self.rows_computed += 0 if done.was_there else done.rows

    def _rows_written_by(self, worker: _Worker) -> int:
        return 0 if worker.writing is None else self.groups[worker.writing].rows

    def _receive(self) -> list[tuple[_Worker, FromWorker]]:
        """What the workers said; waits a moment for it. The end of a worker is dealt with here."""
        if self.session.stop.reason is not None:
            raise_stop(self.session.stop)
        poll = select.poll()
        by_fd = {worker.link.socket.fileno(): worker for worker in self.workers.values()}
        for fd in (*by_fd, self.parent.fileno()):
            poll.register(fd, select.POLLIN)
        found: list[tuple[_Worker, FromWorker]] = []
        for fd, _ in poll.poll(LOOK_EVERY_S * 1000):
            if fd in by_fd:
                found += self._read(by_fd[fd])
            else:
                for end in self.parent.read_ends():
                    found += self._end(end)
        return found

    def _read(self, worker: _Worker) -> list[tuple[_Worker, FromWorker]]:
        found: list[tuple[_Worker, FromWorker]] = []
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            data = worker.link.socket.recv(RECEIVE_BYTES)
            if not data:
                time.sleep(LOOK_EVERY_S / 10)  # its end is on its way
            for message, _ in worker.frames.feed(data):
                if isinstance(message, NotReady):
                    raise _load_fault(message)
                if isinstance(message, Ready):
                    worker.is_ready = True
                found.append((worker, message))
        return found

    def _end(self, end: WorkerEnd) -> list[tuple[_Worker, FromWorker]]:
        worker = self.workers.get(end.worker_id)
        if worker is None:
            return []
        found = self._read(worker)  # what it said before
        del self.workers[end.worker_id]
        worker.link.close()
        ended = {message.batch for _, message in found if isinstance(message, GroupDone | Raised)}
        lost = [task for task in (worker.task, worker.writing) if task is not None and task not in ended]
        if not lost:
            fault = ModelLoadError(f"{end.words} before it had work")
        else:
            task = lost[0]  # which it computed
            group = self.groups[task]
            self.deaths[task] = self.deaths.get(task, 0) + 1
            fault = ModelLoadError(f"{end.words} over row group {group.number} of {group.path}")
            if self.deaths[task] < MAX_DEATHS:
                self.session.reporter.log(f"{fault}: it is predicted again", level="warning")
                self.waiting.extendleft(lost)
                self._launch()
                return found
        fault.cause = end.signal
        raise fault

    def _fault(self, message: Raised) -> WorkerError:
        task = self.groups[message.batch]
        where = f"row group {task.number} of {task.path}"
        if message.kind == "input":
            return InputError(f"{where}: {message.words}")
        return TrainStepError(
            f"predict failed on {where}: {message.words} (traceback {message.error_id} in the log)"
        )

    def _made_by(self) -> str:
        """Of all that decides the answers, but the rows."""
        facts = [
            self.version.weights_hash,
            self.version.code_hash,
            self.version.trainer,
            self.spec.batch_rows,
            list(self.spec.columns),
            self.job.resources.device_names or [],
            threads_of_worker(self.job.resources.cpus, self.job.resources.processes),
        ]
        return hash_bytes(msgspec.json.encode(facts))

    def _list_parts(self, out: Path, rows: int) -> None:
        parts = []
        for number, group in enumerate(self.groups):
            done = self.done[number]
            parts.append(
                PartRecord(
                    name=done.name,
                    source=group.path,
                    group=group.number,
                    rows=done.rows,
                    size_bytes=done.size_bytes,
                    hash=done.hash,
                )
            )
        listed = PartList(
            run_id=self.job.run_id,
            version=self.version.facts,
            batch_rows=self.spec.batch_rows,
            rows=rows,
            parts=tuple(parts),
        )
        replace_file(out / PARTS, msgspec.json.format(msgspec.json.encode(listed), indent=2) + b"\n")
        failpoint("prediction.parts_listed")


def _load_fault(message: NotReady) -> WorkerError:
    fault = ModelLoadError(message.words)
    fault.cause = message.cause
    with contextlib.suppress(ValueError):
        fault.category = Category(message.category)
    return fault


def remove_leftovers(out: Path) -> None:
    """Temporary files whose writer was killed."""
    for path in out.iterdir():
        found = _TEMPORARY.fullmatch(path.name)
        if found and not is_process_alive(int(found["pid"])):
            with contextlib.suppress(OSError):
                path.unlink()
