"""Every error a worker reports, with its category and exit code.

WorkerError
├── StartupError      startup     the worker was asked for something it cannot begin
│   ├── SpecError                 the job document has faults (all of them, at once)
│   ├── PluginError               `module:symbol` does not name a sound trainer class
│   │   ├── PluginTypeError       also a TypeError: what it names is no class, or lacks hooks
│   │   └── PluginValueError      also a ValueError: it names nothing, or several candidates
│   └── LeaseHeldError            another worker is training this run
├── InputError        input       data, weights or a resume source is missing, changed or corrupt
│   └── CheckpointError           a checkpoint cannot be written or does not verify
├── AuthError         auth        a capability token is missing, expired or not valid for this run
├── ModelLoadError    model-load  the trainer class failed in `setup`, `configure` or loading its state
├── TrainStepError    train-step  the trainer class failed while training
│   └── StepResultError           also a TypeError: `train_step` returned something else than a result
├── UploadError       upload      an artifact could not be delivered; the local copy is safe
├── TrainingCanceled  cancelled   asked to stop; resumable
└── TrainingTimeout   timeout     the time limit was reached; resumable
"""

from enum import IntEnum, StrEnum


class Category(StrEnum):
    """Why an attempt ended, as written in its `failed` event."""

    STARTUP = "startup"
    INPUT = "input"
    AUTH = "auth"
    MODEL_LOAD = "model-load"
    TRAIN_STEP = "train-step"
    UPLOAD = "upload"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"


class Cause(StrEnum):
    """What a failure came from, where an exception's type says more than its category: `cause` of its `failed` event."""

    CONNECTION = "connection"  # to other processes, or to storage, broke or timed out
    OUT_OF_MEMORY = "out-of-memory"  # the allocation failed, on the machine or on the device
    DISK_FULL = "disk-full"  # no space left, or over quota


class ExitCode(IntEnum):
    """How a worker process ends. 75 and 76 mean: saved, run it again to go on."""

    COMPLETED = 0
    BUG = 1
    STARTUP = 10
    INPUT = 11
    AUTH = 12
    MODEL_LOAD = 13
    TRAIN_STEP = 14
    UPLOAD = 15
    CANCELLED = 75
    TIMEOUT = 76


EXIT_CODE_BY_CATEGORY: dict[Category, ExitCode] = {category: ExitCode[category.name] for category in Category}


class WorkerError(Exception):
    """Base of all errors that a person should read; tracebacks are for the others."""

    category: Category = Category.STARTUP
    cause: str = ""  # a Cause, or the signal that killed a process of the run

    @property
    def exit_code(self) -> ExitCode:
        return EXIT_CODE_BY_CATEGORY[self.category]


class StartupError(WorkerError):
    category = Category.STARTUP


class SpecError(StartupError):
    """Holds every fault of a document; the message lists them one a line."""

    def __init__(self, source: str, faults: list[str]) -> None:
        self.source = source
        self.faults = faults
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        super().__init__("\n".join([f"{source}: {count}", *(f"  - {fault}" for fault in faults)]))


class PluginError(StartupError):
    pass


class PluginTypeError(PluginError, TypeError):
    pass


class PluginValueError(PluginError, ValueError):
    pass


class LeaseHeldError(StartupError):
    pass


class InputError(WorkerError):
    """`faults` lists them one by one where the message names several."""

    category = Category.INPUT

    def __init__(self, *words: object, faults: list[str] | None = None) -> None:
        super().__init__(*words)
        self.faults = faults or []


class CheckpointError(InputError):
    pass


class AuthError(WorkerError):
    category = Category.AUTH


class ModelLoadError(WorkerError):
    category = Category.MODEL_LOAD


class TrainStepError(WorkerError):
    category = Category.TRAIN_STEP


class StepResultError(TrainStepError, TypeError):
    pass


class UploadError(WorkerError):
    category = Category.UPLOAD


class _Stop(WorkerError):  # noqa: N818  (nothing went wrong)
    """Training was asked to stop. What matters is what was saved, which the notes tell."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of a traceback."""
        return [f"{type(self).__name__}: {self}", *getattr(self, "__notes__", ())]


class TrainingCanceled(_Stop):
    category = Category.CANCELLED


class TrainingTimeout(_Stop):
    category = Category.TIMEOUT
