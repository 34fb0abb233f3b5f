"""Writes checkpoints and samples. A save blocks for one copy of the state; a writer process does the rest."""

import logging
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import msgspec
import numpy as np

from gen_worker.contract.checkpoints.choice import META_SUFFIX, checkpoint_stem
from gen_worker.contract.checkpoints.meta import CheckpointMeta, FileEntry, Metric
from gen_worker.contract.failpoints import failpoint
from gen_worker.contract.files.durable import make_folder
from gen_worker.contract.job.spec import JOB_DEFAULTS
from gen_worker.errors import CheckpointError
from gen_worker.trainer.author.author_state import ask_for_samples, save_author_files
from gen_worker.trainer.checkpoints.files.format import SUFFIXES, FileLayout, build_layout
from gen_worker.trainer.checkpoints.files.state_tree import encode
from gen_worker.trainer.checkpoints.files.tensors import TensorTable
from gen_worker.trainer.checkpoints.samples import SampleFolder, SavedSample
from gen_worker.trainer.checkpoints.writing.client import CheckpointWriterClient
from gen_worker.trainer.checkpoints.writing.commit import no_space_error
from gen_worker.trainer.checkpoints.writing.messages import Done, Durable, SaveRequest
from gen_worker.trainer.checkpoints.writing.stall_timer import StallLimits
from gen_worker.trainer.contracts import StepContext, TrainerPlugin
from gen_worker.trainer.model_runtime import capture_rng
from gen_worker.trainer.restore.infinite_parts import is_infinite_part

_log = logging.getLogger(__name__)

_META_ROOM_BYTES = 1 << 20
POLL_EVERY_S = 0.001  # asking takes a system call and an exception: much beside a step of 0.1 ms


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointContent:
    """Everything that one checkpoint holds."""

    step: int
    epoch: int
    final: bool
    state: Mapping[str, object]
    loop: Mapping[str, object]
    cursor: Mapping[str, object] | None
    rng: Mapping[str, object]
    identity: Mapping[str, object]
    metric: tuple[str, float, str] | None = None
    author_files: Path | None = None
    author_payload: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint that is durable and was read back."""

    path: Path
    meta_path: Path | None  # None, as the size, where a writer of the caller's did not give it
    step: int
    final: bool
    verified: bool
    reason: str  # why it is not verified
    size_bytes: int | None
    duration_s: float  # from the call of save_checkpoint until it was durable
    blocked_s: float  # of these, the time of the copy
    removed: list[str]  # by retention
    files: tuple[FileEntry, ...]

    def summary(self) -> dict[str, Any]:
        return {"path": str(self.path), "step": self.step, "verified": self.verified}


@dataclass(slots=True, kw_only=True)
class _InFlight:
    content: CheckpointContent
    started_s: float
    blocked_s: float
    durable_s: float | None = None


class ArtifactWriter:
    """Saves checkpoints in the background and samples at once. Use it from one thread.

    One save is in progress at a time. Its failure is raised, once, by the next `poll`, `wait` or `save_checkpoint`.
    """

    def __init__(
        self,
        checkpoints_dir: Path,
        samples_dir: Path,
        *,
        run_id: str,
        attempt: int = 1,
        nonce: str = "",
        format: Literal["pt", "safetensors"] = "pt",  # noqa: A002  (the job's own word)
        keep_last: int = JOB_DEFAULTS.checkpoints.keep_last,
        keep_best: int = JOB_DEFAULTS.checkpoints.keep_best,
        inherit_fds: Sequence[int] = (),
        is_writer_in_process: bool = False,
        trainer: TrainerPlugin | None = None,
        writer_limits: StallLimits | None = None,
        tell: Callable[[str], None] = _log.warning,
    ) -> None:
        """`keep_last` 0 keeps all. `inherit_fds` stay open in the writer, so that it holds the lease of a killed worker.

        `trainer` is the class whose `sample` hook `write_samples` calls. `writer_limits`: how long the writer may be
        silent before `tell` is called. `is_writer_in_process`: see `writer_thread`.
        """
        self.checkpoints_dir = Path(checkpoints_dir)
        self._run_id = run_id
        self._attempt = attempt
        self._nonce = nonce
        self._format: Literal["pt", "safetensors"] = format
        self._trainer = trainer
        self._token = secrets.token_hex(6)
        self._num_author_dirs = 0
        self._samples = SampleFolder(Path(samples_dir), self._token)
        make_folder(self.checkpoints_dir)
        self._client = CheckpointWriterClient(
            self.checkpoints_dir,
            token=self._token,
            keep_last=keep_last,
            keep_best=keep_best,
            inherit_fds=inherit_fds,
            is_in_process=is_writer_in_process,
            limits=writer_limits,
            tell=tell,
        )
        self.infinite_parts: frozenset[str] = frozenset()  # tensors of the state that may hold infinities
        self._layout: FileLayout | None = None
        self._layout_key: object = None
        self._staged_layout: FileLayout | None = None  # whose constant bytes are in the staging buffer
        self._in_flight: _InFlight | None = None
        self._next_poll_s = 0.0
        self._completed: list[SavedCheckpoint] = []

    def start(self) -> None:
        """Start the writer process, and remove files of crashed attempts. Does not wait."""
        self._samples.clean_up()
        self._client.start()

    @property
    def is_saving(self) -> bool:
        """True while a save is in progress."""
        return self._in_flight is not None

    def save_checkpoint(self, content: CheckpointContent) -> None:
        """Wait for a save in progress, copy the state, and return; the writer does the rest.

        CheckpointError if the previous save failed, the state cannot be saved, or the disk is full.
        """
        while self._in_flight is not None:
            self._take_reports(None)
        started_s = time.monotonic()
        stem = checkpoint_stem(content.step, final=content.final)
        table = TensorTable()
        trees = _encode_trees(content, table)
        layout = self._find_layout(table)
        if shutil.disk_usage(self.checkpoints_dir).free < layout.size_bytes + _META_ROOM_BYTES:
            raise no_space_error(stem, layout.size_bytes + _META_ROOM_BYTES, self.checkpoints_dir)
        try:
            image = self._client.staging.view(layout.size_bytes)
            if self._staged_layout is not layout:
                for offset, constant in layout.constants:
                    image[offset : offset + len(constant)] = np.frombuffer(constant, np.uint8)
                self._staged_layout = layout
            table.copy_into(image, layout.storage_offsets)
            failpoint("checkpoint.staged")
        except OSError as error:
            raise CheckpointError(f"staging {stem} failed: {error.strerror or error}") from error
        self._client.send(
            SaveRequest(
                stem=stem,
                suffix=SUFFIXES[self._format],
                size_bytes=layout.size_bytes,
                crcs=layout.crcs,
                floats=layout.floats,
                meta=self._build_meta(content, trees, layout),
                author_files=_filled_folder(content.author_files),
            )
        )
        self._in_flight = _InFlight(
            content=replace(content, state={}),  # free a state gathered from shards: it was copied
            started_s=started_s,
            blocked_s=time.monotonic() - started_s,
        )

    def begin_checkpoint(
        self, content: CheckpointContent, *, trainer: TrainerPlugin, state: Any, ctx: StepContext
    ) -> None:
        """`save_checkpoint`, with the files of the author's own `save_checkpoint` hook, if there is one."""
        if getattr(trainer, "save_checkpoint", None) is not None:
            step, final = content.step, content.final
            folder = self.author_dir(step, final)
            payload = save_author_files(trainer, state, ctx, step=step, final=final, folder=folder)
            content = replace(content, author_files=folder, author_payload=payload)
        self.save_checkpoint(content)

    def write_checkpoint(
        self,
        *,
        step: int,
        state_payload: Mapping[str, Any],
        trainer: TrainerPlugin,
        state: Any,
        ctx: StepContext,
    ) -> str:
        """Save, and return the path once the checkpoint is durable and verified. For a caller's own loop."""
        return self._write(step, state_payload, trainer, state, ctx, final=False)

    def finalize(
        self, *, state_payload: Mapping[str, Any], trainer: TrainerPlugin, state: Any, ctx: StepContext
    ) -> str:
        """`write_checkpoint` of the last step."""
        return self._write(ctx.step, state_payload, trainer, state, ctx, final=True)

    def _write(
        self,
        step: int,
        payload: Mapping[str, Any],
        trainer: TrainerPlugin,
        state: Any,
        ctx: StepContext,
        *,
        final: bool,
    ) -> str:
        content = CheckpointContent(
            step=step,
            epoch=ctx.epoch,
            final=final,
            state=payload,
            loop={},
            cursor=None,
            rng=capture_rng(),
            identity={},
        )
        self.begin_checkpoint(content, trainer=trainer, state=state, ctx=ctx)
        return str(self.wait()[-1].path)

    def write_samples(self, *, step: int, state: Any, ctx: StepContext) -> list[str]:
        """Call the `sample` hook and commit what it wrote: the paths. Empty where the class has no such hook."""
        if self._trainer is None:
            raise CheckpointError(
                "this writer has no trainer class to sample with: use ArtifactWriter(…, trainer=…)"
            )
        if getattr(self._trainer, "sample", None) is None:
            return []
        folder, num_before = self.sample_dir(step), ctx.artifacts.num_reported
        ask_for_samples(self._trainer, state, ctx, step=step, folder=folder)
        has_reported = (
            ctx.artifacts.num_reported > num_before
        )  # by a recorder: a resume must not sample again
        return [str(sample.path) for sample in self._samples.commit(step, folder, is_complete=has_reported)]

    def author_dir(self, step: int, final: bool) -> Path:
        """A new folder for the author's `save_checkpoint` hook; pass it as `author_files`."""
        self._num_author_dirs += 1
        stem = checkpoint_stem(step, final=final)
        path = self.checkpoints_dir / f"{stem}.files.tmp-{self._token}-{self._num_author_dirs}"
        path.mkdir()
        return path

    def poll(self) -> list[SavedCheckpoint]:
        """What was completed since the last call. Never blocks. Asks the writer once a millisecond at most."""
        if self._in_flight is not None and (now := time.monotonic()) >= self._next_poll_s:
            self._next_poll_s = now + POLL_EVERY_S
            self._take_reports(0.0)
        if not self._completed:
            return []
        completed, self._completed = self._completed, []
        return completed

    def wait(self, timeout_s: float | None = None) -> list[SavedCheckpoint]:
        """`poll`, after waiting until the save in progress is durable and verified, or for `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._in_flight is not None:
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                break
            self._take_reports(remaining)
        return self.poll()

    def sample_dir(self, step: int) -> Path:
        """A new folder for the author's `sample` hook."""
        return self._samples.open(step)

    def has_sample(self, step: int) -> bool:
        """True once the sample of that step was committed, also by an earlier attempt."""
        return self._samples.has(step)

    def write_sample(self, step: int, produced: Path) -> list[SavedSample]:
        """Commit what the hook wrote as `samples/step-%08d/`. An empty file is an error."""
        return self._samples.commit(step, produced)

    def close(self) -> None:
        """Wait for the save in progress and stop the writer. A failure of it is logged."""
        try:
            self.wait()
        except CheckpointError as error:
            _log.error("%s", error)
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take_reports(self, timeout_s: float | None) -> None:
        save = self._in_flight
        assert save is not None
        try:
            for report in self._client.receive(timeout_s):
                if isinstance(report, Durable):
                    save.durable_s = report.at_s
                else:
                    self._in_flight = None
                    self._completed.append(self._saved(save, report))
        except CheckpointError:
            self._in_flight = None
            raise

    def _saved(self, save: _InFlight, done: Done) -> SavedCheckpoint:
        for warning in done.warnings:
            _log.warning("%s", warning)
        content = save.content
        assert save.durable_s is not None
        return SavedCheckpoint(
            path=self.checkpoints_dir / done.files[0].name,
            meta_path=self.checkpoints_dir
            / (checkpoint_stem(content.step, final=content.final) + META_SUFFIX),
            step=content.step,
            final=content.final,
            verified=done.verified,
            reason=done.reason,
            size_bytes=sum(file.size_bytes for file in done.files),
            duration_s=save.durable_s - save.started_s,
            blocked_s=save.blocked_s,
            removed=list(done.removed),
            files=done.files,
        )

    def _find_layout(self, table: TensorTable) -> FileLayout:
        """The layout of these tensors, cached for states of the same structure."""
        key = table.finish()
        if self._layout is None or key != self._layout_key:
            layout = build_layout(self._format, *key)
            floats = tuple(
                msgspec.structs.replace(item, may_be_infinite=True)
                if is_infinite_part(item.name, self.infinite_parts)
                else item
                for item in layout.floats
            )
            self._layout = replace(layout, floats=floats)
            self._layout_key = key
        return self._layout

    def _build_meta(
        self, content: CheckpointContent, trees: Mapping[str, msgspec.Raw], layout: FileLayout
    ) -> CheckpointMeta:
        return CheckpointMeta(
            run_id=self._run_id,
            nonce=self._nonce,
            attempt=self._attempt,
            step=content.step,
            epoch=content.epoch,
            final=content.final,
            format=self._format,
            byteorder=sys.byteorder,
            metric=_build_metric(content.metric),
            storages=layout.storages,
            tensors=layout.tensors,
            state=trees["state"],
            loop=trees["loop"],
            cursor=trees["cursor"],
            rng=trees["rng"],
            identity=trees["identity"],
            author_payload=trees["author_payload"],
        )


def _encode_trees(content: CheckpointContent, table: TensorTable) -> dict[str, msgspec.Raw]:
    trees: dict[str, msgspec.Raw] = {}
    for field in ("state", "loop", "cursor", "rng", "identity", "author_payload"):
        value: Any = getattr(content, field)
        table.is_state = field == "state"
        prefix = "" if field == "state" else f"{field}."
        tree = encode(None if value is None else dict(value), table, root=field, name_prefix=prefix)
        trees[field] = msgspec.Raw(msgspec.json.encode(tree))
    return trees


def _build_metric(metric: tuple[str, float, str] | None) -> Metric | None:
    if metric is None:
        return None
    name, value, mode = metric
    if mode not in ("min", "max"):
        raise CheckpointError(f"metric {name!r} has mode {mode!r}, expected min or max")
    return Metric(
        name=name, value=float(value) if np.isfinite(value) else None, mode="max" if mode == "max" else "min"
    )


def _filled_folder(path: Path | None) -> str | None:
    """The author's folder, or None (and removed) if it is empty."""
    if path is None:
        return None
    if not any(path.iterdir()):
        path.rmdir()
        return None
    return str(path)
