"""The sides of the trainer benchmark, each in an interpreter of its own: what callbacks and validation cost.

A round of a callback side is bare, without, with, without, bare: the same two hooks in a bare loop, a trainer without
callbacks, and with them; what is reported is the difference to the mean of the two beside it. `ClockedBatches` sees to
it that no trainer's start and end is counted.
"""

import contextlib
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import loop_peers
import training_data
from harness import Prepare, Round, Sample, scratch_dir, serve
from loop_work import (
    METRIC_EVERY,
    ClockedBatches,
    Drive,
    NullTrainer,
    SmallModel,
    SmallModelTrainer,
    bare_null,
)
from pseudo_terminal import PseudoTerminal

VALIDATE_EVERY = 1_000
MODEL_VALIDATE_EVERY = 100
HELD_OUT_BATCH_SIZE = 64
MakeCallbacks = Callable[[Any], Sequence[Any]]


def step_us(drive: Drive, batch: Any, num_steps: int) -> float:
    batches = ClockedBatches(batch, num_steps)
    drive(batches)
    return batches.step_us


def compare(bare: Drive, without: Drive, with_: Drive, batch: Any, *, bare_steps: int, steps: int) -> Sample:
    bare_before = step_us(bare, batch, bare_steps)
    before = step_us(without, batch, steps)
    driven = step_us(with_, batch, steps)
    after = step_us(without, batch, steps)
    bare_after = step_us(bare, batch, bare_steps)
    bare_us, without_us = (bare_before + bare_after) / 2, (before + after) / 2
    return {
        "more_us": driven - without_us,
        "more_ratio": driven / without_us,
        "above_us": driven - bare_us,
        "without_above_us": without_us - bare_us,
        "step_us": driven,
        "bare_us": bare_us,
    }


def make_side(make: Callable[[Mapping[str, Any]], tuple[Any, Drive, Drive, Drive]]) -> Prepare:
    """`make(options)` gives the batch, and the bare drive, that without and that with callbacks."""

    def prepare(options: Mapping[str, Any]) -> Round:
        bare_steps, steps = options["bare_steps"], options["steps"]
        batch, bare, without, with_ = make(options)

        def run(divisor: int) -> Sample:
            least = min(50, steps)
            return compare(
                bare,
                without,
                with_,
                batch,
                bare_steps=max(bare_steps // divisor, least),
                steps=max(steps // divisor, least),
            )

        run(20)  # warm
        return lambda: run(1)

    return prepare


# --- ours ----------------------------------------------------------------------------------------------------------


class ValidatedNull(NullTrainer):
    """The null step, and a null step of validation."""

    def __init__(self) -> None:
        super().__init__()
        self._found = {"loss": 0.5}

    def validate_step(self, batch: Any, state: Any, ctx: Any) -> Any:
        return self._found


class ValidatedSmallModel(SmallModelTrainer):
    def validate_step(self, batch: Any, state: Any, ctx: Any) -> Any:
        x, y = batch
        return {"loss": self._model.mse_loss(self._model.module(x), y)}


def drive_trainer(
    trainer: Any,
    make_callbacks: MakeCallbacks,
    *,
    held_out: Any = None,
    validate_every: int = 0,
    batch_size: int = 32,  # of held-out files; what is given as batches has its own
) -> Drive:
    """`Trainer` as a program uses it, with all that is on in a worker: events every 10 steps, heartbeat, signals, the
    checkpoint writer, the final checkpoint."""
    from gen_worker.trainer import Trainer, TrainerConfig

    config = TrainerConfig(
        epochs=1,
        batch_size=batch_size,
        metric_every=METRIC_EVERY,
        validate_every=validate_every,
        checkpoint_every=0,
    )

    def drive(batches: ClockedBatches) -> None:
        folder = Path(tempfile.mkdtemp(dir=scratch_dir(), prefix="trainer-"))
        try:
            with PseudoTerminal() as terminal:
                callbacks = make_callbacks(terminal.stream)
                record = Trainer(
                    trainer,
                    config,
                    train_data=batches,
                    validation_data=held_out,
                    callbacks=callbacks,
                    folder=folder,
                ).train()
            assert record.step == len(batches), f"it ended at step {record.step} of {len(batches)}"
            has_bar = any(type(item).__name__ == "ProgressBar" for item in callbacks)
            assert has_bar == (terminal.num_bytes > 0), f"the terminal was given {terminal.num_bytes} bytes"
            events = (folder / "metrics" / "events.jsonl").read_bytes()
            count = events.count(b'"train/loss"')
            assert count == len(batches) // METRIC_EVERY, f"{count} losses for {len(batches)} steps"
        finally:
            shutil.rmtree(folder)

    return drive


def no_callbacks(_: Any) -> Sequence[Any]:
    return ()


def three_that_look_on(_: Any) -> Sequence[Any]:
    """Every hook but the two of a batch, each doing as little as can be."""
    from gen_worker.trainer import Callback

    class LooksOn(Callback):
        def __init__(self) -> None:
            self._num_calls = 0

        def on_metrics(self, run: Any, values: Any) -> None:
            self._num_calls += 1

        def on_train_begin(self, run: Any) -> None: ...
        def on_epoch_begin(self, run: Any) -> None: ...
        def on_validation_begin(self, run: Any) -> None: ...
        def on_validation_end(self, run: Any, record: Any) -> None: ...
        def on_epoch_end(self, run: Any) -> None: ...
        def on_checkpoint(self, run: Any, checkpoint: Any) -> None: ...
        def on_train_end(self, run: Any) -> None: ...

    return LooksOn(), LooksOn(), LooksOn()


def three_shipped(stream: Any) -> Sequence[Any]:
    """Early stopping that never stops, throughput, and a bar on a terminal."""
    from gen_worker.trainer.callbacks import EarlyStopping, ProgressBar, ThroughputMonitor

    return EarlyStopping(patience=1_000_000_000), ThroughputMonitor(), ProgressBar(stream=stream)


ONE_SHIPPED: dict[str, MakeCallbacks] = {
    "early_stopping": lambda stream: three_shipped(stream)[:1],
    "throughput": lambda stream: three_shipped(stream)[1:2],
    "bar": lambda stream: three_shipped(stream)[2:],
}


def looking_on(_: Mapping[str, Any]) -> Any:
    return (
        object(),
        bare_null,
        drive_trainer(NullTrainer(), no_callbacks),
        drive_trainer(NullTrainer(), three_that_look_on),
    )


def shipped(options: Mapping[str, Any]) -> Any:
    """Both with and without callbacks a tiny set is validated every 1000 steps: what that costs is in neither."""
    make_callbacks = ONE_SHIPPED.get(options.get("only", ""), three_shipped)
    held_out = [object(), object()]

    def drive(make: MakeCallbacks) -> Drive:
        return drive_trainer(ValidatedNull(), make, held_out=held_out, validate_every=VALIDATE_EVERY)

    return object(), bare_null, drive(no_callbacks), drive(make_callbacks)


def shipped_model(_: Mapping[str, Any]) -> Any:
    """The same around a small torch model, whose step takes some hundred microseconds."""
    model = SmallModel()

    def drive(make: MakeCallbacks) -> Drive:
        return drive_trainer(
            ValidatedSmallModel(model), make, held_out=[model.batch], validate_every=MODEL_VALIDATE_EVERY
        )

    return model.batch, model.run_bare, drive(no_callbacks), drive(three_shipped)


# --- peers ---------------------------------------------------------------------------------------------------------


def with_bar(make_null: Callable[..., Drive]) -> Callable[[Mapping[str, Any]], Any]:
    """A peer's trainer with everything off, and with nothing on but its own progress bar, at a terminal."""

    def make(_: Mapping[str, Any]) -> Any:
        without, barred = make_null(), make_null(has_bar=True)

        def drive(batches: ClockedBatches) -> None:
            with PseudoTerminal() as terminal:
                stream = terminal.stream
                with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
                    barred(batches)
            assert terminal.num_bytes > 0, "nothing was drawn"

        return object(), bare_null, without, drive

    return make


# --- validation ----------------------------------------------------------------------------------------------------


class MlpTrainer(NullTrainer):
    """A null step of training; validation goes through an MLP, 256-1024-1024-10."""

    def configure(self, ctx: Any) -> Any:
        import torch

        torch.set_num_threads(1)
        layer, relu = torch.nn.Linear, torch.nn.ReLU()
        return {
            "model": torch.nn.Sequential(layer(256, 1024), relu, layer(1024, 1024), relu, layer(1024, 10))
        }

    def prepare_batch(self, raw_batch: Any, state: Any, ctx: Any) -> Any:
        from gen_worker.trainer import batch_to_torch

        if not hasattr(raw_batch, "num_rows"):
            return raw_batch
        columns = batch_to_torch(raw_batch)
        return columns["x"], columns["label"]

    def validate_step(self, batch: Any, state: Any, ctx: Any) -> Any:
        import torch

        x, label = batch
        return {"loss": torch.nn.functional.cross_entropy(state["model"](x), label)}


class CallTimes:
    """When a method was called, whoever calls it."""

    def __init__(self, owner: type, name: str) -> None:
        self.times: list[float] = []
        original = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.times.append(time.perf_counter())
            return original(*args, **kwargs)

        setattr(owner, name, noted)

    def count_in(self, span: tuple[float, float]) -> int:
        return sum(span[0] < moment < span[1] for moment in self.times)


def validation(options: Mapping[str, Any]) -> Round:
    """Passes over held-out parquet files after the first one, against the same number of bare `validate_step` calls on
    batches that are ready. Also how often a feed was opened and a thread started in between."""
    from gen_worker.trainer.arrow_feed import ArrowFeed

    trainer = MlpTrainer()
    state = trainer.configure(None)
    every, num_passes = options["validate_every"], options["passes"]
    files = training_data.held_out()
    validated = drive_trainer(
        trainer, no_callbacks, held_out=files, validate_every=every, batch_size=HELD_OUT_BATCH_SIZE
    )
    plain = drive_trainer(trainer, no_callbacks)
    openings, starts = CallTimes(ArrowFeed, "batches"), CallTimes(threading.Thread, "start")
    ready = list(_prepared(trainer, state, files))

    def bare_pass_us() -> float:
        import torch

        state["model"].eval()
        started = time.perf_counter()
        with torch.no_grad():
            for _ in range(num_passes):
                for batch in ready:
                    trainer.validate_step(batch, state, None)
        return 1e6 * (time.perf_counter() - started) / num_passes

    def clocked(drive: Drive) -> ClockedBatches:
        batches = ClockedBatches(object(), num_passes * every, num_before=every)
        drive(batches)
        return batches

    def run_round() -> Sample:
        bare_before = bare_pass_us()
        before = clocked(plain).step_us
        batches = clocked(validated)
        after = clocked(plain).step_us
        bare_us = (bare_before + bare_pass_us()) / 2
        pass_us = (batches.step_us - (before + after) / 2) * every
        return {
            "ratio": pass_us / bare_us,
            "pass_ms": pass_us / 1e3,
            "bare_pass_ms": bare_us / 1e3,
            "more_us_per_batch": (pass_us - bare_us) / len(ready),
            "feed_openings": openings.count_in(batches.span),
            "thread_starts": starts.count_in(batches.span),
            "openings_and_starts": openings.count_in(batches.span) + starts.count_in(batches.span),
        }

    run_round()  # warm
    return run_round


def _prepared(trainer: Any, state: Any, files: list[str]) -> Iterator[Any]:
    from gen_worker.trainer.arrow_feed import ArrowFeed

    with ArrowFeed.open(files, batch_size=HELD_OUT_BATCH_SIZE) as feed:
        batches = feed.batches()
        for _ in range(feed.batches_per_epoch):
            yield trainer.prepare_batch(next(batches), state, None)


SIDES: dict[str, Prepare] = {
    "looking_on": make_side(looking_on),
    "shipped": make_side(shipped),
    "shipped_model": make_side(shipped_model),
    "lightning": make_side(with_bar(loop_peers.null_lightning)),
    "transformers": make_side(with_bar(loop_peers.null_transformers)),
    "validation": validation,
}

if __name__ == "__main__":
    serve(SIDES)
