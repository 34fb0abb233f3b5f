"""What authors import. Names load on first use, so that `import gen_worker.trainer` is cheap."""

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
    from gen_worker.trainer.contracts import RunArtifacts as RunArtifacts
    from gen_worker.trainer.contracts import SampleRequest as SampleRequest
    from gen_worker.trainer.contracts import StepContext as StepContext
    from gen_worker.trainer.contracts import StepControlHints as StepControlHints
    from gen_worker.trainer.contracts import StepResult as StepResult
    from gen_worker.trainer.contracts import TrainerPlugin as TrainerPlugin
    from gen_worker.trainer.datasets.index import DatasetIndex as DatasetIndex
    from gen_worker.trainer.datasets.shard_loader import ShardLoader as ShardLoader
    from gen_worker.trainer.processes.distributed import distribute_module as distribute_module
    from gen_worker.trainer.processes.distributed import global_rows as global_rows
    from gen_worker.trainer.recording.episode_recorder import EpisodeRecorder as EpisodeRecorder
    from gen_worker.trainer.reporting import TrainingReporter as TrainingReporter
    from gen_worker.trainer.steps.direct_loop import run_training_loop as run_training_loop
    from gen_worker.trainer.trainer import Trainer as Trainer
    from gen_worker.trainer.trainer import TrainerInterface as TrainerInterface
    from gen_worker.trainer.uploader import ArtifactUploader as ArtifactUploader

_NAMES = {  # module below gen_worker -> what it exports here
    "contract.subprocess_contract": "TrainerSubprocessContractV1 read_subprocess_contract"
    " write_subprocess_contract",
    "errors": "TrainingCanceled",
    "trainer.api": "load_trainer_plugin",
    "trainer.arrow_feed": "batch_to_torch",
    "trainer.artifacts": "ArtifactWriter",
    "trainer.attempt.state": "MetricsRecord TrainerState",
    "trainer.attempt.trainer_config": "TrainerConfig",
    "trainer.authz": "TrainerAuthContext",
    "trainer.callbacks": "Callback EarlyStopping JsonlLogger LearningRateMonitor MLflowLogger ModelCheckpoint NonFiniteGuard"
    " ProgressBar RunHandle TensorBoardLogger ThroughputMonitor WandbLogger",
    "trainer.checkpoints.export": "export_checkpoint load_checkpoint",
    "trainer.compute.optim": "build_default_adamw_bundle",
    "trainer.compute.repro": "seed_everything to_float_scalar",
    "trainer.compute.trainable_module": "load_trainable_module_checkpoint save_trainable_module_checkpoint",
    "trainer.contracts": "RunArtifacts SampleRequest StepContext StepControlHints StepResult"
    " TrainerPlugin TrainingJobSpec",
    "trainer.datasets.index": "DatasetIndex",
    "trainer.datasets.shard_loader": "ShardLoader",
    "trainer.processes.distributed": "distribute_module global_rows",
    "trainer.recording.episode_recorder": "EpisodeRecorder",
    "trainer.reporting": "TrainingReporter",
    "trainer.steps.direct_loop": "run_training_loop",
    "trainer.trainer": "Trainer TrainerInterface",
    "trainer.uploader": "ArtifactUploader",
}
_HOME = {name: f"gen_worker.{module}" for module, names in _NAMES.items() for name in names.split()}

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
