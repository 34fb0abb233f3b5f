"""The peers' loops around the work of `loop_work`. Each import stays in its function: a side loads its own peer only."""

import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from harness import scratch_dir
from loop_work import METRIC_EVERY, ClockedBatches, Drive, NullTrainer, SmallModel


def drive_ignite(step: Callable[[Any], Any], *, handler: bool) -> Drive:
    """Engine over the plain iterable; with `handler`, a JSON line flushed every 10 iterations, as in `hand`."""
    from ignite.engine import Engine, Events

    def drive(batches: ClockedBatches) -> None:
        engine = Engine(lambda _engine, batch: step(batch))
        with tempfile.TemporaryFile("w", dir=scratch_dir()) as events:
            if handler:

                @engine.on(Events.ITERATION_COMPLETED(every=METRIC_EVERY))
                def emit(engine: Any) -> None:
                    line = {
                        "event": "metric",
                        "timestamp_ms": time.time_ns() // 1_000_000,
                        "step": engine.state.iteration,
                    }
                    events.write(json.dumps({**line, "name": "train/loss", "value": 0.5}) + "\n")
                    events.flush()

            engine.run(batches, max_epochs=1, epoch_length=len(batches))

    return drive


def null_step() -> Callable[[Any], Any]:
    trainer = NullTrainer()
    return lambda batch: trainer.train_step(trainer.prepare_batch(batch, None, None), None, None)


def _loader(batches: ClockedBatches) -> Any:
    """What Fabric and accelerate wrap: a DataLoader in this process that hands the batches through."""
    import torch.utils.data as data

    class Stream(data.IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            return iter(batches)

    return data.DataLoader(Stream(), batch_size=None)


def null_fabric() -> Drive:
    """Only Fabric's loader is in the way: an empty step has no model and no optimizer to wrap."""
    import torch
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    step, batch = null_step(), torch.zeros(1)

    def drive(batches: ClockedBatches) -> None:
        batches._batch = batch
        for item in fabric.setup_dataloaders(_loader(batches)):
            step(item)

    return drive


def null_accelerate() -> Drive:
    """As for Fabric: accelerate's prepared loader alone."""
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    step, batch = null_step(), torch.zeros(1)

    def drive(batches: ClockedBatches) -> None:
        batches._batch = batch
        for item in accelerator.prepare(_loader(batches)):
            step(item)

    return drive


def _fit_lightning(module: Any, batches: Any, *, has_bar: bool = False) -> None:
    import lightning

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=has_bar,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, train_dataloaders=batches)


def null_lightning(*, has_bar: bool = False) -> Drive:
    """Trainer with everything off (but, where asked for, its progress bar), manual optimization, a training_step that
    only calls the null hooks."""
    import lightning
    import torch

    step, batch = null_step(), torch.zeros(1)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            step(batch)

        def configure_optimizers(self) -> None:
            return None

    def drive(batches: ClockedBatches) -> None:
        batches._batch = batch
        _fit_lightning(Module(), batches, has_bar=has_bar)

    return drive


def model_lightning(model: SmallModel) -> Drive:
    """Trainer with everything off and automatic optimization: the same forward, loss and SGD."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model.module

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            return model.mse_loss(self.net(x), y)

        def configure_optimizers(self) -> Any:
            return model.optimizer

    return lambda batches: _fit_lightning(Module(), batches)


def null_transformers(*, has_bar: bool = False) -> Drive:
    """HF Trainer without logging and, unless asked for, without its bar; training_step returns a kept zero. In its
    favour: a plain iterable in place of its DataLoader, no gradient clipping. Its optimizer and scheduler are still
    stepped, without gradients."""
    import torch
    import transformers

    step, kept = null_step(), torch.zeros(())

    class Trainer(transformers.Trainer):
        batches: Any = None

        def get_train_dataloader(self) -> Any:
            return self.batches

        def training_step(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            step(inputs)
            return kept

    def drive(batches: ClockedBatches) -> None:
        batches._batch = {"x": torch.zeros(1)}
        with tempfile.TemporaryDirectory(dir=scratch_dir()) as folder:
            arguments = transformers.TrainingArguments(
                output_dir=folder,
                max_steps=len(batches),
                use_cpu=True,
                disable_tqdm=not has_bar,
                report_to="none",
                logging_strategy="no",
                save_strategy="no",
                max_grad_norm=0.0,
            )
            trainer = Trainer(
                model=torch.nn.Linear(1, 1), args=arguments, train_dataset=[{"x": 0.0}] * len(batches)
            )
            trainer.batches = batches
            trainer.train()

    return drive
