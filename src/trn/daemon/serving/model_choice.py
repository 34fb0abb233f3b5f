"""RUN[@best|@latest|@STEP], or the path of a .meta.json -> the ModelVersion that is served or predicted with.

Resolved once, by the daemon: a server that is started again serves what it served. `best` is by the metric that the
checkpoints carry, and the newest where none carries one. What is chosen is verified whole, because the next one could be
taken instead; of one that is named only the sizes are compared: the worker verifies it and says what is wrong.
"""

import asyncio
import contextlib
from pathlib import Path
from typing import NamedTuple

import msgspec

from gen_worker.contract.checkpoints.choice import (
    META_SUFFIX,
    CheckpointInfo,
    Choice,
    check_quickly,
    choose_best,
    choose_newest,
    find_committed,
    read_named,
    require_finite,
    require_run,
    say_no_checkpoint,
    scan,
    verify_files,
)
from gen_worker.contract.job.model_version import ModelVersion
from gen_worker.errors import CheckpointError
from trn.core.errors import InvalidRequestError, NotFoundError, UnavailableError
from trn.core.home import Home
from trn.core.runs import RunRecord
from trn.daemon.serving.model_store import ModelStore
from trn.registry.base import ReadableRegistry

BEST, LATEST = "best", "latest"
_EXPECTED = f"expected RUN, RUN@{BEST}, RUN@{LATEST}, RUN@STEP, or the path of a {META_SUFFIX}"
MAX_STEPS_SHOWN = 10


class ModelRef(NamedTuple):
    """What a text names: a run and which of its checkpoints, or the path of one."""

    run: str = ""
    which: str = BEST
    path: str = ""

    @classmethod
    def parse(cls, text: str, base_dir: str = "") -> "ModelRef":
        """InvalidRequestError for what is neither."""
        if "/" in text or text.endswith(META_SUFFIX):
            if not text.startswith("/") and not base_dir:
                raise InvalidRequestError(f"the checkpoint is {text!r}, expected an absolute path")
            return cls(path=str(Path(base_dir) / text))
        run, sign, which = text.partition("@")
        if not run or (sign and which not in (BEST, LATEST) and not (which.isascii() and which.isdecimal())):
            raise InvalidRequestError(f"{text!r} names no checkpoint: {_EXPECTED}")
        return cls(run=run, which=which or BEST)


class ChosenModel(NamedTuple):
    """A version, the run that saved it, and what to say about the choice."""

    version: ModelVersion
    run: RunRecord
    notes: tuple[str, ...] = ()


class ModelChoice:
    """One for a daemon. From the loop's thread."""

    def __init__(self, *, registry: ReadableRegistry, home: Home) -> None:
        self._registry = registry
        self._home = home
        self._store = ModelStore(home.models, home.snapshots)

    async def find(self, text: str, *, base_dir: str = "") -> ChosenModel:
        """Its files are kept from now on. NotFoundError, AmbiguousError, InvalidRequestError with what was passed over."""
        ref = ModelRef.parse(text, base_dir)
        if ref.path:
            info = await asyncio.to_thread(_read, Path(ref.path))
            return await self._make(self._find_saver(info), ref, info)
        self._home.run(ref.run)  # what could be no id is refused before anything is looked up
        run = self._registry.find(ref.run)
        return await self._make(run, ref)

    async def find_best(self, run: RunRecord) -> ChosenModel | None:
        """Of that very run; None where it has no checkpoint that can be served."""
        with contextlib.suppress(InvalidRequestError):
            return await self._make(run, ModelRef(run=run.run_id))
        return None

    async def _make(self, run: RunRecord, ref: ModelRef, info: CheckpointInfo | None = None) -> ChosenModel:
        trainer = run.config.get("trainer")
        if (run.config.get("mode") or "trainer") != "trainer" or not isinstance(trainer, str):
            raise InvalidRequestError(
                f"run {run.run_id} does not train: name the run that saved the checkpoint"
            )
        try:
            return await asyncio.to_thread(self._prepare, run, trainer, ref, info)
        except OSError as fault:
            raise UnavailableError(
                f"the model of {run.run_id} cannot be kept in {self._home.models}: {fault}"
            ) from fault

    def _prepare(
        self, run: RunRecord, trainer: str, ref: ModelRef, info: CheckpointInfo | None
    ) -> ChosenModel:
        passed_over: tuple[str, ...] = ()
        if info is None:
            info, meta_path, passed_over = self._choose(run, ref.which)
        else:
            meta_path = self._store.keep(info)
        version = ModelVersion(
            run_id=run.run_id,
            step=info.step,
            weights_hash=info.meta.data.hash,
            code_hash=run.snapshot,
            checkpoint=str(meta_path),
            trainer=trainer,
            config=run.config,
            code_dir=str(self._store.keep_code(run.snapshot)) if run.snapshot else run.base_dir,
            frozen_from=run.frozen_from,
            base_dir=run.base_dir,
            interpreter=run.interpreter,
        )
        return ChosenModel(version, run, (*passed_over, _say_choice(ref, info, version)))

    def _choose(self, run: RunRecord, which: str) -> tuple[CheckpointInfo, Path, tuple[str, ...]]:
        folder = self._home.run(run.run_id).checkpoints

        def take(info: CheckpointInfo) -> tuple[CheckpointInfo, Path]:
            try:
                return verify_files(info), self._store.keep(info)
            except FileNotFoundError as fault:  # removed by its run just now
                raise CheckpointError(f"{fault.filename} is gone") from fault

        if which not in (BEST, LATEST):
            return self._take_step(run, folder, int(which))
        choose = choose_best if which == BEST else choose_newest
        choice: Choice[tuple[CheckpointInfo, Path]] = choose(folder, take, of_run=run.run_id, nonce=run.nonce)
        passed_over = tuple(f"passed over {item}" for item in choice.passed_over)
        if choice.taken is None:
            if find_committed(folder):
                raise InvalidRequestError(
                    f"no checkpoint of run {run.run_id} can be served", list(map(str, choice.passed_over))
                )
            raise InvalidRequestError(
                f"run {run.run_id} has saved no checkpoint yet: it is {run.state.lower()} at step {run.step}"
            )
        return *choice.taken, passed_over

    def _take_step(
        self, run: RunRecord, folder: Path, step: int
    ) -> tuple[CheckpointInfo, Path, tuple[str, ...]]:
        infos = [info for info in scan(folder)[0] if info.meta.run_id == run.run_id]
        found = next((info for info in infos if info.step == step), None)
        if found is None:
            steps = list(dict.fromkeys(info.step for info in infos))
            there = ", ".join(map(str, sorted(steps[:MAX_STEPS_SHOWN]))) or "none"
            raise NotFoundError(f"run {run.run_id} has no checkpoint of step {step}: it has {there}")
        _require_usable(found, run)
        return found, self._store.keep(found), ()

    def _find_saver(self, info: CheckpointInfo) -> RunRecord:
        meta = info.meta
        with contextlib.suppress(NotFoundError):
            run = self._registry.get(meta.run_id)
            if run.nonce == meta.nonce:
                return run
        raise NotFoundError(
            f"{info.meta_path} was saved by run {meta.run_id}, which is not in {self._home.root}: a server needs its job"
            " and its code"
        )


def _read(path: Path) -> CheckpointInfo:
    if not path.exists():
        raise NotFoundError(say_no_checkpoint(path))
    try:
        info = read_named(path)
    except CheckpointError as fault:
        raise InvalidRequestError("the checkpoint cannot be served", [str(fault)]) from fault
    if isinstance(info, dict):
        raise InvalidRequestError(f"{path} is a plain state, expected the {META_SUFFIX} of a checkpoint")
    _require_usable(info)
    return info


def _require_usable(info: CheckpointInfo, run: RunRecord | None = None) -> None:
    try:
        if run is not None:
            require_run(info.meta, run.run_id, run.nonce)
        require_finite(info)
        check_quickly(info)
    except CheckpointError as fault:
        raise InvalidRequestError(
            "the checkpoint cannot be served", [f"{info.meta_path.name}: {fault}"]
        ) from fault


def _say_choice(ref: ModelRef, info: CheckpointInfo, version: ModelVersion) -> str:
    """Which checkpoint it is, and by what it was chosen."""
    metric = info.meta.metric
    if ref.path or ref.which not in (BEST, LATEST):
        why = ""
    elif ref.which == BEST and metric is not None and metric.value is not None:
        why = f", the best by {metric.name} ({metric.value:.6g})"
    else:
        why = ", the newest"
    return f"model: {version.label}{why}"


def as_document(version: ModelVersion) -> dict[str, object]:
    """As plain data, for a job."""
    found: dict[str, object] = msgspec.to_builtins(version)
    return found
