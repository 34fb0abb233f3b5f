"""Every error a worker reports, with its category and exit code.

WorkerError
├── StartupError      startup     the worker cannot start what it was asked for
│   ├── SpecError                 the job has faults (lists all of them)
│   ├── PluginError               `module:symbol` does not name a valid trainer class
│   │   ├── PluginNotFoundError   there is no such module
│   │   ├── PluginTypeError       also a TypeError: not a class, or hooks are missing
│   │   └── PluginValueError      also a ValueError: nothing found, or several candidates
│   └── LeaseHeldError            another worker is training this run
├── InputError        input       data, weights or a resume source is missing, changed or corrupt
│   └── CheckpointError           a checkpoint cannot be written or does not verify
├── AuthError         auth        a capability token is missing, expired or not valid for this run
├── ModelLoadError    model-load  the trainer class failed in `setup`, `configure` or loading its state
├── TrainStepError    train-step  the trainer class failed while training
│   └── StepResultError           also a TypeError: `train_step` did not return a result
├── UploadError       upload      an upload failed; the local copy is kept
├── TrainingCanceled  cancelled   a stop was requested; resumable
└── TrainingTimeout   timeout     the time limit was reached; resumable
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum, StrEnum
from typing import Literal, Self


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
    """The cause of a failure, where the exception's type shows it: `cause` of the `failed` event."""

    CONNECTION = "connection"  # to other processes or to storage: lost or timed out
    OUT_OF_MEMORY = "out-of-memory"  # the allocation failed, on the machine or on the device
    DISK_FULL = "disk-full"  # no space left, or over quota


FaultSide = Literal["job", "machine", "trn"]

KILLED, CRASHED = "killed", "crashed"

# Whose fault it is, by the id of what a worker can report: a category, a Cause, or a signal.
FAULT_BY_CAUSE: dict[str, FaultSide] = {
    "startup": "job",
    "input": "job",
    "auth": "job",
    "model-load": "job",
    "train-step": "job",
    "upload": "machine",
    "timeout": "job",
    "connection": "machine",
    "disk-full": "machine",
    "out-of-memory": "machine",
    KILLED: "machine",
    CRASHED: "job",
}
_CRASHES = frozenset({"SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL"})


def cause_of_signal(name: str) -> str:
    """`crashed` for a signal that a process's own fault raises, `killed` for any other."""
    return CRASHED if name in _CRASHES else KILLED


def read_cause(cause: str, category: str) -> tuple[str, dict[str, object]]:
    """(id, values) of an event's `cause`. A signal's name stands for the kill by it; none, for the category."""
    if cause.startswith("SIG"):
        return cause_of_signal(cause), {"signal": cause}
    return cause or category, {}


# How a worker marks in its log what its events say, too: a line of its last report, the logger of its end, and that of
# what a model server answers with. A terminal that shows the events leaves them out.
REPORT_MARK = "gen_worker: "
END_LOGGER = "gen_worker.end"
NEWS_LOGGER = "gen_worker.news"


def mark_report(text: str) -> str:
    """The last report of a worker for its stderr, every line marked."""
    return "\n".join(f"{REPORT_MARK}{line}" for line in text.splitlines())


class ExitCode(IntEnum):
    """Exit codes of a worker. 75 and 76 mean: a checkpoint is saved, run the job again to resume."""

    COMPLETED = 0
    BUG = 1
    STARTUP = 10
    INPUT = 11
    AUTH = 12
    MODEL_LOAD = 13
    TRAIN_STEP = 14
    UPLOAD = 15
    DISK_FULL = 16
    CANCELLED = 75
    TIMEOUT = 76


EXIT_CODE_BY_CATEGORY: dict[Category, ExitCode] = {category: ExitCode[category.name] for category in Category}


FAULT_FIELDS = ("path", "kind", "found", "expected", "hint")


class Fault(str):
    """The sentence that people read; its attributes are the data that it was made from, for programs.

    `path` is the field (`dataset.parquet_paths[0]`), `kind` a stable id: `value`, `missing`, `unknown-field`, `rule`,
    `file`, `data`, `code`, `device`, `disk`, `log`. What does not apply is empty.
    """

    __slots__ = FAULT_FIELDS
    path: str
    kind: str
    found: str
    expected: str
    hint: str

    def __new__(
        cls,
        message: str,
        *,
        path: str = "",
        kind: str = "",
        found: str = "",
        expected: str = "",
        hint: str = "",
    ) -> Self:
        """`message` is the sentence without the path."""
        fault = super().__new__(cls, f"{path}: {message}" if path else message)
        fault.path, fault.kind, fault.found, fault.expected, fault.hint = path, kind, found, expected, hint
        return fault

    @property
    def text(self) -> str:
        return str(self)

    @classmethod
    def of_value(cls, path: str, found: str, expected: str, hint: str = "") -> Self:
        """A field whose value is not what it should be. Found and expected are shown as they are."""
        words = f"found {found}, expected {expected}{hint}"
        return cls(words, path=path, kind="value", found=found, expected=expected, hint=hint.strip(" ();:"))

    @classmethod
    def of(cls, text: str, kind: str = "") -> "Fault":
        """A fault as it is; a plain sentence becomes one that has no data but the kind."""
        return text if isinstance(text, Fault) else cls(text, kind=kind)

    def to_data(self) -> dict[str, str]:
        """For JSON: the sentence as `text`, and every field that is not empty."""
        return {"text": str(self), **{name: value for name in FAULT_FIELDS if (value := getattr(self, name))}}

    @classmethod
    def from_data(cls, data: Mapping[str, str]) -> "Fault":
        """What `to_data` made; fields that this release does not know are left out."""
        fault = cls(data.get("text", ""))
        for name in FAULT_FIELDS:
            setattr(fault, name, data.get(name, ""))
        return fault

    def changed(self, text: str) -> "Fault":
        """The same fault in other words: redacted, say."""
        return Fault.from_data({**self.to_data(), "text": text})


class WorkerError(Exception):
    """Base of all errors whose message is for people, without a traceback."""

    category: Category = Category.STARTUP
    cause: str = ""  # a Cause, or the signal that killed a process of the run

    @property
    def exit_code(self) -> ExitCode:
        return EXIT_CODE_BY_CATEGORY[self.category]


class StartupError(WorkerError):
    category = Category.STARTUP


class SpecError(StartupError):
    """Every fault of a document, one per line of the message."""

    def __init__(self, source: str, faults: Sequence[str]) -> None:
        self.source = source
        self.faults = list(faults)  # those of the job's fields are Faults, which have their data
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        super().__init__("\n".join([f"{source}: {count}", *(f"  - {fault}" for fault in faults)]))


class PluginError(StartupError):
    pass


class PluginNotFoundError(PluginError):
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
    """A stop was requested. The notes say what was saved."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of a traceback."""
        return [f"{type(self).__name__}: {self}", *getattr(self, "__notes__", ())]


class TrainingCanceled(_Stop):
    category = Category.CANCELLED


class TrainingTimeout(_Stop):
    category = Category.TIMEOUT
