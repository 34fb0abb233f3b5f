"""RunJudge: may a run be queued? Checks fields, machine, data, disk, code and log paths, and finds every fault at once."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from gen_worker.contract.job.rules import name_runner
from gen_worker.contract.redaction import looks_secret, strip_url_secrets
from gen_worker.errors import Fault
from trn.core.errors import InvalidRequestError
from trn.core.home import Home
from trn.core.runs import SERVER
from trn.core.settings import Settings
from trn.core.snapshots import SnapshotStore
from trn.core.variables import DEVICE_VARIABLES, fingerprint, matters, without_workers_variables
from trn.daemon.dispatch.worker_plan import WorkerFiles
from trn.daemon.intake.data_check import find_data_faults
from trn.daemon.intake.disk_check import Room, check_room
from trn.daemon.intake.import_checks import ImportChecks
from trn.daemon.intake.log_targets import find_file_fault, find_folder_fault
from trn.daemon.intake.run_identity import RunIdentity
from trn.daemon.intake.submission import Submission, read_config, read_submission
from trn.daemon.machine.devices import Inventory
from trn.proto.records import EnvDifference
from trn.registry.base import NewRun, ReadableRegistry

DATA = ("dataset", "inputs", "mock_batches")  # one of these says what a job trains on
MAX_VALUE = 200  # characters of a variable that a caller is shown


class Planner(Protocol):
    def plan(self, new: NewRun) -> WorkerFiles: ...
    def worker_environ(self, pool: str) -> Mapping[str, str]: ...


class DeviceInventory(Protocol):
    @property
    def inventory(self) -> Inventory: ...


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """A run that may be queued. `by_name`: data that is compared by name only."""

    run: NewRun
    is_id_drawn: bool  # its id was not asked for
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

    async def judge(
        self,
        submission: Submission,
        *,
        is_new: Callable[[str], Awaitable[bool]],
    ) -> Judged:
        """The run to queue, and notes about it. InvalidRequestError with every fault.

        With `is_import_tried` its data, disk and code are checked too, in a dry run data and disk; but not where a
        run with this digest answers: `is_new` says so.
        """
        faults = await self._find_log_faults(submission)
        try:
            new = self.read(submission)
        except InvalidRequestError as refusal:
            bare = self._read_sound_part(refusal, submission)
            if bare is not None:
                faults += (await self._look(bare, submission))[0]
            known = set(refusal.faults)
            further = [fault for fault in faults if fault not in known]
            raise type(refusal)(refusal.reason, [*refusal.faults, *further]) from refusal
        if new.snapshot:
            await asyncio.to_thread(SnapshotStore(self._home.snapshots).manifest, new.snapshot)
        is_named = "run_id" in new.config
        new, by_name = await self._identify(new, submission, is_named=is_named)
        notes: list[str] = []
        if (submission.is_import_tried or submission.is_dry_run) and await is_new(new.digest):
            found, notes = await self._look(new, submission)
            faults += found
        if faults:
            raise InvalidRequestError("the job is not valid", faults)
        return Judged(
            run=new,
            is_id_drawn=not is_named and not submission.family,
            notes=(*notes, *_say_recorded(new)),
            by_name=by_name,
        )

    async def _look(self, new: NewRun, submission: Submission) -> tuple[list[Fault], list[str]]:
        """(faults, notes) of what the run names: files, room for checkpoints, code."""
        faults: list[Fault] = []
        notes: list[str] = []
        if submission.is_import_tried or submission.is_dry_run:
            faults, room = await asyncio.to_thread(self._look_at_files, new)
            faults += room.faults
            notes += room.warnings
        if (
            submission.is_import_tried and new.kind != SERVER
        ):  # which starts at once, and says itself what is wrong
            new = with_id(new, new.run_id)
            found, warnings = await self._imports.find_faults(
                self._dispatcher.plan(new).plan,
                new.config,
                pool=new.needs.pool,
                snapshot=new.snapshot,
                secret_env=submission.secret_env,
            )
            faults += found
            notes += warnings
        return faults, notes

    def _look_at_files(self, new: NewRun) -> tuple[list[Fault], Room]:
        faults = list(find_data_faults(new.config, new.base_dir))
        least = self._settings.min_free_bytes
        return faults, check_room(new.config, Path(new.base_dir or "/"), self._home, min_free_bytes=least)

    async def _identify(
        self, new: NewRun, submission: Submission, *, is_named: bool
    ) -> tuple[NewRun, tuple[str, ...]]:
        """The run with its family and digest, and which of its data is compared by name only."""
        if is_named or submission.family:
            family = self._registry.family_of(new.run_id) or new.run_id
            new = msgspec.structs.replace(new, run_id=family)
        found = await self._identity.find(
            new, code_identity=submission.code_identity, family=new.run_id if is_named else ""
        )
        return msgspec.structs.replace(new, digest=found.digest), found.by_name

    def find_differences(self, new: NewRun, submission: Submission) -> list[EnvDifference]:
        """Variables that the worker will not have as the caller has them, if the caller sent its own."""
        if not submission.caller_salt:
            return []
        decided = {*self._dispatcher.plan(with_id(new, new.run_id)).plan.env, *submission.secret_env}
        resources = new.config.get("resources") or {}
        is_chosen = resources.get("devices") is not None or resources.get("gpus") is not None
        is_open = new.needs.is_local and bool(self._devices.inventory.devices)
        if is_open and not is_chosen:  # the caller may mean to choose by these
            decided -= set(DEVICE_VARIABLES) & set(submission.caller_env)
        else:
            decided |= set(DEVICE_VARIABLES)
        inherited = self._dispatcher.worker_environ(new.needs.pool)
        return find_differences(submission.caller_env, submission.caller_salt, inherited, decided=decided)

    def _read_sound_part(self, refusal: InvalidRequestError, submission: Submission) -> NewRun | None:
        """The job without the fields that were refused, so that the rest is checked too. None: too little is left."""
        try:
            config = name_runner(
                read_config(submission.config_json, max_config_bytes=self._settings.max_config_bytes)
            )
            refused = {re.split(r"[.\[]", fault.path)[0] for fault in refusal.faults}
            sound = {name: value for name, value in config.items() if name not in refused}
            is_training = sound.get("mode") in (None, "trainer")
            if is_training and all(sound.get(name) is None for name in DATA):
                sound["mock_batches"] = [0]
            if is_training:
                sound.setdefault("max_steps", 1)
            if "validation" not in sound:
                sound.pop("validate_every", None)
            if "validate_every" not in sound:
                sound.pop("early_stopping", None)
            bare = msgspec.structs.replace(submission, config_json=msgspec.json.encode(sound), priority=0)
            return self.read(bare)
        except InvalidRequestError:
            return None

    async def _find_log_faults(self, submission: Submission) -> list[Fault]:
        """Log paths that the daemon cannot write to."""
        faults = []
        for name, path, find in (
            ("log_dir", submission.log_dir, find_folder_fault),
            ("event_log", submission.event_log, find_file_fault),
        ):
            if path.startswith("/") and "\0" not in path:  # anything else is a fault of its own
                fault = await asyncio.to_thread(find, Path(path), self._home)
                faults += [Fault(f"{path}: {fault}", path=name, kind="log", found=path)] if fault else []
        return faults

    def read(self, submission: Submission) -> NewRun:
        """From the submission alone. InvalidRequestError, InfeasibleError."""
        return read_submission(
            submission,
            inventory=self._devices.inventory,
            pools=self._settings.pool_names,
            max_config_bytes=self._settings.max_config_bytes,
        )


def with_id(new: NewRun, run_id: str) -> NewRun:
    """The run as it would be under that id."""
    return msgspec.structs.replace(new, run_id=run_id, config={**new.config, "run_id": run_id})


def _say_recorded(new: NewRun) -> list[str]:
    """Warn of secrets in the job's own `env`, which is recorded with the run."""
    names = [name for name in new.config.get("env", {}) if looks_secret(name)]
    return [
        f"env.{name} of the job looks like a secret and is recorded with the run: take it out of the job, and pass it"
        f" with --env {name}"
        for name in names
    ]


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
