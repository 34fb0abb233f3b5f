"""The callback base class and the shipped callbacks. A job names them as `gen_worker.trainer.callbacks:Name`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gen_worker.trainer.callbacks.base import Callback as Callback
    from gen_worker.trainer.callbacks.base import RunHandle as RunHandle
    from gen_worker.trainer.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from gen_worker.trainer.callbacks.loggers import JsonlLogger as JsonlLogger
    from gen_worker.trainer.callbacks.loggers import MLflowLogger as MLflowLogger
    from gen_worker.trainer.callbacks.loggers import TensorBoardLogger as TensorBoardLogger
    from gen_worker.trainer.callbacks.loggers import WandbLogger as WandbLogger
    from gen_worker.trainer.callbacks.model_checkpoint import ModelCheckpoint as ModelCheckpoint
    from gen_worker.trainer.callbacks.monitors import LearningRateMonitor as LearningRateMonitor
    from gen_worker.trainer.callbacks.monitors import NonFiniteGuard as NonFiniteGuard
    from gen_worker.trainer.callbacks.monitors import ThroughputMonitor as ThroughputMonitor
    from gen_worker.trainer.callbacks.progress_bar import ProgressBar as ProgressBar

_HOME = {
    "Callback": "base",
    "EarlyStopping": "early_stopping",
    "JsonlLogger": "loggers",
    "LearningRateMonitor": "monitors",
    "MLflowLogger": "loggers",
    "ModelCheckpoint": "model_checkpoint",
    "NonFiniteGuard": "monitors",
    "ProgressBar": "progress_bar",
    "RunHandle": "base",
    "TensorBoardLogger": "loggers",
    "ThroughputMonitor": "monitors",
    "WandbLogger": "loggers",
}

__all__ = sorted(_HOME)  # noqa: PLE0605  (a list of names, made from the table above)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
