"""A job file and the options that change it -> the job to submit, or every fault of its fields at once."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gen_worker.errors import Fault
from trn.core.errors import InvalidRequestError

UNNAMED = "unnamed"
SUFFIXES = (".yaml", ".yml", ".json", ".toml")
_TRAINER_REF = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
TEXTS = ("tags", "env")  # their values are text, even if they look like numbers


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
    """A job and the faults of its fields. Everything else is checked by the daemon."""

    path: Path
    config: dict[str, Any]
    faults: tuple[Fault, ...] = ()

    @property
    def base_dir(self) -> Path:
        return self.path.parent

    def require_sound(self, *further: Fault) -> None:
        """InvalidRequestError with every fault, and with those that were found elsewhere."""
        faults = list(dict.fromkeys((*self.faults, *further)))
        if faults:
            what = f"the job of {self.path.name}" if is_trainer_ref(self.path) else str(self.path)
            raise InvalidRequestError(f"{what} is not valid", faults)


def _hint(path: Path) -> str:
    """The job file that is meant, or how to name a class."""
    beside = [path.with_name(f"{path.name}{suffix}") for suffix in SUFFIXES]
    near = next((file.name for file in beside if file.is_file()), "")
    if not near and path.suffix and path.parent.is_dir():
        jobs = [file.name for file in path.parent.iterdir() if file.suffix in SUFFIXES]
        near = next(iter(difflib.get_close_matches(path.name, jobs, n=1)), "")
    if near:
        return f": did you mean {near}?"
    return "; a trainer class is named as module:Symbol" if not path.suffix else ""


def read_job(path: Path, changes: Changes) -> Job:
    """Read and change a job: a file, or `module:Symbol` where there is no such file.

    InvalidRequestError where it cannot be read as a job.
    """
    from gen_worker.contract.documents import read_document
    from gen_worker.contract.job.rules import apply_profile, name_runner
    from gen_worker.errors import SpecError

    path = path.absolute()
    if not is_trainer_ref(path) and not path.exists():
        raise InvalidRequestError(f"there is no job file {path}{_hint(path)}")
    if path.suffix == ".py":
        raise InvalidRequestError(
            f"{path.name} is code, not a job: `trn run {path.stem}:SYMBOL --set …` trains its class"
        )
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
    faults += find_field_faults(config)
    config.pop("profiles", None)  # one was applied, or none: the run does not use them
    return Job(path=path, config=config, faults=tuple(faults))


def is_trainer_ref(path: Path) -> bool:
    """Whether the job is `module:Symbol`, a trainer class without a file."""
    return _TRAINER_REF.fullmatch(path.name) is not None and not _exists(path)


def find_field_faults(config: dict[str, Any]) -> list[Fault]:
    """Every fault of a job's fields, found by the parser that the daemon and the worker use."""
    from gen_worker.contract.job.rules import parse_job_spec
    from gen_worker.errors import SpecError

    faults: list[Fault] = []
    try:
        parse_job_spec({"run_id": UNNAMED, **config}, source="the job")
    except SpecError as fault:
        faults += map(Fault.of, fault.faults)
    if config.get("trainer") is None and config.get("mode") != "inference":  # else that of its checkpoint
        message = "not given, expected the trainer class as module:symbol"
        faults.append(Fault(message, path="trainer", kind="missing", expected="module:symbol"))
    return faults


def read_assignments(assignments: Sequence[str]) -> dict[str, Any]:
    """`key=value` texts as one object, to be merged into a job."""
    overrides: dict[str, Any] = {}
    faults = [fault for text in assignments if (fault := assign(overrides, text))]
    if faults:
        raise InvalidRequestError("the changes are not valid", faults)
    return overrides


def assign(document: dict[str, Any], text: str) -> Fault | None:
    """Set `a.b=value` in place; the value is JSON, else text. Returns the fault, if there is one."""
    from gen_worker.contract.documents import parse_value
    from gen_worker.errors import SpecError

    key, sign, value = text.partition("=")
    names = key.strip().split(".")
    if not sign or not all(names):
        return _option_fault(f"--set {text}", "expected key=value, for example --set hyperparams.lr=0.1")
    place = document
    for depth, name in enumerate(names[:-1], start=1):
        below = place.get(name)
        if below is not None and not isinstance(below, dict):
            return _option_fault(
                f"--set {text}", f"{'.'.join(names[:depth])} is {below!r}, which has no fields"
            )
        place[name] = dict(below or {})  # a copy: the document that was read is not changed
        place = place[name]
    is_text = names[0] in TEXTS and len(names) > 1 and value != "null"
    try:
        place[names[-1]] = value if is_text else parse_value(value, source=key)
    except SpecError as fault:
        words = "; ".join(found.removeprefix("(document): ") for found in fault.faults)
        return _option_fault(f"--set {text}", words)
    return None


def find_doubled(assignments: Sequence[str], options: Mapping[str, str]) -> Iterator[Fault]:
    """Fields that `--set` gives beside their own option, of which one would be ignored. `options`: field -> option."""
    for text in assignments:
        given: dict[str, Any] = {}
        if assign(given, text):
            continue  # another fault
        for field, option in options.items():
            value: Any = given
            for name in field.split("."):
                value = value.get(name) if isinstance(value, dict) else None
            if value is not None:
                yield _option_fault(
                    f"--set {text}", f"`{field}` is given by {option}, too: give one of the two"
                )


def _option_fault(option: str, message: str) -> Fault:
    return Fault(message, path=option, kind="option")


def _apply(config: dict[str, Any], changes: Changes) -> Iterator[Fault]:
    """Change the config in place; yields the faults."""
    for text in changes.assignments:
        if fault := assign(config, text):
            yield fault
    options = {"name": changes.name, "weights": changes.weights}
    given = {name: f"--{name}" for name, value in options.items() if value is not None}
    for option in _device_options(changes):
        given |= {"resources.devices": option, "resources.gpus": option}
    yield from find_doubled(changes.assignments, given)
    if changes.name is not None:
        config["name"] = changes.name
    if changes.weights is not None:
        config["weights"] = str(changes.weights.absolute())
    yield from apply_devices(config, changes)


def apply_devices(config: dict[str, Any], changes: Changes) -> Iterator[Fault]:
    given = _device_options(changes)
    if len(given) > 1:
        yield Fault(f"{' and '.join(given)} exclude each other: give one", kind="option")
    resources = config.get("resources")
    if not given or not isinstance(resources, dict | None):
        return
    chosen: dict[str, Any] = {}
    if changes.is_cpu_only:
        chosen["devices"] = ["cpu"]
    elif changes.devices is not None:
        chosen["devices"] = [name.strip() for name in changes.devices.split(",") if name.strip()]
        if not chosen["devices"]:
            yield _option_fault(
                f"--devices {changes.devices!r}", "names no device, expected for example cuda:0,cuda:1"
            )
    else:
        chosen["gpus"] = changes.device_count
    kept = {name: value for name, value in (resources or {}).items() if name not in ("devices", "gpus")}
    config["resources"] = {**kept, **chosen}


def _device_options(changes: Changes) -> list[str]:
    options = (
        ("--devices", changes.devices),
        ("--device-count", changes.device_count),
        ("--cpu-only", changes.is_cpu_only or None),
    )
    return [option for option, value in options if value is not None]


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False
