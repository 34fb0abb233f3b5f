"""A job file, and what the command line lays over it -> the job to submit, or every fault of it at once."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trn.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from trn.core.home import Home

UNNAMED = "unnamed"
DATA = frozenset({"dataset", "validation", "test"})
_REF = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")  # s3:…, https:…: fetched by the worker
_TRAINER_REF = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
TEXTS = ("tags", "env")  # their values are text, also where they look like numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What the options of a command change in a job."""

    profile: str | None = None
    assignments: Sequence[str] = ()
    name: str | None = None
    weights: Path | None = None
    devices: str | None = None
    device_count: int | None = None
    is_cpu_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job, and what is wrong with it as far as it can be told here: the daemon has the last word."""

    path: Path
    config: dict[str, Any]
    warnings: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()

    @property
    def base_dir(self) -> Path:
        return self.path.parent

    def require_sound(self, *further: str) -> None:
        """InvalidRequestError with every fault, and those that somebody else found."""
        faults = list(dict.fromkeys((*self.faults, *further)))
        if faults:
            what = f"the job of {self.path.name}" if is_trainer_ref(self.path) else str(self.path)
            raise InvalidRequestError(f"{what} is not valid", faults)


def read_job(path: Path, changes: Changes, *, home: "Home | None" = None) -> Job:
    """Read, change and judge a job: a file, or `module:Symbol` where there is no such file.

    InvalidRequestError where it is no job at all. Its data must be there, and in `home` room for its checkpoints.
    """
    from gen_worker.contract.documents import read_document
    from gen_worker.contract.job.rules import apply_profile, name_runner
    from gen_worker.errors import SpecError

    path = path.absolute()
    try:
        document = {"trainer": path.name} if is_trainer_ref(path) else read_document(path)
        if changes.profile is not None:
            document = apply_profile(document, changes.profile, source=str(path))
    except SpecError as fault:
        raise InvalidRequestError(f"{path} is not valid", fault.faults) from fault
    if not isinstance(document, dict):
        raise InvalidRequestError(f"{path} is not valid", ["it holds no object with the fields of a job"])
    config = dict(document)
    faults = [*_apply(config, changes)]
    config = name_runner(config, path=path)
    faults += find_faults(config, base_dir=path.parent)
    warnings: tuple[str, ...] = ()
    if home is not None:
        from trn.cli.submitting.disk_check import check_room

        room = check_room(config, path.parent, home)
        faults += room.faults
        warnings = room.warnings
    config.pop("profiles", None)  # one was laid over, or none: the run has no use for them
    return Job(path=path, config=config, warnings=warnings, faults=tuple(faults))


def is_trainer_ref(path: Path) -> bool:
    """Whether what was given as a job is `module:Symbol`, a trainer class without a file."""
    return _TRAINER_REF.fullmatch(path.name) is not None and not _exists(path)


def find_faults(config: dict[str, Any], *, base_dir: Path) -> list[str]:
    """Every fault of a job: its fields, and the files and data it names."""
    from gen_worker.contract.job.rules import parse_job_spec
    from gen_worker.errors import SpecError

    faults = []
    try:
        parse_job_spec({"run_id": UNNAMED, **config}, source="the job")
    except SpecError as fault:
        faults += fault.faults
    if config.get("trainer") is None:
        faults.append("trainer: not given, expected the trainer class as module:symbol")
    faults += _missing_files(config, base_dir)
    if not DATA.isdisjoint(config):
        from trn.cli.submitting.dataset_check import find_dataset_faults

        faults += find_dataset_faults(config, base_dir)
    return faults


def read_assignments(assignments: Sequence[str]) -> dict[str, Any]:
    """`key=value` texts as one object, to be laid over a job."""
    overrides: dict[str, Any] = {}
    faults = [fault for text in assignments if (fault := assign(overrides, text))]
    if faults:
        raise InvalidRequestError("the changes are not valid", faults)
    return overrides


def assign(document: dict[str, Any], text: str) -> str | None:
    """Set `a.b=value` in place; the value is JSON, else text. The fault where it cannot be."""
    from gen_worker.contract.documents import parse_value
    from gen_worker.errors import SpecError

    key, sign, value = text.partition("=")
    names = key.strip().split(".")
    if not sign or not all(names):
        return f"--set {text}: expected key=value, for example --set hyperparams.lr=0.1"
    place = document
    for depth, name in enumerate(names[:-1], start=1):
        below = place.get(name)
        if below is not None and not isinstance(below, dict):
            return f"--set {text}: {'.'.join(names[:depth])} is {below!r}, which has no fields"
        place[name] = dict(below or {})  # what it was read from is not ours to change
        place = place[name]
    is_text = names[0] in TEXTS and len(names) > 1 and value != "null"
    try:
        place[names[-1]] = value if is_text else parse_value(value, source=key)
    except SpecError as fault:
        return f"--set {text}: {'; '.join(words.removeprefix('(document): ') for words in fault.faults)}"
    return None


def _apply(config: dict[str, Any], changes: Changes) -> Iterator[str]:
    """Change the config in place; the faults of what cannot be."""
    for text in changes.assignments:
        if fault := assign(config, text):
            yield fault
    if changes.name is not None:
        config["name"] = changes.name
    if changes.weights is not None:
        config["weights"] = str(changes.weights.absolute())
    yield from _apply_devices(config, changes)


def _apply_devices(config: dict[str, Any], changes: Changes) -> Iterator[str]:
    given = [
        option
        for option, value in (
            ("--devices", changes.devices),
            ("--device-count", changes.device_count),
            ("--cpu-only", changes.is_cpu_only or None),
        )
        if value is not None
    ]
    if len(given) > 1:
        yield f"{' and '.join(given)} exclude each other: give one"
    resources = config.get("resources")
    if not given or not isinstance(resources, dict | None):
        return
    chosen: dict[str, Any] = {}
    if changes.is_cpu_only:
        chosen["devices"] = ["cpu"]
    elif changes.devices is not None:
        chosen["devices"] = [name.strip() for name in changes.devices.split(",") if name.strip()]
        if not chosen["devices"]:
            yield f"--devices {changes.devices!r}: names no device, expected for example cuda:0,cuda:1"
    else:
        chosen["gpus"] = changes.device_count
    kept = {name: value for name, value in (resources or {}).items() if name not in ("devices", "gpus")}
    config["resources"] = {**kept, **chosen}


def _missing_files(config: Mapping[str, Any], base_dir: Path) -> Iterator[str]:
    for field in ("weights", "resume_checkpoint_path"):
        path = config.get(field)
        if not isinstance(path, str) or not path or _REF.match(path):
            continue
        if not _exists(base_dir / path):
            yield f"{field}: there is no {base_dir / path}"
        elif field != "weights" and (base_dir / path).is_dir():  # a class may read a folder of weights
            yield f"{field}: {base_dir / path} is a folder, expected the .meta.json of a checkpoint"


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False
