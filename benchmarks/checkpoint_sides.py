"""The sides of the checkpoint benchmark: one interpreter each, kept for all rounds, all saving the same 403 MB.

State: 64 fp32 tensors (the size of a model with AdamW's moments). Every round touches it first, so that no side pays
for pages that were taken from an idle process. blocked: the training thread cannot run. durable: from the call until
the bytes are fsynced. lost: what small training steps took longer while the save ran behind them than the mean of the
steps before and after it. The stand-in steps do not change the saved state.
"""

import hashlib
import mmap
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from harness import Prepare, Round, Sample, scratch_dir, serve
from loop_work import SmallModel

NUM_TENSORS = 64
SHAPE = (1024, 1537)  # 64 of them in fp32: 402.9 MB
STEADY_S = 0.5
WRITE_PIECE = 8 << 20


def make_state() -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    noise = torch.randn(*SHAPE)
    return {f"tensor_{number:02d}": noise + number for number in range(NUM_TENSORS)}


def touch(state: Mapping[str, Any]) -> None:
    for tensor in state.values():
        tensor.add_(0)


def make_folder() -> Path:
    return Path(tempfile.mkdtemp(dir=scratch_dir(), prefix="checkpoint-"))


def sync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# --- limits and blocking saves -------------------------------------------------------------------------------------


def memcpy(_: Mapping[str, Any]) -> Round:
    """Limit: copy the bytes into buffers that are kept and resident."""
    import torch

    state = make_state()
    kept = {name: torch.empty_like(tensor) for name, tensor in state.items()}

    def copy() -> float:
        started = time.perf_counter()
        for name, tensor in state.items():
            kept[name].copy_(tensor)
        return 1e3 * (time.perf_counter() - started)

    def run_round() -> Sample:
        touch(state)
        copy()  # warm
        return {"blocked_ms": copy()}

    return run_round


def blocking_side(save: Callable[[Mapping[str, Any], Path], None]) -> Prepare:
    """A save that holds the training thread until the bytes are durable."""

    def prepare(_: Mapping[str, Any]) -> Round:
        state = make_state()

        def save_once() -> float:
            folder = make_folder()
            try:
                started = time.perf_counter()
                save(state, folder)
                return time.perf_counter() - started
            finally:
                shutil.rmtree(folder)

        def run_round() -> Sample:
            touch(state)
            save_once()  # warm: a virtual machine is slow to hand out memory for the page cache the first time
            taken_s = save_once()
            return {"blocked_ms": 1e3 * taken_s, "durable_s": taken_s}

        return run_round

    return prepare


def write_and_sync(state: Mapping[str, Any], folder: Path) -> None:
    """Limit: the raw bytes, one after the other, and an fsync. No format, no hash, no rename."""
    with (folder / "raw").open("wb", buffering=0) as file:
        for tensor in state.values():
            data = memoryview(tensor.numpy()).cast("B")
            for start in range(0, len(data), WRITE_PIECE):
                file.write(data[start : start + WRITE_PIECE])
        os.fsync(file.fileno())


def torch_save(state: Mapping[str, Any], folder: Path) -> None:
    """torch.save and an fsync."""
    import torch

    torch.save(dict(state), folder / "saved.pt")
    sync_file(folder / "saved.pt")


# --- saves in the background ---------------------------------------------------------------------------------------


def save_beside_steps(
    model: SmallModel, begin: Callable[[], None], is_done: Callable[[], bool]
) -> dict[str, float]:
    """Steady steps, the save with steps beside it until `is_done`, steady steps."""
    clock = time.perf_counter

    def steady_step_s() -> float:
        started, count = clock(), 0
        while clock() - started < STEADY_S:
            model.step(model.batch)
            count += 1
        return (clock() - started) / count

    before_s = steady_step_s()
    called = clock()
    begin()
    returned = clock()
    count, worst_s = 0, 0.0
    while True:
        step_started = clock()
        model.step(model.batch)
        count += 1
        done = is_done()
        worst_s = max(worst_s, clock() - step_started)
        if done:
            break
    ended = clock()
    after_s = steady_step_s()
    usual_s = (before_s + after_s) / 2
    return {
        "blocked_ms": 1e3 * (returned - called),
        "done_s": ended - called,
        "lost_ms": 1e3 * ((ended - returned) - count * usual_s),
        "worst_step_ms": 1e3 * worst_s,
        "usual_step_ms": 1e3 * usual_s,
    }


def ours(options: Mapping[str, Any]) -> Round:
    """ArtifactWriter as the loop uses it: `save_checkpoint`, then a `poll` after every step until it is reported.

    durable is the writer's own time (written, hashed, synced with its folder, renamed, meta committed); `done` also
    has the read-back. Steps run beside all of it. keep_last=1, so retention is at work too.
    """
    from gen_worker.trainer.artifacts import ArtifactWriter, CheckpointContent

    state, model, folder = make_state(), SmallModel(), make_folder()
    writer = ArtifactWriter(
        folder / "checkpoints", folder / "samples", run_id="bench", keep_last=1, format=options["format"]
    )
    writer.start()
    step = 0

    def run_round() -> Sample:
        nonlocal step
        step += 1
        content = CheckpointContent(
            step=step, epoch=0, final=False, state=state, loop={}, cursor=None, rng={}, identity={}
        )
        saved: list[Any] = []

        def is_done() -> bool:
            saved.extend(writer.poll())
            return bool(saved)

        touch(state)
        sample = save_beside_steps(model, lambda: writer.save_checkpoint(content), is_done)
        assert saved[0].verified, saved[0].reason
        return {**sample, "durable_s": saved[0].duration_s}

    return _with_cleanup(run_round, writer.close, folder)


def copy_and_hash(_: Mapping[str, Any]) -> Round:
    """Limit of a save that blocks for one copy and commits with a SHA-256: a warm copy, then the hash in another process.

    Nothing is written. The process is as nice as our writer; what it takes from the steps, no writer can give back.
    """
    from gen_worker.trainer.checkpoints.writing.writer import NICENESS

    is_hashed, (ours_end, theirs) = mmap.mmap(-1, mmap.PAGESIZE), socket.socketpair()
    if os.fork() == 0:
        ours_end.close()
        os.nice(NICENESS)
        views = [memoryview(tensor.numpy()).cast("B") for tensor in make_state().values()]
        while theirs.recv(1):
            digest = hashlib.sha256()
            for view in views:
                digest.update(view)
            is_hashed[0] = 1
        os._exit(0)
    theirs.close()
    state, model, folder = make_state(), SmallModel(), make_folder()
    kept = [tensor.clone() for tensor in state.values()]

    def begin() -> None:
        for tensor, copy in zip(state.values(), kept, strict=True):
            copy.copy_(tensor)
        is_hashed[0] = 0
        ours_end.send(b"\0")

    def run_round() -> Sample:
        touch(state)
        sample = save_beside_steps(model, begin, lambda: is_hashed[0] == 1)
        return {**sample, "durable_s": sample["done_s"]}

    return _with_cleanup(run_round, ours_end.close, folder)


def dcp_async(_: Mapping[str, Any]) -> Round:
    """torch.distributed.checkpoint.async_save, its defaults; it syncs its files itself."""
    import torch.distributed.checkpoint as dcp

    state, model, folder = make_state(), SmallModel(), make_folder()

    def run_round() -> Sample:
        target = folder / "dcp"
        shutil.rmtree(target, ignore_errors=True)
        pending: list[Any] = []
        touch(state)
        sample = save_beside_steps(
            model,
            lambda: pending.append(dcp.async_save(dict(state), checkpoint_id=str(target), no_dist=True)),
            lambda: bool(pending[0].done()),
        )
        pending[0].result()
        return {**sample, "durable_s": sample["done_s"]}

    return _with_cleanup(run_round, lambda: None, folder)


def lightning_async(_: Mapping[str, Any]) -> Round:
    """Lightning's AsyncCheckpointIO over its TorchCheckpointIO, with the fsync that it leaves out done in its thread."""
    from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

    state, model, folder = make_state(), SmallModel(), make_folder()
    written = threading.Event()

    class SyncedIO(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            super().save_checkpoint(checkpoint, path, storage_options)
            sync_file(Path(path))
            written.set()

    saver = AsyncCheckpointIO(SyncedIO())

    def run_round() -> Sample:
        written.clear()
        (folder / "saved.ckpt").unlink(missing_ok=True)
        touch(state)
        sample = save_beside_steps(
            model, lambda: saver.save_checkpoint(dict(state), str(folder / "saved.ckpt")), written.is_set
        )
        return {**sample, "durable_s": sample["done_s"]}

    return _with_cleanup(run_round, saver.teardown, folder)


def no_save(options: Mapping[str, Any]) -> Round:
    """Control: the same steps with nothing behind them for as long; what it loses is the machine's own noise."""
    model = SmallModel()

    def run_round() -> Sample:
        until = time.perf_counter() + options["seconds"] + STEADY_S
        return save_beside_steps(model, lambda: None, lambda: time.perf_counter() > until)

    return run_round


def _with_cleanup(run_round: Round, close: Callable[[], None], folder: Path) -> Round:
    """One unmeasured round first (buffers, processes and code paths warm), the folder removed at the end."""
    import atexit

    def clean_up() -> None:
        close()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(clean_up)
    run_round()
    return run_round


SIDES: dict[str, Prepare] = {
    "ours": ours,
    "memcpy": memcpy,
    "write": blocking_side(write_and_sync),
    "torch_save": blocking_side(torch_save),
    "copy_and_hash": copy_and_hash,
    "dcp_async": dcp_async,
    "lightning_async": lightning_async,
    "no_save": no_save,
}

if __name__ == "__main__":
    serve(SIDES)
