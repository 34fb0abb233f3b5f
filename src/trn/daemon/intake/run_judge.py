"""RunJudge: may a run be queued? Every fault at once, whoever asks: fields, machine, code, places for log lines."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from gen_worker.contract.job.rules import name_runner
from gen_worker.contract.redaction import looks_secret, strip_url_secrets
from trn.core.errors import InvalidRequestError
from trn.core.home import Home
from trn.core.log_targets import find_file_fault, find_folder_fault
from trn.core.settings import Settings
from trn.core.snapshots import SnapshotStore
from trn.core.training_variables import fingerprint, matters
from trn.core.workers_variables import DEVICE_VARIABLES, without_workers_variables
from trn.daemon.dispatch.worker_plan import WorkerFiles
from trn.daemon.intake.import_checks import ImportChecks
from trn.daemon.intake.run_identity import RunIdentity
from trn.daemon.intake.submission import Submission, make_run_id, read_config, read_submission
from trn.daemon.machine.devices import Inventory
from trn.proto.records import EnvDifference
from trn.registry.base import NewRun, ReadableRegistry

MAX_VALUE = 200  # characters of a variable that a caller is shown


class Planner(Protocol):
    def plan(self, new: NewRun) -> WorkerFiles: ...
    def worker_environ(self) -> Mapping[str, str]: ...


class DeviceInventory(Protocol):
    @property
    def inventory(self) -> Inventory: ...


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """A run that may be queued. `by_name`: data that was compared by its name alone, for people."""

    run: NewRun
    notes: tuple[str, ...] = ()
    by_name: tuple[str, ...] = ()


class RunJudge:
    """One for a daemon. Queues nothing, writes nothing."""

    def __init__(
        self,
        *,
        registry: ReadableRegistry,
        dispatcher: Planner,
        imports: ImportChecks,
        devices: DeviceInventory,
        home: Home,
        settings: Settings,
    ) -> None:
        self._registry = registry
        self._identity = RunIdentity()
        self._dispatcher = dispatcher
        self._imports = imports
        self._devices = devices
        self._home = home
        self._settings = settings

    async def judge(self, submission: Submission, *, is_new: Callable[[str], Awaitable[bool]]) -> Judged:
        """The run to queue, and what is worth knowing of it. InvalidRequestError with every fault.

        With `is_import_tried` its code is loaded, unless its digest is that of a run that answers: `is_new` says so.
        """
        log_faults = await self._find_log_faults(submission)
        try:
            new = self.read(submission)
        except InvalidRequestError as fault:
            refused = (
                await self._with_import_faults(fault, submission) if submission.is_import_tried else fault
            )
            raise with_faults(refused, log_faults) from fault
        if new.snapshot:
            await asyncio.to_thread(SnapshotStore(self._home.snapshots).manifest, new.snapshot)
        new, by_name = await self._identify(new, submission)
        notes: list[str] = []
        if await is_new(new.digest) and submission.is_import_tried:
            try:
                notes = await self._check_imports(new, submission)
            except InvalidRequestError as fault:
                raise with_faults(fault, log_faults) from fault
        if log_faults:
            raise InvalidRequestError("the run's lines could not be written", log_faults)
        return Judged(run=new, notes=(*notes, *_say_recorded(new)), by_name=by_name)

    async def _identify(self, new: NewRun, submission: Submission) -> tuple[NewRun, tuple[str, ...]]:
        """The run with its family and its digest, and what of its data was compared by its name."""
        is_named, family = "run_id" in new.config, new.run_id
        known = self._registry.family_of(family)
        while known and not is_named and not submission.family:
            family = make_run_id(new.config)  # it was drawn, and is taken: another one is
            known = self._registry.family_of(family)
        family = known or family
        new = msgspec.structs.replace(new, run_id=family)
        found = await self._identity.find(
            new, code_identity=submission.code_identity, family=family if is_named else ""
        )
        return msgspec.structs.replace(new, digest=found.digest), found.by_name

    def find_differences(self, new: NewRun, submission: Submission) -> list[EnvDifference]:
        """Variables that the worker will not have as the caller has them, where the caller told its own."""
        if not submission.caller_salt:
            return []
        decided = {*self._dispatcher.plan(with_id(new, new.run_id)).plan.env, *submission.secret_env}
        resources = new.config.get("resources") or {}
        is_chosen = resources.get("devices") is not None or resources.get("gpus") is not None
        if self._devices.inventory.devices and not is_chosen:  # the caller may mean to choose by these
            decided -= set(DEVICE_VARIABLES) & set(submission.caller_env)
        else:
            decided |= set(DEVICE_VARIABLES)
        inherited = self._dispatcher.worker_environ()
        return find_differences(submission.caller_env, submission.caller_salt, inherited, decided=decided)

    async def _check_imports(self, new: NewRun, submission: Submission) -> list[str]:
        new = with_id(new, new.run_id)
        plan = self._dispatcher.plan(new).plan
        return await self._imports.check_imports(
            plan, new.config, snapshot=new.snapshot, secret_env=submission.secret_env
        )

    async def _with_import_faults(
        self, refused: InvalidRequestError, submission: Submission
    ) -> InvalidRequestError:
        """A refusal, and what is wrong with the code besides: of a job that is otherwise beyond reproach."""
        try:
            config = name_runner(
                read_config(submission.config_json, max_config_bytes=self._settings.max_config_bytes)
            )
            named: dict[str, Any] = {
                name: config[name] for name in ("trainer", "callbacks", "env") if name in config
            }
            if isinstance(config.get("hyperparams"), dict):  # the class may have its own say about them
                named["hyperparams"] = config["hyperparams"]
            bare = msgspec.json.encode({**named, "mock_batches": [0], "resources": {"devices": ["cpu"]}})
            new = self.read(msgspec.structs.replace(submission, config_json=bare, priority=0))
        except InvalidRequestError:
            return refused
        try:
            await self._check_imports(new, submission)
        except InvalidRequestError as further:
            return with_faults(refused, further.faults)
        return refused

    async def _find_log_faults(self, submission: Submission) -> list[str]:
        """Where the run's lines could not be written, by us."""
        if not submission.log_dir and not submission.event_log:
            return []
        faults = []
        for name, path, find in (
            ("log_dir", submission.log_dir, find_folder_fault),
            ("event_log", submission.event_log, find_file_fault),
        ):
            if path.startswith("/") and "\0" not in path:  # anything else is a fault of its own
                fault = await asyncio.to_thread(find, Path(path), self._home)
                faults += [f"{name}: {path}: {fault}"] if fault else []
        return faults

    def read(self, submission: Submission) -> NewRun:
        """By what was submission alone. InvalidRequestError, InfeasibleError."""
        return read_submission(
            submission,
            inventory=self._devices.inventory,
            max_config_bytes=self._settings.max_config_bytes,
        )


def with_id(new: NewRun, run_id: str) -> NewRun:
    """The run as it would be under that id."""
    return msgspec.structs.replace(new, run_id=run_id, config={**new.config, "run_id": run_id})


def _say_recorded(new: NewRun) -> list[str]:
    """The job's own `env` is part of what was submission for, and so of the record; that must not be a surprise."""
    names = [name for name in new.config.get("env", {}) if looks_secret(name)]
    return [
        f"env.{name} of the job looks like a secret and is recorded with the run: take it out of the job, and pass it"
        f" with --env {name}"
        for name in names
    ]


def with_faults(refused: InvalidRequestError, further: list[str]) -> InvalidRequestError:
    """The same refusal with more faults."""
    return type(refused)(str(refused).partition("\n")[0], [*refused.faults, *further]) if further else refused


def find_differences(
    caller: Mapping[str, str], salt: str, inherited: Mapping[str, str], *, decided: Collection[str]
) -> list[EnvDifference]:
    """`caller` are fingerprints of values, by name; `decided` are the names that this run sets itself."""
    worker = without_workers_variables(inherited)
    differences = []
    for name in sorted({*caller, *worker}):
        if name in decided or not matters(name):
            continue
        value = worker.get(name)
        if value is not None and caller.get(name) == fingerprint(value, salt):
            continue
        is_told = value is not None and not looks_secret(name)
        differences.append(
            EnvDifference(
                name=name,
                is_in_caller=name in caller,
                is_in_worker=value is not None,
                worker_value=strip_url_secrets(value or "")[:MAX_VALUE] if is_told else "",
            )
        )
    return differences
