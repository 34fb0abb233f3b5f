"""What authors import. Names load on first use: `import gen_worker.trainer` alone imports nothing heavy."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gen_worker.contract.job.spec import TrainingJobSpec as TrainingJobSpec
    from gen_worker.contract.subprocess_contract import (
        TrainerSubprocessContractV1 as TrainerSubprocessContractV1,
    )
    from gen_worker.contract.subprocess_contract import read_subprocess_contract as read_subprocess_contract
    from gen_worker.contract.subprocess_contract import write_subprocess_contract as write_subprocess_contract
    from gen_worker.errors import TrainingCanceled as TrainingCanceled
    from gen_worker.trainer.api import load_trainer_plugin as load_trainer_plugin
    from gen_worker.trainer.arrow_feed import batch_to_torch as batch_to_torch
    from gen_worker.trainer.artifacts import ArtifactWriter as ArtifactWriter
    from gen_worker.trainer.attempt.state import MetricsRecord as MetricsRecord
    from gen_worker.trainer.attempt.state import TrainerState as TrainerState
    from gen_worker.trainer.attempt.trainer_config import TrainerConfig as TrainerConfig
    from gen_worker.trainer.authz import TrainerAuthContext as TrainerAuthContext
    from gen_worker.trainer.callbacks import Callback as Callback
    from gen_worker.trainer.callbacks import EarlyStopping as EarlyStopping
    from gen_worker.trainer.callbacks import JsonlLogger as JsonlLogger
    from gen_worker.trainer.callbacks import LearningRateMonitor as LearningRateMonitor
    from gen_worker.trainer.callbacks import MLflowLogger as MLflowLogger
    from gen_worker.trainer.callbacks import ModelCheckpoint as ModelCheckpoint
    from gen_worker.trainer.callbacks import NonFiniteGuard as NonFiniteGuard
    from gen_worker.trainer.callbacks import ProgressBar as ProgressBar
    from gen_worker.trainer.callbacks import RunHandle as RunHandle
    from gen_worker.trainer.callbacks import TensorBoardLogger as TensorBoardLogger
    from gen_worker.trainer.callbacks import ThroughputMonitor as ThroughputMonitor
    from gen_worker.trainer.callbacks import WandbLogger as WandbLogger
    from gen_worker.trainer.checkpoints.export import export_checkpoint as export_checkpoint
    from gen_worker.trainer.checkpoints.export import load_checkpoint as load_checkpoint
    from gen_worker.trainer.compute.optim import build_default_adamw_bundle as build_default_adamw_bundle
    from gen_worker.trainer.compute.repro import seed_everything as seed_everything
    from gen_worker.trainer.compute.repro import to_float_scalar as to_float_scalar
    from gen_worker.trainer.compute.trainable_module import (
        load_trainable_module_checkpoint as load_trainable_module_checkpoint,
    )
    from gen_worker.trainer.compute.trainable_module import (
        save_trainable_module_checkpoint as save_trainable_module_checkpoint,
    )
    from gen_worker.trainer.contracts import SampleRequest as SampleRequest
    from gen_worker.trainer.contracts import StepContext as StepContext
    from gen_worker.trainer.contracts import StepControlHints as StepControlHints
    from gen_worker.trainer.contracts import StepResult as StepResult
    from gen_worker.trainer.contracts import TrainerPlugin as TrainerPlugin
    from gen_worker.trainer.datasets.index import DatasetIndex as DatasetIndex
    from gen_worker.trainer.datasets.shard_loader import ShardLoader as ShardLoader
    from gen_worker.trainer.processes.distributed import distribute_module as distribute_module
    from gen_worker.trainer.processes.distributed import global_rows as global_rows
    from gen_worker.trainer.reporting import TrainingReporter as TrainingReporter
    from gen_worker.trainer.steps.direct_loop import run_training_loop as run_training_loop
    from gen_worker.trainer.trainer import Trainer as Trainer
    from gen_worker.trainer.trainer import TrainerInterface as TrainerInterface
    from gen_worker.trainer.uploader import ArtifactUploader as ArtifactUploader

_HOME = {
    "ArtifactUploader": "gen_worker.trainer.uploader",
    "ArtifactWriter": "gen_worker.trainer.artifacts",
    "Callback": "gen_worker.trainer.callbacks",
    "DatasetIndex": "gen_worker.trainer.datasets.index",
    "EarlyStopping": "gen_worker.trainer.callbacks",
    "JsonlLogger": "gen_worker.trainer.callbacks",
    "LearningRateMonitor": "gen_worker.trainer.callbacks",
    "MLflowLogger": "gen_worker.trainer.callbacks",
    "MetricsRecord": "gen_worker.trainer.attempt.state",
    "ModelCheckpoint": "gen_worker.trainer.callbacks",
    "NonFiniteGuard": "gen_worker.trainer.callbacks",
    "ProgressBar": "gen_worker.trainer.callbacks",
    "RunHandle": "gen_worker.trainer.callbacks",
    "SampleRequest": "gen_worker.trainer.contracts",
    "ShardLoader": "gen_worker.trainer.datasets.shard_loader",
    "StepContext": "gen_worker.trainer.contracts",
    "StepControlHints": "gen_worker.trainer.contracts",
    "StepResult": "gen_worker.trainer.contracts",
    "TensorBoardLogger": "gen_worker.trainer.callbacks",
    "ThroughputMonitor": "gen_worker.trainer.callbacks",
    "Trainer": "gen_worker.trainer.trainer",
    "TrainerAuthContext": "gen_worker.trainer.authz",
    "TrainerConfig": "gen_worker.trainer.attempt.trainer_config",
    "TrainerInterface": "gen_worker.trainer.trainer",
    "TrainerPlugin": "gen_worker.trainer.contracts",
    "TrainerState": "gen_worker.trainer.attempt.state",
    "TrainerSubprocessContractV1": "gen_worker.contract.subprocess_contract",
    "TrainingCanceled": "gen_worker.errors",
    "TrainingJobSpec": "gen_worker.trainer.contracts",
    "TrainingReporter": "gen_worker.trainer.reporting",
    "WandbLogger": "gen_worker.trainer.callbacks",
    "batch_to_torch": "gen_worker.trainer.arrow_feed",
    "build_default_adamw_bundle": "gen_worker.trainer.compute.optim",
    "distribute_module": "gen_worker.trainer.processes.distributed",
    "export_checkpoint": "gen_worker.trainer.checkpoints.export",
    "global_rows": "gen_worker.trainer.processes.distributed",
    "load_checkpoint": "gen_worker.trainer.checkpoints.export",
    "load_trainable_module_checkpoint": "gen_worker.trainer.compute.trainable_module",
    "load_trainer_plugin": "gen_worker.trainer.api",
    "read_subprocess_contract": "gen_worker.contract.subprocess_contract",
    "run_training_loop": "gen_worker.trainer.steps.direct_loop",
    "save_trainable_module_checkpoint": "gen_worker.trainer.compute.trainable_module",
    "seed_everything": "gen_worker.trainer.compute.repro",
    "to_float_scalar": "gen_worker.trainer.compute.repro",
    "write_subprocess_contract": "gen_worker.contract.subprocess_contract",
}

__all__ = sorted(_HOME)  # noqa: PLE0605  (a list of names, made from the table above)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
